// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
)

// Whatever shows the table of connection tracking says what natkit's engine has to do with it,
// in one line of text and in a field of JSON; and says nothing where none is up.
func TestEngineNotes(t *testing.T) {
	table := &snapshot.Table{Entries: 20, Labelled: 12}
	for _, c := range []struct {
		engine *snapshot.Engine
		ref    string
		want   string
	}{
		{nil, "", ""},
		{&snapshot.Engine{Kind: "ebpf", Sessions: 600}, "gw", "the eBPF engine translates here: 600 sessions that this table does not contain: `natkit --netns gw sessions`, `natkit --netns gw mappings`\n"},
		{&snapshot.Engine{Kind: "ebpf", Sessions: 1}, "", "the eBPF engine translates here: 1 session that this table does not contain: `natkit sessions`, `natkit mappings`\n"},
		{&snapshot.Engine{Kind: "nft"}, "", "natkit's engine nft translates here: its sessions are entries of this table, with label 110 (12 of 20 entries): `natkit rules`, `natkit conntrack list -o json`\n"},
		{&snapshot.Engine{Kind: "accel"}, "", "natkit accel forwards established flows before the kernel stack; their entries are in this table: `natkit accel status`\n"},
	} {
		note := NewEngineNote(c.engine, table, c.ref)
		stats, top, memory := NewConntrackStats(table), NewConntrackTop(table, "source"), NewConntrackMemory(&conntrack.Memory{BucketBytes: 8})
		stats.Engine, top.Engine, memory.Engine = note, note, note
		for name, r := range map[string]struct {
			v    any
			text func(*bytes.Buffer) error
		}{
			"stats":  {stats, func(b *bytes.Buffer) error { return stats.Text(b, NoBars) }},
			"top":    {top, func(b *bytes.Buffer) error { return top.Text(b, NoBars) }},
			"memory": {memory, func(b *bytes.Buffer) error { return memory.Text(b) }},
		} {
			var b bytes.Buffer
			if err := r.text(&b); err != nil {
				t.Fatal(err)
			}
			if !strings.HasSuffix(b.String(), c.want) || c.want == "" && strings.Contains(b.String(), "natkit") {
				t.Errorf("%s: %s\nwant at its end %s", name, b.String(), c.want)
			}
			text, err := json.Marshal(r.v)
			if err != nil {
				t.Fatal(err)
			}
			var fields map[string]any
			if err := json.Unmarshal(text, &fields); err != nil {
				t.Fatal(err)
			}
			if got := fields["natkit_engine"]; (got == nil) != (c.engine == nil) || c.engine != nil && got.(map[string]any)["engine"] != c.engine.Kind {
				t.Errorf("%s: natkit_engine is %v in JSON", name, got)
			}
		}
	}
}

// An entry is natkit's own if it is translated and has the label.
func TestEntriesOfEngine(t *testing.T) {
	labels := make([]byte, 16)
	for i := range 4 { // the whole word, which is the same in both byte orders
		labels[nft.LabelBit/32*4+i] = 0xff
	}
	inside, outside, server := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.2")
	sent, back := conntrack.Tuple{Src: inside, Dst: server}, conntrack.Tuple{Src: server, Dst: inside}
	translated := conntrack.Tuple{Src: server, Dst: outside}
	for _, c := range []struct {
		name   string
		flow   conntrack.Flow
		engine string
		want   string
	}{
		{"no engine", conntrack.Flow{Orig: sent, Reply: translated, Labels: labels}, "", ""},
		{"labelled", conntrack.Flow{Orig: sent, Reply: translated, Labels: labels}, "nft", `"by_natkit":true`},
		{"not translated", conntrack.Flow{Orig: sent, Reply: back, Labels: labels}, "nft", `"by_natkit":false`},
		{"another's", conntrack.Flow{Orig: sent, Reply: translated, Labels: make([]byte, 16)}, "nft", `"by_natkit":false`},
		{"of the kernel beside the eBPF engine", conntrack.Flow{Orig: sent, Reply: translated, Labels: labels}, "ebpf", `"by_natkit":false`},
	} {
		var note *EngineNote
		if c.engine != "" {
			note = NewEngineNote(&snapshot.Engine{Kind: c.engine}, nil, "")
		}
		line := string(AppendConntrackFlow(nil, &c.flow, note))
		if !json.Valid([]byte(line)) || !strings.Contains(line, c.want) || c.want == "" && strings.Contains(line, "by_natkit") {
			t.Errorf("%s: %s, want %s", c.name, line, c.want)
		}
	}
}

func TestHooksNote(t *testing.T) {
	for kind, want := range map[string]string{
		"ebpf":  "packets that the eBPF engine translates bypass these hooks: `natkit --netns gw status`\n",
		"accel": "packets that natkit accel forwards bypass these hooks: `natkit --netns gw accel status`\n",
		"nft":   "",
	} {
		r := &Hooks{Engine: NewHooksNote(&snapshot.Engine{Kind: kind}, "gw")}
		var b bytes.Buffer
		if err := r.Text(&b); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(b.String(), want) || want == "" && strings.Contains(b.String(), "natkit") {
			t.Errorf("%s: %s", kind, b.String())
		}
	}
}
