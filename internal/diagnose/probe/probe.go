// SPDX-License-Identifier: Apache-2.0

// Package probe reads facts from the running kernel into a Snapshot. It writes
// nothing, runs no program and judges nothing.
//
// One source of facts is one file. A source that can't be read costs its part
// of the Snapshot, which says so in its Capabilities, and never the whole.
package probe

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// Options says what to look at, and for how long.
type Options struct {
	Netns  *netns.Handle // nil is the caller's own
	Window time.Duration // time between the two readings of every counter
	Dump   bool          // read the entries of the conntrack table too

	// Root is the folder that holds proc, sys and etc; "" is "/". Under another
	// one only files are read: what needs a socket or BPF would tell of this
	// machine, not of the one that the files are from.
	Root string

	// Drops, if not nil, counts the drops and is left open for the next Take of the
	// same namespace: the caller closes it.
	Drops *DropMeter
	// Hooks, if not nil, lists the hooks, likewise.
	Hooks *observe.HookLister
	// Table, if not nil, is what an earlier Take of the same namespace read of the
	// entries of its conntrack table, and is taken in place of another reading.
	Table *snapshot.Table
	// EachFlow, if not nil, gets every entry that is read of the table; it must not keep it.
	EachFlow func(*conntrack.Flow)
	// NoSeries leaves out the course of the counters within the window.
	NoSeries bool

	// Quiet is for who looks all the time. It sends nothing: whether somebody else has one of this machine's addresses is
	// not asked. And where many packets pass, only the first of the window are looked at one by one.
	Quiet bool
	// ARPReplies looks for the replies to ARP requests in the whole window, with Quiet, too.
	ARPReplies bool

	// Engine, if not nil, reads what natkit itself has up in a namespace: control.ReadFacts,
	// which is above this package.
	Engine EngineReader
	// EngineSample, if not nil, reads what a Sampler looks at of the engine in each round: control.SampleEngine.
	EngineSample EngineSampler
	// Log, if not nil, reads how the log of translations is kept: collect.FactsFrom.
	Log LogReader

	// Progress, if not nil, is called now and then with what is being done, and
	// how much of the window is over, 0 to 1.
	Progress func(what string, part float64)

	shared *sharedSources // of several namespaces that are looked at in one window
	wait   waiter         // for tests; nil is wait
}

// source is one kind of fact. start and end run on a thread that is in the
// namespace, start before the window and end after it; stop releases what start
// holds and runs always. Each may be nil.
type source struct {
	name  string // of its Capability
	costs string // what is missing from the answer without it
	live  bool   // it asks the kernel by other means than files

	start func(v *view) error
	// mark runs when the window begins and when it ends, inside of what all others count: what
	// is a part of their numbers is then not more than these.
	mark func(ends bool) error
	end  func(v *view, s *snapshot.Snapshot) error
	stop func()
}

// sources in the order in which they are read after the window; before it the
// order is reversed. So what takes long, to start or to read, lies outside of the
// window of the counters, which come first.
func sources(ctx context.Context, opts Options) []source {
	all := []source{
		counters(),
		conntrackLimits(),
		conntrackStats(),
		cpus(),
		softirqWait(),
		interfaces(),
		qdiscs(),
		nics(opts),
		neighbours(),
		listeners(),
		localPorts(), // of which nobody listens
		refusals(),
		leaving(opts),
		frames(opts),
		eventSockets(),
		nftables(),
		iptablesLegacy(),
		kernelLog(opts),
		drops(opts),
		sets(), // that packets dropped by rules met
		xfrm(),
		processNames(),
		hooks(opts),
		conntrackTable(ctx, opts),
		routes(), // of flows that the dump shows, too
		conntrackMemory(opts),
		sysctls(),
		engine(opts),
		host(),
		owners(opts),
	}
	if opts.Log != nil { // who cannot ask for it is not told that it was not requested
		all = append(all, translationLog(opts))
	}
	return all
}

