// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// acceleration carries out no rule file: the kernel's own NAT goes on deciding, and packets of
// flows that it has established use the fast path.
type acceleration struct{}

func (acceleration) pinned() bool { return true }

func (acceleration) exists(*record) error {
	return errors.New("the kernel's NAT is accelerated here already: `natkit accel off` ends that, and no connection with it")
}

func (acceleration) remove(in *instance, rec *record) ([]string, error) {
	return nil, in.ns.Do(func() error { return rec.detachFilters(nil) })
}

// AccelOptions says what to accelerate.
type AccelOptions struct {
	Namespace  *netns.Handle
	Interfaces []string
	Attach     Attach // "" is AttachAuto
	Flows      int    // that are remembered; 0: as many as connection tracking may have, at most DefaultAccelFlows
	TCPLiberal bool   // make connection tracking lenient about TCP windows, so that TCP can be accelerated
	Bypass     bool   // go past what the stack does with each packet
	// Chains are the filter chains of the namespace, to tell what is gone past.
	Chains []snapshot.Chain
}

// DefaultAccelFlows is how many flows are remembered unless said otherwise.
const DefaultAccelFlows = 1 << 18

// MinAccelFlows is the least that a table is made for. Each CPU takes free places of an LRU
// map for itself by 128 (LOCAL_FREE_TARGET of Linux kernel/bpf/bpf_lru_list.c): a table of
// no more would forget flows that are in use while it has room.
func MinAccelFlows() int { return max(1024, 128*ebpf.MustPossibleCPU()) }

// MaxAccelFlows is what a table may be made for.
const MaxAccelFlows = rulefile.MaxAccelFlows

// AccelPlan is what AccelOn would do, and why.
type AccelPlan struct {
	Placements  []Placement `json:"interfaces"`
	TCP         bool        `json:"tcp"`          // TCP is accelerated, not only UDP
	Flows       int         `json:"flows_max"`    // that are remembered
	MemoryBytes int64       `json:"memory_bytes"` // of the kernel, for them
	Changes     []Change    `json:"changes,omitempty"`
	Bypassed    []Bypassed  `json:"bypassed,omitempty"`
	Warnings    []string    `json:"warnings,omitempty"`

	links  []datapath.Link
	make   datapath.AccelOptions
	record *record
}

// accelRecord is what the record of an acceleration has besides.
type accelRecord struct {
	Placements []Placement `json:"placements"` // of the links
	MACs       []string    `json:"macs"`       // likewise
	Flows      int         `json:"flows"`
	Asked      int         `json:"flows_asked,omitempty"` // by --flows
	TCPTimeout int         `json:"tcp_timeout_s"`         // as the programs have it; 0: TCP is left alone
}

// The settings of connection tracking that acceleration looks at.
const (
	settingLiberal     = "net.netfilter.nf_conntrack_tcp_be_liberal"
	settingEstablished = "net.netfilter.nf_conntrack_tcp_timeout_established"
	settingTableMax    = "net.netfilter.nf_conntrack_max"
	settingAccounting  = "net.netfilter.nf_conntrack_acct"
	settingBridge      = "net.bridge.bridge-nf-call-iptables" // there is none without br_netfilter
)

// PlanAccel plans what AccelOn would do in a namespace that has nothing up, and changes
// nothing.
func PlanAccel(o AccelOptions) (*AccelPlan, error) {
	if err := vacant(o.Namespace, nil); err != nil {
		return nil, err
	}
	return planAccel(o)
}

// planAccel plans whatever is up in the namespace.
func planAccel(o AccelOptions) (*AccelPlan, error) {
	rec, err := newRecord(Options{Namespace: o.Namespace, Engine: EngineAccel})
	if err != nil {
		return nil, err
	}
	if err := canLoad(); err != nil {
		return nil, err
	}
	p := &AccelPlan{record: rec}
	if o.Attach != "" {
		rec.Attach = o.Attach
	}
	err = o.Namespace.Do(func() error {
		rules, err := netlink.RuleList(unix.AF_INET)
		if err != nil {
			return fmt.Errorf("list routing rules: %w", err)
		}
		p.Warnings = append(p.Warnings, accelUseless(o.Chains, rules)...)
		return p.gather(o)
	})
	if err != nil {
		return nil, err
	}
	if p.Bypassed, err = accelBypassed(o.Namespace, o.Chains, p.links); err != nil {
		return nil, err
	}
	rec.Accel = &accelRecord{Placements: p.Placements, MACs: macs(p.links), Flows: p.Flows, Asked: o.Flows, TCPTimeout: int(p.make.TCPTimeout / time.Second)}
	p.MemoryBytes = p.make.MemoryBytes()
	return p, nil
}

func macs(links []datapath.Link) (out []string) {
	for _, l := range links {
		out = append(out, net.HardwareAddr(l.MAC[:]).String())
	}
	return out
}

