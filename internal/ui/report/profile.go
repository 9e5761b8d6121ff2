// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/pprof/profile"

	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// Profile is where the kernel spent its time below one function, as `natkit
// profile` shows it.
type Profile struct {
	Root      string         `json:"root"`
	Seconds   float64        `json:"interval_s"`
	Frequency int            `json:"frequency_hz"`
	CPUs      int            `json:"cpu_count"`
	Samples   ProfileSamples `json:"sample_counts"`
	// Called are the functions that the root calls, wherever it is on the stack;
	// shares are of the root's samples.
	Called []ProfileCallee   `json:"called"`
	Tree   *observe.CallNode `json:"tree"`
}

// ProfileSamples is at how many ticks of the clock the CPUs did what.
type ProfileSamples struct {
	Total  uint64 `json:"total"`
	Kernel uint64 `json:"in_kernel"`
	User   uint64 `json:"user"`
	Idle   uint64 `json:"idle"`
	Lost   uint64 `json:"lost_samples"`
	Root   uint64 `json:"below_root"` // of the kernel's: below the root
	// Of the kernel's, where one namespace was asked for: left out.
	OtherNetns uint64 `json:"other_netns,omitzero"`
	NoNetns    uint64 `json:"no_netns,omitzero"`
}

// ProfileCallee is one function that the root calls.
type ProfileCallee struct {
	Function string  `json:"function"`
	Samples  uint64  `json:"sample_count"`
	Self     uint64  `json:"self_count"`
	Share    float64 `json:"share"` // 0 to 1
}

// NewProfile looks at a profile from one function down.
func NewProfile(p *observe.Profile, root string) *Profile {
	r := &Profile{
		Root: root, Seconds: p.Duration.Seconds(), Frequency: p.Frequency, CPUs: p.CPUs,
		Called: []ProfileCallee{}, Tree: p.Calls(root),
	}
	r.Samples = ProfileSamples{
		Total: p.Samples, Kernel: p.Kernel, User: p.User, Idle: p.Idle, Lost: p.Lost, Root: r.Tree.Samples,
		OtherNetns: p.OtherNetns, NoNetns: p.NoNetns,
	}
	for _, c := range p.Called(root) {
		r.Called = append(r.Called, ProfileCallee{
			Function: c.Function, Samples: c.Samples, Self: c.Self, Share: ratioOf(c.Samples, r.Tree.Samples),
		})
	}
	return r
}

