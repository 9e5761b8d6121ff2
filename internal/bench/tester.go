// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/safchain/ethtool"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/words/plural"
)

// tester is a testbed with generator and sinks at its ends, and the CPUs on which all
// of that runs.
type tester struct {
	testbed      *Testbed
	translations *ebpf.Map
	generator    *generator
	left, right  *sink
	salt         uint32 // of the cookies of the last TCP connections

	cpus         []int          // that this process may use
	generatorCPU int            // the first of them
	routerCPU    int            // the last: the router's own in trials that can lose frames
	softirq      map[int]string // ksoftirqd's process number, by CPU
	threads      []string       // process numbers of the router's threads; nil while it runs on the sender's CPU
	fastest      float64        // frames a second that the generator has sent
}

// newTester equips a testbed, for loads of at most so many flows.
func newTester(testbed *Testbed, flows int) (s *tester, err error) {
	s = &tester{testbed: testbed}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.cpus, err = allowedCPUs(); err != nil {
		return s, err
	}
	s.generatorCPU, s.routerCPU = s.cpus[0], s.cpus[len(s.cpus)-1]
	s.softirq = map[int]string{}
	for _, cpu := range s.cpus {
		for _, pid := range threadsNamed(fmt.Sprintf("ksoftirqd/%d", cpu)) {
			s.softirq[cpu] = pid
		}
	}
	if !testbed.elsewhere() {
		if err := s.makeRings(); err != nil {
			return s, err
		}
	}
	if s.translations, err = newTranslations(flows); err != nil {
		return s, err
	}
	s.generator, err = newGenerator(testbed, s.translations)
	return s, err
}

// makeRings gives the testbed's devices a ring for each CPU that may send, at both ends
// of each pair.
func (s *tester) makeRings() error {
	rings := s.cpus[len(s.cpus)-1] + 1
	return s.eachDevice(func(e *ethtool.Ethtool, device string) error {
		have, err := e.GetChannels(device)
		if err != nil {
			return fmt.Errorf("read rings of %s: %w", device, err)
		}
		n := uint32(min(rings, int(have.MaxRx), int(have.MaxTx)))
		if have.RxCount == n && have.TxCount == n {
			return nil
		}
		have.RxCount, have.TxCount = n, n
		if _, err := e.SetChannels(device, have); err != nil {
			return fmt.Errorf("set rings of %s to %d: %w", device, n, err)
		}
		return nil
	})
}

// attachSinks makes both ends take the frames.
func (s *tester) attachSinks() (err error) {
	if s.right, err = newSink(s.testbed.Right, s.testbed.RightDev, s.translations); err != nil {
		return err
	}
	s.left, err = newSink(s.testbed.Left, s.testbed.LeftDev, s.translations)
	return err
}

func (s *tester) close() error {
	var errs []error
	for _, end := range []*sink{s.left, s.right} {
		if end != nil {
			errs = append(errs, end.close())
		}
	}
	if s.generator != nil {
		errs = append(errs, s.generator.close())
	}
	if s.translations != nil {
		errs = append(errs, s.translations.Close())
	}
	return errors.Join(errs...)
}

// testbedDevice is one of the testbed's devices.
type testbedDevice struct {
	ns   *netns.Handle
	name string
}

// devices are the ends', and between them the router's where it is in the testbed.
func (s *tester) devices() []testbedDevice {
	b := s.testbed
	if b.elsewhere() {
		return []testbedDevice{{b.Left, b.LeftDev}, {b.Right, b.RightDev}}
	}
	return []testbedDevice{{b.Left, b.LeftDev}, {b.Router, b.InsideDev}, {b.Router, b.OutsideDev}, {b.Right, b.RightDev}}
}

func (s *tester) eachDevice(fn func(e *ethtool.Ethtool, device string) error) error {
	for _, d := range s.devices() {
		if err := d.ns.Do(func() error {
			return withEthtool(func(e *ethtool.Ethtool) error { return fn(e, d.name) })
		}); err != nil {
			return err
		}
	}
	return nil
}

