// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/service"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// ServeOptions says what Serve keeps up.
type ServeOptions struct {
	Options
	File    string                           // the rule file, an absolute path
	Filters func() ([]snapshot.Chain, error) // of the namespace, as they are now: Options.Chains
	Reload  <-chan os.Signal                 // apply the file though it is as it was
	Down    bool                             // take the NAT down at the end
	Metrics net.Listener                     // nil: none. Closed at the end
	Build   map[string]string                // labels of natkit_build_info
	// Record keeps the log that a rule file wants, until the context ends. nil: nobody does.
	Record func(context.Context, rulefile.Log) error
	Say    func(*ServeEvent) // in the order in which things happen
}

// ServeEvent is something that Serve has done, or could not do.
type ServeEvent struct {
	Time time.Time `json:"time"`
	// Kind is up (brought up), adopted (it was up), reloaded (the file), followed (the
	// machine: Why), waiting (for the machine: Why), kept (the rules in use, because of
	// Error), log (what concerns it: Why), unrecorded (translations, because of Error), ended,
	// or down.
	Kind  string   `json:"kind"`
	File  string   `json:"file"`
	Why   []string `json:"reasons,omitempty"`
	Error string   `json:"error,omitempty"`
	Plan  *Plan    `json:"nat_plan,omitempty"`
}

const (
	serveQuiet = 200 * time.Millisecond // how long a file has to be as it is, and the machine
	serveBusy  = time.Second            // after which the machine is looked at though it is not quiet
	serveLook  = 10 * time.Second       // between two looks when nothing happens
	serveAgain = 5 * time.Second        // between two tries of what can't be done, if something has happened
	serveRetry = time.Minute            // if nothing has
)

// Serve brings up the NAT of a rule file, or adopts the one that is up, and keeps it equal
// to the file and to the machine until the context ends: it applies the file when that
// changes, and the rules in use when the machine has moved away from what the engine was
// told (Drift). What can't be applied leaves the rules in use. Packets don't need it:
// killed at any moment it harms none, and the next Serve adopts.
func Serve(ctx context.Context, o ServeOptions) (err error) {
	hold, err := holdServing(o.Namespace.Inode())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hold.release()) }()
	s := &server{o: o, hold: hold, recorder: newRecorder(), told: map[topic]string{}, state: ServeState{Process: os.Getpid(), Since: time.Now(), File: o.File, Starting: true}}
	s.o.serve, s.o.Wait = hold, true
	s.ports = newPortControl(o.Namespace)
	defer func() { err = errors.Join(err, s.ports.Close()) }()
	s.metrics = newMetrics(o.Namespace, o.Build, s.ports)
	s.metrics.starting = s.state.starting()
	if o.Metrics != nil {
		s.state.Metrics = o.Metrics.Addr().String()
		defer s.metrics.listen(o.Metrics)()
	}
	if err := s.hold.say(s.state); err != nil {
		return err
	}
	if s.watcher, err = watch(o.Namespace); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.watcher.Close()) }()
	if err := s.begin(ctx); err != nil {
		return err
	}
	defer s.recorder.stop()
	if err := s.engine.rules().watch(s.watcher, o.Namespace); err != nil {
		return err
	}
	service.Notify(service.Ready)
	s.run(ctx)
	service.Notify(service.Stopping)
	s.recorder.stop()
	if !o.Down {
		s.say(&ServeEvent{Kind: "ended"})
		return nil
	}
	kept, err := down(o.Namespace, hold)
	if err == nil {
		s.say(&ServeEvent{Kind: "down", Why: kept})
	}
	return err
}

// server is a Serve that runs.
type server struct {
	o       ServeOptions
	hold    *serving
	state   ServeState
	watcher *watcher
	metrics *metrics
	ports   *portControl

	engine Engine
	attach Attach         // of what was adopted
	file   *rulefile.File // whose rules are in use
	text   string         // of it

	seen   stamp  // of the rule file when it was read last
	gone   string // why it could not be read
	wanted string // a text that could not be applied, and is to be tried again
	// What stands against being equal to the file, and to the machine.
	fileError, machineError error

	recorder recorder

	failed time.Time        // the last try of something
	woken  bool             // something has happened since
	told   map[topic]string // what was reported last of what may be the case for long
}

