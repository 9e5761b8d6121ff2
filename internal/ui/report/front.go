// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// Front is what `natkit` alone shows: three lines of state. What could not be read has its reason
// in its place.
type Front struct {
	Table       conntrack.Limits
	TableUnseen string

	// Drops are those of DropsSeconds. Where they could not be traced, DropsUnseen is why, and
	// what connection tracking itself has refused since the namespace was made stands in its place.
	Drops           snapshot.Drops
	DropsSeconds    float64
	DropsUnseen     string
	Create, Confirm uint64
	RefusedUnseen   string

	Kernel       []trim.Translator
	KernelUnseen string
	Engine       *snapshot.Engine // natkit's own, nil for none
	EngineUnseen string

	Root bool   // asks
	In   string // --netns, as it was given
}

// Text writes the lines and what to type next.
func (f *Front) Text(w io.Writer) error {
	_, err := fmt.Fprintf(w, "table  %s\ndrops  %s\nNAT    %s\n\n%s", f.table(), f.drops(), f.translators(), f.next())
	return err
}

func (f *Front) table() string {
	switch {
	case f.TableUnseen != "":
		return "unknown: " + f.TableUnseen
	case f.Table.Max == 0:
		return plural.Count(f.Table.Count, "connection tracking entry") + ", no limit"
	}
	text := fmt.Sprintf("%d of %s used (%s)", f.Table.Count, plural.Count(f.Table.Max, "connection tracking entry"), percent.Of(f.share(), 1))
	if f.Table.Count >= f.Table.Max {
		text += ": FULL, new connections are refused"
	}
	return text
}

func (f *Front) share() float64 {
	return float64(f.Table.Count) / float64(max(f.Table.Max, 1))
}

// lost are the packets of Drops that somebody may wait for, by cause.
func (f *Front) lost() (sum uint64, by map[string]uint64) {
	by = map[string]uint64{}
	for _, row := range f.Drops.Rows {
		if !row.Benign {
			sum += row.Count
			by[cmp.Or(string(row.Cause), "other")] += row.Count
		}
	}
	if n := f.Drops.LostEvents; n > 0 {
		sum += n
		by["cause unknown"] = n
	}
	return sum, by
}

func (f *Front) drops() string {
	if f.DropsUnseen != "" {
		text := "not traced: " + f.DropsUnseen
		if f.RefusedUnseen != "" {
			return text
		}
		return fmt.Sprintf("%s; connection tracking itself refused %s since this namespace was created (no entry %d, insertion failed %d)",
			text, plural.Count(f.Create+f.Confirm, "packet"), f.Create, f.Confirm)
	}
	sum, by := f.lost()
	if sum == 0 {
		return fmt.Sprintf("none in the last %.1f s", f.DropsSeconds)
	}
	var parts []string
	for _, cause := range slices.SortedFunc(maps.Keys(by), func(a, b string) int {
		return cmp.Or(cmp.Compare(by[b], by[a]), strings.Compare(a, b))
	}) {
		parts = append(parts, fmt.Sprintf("%s %d", cause, by[cause]))
	}
	return fmt.Sprintf("%s in the last %.1f s: %s", plural.Count(sum, "packet"), f.DropsSeconds, strings.Join(parts, ", "))
}

func (f *Front) translators() string {
	var parts []string
	if e := f.Engine; e != nil {
		parts = append(parts, engineWords(e))
	}
	for _, t := range f.Kernel {
		if f.Engine != nil && f.Engine.Table == t.Family+" "+t.Table {
			continue // that engine's rules
		}
		text := fmt.Sprintf("kernel, %s in %s table %s %s", plural.Count(t.Rules, "rule"), t.Backend, t.Family, t.Table)
		if len(t.Programs) > 0 {
			text += " (" + strings.Join(t.Programs, ", ") + ")"
		}
		parts = append(parts, text)
	}
	seen := f.KernelUnseen == "" && f.EngineUnseen == ""
	if len(parts) == 0 && seen {
		return "nothing translates: no NAT rule in the kernel, no natkit engine"
	}
	if len(parts) == 0 && f.KernelUnseen == f.EngineUnseen {
		return "unknown: " + f.KernelUnseen
	}
	if f.KernelUnseen != "" {
		parts = append(parts, "rules of the kernel unknown: "+f.KernelUnseen)
	}
	if f.EngineUnseen != "" {
		parts = append(parts, "natkit's engine unknown: "+f.EngineUnseen)
	}
	return strings.Join(parts, "; ")
}

func engineWords(e *snapshot.Engine) string {
	switch {
	case e.Accelerates():
		return fmt.Sprintf("accelerated by natkit accel (%s)", plural.Count(e.Sessions, "fast-path entry"))
	case e.Tracks():
		return fmt.Sprintf("the eBPF engine of natkit (%s, %s)", plural.Count(e.Rules, "rule"), plural.Count(e.Sessions, "session"))
	}
	return fmt.Sprintf("natkit's engine %s (%s)", e.Kind, plural.Count(e.Rules, "rule"))
}

// next is what to type, for what was seen.
func (f *Front) next() string {
	command, in := "natkit", ""
	if !f.Root {
		command = "sudo natkit"
	}
	if f.In != "" {
		in = " --netns " + shell.Quote(f.In)
	}
	var b strings.Builder
	line := func(what, why string) { fmt.Fprintf(&b, "  %-36s  %s\n", what, why) }
	sum, _ := f.lost()
	why := "what is wrong here, with evidence and cure"
	if sum > 0 || f.Table.Max > 0 && f.share() >= 0.8 {
		why = "why: evidence and cure, after ten seconds"
	}
	b.WriteString("Next:\n")
	line(command+" doctor"+in, why)
	line(command+" top"+in, "all of this on one live screen")
	if f.Engine == nil && len(f.Kernel) == 0 && f.KernelUnseen == "" {
		line(command+" demo", "a whole case, in separate namespaces")
	}
	line("natkit --help", "all commands")
	return b.String()
}
