// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"natkit/internal/kernel/observe"
)

func TestKindOf(t *testing.T) {
	for _, tt := range []struct {
		function, module string
		want             frameKind
	}{
		{"nf_conntrack_in", "", kindTracking},
		{"ipv4_conntrack_in", "nf_conntrack", kindTracking},
		{"__nf_ct_refresh_acct", "", kindTracking},
		{"nf_flow_offload_ip_hook", "", kindTracking},
		{"nf_nat_ipv4_out", "", kindNAT},
		{"nft_nat_do_chain", "nft_chain_nat", kindNAT},
		{"l4proto_manip_pkt", "", kindNAT},
		{"redirect_tg4", "", kindNAT},
		{"tg4", "xt_NETMAP", kindNAT},
		{"tcp_new", "nf_conntrack", kindTracking},
		{"tcp_newreno_mark_lost", "", kindStack},
		{"nft_do_chain", "", kindRules},
		{"nf_hook_slow", "", kindRules},
		{"ipt_do_table", "ip_tables", kindRules},
		{"br_handle_frame", "bridge", kindBridge},
		{"ip_sabotage_in", "br_netfilter", kindBridge},
		{"veth_poll", "", kindDriver},
		{"secret_poll", "mlx5_core", kindDriver},
		{"ip_forward", "", kindStack},
		{"__netif_receive_skb_core", "", kindStack},
		{"bpf_prog_1f_count", "bpf", kindBPF},
		{"do_syscall_64", "", kindOther},
		{"memcpy", "", kindOther},
		{"helper", "nf_conntrack_ftp", kindTracking},
		{"0xffffffff81000000", "", kindOther},
	} {
		if got := kindOf(tt.function, tt.module); got != tt.want {
			t.Errorf("%s [%s]: %s, want %s", tt.function, tt.module, got.Name, tt.want.Name)
		}
	}
}

// box is what a reader of the picture sees.
type box struct {
	name, class, title string
	x, w, depth        float64
}

// readBoxes reads a picture as XML, which it must be.
func readBoxes(t *testing.T, svg string) (boxes []box) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	attr := func(e xml.StartElement, name string) string {
		for _, a := range e.Attr {
			if a.Name.Local == name {
				return a.Value
			}
		}
		return ""
	}
	number := func(s string) float64 { v, _ := strconv.ParseFloat(s, 64); return v }
	in, text := false, ""
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return boxes
		}
		if err != nil {
			t.Fatal(err)
		}
		switch e := token.(type) {
		case xml.StartElement:
			text = ""
			if attr(e, "class") == "box" {
				in = true
				boxes = append(boxes, box{x: number(attr(e, "data-x")), w: number(attr(e, "data-w")), depth: number(attr(e, "data-d"))})
			} else if in && e.Name.Local == "rect" {
				boxes[len(boxes)-1].class = attr(e, "class")
			}
		case xml.CharData:
			text += string(e)
		case xml.EndElement:
			switch {
			case in && e.Name.Local == "title":
				boxes[len(boxes)-1].title = text
			case in && e.Name.Local == "text":
				boxes[len(boxes)-1].name = text
			case in && e.Name.Local == "svg":
				in = false
			}
		}
	}
}

func TestFlame(t *testing.T) {
	p := someProfile()
	p.Stacks[0].Frames[0].Function = "<script>" // a function of a foreign module may be called anything
	var out bytes.Buffer
	f := Flame{Title: "all & more", Root: observe.AllFunctions, After: p}
	if err := f.SVG(&out); err != nil {
		t.Fatal(err)
	}
	want := []box{
		{name: "all", class: "other", w: 1},
		{name: "ip_rcv", class: "stack", w: 1, depth: 1},
		{name: "nf_hook_slow", class: "rules", w: 0.55, depth: 2},
		{name: "ipv4_conntrack_in", class: "tracking", w: 0.3, depth: 3},
		{name: "nf_conntrack_in", class: "tracking", w: 0.3, depth: 4},
		{name: "nf_nat_ipv4_pre_routing", class: "nat", x: 0.3, w: 0.2, depth: 3},
		{name: "nft_do_chain", class: "rules", x: 0.3, w: 0.2, depth: 4},
		{name: "<script>", class: "other", x: 0.55, w: 0.45, depth: 2},
	}
	got := readBoxes(t, out.String())
	for i := range got {
		if !strings.HasPrefix(got[i].title, got[i].name+": ") {
			t.Errorf("title %q", got[i].title)
		}
		got[i].title = ""
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant\n%+v", got, want)
	}
	out.Reset()
	if err := f.HTML(&out); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"all &amp; more", "<td>tracking</td><td class=\"num\">6.00 %</td>", "100 samples: 20 kernel"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("the page lacks %q", text)
		}
	}
	if strings.Contains(out.String(), "<script><") || strings.Contains(out.String(), "http://") && strings.Count(out.String(), "http://") != strings.Count(out.String(), "http://www.w3.org/") {
		t.Error("the page reaches out, or has a foreign script")
	}
}

