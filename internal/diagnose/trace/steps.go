// SPDX-License-Identifier: Apache-2.0

package trace

// What events mean: a step is the difference between a packet at one place and at the next.

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"natkit/internal/snapshot"
)

// follower goes along the events of one packet.
type follower struct {
	deriver Deriver
	steps   []Step
	prev    *snapshot.TraceEvent // with the packet itself, not a rule
	tuple   snapshot.TraceTuple  // as it is now
	entry   *snapshot.TraceEntry
	route   *snapshot.TraceRoute
	since   int   // steps before what was done since prev
	rule    *Rule // the last one that was met since prev

	beforeDrop *snapshot.TraceEvent // the event before prev
}

// account returns the steps of a packet and its end.
func account(events []snapshot.TraceEvent, d Deriver) ([]Step, End) {
	t := &follower{deriver: d}
	for i := range events {
		t.take(&events[i])
	}
	return t.steps, t.end()
}

func (t *follower) add(e *snapshot.TraceEvent, what What, detail string) *Step {
	t.steps = append(t.steps, Step{
		Namespace: e.Namespace, Interface: e.Interface, Hook: e.Hook, What: what, Detail: detail, Source: e.Source,
		Head: e.Head, Length: e.Length,
	})
	return &t.steps[len(t.steps)-1]
}

func (t *follower) take(e *snapshot.TraceEvent) {
	if e.Rule != nil {
		t.met(e)
		return
	}
	if t.prev == nil || e.Netns != t.prev.Netns {
		t.entry, t.route = nil, nil
	}
	if t.prev == nil {
		t.tuple = e.Tuple
	}
	t.tracking(e)
	t.translation(e)
	t.routing(e)
	t.confirmation(e)
	var s *Step
	switch e.Point {
	case snapshot.PointReceived:
		s = t.add(e, Received, "")
	case snapshot.PointMade:
		s = t.add(e, Made, "")
	case snapshot.PointQueued:
		s = t.add(e, Queued, "")
	case snapshot.PointSent:
		s = t.add(e, Sent, "")
	case snapshot.PointDropped:
		detail := e.Drop.Reason + " at " + e.Drop.Location
		if e.Drop.Reply != "" {
			detail = "by a program, which replies with ICMP " + e.Drop.Reply
		}
		s = t.add(e, Dropped, detail)
	case snapshot.PointHook:
		if e.Priority == math.MaxInt32-1 {
			s = t.add(e, Passed, "")
		}
	}
	if s == nil && len(t.steps) > 0 {
		s = &t.steps[len(t.steps)-1] // what was found out at a checkpoint was done before it
	}
	if s != nil && s.TimeNS == 0 && e.Source != snapshot.TraceNFTables { // which has no time
		s.TimeNS = e.TimeNS
	}
	t.beforeDrop, t.prev, t.rule, t.since = t.prev, e, nil, len(t.steps)
}

// met takes a rule or policy that nftables reported.
func (t *follower) met(e *snapshot.TraceEvent) {
	if e.Rule.Handle == 0 && e.Point == snapshot.PointRule {
		return // the end of a chain
	}
	r := &Rule{
		Backend: "nft", Chain: e.Rule.Family + " " + e.Rule.Table + " " + e.Rule.Chain, Handle: e.Rule.Handle,
		Text: e.Rule.Text, Verdict: e.Rule.Verdict, To: e.Rule.To, Policy: e.Point == snapshot.PointPolicy,
	}
	s := t.add(e, RuleMet, "")
	s.Rule = r
	if t.prev != nil {
		s.Head, s.Length = t.prev.Head, t.prev.Length
		if s.Interface == "" {
			s.Interface = t.prev.Interface
		}
	}
	t.rule = r
}

// tracking: connection tracking gave the packet an entry, or did not.
func (t *follower) tracking(e *snapshot.TraceEvent) {
	switch {
	case e.Entry == nil:
		if e.Point == snapshot.PointHook && e.Priority == afterTracking {
			t.add(e, NoEntry, "connection tracking calls it invalid, or a rule said notrack")
		}
	case t.entry != nil && t.entry.ID == e.Entry.ID:
	case e.Entry.State == "new" && !e.Entry.Confirmed:
		detail := e.Entry.Original.Ends()
		if e.Entry.Replaces {
			detail += "; the one before is gone: evicted, expired or deleted"
		}
		t.add(e, NewEntry, detail)
	default:
		way := "original direction"
		if e.Entry.IsReply {
			way = "reply direction"
		}
		t.add(e, Found, e.Entry.State+", "+way)
	}
}

