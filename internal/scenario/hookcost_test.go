// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/diagnose/trim"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// Every part has its two routers, and a figure with its trials. What comes out is
// the machine's and asserted by nobody.
func TestMeasureHooks(t *testing.T) {
	ktest.Root(t)
	h, err := measureHooks(t.Context(), "test", 2, 20*time.Millisecond, func(string, ...any) {})
	if err != nil {
		t.Fatal(err)
	}
	parts, routers := 8, 11
	if h.Unmeasured[trim.LegacyTable] != "" { // a kernel without iptables-legacy
		parts, routers = parts-1, routers-1
	}
	if h.Unmeasured[trim.BridgeHooks] != "" { // without br_netfilter
		parts, routers = parts-2, routers-4
	}
	if _, err := os.Stat("/sys/module/nf_conntrack_sip"); err != nil {
		parts, routers = parts-1, routers-1
	}
	if len(h.Parts) != parts || len(h.Figures) != routers {
		t.Fatalf("%d parts, %d figures: %v", len(h.Parts), len(h.Figures), h.Notes)
	}
	for _, f := range h.Figures {
		if len(f.Values) != 2 || f.Median <= 0 && f.Label != "noisy" { // disturbed as often as it was tried
			t.Errorf("%+v", f)
		}
	}
}

// Frames come through each bridge, and connection tracking sees those that are only
// bridged where they are shown to it and nowhere else. The router is put back.
func TestBridgeRouters(t *testing.T) {
	ktest.Root(t)
	for _, r := range []bridgeRouter{routedBridge, routedBridgeShown, switchedBridge, switchedBridgeShown} {
		t.Run(r.name, func(t *testing.T) {
			testbed, err := bench.NewTestbed(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { testbed.Close() })
			inside := func() (mac net.HardwareAddr, master int) {
				if err := testbed.Router.Do(func() error {
					l, err := netlink.LinkByName(testbed.InsideDev)
					if err == nil {
						mac, master = l.Attrs().HardwareAddr, l.Attrs().MasterIndex
					}
					return err
				}); err != nil {
					t.Fatal(err)
				}
				return mac, master
			}
			before, _ := inside()
			if err := testbed.Left.Do(func() error { // bridged frames, like a generator's, are for the router all the same
				eth0, err := netlink.LinkByName(testbed.LeftDev)
				if err != nil {
					return err
				}
				return netlink.NeighSet(&netlink.Neigh{LinkIndex: eth0.Attrs().Index, Family: unix.AF_INET,
					State: netlink.NUD_PERMANENT, IP: testbed.InsideAddr.AsSlice(), HardwareAddr: before})
			}); err != nil {
				t.Fatal(err)
			}
			if r.switched { // and the right end takes them
				if err := testbed.Right.Do(func() error {
					eth0, err := netlink.LinkByName(testbed.RightDev)
					if err != nil {
						return err
					}
					return netlink.LinkSetHardwareAddr(eth0, before)
				}); err != nil {
					t.Fatal(err)
				}
			}
			remove, err := r.Install(t.Context(), testbed, bench.RouterOptions{})
			if errors.As(err, new(*bench.UnsupportedError)) {
				ktest.Unsupported(t, "%v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			if from := exchange(t, testbed); testbed.Sources.Contains(from) == r.NAT() {
				t.Errorf("the right end sees %s, NAT is %v", from, r.NAT())
			}
			entries, err := testbed.Node(lab.RoleGateway).SysctlValue("net.netfilter.nf_conntrack_count")
			if err != nil {
				t.Fatal(err)
			}
			if tracked := entries != "0"; tracked != (r.shows || r.NAT()) {
				t.Errorf("%s entries of connection tracking", entries)
			}
			if err := remove(); err != nil {
				t.Error(err)
			}
			if after, master := inside(); after.String() != before.String() || master != 0 {
				t.Errorf("after the removal the inside is %s of bridge %d, was %s", after, master, before)
			}
		})
	}
}

func TestFillSavings(t *testing.T) {
	h := HookCosts{Parts: []HookPart{
		{Kind: trim.EmptyChain, PerHook: 3, NS: 300, Noise: 20},
		{Kind: trim.IdleTracking, NS: 300, Noise: 400},
		{NS: 900},
		{Kind: trim.LegacyTable, PerHook: 3, NS: 60, Noise: 10},
		{Kind: trim.BridgeHooks, NS: 70, Noise: 10},
	}, Unmeasured: unmeasurable}
	needless := []trim.Needless{{Kind: trim.EmptyChain}, {Kind: trim.IdleTracking}, {Kind: trim.HelperEnabled}, {Kind: trim.LegacyTable, OnPath: 2}, {Kind: trim.BridgeHooks}}
	h.Fill(needless)
	for i, part := range []string{"", "noise", "flows that have one", "", ""} {
		if why := needless[i].Unmeasured; !strings.Contains(why, part) || (why == "") != (needless[i].SavesNS != nil) {
			t.Errorf("%s: saves %v, not measured %q", needless[i].Kind, needless[i].SavesNS, why)
		}
	}
	if s := needless[3].SavesNS; s == nil || *s != 40 {
		t.Errorf("two chains of a legacy table save %v, want 40", s)
	}
	if s := needless[0].SavesNS; s == nil || *s != 100 {
		t.Errorf("an empty chain saves %v, want 100", s)
	}
	if needless[1].SavesNS != nil {
		t.Error("a difference within the noise is shown as a saving")
	}
	if needless[2].SavesNS != nil {
		t.Error("what was not measured has a figure")
	}
	if s := needless[4].SavesNS; s == nil || *s != 70 {
		t.Errorf("br_netfilter saves %v, want 70", s)
	}
}

func TestMiddleHalf(t *testing.T) {
	for want, values := range map[float64][]float64{0: {5}, 2: {1, 2, 3, 4, 100}} {
		if got := middleHalf(values); got != want {
			t.Errorf("%v: %g, want %g", values, got, want)
		}
	}
}
