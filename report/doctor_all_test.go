// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"natkit/diagnose"
	"natkit/snapshot"
)

func TestDoctorAllText(t *testing.T) {
	host, findings := doctored()
	host.Netns = snapshot.Netns{Inode: 1, Init: true}
	pod := *host
	pod.Netns = snapshot.Netns{Name: "cni-1234", Inode: 2, Container: "pod shop/cart-5d8f"}
	pod.Capabilities = append(pod.Capabilities[:2:2], snapshot.Capability{Name: snapshot.CanHooks, Reason: "not here", Costs: "hooks are not told"})
	blue := *host
	blue.Netns = snapshot.Netns{Name: "blue", Inode: 3}
	all := []*snapshot.Snapshot{host, &blue, &pod}
	found := [][]diagnose.Finding{nil, findings[1:], findings[:1]} // advice, then critical
	var b bytes.Buffer
	if err := DoctorAllText(&b, all, found, 3, []string{"pid:7: gone"}, false); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	last := -1
	for _, want := range []string{
		"3 network namespaces watched for 10.0 s",
		"== pod shop/cart-5d8f (--netns cni-1234)", "CRITICAL [conntrack-table-full]",
		"== blue", "ADVICE [br-netfilter-overhead]",
		"Nothing wrong was found in 1 more: the host.",
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

	js, err := json.Marshal(DoctorAll(nil, nil, 0, nil))
	if err != nil || strings.Contains(string(js), "null") {
		t.Errorf("JSON of nothing: %s, %v", js, err)
	}
	b.Reset()
	if err := DoctorAllText(&b, all[:1], [][]diagnose.Finding{nil}, 0, nil, false); err != nil || !strings.Contains(b.String(), "Nothing wrong was found in any of them: the host.") {
		t.Errorf("all is well: %v\n%s", err, b.String())
	}
}
