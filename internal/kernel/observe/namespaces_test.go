// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

func TestParseRefusals(t *testing.T) {
	const stat = `entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error  expect_new expect_create expect_delete search_restart
00000010  00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000008 0000000d 00000000 00000000  00000000 00000000 00000000 00000000
00000010  00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000001 00000011 00000000 00000000  00000000 00000000 00000000 00000000
`
	tests := []struct {
		name, stat string
		want       refusals
		fails      bool
	}{
		{name: "two processors", stat: stat, want: refusals{create: 0xd + 0x11 - 9, confirm: 9}},
		{name: "columns in another order", stat: "drop x insert_failed\n3 ff 1\n", want: refusals{create: 2, confirm: 1}},
		{name: "more failed than dropped", stat: "drop insert_failed\n1 3\n", want: refusals{create: 0, confirm: 3}},
		{name: "no processor", stat: "drop insert_failed\n"},
		{name: "empty", stat: "", fails: true},
		{name: "no such column", stat: "entries drop\n1 2\n", fails: true},
		{name: "short line", stat: "entries drop insert_failed\n1 2\n", fails: true},
		{name: "no number", stat: "drop insert_failed\n1 x\n", fails: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseRefusals([]byte(tt.stat))
			if (err != nil) != tt.fails || got != tt.want {
				t.Errorf("%+v, %v; want %+v, error: %v", got, err, tt.want, tt.fails)
			}
		})
	}
}

func FuzzParseRefusals(f *testing.F) {
	f.Add([]byte("drop insert_failed\n1 3\n"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) { _, _ = parseRefusals(data) })
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
