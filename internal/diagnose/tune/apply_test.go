// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

const (
	synSent  = "net.netfilter.nf_conntrack_tcp_timeout_syn_sent"
	forward  = "net.ipv4.ip_forward"
	portsOut = "net.ipv4.ip_local_port_range"
)

// files is a tree of settings in place of /proc/sys, in the initial namespace.
type files struct {
	t *testing.T
	Place
}

func newFiles(t *testing.T, values map[string]string) *files {
	t.Helper()
	dir := t.TempDir()
	f := &files{t, Place{StateDir: dir + "/state", EtcDir: dir + "/etc", root: dir + "/sys"}}
	f.set("net.core.netdev_max_backlog", "1000") // so it is the initial namespace
	for name, value := range values {
		f.set(name, value)
	}
	return f
}

func (f *files) set(name, value string) {
	f.t.Helper()
	write(f.t, filepath.Join(f.root, snapshot.SysctlPath(name)), value+"\n")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// expect compares settings with what they should be.
func (f *files) expect(want map[string]string) {
	f.t.Helper()
	s := &space{root: f.root}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got, err := s.read(name); err != nil || got != want[name] {
			f.t.Errorf("%s is %q, want %q (%v)", name, got, want[name], err)
		}
	}
}

func (f *files) sysctlFile() string { return f.files()[0].path }

// conf is the content of the sysctl.d file without its comments; "-" when it is
// not there.
func (f *files) conf() string {
	text, err := readFile(f.sysctlFile())
	if err != nil {
		f.t.Fatal(err)
	}
	if text == nil {
		return "-"
	}
	out := ""
	for line := range strings.Lines(*text) {
		if !strings.HasPrefix(line, "#") {
			out += line
		}
	}
	return out
}

func planOf(changes ...string) *Plan {
	p := &Plan{}
	for _, c := range changes {
		name, value, _ := strings.Cut(c, "=")
		p.Changes = append(p.Changes, Change{Setting: name, New: value, Reason: "a test", Owners: []Owner{}})
	}
	return p
}

