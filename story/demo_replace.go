// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"natkit/bench"
	"natkit/control"
	"natkit/nat"
)

// What the act replace does: the load on natkit's own engine, then the engine and
// the cured kernel side by side.

// A treatment is a way to carry the load once the fault is cured. put puts it into the
// lab's NAT node, which has no other then, and returns how to take it out again.
type treatment struct {
	name string // as figures have it
	put  func() (out func() error, err error)
}

// The names of the treatments.
const (
	TreatmentKernel = "kernel"
	TreatmentEngine = "ebpf"
)

const (
	turns     = 3  // of each treatment
	turnShare = 10 // of the act's load, one part in so many, is a turn's
	udpFlows  = 1000
	udpTrial  = 300 * time.Millisecond
	// engineRoom is sessions that the load can have at a time, and more.
	engineRoom = 1 << 17
)

// callIPTables shows bridged frames to the rules of IP, as Docker wants it.
const callIPTables = "net.bridge.bridge-nf-call-iptables"

// engineFile is the lab's published port as a rule file.
func (d *demo) engineFile() *nat.File {
	a := d.lab.Options().Addresses
	file := nat.New()
	file.Inside, file.Outside = []string{"docker0"}, []string{"eth0"}
	file.Limits.Sessions = engineRoom
	one := func(port uint16) nat.PortRange { return nat.PortRange{First: port, Last: port} }
	file.Rules = []nat.Rule{
		{Action: nat.Masquerade{Source: a.Far.Masked()}},
		{Action: nat.DNAT{Protocol: nat.TCP, Address: a.Near, Ports: one(a.Port), Targets: []nat.Target{{Address: a.Server, Ports: one(containerPort)}}}},
	}
	return file
}

// containerPort is where the lab's web server listens.
const containerPort = 80

// replace takes the kernel's NAT out of the lab's host and puts natkit's engine in.
func (d *demo) replace(ctx context.Context, a *DemoAct) error {
	if d.o.Site == 2 {
		a.NotRun = "the client is on the host itself, and engine ebpf translates what comes in by an interface, not the host's own connections"
	} else if err := d.replaceLoad(ctx, a); err != nil {
		return err
	}
	packets, err := d.packets(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil { // the load has told the story already
		d.o.Tell.Say("packets were not measured: %v", err)
	}
	a.Figures = append(a.Figures, packets...)
	return nil
}

func (d *demo) replaceLoad(ctx context.Context, a *DemoAct) error {
	// Without br_netfilter there is no such setting.
	d.bridged, _ = d.lab.NATNode().SysctlValue(callIPTables)
	if err := d.takeKernelOut(); err != nil {
		return err
	}
	kernel, engine := treatment{TreatmentKernel, d.putKernel}, treatment{TreatmentEngine, d.putEngine}
	out, err := engine.put()
	if err != nil {
		a.NotRun = fmt.Sprintf("this kernel can't run the engine: %v", err)
		_, err = kernel.put()
		return err
	}
	d.o.Tell.Say("the host's nftables rules are out and br_netfilter is off, so that no packet meets connection tracking")
	a.HTTP, err = d.load(ctx, d.lab.URL(), d.lab.ServerNode(), loadTime)
	if err = errors.Join(err, out()); err != nil {
		return err
	}
	d.o.Tell.Say("the cured kernel and the engine in turns, %d requests a turn", d.turn())
	a.Figures, err = d.inTurns(ctx, kernel, engine)
	return err
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

// inTurns puts part of the load on each treatment, one after the other and again:
// what disturbs the machine for a while disturbs all alike.
func (d *demo) inTurns(ctx context.Context, treatments ...treatment) ([]bench.Figure, error) {
	part := *d
	part.size.requests = d.turn()
	part.size.concurrency = min(d.size.concurrency, part.size.requests)
	part.o.Tell = silent{}
	runs := make([][]*bench.HTTPResult, len(treatments))
	for turn := range turns {
		for i, t := range treatments {
			d.o.Tell.Progress(fmt.Sprintf("turn %d of %d: %s", turn+1, turns, t.name), float64(turn*len(treatments)+i)/float64(turns*len(treatments)))
			out, err := t.put()
			if err != nil {
				return nil, fmt.Errorf("put %s in: %w", t.name, err)
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
		for i, t := range treatments {
			values := make([]float64, 0, turns)
			for _, r := range runs[i] {
				values = append(values, q.of(r))
			}
			figures = append(figures, bench.NewFigure(t.name, q.metric, bench.Params{}, values...))
		}
	}
	return figures, nil
}

// packetRouters are the routers of bench that stand for the treatments.
var packetRouters = []struct{ router, treatment string }{{"nft", TreatmentKernel}, {"ebpf", TreatmentEngine}}

// packets measures what a web server hides, the cost of a packet, where nothing but
// the generator, the router and the sink takes time.
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
	d.o.Tell.Say("packets of UDP, alone: natkit bench udp --router %s --flows %d --duration %v --trials %d", strings.Join(names, ","), udpFlows, udpTrial, turns)
	steps := 0
	res, err := bench.UDP(ctx, bench.UDPOptions{
		Routers: routers, Sizes: []bench.FrameSize{size}, Flows: []int{udpFlows}, Cores: []int{1}, Duration: udpTrial, Trials: turns,
		Progress: func(format string, args ...any) {
			steps++
			d.o.Tell.Progress(fmt.Sprintf("packets: "+format, args...), float64(steps)/float64(len(names)*(turns+1)))
		},
	})
	if err != nil {
		return nil, err
	}
	for _, u := range res.Routers {
		if u.Unsupported != "" {
			d.o.Tell.Say("packets through router %s were not measured: %s", u.Name, u.Unsupported)
		}
	}
	var figures []bench.Figure
	for _, f := range res.Figures {
		for _, r := range packetRouters {
			if f.Router == r.router {
				f.Router = r.treatment
			}
		}
		figures = append(figures, f)
	}
	return figures, nil
}
