// SPDX-License-Identifier: Apache-2.0

// Package scraped reads what natkit answers to Prometheus, with Prometheus' own code.
package scraped

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"natkit/internal/words/exposition"
)

// Gathered is what Prometheus makes of an exposition.
func Gathered(t testing.TB, e *exposition.Exposition) prometheus.Gatherer {
	t.Helper()
	if err := e.Err(); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := e.Write(&b); err != nil {
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

// SeriesOf counts the series of a name.
func SeriesOf(t testing.TB, e *exposition.Exposition, name string) int {
	t.Helper()
	n, err := testutil.GatherAndCount(Gathered(t, e), name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
