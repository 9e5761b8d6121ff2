// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What comments at the heads of files say of other files must be so: these are compared.

var cComment = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)

// core is the C of the engine and of accel, without comments.
func core(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, path := range sources(t, func(path string) bool {
		return slices.Contains([]string{"bpf/lib", "bpf/nat", "bpf/accel"}, filepath.Dir(path)) && (strings.HasSuffix(path, ".h") || strings.HasSuffix(path, ".c"))
	}) {
		name := strings.TrimPrefix(path, "bpf/")
		if strings.HasSuffix(name, ".h") {
			name = filepath.Base(name)
		}
		out[name] = cComment.ReplaceAllString(string(read(t, path)), "")
	}
	return out
}

// maps.h says in which other files maps are; none of them is an LRU one but those that are
// said to be.
func TestMapsAreWhereMapsSays(t *testing.T) {
	head := cComment.FindString(strings.SplitN(string(read(t, "bpf/nat/maps.h")), "\n", 2)[1])
	var lru []string
	for name, text := range core(t) {
		if has, named := strings.Contains(text, `SEC(".maps")`), strings.Contains(head, name); has != named && name != "maps.h" && name != "table.h" {
			t.Errorf("%s defines maps: %t; the head of maps.h names it: %t", name, has, named)
		}
		if strings.Contains(text, "BPF_MAP_TYPE_LRU") {
			lru = append(lru, name)
		}
	}
	slices.Sort(lru)
	if !slices.Equal(lru, []string{"fragment.h", "learn.h"}) {
		t.Errorf("LRU maps in %q; maps.h and entry.h say that those of fragments and fast-path entries are such", lru)
	}
}

// Headers know no hook's types, helpers and return codes, but for those made for it
// (ctx_xdp.h).
func TestHeadersKnowNoHook(t *testing.T) {
	hook := regexp.MustCompile(`\b(xdp_md|__sk_buff|XDP_[A-Z]+|TC_ACT_\w+|TCX_\w+|bpf_xdp_\w+|bpf_skb_\w+|bpf_clone_redirect|bpf_redirect\w*)\b`)
	for name, text := range core(t) {
		found := hook.FindString(text)
		switch {
		case strings.HasSuffix(name, ".c"):
		case strings.HasPrefix(name, "ctx_") && found == "":
			t.Errorf("%s has nothing of a hook", name)
		case !strings.HasPrefix(name, "ctx_") && found != "":
			t.Errorf("%s has %s of a hook", name, found)
		}
	}
}

// The kernel's types of connection tracking are known to conntrack.h alone.
func TestConntrackTypesAreInOneHeader(t *testing.T) {
	for name, text := range core(t) {
		if m := regexp.MustCompile(`\bstruct (nf_\w+|bpf_ct_opts\w*)`).FindString(text); (m != "") != (name == "conntrack.h") {
			t.Errorf("%s: %q", name, m)
		}
	}
}

// Go has each type of the C once (nat_abi.bpf.c).
func TestTypesAreGeneratedOnce(t *testing.T) {
	from := map[string][]string{}
	for _, path := range sources(t, func(path string) bool {
		return strings.HasPrefix(path, "internal/nat/datapath/") && regexp.MustCompile(`_bpfel(_test)?\.go$`).MatchString(path)
	}) {
		for _, m := range regexp.MustCompile(`(?m)^type [a-z]+[a-zA-Z]*?(Nat[A-Z]\w*) `).FindAllSubmatch(read(t, path), -1) {
			from[string(m[1])] = append(from[string(m[1])], path)
		}
	}
	if len(from) < 30 {
		t.Fatalf("found %d types", len(from))
	}
	for name, paths := range from {
		if len(paths) != 1 || paths[0] != "internal/nat/datapath/abi_bpfel.go" {
			t.Errorf("%s is generated in %q", name, paths)
		}
	}
}

// A test that is left out says why where scripts/test.sh counts it, and on CI only for what
// nobody can install: by internal/testutil/ktest.
func TestSkipsAreCounted(t *testing.T) {
	skip := regexp.MustCompile(`\bt\.Skip(?:f|Now)?\(`)
	for _, path := range sources(t, func(path string) bool {
		return strings.HasSuffix(path, ".go") && !strings.HasPrefix(path, "internal/testutil/")
	}) {
		for i, line := range strings.Split(string(read(t, path)), "\n") {
			if skip.MatchString(line) {
				t.Errorf("%s:%d: %s: use ktest.Missing or ktest.Unsupported", path, i+1, strings.TrimSpace(line))
			}
		}
	}
}
