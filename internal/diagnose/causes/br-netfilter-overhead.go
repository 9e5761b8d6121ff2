// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// busyBridge is how many packets a second must come in by a bridge's ports
// before the work that br_netfilter adds to each is worth a word.
const busyBridge = 1000

var brNetfilterOverhead = Cause{
	Code:     "br-netfilter-overhead",
	Title:    "Bridged frames pass the IP packet filter",
	Headline: "Bridged traffic goes through iptables: br_netfilter, bridge-nf-call-iptables=1",
	Search: []string{
		"net.bridge.bridge-nf-call-iptables = 1",
		"perf: br_nf_pre_routing",
		"bridge traffic dropped by iptables FORWARD",
	},
	Severities:    []Severity{Advice},
	Needs:         []string{snapshot.CanSysctls, snapshot.CanInterfaces, snapshot.CanHooks, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "CPUs spend time in br_nf_pre_routing and connection tracking for frames that are only bridged. Forwarding rules affect neighbours on one bridge.",
	Proof:         fmt.Sprintf("net.bridge.bridge-nf-call-iptables is 1, functions are registered on the IPv4 prerouting hook, and at least %d packets a second arrive on bridge ports. It is always advice.", busyBridge),
	FalsePositive: "Kubernetes needs it (kube-proxy's rules must see traffic between pods of one node); natkit does not report it there. A quiet bridge costs nothing.",
	Cure:          "Set it to 0, unless rules on this machine filter or translate bridged traffic.",
	judge:         judgeBrNetfilter,
}

func judgeBrNetfilter(f facts) *verdict {
	if on, _ := f.sysctl("net.bridge.bridge-nf-call-iptables"); on != 1 {
		return nil
	}
	bridges := map[string]bool{}
	for _, i := range f.Interfaces {
		if i.Kind == "bridge" && i.Up {
			bridges[i.Name] = true
		}
	}
	ports, packets := 0, uint64(0)
	for _, i := range f.links() {
		if bridges[i.Master] && i.RxPackets < implausible {
			ports++
			packets = saturate(packets, i.RxPackets)
		}
	}
	if f.perSecond(packets) < busyBridge || f.kubernetes() || !f.filtersIPv4() {
		return nil
	}
	v := &verdict{impact: f.perSecond(packets)}
	v.Severity = Advice
	v.Title = fmt.Sprintf("%.0f packets a second on %s pass the IP packet filter (br_netfilter)", f.perSecond(packets), number(uint64(ports), "bridge port"))
	v.Evidence = []Evidence{
		{"net.bridge.bridge-nf-call-iptables", "1", fromSettings},
		{"packets that arrived on bridge ports", strconv.FormatUint(packets, 10), fromLinks},
	}
	if n := f.hooksOn("bridge"); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"functions on the bridge's hooks", strconv.Itoa(n), "registered netfilter hooks"})
	}
	if n := f.hooksOn("ipv4"); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"functions on the IPv4 hooks", strconv.Itoa(n), "registered netfilter hooks"})
	}
	v.Why = "A frame that is bridged between ports needs no IP packet filter, and a routed one is filtered anyway. With br_netfilter each frame passes connection tracking and the IP rules in the bridge."
	remark, condition := "# unless rules here filter or translate bridged traffic:", "no rule here filters or translates bridged traffic"
	if f.docker() {
		remark = "# unless Docker runs with icc=false or userland-proxy=false, which filter and translate between containers of one bridge:"
		condition = "Docker runs with neither icc=false nor userland-proxy=false"
	}
	off := f.local("net.bridge.bridge-nf-call-iptables", 0)
	v.Remedy = []string{remark, f.set(off)}
	v.Settings = []snapshot.Setting{provided(off, condition)}
	v.Verify = []string{f.natkit("hooks"), "natkit profile --for 10s"}
	return v
}

// kubernetes says whether kube-proxy or a network plugin keeps rules here.
func (f facts) kubernetes() bool {
	for _, c := range f.Chains {
		if strings.HasPrefix(c.Name, "KUBE-") || c.Table == "kube-proxy" {
			return true
		}
	}
	for _, o := range f.Owners {
		if o.Who == "kube-proxy" || o.Who == "k3s" || o.Who == "rke2" {
			return true
		}
	}
	return false
}

// docker says whether Docker keeps rules here.
func (f facts) docker() bool {
	for _, c := range f.Chains {
		if c.Name == "DOCKER" || strings.HasPrefix(c.Name, "DOCKER-") {
			return true
		}
	}
	return false
}

// filtersIPv4 says whether a bridged frame would meet anything: a function on an
// IPv4 hook, or, where hooks can't be read, a base chain.
func (f facts) filtersIPv4() bool {
	if f.Hooks != nil {
		return f.hooksOn("ipv4") > 0
	}
	for _, c := range f.Chains {
		if c.Hook != "" && (c.Family == "ip" || c.Family == "inet") {
			return true
		}
	}
	return f.Chains == nil
}

func (f facts) hooksOn(family string) (n int) {
	for _, h := range f.Hooks {
		if h.Family == family {
			n++
		}
	}
	return n
}