func (f *files) apply(o ApplyOptions, changes ...string) *Record {
	f.t.Helper()
	o.Place = f.Place
	r, err := Apply(context.Background(), planOf(changes...), o)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

func (f *files) rollback(id string, force bool) *Record {
	f.t.Helper()
	r, err := Rollback(context.Background(), id, RollbackOptions{Place: f.Place, Force: force})
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// states is the history in one line.
func (f *files) states() string {
	f.t.Helper()
	list, err := History(f.Place)
	if err != nil {
		f.t.Fatal(err)
	}
	var out []string
	for _, r := range list {
		out = append(out, string(r.State))
	}
	return strings.Join(out, ", ")
}

func outcomes(r *Record) string {
	var out []string
	for _, x := range r.Restored {
		out = append(out, filepath.Ext("." + x.Setting)[1:]+" "+string(x.Outcome))
	}
	return strings.Join(out, ", ")
}

var (
	before = map[string]string{settingMax: "1000", settingBuckets: "1024", timeWait: "120", portsOut: "32768\t60999"}
	after  = map[string]string{settingMax: "131072", settingBuckets: "131072", timeWait: "30", portsOut: "1024 65535"}
	normal = map[string]string{settingMax: "1000", settingBuckets: "1024", timeWait: "120", portsOut: "32768 60999"}
)

func fourChanges() []string {
	return []string{settingBuckets + "=131072", settingMax + "=131072", timeWait + "=30", portsOut + "=1024 65535"}
}

func TestApplyAndRollback(t *testing.T) {
	f := newFiles(t, before)
	if got := f.states(); got != "" {
		t.Errorf("history %q before anything", got)
	}
	dry := f.apply(ApplyOptions{DryRun: true}, fourChanges()...)
	if dry.State != StatePlanned || len(dry.Changes) != 4 {
		t.Errorf("dry run: %+v", dry)
	}
	f.expect(normal)
	if _, err := os.Stat(f.StateDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a dry run wrote a journal: %v", err)
	}

	r := f.apply(ApplyOptions{}, fourChanges()...)
	f.expect(after)
	if r.State != StateApplied || len(r.Changes) != 4 || r.Changes[3].Old != "32768 60999" || r.Changes[0].Scope != ScopeHost || r.ID == "" {
		t.Errorf("record %+v", r)
	}
	if again := f.apply(ApplyOptions{}, fourChanges()...); again.State != StateUnchanged || len(again.Changes) != 0 {
		t.Errorf("applied again: %+v", again)
	}
	second := f.apply(ApplyOptions{}, timeWait+"=20", settingMax+"=131072")
	if len(second.Changes) != 1 || second.ID == r.ID {
		t.Errorf("second record %+v", second)
	}
	if got := f.states(); got != "applied, applied" {
		t.Errorf("history %q", got)
	}

	if back := f.rollback(Last, false); back.ID != second.ID || outcomes(back) != "nf_conntrack_tcp_timeout_time_wait restored" {
		t.Errorf("rollback %+v", back)
	}
	f.expect(after)
	// Newest first: the limit before the hash.
	if back := f.rollback("", false); back.ID != r.ID || outcomes(back) !=
		"ip_local_port_range restored, nf_conntrack_tcp_timeout_time_wait restored, nf_conntrack_max restored, nf_conntrack_buckets restored" {
		t.Errorf("rollback %+v", back)
	}
	f.expect(normal)
	if got := f.states(); got != "rolled back, rolled back" {
		t.Errorf("history %q", got)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); !errors.Is(err, ErrNothing) {
		t.Errorf("rollback of nothing: %v", err)
	}
	for _, id := range []string{r.ID, "20010101-000000"} {
		if _, err := Rollback(context.Background(), id, RollbackOptions{Place: f.Place}); err == nil || errors.Is(err, ErrNothing) {
			t.Errorf("rollback %s: %v", id, err)
		}
	}
}

// Whichever step fails, everything is as before.
func TestFailureHalfWay(t *testing.T) {
	for n := range 5 {
		t.Run(fmt.Sprint("step ", n), func(t *testing.T) {
			f := newFiles(t, before)
			step := 0
			_, err := Apply(context.Background(), planOf(fourChanges()...), ApplyOptions{Place: f.Place, Persist: true, step: func(what string) error {
				if step++; step > n {
					return fmt.Errorf("no %s today", what)
				}
				return nil
			}})
			if err == nil || !strings.Contains(err.Error(), "today") || !strings.Contains(err.Error(), "undone") {
				t.Errorf("error %v", err)
			}
			f.expect(normal)
			if got := f.conf(); got != "-" {
				t.Errorf("sysctl.d file %q", got)
			}
			if got := f.states(); got != "failed" {
				t.Errorf("history %q", got)
			}
			if r := f.apply(ApplyOptions{}, fourChanges()...); r.State != StateApplied {
				t.Errorf("afterwards %+v", r)
			}
		})
	}
}

// A value that was written without an error and is not there is a failure.
func TestReadBack(t *testing.T) {
	ktest.Root(t)
	f := newFiles(t, before)
	path := filepath.Join(f.root, snapshot.SysctlPath(settingMax))
	_, err := Apply(context.Background(), planOf(timeWait+"=30", settingMax+"=131072"), ApplyOptions{Place: f.Place, step: func(what string) error {
		if what != settingMax {
			return nil
		}
		return errors.Join(os.Remove(path), unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))) // /dev/null takes everything
	}})
	if err == nil || !strings.Contains(err.Error(), `took "131072" and shows ""`) {
		t.Errorf("error %v", err)
	}
	f.expect(map[string]string{timeWait: "120"})
	// What can't be put back is not called failed: the next rollback has to try again.
	if got := f.states(); got != "interrupted" || !strings.Contains(err.Error(), "natkit tune rollback") {
		t.Errorf("history %q after %v", got, err)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place, Force: true}); err == nil {
		t.Error("rollback restored /dev/null")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.set(settingMax, "131072")
	f.rollback(Last, false)
	f.expect(normal)
}

func TestInterrupt(t *testing.T) {
	f := newFiles(t, before)
	ctx, cancel := context.WithCancel(context.Background())
	_, err := Apply(ctx, planOf(fourChanges()...), ApplyOptions{Place: f.Place, step: func(what string) error {
		if what == settingMax {
			cancel()
		}
		return nil
	}})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "undone") {
		t.Errorf("error %v", err)
	}
	f.expect(normal)
	if got := f.states(); got != "failed" {
		t.Errorf("history %q", got)
	}
}