// topic is what something that may be the case for long is about.
type topic uint8

const (
	ofRules topic = iota // and the machine
	ofFile               // its folder
	ofPorts              // that hosts ask for
	ofLog
)

func (s *server) say(e *ServeEvent) {
	e.Time, e.File = time.Now(), s.o.File
	s.state.Error, s.state.Starting = "", false
	if err := cmp.Or(s.fileError, s.machineError); err != nil {
		s.state.Error = err.Error()
	}
	if err := s.hold.say(s.state); err != nil {
		e.Why = append(e.Why, err.Error())
	}
	s.o.Say(e)
}

// begin adopts what is up, or brings the file up.
func (s *server) begin(ctx context.Context) error {
	rec, err := readSettled(s.o.Namespace)
	switch {
	case errors.Is(err, ErrDown) || notWhole(err) || err == nil && !rec.Whole:
		return s.bringUp(ctx)
	case errors.Is(err, errAccelOn):
		return &ReplaceError{err}
	case err != nil:
		return err
	case s.o.Engine != "" && s.o.Engine != rec.Engine:
		return &ReplaceError{fmt.Errorf("engine %s is up: %s first, or serve that engine; sessions end", rec.Engine, rec.down(s.o.Namespace))}
	}
	file, err := rec.rules()
	if err != nil {
		return fmt.Errorf("read the rules in use: %w", err)
	}
	s.attach = rec.Attach
	p := &Plan{Engine: rec.Engine, Rules: len(file.Rules)}
	s.use(p, file, rec.Rules.Text)
	s.say(&ServeEvent{Kind: "adopted", Plan: p})
	s.look(ctx, "file", s.o.Attach != "" && s.o.Attach != rec.Attach)
	return nil
}

// bringUp is for when nothing is up: there are no rules to keep, so that what is wrong
// with the file is an error.
func (s *server) bringUp(ctx context.Context) error {
	seen, text, err := readRules(ctx, s.o.File)
	if err != nil {
		return err
	}
	file, err := rulefile.Parse(s.o.File, []byte(text))
	if err != nil {
		return err
	}
	o, err := s.options()
	if err != nil {
		return err
	}
	// What somebody has taken down comes back as it was adopted.
	o.Engine, o.Attach = cmp.Or(o.Engine, s.engine), cmp.Or(o.Attach, s.attach)
	p, err := untilSteady(ctx, o.Namespace, file, func() (*Plan, error) { return Up(ctx, file, text, o) })
	if err != nil {
		return err
	}
	s.seen = seen
	s.use(p, file, text)
	s.metrics.reloaded("file", nil)
	s.say(&ServeEvent{Kind: "up", Plan: p})
	return nil
}

// unsteadyTries bounds untilSteady: interfaces that come and go for longer are an error.
const unsteadyTries = 5

// untilSteady calls up again when it fails while interfaces of the file come or go: what is
// not there when it begins is waited for, and what goes later would be an error.
func untilSteady(ctx context.Context, ns *netns.Handle, file *rulefile.File, up func() (*Plan, error)) (p *Plan, err error) {
	for range unsteadyTries {
		before, err1 := indicesOf(ns, file)
		p, err = up()
		after, err2 := indicesOf(ns, file)
		if err == nil || ctx.Err() != nil || err1 != nil || err2 != nil || maps.Equal(before, after) {
			break
		}
	}
	return p, err
}

// indicesOf are the indices of the interfaces of a file that are there.
func indicesOf(ns *netns.Handle, file *rulefile.File) (map[string]int, error) {
	out := map[string]int{}
	err := ns.Do(func() error {
		for _, name := range interfacesOf(file) {
			l, err := netlink.LinkByName(name)
			var missing netlink.LinkNotFoundError
			if errors.As(err, &missing) {
				continue
			}
			if err != nil {
				return fmt.Errorf("interface %q: %w", name, err)
			}
			out[name] = l.Attrs().Index
		}
		return nil
	})
	return out, err
}