// Take reads the start values, waits for the window, reads the end values and
// returns what it found. When ctx ends before the window does, the Snapshot is
// one of the shorter window. The only error is a namespace that can't be entered.
func Take(ctx context.Context, opts Options) (*snapshot.Snapshot, error) {
	if opts.Progress == nil {
		opts.Progress = func(string, float64) {}
	}
	opts.Progress("reading start values", 0)
	r, err := begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer r.stop()
	stopSeries := watchSeries([]*reading{r}, max(seriesStep, opts.Window/seriesMost))
	opts.watch(ctx)
	series := stopSeries()
	opts.Progress("reading end values", 1)
	s, err := r.finish()
	if err != nil {
		return nil, err
	}
	s.Series = series[0]
	return s, nil
}

// reading is a Snapshot under way: its start values are read.
type reading struct {
	opts    Options
	view    *view
	sources []source
	failed  []error // of each source
	began   time.Time
}

// begin reads the start values. stop must be called, also when finish was not.
func begin(ctx context.Context, opts Options) (*reading, error) {
	r := &reading{opts: opts, view: newView(opts.Root), sources: sources(ctx, opts)}
	r.failed = make([]error, len(r.sources))
	for i, src := range r.sources {
		if src.live && !r.view.live {
			r.failed[i] = fmt.Errorf("not read: the facts are from the files in %s", r.view.root)
		}
	}
	err := opts.Netns.Do(func() error {
		for i, src := range slices.Backward(r.sources) {
			if src.start != nil && r.failed[i] == nil {
				r.failed[i] = src.start(r.view)
			}
		}
		return nil
	})
	if err != nil {
		r.stop()
		return nil, err
	}
	r.mark(false)
	r.began = time.Now()
	return r, nil
}

