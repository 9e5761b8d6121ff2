// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// What the demo tells: to a Reporter while it happens, and as its result.

// Reporter is told the demo while it happens.
type Reporter interface {
	// Begin comes once, before anything is changed.
	Begin(d *DemoResult, drawing string, hostWrite string)
	// Step begins a step: what it shows, and the command that does it alone.
	Step(step *DemoStep)
	// Say is a line inside the step.
	Say(format string, args ...any)
	// Progress replaces itself; part is 0 to 1.
	Progress(what string, part float64)
	// Facts shows what the diagnosis looked at before the doctor spoke; p is nil
	// where this kernel's stacks can't be sampled.
	Facts(s *snapshot.Snapshot, p *observe.Profile)
	// Done ends the step: its figures are in.
	Done(step *DemoStep)
}

// silent is for a load that runs beside something else.
type silent struct{}

func (silent) Begin(*DemoResult, string, string)          {}
func (silent) Step(*DemoStep)                             {}
func (silent) Say(string, ...any)                         {}
func (silent) Progress(string, float64)                   {}
func (silent) Facts(*snapshot.Snapshot, *observe.Profile) {}
func (silent) Done(*DemoStep)                             {}

// The steps, in their order.
const (
	StepBaseline   = "baseline"
	StepCollapse   = "collapse"
	StepDiagnosis  = "diagnosis"
	StepCure       = "cure"
	StepProof      = "proof"
	StepAccelerate = "accelerate"
	StepReplace    = "replace"
)

// DemoStep is one step. Which of HTTP, Findings and Changes it has depends on what
// it does; each has the form that its own command prints.
type DemoStep struct {
	Name      string             `json:"name"`
	Shows     string             `json:"shows"`
	Command   string             `json:"command"` // that does it alone, in a lab named case
	Seconds   float64            `json:"duration_s"`
	HTTP      *bench.HTTPResult  `json:"http,omitempty"`
	Published *Published         `json:"published_result,omitempty"`
	Findings  []causes.Finding   `json:"findings,omitempty"`
	Changes   []tune.Change      `json:"changes,omitempty"`
	Removed   uint64             `json:"removed_entries,omitempty"` // from the conntrack table, by a cure without host-wide write
	Facts     *snapshot.Snapshot `json:"facts,omitempty"`           // what the findings rest on
	RuleFile  string             `json:"rule_file,omitempty"`       // that the load ran on
	Figures   []bench.Figure     `json:"figures,omitempty"`         // of mitigations side by side, by their names
	NotRun    string             `json:"not_run,omitempty"`         // why the step was left out here
}

// Published is what the case's authors measured, elsewhere and on other
// hardware: never natkit's own figures.
type Published struct {
	Completed         int     `json:"completed"`
	RequestsPerSecond float64 `json:"requests_per_second,omitempty"`
	TimePerRequestMS  float64 `json:"time_per_request_ms,omitempty"`
	ConnectMS         float64 `json:"connect_mean_ms,omitempty"`
	Note              string  `json:"note,omitempty"`
}

// published are the figures of the first site; the second published none of its
// requests.
var published = map[string]Published{
	StepBaseline: {Completed: 100000, RequestsPerSecond: 6576, TimePerRequestMS: 760, ConnectMS: 177},
	StepCollapse: {Completed: 5602, Note: "stopped by a timeout of 2 s"},
	StepProof:    {Completed: 100000, RequestsPerSecond: 6315, TimePerRequestMS: 791, ConnectMS: 355},
}

// DemoResult is a whole demo.
type DemoResult struct {
	Command     string     `json:"command"` // that made it
	Kernel      string     `json:"kernel"`
	Site        int        `json:"site"`
	Fault       string     `json:"fault"` // code of the cause that was made
	FaultReason string     `json:"fault_reason,omitempty"`
	HostWrite   bool       `json:"host_write"` // nf_conntrack_max was raised, and put back
	Steps       []DemoStep `json:"steps"`
	// Restored reports that in the end the host-wide values were as before and
	// nothing of the lab was left. Left names what was not so.
	Restored bool       `json:"restored"`
	Left     []string   `json:"left,omitempty"`
	Before   HostValues `json:"before"`
	After    HostValues `json:"after"`
}