// giveRouterACPU moves the router off the generator's CPU onto one of its own: its
// devices are served by kernel threads, of a real-time class so that nothing
// delays them. The sinks' devices are not, so that they run within the same
// threads. It lasts as long as the testbed.
func (s *tester) giveRouterACPU() error {
	return s.giveRouterThreads(s.testbed.InsideDev, s.testbed.OutsideDev)
}

// giveRouterAThread does the same with one thread, that of a single ring from the
// left, within which all else runs. So what the ends answer waits in one line with
// what the generator sends: of several threads of the same real-time class, one
// with frames to no end would keep the others from ever running.
func (s *tester) giveRouterAThread() error {
	// First the side that sends into the other's rings.
	for _, d := range []testbedDevice{{s.testbed.Left, s.testbed.LeftDev}, {s.testbed.Router, s.testbed.InsideDev}} {
		if err := d.ns.Do(func() error {
			return withEthtool(func(e *ethtool.Ethtool) error {
				rings, err := e.GetChannels(d.name)
				if err != nil {
					return err
				}
				if d.ns == s.testbed.Left {
					rings.TxCount = 1
				} else {
					rings.RxCount = 1
				}
				_, err = e.SetChannels(d.name, rings)
				return err
			})
		}); err != nil {
			return fmt.Errorf("give the router a CPU: one ring from %s: %w", s.testbed.LeftDev, err)
		}
	}
	return s.giveRouterThreads(s.testbed.InsideDev)
}

func (s *tester) giveRouterThreads(devices ...string) error {
	if s.routerCPU == s.generatorCPU {
		return fmt.Errorf("give the router a CPU: this process may use CPU %d only, and the generator needs one", s.routerCPU)
	}
	for _, device := range devices {
		threads, err := threadedNAPI(s.testbed.Router, device)
		if err != nil {
			return fmt.Errorf("give the router a CPU: %w", err)
		}
		for _, pid := range threads {
			if err := pinThread(pid, s.routerCPU); err != nil {
				return fmt.Errorf("give the router a CPU: %w", err)
			}
		}
		s.threads = append(s.threads, threads...)
	}
	s.generator.alone = true
	return nil
}

// threadedNAPI makes kernel threads of a device's receive queues (Linux 5.12), and
// returns their process numbers: those that were not there before.
func threadedNAPI(ns *netns.Handle, device string) ([]string, error) {
	// The kernel cuts names to 15 characters; of these devices' none is cut.
	name := "napi/" + device + "-*"
	if comm, err := os.ReadFile("/proc/2/comm"); err != nil || strings.TrimSpace(string(comm)) != "kthreadd" {
		return nil, errThreadsHidden
	}
	before := threadsNamed(name)
	queues := 0
	if err := ns.DoWithSys(func() error {
		rx, err := filepath.Glob("/sys/class/net/" + device + "/queues/rx-*")
		if err != nil {
			return err
		}
		queues = len(rx)
		return os.WriteFile("/sys/class/net/"+device+"/threaded", []byte("1"), 0)
	}); err != nil {
		return nil, fmt.Errorf("make threads of the queues of %s: %w", device, err)
	}
	made := slices.DeleteFunc(threadsNamed(name), func(pid string) bool { return slices.Contains(before, pid) })
	if len(made) != queues {
		return nil, fmt.Errorf("make threads of the queues of %s: %s for %s (is another measurement starting?)",
			device, plural.Count(len(made), "new thread"), plural.Count(queues, "queue"))
	}
	return made, nil
}

// errThreadsHidden: the CPU of a kernel's thread is set by its process number.
var errThreadsHidden = errors.New("the kernel's threads are not visible in this process namespace: run natkit bench on the host, or in a container with --pid=host")

