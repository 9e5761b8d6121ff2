// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

// figureLine is one that reports a figure, which has its title behind the router's name.
var figureLine = regexp.MustCompile(`natkit: [a-z-]+: [A-Z].*\n`)

// afterRow ends a context when a figure is reported.
type afterRow struct {
	bytes.Buffer
	end context.CancelFunc
}

func (a *afterRow) Write(p []byte) (int, error) {
	n, err := a.Buffer.Write(p)
	if figureLine.Match(a.Bytes()) {
		a.end()
	}
	return n, err
}

// Each measurement of routers says on a pipe what it will measure and how long that takes,
// prints a figure as it is done, and after an interrupt shows what it has as incomplete.
func TestMeasurementsInterrupted(t *testing.T) {
	ktest.Root(t)
	for _, line := range []string{
		"bench udp --router none,nft --flows 1,100 --trials 1 --duration 50ms",
		"bench cps --router none,nft --sessions 5000 --trials 1 --duration 50ms",
		"bench rules --router nft,nft-map --counts 0,10 --trials 1 --seconds 0.05 --flows 10",
		"bench ports --router none,nft --trials 1 --duration 50ms",
	} {
		ctx, cancel := context.WithCancel(t.Context())
		errs := &afterRow{end: cancel}
		var out bytes.Buffer
		code := run(ctx, append(strings.Fields(line), "-o", "json"), &env{stdin: strings.NewReader(""), stdout: &out, stderr: errs})
		cancel()
		first, _, _ := strings.Cut(errs.String(), "\n")
		if code != exitError || !strings.Contains(first, "about ") || !strings.Contains(errs.String(), `"error":"interrupted`) {
			t.Errorf("natkit %s: exit code %d, %s", line, code, errs.String())
			continue
		}
		var res bench.Result
		if err := json.Unmarshal(out.Bytes(), &res); err != nil || !strings.HasPrefix(res.Incomplete, "interrupted after ") || len(res.Figures) == 0 {
			t.Errorf("natkit %s: %v, incomplete %q, %d figures", line, err, res.Incomplete, len(res.Figures))
		}
	}
}
