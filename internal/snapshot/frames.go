// SPDX-License-Identifier: Apache-2.0

package snapshot

import "net/netip"

// Frames is what the frames of the interfaces showed in the window about hardware addresses,
// ARP and packets that go in circles: the first few hundred of those that matter. Ports of
// bridges and bonds are not looked at, the bridge or bond is.
type Frames struct {
	Astray  []AstrayFrames `json:"astray_frames,omitzero"`  // most first
	Claims  []AddressClaim `json:"address_claims,omitzero"` // those of this machine's own addresses first
	Asked   []ARPQuestion  `json:"arp_requests,omitzero"`   // most first
	Circles []Circle       `json:"loops,omitzero"`          // most first
}

// AstrayFrames are unicast frames with an IP packet that the stack did not take: their destination is
// another hardware address, or they have a VLAN tag that no interface here has.
type AstrayFrames struct {
	Interface string     `json:"interface"`
	VLAN      uint16     `json:"vlan,omitempty"` // 0: another hardware address
	From      string     `json:"source_mac"`     // hardware addresses
	To        string     `json:"destination_mac"`
	Source    netip.Addr `json:"source_address,omitzero"` // of the first packet
	Dest      netip.Addr `json:"destination_address,omitzero"`
	Count     uint64     `json:"frames"`
	// Known says that somebody has the address To: it sent a frame in the window, or is a
	// neighbour of this machine.
	Known bool `json:"known,omitempty"`
}

// AskedNeighbours is how many neighbours are asked for at most, and how many addresses of this machine.
const AskedNeighbours = 16

// AddressClaim is a hardware address that ARP gave for an address.
type AddressClaim struct {
	Interface string     `json:"interface"`
	Addr      netip.Addr `json:"address,omitzero"`
	MAC       string     `json:"mac"`
	Count     uint64     `json:"packets"`
	Replies   uint64     `json:"replies,omitempty"` // of Count: answers to this machine
	// Own says that the address is this machine's, Router that a route here leads by it.
	Own    bool `json:"own,omitempty"`
	Router bool `json:"is_router,omitempty"`
}

// ARPQuestion is ARP requests for one of this machine's own addresses.
type ARPQuestion struct {
	Interface string     `json:"interface"`
	VLAN      uint16     `json:"vlan,omitempty"` // a tag that no interface here has
	Addr      netip.Addr `json:"address,omitzero"`
	Asker     netip.Addr `json:"source_address,omitzero"`
	MAC       string     `json:"mac"`
	Count     uint64     `json:"packets"`
	Answered  uint64     `json:"replied"`
}

// Circle is packets that came in by one interface several times, with a smaller TTL each time.
type Circle struct {
	Interface string     `json:"interface"`
	Source    netip.Addr `json:"source_address,omitzero"`
	Dest      netip.Addr `json:"destination_address,omitzero"`
	Packets   uint64     `json:"packets"`
	Sample    string     `json:"example"`
}
