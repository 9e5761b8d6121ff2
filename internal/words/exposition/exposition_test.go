// SPDX-License-Identifier: Apache-2.0

package exposition_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"natkit/internal/testutil/scraped"
	"natkit/internal/words/exposition"
)

// What is written is what Prometheus reads, whatever a label holds.
func TestExposition(t *testing.T) {
	e := exposition.New()
	things, total := exposition.Metric("things", "Things there are.", "name", "kind"), exposition.Metric("things_total", "Things there were.")
	e.Counter(total, 12345678)
	e.Gauge(things, -1, "", "ü")
	e.Gauge(things, 0.25, "a \"b\" \\ c\nd", "x\xff")
	const want = `# HELP natkit_things Things there are.
# TYPE natkit_things gauge
natkit_things{name="",kind="ü"} -1
natkit_things{name="a \"b\" \\ c\nd",kind="x` + "\ufffd" + `"} 0.25
# HELP natkit_things_total Things there were.
# TYPE natkit_things_total counter
natkit_things_total 1.2345678e+07
`
	var b bytes.Buffer
	if err := e.Write(&b); err != nil || b.String() != want {
		t.Errorf("%v\n%s", err, b.String())
	}
	if err := testutil.GatherAndCompare(scraped.Gathered(t, e), strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	e.Fail(things, errors.New("first"))
	e.Fail(total, errors.New("second"))
	if e.Err() == nil || e.Err().Error() != "natkit_things: first" {
		t.Errorf("error %v", e.Err())
	}
}

// What serve tells of itself are the numbers of this process.
func TestExpositionOfProcess(t *testing.T) {
	e := exposition.New()
	e.Process()
	for _, name := range []string{"go_info", "go_goroutines", "go_memstats_heap_alloc_bytes", "go_memstats_sys_bytes", "process_cpu_seconds_total", "process_open_fds",
		"process_max_fds", "process_virtual_memory_bytes", "process_resident_memory_bytes", "process_start_time_seconds"} {
		if n := scraped.SeriesOf(t, e, name); n != 1 {
			t.Errorf("%d series of %s", n, name)
		}
	}
	problems, err := testutil.GatherAndLint(scraped.Gathered(t, e))
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}
