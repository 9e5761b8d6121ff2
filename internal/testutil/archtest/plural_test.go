// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A number and its noun agree: what is printed with %d and a plural noun would say "1 rules".
// Package plural writes them. Where the number is a bound or one of several of which the last
// one counts ("2 of 3 entries", "at most 4096 rules", "want 1 to 9 ports"), the plural is right.
func TestNumbersAgreeWithNouns(t *testing.T) {
	const nouns = `addresses|attempts|backlogs|buckets|chains|changes|connections|cores|CPUs|datagrams|descriptors|directions|elements|errors|events|extensions|frames|functions|handles|hosts|hooks|intervals|jumps|keys|labs|levels|messages|milliseconds|minutes|neighbours|objects|places|policies|points|processes|queues|rows|seconds|segments|sets|sockets|steps|streams|SYNs|targets|threads|tuples|clients|connections|engines|entries|findings|flows|interfaces|lines|mappings|namespaces|notes|packets|ports|processors|requests|routers|rules|sessions|settings|times|trials`
	printed := regexp.MustCompile(`(\S*) ?%d (` + nouns + `)\b`)
	// Thresholds, bounds and loads, all of which are many.
	many := regexp.MustCompile(`Proof:|note\(|at most|want |not many|below %d|took %d|all %d|would be|of which`)
	bound := map[string]bool{"of": true, "most": true, "least": true, "from": true, "From": true, "than": true, "to": true, "or": true, "last": true, "with": true, "after": true, "had": true}
	for _, path := range sources(t, func(path string) bool { return filepath.Ext(path) == ".go" && !strings.HasSuffix(path, "_test.go") }) {
		for i, line := range strings.Split(string(read(t, path)), "\n") {
			code, _, _ := strings.Cut(line, "//")
			if many.MatchString(code) {
				continue
			}
			for _, m := range printed.FindAllStringSubmatch(code, -1) {
				if word := m[1][strings.LastIndexAny(m[1], `"(`)+1:]; !bound[word] {
					t.Errorf("%s:%d: %q: write it with plural.Count", path, i+1, strings.TrimSpace(m[0]))
				}
			}
		}
	}
}
