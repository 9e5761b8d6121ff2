// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"natkit/internal/bench"
)

// actionRouter rewrites addresses by tc's action nat, at the outside device: what
// goes out and what comes in.
type actionRouter struct{}

func (actionRouter) Name() string { return "act-nat" }
func (actionRouter) Describe() string {
	return "tc's action nat rewriting the addresses of a whole network, no netfilter, no tracking, no ports"
}
func (actionRouter) NAT() bool { return true }

func (r actionRouter) Install(_ context.Context, b *bench.Testbed, o bench.RouterOptions) (remove func() error, err error) {
	if o.Rules > 0 {
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: "it has no rules"}
	}
	var qdisc *netlink.Clsact
	remove = func() error { return b.Router.Do(func() error { return netlink.QdiscDel(qdisc) }) }
	err = b.Router.Do(func() error {
		device, err := netlink.LinkByName(b.OutsideDev)
		if err != nil {
			return err
		}
		index := device.Attrs().Index
		qdisc = &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}
		if err := netlink.QdiscAdd(qdisc); err != nil {
			qdisc = nil
			return fmt.Errorf("add clsact: %w", err)
		}
		return errors.Join(
			translateAt(index, netlink.HANDLE_MIN_EGRESS, b.Sources, statelessOutside),
			translateAt(index, netlink.HANDLE_MIN_INGRESS, statelessOutside, b.Sources))
	})
	if err == nil {
		return remove, nil
	}
	if qdisc != nil {
		err = errors.Join(err, remove())
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: "this kernel lacks tc's action nat (act_nat, cls_u32, sch_ingress)"}
	}
	return nil, fmt.Errorf("router %s: %w", r.Name(), err)
}

// Of include/uapi/linux/tc_act/tc_nat.h.
const (
	tcaNATParms = 1
	natEgress   = 1 // rewrite the source; else the destination
)

// translateAt adds a filter that matches all of IPv4 and whose one action puts the
// network to in the place of from. Package netlink knows no such action.
func translateAt(device int, hook uint32, from, to netip.Prefix) error {
	request := nl.NewNetlinkRequest(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	const priority = 1
	ipv4 := binary.NativeEndian.Uint16([]byte{unix.ETH_P_IP >> 8, unix.ETH_P_IP & 0xff})
	request.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(device), Parent: hook, Info: netlink.MakeHandle(priority, ipv4)})
	request.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("u32")))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	const terminal = 1                                                                                      // TC_U32_TERMINAL: a match ends the search
	options.AddRtAttr(nl.TCA_U32_SEL, append([]byte{terminal, 0, 1 /* key */, 15: 0}, make([]byte, 16)...)) // of which no bit must match
	action := options.AddRtAttr(nl.TCA_U32_ACT, nil).AddRtAttr(nl.TCA_ACT_TAB, nil)
	action.AddRtAttr(nl.TCA_ACT_KIND, nl.ZeroTerminated("nat"))

	var flags uint32
	if hook == netlink.HANDLE_MIN_EGRESS {
		flags = natEgress
	}
	parms := make([]byte, 20) // struct tc_gen: TC_ACT_OK, the packet goes on
	parms = append(parms, from.Addr().AsSlice()...)
	parms = append(parms, to.Addr().AsSlice()...)
	parms = append(parms, net.CIDRMask(from.Bits(), 32)...)
	parms = binary.NativeEndian.AppendUint32(parms, flags)
	action.AddRtAttr(nl.TCA_ACT_OPTIONS, nil).AddRtAttr(tcaNATParms, parms)
	request.AddData(options)
	if _, err := request.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("add filter with action nat: %w", err)
	}
	return nil
}
