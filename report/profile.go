// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"

	"github.com/google/pprof/profile"

	"natkit/observe"
)

// Profile is where the kernel spent its time below one function, as `natkit
// profile` shows it.
type Profile struct {
	Root      string         `json:"root"`
	Seconds   float64        `json:"interval_s"`
	Frequency int            `json:"frequency_hz"`
	CPUs      int            `json:"cpus"`
	Samples   ProfileSamples `json:"samples"`
	// Called are the functions that the root calls, wherever it is on the stack;
	// shares are of the root's samples.
	Called []ProfileCallee   `json:"called"`
	Tree   *observe.CallNode `json:"tree"`
}

// ProfileSamples is at how many ticks of the clock the CPUs did what.
type ProfileSamples struct {
	Total  uint64 `json:"total"`
	Kernel uint64 `json:"kernel"`
	User   uint64 `json:"user"`
	Idle   uint64 `json:"idle"`
	Lost   uint64 `json:"lost"`
	Root   uint64 `json:"root"` // of the kernel's: below the root
}

// ProfileCallee is one function that the root calls.
type ProfileCallee struct {
	Function string  `json:"function"`
	Samples  uint64  `json:"samples"`
	Self     uint64  `json:"self"`
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
	}
	for _, c := range p.Called(root) {
		r.Called = append(r.Called, ProfileCallee{
			Function: c.Function, Samples: c.Samples, Self: c.Self, Share: percent(c.Samples, r.Tree.Samples) / 100,
		})
	}
	return r
}

// Text writes sums, then the functions called by the root, then the tree without
// branches that have less than least percent of the root's samples.
func (r *Profile) Text(w io.Writer, least float64) error {
	var b strings.Builder
	s := r.Samples
	fmt.Fprintf(&b, "%.1f s, %d CPUs, %d Hz: %d samples: %d kernel, %d user, %d idle, %d lost\n",
		r.Seconds, r.CPUs, r.Frequency, s.Total, s.Kernel, s.User, s.Idle, s.Lost)
	if r.Root != observe.AllFunctions {
		fmt.Fprintf(&b, "%s: %s, %.1f %% of all, %.1f %% of the kernel's\n",
			r.Root, count(s.Root, "sample"), percent(s.Root, s.Total), percent(s.Root, s.Kernel))
	}
	if s.Root == 0 {
		b.WriteString("Nothing was seen there: was there traffic?\n")
	}
	if len(r.Called) > 0 {
		fmt.Fprintf(&b, "\n%8s  %7s  called by %s\n", "samples", "share", r.Root)
		for _, c := range r.Called {
			fmt.Fprintf(&b, "%8d  %5.1f %%  %s\n", c.Samples, 100*c.Share, c.Function)
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
	fmt.Fprintf(b, "%8d  %5.1f %%  %5.1f %%  %*s%s\n", n.Samples,
		percent(n.Samples, r.Samples.Root), percent(n.Samples, r.Samples.Total), 2*depth, "", n.Function)
	for _, c := range n.Callees {
		if percent(c.Samples, r.Samples.Root) >= least {
			r.writeNode(b, c, depth+1, least)
		}
	}
}

// WriteProfile writes all kernel stacks in the form that `go tool pprof` and its
// relatives open: compressed protocol buffers.
func WriteProfile(w io.Writer, p *observe.Profile) error {
	period := int64(1e9) / int64(p.Frequency)
	kernel := &profile.Mapping{ID: 1, File: "[kernel.kallsyms]", HasFunctions: true}
	out := &profile.Profile{
		SampleType:    []*profile.ValueType{{Type: "samples", Unit: "count"}, {Type: "cpu", Unit: "nanoseconds"}},
		PeriodType:    &profile.ValueType{Type: "cpu", Unit: "nanoseconds"},
		Period:        period,
		TimeNanos:     p.Start.UnixNano(),
		DurationNanos: p.Duration.Nanoseconds(),
		Mapping:       []*profile.Mapping{kernel},
		Comments: []string{fmt.Sprintf("natkit profile: kernel stacks of %d CPUs at %d Hz; %d samples in user mode, %d idle, %d lost",
			p.CPUs, p.Frequency, p.User, p.Idle, p.Lost)},
	}
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
			l := locations[frame]
			if l == nil {
				l = &profile.Location{
					ID: uint64(len(locations) + 1), Mapping: kernel, Address: frame.Address,
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