// What a killed process leaves is refused by the next apply and restored by the
// next rollback.
func TestPending(t *testing.T) {
	f := newFiles(t, before)
	func() {
		defer func() { _ = recover() }()
		_, _ = Apply(context.Background(), planOf(fourChanges()...), ApplyOptions{Place: f.Place, step: func(what string) error {
			if what == timeWait {
				panic("killed")
			}
			return nil
		}})
	}()
	f.expect(map[string]string{settingBuckets: "131072", settingMax: "131072", timeWait: "120"})
	if got := f.states(); got != "interrupted" {
		t.Errorf("history %q", got)
	}
	var pending *PendingError
	if _, err := Apply(context.Background(), planOf(timeWait+"=20"), ApplyOptions{Place: f.Place}); !errors.As(err, &pending) {
		t.Errorf("next apply: %v", err)
	}
	if r := f.rollback(Last, false); r.ID != pending.ID || outcomes(r) !=
		"nf_conntrack_tcp_timeout_time_wait already, nf_conntrack_max restored, nf_conntrack_buckets restored" {
		t.Errorf("rollback %+v", r)
	}
	f.expect(normal)
}

// The history reads a journal that was cut as it is: a rollback that is about to lock it must not find it locked.
func TestHistoryReadsAlone(t *testing.T) {
	f := newFiles(t, before)
	const journal = `{"op":"begin","id":"20260102-150405","boot":"x"}` + "\n" + `{"op":"set",`
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(journal, `"x"`, `"`+boot+`"`, 1)
	write(t, f.journal(), text)
	if got := f.states(); got != "interrupted" {
		t.Errorf("history %q", got)
	}
	if now, err := os.ReadFile(f.journal()); err != nil || string(now) != text {
		t.Errorf("journal %q, %v", now, err)
	}
}

// A process killed while it wrote a file below /etc leaves half of it under another name,
// which the rollback takes away.
func TestPendingFile(t *testing.T) {
	f := newFiles(t, before)
	half := f.sysctlFile() + temporarySuffix
	func() {
		defer func() { _ = recover() }()
		_, _ = Apply(context.Background(), planOf(timeWait+"=30"), ApplyOptions{Place: f.Place, Persist: true, step: func(what string) error {
			if what == f.sysctlFile() {
				if err := os.MkdirAll(filepath.Dir(half), 0o755); err != nil {
					t.Fatal(err)
				}
				write(t, half, "net.")
				panic("killed")
			}
			return nil
		}})
	}()
	f.rollback(Last, false)
	f.expect(normal)
	if left, err := os.ReadDir(filepath.Dir(half)); err != nil || len(left) > 0 {
		t.Errorf("left: %v (%v)", left, err)
	}
}

func TestOneAtATime(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{step: func(string) error {
		if _, err := Apply(context.Background(), planOf(timeWait+"=20"), ApplyOptions{Place: f.Place}); !errors.Is(err, journal.ErrLocked) {
			t.Errorf("second apply: %v", err)
		}
		if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); !errors.Is(err, journal.ErrLocked) {
			t.Errorf("rollback: %v", err)
		}
		if got := f.states(); got != "running" {
			t.Errorf("history %q", got)
		}
		return nil
	}}, timeWait+"=30")
}

// Somebody else's change since is kept, and only --force undoes it.
func TestChangedSince(t *testing.T) {
	f := newFiles(t, before)
	r := f.apply(ApplyOptions{}, fourChanges()...)
	f.set(timeWait, "45")
	back := f.rollback(Last, false)
	if got := outcomes(back); !strings.Contains(got, "time_wait kept") || !back.Kept() || !strings.Contains(back.Restored[1].Detail, "45") {
		t.Errorf("rollback %+v", back)
	}
	f.expect(map[string]string{settingMax: "1000", timeWait: "45"})
	if _, err := Rollback(context.Background(), r.ID, RollbackOptions{Place: f.Place}); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("again without force: %v", err)
	}
	f.rollback(r.ID, true)
	f.expect(normal)
}