// threadsNamed returns the process numbers of kernel threads by a pattern as of
// filepath.Match, in which a slash is like any other character.
func threadsNamed(pattern string) (pids []string) {
	paths, _ := filepath.Glob("/proc/[0-9]*/comm")
	pattern = strings.ReplaceAll(pattern, "/", "|")
	for _, path := range paths {
		comm, err := os.ReadFile(path)
		if err != nil {
			continue // it ended
		}
		name := strings.ReplaceAll(strings.TrimSpace(string(comm)), "/", "|")
		if ok, _ := filepath.Match(pattern, name); ok {
			pids = append(pids, filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

func pinThread(pid string, cpu int) error {
	n, err := strconv.Atoi(pid)
	if err != nil {
		return err
	}
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(n, &set); err != nil {
		return fmt.Errorf("pin thread %s to CPU %d: %w", pid, cpu, err)
	}
	if err := unix.SchedSetAttr(n, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 50}, 0); err != nil {
		return fmt.Errorf("give thread %s real-time priority: %w", pid, err)
	}
	return nil
}

// allowedCPUs are the CPUs that this process may use.
func allowedCPUs() (cpus []int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(os.Getpid(), &set); err != nil {
		return nil, fmt.Errorf("read CPUs of process: %w", err)
	}
	for cpu := range maxCPUs {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) == 0 {
		return nil, fmt.Errorf("send from the CPUs of this process: the generator knows the first %d", maxCPUs)
	}
	return cpus, nil
}

// trial is what one load did.
type trial struct {
	sent       sendCount
	received   receiveCount
	lost       map[string]int64 // by place; Unexplained is the rest
	spent      time.Duration    // of the generator's CPUs, on the generator and all that followed from it
	routerBusy float64          // share of the time that its threads ran; 0 without any
	noise      []string         // what makes the trial no measure of the router
	late       bool             // the generator missed slots
	overtaxed  bool             // it did for the rate is more than it sends
}

// lossRatio is the share of the frames sent that did not arrive.
func (t *trial) lossRatio() float64 {
	return max(0, ratio(float64(t.sent.frames)-float64(t.received.frames), float64(t.sent.frames)))
}

// Bounds beyond which a trial says more about the machine than about the router.
const (
	maxSteal   = 0.02  // of the CPUs used, kept by the hypervisor
	maxForeign = 0.02  // of the time, in which other programs had the CPUs
	maxSkipped = 0.005 // of the slots, missed by the generator
	// nearFastest is of what a generator has sent at most: slower ones it does not miss
	// by itself.
	nearFastest = 0.7
)

// settle is how long frames may be under way after the last one was sent.
const settle = 20 * time.Millisecond

// run sends a load and accounts for its frames.
func (s *tester) run(ctx context.Context, l frameLoad) (*trial, error) {
	return s.runLearning(ctx, l, false)
}

func (s *tester) runLearning(ctx context.Context, l frameLoad, learn bool) (*trial, error) {
	if err := s.attend(&l); err != nil {
		return nil, err
	}
	if err := errors.Join(s.left.reset(false), s.right.reset(learn)); err != nil {
		return nil, err
	}
	placesBefore, err := s.lossPlaces()
	if err != nil {
		return nil, err
	}
	used := slices.Clone(l.cpus)
	if s.threads != nil {
		used = append(used, s.routerCPU)
	}
	before, err := s.readActivity(used)
	if err != nil {
		return nil, err
	}
	t := &trial{}
	if t.sent, err = s.generator.send(ctx, l); err != nil {
		return nil, err
	}
	if err := s.awaitLast(ctx, t); err != nil {
		return nil, err
	}
	// Only now: a thread's waiting is accounted for when it is over.
	after, err := s.readActivity(used)
	if err != nil {
		return nil, err
	}
	places, err := s.lossPlaces()
	if err != nil {
		return nil, err
	}
	// A connection of which a segment was lost sends no more.
	rest := int64(t.sent.frames) - int64(t.received.frames)
	t.lost = map[string]int64{}
	placesBefore[LostAstray], places[LostAstray] = 0, int64(t.received.strays)
	for place, n := range places {
		if n -= placesBefore[place]; n != 0 {
			t.lost[place] = n
			rest -= n
		}
	}
	if rest != 0 && s.testbed.elsewhere() {
		t.lost[LostElsewhere] = rest
	} else if rest != 0 {
		t.lost[Unexplained] = rest
	}
	s.judge(t, l, before, after)
	return t, nil
}

// attend makes the ends take what the load sends.
func (s *tester) attend(l *frameLoad) error {
	c := sinkSetup{Source: s.generator.base.Source, Target: s.generator.base.Target, TargetPort: s.generator.base.TargetPort}
	right, left := s.right.objects.Server, s.left.objects.Client
	switch l.traffic {
	case datagrams:
		right, left = s.right.objects.Sink, s.left.objects.Sink
	case connections, openings:
		// Late segments of earlier connections are not taken for these.
		s.salt++
	}
	if l.traffic == connections {
		c.Close = 1
	}
	l.salt, c.Salt = s.salt, s.salt
	return errors.Join(s.right.attend(right, c), s.left.attend(left, c))
}

// awaitLast reads the sinks when nothing has come in for some time and nothing will.
func (s *tester) awaitLast(ctx context.Context, t *trial) error {
	for last := ^uint64(0); ; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(settle):
		}
		forth, err := s.right.read()
		if err != nil {
			return err
		}
		back, err := s.left.read()
		if err != nil {
			return err
		}
		t.received = forth
		t.received.frames += back.frames
		t.received.bytes += back.bytes
		t.received.strays += back.strays
		t.received.latency.merge(&back.latency)
		if t.received.frames == last && !s.routerRuns() {
			return nil
		}
		last = t.received.frames
	}
}

// routerRuns tells whether one of the router's threads has frames, though it may wait
// for its CPU.
func (s *tester) routerRuns() bool {
	return slices.ContainsFunc(s.threads, func(pid string) bool {
		text, _ := os.ReadFile("/proc/" + pid + "/stat") // number (name) state ...
		_, state, _ := strings.Cut(string(text), ") ")
		return strings.HasPrefix(state, "R")
	})
}

// judge says what disturbed the trial.
func (s *tester) judge(t *trial, l frameLoad, before, after activity) {
	note := func(share, limit float64, format string) {
		if share > limit {
			t.noise = append(t.noise, fmt.Sprintf(format, 100*share))
		}
	}
	d := after.minus(before)
	seconds := t.sent.elapsed.Seconds()
	note(d.steal, maxSteal, "the hypervisor kept %.1f %% of the CPUs")
	// ksoftirqd on a sender's CPU does the router's work, not another program's.
	softirq := min(d.softirq, t.sent.waited)
	t.spent = t.sent.ran + softirq
	foreign := ratio(float64(t.sent.waited-softirq), float64(t.sent.ran+t.sent.waited))
	if l.pps == 0 { // what it does to a paced generator shows in its slots
		note(foreign, maxForeign, "other programs had %.1f %% of the generator's CPU")
	}
	if s.threads != nil {
		t.routerBusy = min(1, d.router.ran.Seconds()/seconds)
		note(d.router.waited.Seconds()/seconds, maxForeign, "other programs had %.1f %% of the router's CPU")
	}
	if t.sent.frames == 0 || slices.Contains(t.sent.each, 0) {
		t.noise = append(t.noise, "the generator had no time to send a frame on one of its CPUs")
	}
	slots := float64(t.sent.frames + t.sent.skipped)
	skipped := ratio(float64(t.sent.skipped), slots)
	t.late = skipped > maxSkipped
	t.overtaxed = t.late && l.pps > nearFastest*s.fastest && skipped-foreign-d.steal > maxSkipped
	s.fastest = max(s.fastest, ratio(float64(t.sent.frames), t.sent.ran.Seconds()))
	note(skipped, maxSkipped, "the generator missed %.1f %% of its slots")
}
