// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"
)

// Router is one way from the left of a Testbed to its right. Sources are translated
// to the router's outside address, except by routers without NAT.
type Router interface {
	Name() string
	Describe() string // one line: what it is made of
	// NAT says whether packets come out translated.
	NAT() bool
	// Install makes the router in the testbed, which then is for routers of this name
	// alone: what some register the kernel does not let go. It returns an
	// *UnsupportedError when this kernel or machine can't. Its rules are gone after
	// an error, and after the function that it returns.
	Install(ctx context.Context, testbed *Testbed, o RouterOptions) (remove func() error, err error)
}

// TableKeeper is a Router whose sessions are in a table of its own, and not in the
// kernel's connection tracking.
type TableKeeper interface {
	Router
	// Table tells of the table of the router in the testbed, once it is installed.
	Table(testbed *Testbed) Table
}

// Learner is a Router that takes flows over only after it has seen their packets go
// both ways for a while.
type Learner interface {
	Router
	// Learns is for how long a load must last until flows of some packets a second
	// each are taken over.
	Learns() time.Duration
}

// Table is a router's own table of sessions.
type Table interface {
	// Sessions counts those in it, and tells how many there can be.
	Sessions() (count, limit uint64, err error)
	// SessionBytes is the kernel memory that a session takes when the table is full,
	// everything included.
	SessionBytes() (bytes float64, err error)
	// Empty ends all sessions.
	Empty(ctx context.Context) error
}

// RouterOptions is what a measurement varies about a router.
type RouterOptions struct {
	Rules int // that match nothing, before the one that matches
	// Sessions are how many it must have room for: with more than an address has ports
	// it gets several addresses. 0: as many as a measurement needs that says nothing.
	Sessions int
	// Block is how many ports a block has, of a router that gives ports in blocks.
	Block int
	// UDPTimeout of a table of the router's own; 0: its default. Connection tracking's
	// is the testbed's.
	UDPTimeout time.Duration
	// Sockets: the ends are sockets of this machine, which leave checksums and
	// segmentation to the device. On veth, XDP loses both.
	Sockets bool
}

// RefuseSockets is the *UnsupportedError of a router in XDP where the ends are sockets.
func (o RouterOptions) RefuseSockets(router string) error {
	if !o.Sockets {
		return nil
	}
	return &UnsupportedError{Router: router, Reason: "XDP on veth devices loses the checksums that sockets leave to the device"}
}

// PortsOfAddress is how many ports of an outside address routers give: those from 1024 on.
const PortsOfAddress = 65536 - 1024

// HostSessions is how many sessions of a measurement come from one internal host.
const HostSessions = flowsPerSource

// UnsupportedError says that this machine can't have a router, and why.
type UnsupportedError struct {
	Router string
	Reason string
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("router %s: not on this machine: %s", e.Router, e.Reason)
}
