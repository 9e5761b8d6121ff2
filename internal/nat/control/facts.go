// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// gather reads what compiling the file for engine ebpf needs to know of the namespace
// that the calling thread is in. Indices that the record has given stay as they are.
// Whether interfaces that are not there, or have no address, are waited for, or an error.
func gather(file *rulefile.File, rec *record, wait bool) (datapath.Facts, []Placement, error) {
	facts := datapath.Facts{Addresses: rec.Addresses}
	var placements []Placement
	for _, name := range interfacesOf(file) {
		l, err := netlink.LinkByName(name)
		var missing netlink.LinkNotFoundError
		if wait && errors.As(err, &missing) {
			facts.Links = append(facts.Links, datapath.Link{Name: name, Index: rec.linkIndex(name), Inside: file.IsInside(name), Outside: file.IsOutside(name), Ethernet: true, Awaited: true})
			placements = append(placements, Placement{Interface: name, Reason: "not there: it is waited for"})
			continue
		}
		if errors.As(err, &missing) {
			return facts, nil, file.AtInterface(name, "interface %q is not there", name)
		}
		if err != nil {
			return facts, nil, fmt.Errorf("interface %q: %w", name, err)
		}
		if !hasFrames(l) && !rawKinds[l.Type()] {
			return facts, nil, file.AtInterface(name, "interface %q (%s): %v; use --engine nft", name, l.Type(), errFrames)
		}
		if err := errors.Join(refusePort(l), refuseIPVLAN(l, file.IsInside(name))); err != nil {
			return facts, nil, err
		}
		p := place(l, rec.Attach)
		if foreign := foreignXDP(l); p.XDP && foreign != "" {
			if rec.Attach == AttachXDP {
				return facts, nil, file.AtInterface(name, "interface %q has the XDP program %q of somebody else, and can have one only: take that off, or use --attach tc", name, foreign)
			}
			p.XDP, p.Reason = false, fmt.Sprintf("tc: the XDP program %q of somebody else is there", foreign)
		}
		link, err := describe(l, p)
		if err != nil {
			return facts, nil, err
		}
		link.Index, link.Inside, link.Outside = rec.linkIndex(name), file.IsInside(name), file.IsOutside(name)
		link.Awaited = wait && len(link.Addresses) == 0
		facts.Links = append(facts.Links, link)
		placements = append(placements, p)
	}
	var err error
	if facts.Local, err = localAddresses(); err != nil {
		return facts, nil, err
	}
	for i := range facts.Links {
		remember(&facts, &facts.Links[i])
	}
	facts.LocalPorts, facts.ReservedPorts, err = localPorts()
	return facts, placements, err
}

// overlaps names networks that are inside and outside both (RFC 4787 REQ-7): an address
// that a lease brings may make one. The calling thread is in the namespace.
func overlaps(file *rulefile.File) (found []string, err error) {
	networks := func(names []string) (out []*net.IPNet) {
		for _, name := range names {
			l, missing := netlink.LinkByName(name)
			if missing != nil {
				continue
			}
			addrs, failed := netlink.AddrList(l, netlink.FAMILY_V4)
			if failed != nil {
				err = errors.Join(err, fmt.Errorf("addresses of %q: %w", name, failed))
			}
			for _, a := range addrs {
				if ones, _ := a.Mask.Size(); ones < 32 {
					out = append(out, &net.IPNet{IP: a.IP.Mask(a.Mask), Mask: a.Mask})
				}
			}
		}
		return out
	}
	twoArmed := func(names []string) []string {
		return slices.DeleteFunc(slices.Clone(names), file.IsOneArmed)
	}
	outside := networks(twoArmed(file.Outside))
	for _, in := range networks(twoArmed(file.Inside)) {
		for _, out := range outside {
			if in.Contains(out.IP) || out.Contains(in.IP) {
				found = append(found, fmt.Sprintf("the network %s is inside and %s outside: of addresses in both, one side's hosts can't be reached", in, out))
			}
		}
	}
	return found, err
}

// refuseAlternatives refuses interfaces by an alternative name: the kernel finds them by it, but
// nftables, and what it reports of them, has their own. The calling thread is in the namespace.
func refuseAlternatives(file *rulefile.File) error {
	for _, name := range interfacesOf(file) {
		if l, err := netlink.LinkByName(name); err == nil && l.Attrs().Name != name {
			return file.AtInterface(name, "%v", alternativeName(name, l))
		}
	}
	return nil
}

