// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/pprof/profile"

	"natkit/internal/kernel/observe"
)

// someProfile has 20 kernel samples, 11 of them below nf_hook_slow.
func someProfile() *observe.Profile {
	stack := func(count uint64, functions ...string) observe.ProfileStack {
		s := observe.ProfileStack{Count: count}
		for _, f := range functions {
			s.Frames = append(s.Frames, observe.Frame{Function: f, Address: 0xffffffff81000000 + uint64(len(f))})
		}
		return s
	}
	return &observe.Profile{
		Start: time.Unix(1700000000, 0), Duration: 10 * time.Second, Frequency: 499, CPUs: 2,
		Samples: 100, Kernel: 20, User: 30, Idle: 49, Lost: 1,
		Stacks: []observe.ProfileStack{
			stack(9, "ip_forward", "ip_rcv"),
			stack(6, "nf_conntrack_in", "ipv4_conntrack_in", "nf_hook_slow", "ip_rcv"),
			stack(4, "nft_do_chain", "nf_nat_ipv4_pre_routing", "nf_hook_slow", "ip_rcv"),
			stack(1, "nf_hook_slow", "ip_rcv"),
		},
	}
}

func TestProfileText(t *testing.T) {
	var out bytes.Buffer
	for _, tt := range []struct {
		root  string
		least float64
	}{{"nf_hook_slow", 1}, {"nf_hook_slow", 50}, {observe.AllFunctions, 1}, {"nf_queue", 1}} {
		if err := NewProfile(someProfile(), tt.root).Text(&out, tt.least); err != nil {
			t.Fatal(err)
		}
		out.WriteString("--\n")
	}
	printed(t, "profile.txt", out.Bytes())
}

func TestProfileJSON(t *testing.T) {
	var out bytes.Buffer
	if err := JSON(&out, NewProfile(someProfile(), "nf_hook_slow")); err != nil {
		t.Fatal(err)
	}
	if !json.Valid(out.Bytes()) {
		t.Error("not JSON")
	}
	printed(t, "profile.json", out.Bytes())
}

// pprof's own library reads what is written, and finds every sample.
func TestWriteProfile(t *testing.T) {
	var out bytes.Buffer
	if err := WriteProfile(&out, someProfile()); err != nil {
		t.Fatal(err)
	}
	p, err := profile.ParseData(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.CheckValid(); err != nil {
		t.Error(err)
	}
	count, time, below := int64(0), int64(0), int64(0)
	for _, s := range p.Sample {
		count += s.Value[0]
		time += s.Value[1]
		for _, l := range s.Location {
			if l.Line[0].Function.Name == "nf_hook_slow" {
				below += s.Value[0]
			}
		}
	}
	if count != 20 || below != 11 || time != 20*p.Period || p.DurationNanos != 10e9 {
		t.Errorf("%d samples, %d below nf_hook_slow, %d ns: %v", count, below, time, p)
	}
}
