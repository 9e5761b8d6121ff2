// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/diagnose/trim"
	"natkit/internal/lab"
)

// HookCosts is what parts of netfilter cost a forwarded frame on this kernel,
// measured in the lab. The differences are of medians; Figures have the spread.
type HookCosts struct {
	Figures []bench.Figure `json:"figures"` // cost_ns of each router
	Notes   []string       `json:"notes,omitzero"`
	Seconds float64        `json:"duration_s"`
	// Parts is the measured cost of each part, in nanoseconds a frame.
	Parts []HookPart `json:"parts"`
	// Unmeasured is why there is no figure, by kind of what package trim finds.
	Unmeasured map[string]string `json:"unmeasured,omitzero"`
}

// HookPart is one difference of two routers.
type HookPart struct {
	Name  string  `json:"name"`
	More  string  `json:"more"` // router with the part
	Less  string  `json:"less"` // router without
	NS    float64 `json:"cost_ns"`
	Noise float64 `json:"noise_ns"` // how wide the middle half of each router's trials is, both together
	// Kind is what of package trim it measures, per function on a hook if PerHook.
	Kind    string `json:"kind,omitzero"`
	PerHook int    `json:"per_hook,omitzero"`
}

// How the trials of MeasureHooks are: some forty seconds together.
const (
	hookTrials   = 7
	hookDuration = 150 * time.Millisecond
	hookFlows    = 1000
)

// MeasureHooksTakes is about how long MeasureHooks does.
const MeasureHooksTakes = 40 * time.Second

// MeasureHooks compares routers in a lab, from no netfilter to what distributions
// register, by what a frame costs on one core.
func MeasureHooks(ctx context.Context, version string, progress func(format string, args ...any)) (*HookCosts, error) {
	return measureHooks(ctx, version, hookTrials, hookDuration, progress)
}

func measureHooks(ctx context.Context, version string, trials int, duration time.Duration, progress func(format string, args ...any)) (*HookCosts, error) {
	routers, err := FindRouters([]string{"none", "framework", "trimmed", "default"})
	if err != nil {
		return nil, err
	}
	idle := PaperSetups()[1].Router // tracking and NAT chains, and nothing translated
	routers = append(routers, idle, emptyLegacy{}, routedBridge, routedBridgeShown, switchedBridge, switchedBridgeShown, helped{})
	begun := time.Now()
	res, err := bench.UDP(ctx, bench.UDPOptions{
		Routers: routers, Sizes: []bench.FrameSize{{Bytes: bench.MinFrame}}, Flows: []int{hookFlows}, Cores: []int{1},
		Duration: duration, Trials: trials, About: bench.About{Command: "natkit hooks --cost --measure", Natkit: version, Progress: progress},
	})
	if err != nil {
		return nil, err
	}
	out := &HookCosts{Notes: res.Notes, Seconds: time.Since(begun).Seconds(), Unmeasured: maps.Clone(unmeasurable)}
	cost := map[string]bench.Figure{}
	for _, f := range res.Figures {
		if f.Metric == "cost_ns" && len(f.Values) > 0 {
			cost[f.Router] = f
			out.Figures = append(out.Figures, f)
		}
	}
	for _, p := range []HookPart{
		{Name: "three empty chains on prerouting, forward and postrouting", More: "framework", Less: "none", Kind: trim.EmptyChain, PerHook: 3},
		{Name: "an empty table of iptables-legacy with chains on these three", More: emptyLegacy{}.Name(), Less: "none", Kind: trim.LegacyTable, PerHook: 3},
		{Name: "tracking of flows that nothing translates", More: idle.Name(), Less: "none", Kind: trim.IdleTracking},
		{Name: "tracking and translation", More: "trimmed", Less: "none"},
		{Name: "also the tables raw, mangle, security and filter", More: "default", Less: "trimmed"},
		{Name: "br_netfilter, for a frame that arrives on a bridge and is routed", More: routedBridgeShown.name, Less: routedBridge.name, Kind: trim.BridgeHooks},
		{Name: "br_netfilter and tracking, for a bridged frame", More: switchedBridgeShown.name, Less: switchedBridge.name},
		{Name: "a helper (SIP), in a flow that has one", More: helped{}.Name(), Less: "trimmed"},
	} {
		more, ok1 := cost[p.More]
		less, ok2 := cost[p.Less]
		if !ok1 || !ok2 {
			out.Notes = append(out.Notes, fmt.Sprintf("%s: not measured", p.Name))
			if p.Kind != "" {
				out.without(p.Kind, "one of the two routers could not be set up here: "+strings.Join(res.Notes, "; "))
			}
			continue
		}
		p.NS = more.Median - less.Median
		p.Noise = middleHalf(more.Values) + middleHalf(less.Values)
		out.Parts = append(out.Parts, p)
	}
	return out, nil
}

