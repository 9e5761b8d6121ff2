// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
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
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=5m")
		cmd.Env = append(os.Environ(), program+"="+ktest.Natkit(t))
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID}
		out, err := cmd.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
			t.Errorf("%v\n%s", err, out)
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
	return true
}

// fragmentLoad sends the beginnings of datagrams from namespace tx to 10.9.0.1, a hundred a second.
func fragmentLoad(t *testing.T) {
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
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
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
			case <-tick.C:
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
	for _, args := range []string{
		"link set lo up", "netns add rx", "netns add tx", "link add v0 netns rx type veth peer name v0 netns tx",
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
	defer rx.Close()
	const path = "/proc/sys/net/ipv4/ipfrag_"
	value := func() (text string) {
		t.Helper()
		if err := rx.Do(func() error {
			b, err := os.ReadFile(path + "high_thresh")
			text = strings.TrimSpace(string(b))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, set := range [][2]string{{"low_thresh", "32768"}, {"high_thresh", "65536"}, {"time", "120"}} {
		if err := rx.Do(func() error { return os.WriteFile(path+set[0], []byte(set[1]), 0o600) }); err != nil {
			t.Fatal(err)
		}
	}
	state := t.TempDir()
	t.Setenv("NATKIT_STATE_DIR", state)
	start := func(out *log) *exec.Cmd {
		cmd := exec.Command(os.Getenv("NATKIT_TEST_ALONE"), "monitor", "--interval", "1s", "--tune", "apply", "--metrics", "", "-o", "json")
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return cmd
	}
	has := func(out *log, kind string) bool {
		for _, n := range tuningsOf(out) {
			if n.Kind == kind && n.Setting == setting {
				return true
			}
		}
		return false
	}
	fragmentLoad(t)
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
