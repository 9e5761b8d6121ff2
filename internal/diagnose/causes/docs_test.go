// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"natkit/internal/testutil/golden"
	"natkit/internal/testutil/ktest"
)

const (
	docsIndex = "../../../docs/causes.md"
	docsPages = "../../../docs/causes"
	generated = "<!-- Generated from package causes by go generate ./internal/diagnose/causes; do not edit. -->\n\n"
)

// docs/causes.md lists the catalogue, docs/causes/CODE.md is a page of each cause;
// `go generate ./internal/diagnose/causes` writes them.
func TestDocs(t *testing.T) {
	want := map[string][]byte{docsIndex: index()}
	for _, c := range Catalogue() {
		want[filepath.Join(docsPages, c.Code+".md")] = page(c)
	}
	have, err := filepath.Glob(docsPages + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range have {
		if want[path] != nil {
			continue
		}
		if golden.Updating() {
			err = errors.Join(err, os.Remove(path))
		} else {
			t.Errorf("%s belongs to no cause", path)
		}
	}
	for path, text := range want {
		golden.Check(t, path, text)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func index() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, generated+`# What natkit doctor finds

Each cause has a stable code and a page. %[1]snatkit doctor%[1]s prints the code with the evidence it found, and
%[1]snatkit doctor -o json%[1]s has it in %[1]sfindings[].code%[1]s. %[1]snatkit lab run CODE%[1]s reproduces the cause in network
namespaces of its own, shows the finding, cures it, and shows that it is gone.

**Critical** means that packets or connections are lost now; a **warning** means that they will be lost soon, or that a
small part is lost; **advice** means that resources are wasted. natkit decides by what happened during the window, never by
totals since boot. A value just below a threshold is reported as advice, "near the threshold". natkit top, which watches
window after window, reports a cause until the value falls below the lower of two thresholds.
If some evidence is not available, natkit judges the cause by the rest.

| Code | What is wrong | What people search for | Severity |
|---|---|---|---|
`, "`")
	for _, c := range Catalogue() {
		fmt.Fprintf(&b, "| [%s](causes/%s.md) | %s | %s | %s |\n", c.Code, c.Code, c.Title, code(c.Search[0]), severities(c))
	}
	return b.Bytes()
}

func page(c Cause) []byte {
	var b bytes.Buffer
	section := func(heading, text string) { fmt.Fprintf(&b, "\n## %s\n\n%s\n", heading, text) }
	fmt.Fprintf(&b, generated+"# %s\n\n%s. natkit reports it as %s (%s).\n\nPeople search for:\n\n```text\n%s\n```\n",
		c.Headline, c.Title, code(c.Code), severities(c), strings.Join(c.Search, "\n"))
	section("What you notice", c.Symptom)
	example := exampleOf(c)
	section("Why it happens", example.Why)
	decides := c.Proof
	if len(c.Thresholds) > 0 {
		decides += "\n\nThe first value starts a finding, a value below the second ends it:\n"
		for _, t := range c.Thresholds {
			decides += fmt.Sprintf("\n- %s: %s", t.What, t)
		}
	}
	section("How natkit decides", decides)
	section("What looks similar but is healthy", c.FalsePositive)
	section("The cure", fmt.Sprintf("%s\n\nFor example, for the finding \"%s\":\n\n```sh\n%s\n```\n\nThen check that it worked:\n\n```sh\n%s\n```",
		c.Cure, example.Title, strings.Join(example.Remedy, "\n"), strings.Join(example.Verify, "\n")))
	if len(c.Explains) > 0 {
		section("Findings it explains", "natkit lists these under it: "+links(c.Explains)+".")
	}
	section("Evidence", "natkit judges by: "+strings.Join(c.Needs, ", ")+". The [list of all causes](../causes.md) explains severities and thresholds.")
	if c.NoLab == "" {
		section("Reproduce it", fmt.Sprintf("%snatkit lab run %s%s makes it happen in namespaces of its own, cures it, and shows that it is gone.", "`", c.Code, "`"))
	} else {
		section("Reproduce it", "The lab cannot reproduce it: "+c.NoLab+".")
	}
	return b.Bytes()
}

// exampleOf is the finding on the example machine of a cause.
func exampleOf(c Cause) Finding {
	s := gateway()
	examples[c.Code](s)
	return Judge(s)[0]
}

func code(s string) string { return "`" + strings.ReplaceAll(s, "|", `\|`) + "`" }

func severities(c Cause) string {
	var names []string
	for i := len(c.Severities) - 1; i >= 0; i-- {
		names = append(names, c.Severities[i].String())
	}
	return strings.Join(names, ", ")
}

func links(codes []string) string {
	var out []string
	for _, code := range codes {
		out = append(out, fmt.Sprintf("[%s](%s.md)", code, code))
	}
	return strings.Join(out, ", ")
}

// conntrackStats are the counters that conntrack -S (conntrack-tools 1.4.8) prints.
var conntrackStats = strings.Fields("found invalid insert insert_failed drop early_drop error search_restart clash_resolve chaintoolong")

// Every cause has a headline of its own and strings to search for, and what these name is
// there: counters in nstat and conntrack -S, drop reasons in the kernel.
func TestSearch(t *testing.T) {
	counters, reasons := kernelCounters(t), dropReasons(t)
	headlines := map[string]bool{}
	for _, c := range Catalogue() {
		if c.Headline == "" || headlines[c.Headline] || len(c.Search) == 0 {
			t.Errorf("%s: headline %q, strings to search for %q", c.Code, c.Headline, c.Search)
		}
		headlines[c.Headline] = true
		for _, s := range c.Search {
			known := true
			if name, ok := strings.CutPrefix(s, "nstat "); ok {
				known = counters[name]
			} else if name, ok := strings.CutPrefix(s, "conntrack -S: "); ok {
				known = slices.Contains(conntrackStats, name)
			} else if name, ok := strings.CutPrefix(s, "reason: "); ok {
				known = reasons[name]
			}
			if s == "" || !known {
				t.Errorf("%s: %q names nothing that there is", c.Code, s)
			}
		}
	}
}

// kernelCounters are the names that nstat prints, read as it reads them.
func kernelCounters(t *testing.T) map[string]bool {
	names := map[string]bool{}
	for _, file := range []string{"/proc/net/snmp", "/proc/net/netstat"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			for _, name := range fields[1:] {
				names[strings.TrimSuffix(fields[0], ":")+name] = true
			}
		}
	}
	return names
}

// dropReasons are the names that tracepoint skb:kfree_skb prints.
func dropReasons(t *testing.T) map[string]bool {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		ktest.Missing(t, "no BTF of the kernel: %v", err)
	}
	var enum *btf.Enum
	if err := spec.TypeByName("skb_drop_reason", &enum); err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, v := range enum.Values {
		names[strings.TrimPrefix(v.Name, "SKB_DROP_REASON_")] = true
	}
	if !names["IP_LOCALNET"] {
		ktest.Unsupported(t, "Linux before 6.14 has fewer drop reasons")
	}
	return names
}