// Text writes sums, then the functions called by the root, then the tree without
// branches that have less than least percent of the root's samples.
func (r *Profile) Text(w io.Writer, least float64) error {
	var b strings.Builder
	s := r.Samples
	fmt.Fprintf(&b, "%.1f s, %s, %d Hz: %s: %d kernel, %d user, %d idle, %d lost\n",
		r.Seconds, plural.Count(r.CPUs, "CPU"), r.Frequency, plural.Count(s.Total, "sample"), s.Kernel, s.User, s.Idle, s.Lost)
	if s.OtherNetns+s.NoNetns > 0 {
		fmt.Fprintf(&b, "left out: %d kernel samples of other namespaces, %d of interrupts and softirqs, which belong to no task\n", s.OtherNetns, s.NoNetns)
	}
	if r.Root != observe.AllFunctions {
		fmt.Fprintf(&b, "%s: %s, %s of all, %s of the kernel's\n",
			r.Root, plural.Count(s.Root, "sample"), percent.Of(ratioOf(s.Root, s.Total), 1), percent.Of(ratioOf(s.Root, s.Kernel), 1))
	}
	if s.Root == 0 {
		b.WriteString("No sample there: was there traffic?\n")
	}
	if len(r.Called) > 0 {
		fmt.Fprintf(&b, "\n%8s  %7s  called by %s\n", "samples", "share", r.Root)
		for _, c := range r.Called {
			fmt.Fprintf(&b, "%8d  %7s  %s\n", c.Samples, percent.Of(c.Share, 1), c.Function)
		}
	}
	if s.Root > 0 {
		fmt.Fprintf(&b, "\n%8s  %7s  %7s  calls\n", "samples", "of root", "of all")
		r.writeNode(&b, r.Tree, 0, least)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Profile) writeNode(b *strings.Builder, n *observe.CallNode, depth int, least float64) {
	fmt.Fprintf(b, "%8d  %7s  %7s  %*s%s\n", n.Samples,
		percent.Of(ratioOf(n.Samples, r.Samples.Root), 1), percent.Of(ratioOf(n.Samples, r.Samples.Total), 1), 2*depth, "", n.Function)
	for _, c := range n.Callees {
		if 100*ratioOf(c.Samples, r.Samples.Root) >= least {
			r.writeNode(b, c, depth+1, least)
		}
	}
}

// kernelMapping is what perf(1) calls the kernel proper.
const kernelMapping = "[kernel.kallsyms]"

// profileComment is what a written profile says of the ticks that have no stack, and
// ReadProfile reads.
const profileComment = "natkit profile: kernel stacks of %d CPUs at %d Hz; %d samples in user mode, %d idle, %d lost; of the kernel's, %d of other namespaces, %d of none"

// WriteProfile writes all kernel stacks in the form that `go tool pprof` and its
// relatives open: compressed protocol buffers.
func WriteProfile(w io.Writer, p *observe.Profile) error {
	period := int64(1e9) / int64(p.Frequency)
	kernel := &profile.Mapping{ID: 1, File: kernelMapping, HasFunctions: true}
	out := &profile.Profile{
		SampleType:    []*profile.ValueType{{Type: "samples", Unit: "count"}, {Type: "cpu", Unit: "nanoseconds"}},
		PeriodType:    &profile.ValueType{Type: "cpu", Unit: "nanoseconds"},
		Period:        period,
		TimeNanos:     p.Start.UnixNano(),
		DurationNanos: p.Duration.Nanoseconds(),
		Mapping:       []*profile.Mapping{kernel},
		Comments:      []string{fmt.Sprintf(profileComment, p.CPUs, p.Frequency, p.User, p.Idle, p.Lost, p.OtherNetns, p.NoNetns)},
	}
	modules := map[string]*profile.Mapping{"": kernel}
	functions := map[string]*profile.Function{}
	locations := map[observe.Frame]*profile.Location{}
	for _, stack := range p.Stacks {
		sample := &profile.Sample{Value: []int64{int64(stack.Count), int64(stack.Count) * period}}
		for _, frame := range stack.Frames {
			f := functions[frame.Function]
			if f == nil {
				f = &profile.Function{ID: uint64(len(functions) + 1), Name: frame.Function, SystemName: frame.Function}
				functions[frame.Function] = f
				out.Function = append(out.Function, f)
			}
			mapping := modules[frame.Module]
			if mapping == nil {
				mapping = &profile.Mapping{ID: uint64(len(modules) + 1), File: "[" + frame.Module + "]", HasFunctions: true}
				modules[frame.Module] = mapping
				out.Mapping = append(out.Mapping, mapping)
			}
			l := locations[frame]
			if l == nil {
				l = &profile.Location{
					ID: uint64(len(locations) + 1), Mapping: mapping, Address: frame.Address,
					Line: []profile.Line{{Function: f}},
				}
				locations[frame] = l
				out.Location = append(out.Location, l)
			}
			sample.Location = append(sample.Location, l)
		}
		out.Sample = append(out.Sample, sample)
	}
	if err := out.CheckValid(); err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	return out.Write(w)
}

// ReadProfile reads what WriteProfile wrote.
func ReadProfile(r io.Reader) (*observe.Profile, error) {
	in, err := profile.Parse(r)
	if err != nil {
		return nil, errors.New("read profile: not a file of natkit profile -o pprof")
	}
	p := &observe.Profile{Start: time.Unix(0, in.TimeNanos), Duration: time.Duration(in.DurationNanos)}
	if len(in.Comments) == 0 {
		return nil, errors.New("read profile: not a file of natkit profile -o pprof")
	}
	if _, err := fmt.Sscanf(in.Comments[0], profileComment, &p.CPUs, &p.Frequency, &p.User, &p.Idle, &p.Lost, &p.OtherNetns, &p.NoNetns); err != nil {
		return nil, errors.New("read profile: not a file of natkit profile -o pprof")
	}
	p.Kernel = p.OtherNetns + p.NoNetns
	for _, s := range in.Sample {
		if len(s.Value) == 0 || s.Value[0] < 0 {
			return nil, errors.New("read profile: a sample without a count")
		}
		stack := observe.ProfileStack{Count: uint64(s.Value[0])}
		for _, l := range s.Location {
			frame := observe.Frame{Address: l.Address, Function: fmt.Sprintf("0x%x", l.Address)}
			if l.Mapping != nil && l.Mapping.File != kernelMapping {
				frame.Module = snapshot.CleanText(strings.Trim(l.Mapping.File, "[]"))
			}
			if len(l.Line) > 0 && l.Line[0].Function != nil {
				frame.Function = snapshot.CleanText(l.Line[0].Function.Name) // a file may hold anything
			}
			stack.Frames = append(stack.Frames, frame)
		}
		p.Kernel += stack.Count
		p.Stacks = append(p.Stacks, stack)
	}
	p.Samples = p.Kernel + p.User + p.Idle + p.Lost
	return p, nil
}

// ProfileDiff is how the shares of the kernel's functions changed between two
// profiles: of all ticks, so that they need not be of the same length.
type ProfileDiff struct {
	Root      string           `json:"root"`
	Before    ProfileSamples   `json:"before"`
	After     ProfileSamples   `json:"after"`
	Functions []FunctionChange `json:"function_changes"` // largest change first
}

// FunctionChange is one function, with all that it called.
type FunctionChange struct {
	Function string  `json:"function"`
	Before   float64 `json:"share_before"` // share of all ticks, 0 to 1
	After    float64 `json:"share_after"`
}

// NewProfileDiff compares what lies below one function.
func NewProfileDiff(before, after *observe.Profile, root string) *ProfileDiff {
	d := &ProfileDiff{Root: root, Before: NewProfile(before, root).Samples, After: NewProfile(after, root).Samples, Functions: []FunctionChange{}}
	was, is := inclusive(before, root), inclusive(after, root)
	for name := range is {
		was[name] += 0
	}
	for name := range was {
		d.Functions = append(d.Functions, FunctionChange{name, was[name], is[name]})
	}
	slices.SortFunc(d.Functions, func(a, b FunctionChange) int {
		return cmp.Or(cmp.Compare(math.Abs(b.After-b.Before), math.Abs(a.After-a.Before)), strings.Compare(a.Function, b.Function))
	})
	return d
}

// inclusive is the share of all ticks at which each function was on the stack,
// the root and what lies below it.
func inclusive(p *observe.Profile, root string) map[string]float64 {
	out := map[string]float64{}
	for _, stack := range p.Stacks {
		from := stack.Below(root)
		if from < -1 || p.Samples == 0 {
			continue
		}
		share := float64(stack.Count) / float64(p.Samples)
		seen := map[string]bool{}
		if root != observe.AllFunctions {
			from++ // the root itself
		}
		for ; from >= 0; from-- {
			if name := stack.Frames[from].Function; !seen[name] {
				seen[name] = true
				out[name] += share
			}
		}
	}
	return out
}

// mostChanges is how many functions are shown as text.
const mostChanges = 40

// Text writes the functions that changed most.
func (d *ProfileDiff) Text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "before: %s, %s of them below %s; after: %s, %s\n\n",
		plural.Count(d.Before.Total, "sample"), percent.Of(ratioOf(d.Before.Root, d.Before.Total), 2), d.Root, plural.Count(d.After.Total, "sample"), percent.Of(ratioOf(d.After.Root, d.After.Total), 2))
	fmt.Fprintf(&b, "%9s  %9s  %9s  function, with all it calls; of all time\n", "before", "after", "change")
	for i, f := range d.Functions {
		if i == mostChanges {
			break
		}
		fmt.Fprintf(&b, "%9s  %9s  %+7.2f %%  %s\n", percent.Of(f.Before, 2), percent.Of(f.After, 2), 100*(f.After-f.Before), f.Function)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
