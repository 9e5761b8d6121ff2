// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// ip runs ip(8) in a namespace.
func ip(t *testing.T, s *space, args string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), ktest.Tool(t, "ip"), strings.Fields(args)...)
	err := s.handle.Do(func() error {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("ip %s: %s", args, out)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Settings of a real device: applied, read back by the kernel's own files, restored.
// What its driver does not have is left out and said.
func TestDevice(t *testing.T) {
	s, name := namespace(t)
	ip(t, s, "link add nk.0 numrxqueues 2 numtxqueues 2 type veth peer name nk1 numrxqueues 2 numtxqueues 2")
	ip(t, s, "link set nk.0 up")
	ip(t, s, "link set nk1 up")
	place := Place{StateDir: t.TempDir()}
	const rps, queue, sum, ring, channels = "dev.nk/0.rps_cpus", "dev.nk/0.tx_queue_len", "dev.nk/0.rx_checksum", "dev.nk/0.rx_ring", "dev.nk/0.combined_channels"
	was := values(t, s, rps, queue, sum)
	queues := strings.Fields(was[rps])
	if len(queues) != 2 || queues[0] != "0" {
		t.Fatalf("a new device of two queues has %v", was)
	}
	plan := planFor(name, rps+"=1", queue+"=4321", sum+"=0", ring+"=4096", channels+"=2", "dev.gone.rps_cpus=1")
	r, err := Apply(context.Background(), plan, ApplyOptions{Place: place})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Changes) != 3 || r.Changes[0].Scope != ScopeNamespace || r.Changes[0].Netns != name {
		t.Errorf("changes %+v", r.Changes)
	}
	if len(r.Skipped) != 3 || !strings.Contains(r.Skipped[0].Why, "its driver does not know it") {
		t.Errorf("skipped %+v", r.Skipped)
	}
	if got := values(t, s, rps, queue, sum); got[rps] != "1 1" || got[queue] != "4321" || got[sum] != "0" {
		t.Errorf("settings %v", got)
	}
	err = s.handle.DoWithSys(func() error {
		for path, want := range map[string]string{"queues/rx-1/rps_cpus": "1", "tx_queue_len": "4321"} {
			data, err := os.ReadFile(filepath.Join("/sys/class/net/nk.0", path))
			if err != nil || strings.TrimLeft(strings.TrimSpace(string(data)), "0,") != want {
				t.Errorf("%s is %q (%v)", path, data, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	again, err := Apply(context.Background(), plan, ApplyOptions{Place: place})
	if err != nil || again.State != StateUnchanged {
		t.Errorf("applied twice: %+v, %v", again, err)
	}
	// One queue that somebody else sets is not natkit's any more.
	if err := s.write(rps, "1 0"); err != nil {
		t.Fatal(err)
	}
	rolled, err := Rollback(context.Background(), Last, RollbackOptions{Place: place})
	if err != nil || !rolled.Kept() {
		t.Errorf("rolled back: %+v, %v", rolled, err)
	}
	if _, err := Rollback(context.Background(), r.ID, RollbackOptions{Place: place, Force: true}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, rps, queue, sum); !maps.Equal(got, was) {
		t.Errorf("after rollback %v, want %v", got, was)
	}
}

// A rollback follows an interface that was renamed since, and leaves alone another one that has its name.
func TestInterfaceRenamed(t *testing.T) {
	s, name := namespace(t)
	place := Place{StateDir: t.TempDir()}
	const filter, queue, forwards = "net.ipv4.conf.nk0.rp_filter", "dev.nk0.tx_queue_len", "net.ipv4.conf.nk0.forwarding"
	const renamed, renamedQueue, renamedForwards = "net.ipv4.conf.nk/1.rp_filter", "dev.nk/1.tx_queue_len", "net.ipv4.conf.nk/1.forwarding"
	set := func(name, value string) {
		t.Helper()
		if err := s.write(name, value); err != nil {
			t.Fatal(err)
		}
	}
	ip(t, s, "link add nk0 type veth peer name peer0")
	ip(t, s, "link add gone type veth peer name peer1")
	set(forward, "0")
	set(forwards, "1")
	set(filter, "1")
	set("net.ipv4.conf.gone.rp_filter", "1")
	was := values(t, s, filter, queue, forwards)
	if _, err := Apply(context.Background(), planFor(name, filter+"=2", queue+"=4321", forward+"=1", "net.ipv4.conf.gone.rp_filter=2"), ApplyOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	ip(t, s, "link set nk0 name nk.1")
	ip(t, s, "link add nk0 type veth peer name peer2")
	ip(t, s, "link del gone")
	ip(t, s, "link add gone type veth peer name peer3")
	set(filter, "2") // the same by chance
	set("net.ipv4.conf.gone.rp_filter", "2")
	r, err := Rollback(context.Background(), Last, RollbackOptions{Place: place})
	if err != nil {
		t.Fatal(err)
	}
	if got := outcomes(r); got != "rp_filter gone, ip_forward restored, tx_queue_len restored, rp_filter restored" || !strings.Contains(r.Restored[3].Detail, renamed) {
		t.Errorf("restored %+v", r.Restored)
	}
	got := values(t, s, renamed, renamedQueue, renamedForwards, filter, "net.ipv4.conf.gone.rp_filter", forwards)
	want := map[string]string{
		renamed: was[filter], renamedQueue: was[queue], renamedForwards: "1",
		filter: "2", "net.ipv4.conf.gone.rp_filter": "2", forwards: "0",
	}
	if !maps.Equal(got, want) {
		t.Errorf("after rollback %v, want %v", got, want)
	}
}

// Threads of their own: only where a device polls, as veth does once it has an XDP
// program or GRO.
func TestDeviceThreaded(t *testing.T) {
	s, name := namespace(t)
	ip(t, s, "link add nk0 type veth peer name nk1")
	ip(t, s, "link set nk0 up")
	ip(t, s, "link set nk1 up")
	cmd := exec.CommandContext(t.Context(), ktest.Tool(t, "ethtool"), "-K", "nk0", "gro", "on")
	if err := s.handle.Do(cmd.Run); err != nil {
		t.Fatal(err)
	}
	const threaded = "dev.nk0.threaded"
	err := s.write(threaded, "1")
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		ktest.Unsupported(t, "this kernel gives veth no threads: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := s.write(threaded, "0"); err != nil {
		t.Fatal(err)
	}
	place := Place{StateDir: t.TempDir()}
	if _, err := Apply(context.Background(), planFor(name, threaded+"=1"), ApplyOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, threaded); got[threaded] != "1" {
		t.Errorf("settings %v", got)
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: place}); err != nil {
		t.Fatal(err)
	}
	if got := values(t, s, threaded); got[threaded] != "0" {
		t.Errorf("after rollback %v", got)
	}
}

// Settings of devices persist in a file of udev's, the others in sysctl.d; a rollback
// takes both back.
func TestDevicePersist(t *testing.T) {
	f := newFiles(t, map[string]string{timeWait: "120"})
	device := filepath.Join(f.root, "../class-net/eth0")
	for path, value := range map[string]string{"threaded": "0", "tx_queue_len": "1000", "queues/rx-0/rps_cpus": "00000000,00000000", "queues/rx-1/rps_cpus": "00000000,00000000"} {
		write(t, filepath.Join(device, path), value+"\n")
	}
	r := f.apply(ApplyOptions{Persist: true}, timeWait+"=30", "dev.eth0.threaded=1", "dev.eth0.rps_cpus=1,0000000d")
	udev := f.files()[1].path
	if r.File != f.sysctlFile() || r.UdevFile != udev || f.conf() != timeWait+" = 30\n" {
		t.Errorf("record %+v, sysctl.d %q", r, f.conf())
	}
	text, err := os.ReadFile(udev)
	if err != nil {
		t.Fatal(err)
	}
	const rule = `ACTION=="add|move", SUBSYSTEM=="net", KERNEL=="eth0", `
	want := persistHeader + "# setting: dev.eth0.threaded = 1\n" + rule + `ATTR{threaded}="1"` + "\n" +
		"# setting: dev.eth0.rps_cpus = 1,0000000d\n" + rule + `RUN+="/bin/sh -c 'for q in /sys/class/net/eth0/queues/rx-*/rps_cpus; do echo 1,0000000d > $$q; done'"` + "\n"
	if string(text) != want {
		t.Errorf("udev's file\n%s\nwant\n%s", text, want)
	}
	data, err := os.ReadFile(filepath.Join(device, "queues/rx-1/rps_cpus"))
	if err != nil || string(data) != "1,0000000d\n" {
		t.Errorf("the second queue has %q, %v", data, err)
	}
	// What is kept stays in the file when more comes.
	f.apply(ApplyOptions{Persist: true}, "dev.eth0.tx_queue_len=4000")
	kept, err := f.files()[1].read()
	if err != nil || len(kept) != 3 {
		t.Errorf("kept %+v, %v", kept, err)
	}
	f.rollback(Last, false)
	f.rollback(Last, false)
	if _, err := os.Stat(udev); !os.IsNotExist(err) || f.conf() != "-" {
		t.Errorf("after rollback: %v, %q", err, f.conf())
	}
	if _, err := Rollback(context.Background(), Last, RollbackOptions{Place: f.Place}); err != ErrNothing {
		t.Errorf("more to roll back: %v", err)
	}
}

func TestUdevRules(t *testing.T) {
	const rule = `ACTION=="add|move", SUBSYSTEM=="net", KERNEL=="eth0.5", `
	for setting, want := range map[string]string{
		"rx_ring=4096":        `RUN+="/bin/sh -c 'ethtool -G eth0.5 rx 4096'"`,
		"combined_channels=4": `RUN+="/bin/sh -c 'ethtool -L eth0.5 combined 4'"`,
		"rx_checksum=0":       `RUN+="/bin/sh -c 'ethtool -K eth0.5 rx off'"`,
		"tx_queue_len=4000":   `ATTR{tx_queue_len}="4000"`,
		"rps_cpus=1 0":        `RUN+="/bin/sh -c 'echo 1 > /sys/class/net/eth0.5/queues/rx-0/rps_cpus; echo 0 > /sys/class/net/eth0.5/queues/rx-1/rps_cpus'"`,
	} {
		key, value, _ := strings.Cut(setting, "=")
		if got := udevRule("dev.eth0/5."+key, value); got != rule+want {
			t.Errorf("%s: %s", setting, got)
		}
	}
}

// What the facts hold of a device is what a plan compares with.
func TestPlanDevice(t *testing.T) {
	facts := machine(func(s *snapshot.Snapshot) {
		s.Interfaces = []snapshot.Interface{{Name: "eth0", QueueLength: 1000, NIC: &snapshot.NIC{RxRing: 512, RxRingMax: 4096, Channels: 1}}}
	})
	for _, c := range []struct{ setting, value, plan string }{
		{"rx_ring", "4096", "dev.eth0.rx_ring 512>4096 0\n"},
		{"rx_ring", "256", ""},
		{"combined_channels", "4", "dev.eth0.combined_channels 1>4 0\n"},
		{"threaded", "1", "dev.eth0.threaded 0>1 0\n"},
		{"tx_queue_len", "1000", ""},
		{"rps_cpus", "00d", "dev.eth0.rps_cpus >d 0\n"},
		{"rps_cpus", "all", "! dev.eth0.rps_cpus all\n"},
		{"rx_checksum", "2", "! dev.eth0.rx_checksum 2\n"},
		{"ifalias", "x", "! dev.eth0.ifalias x\n"},
	} {
		p, err := MakePlan(facts, PlanOptions{Wanted: []snapshot.Setting{want("dev.eth0."+c.setting, c.value)}})
		if err != nil {
			t.Fatal(err)
		}
		if got := lines(p); got != c.plan {
			t.Errorf("%s=%s: plan %q, want %q", c.setting, c.value, got, c.plan)
		}
	}
}

// The name of an interface may be a pattern for udev, or a program for the shell that it starts.
func TestHostileNameIsNotPersisted(t *testing.T) {
	for name, ok := range map[string]bool{"eth0": true, "eth0/5": true, "veth-a_1@x+": true, "q'$(z)": false, `a"b`: false, "e*": false, "%k": false, "a;b": false, "größe": false} {
		for _, f := range (Place{EtcDir: t.TempDir()}).files() {
			c := Change{Setting: "dev." + name + ".tx_queue_len", New: "4000"}
			if !f.device {
				c = Change{Setting: "net.ipv4.conf." + name + ".rp_filter", New: "2"}
			}
			got, err := f.change(nil, nil, []Change{c})
			if (err == nil) != ok || ok && (got == nil || !strings.Contains(got.New, c.New)) {
				t.Errorf("%s: %+v, %v", c.Setting, got, err)
			}
		}
	}
}