// afterTracking is the priority of the checkpoint behind connection tracking.
const afterTracking = -199

func (t *follower) translation(e *snapshot.TraceEvent) {
	if e.Tuple == t.tuple {
		return
	}
	what := Translated
	if e.Entry == nil {
		what = Bypassed
	}
	var parts string
	switch {
	case e.Tuple.Source != t.tuple.Source && e.Tuple.Destination != t.tuple.Destination:
		parts = "source and destination"
	case e.Tuple.Source != t.tuple.Source:
		parts = "source"
	case e.Tuple.Destination == t.tuple.Destination:
		parts = "identifier"
	default:
		parts = "destination"
	}
	if e.Entry != nil && e.Entry.Confirmed {
		parts += ", as the entry says"
	}
	namespace, device := e.Namespace, e.Interface
	if what == Bypassed && t.deriver != nil && t.prev != nil {
		before, after := t.tuple, e.Tuple
		if e.About != nil && t.prev.About != nil { // an ICMP error is translated as what it is about
			before, after = t.prev.About.Turned(), e.About.Turned()
		}
		how := t.deriver.Forwarded(e.Netns, before, after, t.prev.TimeNS)
		if how != "" {
			device = t.prev.Interface
		} else if at, text := t.deriver.Crossed(before, after, t.prev.TimeNS); text != "" && t.prev.Netns != e.Netns {
			namespace, device, how = at, "", text
		}
		if how != "" {
			parts += ", " + how
		}
	}
	s := t.add(e, what, parts)
	s.Namespace, s.Interface = namespace, device
	s.Before, s.After = t.tuple.Ends(), e.Tuple.Ends()
	if e.Entry != nil && !e.Entry.Confirmed {
		s.Rule = t.translator(e)
	}
	t.tuple = e.Tuple
}

// translator is the rule that chose a translation: the one that was reported last, or the one that
// the saved rules lead to.
func (t *follower) translator(e *snapshot.TraceEvent) *Rule {
	if t.rule != nil {
		if t.rule.Policy {
			return nil
		}
		return t.rule
	}
	if t.deriver == nil || t.prev == nil {
		return nil
	}
	p := dropped(t.prev, stageOf(t.prev))
	if e.Route != nil { // the hook before may have no function, and so no checkpoint
		p.Out, p.Stage = e.Route.Interface, stageOf(e)
	}
	if rules := t.deriver.Translated(e.Netns, e.Hook, p, e.Tuple); len(rules) == 1 {
		return &rules[0]
	}
	return nil
}

// stageOf is how far a packet has come that was seen last at an event.
func stageOf(e *snapshot.TraceEvent) snapshot.Stage {
	passed := e.Point == snapshot.PointHook && e.Priority == math.MaxInt32-1
	switch {
	case e.Point == snapshot.PointMade, e.Hook == "output":
		return snapshot.StageLocal
	case e.Hook == "prerouting" && passed:
		return snapshot.StageRouted
	case e.Hook == "forward", e.Hook == "postrouting", e.Point == snapshot.PointQueued:
		return snapshot.StageLeaving
	}
	return snapshot.StageArrived
}

// dropped is the packet of an event as rules see it.
func dropped(e *snapshot.TraceEvent, stage snapshot.Stage) snapshot.DroppedPacket {
	p := snapshot.DroppedPacket{Text: e.Text, Stands: 1, Stage: stage, In: e.In, Mark: e.Mark, Length: e.Length, State: "invalid"}
	if p.In == "" && (e.Point == snapshot.PointReceived || e.Hook == "prerouting" || e.Hook == "input") {
		p.In = e.Interface
	}
	if e.Route != nil {
		p.Out = e.Route.Interface
	}
	if len(e.Head) >= 20 && e.Head[0]>>4 == 4 {
		p.TTL, p.DSCP = e.Head[8], e.Head[1]>>2
	} else if len(e.Head) >= 40 {
		p.TTL, p.DSCP = e.Head[7], e.Head[0]<<4>>2|e.Head[1]>>6
	}
	if e.Entry != nil {
		p.State, p.Reply, p.Status = e.Entry.State, e.Entry.IsReply, e.Entry.Status
	}
	return p
}

