// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// maxTransaction is the size of the largest ruleset in bytes of netlink: some
// 200 000 rules.
const maxTransaction = 128 << 20

// newTransaction opens the library's connection, whose messages are sent here: all of them
// are one transaction, of which the last message alone is acknowledged, and what the library
// leaves out of a masquerade is added. It has no other caller than its tests.
func newTransaction() (*nftables.Conn, error) {
	return nftables.New(nftables.WithTestDial(func(batch []netlink.Message) ([]netlink.Message, error) {
		if batch == nil { // the library asks for acknowledgements that commit has had
			return nil, io.EOF
		}
		return nil, commit(batch)
	}))
}

// commit sends a batch, between the messages that begin and end it, and waits for the
// kernel's word: the first error, or that the last message is done.
func commit(batch []netlink.Message) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := errors.Join(c.SetWriteBuffer(maxTransaction), c.SetReadBuffer(maxTransaction)); err != nil {
		return err
	}
	last := len(batch) - 2
	for i := range batch {
		m := &batch[i]
		m.Header.Length, m.Header.Sequence, m.Header.PID = 0, 0, 0 // the other connection's
		if m.Header.Flags &^= netlink.Acknowledge | netlink.Echo; i == last {
			m.Header.Flags |= netlink.Acknowledge
		}
		if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWRULE && bytes.Contains(m.Data, []byte(masqueradeName)) {
			if m.Data, err = heedPorts(m.Data); err != nil {
				return err
			}
		}
	}
	if _, err := c.SendMessages(batch); err != nil {
		return err
	}
	for {
		replies, err := c.Receive()
		if err != nil {
			return err
		}
		for _, m := range replies { // an error that says 0
			if m.Header.Type == netlink.Error && m.Header.Sequence == batch[last].Header.Sequence {
				return nil
			}
		}
	}
}

const masqueradeName = "masq\x00"

// heedPorts adds to the masquerades of a rule's message that give ports the flag without
// which the kernel ignores them, and which the library (v0.3.0) leaves out.
func heedPorts(rule []byte) ([]byte, error) {
	const header = 4 // struct nfgenmsg
	attributes, err := inNested(rule[header:], unix.NFTA_RULE_EXPRESSIONS, func(list []byte) ([]byte, error) {
		return inNested(list, unix.NFTA_LIST_ELEM, func(expression []byte) ([]byte, error) {
			if !bytes.Contains(expression, []byte(masqueradeName)) {
				return expression, nil
			}
			return inNested(expression, unix.NFTA_EXPR_DATA, func(masquerade []byte) ([]byte, error) {
				if len(masquerade) == 0 {
					return masquerade, nil
				}
				flags, err := netlink.MarshalAttributes([]netlink.Attribute{
					{Type: unix.NFTA_MASQ_FLAGS, Data: binaryutil.BigEndian.PutUint32(unix.NF_NAT_RANGE_PROTO_SPECIFIED)}})
				return append(masquerade, flags...), err
			})
		})
	})
	return append(rule[:header:header], attributes...), err
}

// inNested gives the attributes with those of a type changed.
func inNested(attributes []byte, kind uint16, change func([]byte) ([]byte, error)) ([]byte, error) {
	list, err := netlink.UnmarshalAttributes(attributes)
	if err != nil {
		return nil, fmt.Errorf("read attributes: %w", err)
	}
	for i := range list {
		if list[i].Type&^netlink.Nested != kind {
			continue
		}
		if list[i].Data, err = change(list[i].Data); err != nil {
			return nil, err
		}
		list[i].Length = 0 // of its data
	}
	return netlink.MarshalAttributes(list)
}
