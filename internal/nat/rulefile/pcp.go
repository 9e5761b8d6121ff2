// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
)

// PCP says where internal hosts may ask for explicit mappings, by PCP (RFC 6887) and NAT-PMP
// (RFC 6886). The zero value is a file without: nobody may.
type PCP struct {
	On          []string      // interfaces, of those inside
	MinLifetime time.Duration // less that is asked for becomes this much
	MaxLifetime time.Duration // likewise more
	// PerSubscriber is how many explicit mappings a subscriber may have; 0 is no limit of their own.
	PerSubscriber int
}

// Defaults and bounds of explicit mappings: RFC 6887 section 15.
const (
	defaultMinLifetime = 120 * time.Second
	defaultMaxLifetime = 24 * time.Hour
	defaultPCPMappings = 64
	maxLifetime        = 7 * 24 * time.Hour
	maxPCPMappings     = 65536
)

// IsZero reports whether nobody may ask.
func (p *PCP) IsZero() bool { return len(p.On) == 0 }

var pcpKeys = []string{"on", "lifetime", "mappings_per_subscriber"}

func (r *reader) pcp(n *yaml.Node) {
	p := PCP{MinLifetime: defaultMinLifetime, MaxLifetime: defaultMaxLifetime, PerSubscriber: defaultPCPMappings}
	listed, before := false, r.count
	for _, e := range r.entries(n, "pcp") {
		switch e.name {
		case "on":
			listed = true
			p.On = r.pcpLinks(e.value)
		case "lifetime":
			r.lifetime(e.value, &p)
		case "mappings_per_subscriber":
			p.PerSubscriber = r.number(e, 0, maxPCPMappings)
		default:
			r.unknown(e, "pcp", pcpKeys...)
		}
	}
	if !listed && r.count == before {
		r.fail(n, "pcp needs the key on: inside interfaces whose hosts may ask for mappings, as in {on: [eth1]}")
	}
	r.file.PCP = p
}

func (r *reader) pcpLinks(n *yaml.Node) (names []string) {
	for _, element := range r.elements(n, "on") {
		name := r.link(element, "on")
		switch {
		case name == "":
		case slices.Contains(names, name):
			r.fail(element, "interface %q is listed twice", name)
		default:
			r.file.positions["pcp."+name] = position(element)
			names = append(names, name)
		}
	}
	return names
}

func (r *reader) lifetime(n *yaml.Node, p *PCP) {
	for _, e := range r.entries(n, "lifetime") {
		var to *time.Duration
		switch e.name {
		case "min":
			to = &p.MinLifetime
		case "max":
			to = &p.MaxLifetime
		default:
			r.unknown(e, "lifetime", "min", "max")
			continue
		}
		if d, ok := r.duration(e.value, e.name); ok {
			if d > maxLifetime {
				r.fail(e.value, "%s is at most %s, and not %s", e.name, durationText(maxLifetime), durationText(d))
			}
			*to = d
		}
	}
	if p.MinLifetime > p.MaxLifetime {
		r.fail(n, "lifetime: min is %s and max %s, which is less", durationText(p.MinLifetime), durationText(p.MaxLifetime))
	}
}

// explicit: only hosts behind inside interfaces may ask. One that is outside too is refused: who is
// behind it is known by its source address alone, which anybody there can write.
func (r *reader) explicit() {
	for _, name := range r.file.PCP.On {
		at := r.file.at("pcp." + name)
		switch {
		case !r.file.IsInside(name):
			r.add(at, "pcp is on %q, which is not an inside interface%s", name, didYouMean(name, r.file.Inside))
		case slices.Contains(r.file.Outside, name):
			r.add(at, "pcp is on %q, which is an outside interface too: hosts there could ask for mappings of internal ones", name)
		}
	}
}

func (p *PCP) write(b *strings.Builder) {
	if p.IsZero() {
		return
	}
	fmt.Fprintf(b, "pcp:\n  on: %s\n", linksText(p.On))
	if p.MinLifetime != defaultMinLifetime || p.MaxLifetime != defaultMaxLifetime {
		fmt.Fprintf(b, "  lifetime: {min: %s, max: %s}\n", durationText(p.MinLifetime), durationText(p.MaxLifetime))
	}
	if p.PerSubscriber != defaultPCPMappings {
		fmt.Fprintf(b, "  mappings_per_subscriber: %d\n", p.PerSubscriber)
	}
}
