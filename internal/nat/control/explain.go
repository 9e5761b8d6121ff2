// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
)

// Explain reports which rules of the file a packet meets in a namespace, and why. No
// packet is sent.
func Explain(ns *netns.Handle, file *rulefile.File, p rulefile.Packet) (steps []rulefile.Step, err error) {
	err = ns.Do(func() error {
		steps = rulefile.Explain(file, p, kernelSurroundings{})
		return nil
	})
	return steps, err
}

// kernelSurroundings asks the namespace that the calling thread is in.
type kernelSurroundings struct{}

func (kernelSurroundings) Egress(source, destination netip.Addr) string {
	options := &netlink.RouteGetOptions{SrcAddr: net.IP(source.AsSlice())}
	routes, err := netlink.RouteGetWithOptions(destination.AsSlice(), options)
	if err != nil { // the source need not be the gateway's own
		routes, err = netlink.RouteGet(destination.AsSlice())
	}
	if err != nil || len(routes) == 0 {
		return ""
	}
	l, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return ""
	}
	return l.Attrs().Name
}

func (kernelSurroundings) LinkOf(a netip.Addr) string {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return ""
	}
	for _, at := range addrs {
		if !at.IPNet.Contains(a.AsSlice()) {
			continue
		}
		if l, err := netlink.LinkByIndex(at.LinkIndex); err == nil {
			return l.Attrs().Name
		}
	}
	return ""
}

func (kernelSurroundings) IsLocal(a netip.Addr) bool {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return false
	}
	for _, at := range addrs {
		if at.IP.Equal(a.AsSlice()) {
			return true
		}
	}
	return false
}

// errNoRules is for asking about rules where there are none.
var errNoRules = errors.New("which rules? give --file, or bring an engine up")

// RulesOf is the file that was given, or the one in use.
func RulesOf(ctx context.Context, ns *netns.Handle, path string) (*rulefile.File, error) {
	if path != "" {
		return rulefile.ParseFile(ctx, path)
	}
	_, file, err := inUse(ns)
	if errors.Is(err, ErrDown) {
		return nil, errNoRules
	}
	return file, err
}