// options are those of this moment.
func (s *server) options() (o Options, err error) {
	o = s.o.Options
	if s.o.Filters != nil {
		if o.Chains, err = s.o.Filters(); err != nil {
			return o, fmt.Errorf("look for filters that packets would bypass: %w", err)
		}
	}
	return o, nil
}

// use notes what is in use now.
func (s *server) use(p *Plan, file *rulefile.File, text string) {
	s.engine, s.file, s.text, s.wanted, s.fileError = p.Engine, file, text, "", nil
	s.metrics.use(p, file)
	s.recorder.follow(s.o.Record, file.Log)
	s.control(s.ports.use(file))
}

// control reports why hosts can't ask for explicit mappings.
func (s *server) control(err error) {
	if err == nil {
		s.told[ofPorts] = ""
		return
	}
	s.tell(ofPorts, &ServeEvent{Kind: "waiting", Why: strings.Split(err.Error(), "\n")})
}

// run waits for something to happen, and looks what it was.
func (s *server) run(ctx context.Context) {
	tick := time.NewTicker(serveLook)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := s.watcher.follow(s.o.File); err != nil { // its folder is gone: the tick looks again
			s.tell(ofFile, &ServeEvent{Kind: "waiting", Why: []string{err.Error()}})
		} else {
			s.told[ofFile] = ""
		}
		select {
		case <-ctx.Done():
		case <-s.o.Reload:
			service.Notify(service.Reloading())
			s.look(ctx, "signal", true)
			service.Notify(service.Ready)
		case <-s.watcher.C:
			s.settle(ctx)
			s.woken = true
			s.look(ctx, "file", false)
		case <-tick.C:
			s.look(ctx, "file", false)
			s.recorder.follow(s.o.Record, s.file.Log)
		case err := <-s.recorder.failed:
			if time.Since(s.recorder.began) > serveRetry { // it was kept until now
				s.told[ofLog] = ""
			}
			s.tell(ofLog, &ServeEvent{Kind: "unrecorded", Error: err.Error()})
		}
	}
}

// settle waits until the machine is quiet: what changes often changes more than once.
func (s *server) settle(ctx context.Context) {
	busy := time.After(serveBusy)
	for {
		select {
		case <-s.watcher.C:
			continue
		case <-time.After(serveQuiet / 2):
		case <-busy:
		case <-ctx.Done():
		}
		return
	}
}

// look applies the file, if it has changed or must be; and follows the machine.
func (s *server) look(ctx context.Context, cause string, must bool) {
	if _, err := readSettled(s.o.Namespace); errors.Is(err, ErrDown) || notWhole(err) {
		if must || s.machineError == nil || s.due() {
			s.again(ctx)
		}
		return
	}
	text, changed, err := s.read(ctx, must)
	switch {
	case err != nil:
		s.keep(cause, &s.fileError, err)
	case changed && (must || text != s.text):
		s.reload(ctx, cause, text)
	case changed && s.fileError != nil: // it was put back
		s.metrics.reloaded(cause, nil)
		s.use(&Plan{Engine: s.engine}, s.file, s.text)
		s.say(&ServeEvent{Kind: "reloaded", Plan: &Plan{Engine: s.engine, Rules: len(s.file.Rules)}})
	case s.wanted != "" && s.due():
		s.reload(ctx, cause, s.wanted)
	}
	if ctx.Err() == nil {
		s.follow(ctx)
		s.control(s.ports.follow())
	}
}

// due reports whether it is time to try again.
func (s *server) due() bool {
	since := time.Since(s.failed)
	return since > serveRetry || since > serveAgain && s.woken
}

// read reads the file if it has changed since it was read, or in any case. A file that
// is being written is left for a moment later, and is no change. What is wrong with
// reading it is reported once.
func (s *server) read(ctx context.Context, must bool) (text string, changed bool, err error) {
	seen, err := stampOf(s.o.File)
	switch {
	case err != nil && err.Error() == s.gone && !must:
		return "", false, nil
	case err != nil:
		s.gone, s.seen = err.Error(), stamp{}
		return "", false, err
	}
	s.gone = ""
	if seen == s.seen && !must {
		return "", false, nil
	}
	if age := time.Since(seen.modified); age >= 0 && age < serveQuiet && !must {
		time.AfterFunc(serveQuiet-age, s.watcher.wake)
		return "", false, nil
	}
	s.seen, text, err = readRules(ctx, s.o.File)
	return text, err == nil, err
}

