// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/shell"
)

const (
	// slowPackets a second through the stack are worth a word, where they are this share of
	// what accel could forward.
	slowPackets = 100
	slowShare   = 0.5
)

var accelSlowPath = Cause{
	Code:       "accel-slow-path",
	Title:      "Packets take the kernel stack that natkit accel could forward",
	Headline:   "natkit accel does not speed up forwarding: tcp-strict, no-route, no-room",
	Search:     []string{"tcp-strict", "no-room", "net.netfilter.nf_conntrack_tcp_be_liberal"},
	Severities: []Severity{Advice},
	Needs:      []string{snapshot.CanEngine},
	Symptom:    "natkit accel is on, and forwarding is hardly faster. No packet is lost.",
	Proof: fmt.Sprintf("At least %d packets a second, and %s of the forwarded TCP and UDP packets, took the stack during the window for one reason that a setting of accel decides: "+
		"TCP while connection tracking checks its windows (tcp-strict), an egress interface that is not accelerated (no-route), or a full flow cache (no-room). It is always advice.", slowPackets, percent.Whole(slowShare)),
	FalsePositive: "Flows below the threshold, SYN, FIN and RST, fragments and packets for this machine: they always take the stack.",
	Cure:          "Turn accel off and on again with the option that includes these packets. No connection ends.",
	judge:         judgeAccelSlowPath,
}

func judgeAccelSlowPath(f facts) *verdict {
	e := f.Engine
	if !e.Accelerates() || len(e.Interfaces) == 0 {
		return nil
	}
	reason := slices.MaxFunc([]string{"tcp-strict", "no-route", "no-room"}, func(a, b string) int { return cmp.Compare(f.counted(a), f.counted(b)) })
	var eligible uint64
	for name := range e.Packets {
		if rulefile.AccelEligible(name) {
			eligible = saturate(eligible, f.counted(name))
		}
	}
	slow := f.counted(reason)
	if f.perSecond(slow) < slowPackets || share(slow, eligible) < slowShare {
		return nil
	}
	v := &verdict{impact: f.perSecond(slow)}
	v.Severity = Advice
	means := rulefile.AccelReasons[slices.IndexFunc(rulefile.AccelReasons, func(r rulefile.AccelReason) bool { return r.Name == reason })].Means
	v.Evidence = []Evidence{
		{"packets through the stack: " + means, strconv.FormatUint(slow, 10), fromAccel + ": " + reason},
		{"packets forwarded before the stack", strconv.FormatUint(f.counted("forwarded"), 10), fromAccel + ": forwarded"},
		{"TCP and UDP packets for others", strconv.FormatUint(eligible, 10), fromAccel},
	}
	switch reason {
	case "tcp-strict":
		v.Title = fmt.Sprintf("accel leaves TCP to the stack: %s of %s", percent.Whole(share(slow, eligible)), number(eligible, "packet"))
		v.Why = "Connection tracking checks TCP windows. For that it must see every packet, so accel forwards only UDP. With nf_conntrack_tcp_be_liberal set to 1 it can forward TCP too; segments outside their window are then not marked invalid."
		v.Remedy = append([]string{"# if no rule here relies on TCP windows being checked (ct state invalid); `natkit accel off` puts the setting back:"}, f.accelAgain("--tcp-liberal")...)
	case "no-route":
		v.Title = fmt.Sprintf("accel finds no path for %s of %s", percent.Whole(share(slow, eligible)), number(eligible, "packet"))
		v.Why = "accel forwards between the interfaces that it was turned on for (" + strings.Join(e.Interfaces, ", ") + "). What leaves by another one, or has no route or neighbour, takes the stack."
		v.Remedy = append([]string{"# by which interface do they leave? Name it too when you turn accel on:", f.run("ip route show"), f.natkit("accel status")}, "#   "+strings.Join(f.accelAgain("INTERFACE"), "; "))
	default:
		v.Title = fmt.Sprintf("the flow cache of accel is full: %s of %s take the stack", percent.Whole(share(slow, eligible)), number(eligible, "packet"))
		v.Why = "accel remembers a fixed number of flows. A flow that finds no slot takes the stack."
		v.Remedy = append([]string{"# room for more flows:"}, f.accelAgain("--flows", strconv.FormatUint(min(engineGrow*e.SessionsMax, rulefile.MaxAccelFlows), 10))...)
		if e.SessionsMax >= rulefile.MaxAccelFlows {
			v.Remedy = []string{"# it has its greatest size. Are these flows of interfaces that need no acceleration? Then turn it on without them:", f.natkit("accel status")}
		}
	}
	v.Verify = f.look(f.natkit("accel status"))
	return v
}

const fromAccel = "natkit accel status"

// accelAgain is the commands that turn acceleration off and on as it is, with a flag that is new
// or has another value, or one more interface.
func (f facts) accelAgain(more ...string) []string {
	flags := slices.Clone(f.Engine.Flags)
	if i := slices.Index(flags, more[0]); i >= 0 {
		flags = slices.Delete(flags, i, i+len(more))
	}
	words := slices.Concat([]string{"accel", "on"}, flags, more, f.Engine.Interfaces)
	return []string{f.natkit("accel off"), f.natkit(shell.Command(words...))}
}