// finish reads the end values.
func (r *reading) finish() (*snapshot.Snapshot, error) {
	s := &snapshot.Snapshot{
		TakenAt:       time.Now().UTC().Truncate(time.Millisecond),
		WindowSeconds: time.Since(r.began).Seconds(),
		Netns:         snapshot.Netns{Name: r.opts.Netns.Name(), Inode: r.opts.Netns.Inode()},
	}
	r.mark(true)
	err := r.opts.Netns.Do(func() error {
		s.Netns.Init = r.view.initialNetns()
		for i, src := range r.sources {
			if src.end != nil && r.failed[i] == nil {
				r.failed[i] = src.end(r.view, s)
			}
			s.Capabilities = append(s.Capabilities, capability(src.name, src.costs, r.failed[i]))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	snapshot.Clean(s)
	return s, nil
}

// mark begins or ends the window of the sources that know one.
func (r *reading) mark(ends bool) {
	for i, src := range r.sources {
		if src.mark != nil && r.failed[i] == nil {
			r.failed[i] = src.mark(ends)
		}
	}
}

func (r *reading) stop() {
	for _, src := range r.sources {
		if src.stop != nil {
			src.stop()
		}
	}
}

// release ends the reading, of which nothing more is wanted, with its namespace.
func (r *reading) release() {
	r.stop()
	r.opts.Netns.Close()
}

type waiter func(ctx context.Context, window time.Duration, progress func(string, float64))

// watch lets the window pass.
func (o *Options) watch(ctx context.Context) {
	pass := o.wait
	if pass == nil {
		pass = wait
	}
	pass(ctx, o.Window, o.Progress)
}

// wait sleeps for the window or until ctx ends.
func wait(ctx context.Context, window time.Duration, progress func(string, float64)) {
	timer := time.NewTimer(window)
	defer timer.Stop()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case <-tick.C:
			progress("watching", min(1, time.Since(began).Seconds()/window.Seconds()))
		}
	}
}

func capability(name, costs string, err error) snapshot.Capability {
	if err == nil {
		return snapshot.Capability{Name: name, OK: true}
	}
	reason := strings.ReplaceAll(err.Error(), "\n", "; ") // errors.Join breaks lines
	if errors.Is(err, fs.ErrPermission) && !strings.Contains(reason, "root") && !strings.Contains(reason, "CAP_") {
		if os.Geteuid() != 0 {
			reason += " (run as root to see it)"
		} else {
			reason += " (root here lacks the capability for it: run natkit on the host, or in a container with --privileged)"
		}
	}
	return snapshot.Capability{Name: name, Reason: reason, Costs: costs, Waived: errors.As(err, new(waived))}
}

// waived is why a source that is not missed was not read: snapshot.Capability.
type waived string

func (w waived) Error() string { return string(w) }

// view is what a source reads from: files below root and, when live, the kernel.
type view struct {
	root string
	net  string // /proc/net of the namespace that the thread is in, below root
	live bool

	allRules bool // of chains that drop nothing, too
}

func newView(root string) *view {
	root = filepath.Clean("/" + root)
	if root != "/" {
		return &view{root: root, net: "proc/net"}
	}
	// /proc/net would be the namespace of the process's first thread.
	return &view{root: root, net: "proc/thread-self/net", live: true}
}

// maxFile bounds what is read of one file; the longest, /proc/stat on a machine
// of a thousand CPUs, has a few hundred kilobytes.
const maxFile = 8 << 20

// read returns the content of a file, its path given without a leading slash.
func (v *view) read(path string) (string, error) {
	return readBelow(unix.AT_FDCWD, filepath.Join(v.root, path), strings.HasPrefix(path, "proc/sys/"))
}

// readBelow returns the content of a file, named from an open folder. The kernel writes a setting whole, or nothing.
func readBelow(folder int, name string, setting bool) (string, error) {
	// Not by os.Open, which has the runtime's poller watch what are thousands of short files.
	fd, err := unix.Openat(folder, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	var b []byte
	var buf [4096]byte
	for {
		n, err := unix.Read(fd, buf[:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return "", &fs.PathError{Op: "read", Path: name, Err: err}
		case n == 0, setting && b == nil && n < len(buf):
			return string(append(b, buf[:n]...)), nil
		case len(b)+n > maxFile:
			return "", fmt.Errorf("read %s: longer than %d bytes", name, maxFile)
		default:
			b = append(b, buf[:n]...)
		}
	}
}

// readNet is read for a file of /proc/net.
func (v *view) readNet(name string) (string, error) { return v.read(filepath.Join(v.net, name)) }

// number reads a file that holds one number of 32 bits, such as a sysctl.
func (v *view) number(path string) (uint64, error) {
	fd, err := v.openNumber(path)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return v.readNumber(fd, path)
}

// openNumber opens such a file; what it holds can be read again and again.
func (v *view) openNumber(path string) (fd int, err error) {
	// By hand: a sampler reads thousands of them.
	name := filepath.Join(v.root, path)
	if fd, err = unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return -1, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

func (v *view) readNumber(fd int, path string) (uint64, error) {
	var buf [64]byte // longer than any number
	length, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0, &fs.PathError{Op: "read", Path: filepath.Join(v.root, path), Err: err}
	}
	text := string(buf[:length])
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read %s: %q is not a number of 32 bits", filepath.Join(v.root, path), short(text))
	}
	return n, nil
}

// initialNetns says whether this is the initial network namespace. Its inode
// can be compared with that of process 1 only by root, and only outside of
// containers; but some sysctls have always been shown in the initial one alone.
func (v *view) initialNetns() bool {
	return unix.Access(filepath.Join(v.root, "proc/sys/net/core/netdev_max_backlog"), unix.F_OK) == nil
}

// increase is how much a counter grew. One that went backwards began again
// in between: what it has now is what is sure.
func increase(before, after uint64) uint64 {
	if after < before {
		return after
	}
	return after - before
}

// increase32 is increase for a counter of 32 bits, which may have passed zero.
func increase32(before, after uint64) uint64 {
	if d := uint64(uint32(after - before)); d < 1<<31 {
		return d
	}
	return after
}

// short cuts outside text for a message.
func short(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}
