// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
)

// Router is one way from the left of a Bed to its right. Sources are translated
// to the router's outside address, except by routers without NAT.
type Router interface {
	Name() string
	Describe() string // one line: what it is made of
	// NAT says whether packets come out translated.
	NAT() bool
	// Install makes the router in the bed, which then is for routers of this name
	// alone: what some register the kernel does not let go. It returns an
	// *UnsupportedError when this kernel or machine can't. Its rules are gone after
	// an error, and after the function that it returns.
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
