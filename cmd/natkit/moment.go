// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// parseMoment reads a time: of the clock, with a date, or before now. One without a date is the
// last time that it was so.
func parseMoment(text string, now time.Time) (time.Time, error) {
	at, _, err := parseWritten(text, now)
	return at, err
}

// layouts of times, and how exact each is.
var layouts = []struct {
	layout string
	exact  time.Duration
	today  bool // it has no date
}{
	{"2006-01-02 15:04:05", time.Second, false}, {"2006-01-02T15:04:05", time.Second, false},
	{"2006-01-02 15:04", time.Minute, false}, {"2006-01-02T15:04", time.Minute, false},
	{"2006-01-02", day, false}, {"15:04:05", time.Second, true}, {"15:04", time.Minute, true},
}

const day = 24 * time.Hour

// zoned is a time with its zone.
var zoned = regexp.MustCompile(`^(.*\d) ?(Z|[+-]\d\d:?\d\d|[A-Z]{3,5})$`)

// parseWritten reads a time as parseMoment does, and gives the last microsecond that is written so: who
// writes 03:12:07 means any moment of that second.
func parseWritten(text string, now time.Time) (from, upto time.Time, err error) {
	if d, err := parseAge(text); err == nil {
		return now.Add(-d), now.Add(-d), nil
	}
	clock, zone := text, ""
	if m := zoned.FindStringSubmatch(text); m != nil {
		clock, zone = m[1], m[2]
	}
	for _, l := range layouts {
		wall, err := time.Parse(l.layout, clock)
		if err != nil {
			continue
		}
		if l.today {
			here := now.In(zoneOf(zone, now.Location()))
			wall = time.Date(here.Year(), here.Month(), here.Day(), wall.Hour(), wall.Minute(), wall.Second(), wall.Nanosecond(), time.UTC)
		}
		found := instants(wall, zone, now.Location())
		if l.today && len(found) > 0 && found[0].After(now) {
			found = instants(wall.AddDate(0, 0, -1), zone, now.Location())
		}
		if from, err = only(text, zone, found); err != nil {
			return from, from, err
		}
		return from, lastOf(from, l.exact, clock), nil
	}
	return from, from, fmt.Errorf("%q: want a time such as 03:12, 2026-03-01 03:12, 2026-03-01T03:12:07+01:00, or a duration before now such as 1h or 2d", text)
}

// lastOf is the last microsecond that is written as a time is.
func lastOf(from time.Time, exact time.Duration, clock string) time.Time {
	if exact == day {
		return from.AddDate(0, 0, 1).Add(-time.Microsecond)
	}
	if _, fraction, ok := strings.Cut(strings.ReplaceAll(clock, ",", "."), "."); ok {
		for range fraction {
			exact /= 10
		}
	}
	return from.Add(max(exact-time.Microsecond, 0))
}

// zoneOf is a zone by what was written; other where that says nothing, or is a name.
func zoneOf(zone string, other *time.Location) *time.Location {
	if zone == "Z" || zone == "UTC" || zone == "GMT" {
		return time.UTC
	}
	for _, layout := range []string{"-07:00", "-0700"} {
		if t, err := time.Parse(layout, zone); err == nil {
			_, seconds := t.Zone()
			return time.FixedZone(zone, seconds)
		}
	}
	return other
}

// instants are the times at which the clocks of a zone showed a time: none when they had gone forward,
// two when they had gone back.
func instants(wall time.Time, zone string, local *time.Location) (found []time.Time) {
	in, named := zoneOf(zone, nil), false
	if in == nil {
		in, named = local, zone != ""
	}
	for _, near := range []time.Duration{-day, day} {
		_, seconds := wall.Add(near).In(in).Zone()
		at := wall.Add(-time.Duration(seconds) * time.Second).In(in)
		name, offset := at.Zone()
		if offset != seconds || slices.ContainsFunc(found, at.Equal) || named && zone != name {
			continue
		}
		found = append(found, at)
	}
	slices.SortFunc(found, time.Time.Compare)
	return found
}

// only is the one time that a text means.
func only(text, zone string, found []time.Time) (time.Time, error) {
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return time.Time{}, fmt.Errorf("%q was twice, when the clocks went back: write %s or %s", text, found[0].Format(time.RFC3339), found[1].Format(time.RFC3339))
	case zone != "":
		return time.Time{}, fmt.Errorf("%q: the zone %s is not known here: write it as Z or +01:00", text, zone)
	}
	return time.Time{}, fmt.Errorf("%q: the clocks went forward then, there was no such time", text)
}
