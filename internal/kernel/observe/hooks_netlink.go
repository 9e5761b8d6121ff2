// SPDX-License-Identifier: Apache-2.0

package observe

// This file asks the kernel for its netfilter hooks by netlink (nfnetlink_hook),
// for where no program may run. Constants are those of linux/netfilter/nfnetlink_hook.h.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

const (
	nfnlSubsysHook  = 12
	nfnlaHookNum    = 1
	nfnlaHookPrio   = 2
	nfnlaHookDev    = 3
	nfnlaHookFunc   = 4
	nfnlaHookChain  = 6
	nfnlaInfoDesc   = 1
	nfnlaInfoType   = 2
	nfnlaChainTable = 1
	nfnlaChainName  = 3
)

// netlinkHooks lists the hooks of a namespace; see Hooks.
func netlinkHooks(ns *netns.Handle) (hooks []snapshot.Hook, err error) {
	hooks = []snapshot.Hook{}
	err = ns.Do(func() error {
		conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return fmt.Errorf("list netfilter hooks by netlink: %w", err)
		}
		defer conn.Close()
		devices, err := net.Interfaces()
		if err != nil {
			return fmt.Errorf("list interfaces: %w", err)
		}
		type list struct {
			family uint8
			hook   uint32
			device string
		}
		var lists []list
		for family, names := range map[uint8][]string{
			unix.NFPROTO_IPV4: ipHookNames[:5], unix.NFPROTO_IPV6: ipHookNames[:5],
			unix.NFPROTO_BRIDGE: ipHookNames[:5], unix.NFPROTO_ARP: arpHookNames,
		} {
			for hook := range names {
				lists = append(lists, list{family, uint32(hook), ""})
			}
		}
		for _, dev := range devices {
			for hook := range netdevHookNames {
				lists = append(lists, list{unix.NFPROTO_NETDEV, uint32(hook), dev.Name})
			}
		}
		for _, l := range lists {
			messages, err := conn.Execute(hookRequest(l.family, l.hook, l.device))
			switch {
			case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENODEV):
				continue // no such list in this kernel, or the device has just gone
			case errors.Is(err, unix.EINVAL):
				return &unavailableError{"list netfilter hooks by netlink",
					"the kernel has no nfnetlink_hook (CONFIG_NETFILTER_NETLINK_HOOK)", err}
			case errors.Is(err, unix.EPERM):
				return &unavailableError{"list netfilter hooks by netlink", "it needs the capability CAP_NET_ADMIN", err}
			case err != nil:
				return fmt.Errorf("list netfilter hooks by netlink: %w", err)
			}
			for _, m := range messages {
				h, err := parseHook(m.Data, l.family, l.hook, l.device)
				if err != nil {
					return fmt.Errorf("list netfilter hooks by netlink: %w", err)
				}
				hooks = append(hooks, h)
			}
		}
		return nil
	})
	return hooks, err
}

// hookRequest asks for all functions on one hook.
func hookRequest(family uint8, hook uint32, device string) netlink.Message {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.Uint32(nfnlaHookNum, hook)
	if device != "" {
		ae.String(nfnlaHookDev, device)
	}
	attrs, err := ae.Encode()
	if err != nil {
		panic(err) // a number and an interface's name always fit
	}
	return netlink.Message{
		Header: netlink.Header{Type: nfnlSubsysHook << 8, Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{family, 0, 0, 0}, attrs...), // struct nfgenmsg
	}
}

// parseHook reads one answer: struct nfgenmsg, then attributes.
func parseHook(data []byte, family uint8, hook uint32, device string) (snapshot.Hook, error) {
	h := snapshot.Hook{Family: familyName(family), Hook: hookName(family, hook), Device: device}
	if len(data) < 4 {
		return h, fmt.Errorf("answer of %d bytes", len(data))
	}
	ad, err := netlink.NewAttributeDecoder(data[4:])
	if err != nil {
		return h, err
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		switch ad.Type() {
		case nfnlaHookPrio:
			h.Priority = int(int32(ad.Uint32()))
		case nfnlaHookFunc:
			h.Function = ad.String()
		case nfnlaHookChain:
			ad.Nested(func(ad *netlink.AttributeDecoder) error { return parseChainInfo(ad, &h) })
		}
	}
	if strings.HasPrefix(h.Function, "nf_flow_offload") {
		h.Owner = "flowtable"
	}
	return h, ad.Err()
}

// parseChainInfo reads whose function it is, and the chain it evaluates.
func parseChainInfo(ad *netlink.AttributeDecoder, h *snapshot.Hook) error {
	for ad.Next() {
		switch ad.Type() {
		case nfnlaInfoType:
			switch ad.Uint32() {
			case hookOpNFTables:
				h.Owner = "nf_tables"
			case hookOpBPF:
				h.Owner = "bpf"
			case hookOpFlowtable:
				h.Owner = "flowtable"
			}
		case nfnlaInfoDesc:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				var table, chain string
				for ad.Next() {
					switch ad.Type() {
					case nfnlaChainTable:
						table = ad.String()
					case nfnlaChainName:
						chain = ad.String()
					}
				}
				if table != "" {
					h.Chain = table + "/" + chain
				}
				return ad.Err()
			})
		}
	}
	return ad.Err()
}
