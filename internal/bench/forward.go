// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Forwarder is the yardstick for routers in XDP: a FIB look-up and a redirect for
// each packet, and no NAT.
type Forwarder struct{}

// Name, Describe and NAT are a Router's.
func (Forwarder) Name() string     { return "xdp-forward" }
func (Forwarder) Describe() string { return "XDP: FIB look-up and redirect, no NAT" }
func (Forwarder) NAT() bool        { return false }

// Install attaches the program to both of the router's devices.
func (f Forwarder) Install(_ context.Context, testbed *Testbed, o RouterOptions) (remove func() error, err error) {
	if o.Rules > 0 {
		return nil, &UnsupportedError{Router: f.Name(), Reason: "it has no rules"}
	}
	if err := o.RefuseSockets(f.Name()); err != nil {
		return nil, err
	}
	var objects forwardObjects
	if err := loadForwardObjects(&objects, nil); err != nil {
		return nil, fmt.Errorf("router %s: %w", f.Name(), explainBPF(err))
	}
	var links []link.Link
	remove = func() error {
		var errs []error
		for _, l := range links {
			errs = append(errs, l.Close())
		}
		return errors.Join(append(errs, objects.Close())...)
	}
	err = testbed.Router.Do(func() error {
		for _, device := range []string{testbed.InsideDev, testbed.OutsideDev} {
			l, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			attached, err := link.AttachXDP(link.XDPOptions{
				Program: objects.Forward, Interface: l.Attrs().Index, Flags: link.XDPDriverMode,
			})
			if err != nil {
				return err
			}
			links = append(links, attached)
		}
		return nil
	})
	switch {
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, ebpf.ErrNotSupported):
		return nil, errors.Join(&UnsupportedError{Router: f.Name(), Reason: "no native XDP on veth devices"}, remove())
	case err != nil:
		return nil, errors.Join(fmt.Errorf("router %s: %w", f.Name(), explainBPF(err)), remove())
	}
	return remove, nil
}
