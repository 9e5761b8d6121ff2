// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"slices"
	"time"

	"natkit/internal/diagnose/causes"
)

// This file decides when other machines are asked whether they have an address of this one. That is all that the
// monitor ever sends to a network that is not its own, so it does while all is well only if the administrator wants it.

// ARPProbes is when ARP probes are sent.
type ARPProbes string

// When they are sent.
const (
	ProbesOff       ARPProbes = "off"
	ProbesOnSymptom ARPProbes = "symptom"
	ProbesAlways    ARPProbes = "always" // in each interval, for namespaces with traffic
)

const (
	// A symptom asks for probeTimes probes of each address, as many as RFC 5227 has a host send for a new one (PROBE_NUM), in
	// intervals one after the other; the next ones are probeApart after the first.
	probeTimes = 3
	probeApart = 10 * time.Minute

	duplicateCode = "duplicate-address"
)

// duplicateSymptoms are what a sample shows while another machine has an address of this one: it sends ARP with it, clients
// do not confirm their connections, traffic falls.
var duplicateSymptoms = []string{"claims", "unconfirmed", "traffic"}

// duplicateEffects are the findings that another machine with an address of this one explains.
var duplicateEffects = func() []string {
	list := causes.Catalogue()
	return list[slices.IndexFunc(list, func(c causes.Cause) bool { return c.Code == duplicateCode })].Explains
}()

// probes are those sent for the addresses of a namespace.
type probes struct {
	began time.Time // the first of a row
	sent  int       // of that row
}

// due says whether there is room for another one.
func (p *probes) due(now time.Time) bool {
	if now.Sub(p.began) >= probeApart {
		*p = probes{began: now}
	}
	p.sent++
	return p.sent <= probeTimes
}

// probes says for whose addresses ARP probes are sent in the next window; nil for nobody's.
func (m *monitor) probes(now time.Time) func(inode uint64) bool {
	switch m.o.ARPProbes {
	case ProbesAlways:
		return m.near
	case ProbesOnSymptom:
	default:
		return nil
	}
	due := map[uint64]bool{}
	for _, n := range m.sampler.Namespaces() {
		if m.suspects(n.Inode, now) {
			due[n.Inode] = true
		}
	}
	if len(due) == 0 {
		return nil
	}
	return func(inode uint64) bool { return due[inode] }
}

// suspects says whether another machine may have an address of the namespace. Once one was found it is asked in each
// window, or nobody would know when it is gone.
func (m *monitor) suspects(inode uint64, now time.Time) bool {
	r := m.attention.of(inode)
	if m.findings.shows(inode, causes.Critical, duplicateCode) { // of its own addresses, not of a router's
		return true
	}
	symptom := slices.ContainsFunc(duplicateSymptoms, func(name string) bool { return r.symptoms[name] > 0 })
	return (symptom || m.findings.shows(inode, causes.Warning, duplicateEffects...)) && r.probes.due(now)
}
