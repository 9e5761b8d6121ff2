// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"fmt"
	"net/url"
	"time"
)

// The condition that natkit sets. node-problem-detector's example (deploy/kubernetes) sets the
// same one: a node has one or the other.
const (
	conditionType  = "NATProblem"
	healthyReason  = "NATWorks"
	healthyMessage = "natkit has no critical finding"

	isTrue, isFalse = "True", "False"

	maxMessage = 1024

	patchNode = "application/strategic-merge-patch+json"
)

// state is what a condition says.
type state struct{ status, reason, message string }

// condition is that of the node: what it should be, and what the API accepted.
type condition struct {
	wanted state
	asked  bool  // what the API has was read
	sent   state // what the API has
	sentAt time.Time
	due    time.Time
	failed time.Time // when it was sent last without success
}

// want takes what is on. Until all was seen, only a problem is known.
func (c *condition) want(findings []Finding, settled bool) {
	var critical []Finding
	for _, f := range findings {
		if f.Critical {
			critical = append(critical, f)
		}
	}
	switch {
	case len(critical) > 0:
		w := worst(critical)
		message := w.text()
		if len(critical) > 1 {
			message += fmt.Sprintf(" (+%d)", len(critical)-1)
		}
		c.wanted = state{isTrue, reasonOf(w.Code), cut(message)}
	case settled:
		c.wanted = state{isFalse, healthyReason, healthyMessage}
	}
}

// conditionTask is what to send of the condition, or when to ask again. That the message has
// other numbers than a moment ago waits for the heartbeat.
func (r *Reporter) conditionTask(now time.Time) (*task, time.Time) {
	c := &r.condition
	if c.wanted.status == "" {
		return nil, now.Add(time.Minute)
	}
	if same := c.wanted.status == c.sent.status; (c.asked && same || c.blocked()) && now.Before(c.due) {
		if !same || c.wanted.reason == c.sent.reason {
			return nil, c.due
		}
		if next := c.sentAt.Add(reasonEvery); now.Before(next) {
			return nil, next
		}
	}
	t := &task{request: request{method: "PATCH", path: "/api/v1/nodes/" + url.PathEscape(r.node) + "/status", contentType: patchNode}, failed: &c.failed, node: true}
	// A wrong name or missing rights: nobody fixes that within a heartbeat.
	t.refused = func(_ int, now time.Time) { c.sent, c.due = state{status: refused}, now.Add(jittered(heartbeat)) }
	if !c.asked {
		// A patch of nothing is answered with the node: so natkit needs no right to read nodes, and
		// a restart is no transition.
		t.body = []byte(`{"status":{}}`)
		t.accepted = func(answer *response, _ time.Time) { c.asked, c.sent = true, conditionIn(answer.body) }
		return t, now
	}
	wanted := c.wanted
	fields := map[string]string{"type": conditionType, "status": wanted.status, "reason": wanted.reason, "message": wanted.message, "lastHeartbeatTime": stamp(now)}
	if wanted.status != c.sent.status {
		fields["lastTransitionTime"] = stamp(now)
	}
	t.body = mustJSON(map[string]any{"status": map[string]any{"conditions": []any{fields}}})
	t.accepted = func(_ *response, now time.Time) { c.sent, c.sentAt, c.due = wanted, now, now.Add(jittered(heartbeat)) }
	return t, now
}

// blocked says whether the API refused the last one.
func (c *condition) blocked() bool { return c.sent.status == refused }

// conditionIn is the condition that a node has.
func conditionIn(node []byte) state {
	var n struct {
		Status struct {
			Conditions []struct{ Type, Status, Reason, Message string }
		}
	}
	_ = json.Unmarshal(node, &n) // then it has none
	for _, c := range n.Status.Conditions {
		if c.Type == conditionType {
			return state{c.Status, c.Reason, c.Message}
		}
	}
	return state{}
}

// mustJSON is a value of maps and texts.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
