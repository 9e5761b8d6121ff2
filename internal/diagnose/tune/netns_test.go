// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// namespace makes a network namespace with the kernel's own settings.
func namespace(t *testing.T) (*space, string) {
	t.Helper()
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	s := &space{ref: name, handle: h, root: procSys}
	t.Cleanup(func() {
		s.close()
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.read(timeWait); err != nil {
		_ = exec.Command("modprobe", "nf_conntrack").Run() // nothing has needed it yet
	}
	if _, err := s.read(timeWait); err != nil {
		ktest.Missing(t, "needs connection tracking: %v", err)
	}
	return s, name
}

func planFor(name string, changes ...string) *Plan {
	p := planOf(changes...)
	p.Netns = snapshot.Netns{Name: name}
	return p
}

func values(t *testing.T, s *space, names ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range names {
		value, err := s.read(name)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = value
	}
	return out
}

func TestNamespace(t *testing.T) {
	s, name := namespace(t)
	place := Place{StateDir: t.TempDir(), EtcDir: t.TempDir()}
	ctx := context.Background()
	was := values(t, s, timeWait, synSent, portsOut)

	host := &space{root: procSys}
	limit := values(t, host, settingMax)
	plan := planFor(name, settingMax+"=2000000000", timeWait+"=31", synSent+"=61", portsOut+"=2000 3000")
	r, err := Apply(ctx, plan, ApplyOptions{Place: place, NoHostWrite: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, timeWait, synSent, portsOut); got[timeWait] != "31" || got[synSent] != "61" || got[portsOut] != "2000 3000" {
		t.Errorf("settings %v", got)
	}
	if len(r.Changes) != 3 || r.Changes[0].Netns != name || r.Changes[0].Old != was[timeWait] {
		t.Errorf("changes %+v", r.Changes)
	}
	if len(r.Skipped) != 1 || r.Skipped[0].Setting != settingMax || !strings.Contains(r.Skipped[0].Why, "initial network namespace") {
		t.Errorf("skipped %+v", r.Skipped)
	}
	if got := values(t, host, settingMax, timeWait); got[settingMax] != limit[settingMax] || got[timeWait] == "31" {
		t.Errorf("the host's own settings changed: %v", got)
	}
	if _, err := Apply(ctx, plan, ApplyOptions{Place: place, Persist: true}); err == nil || !strings.Contains(err.Error(), "initial network namespace only") {
		t.Errorf("persist for a namespace: %v", err)
	}
	if _, err := Rollback(ctx, Last, RollbackOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, timeWait, synSent, portsOut); !maps.Equal(got, was) {
		t.Errorf("after rollback %v, want %v", got, was)
	}
	list, err := History(place)
	if err != nil || len(list) != 1 || len(list[0].Changes) != 3 {
		t.Fatalf("%+v, %v", list, err)
	}
	c := list[0].Changes[0]
	if c.Space.Inode != s.handle.Inode() || !place.Lives(c) {
		t.Errorf("the namespace of %+v lives: %v", c, place.Lives(c))
	}
	c.Space.Cookie++ // another one with its name and number
	if place.Lives(c) {
		t.Errorf("%+v was not made in the namespace that there is", c)
	}
}

// Inside a namespace that is not the initial one, and with no way to that one,
// a host setting is explained, not attempted.
func TestHostSettingOutOfReach(t *testing.T) {
	s, _ := namespace(t)
	err := s.handle.Do(func() error {
		if s, err := openInitial(procSys); err == nil {
			defer s.close()
			if !s.initial() || s.handle.Inode() == (*netns.Handle)(nil).Inode() {
				t.Error("took this namespace for the initial one")
			}
		} else if !strings.Contains(err.Error(), "run natkit in the initial one") {
			t.Errorf("error %v", err)
		}
		own := &space{root: procSys}
		if err := own.write(settingMax, "1"); err == nil {
			t.Error("wrote the host's limit from a namespace")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The kernel writes ip_forward to every interface; rollback restores each.
func TestForwardingSpreads(t *testing.T) {
	s, name := namespace(t)
	place := Place{StateDir: t.TempDir()}
	const lo, redirects = "net.ipv4.conf.lo.forwarding", "net.ipv4.conf.all.accept_redirects"
	all := []string{forward, lo, redirects, "net.ipv4.conf.default.forwarding"}
	for _, x := range [][2]string{{forward, "0"}, {lo, "1"}, {redirects, "1"}} {
		if err := s.write(x[0], x[1]); err != nil {
			t.Fatal(err)
		}
	}
	was := values(t, s, all...)
	if _, err := Apply(context.Background(), planFor(name, forward+"=1"), ApplyOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, all...); got[forward] != "1" || got[redirects] != "0" {
		t.Errorf("forwarding on: %v", got)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, all...); !maps.Equal(got, was) {
		t.Errorf("after rollback %v, want %v", got, was)
	}
}

// What somebody has changed since of what the kernel writes along with ip_forward stays, also where a
// rollback was killed on the way, and is restored by --force.
func TestForwardingSpreadsChangedSince(t *testing.T) {
	const lo, redirects = "net.ipv4.conf.lo.forwarding", "net.ipv4.conf.all.accept_redirects"
	for _, force := range []bool{false, true} {
		s, name := namespace(t)
		place := Place{StateDir: t.TempDir()}
		set := func(values ...[2]string) {
			t.Helper()
			for _, x := range values {
				if err := s.write(x[0], x[1]); err != nil {
					t.Fatal(err)
				}
			}
		}
		set([2]string{forward, "0"}, [2]string{lo, "1"}, [2]string{redirects, "0"})
		if _, err := Apply(context.Background(), planFor(name, forward+"=1"), ApplyOptions{Place: place}); err != nil {
			t.Fatal(err)
		}
		set([2]string{lo, "0"}, [2]string{redirects, "1"})
		want := map[string]string{forward: "0", lo: "0", redirects: "1"}
		if force {
			want = map[string]string{forward: "0", lo: "1", redirects: "0"}
		}
		r, err := Rollback(context.Background(), Last, RollbackOptions{Place: place, Force: force})
		if err != nil {
			t.Fatal(err)
		}
		if got := values(t, s, forward, lo, redirects); !maps.Equal(got, want) {
			t.Errorf("force %v: after rollback %v, want %v", force, got, want)
		}
		if told := strings.Contains(r.Restored[0].Detail, "somebody set "+lo+" to 0"); told == force {
			t.Errorf("force %v: restored %+v", force, r.Restored)
		}
		// Killed before the kernel's writes were put right.
		journal, err := os.ReadFile(place.journal())
		if err != nil {
			t.Fatal(err)
		}
		begun, _, _ := strings.Cut(string(journal), `{"op":"restored"`)
		write(t, place.journal(), begun)
		set([2]string{lo, "0"}, [2]string{redirects, "1"})
		set([2]string{forward, "1"}, [2]string{forward, "0"})
		if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place, Force: force}); err != nil {
			t.Fatal(err)
		}
		if got := values(t, s, forward, lo, redirects); !maps.Equal(got, want) {
			t.Errorf("force %v: after the second rollback %v, want %v", force, got, want)
		}
	}
}

// Another namespace of the same name, which may well get the same inode number,
// is not the one that was changed.
func TestNamespaceMadeAgain(t *testing.T) {
	namespace(t) // for what it requires
	name := ktest.Name(t)
	place := Place{StateDir: t.TempDir()}
	t.Cleanup(func() { netns.Delete(name) })
	create := func() *space {
		h, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		return &space{ref: name, handle: h, root: procSys}
	}
	remove := func(s *space) {
		s.close()
		if err := netns.Delete(name); err != nil {
			t.Fatal(err)
		}
	}
	s := create()
	inode := s.handle.Inode()
	if _, err := Apply(context.Background(), planFor(name, timeWait+"=31"), ApplyOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	remove(s)
	// The kernel gives numbers again once the namespace is really gone, lowest
	// first; somebody else may have taken it.
	for range 100 {
		if s = create(); s.handle.Inode() == inode {
			break
		}
		remove(s)
		s = nil
	}
	if s == nil {
		t.Log("the inode number did not come again")
		s = create()
	}
	defer s.close()
	if err := s.write(timeWait, "31"); err != nil { // the same by chance
		t.Fatal(err)
	}
	r, err := Rollback(context.Background(), Last, RollbackOptions{Place: place})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Restored) != 1 || r.Restored[0].Outcome != OutcomeGone || !strings.Contains(r.Restored[0].Detail, "another one") {
		t.Errorf("restored %+v", r.Restored)
	}
	if got := values(t, s, timeWait); got[timeWait] != "31" {
		t.Errorf("the other namespace was changed: %v", got)
	}
}

// A namespace that lost its name, or has another one now, is found all the same.
func TestNamespaceRenamed(t *testing.T) {
	s, name := namespace(t)
	place := Place{StateDir: t.TempDir()}
	was := values(t, s, timeWait)
	if _, err := Apply(context.Background(), planFor(fmt.Sprintf("/run/netns/%s", name), timeWait+"=31"), ApplyOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if err := netns.Delete(name); err != nil {
		t.Fatal(err)
	}
	other := ktest.Name(t)
	t.Cleanup(func() { netns.Delete(other) })
	if err := s.handle.Pin(other); err != nil {
		t.Fatal(err)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, timeWait); !maps.Equal(got, was) {
		t.Errorf("after rollback %v, want %v", got, was)
	}
}

// other is another value that a setting takes, within its limits.
func (s setting) other(present string) string {
	if s.numbers == 2 {
		return "2000 3000"
	}
	n, err := strconv.ParseInt(present, 10, 64)
	switch {
	case err != nil || n+1 > s.max:
		return strconv.FormatInt(max(s.min, n-1), 10)
	case n+1 < s.min:
		return strconv.FormatInt(s.min, 10)
	}
	return strconv.FormatInt(n+1, 10)
}

// Every setting of a namespace that natkit may write can be written, reads as it was
// written, and comes back. Those of the host are files in a tree: the machine's own
// are not for tests.
func TestEverySetting(t *testing.T) {
	s, name := namespace(t)
	host := newFiles(t, nil)
	tree := &space{root: host.root}
	local, global := planFor(name), planOf()
	was := map[string]string{}
	for _, pattern := range slices.Sorted(maps.Keys(settings)) {
		k := settings[pattern]
		k.name = strings.Replace(pattern, "*", "lo", 1)
		switch {
		case isDevice(pattern): // device_test.go
		case k.scope == ScopeHost:
			if snapshot.SysctlPath(k.name) != onlyInitial {
				host.set(k.name, strconv.FormatInt(max(k.min, 1000), 10))
			}
			present, err := tree.read(k.name)
			if err != nil {
				t.Fatal(err)
			}
			global.Changes = append(global.Changes, Change{Setting: k.name, New: k.other(present)})
		default:
			present, err := s.read(k.name)
			if err != nil { // not in this kernel: its module is not there, or it is gone
				t.Logf("%s: %v", k.name, err)
				continue
			}
			was[k.name] = present
			local.Changes = append(local.Changes, Change{Setting: k.name, New: k.other(present)})
		}
	}
	if len(was) < 40 {
		t.Errorf("only %d settings are in a namespace", len(was))
	}
	place := Place{StateDir: t.TempDir()}
	r, err := Apply(context.Background(), local, ApplyOptions{Place: place, NoHostWrite: true})
	if err != nil {
		t.Fatal(err)
	}
	// Two names of one setting, and what follows from it, may need no change any more.
	if len(r.Skipped) > 0 || len(r.Changes) < len(was)-3 {
		t.Errorf("%d of %d changes, skipped %+v", len(r.Changes), len(was), r.Skipped)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	for name, old := range was {
		if got, err := s.read(name); err != nil || got != old {
			t.Errorf("%s is %q after rollback, was %q (%v)", name, got, old, err)
		}
	}

	before := map[string]string{}
	for _, c := range global.Changes {
		before[c.Setting], _ = tree.read(c.Setting)
	}
	r, err = Apply(context.Background(), global, ApplyOptions{Place: host.Place, Persist: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Changes) != len(global.Changes) || len(r.Skipped) > 0 {
		t.Errorf("%d of %d changes, skipped %+v", len(r.Changes), len(global.Changes), r.Skipped)
	}
	for _, c := range global.Changes {
		if !strings.Contains(host.conf(), c.Setting+" = "+c.New+"\n") {
			t.Errorf("%s is not in the file", c.Setting)
		}
	}
	host.rollback(Last, false)
	host.expect(before)
}

// killChanges are the settings that the killed process writes.
func killChanges() []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if strings.Contains(name, "_timeout") {
			out = append(out, name+"=17")
		}
	}
	return append(out, forward+"=1", portsOut+"=2000 3000")
}

const childEnv = "NATKIT_TUNE_TEST_CHILD" // state directory and namespace

func TestMain(m *testing.M) {
	if state, name, ok := strings.Cut(os.Getenv(childEnv), "|"); ok {
		child(Place{StateDir: state}, name)
	}
	os.Exit(m.Run())
}

// child applies and rolls back until it is killed.
func child(place Place, name string) {
	for n := 0; ; n++ {
		if _, err := Apply(context.Background(), planFor(name, killChanges()...), ApplyOptions{Place: place}); err != nil {
			fmt.Println("child:", err)
			os.Exit(1)
		}
		if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil {
			fmt.Println("child:", err)
			os.Exit(1)
		}
		fmt.Println("round", n)
	}
}

// A process killed at any moment of an apply or a rollback leaves nothing that
// the next rollback does not restore.
func TestKilled(t *testing.T) {
	s, name := namespace(t)
	// In memory: a killed process loses nothing that it wrote, and waiting for the
	// disk would hide the moments between two writes.
	memory, err := os.MkdirTemp("/dev/shm", "natkit-tune-")
	if err != nil {
		memory = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(memory) })
	if err := s.write("net.ipv4.conf.lo.forwarding", "1"); err != nil {
		t.Fatal(err)
	}
	names := []string{"net.ipv4.conf.lo.forwarding", "net.ipv4.conf.all.accept_redirects"}
	for _, c := range killChanges() {
		setting, _, _ := strings.Cut(c, "=")
		names = append(names, setting)
	}
	was := values(t, s, names...)

	halfDone := 0
	var round time.Duration // how long an apply and its rollback take here
	for n := range 50 {
		place := Place{StateDir: fmt.Sprintf("%s/%d", memory, n)}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+place.StateDir+"|"+name)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		var began time.Time
		for range 2 { // it is at work, and how fast
			began = time.Now()
			if !lines.Scan() || !strings.HasPrefix(lines.Text(), "round") {
				t.Fatalf("child says %q", lines.Text())
			}
		}
		round = time.Since(began)
		<-time.After(rand.N(round))
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed

		list, err := History(place)
		if err != nil {
			t.Fatalf("kill %d: %v", n, err)
		}
		if list[len(list)-1].State == StateInterrupted {
			halfDone++
		}
		if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil && !errors.Is(err, ErrNothing) {
			t.Fatalf("kill %d: %v", n, err)
		}
		if got := values(t, s, names...); !maps.Equal(got, was) {
			t.Fatalf("kill %d: %v, want %v", n, got, was)
		}
	}
	t.Logf("%d of 50 kills were half way, a round takes %v", halfDone, round)
	if halfDone == 0 {
		t.Error("no kill was half way: the test shows nothing")
	}
}
