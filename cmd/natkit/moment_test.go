// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"
	_ "time/tzdata"
)

// A time is as exact as it was written, and is refused where it was twice or never.
func TestParseWritten(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	const form = "2006-01-02T15:04:05.999999Z07:00"
	now := time.Date(2026, 11, 20, 3, 30, 0, 0, berlin)
	for text, want := range map[string]string{
		"2026-11-20 03:12:07":          "2026-11-20T03:12:07+01:00 2026-11-20T03:12:07.999999+01:00",
		"2026-11-20 03:12:07.25":       "2026-11-20T03:12:07.25+01:00 2026-11-20T03:12:07.259999+01:00",
		"2026-11-20 03:12:07.000 CET":  "2026-11-20T03:12:07+01:00 2026-11-20T03:12:07.000999+01:00", // as natkit who prints it
		"2026-11-20 02:12:07.000 UTC":  "2026-11-20T02:12:07Z 2026-11-20T02:12:07.000999Z",
		"2026-11-20T02:12:07.1234567Z": "2026-11-20T02:12:07.123456Z 2026-11-20T02:12:07.123456Z",
		"2026-11-20 03:12:07+01:00":    "2026-11-20T03:12:07+01:00 2026-11-20T03:12:07.999999+01:00",
		"2026-11-20 03:12:07 -0500":    "2026-11-20T03:12:07-05:00 2026-11-20T03:12:07.999999-05:00",
		"2026-11-20 03:12":             "2026-11-20T03:12:00+01:00 2026-11-20T03:12:59.999999+01:00",
		"2026-10-25":                   "2026-10-25T00:00:00+02:00 2026-10-25T23:59:59.999999+01:00",
		"03:12:07":                     "2026-11-20T03:12:07+01:00 2026-11-20T03:12:07.999999+01:00",
		"03:40":                        "2026-11-19T03:40:00+01:00 2026-11-19T03:40:59.999999+01:00",
		"03:12 UTC":                    "2026-11-19T03:12:00Z 2026-11-19T03:12:59.999999Z",
		"90m":                          "2026-11-20T02:00:00+01:00 2026-11-20T02:00:00+01:00",
		"2026-10-25 01:59:59":          "2026-10-25T01:59:59+02:00 2026-10-25T01:59:59.999999+02:00",
		"2026-10-25 02:30":             "twice, when the clocks went back: write 2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00",
		"2026-10-25 02:30 CEST":        "2026-10-25T02:30:00+02:00 2026-10-25T02:30:59.999999+02:00",
		"2026-10-25 02:30 CET":         "2026-10-25T02:30:00+01:00 2026-10-25T02:30:59.999999+01:00",
		"2026-10-25T02:30:00+01:00":    "2026-10-25T02:30:00+01:00 2026-10-25T02:30:00.999999+01:00",
		"2026-10-25 03:00":             "2026-10-25T03:00:00+01:00 2026-10-25T03:00:59.999999+01:00",
		"2026-03-29 02:30":             "there was no such time",
		"2026-03-29 03:00":             "2026-03-29T03:00:00+02:00 2026-03-29T03:00:59.999999+02:00",
		"2026-11-20 03:12:07 CEST":     "the zone CEST is not known here",
		"2026-11-20 03:12:07 EST":      "the zone EST is not known here",
		"2026-13-20":                   "want a time such as",
	} {
		from, upto, err := parseWritten(text, now)
		if err != nil && strings.Contains(err.Error(), want) {
			continue
		}
		if got := from.Format(form) + " " + upto.Format(form); err != nil || got != want {
			t.Errorf("%q: %s, %v; want %q", text, got, err, want)
		}
	}
}

// A night is the last one that is over, whenever somebody asks.
func TestSpanOf(t *testing.T) {
	at := func(day, hour int) time.Time { return time.Date(2026, 11, day, hour, 0, 0, 0, time.UTC) }
	for _, c := range []struct {
		since, until string
		now          time.Time
		from, to     time.Time // zero: refused
	}{
		{"22:00", "06:00", at(20, 9), at(19, 22), at(20, 6)},
		{"22:00", "06:00", at(20, 23), at(19, 22), at(20, 6)},
		{"22:00", "06:00", at(20, 2), at(18, 22), at(19, 6)},
		{"06:00", "22:00", at(20, 23), at(20, 6), at(20, 22)},
		{"22:00", "", at(20, 2), at(19, 22), at(20, 2)},
		{"2026-11-20 12:00", "06:00", at(20, 13), time.Time{}, time.Time{}},
		{"1h", "06:00", at(20, 9), time.Time{}, time.Time{}},
	} {
		span, err := spanOf(c.since, c.until, c.now)
		if refused := err != nil; refused != c.from.IsZero() || !refused && (!span.From.Equal(c.from) || !span.To.Equal(c.to)) {
			t.Errorf("%s to %s at %v: %v (%v)", c.since, c.until, c.now, span, err)
		}
	}
}
