// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"natkit/internal/bench"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/plural"
)

// What the steps accelerate and replace do: the load carried by what natkit puts beside
// or in the place of the kernel's NAT, then all of it side by side.

// A mitigation is a way to carry the load once the fault is cured. put puts it into the
// lab's NAT node, which has no other then, and returns how to take it out again.
type mitigation struct {
	name string // as figures have it
	put  func() (out func() error, err error)
}

// The names of the mitigations.
const (
	MitigationKernel = "kernel" // as it was cured
	MitigationAccel  = "accel"  // the same, accelerated
	MitigationEngine = "ebpf"   // natkit's engine in its place
)

const (
	usualTurns = 3  // of each mitigation
	turnShare  = 10 // of the step's load, one part in so many, is a turn's
	udpFlows   = 1000
	udpTrial   = 300 * time.Millisecond
	// engineRoom is sessions that the load can have at a time, and more.
	engineRoom = 1 << 17
)

// The interfaces of the lab's host.
const (
	publicSide    = "eth0"
	containerSide = "docker0"
)

// callIPTables shows bridged frames to the rules of IP, as Docker wants it.
const callIPTables = "net.bridge.bridge-nf-call-iptables"

// engineFile is the lab's published port as a rule file.
func (d *demo) engineFile() *rulefile.File {
	a := d.lab.Options().Addresses
	file := rulefile.New()
	file.Inside, file.Outside = []string{containerSide}, []string{publicSide}
	file.Limits.Sessions = engineRoom
	one := func(port uint16) rulefile.PortRange { return rulefile.PortRange{First: port, Last: port} }
	file.Rules = []rulefile.Rule{
		{Action: rulefile.Masquerade{Source: a.Far.Masked()}},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: a.Near, Ports: one(a.Port), Targets: []rulefile.Target{{Address: a.Server, Ports: one(containerPort)}}}},
	}
	return file
}

// containerPort is where the lab's web server listens.
const containerPort = 80

// localClient is why neither step has a load where the client is on the host itself.
const localClient = "the client is on the host itself, and natkit handles packets that arrive on an interface, not the host's own"

// accelerate runs the load on the cured kernel accelerated by natkit accel.
func (d *demo) accelerate(ctx context.Context, a *DemoStep) error {
	if d.o.Site == 2 {
		a.NotRun = localClient
		return nil
	}
	out, err := d.fastPath()
	if err != nil {
		a.NotRun = fmt.Sprintf("this kernel cannot run it: %v", err)
		return nil
	}
	d.accelerated = true
	d.o.Report.Say("the rules stay as they are and see the first packets of each connection; a request of this load has few more packets, long flows have many (measured at the end)")
	a.HTTP, err = d.load(ctx, d.lab.URL(), d.lab.ServerNode(), loadTime)
	return errors.Join(err, out())
}

// replace takes the kernel's NAT out of the lab's host and puts natkit's engine in; then
// all mitigations have their turns.
func (d *demo) replace(ctx context.Context, a *DemoStep) error {
	if d.o.Site == 2 {
		a.NotRun = localClient
		return nil
	}
	// Without br_netfilter there is no such setting.
	d.bridged, _ = d.lab.NATNode().SysctlValue(callIPTables)
	if err := d.takeKernelOut(); err != nil {
		return err
	}
	out, err := d.putEngine()
	if err != nil {
		a.NotRun = fmt.Sprintf("this kernel cannot run the engine: %v", err)
		_, err = d.putKernel()
		return err
	}
	d.o.Report.Say("the host's nftables rules are removed and br_netfilter is off, so no packet passes connection tracking")
	a.HTTP, err = d.load(ctx, d.lab.URL(), d.lab.ServerNode(), loadTime)
	if err = errors.Join(err, out()); err != nil {
		return err
	}
	return d.compare(ctx, a)
}

