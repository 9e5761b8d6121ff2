// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

// alone runs this test once more as a process that sees no network namespace but its own and those
// that it makes: natkit monitor --tune apply changes what it finds, and must not find the machine's.
// It returns true in that process.
func alone(t *testing.T) bool {
	t.Helper()
	const program = "NATKIT_TEST_ALONE"
	if os.Getenv(program) == "" {
		ktest.Root(t)
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		for _, arg := range os.Args[1:] {
			if strings.HasPrefix(arg, "-test.short") {
				cmd.Args = append(cmd.Args, arg)
			}
		}
		if at, ok := t.Deadline(); ok {
			cmd.Args = append(cmd.Args, "-test.timeout="+time.Until(at).String())
		}
		cmd.Env = append(os.Environ(), program+"="+ktest.Natkit(t))
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID}
		out, err := cmd.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
			t.Errorf("%v\n%s", err, out)
		} else {
			t.Logf("%s", out)
		}
		return false
	}
	for _, m := range []struct {
		kind, at string
		flags    uintptr
	}{{"", "/", unix.MS_REC | unix.MS_PRIVATE}, {"proc", "/proc", 0}, {"tmpfs", "/run", 0}} {
		if err := unix.Mount(m.kind, m.at, m.kind, m.flags, ""); err != nil {
			t.Fatalf("mount %s: %v", m.at, err)
		}
	}
	if out, err := exec.Command(ktest.Tool(t, "ip"), "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return true
}

// fragmentRoute makes namespaces rx and tx, and makes rx keep the beginnings of datagrams for seconds, in so many bytes.
func fragmentRoute(t *testing.T, seconds, room int) *netns.Handle {
	t.Helper()
	for _, args := range []string{
		"netns add rx", "netns add tx", "link add v0 netns rx type veth peer name v0 netns tx",
		"-n rx addr add 10.9.0.1/24 dev v0", "-n tx addr add 10.9.0.2/24 dev v0", "-n rx link set v0 up", "-n tx link set v0 up",
	} {
		if out, err := exec.Command(ktest.Tool(t, "ip"), strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v %s", args, err, out)
		}
	}
	rx, err := netns.Open("rx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { rx.Close() })
	for _, set := range []struct {
		name  string
		value int
	}{{"low_thresh", room / 2}, {"high_thresh", room}, {"time", seconds}} {
		if err := rx.Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv4/ipfrag_"+set.name, []byte(strconv.Itoa(set.value)), 0o600)
		}); err != nil {
			t.Fatal(err)
		}
	}
	return rx
}

// settingOf reads a setting of fragments in a namespace.
func settingOf(t *testing.T, h *netns.Handle, name string) (text string) {
	t.Helper()
	if err := h.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
		text = strings.TrimSpace(string(b))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return text
}

// fragmentLoad sends the beginnings of datagrams from namespace tx to 10.9.0.1, perSecond of them a second (at least 1).
func fragmentLoad(t *testing.T, perSecond *atomic.Int64) {
	t.Helper()
	from, err := netns.Open("tx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { from.Close() })
	var fd int
	if err := from.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	go func() {
		defer unix.Close(fd)
		packet := make([]byte, 1420)
		packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(packet[6:], 0x2000) // more fragments
		copy(packet[12:], []byte{10, 9, 0, 2, 10, 9, 0, 1})
		for id := uint16(1); ; id++ {
			binary.BigEndian.PutUint16(packet[4:], id)
			_ = unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte{10, 9, 0, 1}})
			select {
			case <-done:
				return
			case <-time.After(time.Second / time.Duration(perSecond.Load())):
			}
		}
	}()
}

// A monitor that is killed right after a change: the history has the interval, natkit tune knows the change, and
// the next monitor takes it back, since nobody knows its effect.
func TestMonitorKilledAfterTuning(t *testing.T) {
	if !alone(t) {
		return
	}
	const setting = "net.ipv4.ipfrag_high_thresh"
	rx := fragmentRoute(t, 120, 65536)
	value := func() string { return settingOf(t, rx, "ipfrag_high_thresh") }
	state := t.TempDir()
	t.Setenv("NATKIT_STATE_DIR", state)
	start := func(out *log) *exec.Cmd { return startTuner(t, out, time.Second) }
	has := func(out *log, kind string) bool {
		for _, n := range tuningsOf(out) {
			if n.Kind == kind && n.Setting == setting {
				return true
			}
		}
		return false
	}
	var load atomic.Int64
	load.Store(100)
	fragmentLoad(t, &load)
	var first, second log
	monitor := start(&first)
	ktest.Wait(t, 2*time.Minute, "a change", func() bool { return has(&first, history.Applied) })
	monitor.Process.Kill()
	monitor.Wait()
	if got := value(); got != "131072" {
		t.Errorf("%s is %s", setting, got)
	}
	records, err := tune.History(tune.Place{StateDir: state})
	if err != nil || len(records) != 1 || records[0].State != tune.StateApplied || records[0].By != "monitor" {
		t.Fatalf("%+v, %v", records, err)
	}
	// What was printed was on disk before.
	_, stdout, _ := observed(t.Context(), "history --since 1h -o json")
	var res report.HistoryResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || len(res.Tunings) != 1 || res.Tunings[0].Code != "fragments-lost" || len(res.Problems) > 0 {
		t.Errorf("%v, %s", err, stdout)
	}
	start(&second)
	ktest.Wait(t, 2*time.Minute, "the change to be taken back", func() bool { return has(&second, history.TakenBack) })
	if got := value(); got != "65536" {
		t.Errorf("%s is %s", setting, got)
	}
	if records, err = tune.History(tune.Place{StateDir: state}); err != nil || records[0].State != tune.StateRolledBack {
		t.Errorf("%+v, %v", records, err)
	}
	if has(&second, history.Applied) {
		t.Error("changed again within ten minutes")
	}
}