// The bridges that are compared.
var (
	routedBridge        = bridgeRouter{name: "bridge-routed", describe: "a bridge, routing and masquerade; bridged frames bypass the IP hooks"}
	routedBridgeShown   = bridgeRouter{name: "bridge-routed-nf", describe: "the same, but they pass them (br_netfilter)", shows: true}
	switchedBridge      = bridgeRouter{name: "bridge", describe: "a bridge alone; its frames bypass the IP hooks", switched: true}
	switchedBridgeShown = bridgeRouter{name: "bridge-nf", describe: "the same, but they pass them (br_netfilter), and tracked", switched: true, shows: true}
)

// unmeasurable are the kinds that no figure is for, and why.
var unmeasurable = map[string]string{
	trim.HelperEnabled: "it is the cost of a helper (above, if this kernel has the SIP one) in flows that have one, and nothing in others: helpers are looked up with a flow's first packet",
	trim.LegacyBeside:  "it depends on the rules: natkit bench rules compares both back ends with many",
}

func (h *HookCosts) without(kind, why string) {
	if h.Unmeasured == nil {
		h.Unmeasured = map[string]string{}
	}
	h.Unmeasured[kind] = why
}

// emptyLegacy is a router without netfilter but for a table of iptables-legacy that
// has no rule: mangle, which has chains on every hook.
type emptyLegacy struct{}

func (emptyLegacy) Name() string     { return "legacy-empty" }
func (emptyLegacy) Describe() string { return "the table mangle of iptables-legacy, without a rule" }
func (emptyLegacy) NAT() bool        { return false }

func (r emptyLegacy) Install(ctx context.Context, b *bench.Testbed, _ bench.RouterOptions) (func() error, error) {
	err := b.Node(lab.RoleGateway).RestoreIPTables(ctx, lab.RulesIPTablesLegacy, "*mangle\nCOMMIT\n")
	var missing *lab.MissingProgramError
	switch {
	case errors.As(err, &missing):
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: missing.Program + " is not installed"}
	case err != nil:
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: "this kernel has no iptables-legacy: " + err.Error()}
	}
	return func() error { return nil }, nil // the table goes with the namespace
}

// helped is the router trimmed whose flows all have a helper.
type helped struct{}

func (helped) Name() string { return "helper" }
func (helped) Describe() string {
	return "connection tracking, one nftables NAT chain, and every flow has the helper for SIP"
}
func (helped) NAT() bool { return true }

func (r helped) Install(_ context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	// The rule would load the module, and older kernels then give the helper to flows of
	// the machine's own by their port.
	if _, err := os.Stat("/sys/module/nf_conntrack_sip"); err != nil {
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: "the helper for SIP (nf_conntrack_sip) is not loaded"}
	}
	rules := gateway(b, o).Helped("sip")
	switch err := rules.Apply(b.Router); {
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT):
		return nil, &bench.UnsupportedError{Router: r.Name(), Reason: "this kernel's rules cannot assign helpers (nft_ct, nft_objref)"}
	case err != nil:
		return nil, fmt.Errorf("router %s: %w", r.Name(), err)
	}
	return func() error { return rules.Remove(b.Router) }, nil
}

// middleHalf is how far the quartiles of some values are apart.
func middleHalf(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	return v[len(v)*3/4] - v[len(v)/4]
}

// Fill writes what was measured to what is needless, where the difference is more
// than noise, and to the rest why there is no figure.
func (h *HookCosts) Fill(needless []trim.Needless) {
	for i := range needless {
		n := &needless[i]
		for _, p := range h.Parts {
			if p.Kind == "" || p.Kind != n.Kind || p.NS <= p.Noise {
				continue
			}
			saves := p.NS
			if p.PerHook > 0 {
				saves = p.NS / float64(p.PerHook) * float64(max(1, n.OnPath))
			}
			n.SavesNS = &saves
		}
		if n.SavesNS == nil {
			n.Unmeasured = cmp.Or(h.Unmeasured[n.Kind], "the difference is within the noise")
		}
	}
}