func alternativeName(name string, l netlink.Link) error {
	return fmt.Errorf("%q is an alternative name of interface %q: use that", name, l.Attrs().Name)
}

// refusePort refuses an interface whose packets are another's: the engine would meet them
// before that does, with routes that lead elsewhere, and drop them as spoofed.
func refusePort(l netlink.Link) error {
	if l.Attrs().MasterIndex == 0 {
		return nil
	}
	master, err := netlink.LinkByIndex(l.Attrs().MasterIndex)
	if err != nil {
		return fmt.Errorf("interface that %q is a port of: %w", l.Attrs().Name, err)
	}
	switch kind := master.Type(); kind {
	case "bridge", "bond", "team", "openvswitch":
		return fmt.Errorf("interface %q is a port of the %s %q, which has its packets: name that", l.Attrs().Name, kind, master.Attrs().Name)
	}
	return nil
}

// refuseIPVLAN refuses an inside interface that never has what hosts send to others: the
// kernel gives an ipvlan what is for its own addresses, and all else to the interface
// below, from where it would go on untranslated.
func refuseIPVLAN(l netlink.Link, inside bool) error {
	if l.Type() != "ipvlan" || !inside {
		return nil
	}
	return fmt.Errorf("interface %q is an ipvlan: what internal hosts send to others does not come in there, but at the interface below it; name that, or use a macvlan", l.Attrs().Name)
}

// interfacesOf are the interfaces that a file names.
func interfacesOf(file *rulefile.File) []string {
	names := slices.Clone(file.Inside)
	for _, name := range file.Outside {
		if !file.IsInside(name) {
			names = append(names, name)
		}
	}
	return names
}

// localAddresses are the namespace's own.
func localAddresses() (out []netip.Addr, err error) {
	local, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range local {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok {
			out = append(out, addr)
		}
	}
	return out, nil
}

// remember gives a link that has lost its address the one that was masqueraded behind,
// as long as nobody else has it: the sessions go on when it is back.
func remember(facts *datapath.Facts, l *datapath.Link) {
	if !l.Awaited {
		return
	}
	for _, a := range facts.Addresses {
		if a.Masquerade && !a.Leaving && a.Link == l.Index && !slices.Contains(facts.Local, a.Addr) {
			l.Addresses = []netip.Prefix{netip.PrefixFrom(a.Addr, 32)}
			facts.Local = append(facts.Local, a.Addr)
			return
		}
	}
}

func describe(l netlink.Link, p Placement) (datapath.Link, error) {
	link := datapath.Link{
		Name: l.Attrs().Name, Ifindex: l.Attrs().Index, MTU: l.Attrs().MTU,
		Transmit: p.XDP && p.Transmit, Ethernet: hasFrames(l),
	}
	if link.Ethernet {
		link.MAC = [6]byte(l.Attrs().HardwareAddr)
	}
	addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return link, fmt.Errorf("addresses of %q: %w", link.Name, err)
	}
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.IP.To4())
		if ones, _ := a.Mask.Size(); ok {
			link.Addresses = append(link.Addresses, netip.PrefixFrom(addr, ones))
		}
	}
	return link, nil
}

// localPorts reads where the gateway's own connections take their ports from, and
// which of them they leave alone.
func localPorts() (local [2]uint16, reserved datapath.PortList, err error) {
	text, err := readSetting(settingLocalPorts)
	if err != nil {
		return local, nil, err
	}
	if n, err := fmt.Sscan(text, &local[0], &local[1]); n != 2 {
		return local, nil, fmt.Errorf("%s is %q: %w", settingLocalPorts, text, err)
	}
	text, err = readSetting(settingReservedPorts)
	if err != nil {
		return local, nil, err
	}
	reserved, err = datapath.ParsePortList(text)
	return local, reserved, err
}

const (
	settingForward       = "net.ipv4.ip_forward"
	settingRedirects     = "net.ipv4.conf.all.accept_redirects"
	settingLocalPorts    = "net.ipv4.ip_local_port_range"
	settingReservedPorts = "net.ipv4.ip_local_reserved_ports"
)
