// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Events are of core/v1, not events.k8s.io/v1: there everything but the number of times is fixed,
// so that an Event could not say that its cause has ended.
// (k8s.io/kubernetes/pkg/apis/core/validation/events.go)

// component is who reports.
const component = "natkit"

// event is one cause of one object, for an hour or as long as it is on. States:
//
//	on,  not created   POST
//	on,  created       nothing; after an hour not created again, under another name
//	off, not created   POST, as ended: the API was down, or there were many
//	off, created       PATCH, as ended; kept for the rest of the hour
//	on again           PATCH, counted
type event struct {
	key         string
	findings    []Finding // of the last report that had any
	on          bool
	critical    bool // as it was sent
	dirty       bool
	created     bool
	name        string
	createdAt   time.Time
	first, last time.Time
	failed      time.Time // when it was sent last without success
	times       int
}

// noteEvents takes what is on.
func (r *Reporter) noteEvents(findings []Finding, now time.Time) {
	groups := map[string][]Finding{}
	for _, f := range findings {
		key := f.Code + "\x00" + f.Pod.Namespace + "\x00" + f.Pod.Name + "\x00" + f.Pod.UID
		groups[key] = append(groups[key], f)
	}
	for key, e := range r.events {
		if e.on && groups[key] == nil {
			e.on, e.dirty, e.last = false, true, now
		}
		if !e.on && !e.dirty && now.Sub(e.createdAt) >= eventEvery {
			delete(r.events, key)
		}
	}
	maps.DeleteFunc(r.omitted, func(key string, _ bool) bool { return groups[key] == nil || r.events[key] != nil })
	for key, group := range groups {
		e := r.events[key]
		if e == nil {
			if e = r.admit(key, now); e == nil {
				continue
			}
			e.first = slices.MinFunc(group, func(a, b Finding) int { return a.Since.Compare(b.Since) }).Since
		}
		w := worst(group)
		switch {
		case !e.on && now.Sub(e.createdAt) >= eventEvery && e.created || e.on && e.created && now.Sub(e.createdAt) >= eventEvery:
			if !e.on {
				e.first = w.Since
			}
			e.created, e.dirty, e.times = false, true, 1
		case !e.on:
			e.dirty = true
			e.times++
		case w.Critical != e.critical:
			e.dirty = true
		}
		e.on, e.findings, e.last, e.critical = true, group, now, w.Critical
	}
}

// admit makes room for one more; nil if there is none.
func (r *Reporter) admit(key string, now time.Time) *event {
	if len(r.events) >= maxEvents {
		oldest := ""
		for k, e := range r.events {
			if !e.on && (oldest == "" || e.last.Before(r.events[oldest].last)) {
				oldest = k
			}
		}
		if oldest == "" {
			if !r.omitted[key] { // once, not with each report while it is on
				r.dropped++
				r.omitted[key] = true
			}
			return nil
		}
		if r.events[oldest].dirty {
			r.dropped++
		}
		delete(r.events, oldest)
	}
	e := &event{key: key}
	r.events[key] = e
	return e
}

// eventTask is the Event that has waited longest, those first that have not failed.
func (r *Reporter) eventTask(now time.Time) *task {
	var e *event
	for _, other := range r.events {
		if other.created && other.name == "" { // refused
			other.dirty = false
		}
		if other.dirty && (e == nil || cmp.Or(other.failed.Compare(e.failed), other.last.Compare(e.last), strings.Compare(other.key, e.key)) < 0) {
			e = other
		}
	}
	if e == nil {
		return nil
	}
	if e.times == 0 {
		e.times = 1
	}
	if e.created {
		return r.changeEvent(e)
	}
	return r.createEvent(e, now)
}

// message is what an Event says.
func (e *event) message() string {
	w := worst(e.findings)
	text := w.text()
	if len(e.findings) > 1 {
		text += fmt.Sprintf(" (and in %d more)", len(e.findings)-1)
	}
	if !e.on {
		text = fmt.Sprintf("ended after %s: %s", e.last.Sub(e.first).Round(time.Second), text)
	}
	return cut(text)
}

// sending is called when the Event is sent; what it returns, when it has arrived: it is to be
// sent again if it has changed since.
func (e *event) sending() (settle func()) {
	on, times, critical := e.on, e.times, e.critical
	return func() { e.dirty = e.on != on || e.times != times || e.critical != critical }
}

func (e *event) kind() string {
	if e.on {
		return "Warning"
	}
	return "Normal"
}

func (r *Reporter) createEvent(e *event, now time.Time) *task {
	w := worst(e.findings)
	// What shows Events of a node looks for this number, as the kubelet gives it.
	object := map[string]any{"kind": "Node", "apiVersion": "v1", "name": r.node, "uid": r.node}
	namespace, stem := "default", r.node
	if w.Pod != (Pod{}) {
		object = map[string]any{"kind": "Pod", "apiVersion": "v1", "namespace": w.Pod.Namespace, "name": w.Pod.Name, "uid": w.Pod.UID}
		namespace, stem = w.Pod.Namespace, w.Pod.Name
	}
	// After a restart the name is the same in the same hour.
	hour := now.Unix() / int64(eventEvery.Seconds())
	name := strings.Trim(stem[:min(len(stem), 200)], ".-") + "." + hash(r.node, e.key, fmt.Sprint(hour))
	body := map[string]any{
		"apiVersion": "v1", "kind": "Event", "metadata": map[string]any{"name": name, "namespace": namespace},
		"involvedObject": object, "reason": reasonOf(w.Code), "message": e.message(), "type": e.kind(), "count": e.times,
		"firstTimestamp": stamp(e.first), "lastTimestamp": stamp(e.last),
		"source": map[string]any{"component": component, "host": r.node}, "reportingComponent": component, "reportingInstance": r.node,
	}
	settle := e.sending()
	created := func(now time.Time) {
		e.created, e.createdAt, e.name = true, now, name
		settle()
	}
	t := &task{request: request{method: "POST", path: "/api/v1/namespaces/" + url.PathEscape(namespace) + "/events", contentType: "application/json", body: mustJSON(body)}, failed: &e.failed, node: w.Pod == (Pod{})}
	t.accepted = func(_ *response, now time.Time) { created(now) }
	t.refused = func(status int, now time.Time) {
		created(now)
		if status == 409 { // of the time before a restart
			e.dirty = true
			return
		}
		// The pod or its namespace is gone, or natkit may not: not again within the hour.
		e.dirty, e.name = false, ""
	}
	return t
}

func (r *Reporter) changeEvent(e *event) *task {
	w := worst(e.findings)
	namespace := "default"
	if w.Pod != (Pod{}) {
		namespace = w.Pod.Namespace
	}
	t := &task{request: request{method: "PATCH", path: "/api/v1/namespaces/" + url.PathEscape(namespace) + "/events/" + url.PathEscape(e.name), contentType: "application/merge-patch+json"}, failed: &e.failed, node: w.Pod == (Pod{})}
	t.body = mustJSON(map[string]any{"type": e.kind(), "message": e.message(), "count": e.times, "lastTimestamp": stamp(e.last)})
	settle := e.sending()
	t.accepted = func(*response, time.Time) { settle() }
	// It has expired, or it was never accepted.
	t.refused = func(int, time.Time) { settle() }
	return t
}

// reasonOf is a cause's code as the API wants a reason: conntrack-table-full is ConntrackTableFull.
func reasonOf(code string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(code, "-") {
		if word != "" {
			b.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return b.String()
}

// cut is a text that fits into a message.
func cut(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage-3], "") + "..."
}
