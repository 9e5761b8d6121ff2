// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// ProfileOptions say how long and how often to look.
type ProfileOptions struct {
	For       time.Duration // until the context ends, if that is sooner
	Frequency int           // looks a second at every CPU; DefaultFrequency if 0
	CPUs      []int         // only these; all if nil
	// Netns is the inode of a namespace: only what its tasks have the kernel do in
	// system calls. Interrupts and softirqs, where packets are forwarded, belong to
	// no task. 0 is the whole machine.
	Netns uint64
}

// DefaultFrequency is no divisor of the kernel's timer frequencies, so that work
// that a timer starts is not always, or never, seen.
const DefaultFrequency = 499

// MaxFrequency is as often as makes sense: above it the looking is what is seen.
const MaxFrequency = 10000

// Profile is where the kernel of the whole machine spent its time: what ran on
// each CPU at the ticks of a clock. What runs with interrupts off is seen where
// they come on again.
type Profile struct {
	Start     time.Time
	Duration  time.Duration
	Frequency int
	CPUs      int

	Samples uint64 // ticks: the sum of the four below
	Kernel  uint64
	User    uint64 // in user mode
	Idle    uint64 // in the idle task, with no interrupt at work, or stood still in that time
	Lost    uint64 // busy, but not looked at closer: there was no room

	// Of Kernel, where only one namespace was asked for: what was another's, and
	// what belongs to none.
	OtherNetns, NoNetns uint64

	Stacks []ProfileStack // of Kernel, without the two above; most frequent first
}

// ProfileStack is one way through the kernel and at how many ticks it was seen.
type ProfileStack struct {
	Count  uint64
	Frames []Frame // innermost first
}

// Frame is one function that was running, or waiting for one it called.
type Frame struct {
	Function string // without the compiler's suffixes; the bare address if not known
	Module   string // "" for the kernel proper, "bpf" for an eBPF program
	Address  uint64
}

// readEvery bounds how long samples wait in the kernel's buffer.
const readEvery = 100 * time.Millisecond

// TakeProfile looks at all CPUs until o.For has passed or ctx ends. The error
// wraps ErrUnavailable where the kernel does not allow it.
func TakeProfile(ctx context.Context, o ProfileOptions) (*Profile, error) {
	if o.Frequency == 0 {
		o.Frequency = DefaultFrequency
	}
	_, opts, err := kernelTypes()
	if err != nil {
		return nil, err
	}
	var objs profileObjects
	if err := loadProfileObjects(&objs, &ebpf.CollectionOptions{Programs: opts}); err != nil {
		return nil, refused("sample the kernel's stacks", err)
	}
	defer objs.Close()
	samples, err := ringbuf.NewReader(objs.Samples)
	if err != nil {
		return nil, fmt.Errorf("read stacks: %w", err)
	}
	defer samples.Close()

	clocks, cpus, err := openClocks(o.Frequency, o.CPUs)
	defer func() {
		for _, fd := range clocks {
			unix.Close(fd)
		}
	}()
	if err != nil {
		return nil, refused("sample the kernel's stacks", err)
	}
	idleBefore, err := idleTime(cpus)
	if err != nil {
		return nil, err
	}
	p := &Profile{Start: time.Now(), Frequency: o.Frequency, CPUs: len(clocks)}
	for _, fd := range clocks {
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, objs.TakeSample.FD()); err != nil {
			return nil, refused("sample the kernel's stacks", err)
		}
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0); err != nil {
			return nil, refused("sample the kernel's stacks", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, o.For)
	defer cancel()
	stacks := map[string]uint64{}
	for end := false; !end; {
		end = ctx.Err() != nil
		if end {
			p.Duration = time.Since(p.Start)
			for _, fd := range clocks {
				_ = unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_DISABLE, 0) // closed in a moment
			}
		}
		if err := p.readSamples(ctx, samples, stacks); err != nil {
			return nil, err
		}
	}
	var counts []profileProfileCount
	if err := objs.Counts.Lookup(uint32(0), &counts); err != nil {
		return nil, fmt.Errorf("read ticks: %w", err)
	}
	for _, c := range counts {
		p.User += c.User
		p.Lost += c.Lost
	}
	idleAfter, err := idleTime(cpus)
	if err != nil {
		return nil, err
	}
	if err := p.finish(stacks, o.Netns); err != nil {
		return nil, err
	}
	p.addIdle(idleAfter - idleBefore)
	return p, nil
}

// addIdle adds the ticks that did not come while CPUs were idle for so long: a clock may
// stand still where nothing runs (seen with Linux 6.18 in a virtual machine: now and then
// one CPU has no idle tick, for perf(1) too).
func (p *Profile) addIdle(idle time.Duration) {
	ticks := func(d time.Duration) uint64 { return uint64(d.Seconds() * float64(p.Frequency)) }
	all, idleAll := ticks(p.Duration)*uint64(p.CPUs), ticks(max(0, idle))
	if all > p.Samples && idleAll > p.Idle {
		missing := min(all-p.Samples, idleAll-p.Idle)
		p.Idle += missing
		p.Samples += missing
	}
}