func (t *follower) routing(e *snapshot.TraceEvent) {
	if e.Route == nil || t.route != nil && *t.route == *e.Route {
		return
	}
	t.route = e.Route
	var detail string
	switch r := e.Route; {
	case r.Function == "ip_local_deliver" || r.Function == "ip6_input":
		detail = "to this namespace itself"
	case r.Function == "ip_error" || r.Function == "ip6_pkt_discard" || r.Function == "dst_discard":
		detail = "no way: " + r.Function
	case r.Gateway.IsValid():
		detail = fmt.Sprintf("out %s via %s", r.Interface, r.Gateway)
	case e.Tuple.Destination.Addr().Is6(): // whose next hop natkit does not read
		detail = "out " + r.Interface
	default:
		detail = fmt.Sprintf("out %s, on the link", r.Interface)
	}
	t.add(e, Routed, detail)
	droppedNext := e.Point == snapshot.PointDropped && t.prev != nil && t.prev.Hook == "prerouting"
	if e.Hook == "forward" || e.Hook == "input" || droppedNext { // the rules of that hook are asked behind routing
		last := len(t.steps) - 1
		routed := t.steps[last]
		routed.Hook = ""
		t.steps = slices.Insert(t.steps[:last], t.since, routed)
	}
}

func (t *follower) confirmation(e *snapshot.TraceEvent) {
	if e.Entry != nil && e.Entry.Confirmed && t.entry != nil && !t.entry.Confirmed && t.entry.ID == e.Entry.ID {
		t.add(e, Confirmed, e.Entry.Original.Ends()+", replies "+e.Entry.Reply.Ends())
	}
	if e.Entry != nil {
		t.entry = e.Entry
	}
}

// end says what became of the packet.
func (t *follower) end() End {
	last := t.prev
	if last == nil {
		return End{Outcome: Vanished}
	}
	end := End{Namespace: last.Namespace, Interface: last.Interface}
	switch {
	case last.Point == snapshot.PointDropped:
		t.died(&end)
	case last.Source == snapshot.TraceNFTables, last.Point == snapshot.PointReceived && t.rule != nil:
		end.Outcome, end.Why = Vanished, "it came before natkit had attached its programs; only its rules and its conntrack entry are known"
		if last.Point == snapshot.PointReceived {
			end.Why = "last seen in hook " + t.steps[len(t.steps)-1].Hook
		}
		if rule := t.dropRule(); rule != nil {
			end.Outcome, end.Rule, end.Cause, end.Why = Died, rule, snapshot.CauseRule, rule.String()
		}
	case last.Point == snapshot.PointSent:
		end.Outcome = Left
		end.Why = "and was not seen again"
		if t.deriver != nil {
			if why := t.deriver.RefusedUnseen(last.Netns, last.TimeNS); why != "" {
				end.Why += "; perhaps it was dropped before the stack saw it: " + why
			}
		}
	case last.Point == snapshot.PointHook && last.Hook == "input" && last.Priority == math.MaxInt32-1:
		end.Outcome = Delivered
		end.Why = "passed the input hook, on to its socket"
	case last.Point == snapshot.PointReceived && last.Fragment:
		end.Outcome = Vanished
		end.Why = "a fragment: it waits for the others, and what is seen behind reassembly is the packet that they make"
	case last.Point == snapshot.PointReceived:
		end.Outcome = Arrived
		end.Why = "no netfilter function runs after that, so what follows is not seen"
		if why := t.refused(last.TimeNS); why != "" {
			end.Outcome, end.Why = Vanished, "no netfilter function runs after that; perhaps it was dropped: "+why
		}
	default:
		end.Outcome = Vanished
		end.Why = "last seen at " + string(last.Point)
		if last.Hook != "" {
			end.Why = "last seen in hook " + last.Hook
		}
		if last.Point == snapshot.PointQueued {
			end.Why = "it waits in the qdisc, was cut into segments for the device, or was taken by a program or queue there"
		}
	}
	return end
}

// refused is why a program of natkit's dropped packets shortly behind a time, "" if it dropped none.
func (t *follower) refused(at uint64) string {
	if t.deriver == nil {
		return ""
	}
	return t.deriver.Refused(t.prev.Netns, at)
}

