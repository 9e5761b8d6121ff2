// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every example of docs/rules.md is read without a problem, and every key is in one.
func TestExamplesOfTheDocs(t *testing.T) {
	page := string(must(os.ReadFile("../../../docs/rules.md")))
	examples := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(page, -1)
	if len(examples) < 10 {
		t.Fatalf("%d examples", len(examples))
	}
	var all strings.Builder
	for _, m := range examples {
		text := m[1]
		all.WriteString(text)
		if !strings.HasPrefix(text, "inside:") {
			text = "inside: [eth1, docker0]\noutside: [eth0, ppp0]\n" + text
		}
		f, err := Parse("docs/rules.md", []byte(text))
		if err != nil {
			t.Errorf("%v\n%s", err, text)
			continue
		}
		for _, w := range f.Warnings() {
			if strings.Contains(text, "rules:") {
				t.Errorf("%v\n%s", w, text)
			}
		}
	}
	keys := slices.Clone(fileKeys)
	for kind, others := range ruleKeys {
		keys = append(append(keys, kind), others...)
	}
	for _, class := range timeoutClasses {
		keys = append(keys, class.key)
	}
	for _, field := range (&Limits{1, 1, 1, 1, 1}).fields() {
		keys = append(keys, field[0])
	}
	for _, key := range append(keys, transitory, "addresses", "inbound_refresh", "port_parity") {
		if !regexp.MustCompile(`\b` + key + `: `).MatchString(strings.ReplaceAll(all.String(), ":\n", ": \n")) {
			t.Errorf("no example of key %s", key)
		}
	}
}

// So is every rule file of the other pages.
func TestRuleFilesOfOtherPages(t *testing.T) {
	files := 0
	for _, page := range append(must(filepath.Glob("../../../docs/*.md")), "../../../README.md") {
		for _, m := range regexp.MustCompile("(?s)```yaml\n(inside:.*?)```").FindAllStringSubmatch(string(must(os.ReadFile(page))), -1) {
			files++
			if _, err := Parse(page, []byte(m[1])); err != nil {
				t.Errorf("%v\n%s", err, m[1])
			}
		}
	}
	if files < 3 {
		t.Errorf("only %d rule files", files)
	}
}

// The defaults that the docs show are those.
func TestDefaultsOfTheDocs(t *testing.T) {
	page := string(must(os.ReadFile("../../../docs/rules.md")))
	for _, key := range []string{"defaults", "limits"} {
		_, text, _ := strings.Cut(page, "```yaml\n"+key+":\n")
		text, _, _ = strings.Cut(text, "```")
		f := must(Parse("docs", []byte("inside: eth1\noutside: eth0\n"+key+":\n"+text)))
		if f.Limits.Mappings = 0; f.Defaults != New().Defaults || f.Limits != New().Limits {
			t.Errorf("%s of the docs: %+v %+v", key, f.Defaults, f.Limits)
		}
	}
}