// startTuner starts a monitor that changes settings.
func startTuner(t *testing.T, out *log, interval time.Duration) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Getenv("NATKIT_TEST_ALONE"), "monitor", "--interval", interval.String(), "--tune", "apply", "--metrics", "", "-o", "json")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd
}

// An hour or so (NATKIT_SOAK says how long; else it is left out) of a load that changes at random, from what has room to many
// times that. Every change has its reason and its outcome in the history, in time; no value is set again and again.
func TestTuneSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("NATKIT_SOAK"))
	if err != nil || !alone(t) {
		return // TestTunerDoesNotOscillate has twelve hours of it, simulated
	}
	rx := fragmentRoute(t, 2, 65536)
	t.Setenv("NATKIT_STATE_DIR", t.TempDir())
	var load atomic.Int64
	load.Store(1)
	fragmentLoad(t, &load)
	var out log
	cmd := startTuner(t, &out, 10*time.Second)
	for end := time.Now().Add(length); time.Now().Before(end); {
		load.Store(1 << rand.N(10))
		time.Sleep(min(time.Until(end), 10*time.Second+rand.N(4*time.Minute))) // what the test is about: a load that lasts a while
	}
	load.Store(1)
	cmd.Process.Signal(os.Interrupt)
	if err := cmd.Wait(); err != nil {
		t.Errorf("the monitor ended: %v", err)
	}
	use := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	t.Logf("the monitor used %.2f %% of one core and %d MB", 100*(cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()).Seconds()/length.Seconds(), use.Maxrss>>10)

	tunings := tuningsOf(&out)
	checkTunings(t, tunings, time.Now())
	value := settingOf(t, rx, "ipfrag_high_thresh")
	for _, n := range slices.Backward(tunings) {
		if n.Setting == "net.ipv4.ipfrag_high_thresh" && n.Kind != history.NotTheCause {
			if n.New != value {
				t.Errorf("the setting is %s, after %+v", value, n)
			}
			break
		}
	}
	_, stdout, _ := observed(t.Context(), "history --since 1d -o json")
	var res report.HistoryResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || len(res.Tunings) != len(tunings) || len(res.Problems) > 0 {
		t.Errorf("%v: the history has %d tunings of %d: %s", err, len(res.Tunings), len(tunings), stdout)
	}
}

// checkTunings checks what one monitor did to one namespace until end.
func checkTunings(t *testing.T, tunings []history.Tuning, end time.Time) {
	t.Helper()
	var last time.Time
	open, times := map[string]time.Time{}, map[string]int{}
	for _, n := range tunings {
		t.Logf("%s %s %s: %s -> %s (%s: %s)", n.At.Format(time.TimeOnly), n.Kind, n.Setting, n.Old, n.New, n.Code, n.Why)
		if n.Why == "" || n.Setting == "" || n.ID == "" {
			t.Errorf("without its reason: %+v", n)
		}
		switch n.Kind {
		case history.Applied:
			before, _ := strconv.ParseFloat(n.Old, 64)
			after, _ := strconv.ParseFloat(n.New, 64)
			if n.Code == "" || !(after > before && after <= 2*before) {
				t.Errorf("not a step up, at most to twice: %+v", n)
			}
			if apart := n.At.Sub(last); apart > 0 && apart < 10*time.Minute {
				t.Errorf("%v after the change before: %+v", apart, n)
			}
			last, open[n.Setting] = n.At, n.At
			if times[n.Setting+n.New]++; times[n.Setting+n.New] > 2 {
				t.Errorf("tried more than twice: %+v", n)
			}
		case history.Kept, history.TakenBack:
			if at, ok := open[n.Setting]; !ok || n.At.Sub(at) > 70*time.Second {
				t.Errorf("%s of a change of %v: %+v", n.Kind, at, n)
			}
			delete(open, n.Setting)
		case history.NotTheCause:
		default:
			t.Errorf("%+v", n)
		}
	}
	if last.IsZero() || len(open) > 0 && end.Sub(last) > 70*time.Second {
		t.Errorf("last change %v, without an outcome: %v", last, open)
	}
}

// tuningsOf are those that a monitor has printed so far.
func tuningsOf(out *log) (list []history.Tuning) {
	out.mu.Lock()
	defer out.mu.Unlock()
	for line := range strings.Lines(out.text.String()) {
		var l struct {
			Tuning *history.Tuning `json:"tuning"`
		}
		if json.Unmarshal([]byte(line), &l) == nil && l.Tuning != nil {
			list = append(list, *l.Tuning)
		}
	}
	return list
}