// An apply that a later one builds on is not taken back from under it, unless that is forced.
func TestBuiltOn(t *testing.T) {
	for _, c := range []struct {
		name, what    string
		first, second []string
		persist       [2]bool
	}{
		{"again", settingMax, []string{settingMax + "=2000", timeWait + "=30"}, []string{settingMax + "=4000"}, [2]bool{}},
		{"file", persistName, []string{settingMax + "=2000"}, []string{timeWait + "=30"}, [2]bool{true, true}},
		{"kept", persistName, []string{settingMax + "=2000"}, []string{timeWait + "=30"}, [2]bool{false, true}},
		{"other", "", []string{settingMax + "=2000"}, []string{timeWait + "=30"}, [2]bool{true, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFiles(t, before)
			first := f.apply(ApplyOptions{Persist: c.persist[0]}, c.first...)
			second := f.apply(ApplyOptions{Persist: c.persist[1]}, c.second...)
			_, err := Rollback(context.Background(), first.ID, RollbackOptions{Place: f.Place})
			if c.what == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.what) || !strings.Contains(err.Error(), "natkit tune rollback "+second.ID+" first") {
				t.Errorf("rollback of the first: %v", err)
			}
			if got := f.states(); got != "applied, applied" {
				t.Errorf("history %q", got)
			}
			f.rollback(second.ID, false)
			f.rollback(first.ID, false)
			f.expect(normal)
			if got := f.conf(); got != "-" {
				t.Errorf("file\n%s", got)
			}
		})
	}
	f := newFiles(t, before)
	first := f.apply(ApplyOptions{}, settingMax+"=2000")
	f.apply(ApplyOptions{}, settingMax+"=4000")
	r, err := Rollback(context.Background(), first.ID, RollbackOptions{Place: f.Place, Beneath: true})
	if err != nil || outcomes(r) != "nf_conntrack_max kept" {
		t.Errorf("beneath the second: %+v, %v", r, err)
	}
	f.rollback(first.ID, true)
	f.expect(normal)
}

// A setting that vanished (an interface, a module) stops neither way.
func TestGone(t *testing.T) {
	const eth9 = "net.ipv4.conf.eth9.rp_filter"
	f := newFiles(t, before)
	r := f.apply(ApplyOptions{}, eth9+"=2", timeWait+"=30")
	if len(r.Changes) != 1 || len(r.Skipped) != 1 || r.Skipped[0].Setting != eth9 {
		t.Errorf("record %+v", r)
	}
	f.set(eth9, "1")
	f.apply(ApplyOptions{}, eth9+"=2", settingMax+"=2000")
	if err := os.Remove(filepath.Join(f.root, snapshot.SysctlPath(eth9))); err != nil {
		t.Fatal(err)
	}
	if got := outcomes(f.rollback(Last, false)); got != "nf_conntrack_max restored, rp_filter gone" {
		t.Errorf("rollback: %s", got)
	}
}

// An interface that goes while its setting is written leaves nothing to undo, and nothing that a rollback has to do.
func TestGoneHalfWay(t *testing.T) {
	const eth9 = "net.ipv4.conf.eth9.rp_filter"
	f := newFiles(t, before)
	f.set(eth9, "1")
	_, err := Apply(context.Background(), planOf(timeWait+"=30", eth9+"=2"), ApplyOptions{Place: f.Place, step: func(what string) error {
		if what != eth9 {
			return nil
		}
		return os.RemoveAll(filepath.Dir(filepath.Join(f.root, snapshot.SysctlPath(eth9))))
	}})
	if err == nil || !strings.Contains(err.Error(), eth9) || strings.Contains(err.Error(), "failed too") {
		t.Errorf("error %v", err)
	}
	f.expect(normal)
	if got := f.states(); got != "failed" {
		t.Errorf("history %q", got)
	}
}

