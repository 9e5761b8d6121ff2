// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"slices"
	"strings"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// Program answers for packets what natkit's eBPF engine or its acceleration did to them in a
// namespace.
type Program interface {
	// Forwarded says how a packet that was seen at a time of CLOCK_MONOTONIC got from one tuple to
	// another, which may be the same; "" if not here.
	Forwarded(before, after snapshot.TraceTuple, at uint64) string
	// Refused says why packets were dropped since it was asked last, "" if none was.
	Refused() string
	// Unseen reports whether it drops packets at XDP, before the stack sees them.
	Unseen() bool
	Close() error
}

// ProgramReader opens what is attached in a namespace, nil for nothing.
type ProgramReader func(ref string) (Program, error)

// programOf is a Program and where.
type programOf struct {
	Program
	place   netns.Place
	refused []refusal // lately, the oldest first
}

// refusal is why packets were dropped in the time before, back to that of the refusal before it.
type refusal struct {
	at  uint64 // CLOCK_MONOTONIC
	why string
}

// refusedFor is how long a refusal is kept, in nanoseconds: longer than until a packet is complete.
const refusedFor = 5_000_000_000

// refusedEvery is how often the programs are asked: to ask one takes milliseconds.
const refusedEvery = 500 * time.Millisecond

// ask asks a program why it dropped packets since it was asked last, unless that is not long ago.
func (p *programOf) ask(pause time.Duration) {
	now := monotonic()
	if n := len(p.refused); n > 0 && now < p.refused[n-1].at+uint64(pause) {
		return
	}
	p.refused = append(slices.DeleteFunc(p.refused, func(r refusal) bool { return r.at+refusedFor < now }), refusal{now, p.Program.Refused()})
}

// keepRefused keeps what the programs dropped, so that it is known when that was.
func (a *attachment) keepRefused() {
	for i := range a.programs {
		a.programs[i].ask(refusedEvery)
	}
}

// openPrograms looks for programs of natkit's in all namespaces.
func (a *attachment) openPrograms(read ProgramReader) {
	places, err := netns.All()
	if read == nil || err != nil { // the tracepoints have said so
		return
	}
	for _, place := range places {
		p, err := read(place.Ref)
		if err != nil {
			a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "what natkit's own programs did", Why: err.Error()})
		} else if p != nil {
			a.programs = append(a.programs, programOf{Program: p, place: place})
		}
	}
}

// Forwarded asks the program of a namespace: see trace.Deriver.
func (r *Run) Forwarded(inode uint64, before, after snapshot.TraceTuple, at uint64) string {
	for _, p := range r.at.programs {
		if p.place.Inode == inode {
			return p.Forwarded(before, after, at)
		}
	}
	return ""
}

// Crossed asks the programs of all namespaces: see trace.Deriver.
func (r *Run) Crossed(before, after snapshot.TraceTuple, at uint64) (namespace, how string) {
	for _, p := range r.at.programs {
		if how := p.Forwarded(before, after, at); how != "" {
			return p.place.Ref, how
		}
	}
	return "", ""
}

// Refused is what the program of a namespace dropped in the time in which a packet was there, and the next: see trace.Deriver.
func (r *Run) Refused(inode uint64, at uint64) string {
	for n := range r.at.programs {
		if p := &r.at.programs[n]; p.place.Inode == inode {
			return p.refusedAt(at)
		}
	}
	return ""
}

// RefusedUnseen asks the programs at XDP of other namespaces: see trace.Deriver.
func (r *Run) RefusedUnseen(inode uint64, at uint64) string {
	var whys []string
	for n := range r.at.programs {
		p := &r.at.programs[n]
		if p.place.Inode == inode || !p.Unseen() {
			continue
		}
		if why := p.refusedAt(at); why != "" {
			whys = append(whys, p.place.Ref+", "+why)
		}
	}
	return strings.Join(whys, "; or ")
}

// refusedAt is why a program dropped packets at a time or shortly behind it.
func (p *programOf) refusedAt(at uint64) string {
	p.ask(tick)
	i := slices.IndexFunc(p.refused, func(r refusal) bool { return r.at >= at })
	if i < 0 {
		return ""
	}
	var whys []string
	for _, late := range p.refused[i:min(i+2, len(p.refused))] {
		if late.why != "" && !slices.Contains(whys, late.why) {
			whys = append(whys, late.why)
		}
	}
	return strings.Join(whys, "; or ")
}