// died names why. before is the last place that the packet got past.
func (t *follower) died(end *End) {
	e := t.prev
	end.Outcome, end.Reason, end.Place = Died, e.Drop.Reason, e.Drop.Location
	end.Cause, end.Benign = e.Drop.Cause, e.Drop.Benign
	if rule := t.dropRule(); rule != nil {
		end.Rule, end.Cause = rule, snapshot.CauseRule
		end.Why = rule.String()
		return
	}
	if e.Drop.Reason == "NETFILTER_DROP" && end.Cause == "" {
		end.Cause, end.Why = t.refusedBy()
	}
	if end.Cause == snapshot.CauseRule && t.deriver != nil {
		t.derive(end)
	}
	if e.Drop.Reason == "TC_INGRESS" || e.Drop.Reply != "" {
		at := e.TimeNS - min(e.TimeNS, settle) // a program counts it before the kernel frees it
		if t.beforeDrop != nil {
			at = t.beforeDrop.TimeNS
		}
		if why := t.refused(at); why != "" {
			end.Cause, end.Why = snapshot.CauseNone, why
		}
	}
	if end.Why == "" {
		end.Why = whys[end.Cause]
	}
	if end.Why == "" && e.Drop.Reply != "" {
		end.Why = "a program at tc replied with ICMP " + e.Drop.Reply
	}
	if end.Why == "" && e.Drop.Reason == "NO_SOCKET" {
		end.Why = "no socket is open for it"
	}
}

// derive names the rule that must have dropped the packet, or those that may have.
func (t *follower) derive(end *End) {
	stage := snapshot.StageArrived
	if t.beforeDrop != nil {
		stage = stageOf(t.beforeDrop)
	}
	rules := t.deriver.Dropped(t.prev.Netns, t.prev.Drop.Function, dropped(t.prev, stage))
	switch {
	case len(rules) == 1:
		end.Rule, end.Why = &rules[0], rules[0].String()
	case len(rules) > 1 && len(rules) <= 3:
		var names []string
		for i := range rules {
			names = append(names, rules[i].String())
		}
		end.Why = "by one of " + strings.Join(names, "; ") + " (derived from the rules)"
	}
}

// dropRule is the rule that nftables reported as the last, if it drops.
func (t *follower) dropRule() *Rule {
	for _, s := range slices.Backward(t.steps) {
		if s.Rule != nil && s.What == RuleMet {
			if s.Rule.Verdict == "drop" || s.Rule.Verdict == "reject" {
				return s.Rule
			}
			return nil
		}
		if s.What == Passed || s.What == Sent || s.What == Received {
			return nil
		}
	}
	return nil
}

// refusedBy says which function of netfilter dropped the packet, from the last checkpoint that it
// got past.
func (t *follower) refusedBy() (snapshot.NATCause, string) {
	before := t.beforeDrop
	switch {
	case before == nil:
		return snapshot.CauseNone, "by a function of netfilter"
	case before.Hook == "postrouting" && before.Priority == math.MaxInt32-1, before.Hook == "input" && before.Priority == math.MaxInt32-1:
		return snapshot.CauseConfirm, "its conntrack entry could not be confirmed: the translated tuple is taken, so no source port was left or another packet was faster"
	case t.entry == nil && t.prev.Drop.Tracking:
		return snapshot.CauseTableFull, "connection tracking could make no entry for it: the table is full, or there is no memory"
	}
	return snapshot.CauseRule, "by a rule that reports nothing itself, behind " + passedPlace(before)
}

func passedPlace(e *snapshot.TraceEvent) string {
	if e.Hook == "" {
		return string(e.Point)
	}
	if e.Priority == math.MaxInt32-1 {
		return "hook " + e.Hook
	}
	return fmt.Sprintf("priority %d of hook %s", e.Priority, e.Hook)
}

// whys are the causes of drops in a sentence.
var whys = map[snapshot.NATCause]string{
	snapshot.CauseTableFull:      "connection tracking could make no entry for it: the table is full, or there is no memory",
	snapshot.CauseConfirm:        "its conntrack entry could not be confirmed",
	snapshot.CauseRule:           "a rule drops it",
	snapshot.CauseIPForwardOff:   "forwarding is off on the interface that it came by (net.ipv4.ip_forward)",
	snapshot.CauseReversePath:    "rp_filter: the route back to its source leaves by another interface",
	snapshot.CauseNoRoute:        "there is no route to its destination",
	snapshot.CauseMartian:        "its source or destination is not valid on that interface (martian)",
	snapshot.CauseTooBig:         "it is larger than the MTU of the egress interface and may not be fragmented",
	snapshot.CauseTTL:            "its TTL is used up",
	snapshot.CauseQueue:          "the queue of the interface is full",
	snapshot.CauseNeighbour:      "the next hop does not answer ARP or neighbour discovery",
	snapshot.CauseListenOverflow: "the accept queue of the listening socket is full",
	snapshot.CauseChecksum:       "its checksum is wrong",
	snapshot.CauseFragment:       "not all of its fragments arrived",
	snapshot.CauseBacklog:        "the receive queue of the processor is full (netdev_max_backlog)",
}
