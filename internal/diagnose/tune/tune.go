// SPDX-License-Identifier: Apache-2.0

// Package tune changes kernel settings and can take every change back.
//
//	plan.go      facts -> Plan: what to change, why, and what it costs. Pure
//	rules.go     how large the connection tracking table should be, and which time-outs are too long
//	settings.go  the only settings that natkit ever writes, and their permitted values
//	apply.go     journal the old value, write, read back; undo all of it when one step fails
//	rollback.go  the old values again, newest first, unless somebody else has changed them since
//	persist.go   the files in /etc: one in sysctl.d, one of udev's
//	log.go       the journal of all of it, and what it says about each apply
//	kernel.go    reading and writing settings in a network namespace
//	device.go    the same for settings of network devices
//
// What is wrong is decided elsewhere (package causes); what its findings want
// comes in as [snapshot.Setting]. Every value is on disk before it is changed, so that a rollback
// restores what a killed process left half done.
package tune

import (
	"slices"
	"strings"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// Scope says how far a setting reaches.
type Scope string

// A host setting has one value for the whole machine and can be written in the
// initial network namespace only; a namespace setting belongs to one namespace.
const (
	ScopeHost      Scope = "host"
	ScopeNamespace Scope = "namespace"
)

// Change is one setting, from its old value to its new one. Its JSON form is
// the same in a plan, in an applied record and in the journal.
type Change struct {
	Setting string `json:"setting"` // dotted: "net.netfilter.nf_conntrack_max"
	Netns   string `json:"netns"`   // reference as for --netns; "" is the caller's own, or the initial one when the scope is host
	Scope   Scope  `json:"scope"`
	Old     string `json:"old"` // "" when the facts do not hold it
	New     string `json:"new"`
	Code    string `json:"code,omitempty"` // of the finding that wants it; "" for a rule of tune's own
	Reason  string `json:"reason"`
	Does    string `json:"does"` // what the setting is, in a few words
	// MemoryBytes is what the change adds when the table is as full as it can be.
	MemoryBytes int64   `json:"memory_bytes"`
	Owners      []Owner `json:"owners"`

	// Space is the namespace that it was made in, of a change in the history.
	Space netns.ID `json:"-"`
}

// Owner is somebody besides natkit who sets a setting, and what that means for
// the change.
type Owner struct {
	Who     string `json:"who"`
	Where   string `json:"where"`
	Value   string `json:"value"`
	Warning string `json:"warning,omitempty"` // "" when it wants the same value
}

// Refusal is a change that is wanted and not made.
type Refusal struct {
	Setting   string `json:"setting"`
	Netns     string `json:"netns"`
	Value     string `json:"value"`
	Code      string `json:"code,omitempty"`
	Why       string `json:"reason"`              // names the remedy
	Chosen    bool   `json:"chosen,omitempty"`    // the user's word: said to be left out, or not said to hold
	If        string `json:"condition,omitempty"` // what the user has to say for it (PlanOptions.Confirmed)
	NeedBytes uint64 `json:"need_bytes,omitempty"`
}

// Table is the connection tracking table with one pair of limits.
type Table struct {
	Max     uint64  `json:"entries_max"`
	Buckets uint64  `json:"buckets"`
	Bytes   uint64  `json:"bytes"`        // when it is full
	Chain   float64 `json:"chain_length"` // mean entries a bucket when it is full; each flow stands in two
	// Entries is how many are in it: now as the facts say, then when shorter
	// time-outs have taken effect at the rate at which entries come now.
	Entries uint64 `json:"entries"`
	// FullSeconds is how long it takes to fill at the present rate, 0 when it is
	// full; nil when it is not growing, or has no limit.
	FullSeconds *float64 `json:"full_in_s,omitempty"`
}

// Memory is what the table costs now and with the plan.
type Memory struct {
	RAMBytes     uint64  `json:"ram_bytes"`
	Share        float64 `json:"share"`       // of RAM that the table may take at its limit
	EntryBytes   uint64  `json:"entry_bytes"` // object and extension
	EntryAssumed bool    `json:"entry_assumed,omitempty"`
	BucketBytes  uint64  `json:"bucket_bytes"`
	// Growth is how many entries a second come and stay, those among them that a full
	// table refused; below zero it empties.
	Growth float64 `json:"growth_per_second"`
	Now    Table   `json:"now"`
	Then   Table   `json:"planned"`
}

// Plan is what tune would change, in the order in which it would write.
type Plan struct {
	TakenAt time.Time      `json:"time"` // when the facts were read
	Host    snapshot.Host  `json:"host"`
	Netns   snapshot.Netns `json:"namespace"`
	Changes []Change       `json:"changes"`
	Refused []Refusal      `json:"refused"`
	Memory  *Memory        `json:"memory,omitempty"` // nil without facts on connection tracking
	// Notes are what the plan's settings do not reach, with what does.
	Notes []string `json:"notes,omitempty"`
	// Unseen is what could not be looked at, and what that costs the plan.
	Unseen []snapshot.Capability `json:"unseen"`
	// Unjudged are the causes that may want a change and could not be judged, by their codes.
	Unjudged []string `json:"unjudged_codes,omitempty"`
}

// Has says whether the plan changes a setting.
func (p *Plan) Has(setting string) bool {
	return slices.ContainsFunc(p.Changes, func(c Change) bool { return c.Setting == setting })
}

// State is what became of an apply.
type State string

// The states of a record.
const (
	StatePlanned     State = "planned"     // a dry run: nothing was written
	StateUnchanged   State = "unchanged"   // everything was as planned already; not in the history
	StateRunning     State = "running"     // a living process is at it
	StateApplied     State = "applied"     // written and read back
	StateInterrupted State = "interrupted" // its process ended between two writes; rollback restores all
	StateFailed      State = "failed"      // one step failed and the ones before it were undone
	StateRolledBack  State = "rolled back"
	StateRebooted    State = "rebooted" // the machine was started again since, and the values were not persistent
)

// Outcome is what a rollback did about one setting.
type Outcome string

// The outcomes of restoring a setting.
const (
	OutcomeRestored Outcome = "restored"
	OutcomeAlready  Outcome = "already" // it has its old value
	OutcomeKept     Outcome = "kept"    // somebody changed it since; --force restores it all the same
	OutcomeGone     Outcome = "gone"    // its namespace or interface is no more
)

// Restored is one setting, or a file of settings, in a rollback.
type Restored struct {
	Setting string  `json:"setting"` // or the path of the file
	Netns   string  `json:"netns"`
	Outcome Outcome `json:"outcome"`
	Detail  string  `json:"detail,omitempty"`
}

// Record is one apply and what became of it.
type Record struct {
	ID       string     `json:"id"`
	Time     time.Time  `json:"time"`
	By       string     `json:"by,omitempty"` // who asked for it, "" for the user
	State    State      `json:"state"`
	Changes  []Change   `json:"changes"`
	Skipped  []Refusal  `json:"refused,omitempty"`   // wanted, but refused by the plan or not possible here
	File     string     `json:"file,omitempty"`      // the sysctl.d file, when it was written
	UdevFile string     `json:"udev_file,omitempty"` // that of udev's rules, with settings of devices
	Restored []Restored `json:"restored_settings,omitempty"`
	Unjudged []string   `json:"unjudged_codes,omitempty"` // those of the plan, when nothing was changed
}

// wrote notes a file of settings.
func (r *Record) wrote(path string) {
	if strings.HasSuffix(path, udevName) {
		r.UdevFile = path
	} else {
		r.File = path
	}
}

// Kept says whether a rollback left something in place because somebody else
// had changed it.
func (r *Record) Kept() bool {
	for _, x := range r.Restored {
		if x.Outcome == OutcomeKept {
			return true
		}
	}
	return false
}