// Apply distrusts its plan as well.
func TestApplyRefuses(t *testing.T) {
	f := newFiles(t, map[string]string{"kernel.panic": "0"})
	outside := filepath.Join(f.root, "outside")
	write(t, outside, "untouched")
	for _, c := range []string{"kernel.panic=1", "net.ipv4.conf.//.//.outside=1", "net.ipv4.ip_forward=yes", "net.ipv4.ip_forward=2"} {
		if _, err := Apply(context.Background(), planOf(c), ApplyOptions{Place: f.Place}); err == nil {
			t.Errorf("%s applied", c)
		}
	}
	f.expect(map[string]string{"kernel.panic": "0"})
	// A setting that is a link out of /proc/sys is not followed.
	write(t, filepath.Join(f.root, "net/ipv4/x"), "")
	if err := os.Symlink(outside, filepath.Join(f.root, snapshot.SysctlPath(forward))); err != nil {
		t.Fatal(err)
	}
	if _, err := Apply(context.Background(), planOf(forward+"=1"), ApplyOptions{Place: f.Place}); err == nil {
		t.Error("wrote through a link")
	}
	if text, err := os.ReadFile(outside); err != nil || string(text) != "untouched" {
		t.Errorf("outside: %q, %v", text, err)
	}
}

func TestPersist(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{}, timeWait+"=30")
	if got := f.conf(); got != "-" {
		t.Errorf("file %q without --persist", got)
	}
	// What was applied before without it comes in too, in an order that can be written.
	r := f.apply(ApplyOptions{Persist: true}, settingMax+"=131072", settingBuckets+"=131072")
	const all = "net.netfilter.nf_conntrack_buckets = 131072\nnet.netfilter.nf_conntrack_max = 131072\nnet.netfilter.nf_conntrack_tcp_timeout_time_wait = 30\n"
	if got := f.conf(); got != all || r.File != f.sysctlFile() {
		t.Errorf("file %q\n%s", r.File, got)
	}
	if r := f.apply(ApplyOptions{Persist: true}, timeWait+"=30"); r.State != StateUnchanged {
		t.Errorf("again: %+v", r)
	}
	f.apply(ApplyOptions{Persist: true}, timeWait+"=20")
	if got := f.conf(); got != strings.Replace(all, "= 30", "= 20", 1) {
		t.Errorf("file\n%s", got)
	}
	entries, err := os.ReadDir(filepath.Dir(f.sysctlFile()))
	if err != nil || len(entries) != 1 {
		t.Errorf("sysctl.d holds %v, %v", entries, err)
	}
	f.rollback(Last, false)
	if got := f.conf(); got != all {
		t.Errorf("after the first rollback\n%s", got)
	}
	if got := outcomes(f.rollback(Last, false)); !strings.HasPrefix(got, "conf restored") {
		t.Errorf("second rollback: %s", got)
	}
	if got := f.conf(); got != "-" {
		t.Errorf("after the second rollback\n%s", got)
	}
}

// --persist for what stands already writes the file alone.
func TestPersistLater(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{}, timeWait+"=30")
	r := f.apply(ApplyOptions{Persist: true}, timeWait+"=30")
	if got := f.conf(); r.State != StateApplied || len(r.Changes) != 0 || got != timeWait+" = 30\n" {
		t.Errorf("record %+v, file\n%s", r, got)
	}
	f.rollback(Last, false)
	f.expect(map[string]string{timeWait: "30"})
	if got := f.conf(); got != "-" {
		t.Errorf("file\n%s", got)
	}
}

func TestPersistText(t *testing.T) {
	got := persistFile{}.text([]Change{{Setting: settingMax, New: "131072"}, {Setting: "net.ipv4.conf.eth0/100.rp_filter", New: "2"}})
	want, err := os.ReadFile("testdata/90-natkit.conf")
	if err != nil || got != string(want) {
		t.Errorf("file\n%s\nwant\n%s(%v)", got, want, err)
	}
}

