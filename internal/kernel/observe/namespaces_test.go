// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"testing"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

func TestRefusalsOf(t *testing.T) {
	for _, tt := range []struct {
		counted map[string]uint64
		want    refusals
	}{
		{map[string]uint64{"drop": 0xd + 0x11, "insert_failed": 9}, refusals{create: 0xd + 0x11 - 9, confirm: 9}},
		{map[string]uint64{"drop": 1, "insert_failed": 3}, refusals{create: 0, confirm: 3}},
		{nil, refusals{}},
	} {
		if got := refusalsOf(tt.counted); got != tt.want {
			t.Errorf("%v: %+v, want %+v", tt.counted, got, tt.want)
		}
	}
}

// A namespace is found by its number: natkit's own, one with a name, also one
// that is younger than the list; and one that is gone is not.
func TestNamespaces(t *testing.T) {
	ktest.Root(t)
	n := newNamespaces()
	own := (*netns.Handle)(nil).Inode()
	if ref, ok := n.ref(own); ref != "" || !ok {
		t.Errorf("own namespace: %q, %v", ref, ok)
	}
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	defer netns.Delete(name)
	if ref, ok := n.ref(h.Inode()); ref != name || !ok {
		t.Errorf("new namespace: %q, %v", ref, ok)
	}
	if dev := n.device(h.Inode(), 1); dev != "lo" {
		t.Errorf("device 1 of it: %q", dev)
	}
	if dev := n.device(h.Inode(), 77); dev != "if77" {
		t.Errorf("device 77 of it, which does not exist: %q", dev)
	}
	if _, ok := n.ref(1); ok {
		t.Error("namespace 1 was found")
	}
	// The process that led there has ended, or its number is another's: something else leads there still.
	for _, ended := range []string{"pid:4194304", "pid:1"} {
		n.refs[h.Inode()] = ended
		if err := n.do(h.Inode(), func() error { return nil }); err != nil || n.refs[h.Inode()] != name {
			t.Errorf("by %s: %v, by %q", ended, err, n.refs[h.Inode()])
		}
	}
	n.unknown[h.Inode()], n.interfaces[deviceKey{h.Inode(), 5}] = true, "old0"
	(&Drops{namespaces: n}).Forget(h.Inode())
	if ref, ok := n.ref(h.Inode()); ref != name || !ok || n.device(h.Inode(), 5) != "if5" {
		t.Errorf("another namespace with the number: %q, %v, its device 5 %q", ref, ok, n.device(h.Inode(), 5))
	}
	several := newNamespaces()
	delete(several.refs, h.Inode()) // made since
	several.learn([]uint64{0, 1, 2, h.Inode(), own})
	if !several.unknown[1] || !several.unknown[2] || several.refs[h.Inode()] != name || len(several.unknown) != 2 {
		t.Errorf("of several: unknown %v, %q", several.unknown, several.refs[h.Inode()])
	}
	if err := netns.Delete(name); err != nil {
		t.Fatal(err)
	}
	if err := n.do(h.Inode(), func() error { t.Error("fn was called"); return nil }); err == nil {
		t.Error("a namespace without a name was entered")
	}
}

// A namespace that has the number of one that is gone has counted from zero: what its rules drop is not taken for
// refusals of connection tracking.
func TestJudgeAfterReuse(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	defer netns.Delete(name)
	d := &Drops{symbols: &symbols{}, namespaces: newNamespaces(), reasons: reasons{core: map[uint32]string{1: "NETFILTER_DROP"}}, counted: map[uint64]conntrack.Stats{}}
	before, err := d.namespaces.counters(h.Inode())
	if err != nil {
		ktest.Missing(t, "counters of connection tracking: %v", err)
	}
	before[0]["drop"], before[0]["insert_failed"] = 100, 50
	d.counted[h.Inode()] = before
	for _, j := range d.judge(map[dropsDropKey]uint64{{Netns: uint32(h.Inode()), Reason: 1}: 5}) {
		if j.cause != snapshot.CauseRule {
			t.Errorf("drops that connection tracking did not count: %v, want %v", j.cause, snapshot.CauseRule)
		}
	}
}