// Of two profiles of different length the shares are compared.
func TestFlameDiff(t *testing.T) {
	before, after := someProfile(), someProfile()
	after.Samples, after.User = 200, 130
	for i := range after.Stacks {
		after.Stacks[i].Count *= 2
	}
	after.Stacks[1].Count *= 2 // tracking
	after.Stacks = after.Stacks[:2]
	var out bytes.Buffer
	f := Flame{Title: "change", Root: "nf_hook_slow", After: after, Before: before}
	if err := f.SVG(&out); err != nil {
		t.Fatal(err)
	}
	classes := map[string]string{}
	for _, b := range readBoxes(t, out.String()) {
		classes[b.name] = b.class
	}
	want := map[string]string{"nf_hook_slow": "more", "ipv4_conntrack_in": "more", "nf_conntrack_in": "more", "nf_nat_ipv4_pre_routing": "less", "nft_do_chain": "less"}
	if !reflect.DeepEqual(classes, want) {
		t.Errorf("%v, want %v", classes, want)
	}
	out.Reset()
	if err := NewProfileDiff(before, after, "nf_hook_slow").Text(&out); err != nil {
		t.Fatal(err)
	}
	printed(t, "profile-diff.txt", out.Bytes())
	out.Reset()
	empty := Flame{Title: "none", Root: "nf_queue", After: before}
	if err := empty.SVG(&out); err != nil || !strings.Contains(out.String(), "Nothing was seen below nf_queue") {
		t.Errorf("%v\n%s", err, out.String())
	}
	readBoxes(t, out.String())
}

func TestFolded(t *testing.T) {
	for root, want := range map[string]string{
		observe.AllFunctions: "ip_rcv;ip_forward 9\nip_rcv;nf_hook_slow;ipv4_conntrack_in;nf_conntrack_in 6\nip_rcv;nf_hook_slow;nf_nat_ipv4_pre_routing;nft_do_chain 4\nip_rcv;nf_hook_slow 1\n",
		"nf_hook_slow":       "nf_hook_slow;ipv4_conntrack_in;nf_conntrack_in 6\nnf_hook_slow;nf_nat_ipv4_pre_routing;nft_do_chain 4\nnf_hook_slow 1\n",
		"absent":             "",
	} {
		var out bytes.Buffer
		if err := WriteFolded(&out, someProfile(), root); err != nil || out.String() != want {
			t.Errorf("%s: %v\n%s, want\n%s", root, err, out.String(), want)
		}
	}
}

func TestReadProfile(t *testing.T) {
	want := someProfile()
	want.Stacks[1].Frames[0].Module = "nf_conntrack"
	want.OtherNetns, want.NoNetns, want.Kernel, want.Samples = 3, 2, 25, 105
	var out bytes.Buffer
	if err := WriteProfile(&out, want); err != nil {
		t.Fatal(err)
	}
	got, err := ReadProfile(&out)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Start.Equal(want.Start) {
		t.Errorf("start %v", got.Start)
	}
	got.Start = want.Start
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant\n%+v", got, want)
	}
	want.Stacks[0].Frames[0].Function, want.Stacks[0].Frames[0].Module = "a\x1b[2Jb", "c\u202ed"
	out.Reset()
	if err := WriteProfile(&out, want); err != nil {
		t.Fatal(err)
	}
	if got, err = ReadProfile(&out); err != nil || got.Stacks[0].Frames[0].Function != "a?[2Jb" || got.Stacks[0].Frames[0].Module != "c?d" {
		t.Errorf("a terminal may obey %+v, %v", got.Stacks[0].Frames[0], err)
	}
	if _, err := ReadProfile(strings.NewReader("nonsense")); err == nil {
		t.Error("nonsense was read")
	}
}

func FuzzReadProfile(f *testing.F) {
	var out bytes.Buffer
	if err := WriteProfile(&out, someProfile()); err != nil {
		f.Fatal(err)
	}
	f.Add(out.Bytes())
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := ReadProfile(bytes.NewReader(in))
		if err != nil {
			return
		}
		flame := Flame{Title: "t", Root: observe.AllFunctions, After: p, Before: p}
		if err := flame.HTML(io.Discard); err != nil {
			t.Error(err)
		}
	})
}
