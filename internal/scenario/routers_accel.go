// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/bench"
	"natkit/internal/nat/control"
)

// accelRouter is a router of nftables rules whose flows are accelerated.
type accelRouter struct {
	rulesRouter
	attach control.Attach
}

func (r *accelRouter) Install(ctx context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	if r.attach == control.AttachXDP {
		if err := o.RefuseSockets(r.name); err != nil {
			return nil, err
		}
	}
	remove, err := r.rulesRouter.Install(ctx, b, o)
	if err != nil {
		return nil, err
	}
	accelerated, err := r.accelerate(b)
	if err != nil {
		return nil, errors.Join(err, remove())
	}
	return func() error { return errors.Join(accelerated(), remove()) }, nil
}

// Learns is bench.Learner's: a direction's packets of a second, then one that is seen
// leaving, and the same for those that shared its place to be counted at.
func (r *accelRouter) Learns() time.Duration { return 2 * time.Second }

func (r *accelRouter) accelerate(b *bench.Testbed) (off func() error, err error) {
	plan, err := control.PlanAccel(control.AccelOptions{
		Namespace: b.Router, Interfaces: []string{b.InsideDev, b.OutsideDev}, Attach: r.attach, TCPLiberal: true, Flows: accelFlows,
	})
	if err != nil {
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	_, off, err = control.TemporaryAccel(plan, b.Router)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, &bench.UnsupportedError{Router: r.name, Reason: err.Error()}
	}
	if err != nil {
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	return off, nil
}

// accelFlows is as many as the flows of a measurement.
const accelFlows = 1 << 20