// The file is natkit's or it is left alone; somebody's edit of it is kept.
func TestPersistOthers(t *testing.T) {
	f := newFiles(t, before)
	write(t, f.sysctlFile(), "vm.swappiness = 1\n")
	if _, err := Apply(context.Background(), planOf(timeWait+"=30"), ApplyOptions{Place: f.Place, Persist: true}); err == nil || !strings.Contains(err.Error(), "not written by natkit") {
		t.Errorf("error %v", err)
	}
	f.expect(normal)
	if got := f.conf(); got != "vm.swappiness = 1\n" {
		t.Errorf("file %q", got)
	}
	if err := os.Remove(f.sysctlFile()); err != nil {
		t.Fatal(err)
	}
	f.apply(ApplyOptions{Persist: true}, timeWait+"=30")
	write(t, f.sysctlFile(), persistHeader+timeWait+" = 77\n")
	if got := outcomes(f.rollback(Last, false)); got != "conf kept, nf_conntrack_tcp_timeout_time_wait restored" {
		t.Errorf("rollback: %s", got)
	}
	if got := f.conf(); got != timeWait+" = 77\n" {
		t.Errorf("file %q", got)
	}
}

// After a reboot what was not persistent is gone, and what was can be taken back.
func TestReboot(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{}, synSentChange(f))
	f.apply(ApplyOptions{Persist: true}, timeWait+"=30")
	f.reboot()
	f.set(synSent, "120") // the kernel's default again; the file has set the other
	write(t, f.sysctlFile(), persistHeader+timeWait+" = 30\n")
	if got := f.states(); got != "rebooted, applied" {
		t.Errorf("history %q", got)
	}
	f.rollback(Last, false)
	f.expect(map[string]string{synSent: "120", timeWait: "120"})
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); !errors.Is(err, ErrNothing) {
		t.Errorf("second rollback: %v", err)
	}
}

// A file that --persist wrote for what stood already outlives a reboot as well, and is taken back.
func TestRebootFileAlone(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{}, timeWait+"=30")
	f.apply(ApplyOptions{Persist: true}, timeWait+"=30")
	f.reboot()
	if got := f.states(); got != "applied, applied" {
		t.Errorf("history %q", got)
	}
	if got := outcomes(f.rollback(Last, false)); got != "conf restored" {
		t.Errorf("first rollback: %s", got)
	}
	f.reboot()
	if got := f.states(); got != "rebooted, rolled back" || f.conf() != "-" {
		t.Errorf("history %q, file %q", got, f.conf())
	}
}

// reboot has the applies of before be of an earlier boot.
func (f *files) reboot() {
	f.t.Helper()
	boot, err := bootID()
	if err != nil {
		f.t.Fatal(err)
	}
	text, err := os.ReadFile(f.journal())
	if err != nil {
		f.t.Fatal(err)
	}
	write(f.t, f.journal(), strings.ReplaceAll(string(text), boot, "another-boot"))
}

func synSentChange(f *files) string {
	f.set(synSent, "120")
	return synSent + "=60"
}

// A disk that is full under the journal: what was written is put back, the error says so,
// and once there is room the next rollback notes it.
func TestFullDisk(t *testing.T) {
	ktest.Root(t)
	f := newFiles(t, before)
	f.StateDir = t.TempDir()
	if err := unix.Mount("tmpfs", f.StateDir, "tmpfs", 0, fmt.Sprintf("size=%d", os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(f.StateDir, unix.MNT_DETACH) })
	steps := 0
	_, err := Apply(context.Background(), planOf(fourChanges()...), ApplyOptions{Place: f.Place, step: func(string) error {
		if steps++; steps < 3 {
			return nil
		}
		text, err := os.ReadFile(f.journal())
		if err != nil {
			t.Fatal(err)
		}
		_, id, _ := strings.Cut(string(text), `"id":"`)
		id, _, _ = strings.Cut(id, `"`)
		line := fmt.Sprintf(`{"op":"restored","id":%q,"restored":{"setting":""}}`, id)
		line = strings.Repeat(" ", os.Getpagesize()-len(text)-len(line)-1) + line + "\n" // no byte is left
		write(t, f.journal(), string(text)+line)
		return errors.New("stop here")
	}})
	if !errors.Is(err, unix.ENOSPC) || strings.Contains(err.Error(), "failed") || !strings.Contains(err.Error(), "are undone, but that could not be recorded") {
		t.Errorf("on a full disk: %v", err)
	}
	f.expect(normal)
	if err := unix.Mount("", f.StateDir, "", unix.MS_REMOUNT, "size=1m"); err != nil {
		t.Fatal(err)
	}
	if _, err := Apply(context.Background(), planOf(timeWait+"=30"), ApplyOptions{Place: f.Place}); !errors.As(err, new(*PendingError)) {
		t.Errorf("with room again: %v", err)
	}
	f.rollback(Last, false)
	f.expect(normal)
	if got := f.states(); got != "rolled back" {
		t.Errorf("history %q", got)
	}
}

