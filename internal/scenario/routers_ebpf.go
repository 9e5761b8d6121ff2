// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/cilium/ebpf"

	"natkit/internal/bench"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// engineRouter is natkit's own engine, masquerading as the kernel's routers do.
type engineRouter struct {
	name, describe string
	attach         control.Attach
	rules          func(*bench.Testbed, bench.RouterOptions) *rulefile.File // nil: engineRules
	tables         map[*bench.Testbed]*engineTable
}

func (r *engineRouter) Name() string     { return r.name }
func (r *engineRouter) Describe() string { return r.describe }
func (r *engineRouter) NAT() bool        { return true }

func (r *engineRouter) Install(_ context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	if r.attach == control.AttachXDP {
		if err := o.RefuseSockets(r.name); err != nil {
			return nil, err
		}
	}
	rules := r.rules
	if rules == nil {
		rules = engineRules
	}
	plan, err := control.MakePlan(rules(b, o), "", control.Options{Namespace: b.Router, Attach: r.attach})
	if err != nil {
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	table := &engineTable{plan: plan, testbed: b}
	err = table.begin()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, &bench.UnsupportedError{Router: r.name, Reason: err.Error()}
	}
	if err != nil {
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	if r.tables == nil {
		r.tables = map[*bench.Testbed]*engineTable{}
	}
	r.tables[b] = table
	return func() error {
		delete(r.tables, b)
		return table.engine.Close()
	}, nil
}

// Table is the engine's in the testbed.
func (r *engineRouter) Table(b *bench.Testbed) bench.Table { return r.tables[b] }

// engineTable is the engine of one testbed.
type engineTable struct {
	plan    *control.Plan
	testbed *bench.Testbed
	engine  *datapath.Engine
}

func (t *engineTable) begin() error {
	engine, err := control.Temporary(t.plan, t.testbed.Router)
	if err == nil { // what removes the router closes the one that there was
		t.engine = engine
	}
	return err
}

func (t *engineTable) Sessions() (count, limit uint64, err error) {
	stats, err := t.engine.Stats()
	if err != nil {
		return 0, 0, err
	}
	return uint64(stats.Sessions), uint64(t.engine.Size().Sessions), nil
}

func (t *engineTable) SessionBytes() (float64, error) { return t.engine.SessionBytes() }

// Empty puts a new engine in the place of the old: sessions that have ended keep their
// ports for a while, as they must, and trials would not begin alike.
func (t *engineTable) Empty(context.Context) error {
	if err := t.engine.Close(); err != nil {
		return err
	}
	return t.begin()
}

// enginePorts are as many as the kernel's NAT has.
var enginePorts = rulefile.PortRange{First: 1024, Last: 65535}

// engineSessions is what the engine of a measurement has room for, at least.
const engineSessions = 1 << 20

// engineRules are masquerade for the testbed's sources, or a pool, and rules about hosts that
// send nothing.
func engineRules(b *bench.Testbed, o bench.RouterOptions) *rulefile.File {
	file := rulefile.New()
	file.Name = "bench"
	file.Inside, file.Outside = []string{b.InsideDev}, []string{b.OutsideDev}
	file.Limits.Sessions = max(engineSessions, 1<<bits.Len(uint(max(o.Sessions-1, 0))))
	if o.UDPTimeout > 0 {
		file.Defaults.Timeouts[rulefile.TimeoutUDP] = o.UDPTimeout
	}
	rule := rulefile.Rule{Action: rulefile.Masquerade{Source: b.Sources, Ports: enginePorts}}
	if pool := outsidePool(o.Sessions); pool.IsValid() {
		file.Pools = []rulefile.Pool{{Name: "bench", Addresses: []rulefile.AddressRange{rulefile.RangeOf(pool)}, Ports: enginePorts}}
		rule.Action = rulefile.SNAT{Source: b.Sources, Pool: "bench"}
	}
	file.Rules = append(file.Rules, rule)
	for _, host := range silentHosts(o.Rules) {
		file.Rules = append(file.Rules, rulefile.Rule{Action: rulefile.SNAT{Source: netip.PrefixFrom(host, 32), Address: b.OutsideAddr, Ports: enginePorts}})
	}
	return file
}
