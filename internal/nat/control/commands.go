// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/shell"
)

// What messages say to type: whole commands, about the namespace, and with the flags that what
// is up was brought up with.

// typed is a command of natkit's about a namespace.
func typed(ns *netns.Handle, words ...string) string {
	return "`" + shell.Natkit(ns.Name(), words...) + "`"
}

// flags are those that bring up again what the record is about, as it is.
func (r *record) flags() (flags []string) {
	if r.Accel != nil {
		if r.Accel.TCPTimeout > 0 {
			flags = append(flags, "--tcp-liberal")
		}
		if r.Accel.Asked > 0 {
			flags = append(flags, "--flows", strconv.Itoa(r.Accel.Asked))
		}
	} else if r.Engine != defaultEngine {
		flags = append(flags, "--engine", string(r.Engine))
	}
	if r.Attach != "" && r.Attach != AttachAuto {
		flags = append(flags, "--attach", string(r.Attach))
	}
	if len(r.Accepted) > 0 {
		flags = append(flags, "--bypass")
	}
	return flags
}

// onFile is typed with a rule file.
func onFile(ns *netns.Handle, verb, file string, flags ...string) string {
	return typed(ns, append([]string{verb, "-f", rulefile.Argument(file)}, flags...)...)
}

// again brings up what the record is about, down removes it, and restart is both.
func (r *record) again(ns *netns.Handle) string {
	if r.Accel == nil {
		return onFile(ns, "up", r.Rules.File, r.flags()...)
	}
	words := append([]string{"accel", "on"}, r.flags()...)
	for _, l := range r.Links {
		words = append(words, l.Name)
	}
	return typed(ns, words...)
}

func (r *record) down(ns *netns.Handle) string {
	if r.Accel == nil {
		return typed(ns, "down")
	}
	return typed(ns, "accel", "off")
}

func (r *record) restart(ns *netns.Handle) string { return r.down(ns) + ", then " + r.again(ns) }

// errHalf says that who brought an engine up, or down, was killed.
var errHalf = errors.New("an engine, or acceleration, is half up here")

// killed is errHalf of the record.
func (r *record) killed(ns *netns.Handle) error {
	return fmt.Errorf("%w: who brought it up, or down, was killed: %s brings it up again, %s removes it", errHalf, r.again(ns), r.down(ns))
}

// ReplaceError says that this natkit can't take over what is up, now or later: it goes on as it
// is until somebody takes it down.
type ReplaceError struct{ error }

func (e *ReplaceError) Unwrap() error { return e.error }

// unopened is why the engine of the record, which is whole, does not open.
func (r *record) unopened(ns *netns.Handle, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r.half(ns)
	case errors.As(err, new(*datapath.ABIError)), errors.As(err, new(*datapath.DamagedError)):
		return &ReplaceError{fmt.Errorf("%w: %s; its sessions end", err, r.replace(ns))}
	}
	return err
}

// replace is restart, also where a natkit serve keeps what is up: that has to be stopped first.
func (r *record) replace(ns *netns.Handle) string {
	by, err := served(ns.Inode())
	switch {
	case err != nil || by == nil:
		return r.restart(ns)
	case by.Process == os.Getpid():
		return r.down(ns) + ", then start natkit serve again"
	}
	return fmt.Sprintf("stop natkit serve (process %d), which keeps it, then %s, then start natkit serve again", by.Process, r.down(ns))
}

// CheckTakeover gives a *ReplaceError for each engine on this machine that this natkit can't take
// over, as another one made it with other data structures.
func CheckTakeover() error {
	places, err := netns.All()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range places {
		other := datapath.CheckABI(pinsOf(p.Inode))
		if !errors.As(other, new(*datapath.ABIError)) {
			continue
		}
		ns, err := netns.Open(p.Ref)
		if err != nil {
			continue // it has just ended
		}
		if rec, err := ofEngine(recordOf(ns)); err == nil && rec.Whole {
			errs = append(errs, rec.unopened(ns, other))
		}
		ns.Close()
	}
	return errors.Join(errs...)
}
