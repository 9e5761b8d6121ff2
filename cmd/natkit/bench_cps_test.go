// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

func TestBenchCPS(t *testing.T) {
	cps := func(args string) (code int, stdout, stderr string) {
		var out, errs bytes.Buffer
		code = run(t.Context(), append([]string{"bench", "cps"}, strings.Fields(args)...), &env{stdout: &out, stderr: &errs})
		return code, out.String(), errs.String()
	}
	for _, args := range []string{
		"--sessions 0", "--sessions 4128769", "--sessions x", "--trials 0", "--duration 1ms", "--router x", "--pdr 0.5", "--ndr --trials 3",
		"--ndr --sessions 100", "--protocol sctp", "--protocol tcp,tcp", "--protocol=", "--netns x", "more", "-o xml",
	} {
		if code, stdout, stderr := cps(args); code != exitUsage || stdout != "" || stderr == "" {
			t.Errorf("%q: exit %d\n%s%s", args, code, stdout, stderr)
		}
	}

	ktest.Root(t)
	code, stdout, stderr := cps("--router none,nft --protocol udp,tcp --sessions 1000 --trials 1 --duration 20ms -o json")
	var res bench.Result
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || code != exitOK || !onlyProgress(stderr) {
		t.Fatalf("exit %d, %v\n%s%s", code, err, stdout, stderr)
	}
	capacity, connections := map[string]float64{}, 0
	for _, f := range res.Figures {
		if f.Metric == "establishment_cps" && f.Params.Protocol == "tcp" && f.Median > 0 {
			connections++
		}
		if f.Metric == "capacity_sessions" && f.Params.Protocol == "udp" {
			capacity[f.Router] = f.Median
		}
	}
	if res.Kind != "cps" || !strings.HasPrefix(res.Command, "natkit") || len(capacity) != 1 || capacity["nft"] != 1000 || connections != 2 {
		t.Errorf("%+v", res)
	}
}
