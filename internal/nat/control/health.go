// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
)

// health is why packets are not translated as the rules in use say, nil if they are. What
// changes nothing for packets, as a file that can't be applied, is no reason.
func health(ns *netns.Handle) error {
	rec, err := readSettled(ns)
	switch {
	case err != nil:
		return err
	case !rec.Whole:
		return rec.half(ns)
	}
	file, err := rec.rules()
	if err != nil {
		return fmt.Errorf("read the rules in use: %w", err)
	}
	drift, err := readDrift(ns, file)
	if err != nil {
		return err
	}
	var reasons []string
	for _, d := range drift {
		if d.Stops {
			reasons = append(reasons, d.What)
		}
	}
	err = ns.Do(func() error {
		down, err := linksDown(file)
		reasons = append(reasons, cutOff(file, down)...)
		return err
	})
	if err == nil && len(reasons) > 0 {
		err = errors.New(strings.Join(reasons, "; "))
	}
	return err
}

// linkDown is why an interface of the rules carries no packets.
type linkDown struct{ name, why string }

func (d linkDown) String() string { return "interface " + d.name + " " + d.why }

// linksDown finds interfaces of the rules that carry no packets. The calling thread is in the
// namespace.
func linksDown(file *rulefile.File) (down []linkDown, err error) {
	for _, name := range interfacesOf(file) {
		l, err := netlink.LinkByName(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			down = append(down, linkDown{name, "is gone"})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", name, err)
		}
		have, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			return nil, fmt.Errorf("addresses of %s: %w", name, err)
		}
		switch flags := l.Attrs().RawFlags; {
		case flags&unix.IFF_UP == 0:
			down = append(down, linkDown{name, "is down"})
		case flags&unix.IFF_RUNNING == 0:
			down = append(down, linkDown{name, "has no carrier"})
		case len(have) == 0 && masqueradesBehind(file, name):
			down = append(down, linkDown{name, "has no address to masquerade behind"})
		}
	}
	return down, nil
}

// cutOff is what of it keeps packets from being translated: any outside interface, or all that
// are inside.
func cutOff(file *rulefile.File, down []linkDown) (reasons []string) {
	inside := 0
	for _, d := range down {
		if file.IsInside(d.name) {
			inside++
		}
	}
	for _, d := range down {
		if !file.IsInside(d.name) || inside == len(file.Inside) {
			reasons = append(reasons, d.String())
		}
	}
	return reasons
}

func masqueradesBehind(file *rulefile.File, name string) bool {
	return !file.IsInside(name) && slices.ContainsFunc(file.Rules, func(r rulefile.Rule) bool {
		_, is := r.Action.(rulefile.Masquerade)
		return is && (r.Out == "" || r.Out == name)
	})
}

// errUnderway says that a process that lives makes or removes the instance.
var errUnderway = errors.New("natkit is just bringing an engine or acceleration up here, or down: look again in a moment")

// half is why an instance is not whole: somebody is at it, or was killed.
func (r *record) half(ns *netns.Handle) error {
	held, err := journal.Held(instancePath(ns.Inode(), ".journal"))
	if err != nil {
		return err
	}
	if held {
		return errUnderway
	}
	return r.killed(ns)
}

// notWhole reports whether an error is one of half's.
func notWhole(err error) bool { return errors.Is(err, errHalf) || errors.Is(err, errUnderway) }

// starting is for the time before a natkit serve has adopted or brought up its NAT.
func (s *ServeState) starting() error {
	return fmt.Errorf("starting: natkit serve (process %d) is bringing up the NAT of %s", s.Process, s.File)
}
