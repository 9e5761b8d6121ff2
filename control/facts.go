// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"natkit/datapath"
	"natkit/nat"
)

// gather reads what compiling the file for engine ebpf needs to know of the namespace
// that the calling thread is in. Indices that the record has given stay as they are.
func gather(file *nat.File, rec *record, attach Attach) (datapath.Facts, []Placement, error) {
	facts := datapath.Facts{Addresses: rec.Addresses}
	var placements []Placement
	for _, name := range append(slices.Clone(file.Inside), file.Outside...) {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return facts, nil, fmt.Errorf("interface %q: %w", name, err)
		}
		if err := checkEthernet(l); err != nil {
			return facts, nil, err
		}
		p := place(l, attach)
		link, err := describe(l, file.IsInside(name), p)
		if err != nil {
			return facts, nil, err
		}
		link.Index = rec.linkIndex(name)
		facts.Links = append(facts.Links, link)
		placements = append(placements, p)
	}
	local, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return facts, nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range local {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok {
			facts.Local = append(facts.Local, addr)
		}
	}
	facts.LocalPorts, facts.ReservedPorts, err = localPorts()
	return facts, placements, err
}

func describe(l netlink.Link, inside bool, p Placement) (datapath.Link, error) {
	link := datapath.Link{
		Name: l.Attrs().Name, Ifindex: l.Attrs().Index, MAC: [6]byte(l.Attrs().HardwareAddr), MTU: l.Attrs().MTU,
		Inside: inside, Transmit: p.XDP && p.Transmit, Ethernet: true,
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
func localPorts() (local [2]uint16, reserved []uint16, err error) {
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
	reserved, err = parsePorts(text)
	return local, reserved, err
}

const (
	settingForward       = "net.ipv4.ip_forward"
	settingLocalPorts    = "net.ipv4.ip_local_port_range"
	settingReservedPorts = "net.ipv4.ip_local_reserved_ports"
)

// parsePorts reads the kernel's list of ports and ranges: "8080,9000-9010".
func parsePorts(text string) (ports []uint16, err error) {
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		first, last, ok := strings.Cut(part, "-")
		if !ok {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || to < from {
			return nil, fmt.Errorf("list of ports %q: %q is no port or range", text, part)
		}
		for p := from; p <= to; p++ {
			ports = append(ports, uint16(p))
		}
	}
	return ports, nil
}

// formatPorts writes ports as the kernel lists them.
func formatPorts(ports []uint16) string {
	ports = slices.Clone(ports)
	slices.Sort(ports)
	ports = slices.Compact(ports)
	var parts []string
	for i := 0; i < len(ports); {
		j := i
		for j+1 < len(ports) && ports[j+1] == ports[j]+1 {
			j++
		}
		if i == j {
			parts = append(parts, strconv.Itoa(int(ports[i])))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", ports[i], ports[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ",")
}