// userTick is the unit of /proc/stat, USER_HZ, which is 100 on every architecture that
// natkit is built for.
const userTick = 10 * time.Millisecond

// idleTime is how long these CPUs were idle since the machine started, all together.
func idleTime(cpus []int) (sum time.Duration, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read idle time: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		var cpu int
		var user, nice, system, idle, iowait time.Duration
		if _, err := fmt.Sscanf(line, "cpu%d %d %d %d %d %d", &cpu, &user, &nice, &system, &idle, &iowait); err == nil && slices.Contains(cpus, cpu) {
			sum += (idle + iowait) * userTick
		}
	}
	return sum, nil
}

// openClocks opens, on every CPU that is online and among those asked for, a clock
// that is not running yet.
func openClocks(frequency int, only []int) (fds, cpus []int, err error) {
	possible, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, nil, err
	}
	attr := unix.PerfEventAttr{
		Type:   unix.PERF_TYPE_SOFTWARE,
		Config: unix.PERF_COUNT_SW_CPU_CLOCK,
		Size:   uint32(binary.Size(unix.PerfEventAttr{})),
		Sample: uint64(frequency),
		Bits:   unix.PerfBitDisabled | unix.PerfBitFreq,
	}
	for _, cpu := range only {
		if cpu < 0 || cpu >= possible {
			return nil, nil, fmt.Errorf("CPU %d: this machine has at most %d", cpu, possible)
		}
	}
	for cpu := range possible {
		if only != nil && !slices.Contains(only, cpu) {
			continue
		}
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		switch {
		case errors.Is(err, unix.ENODEV): // possible, not online
		case errors.Is(err, unix.EINVAL) && frequency > 1000:
			return fds, cpus, fmt.Errorf("%d ticks a second are more than kernel.perf_event_max_sample_rate: %w", frequency, err)
		case err != nil:
			return fds, cpus, err
		default:
			fds, cpus = append(fds, fd), append(cpus, cpu)
		}
	}
	if len(fds) == 0 {
		return nil, nil, errors.New("none of these CPUs is online")
	}
	return fds, cpus, nil
}

// readSamples takes what is in the buffer, now or within readEvery, and adds it
// to stacks, of which the key is the sample as it came.
func (p *Profile) readSamples(ctx context.Context, samples *ringbuf.Reader, stacks map[string]uint64) error {
	deadline := time.Now().Add(readEvery)
	if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
		deadline = end
	}
	samples.SetDeadline(deadline)
	var record ringbuf.Record
	for {
		err := samples.ReadInto(&record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read stacks: %w", err)
		}
		stacks[string(record.RawSample)]++
	}
}

// finish names the functions, and tells idle ticks from those at work and, if netns
// is not 0, the namespace's from all others.
func (p *Profile) finish(stacks map[string]uint64, netns uint64) error {
	syms, err := symbolsWithPrograms()
	if err != nil {
		return err
	}
	hooks := map[string]uint64{}
	for _, name := range []string{"ipv4_conntrack_in", "ipv4_conntrack_local", "ipv6_conntrack_in", "ipv6_conntrack_local"} {
		if addr := syms.address(name); addr != 0 {
			hooks[name] = addr
		}
	}
	byFunctions := map[string]int{} // index in p.Stacks
	for raw, count := range stacks {
		task, frames := parseStack([]byte(raw), syms)
		frames = restoreHooks(frames, hooks)
		if task.idle && !interrupted(frames) {
			p.Idle += count
			continue
		}
		p.Kernel += count
		switch {
		case netns == 0:
		case interrupted(frames):
			p.NoNetns += count
			continue
		case task.netns != netns:
			p.OtherNetns += count
			continue
		}
		var key strings.Builder
		for _, f := range frames {
			key.WriteString(f.Function)
			key.WriteByte('\n')
		}
		if i, ok := byFunctions[key.String()]; ok {
			p.Stacks[i].Count += count
			continue
		}
		byFunctions[key.String()] = len(p.Stacks)
		p.Stacks = append(p.Stacks, ProfileStack{count, frames})
	}
	p.Samples = p.Kernel + p.User + p.Idle + p.Lost
	slices.SortFunc(p.Stacks, func(a, b ProfileStack) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), slices.CompareFunc(a.Frames, b.Frames,
			func(a, b Frame) int { return strings.Compare(a.Function, b.Function) }))
	})
	return nil
}

// profileTask is on top of which task a sample was taken.
type profileTask struct {
	idle  bool
	netns uint64 // inode
}

// parseStack reads a struct profile_sample, cut after its last frame.
func parseStack(raw []byte, syms *symbols) (task profileTask, frames []Frame) {
	for i := 8; i+8 <= len(raw); i += 8 {
		addr := binary.NativeEndian.Uint64(raw[i:])
		// All but the innermost are return addresses, and a call may be the last
		// thing in a function.
		inside := addr
		if len(frames) > 0 {
			inside--
		}
		name, _ := syms.function(inside)
		if name == "" {
			name = fmt.Sprintf("0x%x", addr)
		}
		frames = append(frames, Frame{baseName(name), syms.module(inside), addr})
	}
	task.idle = binary.NativeEndian.Uint32(raw) != 0
	task.netns = uint64(binary.NativeEndian.Uint32(raw[4:]))
	return task, frames
}