// A disk that has become full under the journal since: the settings come back all the same,
// the error says what is missing, and the next rollback notes it.
func TestRollbackOnFullDisk(t *testing.T) {
	ktest.Root(t)
	f := newFiles(t, before)
	f.StateDir = t.TempDir()
	if err := unix.Mount("tmpfs", f.StateDir, "tmpfs", 0, fmt.Sprintf("size=%d", 4*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(f.StateDir, unix.MNT_DETACH) })
	f.apply(ApplyOptions{}, fourChanges()...)
	text, err := os.ReadFile(f.journal())
	if err != nil {
		t.Fatal(err)
	}
	room := os.Getpagesize() - len(text)%os.Getpagesize() // in the journal's last page; no other will be left
	write(t, f.journal(), string(text[:len(text)-1])+strings.Repeat(" ", room)+"\n")
	fill := filepath.Join(f.StateDir, "full")
	for size := 4 * os.Getpagesize(); size > 0; size -= os.Getpagesize() {
		if os.WriteFile(fill, make([]byte, size), 0o600) == nil {
			break
		}
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "everything is restored, but that could not be recorded") {
		t.Errorf("on a full disk: %v", err)
	}
	f.expect(normal)
	if got := f.states(); got == "rolled back" {
		t.Errorf("history %q of a full disk", got)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	f.rollback(Last, false)
	f.expect(normal)
	if got := f.states(); got != "rolled back" {
		t.Errorf("history %q", got)
	}
}

// Damage in the journal is said with its line, and nothing is written blindly.
func TestDamagedJournal(t *testing.T) {
	f := newFiles(t, before)
	f.apply(ApplyOptions{}, timeWait+"=30")
	text, err := os.ReadFile(f.journal())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(text), "\n")
	for name, damaged := range map[string]string{
		"no beginning": strings.Join(lines[1:], ""),
		"rubbish":      lines[0] + "rubbish\n" + lines[1],
		"unknown":      lines[0] + `{"op":"levitate","id":"` + lines[0][strings.Index(lines[0], `"id":"`)+6:][:15] + "\"}\n",
	} {
		write(t, f.journal(), damaged)
		if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); err == nil || !strings.Contains(err.Error(), "line ") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Apply(context.Background(), planOf(timeWait+"=20"), ApplyOptions{Place: f.Place}); err == nil {
			t.Errorf("%s: applied", name)
		}
	}
	f.expect(map[string]string{timeWait: "30"})
}

// A plan without a name is about the namespace of whoever read its facts: in another one nothing is changed.
func TestApplyElsewhere(t *testing.T) {
	own := (&space{}).handle.Inode()
	for _, c := range []struct {
		about   string
		netns   snapshot.Netns
		initial bool // what natkit runs in
		refused bool
	}{
		{"facts that do not say it", snapshot.Netns{}, true, false},
		{"of the initial one", snapshot.Netns{Inode: 7, Init: true}, true, false},
		{"of the initial one, in another", snapshot.Netns{Inode: 7, Init: true}, false, true},
		{"of this one", snapshot.Netns{Inode: own}, false, false},
		{"of another one", snapshot.Netns{Inode: 7}, false, true},
		{"of another one, in the initial one", snapshot.Netns{Inode: 7}, true, true},
	} {
		f := newFiles(t, map[string]string{forward: "0"})
		if !c.initial {
			if err := os.Remove(filepath.Join(f.root, onlyInitial)); err != nil {
				t.Fatal(err)
			}
		}
		p := planOf(forward + "=1")
		p.Netns = c.netns
		_, err := Apply(t.Context(), p, ApplyOptions{Place: f.Place})
		if refused := err != nil && strings.Contains(err.Error(), "another network namespace"); refused != c.refused || !refused && err != nil {
			t.Errorf("%s: %v", c.about, err)
		}
		f.expect(map[string]string{forward: map[bool]string{true: "0", false: "1"}[c.refused]})
	}
}
