// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"natkit/internal/testutil/ktest"
)

// Linux before 6.10 counts the stack of a chain of calls in steps of 32 bytes a function, and
// refuses more than 512 together: a program that loads here may not load there.
func TestStackOfCalls(t *testing.T) {
	const most, step = 512, 32
	for _, o := range slices.Concat(objects, accelObjects) {
		spec, err := o.load()
		if err != nil {
			t.Fatal(err)
		}
		for name, p := range spec.Programs {
			depth, chain := newStacks(p).deepest(p.Instructions.Name(), step)
			if depth > most {
				t.Errorf("%s: %s takes %d bytes of stack: %s", o.name, name, depth, strings.Join(chain, " > "))
			}
		}
	}
}

// The kernel follows every path through a program whenever an engine starts: what many paths lead to
// is a GLOBAL function, whose paths it follows once.
func TestVerifierWork(t *testing.T) {
	ktest.Root(t)
	const most = 120_000 // instructions of paths; Linux 6.18 looks at up to 100 400
	for _, o := range slices.Concat(objects, accelObjects) {
		spec, err := o.load()
		if err != nil {
			t.Fatal(err)
		}
		coll, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Fatal(err)
		}
		defer coll.Close()
		for name, p := range coll.Programs {
			info, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			n, known := info.VerifiedInstructions()
			if !known {
				t.Fatalf("%s: the kernel does not say how many instructions it has followed", name)
			}
			if n > most {
				t.Errorf("%s: the kernel followed %d instructions, want at most %d", name, n, most)
			}
		}
		if len(coll.Programs) != len(o.programs) {
			t.Errorf("%s has %d programs, known are %q", o.name, len(coll.Programs), o.programs)
		}
	}
}

// stacks is how much of the stack each function of a program uses itself, and what it calls.
type stacks struct {
	bytes map[string]int
	calls map[string][]string
}

func newStacks(p *ebpf.ProgramSpec) stacks {
	s := stacks{map[string]int{}, map[string][]string{}}
	function := ""
	for i := range p.Instructions {
		ins := &p.Instructions[i]
		if name := ins.Symbol(); name != "" && !strings.HasPrefix(name, "LBB") {
			function = name
		}
		used := 0
		switch {
		case ins.IsFunctionReference() && !strings.HasPrefix(ins.Reference(), "LBB"):
			s.calls[function] = append(s.calls[function], ins.Reference())
		case ins.OpCode.Class().IsLoad() && ins.Src == asm.R10, ins.OpCode.Class().IsStore() && ins.Dst == asm.R10:
			used = -int(ins.Offset)
		case ins.OpCode.Class().IsALU() && ins.OpCode.ALUOp() == asm.Add && ins.OpCode.Source() == asm.ImmSource &&
			i > 0 && p.Instructions[i-1].Src == asm.R10 && p.Instructions[i-1].Dst == ins.Dst:
			used = -int(ins.Constant)
		}
		s.bytes[function] = max(s.bytes[function], used)
	}
	return s
}

// deepest is the chain of calls from a function that takes the most.
func (s stacks) deepest(function string, step int) (depth int, chain []string) {
	for _, callee := range s.calls[function] {
		if d, c := s.deepest(callee, step); d > depth {
			depth, chain = d, c
		}
	}
	own := max(s.bytes[function], 1)
	return depth + (own+step-1)/step*step, append([]string{fmt.Sprintf("%s %d", function, own)}, chain...)
}
