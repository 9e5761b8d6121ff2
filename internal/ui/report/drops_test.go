// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/snapshot"
)

var dropped = snapshot.Drops{
	Rows: []snapshot.Drop{
		{
			Count: 10031, Location: "nf_hook_slow+0x7d", Reason: "NETFILTER_DROP", Netns: 4026532248, Namespace: "gateway",
			Interface: "eth1", Cause: snapshot.CauseTableFull,
			Samples: []string{"tcp 10.0.0.2:4000 -> 10.1.0.2:80 SYN", "tcp 10.0.0.2:4001 -> 10.1.0.2:80 SYN"},
			Stacks:  []snapshot.Stack{{Count: 10000, Frames: []string{"nf_hook_slow+0x7d", "ip_rcv+0x1"}}},
		},
		{Count: 676, Location: "tcp_v4_rcv+0x91", Reason: "NO_SOCKET", Netns: 4026531840, Interface: "eth0"},
		{Count: 30, Location: "skb_queue_purge_reason+0xdf", Reason: "QUEUE_PURGE", Benign: true},
		{Count: 1, Location: "0xffffffffc0200000", Reason: "reason 900", Netns: 4026532999},
	},
	LostEvents: 12,
}

const ownNetns = 4026531840

func TestDropsText(t *testing.T) {
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	var out bytes.Buffer
	var totals DropTotals
	for i, all := range []bool{false, true} {
		r := NewDrops(at.Add(time.Duration(5*i)*time.Second), 5*time.Second, dropped, DropFilter{All: all})
		totals.Add(r)
		if err := r.Text(&out, ownNetns); err != nil {
			t.Fatal(err)
		}
	}
	none := NewDrops(at.Add(11*time.Second), time.Second, snapshot.Drops{}, DropFilter{})
	totals.Add(none)
	if err := none.Text(&out, ownNetns); err != nil {
		t.Fatal(err)
	}
	if err := totals.Text(&out, ownNetns); err != nil {
		t.Fatal(err)
	}
	printed(t, "drops.txt", out.Bytes())
}

// One interval is its own sum and is not shown twice.
func TestDropTotalsOfOne(t *testing.T) {
	var out bytes.Buffer
	var totals DropTotals
	totals.Add(NewDrops(time.Now(), time.Second, dropped, DropFilter{All: true}))
	if err := totals.Text(&out, ownNetns); err != nil || out.Len() > 0 {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// The keys of the JSON are what scripts rely on; no row at all is an empty list.
func TestDropsJSON(t *testing.T) {
	for _, tt := range []struct {
		name  string
		drops snapshot.Drops
		want  string
	}{
		{
			"one benign row left out",
			snapshot.Drops{Rows: dropped.Rows[1:3], LostEvents: 12},
			`{"schema":"natkit/drops/1","time":"2024-05-06T07:08:09Z","interval_s":5,"rows":[{"packets":676,"location":"tcp_v4_rcv+0x91","reason":"NO_SOCKET",` +
				`"netns_inode":4026531840,"interface":"eth0"}],"lost_events":12,"benign_packets":30}`,
		},
		{"nothing", snapshot.Drops{}, `{"schema":"natkit/drops/1","time":"2024-05-06T07:08:09Z","interval_s":5,"rows":[],"lost_events":0,"benign_packets":0}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b bytes.Buffer
			err := JSONLine(&b, NewDrops(time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC), 5*time.Second, tt.drops, DropFilter{}))
			got := strings.TrimSpace(b.String())
			if err != nil || got != tt.want {
				t.Errorf("%s, %v; want\n%s", got, err, tt.want)
			}
		})
	}
}

// A filter leaves rows out, counts what they held, and says of what the counts are.
func TestDropsFilter(t *testing.T) {
	rows := snapshot.Drops{Rows: []snapshot.Drop{
		{Count: 70, Location: "a", Reason: "R", Cause: snapshot.CauseTooBig, Sampled: 16, Matching: 2, Samples: []string{"udp 10.0.0.1:1 -> 10.0.0.2:53"}},
		{Count: 20, Location: "b", Reason: "R", Cause: snapshot.CauseTooBig, Sampled: 5},
		{Count: 9, Location: "c", Reason: "R", Cause: snapshot.CauseRule, Sampled: 1, Matching: 1},
	}}
	for _, tt := range []struct {
		f        DropFilter
		counts   []uint64
		filtered uint64
	}{
		{DropFilter{}, []uint64{70, 20, 9}, 0},
		{DropFilter{Cause: snapshot.CauseTooBig}, []uint64{70, 20}, 9},
		{DropFilter{Sampled: true}, []uint64{70, 9}, 20},
		{DropFilter{Cause: snapshot.CauseTooBig, Sampled: true}, []uint64{70}, 29},
		{DropFilter{Cause: snapshot.CauseBacklog}, nil, 99},
	} {
		r := NewDrops(time.Now(), time.Second, rows, tt.f)
		var counts []uint64
		for _, row := range r.Rows {
			counts = append(counts, row.Count)
		}
		if !slices.Equal(counts, tt.counts) || r.FilteredPackets != tt.filtered {
			t.Errorf("%+v: %v, %d filtered", tt.f, counts, r.FilteredPackets)
		}
	}
	var out bytes.Buffer
	if err := NewDrops(time.Now(), time.Second, rows, DropFilter{Sampled: true}).Text(&out, 0); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"79 packets dropped; 20 in rows that do not match the filter", "2 of 16 sampled packets match; the count is of all packets of the row"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// One packet is one.
func TestDropsSingular(t *testing.T) {
	var out bytes.Buffer
	one := snapshot.Drops{LostEvents: 1, Rows: []snapshot.Drop{{Count: 1, Benign: true}, {Count: 1, Location: "a"}}}
	if err := NewDrops(time.Now(), time.Second, one, DropFilter{}).Text(&out, 0); err != nil {
		t.Fatal(err)
	}
	if want := "1 packet dropped; 1 benign one not shown (--all); 1 more NOT in the table: there was no room\n"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in\n%s", want, out.String())
	}
}
