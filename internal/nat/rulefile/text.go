// SPDX-License-Identifier: Apache-2.0

// A File becomes a rule file's text.

package rulefile

import (
	"fmt"
	"strconv"
	"strings"
)

// Text writes the file as Parse reads it: what is as by default is left out, comments
// are gone.
func (f *File) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "inside: %s\noutside: %s\n", linksText(f.Inside), linksText(f.Outside))
	if len(f.Pools) > 0 {
		b.WriteString("pools:\n")
		for i := range f.Pools {
			fmt.Fprintf(&b, "  %s: %s\n", f.Pools[i].Name, f.Pools[i].String())
		}
	}
	block(&b, "defaults", f.Defaults.fields())
	block(&b, "limits", f.Limits.fields())
	f.Subscribers.write(&b)
	f.Log.write(&b)
	f.PCP.write(&b)
	if len(f.Rules) == 0 {
		b.WriteString("rules: []\n")
		return b.String()
	}
	b.WriteString("rules:\n")
	for i := range f.Rules {
		lead := "  - "
		for _, field := range f.Rules[i].fields() {
			b.WriteString(lead + field[0] + ": " + field[1] + "\n")
			lead = "    "
		}
	}
	return b.String()
}

// Settings are the lines of Text that are not about rules, each with the keys that it is below:
// "pools.cgn: {addresses: [203.0.113.1]}".
func (f *File) Settings() (lines []string) {
	text, _, _ := strings.Cut(f.Text(), "\nrules:")
	var above []string
	for line := range strings.Lines(text + "\n") {
		line = strings.TrimSuffix(line, "\n")
		key := strings.TrimLeft(line, " ")
		above = above[:(len(line)-len(key))/2]
		if name, isBlock := strings.CutSuffix(key, ":"); isBlock {
			above = append(above, name+".")
			continue
		}
		lines = append(lines, strings.Join(above, "")+key)
	}
	return lines
}

func block(b *strings.Builder, name string, fields [][2]string) {
	if len(fields) == 0 {
		return
	}
	b.WriteString(name + ":\n")
	for _, field := range fields {
		b.WriteString("  " + field[0] + ": " + field[1] + "\n")
	}
}

func linksText(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = quoteName(name)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// String is the pool in one line, as the rule file has it behind its name.
func (p *Pool) String() string {
	text := "{addresses: " + rangesText(p.Addresses)
	switch {
	case p.OneToOne:
		text += ", ports: none"
	case !p.Ports.IsZero():
		text += ", ports: " + p.Ports.String()
	}
	if !p.Blocks.IsZero() {
		text += ", blocks: " + p.Blocks.String()
	}
	if len(p.Drain) > 0 {
		text += ", drain: " + rangesText(p.Drain)
	}
	if p.Silent {
		text += ", arp: none"
	}
	return text + "}"
}

func rangesText(all []AddressRange) string {
	texts := make([]string, len(all))
	for i, r := range all {
		texts[i] = r.String()
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

// fields are the keys and values that are not as by default.
func (d *Defaults) fields() (fields [][2]string) {
	usual := New().Defaults
	if d.Mapping != usual.Mapping {
		fields = append(fields, [2]string{"mapping", perClassText(d.Mapping)})
	}
	if d.Filtering != usual.Filtering {
		fields = append(fields, [2]string{"filtering", perClassText(d.Filtering)})
	}
	if d.MSS != usual.MSS {
		fields = append(fields, [2]string{"mss", d.MSS.String()})
	}
	if d.InboundRefresh != usual.InboundRefresh {
		fields = append(fields, [2]string{"inbound_refresh", strconv.FormatBool(d.InboundRefresh)})
	}
	if d.PortParity != usual.PortParity {
		fields = append(fields, [2]string{"port_parity", strconv.FormatBool(d.PortParity)})
	}
	var timeouts []string
	for i, value := range d.Timeouts {
		if value != usual.Timeouts[i] {
			timeouts = append(timeouts, Timeout(i).String()+": "+durationText(value))
		}
	}
	if timeouts != nil {
		fields = append(fields, [2]string{"timeouts", "{" + strings.Join(timeouts, ", ") + "}"})
	}
	return fields
}

// fields are the keys and values that are not as by default.
func (l *Limits) fields() (fields [][2]string) {
	usual := DefaultLimits()
	for _, one := range []struct {
		key          string
		value, usual int
	}{
		{"sessions", l.Sessions, usual.Sessions}, {"mappings", l.Mappings, usual.Mappings}, {"sources", l.Sources, usual.Sources},
		{"sessions_per_source", l.SessionsPerSource, usual.SessionsPerSource},
		{"icmp_errors_per_second", l.ICMPErrorsPerSecond, usual.ICMPErrorsPerSecond},
	} {
		if one.value != one.usual {
			fields = append(fields, [2]string{one.key, strconv.Itoa(one.value)})
		}
	}
	return fields
}
