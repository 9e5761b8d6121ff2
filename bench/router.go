// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net/netip"

	"natkit/internal/netns"
)

// Bed is where routers are measured: three namespaces in a row, joined by two
// pairs of veth devices, with plain forwarding in the middle and no netfilter.
//
//	left ── LeftDev ═ InsideDev ── router ── OutsideDev ═ RightDev ── right
//
// The router has routes to Sources by way of the left end and to Targets by way
// of the right end, with permanent neighbours, so that frames from and to any
// address of these networks pass without ARP.
type Bed struct {
	Left, Router, Right     *netns.Handle
	LeftDev, RightDev       string // the ends'
	InsideDev               string // the router's, towards left
	OutsideDev              string // the router's, towards right
	LeftAddr, RightAddr     netip.Addr
	InsideAddr, OutsideAddr netip.Addr // the router's

	Sources netip.Prefix // 198.18.0.0/16, RFC 2544: hosts that the left end plays
	Targets netip.Prefix // 198.19.0.0/16: servers that the right end plays
}

// Router is one way from the left of a Bed to its right. Sources are translated
// to the router's outside address, except by routers without NAT.
type Router interface {
	Name() string
	Describe() string // one line: what it is made of
	// NAT says whether packets come out translated.
	NAT() bool
	// Install makes the router in the bed; it returns an *UnsupportedError when
	// this kernel or machine can't. Nothing of it is left after an error, or after
	// the function that it returns.
	Install(ctx context.Context, bed *Bed, o RouterOptions) (remove func() error, err error)
}

// RouterOptions is what a measurement varies about a router.
type RouterOptions struct {
	Rules int // that match nothing, before the one that matches
}

// UnsupportedError says that this machine can't have a router, and why.
type UnsupportedError struct {
	Router string
	Reason string
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("router %s: not on this machine: %s", e.Router, e.Reason)
}
