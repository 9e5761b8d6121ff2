// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/choice"
	"natkit/internal/words/exposition"
)

// Engine names what translates in a namespace: a row of translators.
type Engine string

// The first two carry out a rule file. Under EngineAccel the kernel's own rules go on deciding.
const (
	EngineEBPF  Engine = snapshot.EngineEBPF
	EngineNFT   Engine = snapshot.EngineNFT
	EngineAccel Engine = snapshot.EngineAccel
)

// defaultEngine is brought up where none is named.
const defaultEngine = EngineEBPF

var translators = map[Engine]translator{EngineEBPF: ebpfEngine{}, EngineNFT: nftEngine{}, EngineAccel: acceleration{}}

// translator is a way of translating: a namespace has one at a time, which its record names.
// What differs between them is behind this interface, and known nowhere else.
type translator interface {
	// pinned reports whether it is made of pinned programs and maps: it needs a place for
	// them, and is down when they are gone.
	pinned() bool
	// exists is the error for who would bring up another where that of the record is up.
	exists(*record) error
	// remove takes it off the namespace, but for its pins. Kept is what it cannot undo.
	remove(*instance, *record) (kept []string, err error)
	// facts are for the doctor; whole: those that take long, too. before are earlier ones, or nil.
	facts(ns *netns.Handle, before *snapshot.Engine, whole bool) (*snapshot.Engine, error)
}

// ruleEngine is a translator that carries out a rule file.
type ruleEngine interface {
	translator
	// plan completes a plan that begins with the file, as Up or Apply would carry it out with
	// the changes that the instance has made. The calling thread is in the namespace.
	plan(p *Plan, file *rulefile.File, o Options, made []Change) error
	// create makes what a plan needs, without rules; open opens what is up.
	create(*instance, *Plan) (running, error)
	open(*netns.Handle) (running, error)
	// tables opens the sessions and mappings, where they are natkit's.
	tables(*netns.Handle) (*datapath.Engine, error)
	// watch wakes a server when somebody else changes what the engine is made of.
	watch(*watcher, *netns.Handle) error
}

// running is an engine that is up in a namespace.
type running interface {
	// settle decides between the rules of the record and those that were being applied when
	// somebody was killed; refresh also forgets what has left the rules and is idle now.
	settle(*record) error
	refresh(*record) error
	// fits refuses a plan for tables of another size than those that are there.
	fits(*Plan) error
	// prepare makes it one that the plan can be put into; undo takes that back.
	prepare(*Plan) (undo func() error, err error)
	// start puts the first rules in place, replace those that come after.
	start(context.Context, *Plan) error
	replace(context.Context, *Plan) error

	// drift adds what has changed on the machine. The calling thread is in the namespace.
	drift(*drifting) error
	status(*Status, *record, *rulefile.File) error
	uses(*rulefile.File, []RuleUse) error
	collect(*exposition.Exposition, *metrics, *record)
	io.Closer
}

func (e Engine) translator() translator { return translators[e] }

// rules is the translator of what carries out rule files, as ofEngine lets pass alone.
func (e Engine) rules() ruleEngine { return translators[e].(ruleEngine) }

// open opens the engine of the record, which is whole, to look at it.
func (r *record) open(ns *netns.Handle) (running, error) {
	e, err := r.Engine.rules().open(ns)
	return e, r.unopened(ns, err)
}

// Engines are the names of those that carry out a rule file.
func Engines() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(translators)) {
		if _, is := translators[name].(ruleEngine); is {
			names = append(names, string(name))
		}
	}
	return names
}

// ParseEngine reads the value of a flag.
func ParseEngine(s string) (Engine, error) {
	if !slices.Contains(Engines(), s) {
		return "", choice.Error(s, Engines()...)
	}
	return Engine(s), nil
}

// errAccelOn refuses what is for engines.
var errAccelOn = errors.New("no engine is up here, but the kernel's NAT is accelerated: `natkit accel status` shows it, `natkit accel off` ends it")

// ofEngine passes on what reading a record gave, but for one that is of no engine.
func ofEngine(rec *record, err error) (*record, error) {
	if err == nil && rec.Accel != nil {
		return nil, errAccelOn
	}
	return rec, err
}