// gather reads what the plan needs of the namespace that the calling thread is in.
func (p *AccelPlan) gather(o AccelOptions) error {
	for i, name := range o.Interfaces {
		if slices.Contains(o.Interfaces[:i], name) {
			return fmt.Errorf("interface %q is named twice", name)
		}
		l, err := netlink.LinkByName(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return fmt.Errorf("interface %q: there is none of that name here (ip link shows them)", name)
		}
		if err != nil {
			return fmt.Errorf("interface %q: %w", name, err)
		}
		if l.Attrs().Name != name {
			return alternativeName(name, l)
		}
		if len(l.Attrs().HardwareAddr) != 6 {
			return fmt.Errorf("interface %q (%s): acceleration needs Ethernet frames; flows that come in or leave by it go through the stack as before", name, l.Type())
		}
		if master := l.Attrs().MasterIndex; master != 0 {
			above, err := netlink.LinkByIndex(master)
			if err != nil {
				return fmt.Errorf("what %q is a port of: %w", name, err)
			}
			return belowError(name, above)
		}
		place := place(l, p.record.Attach)
		if foreign := foreignXDP(l); place.XDP && foreign != "" {
			if p.record.Attach == AttachXDP {
				return fmt.Errorf("interface %q has the XDP program %q of somebody else, and can have one only: take that off, or use --attach tc", name, foreign)
			}
			place.XDP, place.Reason = false, "tc: the XDP program "+strconv.Quote(foreign)+" of somebody else is there"
		}
		if l.Attrs().Flags&net.FlagUp == 0 {
			p.Warnings = append(p.Warnings, name+" is down")
		}
		link, err := describe(l, place)
		if err != nil {
			return err
		}
		link.Index = p.record.linkIndex(name)
		p.record.Links[link.Index].Ifindex = link.Ifindex
		p.links, p.Placements = append(p.links, link), append(p.Placements, place)
		if softwareKinds[place.kind] != "" && place.XDP {
			p.Warnings = append(p.Warnings, softwareCaution(place))
		}
		// Connection tracking would have to be asked by the packet's entry instead of its
		// addresses; but by these two flows may look the same then, one to a service and one to
		// what is behind it, and a fast-path entry would translate the one as the other.
		if v, err := readSetting(settingBridge); err == nil && v == "1" && l.Type() == "bridge" {
			p.Warnings = append(p.Warnings, name+": packets of its ports whose destination NAT changes go through the stack: it is changed before they get here, as "+settingBridge+" is 1")
		}
	}
	if len(o.Interfaces) == 1 {
		p.Warnings = append(p.Warnings, "flows that come in or leave by another interface than "+o.Interfaces[0]+" go through the stack: name those too")
	}
	return errors.Join(p.gatherTCP(o), p.gatherFlows(o))
}

// belowError refuses an interface that has another above it. One in a VRF has the addresses itself.
func belowError(name string, above netlink.Link) error {
	if above.Type() == "vrf" {
		return fmt.Errorf("interface %q is in the VRF %q: acceleration is for interfaces without one; flows that come in or leave by it go through the stack as before", name, above.Attrs().Name)
	}
	return fmt.Errorf("interface %q is a port of %q, which has the addresses: name that", name, above.Attrs().Name)
}

func (p *AccelPlan) gatherTCP(o AccelOptions) error {
	liberal, err := readSetting(settingLiberal)
	if err != nil {
		return fmt.Errorf("no connection tracking here, so no NAT to accelerate: %w", err)
	}
	seconds, err := settingNumber(settingEstablished)
	if err != nil {
		return err
	}
	p.TCP = seconds > 0 && (liberal == "1" || o.TCPLiberal)
	switch {
	case seconds == 0:
		p.Warnings = append(p.Warnings, "TCP is left alone: connection tracking forgets connections at once, as "+settingEstablished+" is 0; set it to what an idle connection may have")
	case !p.TCP:
		p.Warnings = append(p.Warnings, "TCP is left alone: connection tracking would take packets for invalid that follow some it has not seen, while "+settingLiberal+" is 0; --tcp-liberal sets it")
	}
	if !p.TCP {
		return nil
	}
	p.make.TCPTimeout = time.Duration(seconds) * time.Second
	if c, err := settingChange(settingLiberal, "1", "connection tracking does not see every TCP packet any more, and must not expect it"); err != nil {
		return err
	} else if c != nil {
		p.Changes = append(p.Changes, *c)
	}
	return nil
}

func (p *AccelPlan) gatherFlows(o AccelOptions) error {
	p.Flows = o.Flows
	if p.Flows == 0 {
		most, err := settingNumber(settingTableMax)
		if err != nil {
			return err
		}
		p.Flows = flowsFor(most)
	}
	p.make.AccelEntries = 2 * p.Flows
	return nil
}

// flowsFor is how many flows are remembered where connection tracking may have so many; 0 is no limit.
func flowsFor(most int) int {
	if most == 0 {
		most = DefaultAccelFlows
	}
	return max(min(most, DefaultAccelFlows), MinAccelFlows())
}

