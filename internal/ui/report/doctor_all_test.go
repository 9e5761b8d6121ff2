// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"natkit/internal/snapshot"
)

func TestDoctorAll(t *testing.T) {
	host, findings := doctored()
	host.Netns = snapshot.Netns{Inode: 1, Init: true}
	pod := *host
	pod.Netns = snapshot.Netns{Name: "cni-1234", Inode: 2, Container: "pod shop/cart-5d8f"}
	pod.Capabilities = append(pod.Capabilities[:2:2], snapshot.Capability{Name: snapshot.CanHooks, Reason: "not here", Costs: "hooks are not told"})
	pod.Series = &snapshot.Series{Times: []float64{1, 2}, Lines: map[string][]float64{"conntrack.count": {7, 9}}}
	blue := *host
	blue.Netns = snapshot.Netns{Name: "blue", Inode: 3}
	d := DoctorAll{Facts: true}
	d.Add(host, nil)
	d.Add(&blue, findings[1:]) // advice
	d.Add(&pod, findings[:1])  // critical
	left := snapshot.LeftOut{Idle: 3, Skipped: []string{"pid:7: gone"}}
	var b bytes.Buffer
	if err := d.Text(&b, left, false); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	last := -1
	for _, want := range []string{
		"3 network namespaces watched for 10.0 s", "NOT JUDGED\n",
		"== pod shop/cart-5d8f (--netns cni-1234)", "CRITICAL [conntrack-table-full]",
		"== blue", "ADVICE [br-netfilter-overhead]",
		"Nothing wrong was found in 1 more, among what could be judged: the host.",
		"Left out: 3 namespaces with no interface but loopback.", "Left out: pid:7: gone.",
		"Could not be seen:", "drop-tracing: trace drops:", "hooks: in 1 of 3, first in pod shop/cart-5d8f",
	} {
		i := strings.Index(text, want)
		if i <= last {
			t.Errorf("%q is missing or in the wrong place in\n%s", want, text)
		}
		last = i
	}
	for line := range strings.Lines(text) {
		if utf8.RuneCountInString(line) > columns+1 && !strings.Contains(line, "sysctl") {
			t.Errorf("too long: %s", line)
		}
	}

	b.Reset()
	if err := d.HTML(&b, left); err != nil {
		t.Fatal(err)
	}
	html := b.String()
	last = -1
	for _, want := range []string{
		"<h1>natkit doctor: gw1</h1>", "3 network namespaces watched for 10.0 s", " causes: could not read conntrack-dump",
		`<a href="#namespace-3">pod shop/cart-5d8f (--netns cni-1234)</a>: conntrack-table-full`, `<a href="#namespace-2">blue</a>: br-netfilter-overhead`,
		`<section id="namespace-3">`, `id="namespace-3-conntrack-table-full"`, "<figcaption>entries of the conntrack table", "The facts of pod shop/cart-5d8f", `<section id="namespace-2">`,
		"Nothing wrong was found in 1 more, among what could be judged: the host.", "Left out: pid:7: gone.", "Could not be seen",
	} {
		i := strings.Index(html, want)
		if i <= last {
			t.Errorf("%q is missing or in the wrong place in the page", want)
		}
		last = i
	}

	js, err := json.Marshal(new(DoctorAll).Result(snapshot.LeftOut{}))
	if err != nil || strings.Contains(string(js), "null") {
		t.Errorf("JSON of nothing: %s, %v", js, err)
	}
	b.Reset()
	well := DoctorAll{}
	well.Add(host, nil)
	if err := well.Text(&b, snapshot.LeftOut{}, false); err != nil || !strings.Contains(b.String(), "Nothing wrong was found in any of them, among what could be judged: the host.") {
		t.Errorf("all is well: %v\n%s", err, b.String())
	}
}

// What was recorded is not said to be one window, and a namespace's name can be pasted.
func TestDoctorAllRecorded(t *testing.T) {
	s, findings := doctored()
	s.Netns = snapshot.Netns{Name: "two words", Container: "docker web1", Inode: 2}
	later := *s
	later.Netns, later.TakenAt = snapshot.Netns{Init: true, Inode: 1}, s.TakenAt.Add(10*time.Minute)
	const layout = "2006-01-02 15:04:05 UTC"
	from, to := s.TakenAt.UTC().Format(layout), later.TakenAt.UTC().Format(layout)
	for want, since := range map[string]time.Time{
		"2 network namespaces as recorded between " + from + " and " + to:                                       {},
		"2 network namespaces as recorded from " + s.TakenAt.Add(-time.Hour).UTC().Format(layout) + " to " + to: s.TakenAt.Add(-time.Hour),
	} {
		d := DoctorAll{Since: since}
		d.Add(s, findings)
		d.Add(&later, nil)
		var b strings.Builder
		if err := d.Text(&b, snapshot.LeftOut{}, false); err != nil {
			t.Fatal(err)
		}
		text := strings.Join(strings.Fields(b.String()), " ")
		if !strings.Contains(text, want) || strings.Contains(text, "watched for") || !strings.Contains(text, "docker web1 (--netns 'two words')") {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