// restoreHooks puts conntrack's hook functions back. They end by jumping into
// nf_conntrack_in, so they are not on the stack, but nf_hook_slow calls nothing
// else that gets there; who called nf_hook_slow tells which one it was. hooks are
// those that the kernel has, with their addresses.
func restoreHooks(frames []Frame, hooks map[string]uint64) []Frame {
	for i := 0; i+2 < len(frames); i++ {
		if frames[i].Function != "nf_conntrack_in" || frames[i+1].Function != "nf_hook_slow" {
			continue
		}
		caller, family, direction := frames[i+2].Function, "ipv4", "in"
		if strings.HasPrefix(caller, "ip6") || strings.HasPrefix(caller, "ipv6") {
			family = "ipv6"
		}
		if strings.Contains(caller, "local_out") || caller == "ip6_xmit" {
			direction = "local"
		}
		hook := family + "_conntrack_" + direction
		if addr, ok := hooks[hook]; ok {
			frames = slices.Insert(frames, i+1, Frame{hook, frames[i].Module, addr})
			i++
		}
	}
	return frames
}

// interrupted says whether an interrupt, or a softirq that a task runs by itself,
// was at work on top of the task.
func interrupted(frames []Frame) bool {
	return slices.ContainsFunc(frames, func(f Frame) bool {
		return strings.HasPrefix(f.Function, "asm_sysvec_") || strings.HasPrefix(f.Function, "asm_common_interrupt") ||
			f.Function == "handle_softirqs" || f.Function == "__do_softirq"
	})
}

// CallNode is a function in a tree of calls: at how many ticks it was on the
// stack below its parents, and at how many of these it ran itself.
type CallNode struct {
	Function string      `json:"function"`
	Samples  uint64      `json:"sample_count"`
	Self     uint64      `json:"self_count"`
	Callees  []*CallNode `json:"callees,omitempty"` // most samples first
}

// AllFunctions as a root is the whole kernel.
const AllFunctions = "all"

// Calls joins all stacks into one tree below the function root, from its
// outermost call on; AllFunctions takes them whole. Without such calls the tree
// is its root alone, with no samples.
func (p *Profile) Calls(root string) *CallNode {
	top := &CallNode{Function: root}
	for _, stack := range p.Stacks {
		from := stack.Below(root)
		if from < -1 {
			continue
		}
		node := top
		node.Samples += stack.Count
		for ; from >= 0; from-- {
			node = node.callee(stack.Frames[from].Function)
			node.Samples += stack.Count
		}
		node.Self += stack.Count
	}
	top.sort()
	return top
}

// Below is the index of the frame that the outermost call of root called: -1 where
// root was running itself, -2 where it is not on the stack. Below AllFunctions is
// the outermost frame.
func (s *ProfileStack) Below(root string) int {
	from := len(s.Frames) - 1
	if root == AllFunctions {
		return from
	}
	for from >= 0 && s.Frames[from].Function != root {
		from--
	}
	return from - 1
}

func (n *CallNode) callee(function string) *CallNode {
	for _, c := range n.Callees {
		if c.Function == function {
			return c
		}
	}
	c := &CallNode{Function: function}
	n.Callees = append(n.Callees, c)
	return c
}

func (n *CallNode) sort() {
	slices.SortFunc(n.Callees, func(a, b *CallNode) int {
		return cmp.Or(cmp.Compare(b.Samples, a.Samples), strings.Compare(a.Function, b.Function))
	})
	for _, c := range n.Callees {
		c.sort()
	}
}

// Called returns the functions that root calls, wherever it is on the stack, and
// at how many ticks each was on it; most first. One packet may pass root within
// root (a bridge asks IP's hooks): both are counted, so the sum may be more than
// root's own.
func (p *Profile) Called(root string) []CallNode {
	sums := map[string]*CallNode{}
	for _, stack := range p.Stacks {
		counted := map[string]bool{}
		for i := 1; i < len(stack.Frames); i++ {
			called := stack.Frames[i-1].Function
			if stack.Frames[i].Function != root || counted[called] {
				continue
			}
			counted[called] = true
			if sums[called] == nil {
				sums[called] = &CallNode{Function: called}
			}
			sums[called].Samples += stack.Count
			if i == 1 {
				sums[called].Self += stack.Count
			}
		}
	}
	out := make([]CallNode, 0, len(sums))
	for _, n := range sums {
		out = append(out, *n)
	}
	slices.SortFunc(out, func(a, b CallNode) int {
		return cmp.Or(cmp.Compare(b.Samples, a.Samples), strings.Compare(a.Function, b.Function))
	})
	return out
}
