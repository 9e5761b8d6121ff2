// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// gathered is what Prometheus makes of an exposition.
func gathered(t testing.TB, e *exposition) prometheus.Gatherer {
	t.Helper()
	if e.err != nil {
		t.Fatal(e.err)
	}
	var b bytes.Buffer
	if err := e.write(&b); err != nil {
		t.Fatal(err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(&b)
	if err != nil {
		t.Fatal(err)
	}
	return prometheus.GathererFunc(func() (out []*dto.MetricFamily, err error) {
		for _, f := range families {
			out = append(out, f)
		}
		slices.SortFunc(out, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
		return out, nil
	})
}

// seriesOf counts the series of a name.
func seriesOf(t testing.TB, e *exposition, name string) int {
	t.Helper()
	n, err := testutil.GatherAndCount(gathered(t, e), name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// What is written is what Prometheus reads, whatever a label holds.
func TestExposition(t *testing.T) {
	e := newExposition()
	things, total := metric("things", "Things there are.", "name", "kind"), metric("things_total", "Things there were.")
	e.counter(total, 12345678)
	e.gauge(things, -1, "", "ü")
	e.gauge(things, 0.25, "a \"b\" \\ c\nd", "x")
	const want = `# HELP natkit_things Things there are.
# TYPE natkit_things gauge
natkit_things{name="",kind="ü"} -1
natkit_things{name="a \"b\" \\ c\nd",kind="x"} 0.25
# HELP natkit_things_total Things there were.
# TYPE natkit_things_total counter
natkit_things_total 1.2345678e+07
`
	var b bytes.Buffer
	if err := e.write(&b); err != nil || b.String() != want {
		t.Errorf("%v\n%s", err, b.String())
	}
	if err := testutil.GatherAndCompare(gathered(t, e), strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	e.fail(things, errors.New("first"))
	e.fail(total, errors.New("second"))
	if e.err == nil || e.err.Error() != "natkit_things: first" {
		t.Errorf("error %v", e.err)
	}
}

// What serve tells of itself are the numbers of this process.
func TestExpositionOfProcess(t *testing.T) {
	e := newExposition()
	e.process()
	for _, f := range []*family{descGo, descGoroutines, descHeap, descGoMemory, descCPU, descOpenFiles, descMaxFiles, descVirtual, descResident, descStart} {
		if n := seriesOf(t, e, f.name); n != 1 {
			t.Errorf("%d series of %s", n, f.name)
		}
	}
	problems, err := testutil.GatherAndLint(gathered(t, e))
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}