// compare gives the mitigations their turns, first with the load and then with packets.
func (d *demo) compare(ctx context.Context, a *DemoStep) (err error) {
	mitigations := []mitigation{{MitigationKernel, d.putKernel}}
	if d.accelerated {
		mitigations = append(mitigations, mitigation{MitigationAccel, d.putAccelerated})
	}
	mitigations = append(mitigations, mitigation{MitigationEngine, d.putEngine})
	d.o.Report.Say("%s in turn, %s per turn", plural.Count(len(mitigations), "kind of NAT", "kinds of NAT"), plural.Count(d.turn(), "request"))
	if a.Figures, err = d.inTurns(ctx, mitigations...); err != nil {
		return err
	}
	packets, err := d.packets(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil { // the load has reported it already
		d.o.Report.Say("packets were not measured: %v", err)
	}
	a.Figures = append(a.Figures, packets...)
	return nil
}

// turn is how many requests one makes.
func (d *demo) turn() int { return max(d.size.requests/turnShare, 1) }

// putKernel puts in what the cured kernel had.
func (d *demo) putKernel() (out func() error, err error) {
	if err := errors.Join(d.setBridged(d.bridged), d.rules.Apply(d.lab.NATNode().Handle())); err != nil {
		return nil, err
	}
	return d.takeKernelOut, nil
}

func (d *demo) takeKernelOut() error {
	return errors.Join(d.rules.Remove(d.lab.NATNode().Handle()), d.setBridged("0"))
}

func (d *demo) setBridged(value string) error {
	if d.bridged == "" {
		return nil
	}
	return d.lab.NATNode().Sysctl(callIPTables, value)
}

func (d *demo) putAccelerated() (out func() error, err error) {
	kernelOut, err := d.putKernel()
	if err != nil {
		return nil, err
	}
	accelOut, err := d.fastPath()
	if err != nil {
		return nil, errors.Join(err, kernelOut())
	}
	return func() error { return errors.Join(accelOut(), kernelOut()) }, nil
}

// fastPath accelerates the kernel's NAT in the lab's host, at the latest until this
// process ends.
func (d *demo) fastPath() (out func() error, err error) {
	host := d.lab.NATNode()
	plan, err := control.PlanAccel(control.AccelOptions{
		Namespace: host.Handle(), Interfaces: []string{publicSide, containerSide}, Flows: engineRoom, TCPLiberal: true,
	})
	if err != nil {
		return nil, err
	}
	_, out, err = control.TemporaryAccel(plan, host.Handle())
	return out, err
}

// putEngine runs the rule file on an engine that ends with this process at the latest.
func (d *demo) putEngine() (out func() error, err error) {
	host := d.lab.NATNode()
	file := d.engineFile()
	plan, err := control.MakePlan(file, file.Text(), control.Options{Namespace: host.Handle()})
	if err != nil {
		return nil, err
	}
	e, err := control.Temporary(plan, host.Handle())
	if err != nil {
		return nil, err
	}
	return e.Close, nil
}

// inTurns puts part of the load on each mitigation, one after the other and again:
// what disturbs the machine for a while disturbs all alike.
func (d *demo) inTurns(ctx context.Context, mitigations ...mitigation) ([]bench.Figure, error) {
	part := *d
	part.size.requests = d.turn()
	part.size.concurrency = min(d.size.concurrency, part.size.requests)
	part.o.Report = silent{}
	runs := make([][]*bench.HTTPResult, len(mitigations))
	for turn := range d.o.Turns {
		for i, t := range mitigations {
			d.o.Report.Progress(fmt.Sprintf("turn %d of %d: %s", turn+1, d.o.Turns, t.name), float64(turn*len(mitigations)+i)/float64(d.o.Turns*len(mitigations)))
			out, err := t.put()
			if err != nil {
				return nil, fmt.Errorf("set up %s: %w", t.name, err)
			}
			res, err := part.load(ctx, d.lab.URL(), d.lab.ServerNode(), loadTime)
			if err = errors.Join(err, out()); err != nil {
				return nil, err
			}
			runs[i] = append(runs[i], res)
		}
	}
	var figures []bench.Figure
	for _, q := range []struct {
		metric string
		of     func(*bench.HTTPResult) float64
	}{
		{"requests_per_second", func(r *bench.HTTPResult) float64 { return r.RequestsPerSecond }},
		{"connect_mean_ms", func(r *bench.HTTPResult) float64 { return r.Connect.Mean }},
		{"timeouts_total", func(r *bench.HTTPResult) float64 { return float64(r.Failed.Timeout) }},
		{"cpu_per_request_us", func(r *bench.HTTPResult) float64 {
			return 1e6 * r.MachineCPUSeconds / float64(max(r.Completed, 1))
		}},
	} {
		for i, t := range mitigations {
			values := make([]float64, 0, d.o.Turns)
			for _, r := range runs[i] {
				values = append(values, q.of(r))
			}
			figures = append(figures, bench.NewFigure(t.name, q.metric, bench.Params{}, values...))
		}
	}
	return figures, nil
}

// packetRouters are the routers of bench that stand for the mitigations.
var packetRouters = []struct{ router, mitigation string }{{"nft", MitigationKernel}, {"accel", MitigationAccel}, {"ebpf", MitigationEngine}}

// packets measures what a web server hides, the cost of a packet, where nothing but
// the generator, the router and the sink takes time. Flows are answered: of others no
// fast-path entry is used.
func (d *demo) packets(ctx context.Context) ([]bench.Figure, error) {
	var names []string
	for _, r := range packetRouters {
		names = append(names, r.router)
	}
	routers, err := FindRouters(names)
	if err != nil {
		return nil, err
	}
	size, err := bench.ParseFrameSize("64")
	if err != nil {
		return nil, err
	}
	d.o.Report.Say("packets of UDP, alone: natkit bench udp --router %s --flows %d --both-ways --duration %v --trials %d", strings.Join(names, ","), udpFlows, udpTrial, d.o.Turns)
	steps := 0
	res, err := bench.UDP(ctx, bench.UDPOptions{
		Routers: routers, Sizes: []bench.FrameSize{size}, Flows: []int{udpFlows}, Cores: []int{1}, BothWays: true, Duration: udpTrial, Trials: d.o.Turns,
		About: bench.About{Progress: func(format string, args ...any) {
			steps++
			d.o.Report.Progress(fmt.Sprintf("packets: "+format, args...), float64(steps)/float64(len(names)*(d.o.Turns+1)))
		}},
	})
	if err != nil {
		return nil, err
	}
	for _, u := range res.Routers {
		if u.Unsupported != "" {
			d.o.Report.Say("packets through router %s were not measured: %s", u.Name, u.Unsupported)
		}
	}
	var figures []bench.Figure
	for _, f := range res.Figures {
		for _, r := range packetRouters {
			if f.Router == r.router {
				f.Router = r.mitigation
			}
		}
		figures = append(figures, f)
	}
	return figures, nil
}
