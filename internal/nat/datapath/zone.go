// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"natkit/internal/nat/rulefile"
)

// A zone is an inside interface, where subscribers are told apart by that and their address: its
// number is the interface's index plus 1 (bpf/nat/zone.h).

// NameZones has sessions, mappings and events name the interfaces of these indices.
func (e *Engine) NameZones(names map[int]string) {
	e.zones = map[uint8]string{}
	for index, name := range names {
		e.zones[uint8(index+1)] = name
	}
}

// NamesZone reports whether the interface of a zone has a name.
func (e *Engine) NamesZone(zone uint8) bool { return e.zones[zone] != "" }

// ZoneName is the interface of a zone, "" of zone 0.
func (e *Engine) ZoneName(zone uint8) string {
	if zone == 0 {
		return ""
	}
	if name := e.zones[zone]; name != "" {
		return name
	}
	return fmt.Sprintf("zone %d", zone)
}

// Zone is the zone of the hosts behind an interface, 0 none.
func (e *Engine) Zone(ifindex int) (uint8, error) {
	var index uint32
	var l abiNatLink
	if err := e.common.LinkIndices.Lookup(uint32(ifindex), &index); err != nil {
		return 0, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	if err := e.common.Links.Lookup(index, &l); err != nil {
		return 0, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	if l.Flags&uint16(abiNatLinkFlagNAT_LINK_ZONE) == 0 {
		return 0, nil
	}
	return uint8(index + 1), nil
}

// zoneTo is zone_to of bpf/nat/zone.h.
func zoneTo(flow *abiNatFlow) uint8 {
	if flow.Key.Side == uint8(abiNatSideNAT_OUTSIDE) || flow.Key.Zone != 0 {
		return flow.Key.Link
	}
	return 0
}

// zone is that of the internal hosts that a rule sends packets to, 0 none.
func (c *compiler) zone(r *rulefile.Rule) uint8 {
	if !c.file.Subscribers.ByInterface {
		return 0
	}
	if l := c.byName[c.file.InsideOf(r)]; l != nil {
		return uint8(l.Index + 1)
	}
	return 0
}