// reload makes a text the rules.
func (s *server) reload(ctx context.Context, cause, text string) {
	file, err := rulefile.Parse(s.o.File, []byte(text))
	if err != nil {
		s.wanted = "" // another try would find the same
		s.keep(cause, &s.fileError, err)
		return
	}
	s.wanted = text
	o, err := s.options()
	if err == nil {
		var p *Plan
		if p, err = Apply(ctx, file, text, o); err == nil {
			s.metrics.reloaded(cause, nil)
			s.use(p, file, text)
			s.told[ofRules] = ""
			s.say(&ServeEvent{Kind: "reloaded", Plan: p})
			return
		}
	}
	s.keep(cause, &s.fileError, err)
}

// keep says why the rules in use stay as they are.
func (s *server) keep(cause string, where *error, err error) {
	*where, s.failed, s.woken = err, time.Now(), false
	s.metrics.reloaded(cause, err)
	s.tell(ofRules, &ServeEvent{Kind: "kept", Error: err.Error()})
}

// tell says something that may be the case for long, once.
func (s *server) tell(of topic, e *ServeEvent) {
	if now := e.Kind + e.Error + strings.Join(e.Why, ";"); now != s.told[of] {
		s.told[of] = now
		s.say(e)
	}
}

// follow applies the rules in use to a machine that has changed.
func (s *server) follow(ctx context.Context) {
	drift, err := readDrift(s.o.Namespace, s.file)
	if err != nil {
		s.keep("machine", &s.machineError, err)
		return
	}
	var changed, awaited []string
	for _, d := range drift {
		if d.Waits {
			awaited = append(awaited, d.What)
		} else {
			changed = append(changed, d.What)
		}
	}
	switch {
	case len(changed) > 0 && (s.machineError == nil || s.due()):
		s.adapt(ctx, changed)
	case len(changed) == 0 && len(awaited) > 0:
		s.machineError = nil
		s.tell(ofRules, &ServeEvent{Kind: "waiting", Why: awaited})
	case len(changed) == 0:
		s.machineError = nil
		if s.fileError == nil {
			s.told[ofRules] = ""
		}
	}
}

// again brings up what somebody has taken down.
func (s *server) again(ctx context.Context) {
	err := s.bringUp(ctx)
	s.machineError = nil
	if err != nil {
		s.keep("machine", &s.machineError, fmt.Errorf("somebody has taken the NAT down: %w", err))
	}
}

// adapt applies the rules in use.
func (s *server) adapt(ctx context.Context, why []string) {
	o := s.o.Options
	o.Attach, o.follow = "", true
	p, err := Apply(ctx, s.file, s.text, o)
	if err != nil {
		s.keep("machine", &s.machineError, fmt.Errorf("%s: %w", strings.Join(why, "; "), err))
		return
	}
	s.machineError, s.told[ofRules] = nil, ""
	s.metrics.reloaded("machine", nil)
	s.metrics.use(p, s.file)
	s.say(&ServeEvent{Kind: "followed", Why: why, Plan: p})
}

// stamp distinguishes a file from what it was before.
type stamp struct {
	inode    uint64
	size     int64
	modified time.Time
	changed  unix.Timespec
}

func stampOf(path string) (stamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{}, fmt.Errorf("read rule file: %w", &os.PathError{Op: "stat", Path: path, Err: err})
	}
	return stamp{inode: st.Ino, size: st.Size, modified: time.Unix(st.Mtim.Unix()), changed: st.Ctim}, nil
}

// readRules reads a file with the stamp that it had before.
func readRules(ctx context.Context, path string) (stamp, string, error) {
	seen, err := stampOf(path)
	if err != nil {
		return seen, "", err
	}
	data, err := rulefile.ReadFile(ctx, path)
	return seen, string(data), err
}
