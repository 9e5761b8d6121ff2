// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// This file is what a Sampler hears by ARP between two examinations: requests with the tag of a VLAN that a namespace
// does not have, requests that somebody repeats, and other machines that have its addresses.

const (
	// A namespace's own addresses are asked for askBefore the end of a window: a reply takes no longer, and it is one of
	// the window, in which a look may listen too.
	askBefore = time.Second
	// arpRepeated is how many requests of one host for an address in one window are more than it sends that gets a reply.
	arpRepeated = 3
	// mostAsked is for how many addresses of all namespaces together.
	mostAsked = 32
)

// openARPWatch listens in the namespace of the calling thread. It stays open: no packet but ARP costs anything by it.
func openARPWatch() (*framesTap, error) {
	t := newFramesTap()
	if _, err := t.chooseLinks(); err != nil {
		return nil, err
	}
	var own []netip.Addr
	for _, l := range t.links {
		for _, p := range l.addrs {
			own = append(own, p.Addr())
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	var err error
	filter := arpWatchFilter(slices.Sorted(maps.Keys(t.links)), own[:min(len(own), maxFrameAddrs)])
	if t.arp, err = (tap{kind: unix.SOCK_RAW, filter: filter, protocol: unix.ETH_P_ARP, tags: true}).open(); err != nil {
		return nil, fmt.Errorf("watch ARP: %w", err)
	}
	return t, nil
}

// sampleARP adds what came: the kernel counts none of it.
func (n *sampled) sampleARP(s *snapshot.Snapshot) {
	if n.arp == nil || !n.arp.arp.any() {
		return
	}
	seen, err := n.arp.hearARP(map[string]bool{})
	if err != nil {
		return
	}
	s.Frames = &snapshot.Frames{}
	for _, q := range seen.questions() {
		// Who gets a reply need not ask again so soon.
		if seen.tagged[arpPair{q.Addr, q.Asker}] || q.Count >= arpRepeated {
			s.Frames.Asked = append(s.Frames.Asked, q)
		}
	}
	for _, c := range seen.claimed() {
		if c.Own {
			s.Frames.Claims = append(s.Frames.Claims, c)
		}
	}
}

// askForOwn sends an ARP probe (RFC 5227) for each address of the namespaces that are due: a machine that has one of
// them, too, replies to it. Nobody notes such a probe, and without one nobody hears of such a machine.
func (p *Sampler) askForOwn(due func(inode uint64) bool) {
	if due == nil {
		return
	}
	left := mostAsked
	for i := range p.places {
		// Each round begins with another one: where there are more addresses, all have their turn.
		place := p.places[(p.rounds+i)%len(p.places)]
		n := p.seen[place.Inode]
		if n == nil || n.arp == nil || !due(place.Inode) || left == 0 {
			continue
		}
		h, err := openPlace(place)
		if err != nil { // it is gone
			continue
		}
		_ = h.Do(func() error {
			left -= n.arp.askForOwn(left)
			return nil
		})
		h.Close()
	}
}
