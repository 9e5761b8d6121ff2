// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"net/netip"
	"time"
)

// Rate is how many requests are answered: so many a second, and after a pause so many at once, of
// one client and of all.
type Rate struct {
	PerSecond, Burst       int // of one client
	AllPerSecond, AllBurst int
}

// DefaultRate: a client that extends 64 mappings at once is answered at once; some thousand
// requests a second cost a few per cent of a processor.
var DefaultRate = Rate{PerSecond: 16, Burst: 64, AllPerSecond: 2000, AllBurst: 2000}

// allCosts is how many requests one is that ends all mappings of a host: it ends as many as the host has.
const allCosts = 16

// clientsMax is how many clients are known at a time: those whose bucket is not full. Others share
// one bucket then, so that a flood from invented addresses costs nobody's memory.
const clientsMax = 8192

// asker is a client: hosts behind two interfaces may have the same address.
type asker struct {
	in   int // interface
	addr netip.Addr
}

// limiter is a token bucket for each client and one for all. A bucket is the time at which it is
// full again.
type limiter struct {
	rate   Rate
	full   map[asker]time.Time
	others time.Time
	all    time.Time
	forgot time.Time
}

func newLimiter(r Rate) limiter { return limiter{rate: r, full: map[asker]time.Time{}} }

// take takes a token of a bucket, or nothing.
func take(full, now time.Time, perSecond, burst int) (time.Time, bool) {
	if perSecond <= 0 {
		return full, true
	}
	interval := time.Second / time.Duration(perSecond)
	if full.Before(now) {
		full = now
	}
	if full.Sub(now) > interval*time.Duration(burst-1) {
		return full, false
	}
	return full.Add(interval), true
}

// allow reports whether a request of the client is answered. What one may not send more does not
// use up what others may.
func (l *limiter) allow(now time.Time, who asker) bool {
	full, known := l.full[who]
	if !known && len(l.full) >= clientsMax {
		l.forget(now)
	}
	room := known || len(l.full) < clientsMax
	if !room {
		full = l.others
	}
	full, ok := take(full, now, l.rate.PerSecond, l.rate.Burst)
	if !ok {
		return false
	}
	if l.all, ok = take(l.all, now, l.rate.AllPerSecond, l.rate.AllBurst); !ok {
		return false
	}
	if room {
		l.full[who] = full
	} else {
		l.others = full
	}
	return true
}

// charge has a request that was allowed pay for more than one, from all buckets that it took a token of.
func (l *limiter) charge(who asker, requests int) {
	more := func(full time.Time, perSecond int) time.Time {
		if perSecond <= 0 {
			return full
		}
		return full.Add(time.Duration(requests) * time.Second / time.Duration(perSecond))
	}
	if full, known := l.full[who]; known {
		l.full[who] = more(full, l.rate.PerSecond)
	} else {
		l.others = more(l.others, l.rate.PerSecond)
	}
	l.all = more(l.all, l.rate.AllPerSecond)
}

// forget removes clients whose bucket is full, once a second at most.
func (l *limiter) forget(now time.Time) {
	if now.Sub(l.forgot) < time.Second {
		return
	}
	l.forgot = now
	for who, full := range l.full {
		if !full.After(now) {
			delete(l.full, who)
		}
	}
}
