// SPDX-License-Identifier: Apache-2.0

package report

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
)

// A block is shown as the subscriber's, with its ports and times.
func TestWhoOfBlock(t *testing.T) {
	at := natlog.MicrosOf(time.Date(2026, 11, 20, 3, 12, 7, 0, time.UTC))
	q := store.Question{Address: netip.MustParseAddr("198.51.100.1"), Port: 5000, Protocol: 6, Since: at, Upto: at}
	life := store.Life{Since: at - 60e6, Log: at - 60e6, Until: at + 60e6, Least: at + 60e6}
	life.Kind, life.Source, life.Subscriber, life.LastPort = natlog.Block, natlog.Engine, "10.0.0.0/24", 5119
	life.Internal, life.External = netip.MustParseAddrPort("10.0.0.0:0"), netip.MustParseAddrPort("198.51.100.1:4608")
	var b strings.Builder
	if err := NewWho(q, store.Answer{Lives: []store.Life{life}}).Text(&b); err != nil {
		t.Fatal(err)
	}
	want := "  subscriber 10.0.0.0/24 (port block 4608 to 5119)\n    from " + (at - 60e6).Time().Local().Format(whoTime) + " to " + (at + 60e6).Time().Local().Format(whoTime) + "\n"
	if !strings.Contains(b.String(), want) {
		t.Errorf("got  %s\nwant %s", b.String(), want)
	}
}

// What is not known of an end is not said: not a year, and not that it goes on.
func TestWhoOfEnds(t *testing.T) {
	at := natlog.MicrosOf(time.Date(2026, 11, 20, 3, 12, 7, 0, time.UTC))
	q := store.Question{Address: netip.MustParseAddr("198.51.100.1"), Port: 5000, Protocol: 6, Since: at, Upto: at}
	text := func(m natlog.Micros) string { return m.Time().Local().Format(whoTime) }
	for want, life := range map[string]store.Life{
		", not ended at the end of the log\n":                                                             {},
		", not ended at " + text(at+60e6) + "; what the log has after that cannot be read\n":              {Least: at + 60e6},
		" to a time between " + text(at+60e6) + " and " + text(at+90e6) + "; its end is not in the log\n": {Least: at + 60e6, Until: at + 90e6},
		" to " + text(at+90e6) + "\n":                                                                     {Least: at + 90e6, Until: at + 90e6},
	} {
		life.Since, life.Log = at, at
		var b strings.Builder
		if err := NewWho(q, store.Answer{Lives: []store.Life{life}}).Text(&b); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(b.String(), want) {
			t.Errorf("got  %s\nwant %s", b.String(), want)
		}
	}
}
