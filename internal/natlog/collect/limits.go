// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"net/netip"
	"time"

	"natkit/internal/nat/datapath"
	"natkit/internal/natlog"
)

// limits finds who is about to have used up what it may have: from highUse on, until lowUse is
// reached again. Packets take no part in it.
type limits struct {
	looked time.Time
	high   map[limited]bool
}

// limited is what has a limit: a subscriber of a pool, or a pool.
type limited struct {
	what       string
	subscriber netip.Addr
	pool, zone uint8
	name       string
}

const (
	highUse, lowUse = 80, 70 // per cent
	limitsEvery     = 10 * time.Second
)

// crosses reports whether a use has become high. what was high and is so no more is forgotten.
func (l *limits) crosses(what limited, used, most int) bool {
	if l.high == nil {
		l.high = map[limited]bool{}
	}
	switch {
	case most == 0 || used*100 < most*lowUse:
		delete(l.high, what)
	case used*100 >= most*highUse && !l.high[what]:
		l.high[what] = true
		return true
	}
	return false
}

// look records who has come near to a limit.
func (l *limits) look(c *collector) {
	now := time.Now()
	if now.Sub(l.looked) < limitsEvery {
		return
	}
	l.looked = now
	at := c.now()
	seen := map[limited]bool{}
	near := func(event natlog.Event, tr natlog.Translation, what limited, used, most int) {
		seen[what] = true
		if !l.crosses(what, used, most) {
			return
		}
		note := natlog.Nearly(used, most, what.what)
		if what.name != "" {
			note = natlog.NearlyOfPool(used, most, what.what, what.name)
		}
		tr.Source = natlog.Engine
		c.record(natlog.Record{Translation: tr, Event: event, Time: at, Note: note})
	}
	err := c.engine.log.Use(func(u datapath.SubscriberUse) {
		tr := natlog.Translation{Internal: netip.AddrPortFrom(u.Subscriber, 0), Zone: uint16(u.Zone), Subscriber: c.engine.subscriber(u.Subscriber, u.Zone)}
		if u.External.IsValid() {
			tr.External = netip.AddrPortFrom(u.External, 0)
		}
		near(natlog.Quota, tr, limited{what: "ports", subscriber: u.Subscriber, pool: u.Pool, zone: u.Zone}, u.Ports, u.MostPorts)
		near(natlog.Quota, tr, limited{what: "port blocks", subscriber: u.Subscriber, pool: u.Pool, zone: u.Zone}, u.Blocks, u.MostBlocks)
	})
	pools := map[string]*datapath.AddressUse{}
	if err == nil {
		err = c.engine.log.Addresses(func(u datapath.AddressUse) {
			name := c.engine.poolOf(u.Address.As4())
			if name == "" {
				name = u.Address.String() // of a rule, or an interface's
			}
			if p := pools[name]; p != nil {
				p.Used, p.Total = p.Used+u.Used, p.Total+u.Total
			} else {
				pools[name] = &u
			}
		})
	}
	if err != nil {
		c.o.Say("how much is in use cannot be read: " + err.Error())
	}
	for name, p := range pools {
		what := "ports"
		if p.Blocks {
			what = "ports in blocks"
		}
		near(natlog.Exhausted, natlog.Translation{External: netip.AddrPortFrom(p.Address, 0)}, limited{what: what, name: name}, p.Used, p.Total)
	}
	for what := range l.high {
		if !seen[what] { // the subscriber has gone
			delete(l.high, what)
		}
	}
	c.append()
}
