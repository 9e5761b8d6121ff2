// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Ability is one thing that measurements need of a machine.
type Ability struct {
	Name   string   `json:"name"`
	Have   bool     `json:"ok"`
	Detail string   `json:"detail"`           // what was seen
	Fix    []string `json:"remedy,omitempty"` // how to get it, when it is missing
}

// ProbeResult is what this machine can measure, and with which routers.
type ProbeResult struct {
	Environment Environment `json:"environment"`
	Abilities   []Ability   `json:"abilities"`
	Routers     []RouterUse `json:"routers"`
}

const (
	enoughFiles = 65536
	probeFrames = 1000
)

// Probe tries what measurements need: in namespaces that it makes and removes,
// because versions and configurations say less than trying.
func Probe(ctx context.Context, natkit string, routers []Router) (*ProbeResult, error) {
	p := &ProbeResult{Environment: ReadEnvironment(natkit)}
	if !p.tryMachine() {
		return p, nil
	}

	// From here on each step needs the one before.
	testbed, err := NewTestbed(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if !p.add("namespaces", err, "can be made, with veth devices that receive by NAPI", "run as root; the kernel needs CONFIG_NET_NS and CONFIG_VETH") {
		return p, nil
	}
	if err := errors.Join(p.tryTester(ctx, testbed), testbed.Close()); err != nil {
		return nil, err
	}
	for _, router := range routers {
		use, err := tryRouter(ctx, router)
		if err != nil {
			return nil, err
		}
		p.Routers = append(p.Routers, use)
	}
	return p, nil
}

// add notes what was tried, and whether it works.
func (p *ProbeResult) add(name string, err error, detail, fix string) bool {
	if err != nil {
		p.Abilities = append(p.Abilities, Ability{Name: name, Detail: err.Error(), Fix: []string{fix}})
		return false
	}
	p.Abilities = append(p.Abilities, Ability{Name: name, Have: true, Detail: detail})
	return true
}

// tryMachine tries what needs no testbed; without programs and maps there is none.
func (p *ProbeResult) tryMachine() bool {
	cpus, err := allowedCPUs()
	if err == nil && len(cpus) < 2 {
		err = errors.New("natkit may use one CPU only: costs can be measured, loss at a rate can't")
	}
	p.add("cpus", err, fmt.Sprintf("%d", len(cpus)), "run on a machine with two CPUs or more, or widen the CPU set (taskset, cpuset)")

	var files unix.Rlimit
	err = unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	if err == nil && files.Max < enoughFiles {
		err = fmt.Errorf("at most %d: bench http has about one for each connection at a time", files.Max)
	}
	p.add("open_files", err, fmt.Sprintf("at most %d", files.Max), fmt.Sprintf("ulimit -Hn %d as root, or LimitNOFILE=%d in the service's unit", enoughFiles, enoughFiles))

	translations, err := newTranslations(1)
	if err == nil {
		err = translations.Close()
	}
	return p.add("bpf", err, "programs and maps load", "run as root; in a container give it CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")
}

// tryRouter has a router forward once. What it lacks is no error, but what can't be undone is.
func tryRouter(ctx context.Context, router Router) (RouterUse, error) {
	use := RouterUse{Name: router.Name(), Describe: router.Describe()}
	l, err := newDUT(ctx, router, RouterOptions{}, 1, false)
	if err == nil {
		err = l.warm(ctx, frameLoad{flows: 1})
	}
	if l != nil {
		if e := l.close(); e != nil {
			return use, e
		}
	}
	if ctx.Err() != nil {
		return use, context.Cause(ctx)
	}
	var unsupported *UnsupportedError
	switch {
	case errors.As(err, &unsupported):
		use.Unsupported = unsupported.Reason
	case err != nil:
		use.Unsupported = err.Error()
	}
	return use, nil
}

// tryTester tries generator, sinks and threads on a testbed. What is missing is no
// error, but what can't be undone is.
func (p *ProbeResult) tryTester(ctx context.Context, testbed *Testbed) (err error) {
	s, err := newTester(testbed, 1)
	if !p.add("generator", err, "attached to a spare pair of veth devices", "the kernel needs CONFIG_VETH, CONFIG_BPF_JIT and native XDP on veth devices (Linux 4.19)") {
		return nil
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if !p.add("native_xdp", s.attachSinks(), "attaches to veth devices", "the kernel needs native XDP on veth devices (Linux 4.19)") {
		return nil
	}
	t, err := s.run(ctx, frameLoad{frames: []int{MinFrame}, flows: 1, pps: probeFrames, duration: time.Second, cpus: []int{s.generatorCPU}})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	detail := ""
	if err == nil {
		if t.sent.frames == 0 {
			err = errors.New("no frame was sent in a second: the CPU is taken by other programs")
		}
		detail = fmt.Sprintf("%d sent in a second, %d slots missed", t.sent.frames, t.sent.skipped)
	}
	if !p.add("live_frames", err, detail, "live frames of BPF_PROG_RUN need Linux 5.18") {
		return nil
	}
	if t.received.frames == 0 {
		err = fmt.Errorf("of %d frames none came through plain forwarding (%s)", t.sent.frames, placesOf(t.lost))
	}
	p.add("forwarding", err, fmt.Sprintf("%d of %d frames came through", t.received.frames, t.sent.frames),
		"frames from XDP reach a veth device only when its peer receives by NAPI: GRO or an XDP program on it (Linux 5.13)")
	_, err = os.Stat("/proc/thread-self/schedstat")
	p.add("schedstat", err, "shows how long other programs had a CPU", "the kernel needs CONFIG_SCHED_INFO; without it trials are judged by steal and missed slots alone")
	p.add("threaded_napi", s.giveRouterACPU(), "the router can have a CPU of its own", "needs two CPUs and Linux 5.12; without it nothing can be measured at a given rate or by a search")
	return nil
}
