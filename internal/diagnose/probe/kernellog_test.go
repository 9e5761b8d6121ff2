// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"reflect"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func TestTelling(t *testing.T) {
	const full = "nf_conntrack: table full, dropping packet"
	got := telling([]string{"a", "b", full, "c", full, full, "d", "e"})
	if want := []string{"", full, "", full, full, ""}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestJudgeLog(t *testing.T) {
	initial := snapshot.Netns{Inode: 4026531833, Init: true}
	child := snapshot.Netns{Name: "blue", Inode: 4026532322}
	const (
		old    = "nf_conntrack: nf_conntrack: table full, dropping packet"
		oldest = "ip_conntrack: table full, dropping packet."
		plain  = "nf_conntrack: table full, dropping packet"
		ours   = "nf_conntrack: table full in netns 4026532322, dropping packet"
		theirs = "nf_conntrack: table full in netns 402653232, dropping packet"
		other  = "IPv4: martian source 10.0.0.1 from 10.0.0.2, on dev eth0"
		n3939  = "net_ratelimit: 3939 callbacks suppressed"
		n5     = "net_ratelimit: 5 callbacks suppressed"
	)
	for _, c := range []struct {
		name           string
		ns             snapshot.Netns
		before, during []string
		want           snapshot.KernelLog
	}{
		{"quiet", initial, []string{other}, []string{other, n5}, snapshot.KernelLog{}},
		{"every wording", initial, nil, []string{old, oldest, plain},
			snapshot.KernelLog{TableFull: 3, TableFullBefore: 3, Lines: []string{old, oldest, plain}}},
		{"before the window", initial, []string{plain, plain}, []string{plain},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 3, Lines: []string{plain, plain, plain}}},
		{"another namespace's", initial, []string{ours}, []string{ours, theirs}, snapshot.KernelLog{OtherTableFull: 2}},
		{"of the child only its own", child, []string{ours}, []string{ours, theirs, plain},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 2, OtherTableFull: 2, Lines: []string{ours, ours}}},
		{"suppressed after it", initial, nil, []string{plain, n3939, other},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 1, Suppressed: 3939, Lines: []string{plain, n3939}}},
		{"suppressed before it", initial, nil, []string{other, n3939, plain},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 1, Suppressed: 3939, Lines: []string{n3939, plain}}},
		{"suppressed at the window's edge", initial, []string{plain}, []string{n3939},
			snapshot.KernelLog{TableFullBefore: 1, Suppressed: 3939, Lines: []string{plain, n3939}}},
		{"suppressed before the window", initial, []string{n3939}, []string{plain},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 1, Lines: []string{plain}}},
		{"suppressed of something else", initial, nil, []string{plain, other, n5, other},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 1, Lines: []string{plain}}},
		{"suppressed of another namespace", initial, nil, []string{ours, n5}, snapshot.KernelLog{OtherTableFull: 1}},
		{"the last lines", initial, []string{old}, []string{plain, plain, plain, plain, plain},
			snapshot.KernelLog{TableFull: 5, TableFullBefore: 6, Lines: []string{plain, plain, plain, plain, plain}}},
		{"absurd number", initial, nil, []string{plain, "net_ratelimit: 99999999999999999999999 callbacks suppressed"},
			snapshot.KernelLog{TableFull: 1, TableFullBefore: 1, Lines: []string{plain}}},
	} {
		if got := judgeLog(c.before, c.during, c.ns); !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.name, *got, c.want)
		}
		if got := judgeLog(telling(c.before), telling(c.during), c.ns); !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s, without lines of no interest: %+v, want %+v", c.name, *got, c.want)
		}
	}
}

// Lines about memory and from helpers count in the window only.
func TestJudgeLogOfOthers(t *testing.T) {
	lines := []string{
		"ksoftirqd/1: page allocation failure: order:0, mode:0x820(GFP_ATOMIC), nodemask=(null)",
		"SLUB: Unable to allocate memory on CPU 1 (of node 0) on node -1, gfp=0x820(GFP_ATOMIC)",
		"nf_ct_sip: dropping packet: invalid SDP IN=eth0 OUT=",
		"nf_ct_ftp: registered",
	}
	if got := judgeLog(lines, lines, snapshot.Netns{Init: true}); got.NoMemory != 2 || got.HelperDrops != 1 || len(got.Lines) != 3 {
		t.Errorf("%+v, want 2 lines about memory and 1 of a helper", got)
	}
	if got := judgeLog(lines, nil, snapshot.Netns{Init: true}); got.NoMemory != 0 || got.HelperDrops != 0 || got.Lines != nil {
		t.Errorf("old lines: %+v", got)
	}
}

func TestParseLogLines(t *testing.T) {
	for _, c := range []struct {
		parse    func(string) (string, bool)
		in, want string
		ok       bool
	}{
		{parseKmsg, "4,1234,5678901,-;nf_conntrack: table full, dropping packet\n", "nf_conntrack: table full, dropping packet", true},
		{parseKmsg, "4,1,2,-,caller=T1;text; more\n SUBSYSTEM=net\n DEVICE=+net:eth0\n", "text; more", true},
		{parseKmsg, "12,1234,5678901,-;nf_conntrack: table full, dropping packet", "", false}, // a program's: facility 1
		{parseKmsg, "no record", "", false},
		{parseKmsg, "x,1;text", "", false},
		{parseKmsg, "", "", false},
		{parseSyslog, "<4>[ 5678.901234] nf_conntrack: table full, dropping packet", "nf_conntrack: table full, dropping packet", true},
		{parseSyslog, "<4>[ 5678.901234][    C1] text", "text", true},
		{parseSyslog, "<6>text without time", "text without time", true},
		{parseSyslog, "<12>[ 5678.901234] a program's", "", false},
		{parseSyslog, "cut at the ring's beginning", "", false},
		{parseSyslog, "<", "", false},
	} {
		if got, ok := c.parse(c.in); got != c.want || ok != c.ok {
			t.Errorf("%q: %q, %v, want %q, %v", c.in, got, ok, c.want, c.ok)
		}
	}
}

func TestFreshText(t *testing.T) {
	long := strings.Repeat("<6>[ 1.0] line\n", 100)
	for _, c := range []struct{ name, seen, now, want string }{
		{"first", "", "a\nb\n", "a\nb\n"},
		{"nothing new", "a\nb\n", "a\nb\n", ""},
		{"new lines", long + "x\n", long + "x\ny\n", "y\n"},
		{"the ring moved on", "a\nb\n" + long + "x\n", "b\n" + long + "x\ny\n", "y\n"},
		{"all overwritten", long + "x\n", "y\nz\n", "y\nz\n"},
	} {
		if got := freshText([]byte(c.seen), []byte(c.now)); string(got) != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func FuzzKernelLog(f *testing.F) {
	f.Add("4,1234,5678901,-;nf_conntrack: table full in netns 4026532322, dropping packet")
	f.Add("<4>[ 5678.901234] net_ratelimit: 3939 callbacks suppressed")
	f.Fuzz(func(t *testing.T, text string) {
		parseKmsg(text)
		parseSyslog(text)
		lines := strings.Split(text, "\n")
		log := judgeLog(lines[:len(lines)/2], lines[len(lines)/2:], snapshot.Netns{Init: true})
		if log.TableFull > log.TableFullBefore || len(log.Lines) > maxLogLines {
			t.Errorf("%+v", log)
		}
	})
}
