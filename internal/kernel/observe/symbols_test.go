// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

const someSymbols = `0000000000000000 A fixed_percpu_data
ffffffff81000000 T _stext
ffffffff81000200 t ip_rcv
ffffffff81000100 t nf_hook_slow
ffffffff81000180 d not_a_function
ffffffffc0000000 t nft_do_chain	[nf_tables]
ffffffff81000300 t ip_error.isra.0
nonsense
ffffffff81000400 t
`

func TestSymbols(t *testing.T) {
	s, err := parseSymbols(strings.NewReader(someSymbols), true)
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[uint64]string{
		0xffffffff81000100: "nf_hook_slow+0x0",
		0xffffffff810001a6: "nf_hook_slow+0xa6", // data in between does not count
		0xffffffff81000200: "ip_rcv+0x0",
		0xffffffff810003ff: "ip_error.isra.0+0xff",
		0xffffffffc0000010: "nft_do_chain+0x10",
		0xffffffff80ffffff: "0xffffffff80ffffff", // before the first
		0xffffffffc0200000: "0xffffffffc0200000", // far behind the last
		0:                  "0x0",
	} {
		if got := s.place(addr); got != want {
			t.Errorf("%#x is %q, want %q", addr, got, want)
		}
	}
	if got := s.address("nft_do_chain"); got != 0xffffffffc0000000 {
		t.Errorf("address of nft_do_chain: %#x", got)
	}
	for addr, want := range map[uint64]string{0xffffffffc0000010: "nf_tables", 0xffffffff81000100: "", 0: ""} {
		if got := s.module(addr); got != want {
			t.Errorf("%#x is in module %q, want %q", addr, got, want)
		}
	}
	if got := s.address("absent"); got != 0 {
		t.Errorf("address of a function that is absent: %#x", got)
	}
	if got := baseName("ip_error.isra.0"); got != "ip_error" {
		t.Errorf("base name %q", got)
	}
}

// The kernel takes long to list the symbols of thousands of eBPF programs: who does not ask for them does not read on.
func TestSymbolsEndBeforePrograms(t *testing.T) {
	const program = "ffffffffc0100000 t bpf_prog_6deef7357e7b4530_tc\t[bpf]\n"
	after := iotest.ErrReader(errors.New("read on"))
	s, err := parseSymbols(io.MultiReader(strings.NewReader(someSymbols+program), after), false)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.place(0xffffffffc0000010); got != "nft_do_chain+0x10" || s.address("bpf_prog_6deef7357e7b4530_tc") != 0 {
		t.Errorf("%s, and a program at %#x", got, s.address("bpf_prog_6deef7357e7b4530_tc"))
	}
	if s, err = parseSymbols(strings.NewReader(someSymbols+program), true); err != nil || s.module(0xffffffffc0100000) != programsModule {
		t.Errorf("with programs: %v", err)
	}
}

// Where addresses are hidden all of them are zero.
func TestSymbolsHidden(t *testing.T) {
	s, err := parseSymbols(strings.NewReader("0000000000000000 T nf_hook_slow\n0000000000000000 t ip_rcv\n"), true)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.place(0xffffffff81000100); got != "0xffffffff81000100" {
		t.Errorf("%q, want the address", got)
	}
}

func FuzzParseSymbols(f *testing.F) {
	f.Add(someSymbols)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseSymbols(strings.NewReader(text), true)
		if err != nil {
			return
		}
		for _, sym := range s.table {
			if name, _ := s.function(sym.addr); name == "" && sym.start != sym.end {
				t.Errorf("no name for %#x", sym.addr)
			}
		}
	})
}