func settingNumber(name string) (int, error) {
	text, err := readSetting(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s is %q: %w", name, text, err)
	}
	return n, nil
}

// AccelOn accelerates the NAT that the kernel does in a namespace: whole, or not at all.
// What a crash of an earlier one has left is removed first.
func AccelOn(ctx context.Context, o AccelOptions) (p *AccelPlan, err error) {
	left, err := raise(o.Namespace, nil, func(in *instance) (*record, error) {
		if p, err = PlanAccel(o); err != nil {
			return nil, err
		}
		if len(p.Bypassed) > 0 && !o.Bypass {
			return p.record, &BypassError{Packets: "most packets would not go through the stack any more", Bypassed: p.Bypassed}
		}
		p.record.Accepted = p.Bypassed
		if err := in.canPin(); err != nil {
			return p.record, err
		}
		return p.record, in.accelerate(ctx, p)
	})
	if err != nil {
		return nil, err
	}
	p.Warnings = append(p.Warnings, left...)
	return p, nil
}

// accelerate brings up what the plan is for.
func (in *instance) accelerate(ctx context.Context, p *AccelPlan) error {
	p.record.Make = datapath.MakeAccel()
	return in.bringUp(ctx, p.record, p.Changes, func() (func() error, io.Closer, error) { return in.createAccelerator(p) })
}

// createAccelerator pins what accelerates, which start attaches.
func (in *instance) createAccelerator(p *AccelPlan) (start func() error, a *datapath.Accelerator, err error) {
	err = in.ns.Do(func() error {
		if a, err = datapath.CreateAccelerator(in.dir, p.make, p.links); err != nil {
			return err
		}
		if err = datapath.PinLifetime(in.dir); err != nil {
			err = errors.Join(err, a.Close())
		}
		return err
	})
	return func() error { return in.ns.Do(func() error { return p.attach(a) }) }, a, err
}

// attach puts the programs on the plan's interfaces. The calling thread is in their
// namespace.
func (p *AccelPlan) attach(a *datapath.Accelerator) error {
	return a.Attach(p.links, func(l datapath.Link) bool { return p.Placements[l.Index].XDP })
}

// TemporaryAccel accelerates until off is called, which puts back what the plan changes of
// the namespace, or until the end of the process however that ends: for labs and
// measurements in namespaces that end with them.
func TemporaryAccel(p *AccelPlan, ns *netns.Handle) (a *datapath.Accelerator, off func() error, err error) {
	off = func() error {
		var closed error
		if a != nil {
			closed = a.Close()
		}
		_, err := undo(ns, nil, p.Changes)
		return errors.Join(closed, err)
	}
	err = ns.Do(func() (err error) {
		if a, err = datapath.NewAccelerator(p.make, p.links); err != nil {
			return err
		}
		for _, c := range p.Changes {
			if err := c.make(); err != nil {
				return err
			}
		}
		return p.attach(a)
	})
	if err != nil {
		return nil, nil, errors.Join(err, off())
	}
	return a, off, nil
}

// exceptConnections has connection tracking not check the windows of connections that it did not
// follow while they were accelerated, where somebody has made it strict since: it would, as soon
// as it sees all of their packets again. Of what this puts back, Change.unmake does so.
func exceptConnections(ns *netns.Handle) (kept []string, err error) {
	err = ns.Do(func() error {
		value, err := readSetting(settingLiberal)
		if errors.Is(err, os.ErrNotExist) || value == "1" {
			return nil // there is no connection tracking any more, or it is not strict
		}
		if err != nil {
			return err
		}
		if _, err := conntrack.IgnoreWindows(context.Background()); err != nil {
			kept = append(kept, fmt.Sprintf("%s is %s, and open connections may stall: %v; until they have ended, `sysctl -w %s=1` lets them go on", settingLiberal, value, err, settingLiberal))
		}
		return nil
	})
	return kept, err
}

// AccelOff ends acceleration and puts back what it changed in the namespace. Packets go
// through the stack again, which knows of every flow: no connection ends. TCP connections
// that are open have their windows not checked till they end. What somebody else has
// changed since is kept, and reported; so is what would stall connections if it were put back.
func AccelOff(ns *netns.Handle) (kept []string, err error) {
	in, err := holdToRemove(ns, ErrAccelOff)
	if err != nil {
		return nil, err
	}
	rec, err := in.record()
	if errors.Is(err, ErrDown) {
		changes, damaged := standing(in.j.Path())
		if damaged == nil && len(changes) == 0 && !in.pinned() {
			return nil, errors.Join(ErrAccelOff, in.remove())
		}
		if err = damaged; err == nil {
			err = errors.New("what natkit has brought up here has lost its record: `natkit down` takes it down and restores what the journal holds")
		}
	} else if err == nil && rec.Accel == nil {
		err = fmt.Errorf("%w: engine %s is up, which %s takes down", ErrAccelOff, rec.Engine, rec.down(ns))
	}
	if err != nil {
		return nil, errors.Join(err, in.release())
	}
	return in.lower(rec)
}
