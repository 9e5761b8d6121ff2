// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
)

const docsPath = "../../../docs/causes.md"

// docs/causes.md is the catalogue; `go generate ./internal/diagnose/causes` writes it.
func TestDocs(t *testing.T) {
	text := docs()
	if *update {
		if err := os.WriteFile(docsPath, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(docsPath)
	if err != nil {
		t.Fatalf("%v (go generate ./internal/diagnose/causes writes it)", err)
	}
	if !bytes.Equal(have, text) {
		t.Errorf("%s is not what the catalogue says (go generate ./internal/diagnose/causes)", docsPath)
	}
}

func docs() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<!-- Generated from package causes by go generate ./internal/diagnose/causes; do not edit. -->

# What natkit doctor finds

Each cause has a stable code. %[1]snatkit doctor%[1]s prints it with the evidence it found, %[1]snatkit doctor -o json%[1]s
carries it in %[1]sfindings[].code%[1]s, and %[1]snatkit lab run CODE%[1]s makes it happen in network namespaces of its own,
shows the finding, cures it, and shows that it is gone; what a lab can't show says why.

What is lost now is **critical**; what will be lost soon, or is lost in small part, is a **warning**; what is merely
wasted is **advice**. Whether something is wrong is decided by what happened during the window, never by totals since boot.
What is below a threshold by no more than chance is advice, "near the threshold"; natkit top, which watches window after
window, goes on naming a cause until it is below the lower of two thresholds.
Evidence that can't be had costs its part of the answer: the cause is judged from the rest.

| Code | What is wrong | Severity |
|---|---|---|
`, "`")
	for _, c := range Catalogue() {
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s |\n", c.Code, c.Code, c.Title, severities(c))
	}
	for _, c := range Catalogue() {
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\n", c.Code, c.Title)
		fmt.Fprintf(&b, "- **Severity:** %s.\n", severities(c))
		fmt.Fprintf(&b, "- **What you notice:** %s\n", c.Symptom)
		fmt.Fprintf(&b, "- **How natkit tells:** %s\n", c.Proof)
		if len(c.Thresholds) > 0 {
			var pairs []string
			for _, t := range c.Thresholds {
				pairs = append(pairs, fmt.Sprintf("%s (%s)", t, t.What))
			}
			fmt.Fprintf(&b, "- **Named from, and no longer below:** %s.\n", strings.Join(pairs, "; "))
		}
		fmt.Fprintf(&b, "- **What looks alike and is healthy:** %s\n", c.Lookalike)
		fmt.Fprintf(&b, "- **The cure:** %s\n", c.Cure)
		if len(c.Explains) > 0 {
			fmt.Fprintf(&b, "- **Takes along:** %s.\n", links(c.Explains))
		}
		fmt.Fprintf(&b, "- **Evidence from:** %s.\n", strings.Join(c.Needs, ", "))
		if c.NoLab == "" {
			fmt.Fprintf(&b, "- **See it:** `natkit lab run %s`\n", c.Code)
		} else {
			fmt.Fprintf(&b, "- **Not in the lab:** %s.\n", c.NoLab)
		}
	}
	return b.Bytes()
}

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
		out = append(out, fmt.Sprintf("[%s](#%s)", code, code))
	}
	return strings.Join(out, ", ")
}
