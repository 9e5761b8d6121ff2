// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/choice"
)

// This file is who shares the external addresses of engine ebpf: subscribers with what they have,
// and pools with what is left.

// Subscriber is a subscriber in a pool, for as long as it has a session or a port.
type Subscriber struct {
	Of netip.Prefix `json:"subscriber,omitzero"` // internal address or prefix
	// Interface is what it is behind, where subscribers are told apart by that.
	Interface string     `json:"interface,omitempty"`
	Pool      string     `json:"pool"` // its name; an interface that is masqueraded behind; a single address; (published) or (map)
	Class     string     `json:"class"`
	External  netip.Addr `json:"external_address,omitzero"`
	Sessions  int        `json:"sessions"`
	// Ports are of all protocols together, those in hold-down too. They are counted where the
	// rule file has subscribers or blocks.
	Ports    *int        `json:"ports_used,omitempty"`
	HoldDown *int        `json:"ports_in_hold_down,omitempty"`
	Blocks   []PortBlock `json:"blocks,omitzero"`
	// Limits are those of its class and its pool, 0 none; Share is how much of the one that is
	// nearest it has, 0 to 1 and above after a lower limit. One block is no limit in this sense.
	SessionLimit int     `json:"session_limit,omitempty"`
	PortLimit    int     `json:"port_limit,omitempty"`
	BlockLimit   int     `json:"block_limit,omitempty"`
	Share        float64 `json:"limit_share"`

	Refused map[string]uint64 `json:"refused_by_reason,omitzero"` // packets, only reasons that were met
	Since   time.Time         `json:"since"`

	raw datapath.Subscriber
}

// PortBlock is a block of ports of an external address.
type PortBlock struct {
	Address netip.Addr `json:"address,omitzero"`
	First   uint16     `json:"min_port"`
	Last    uint16     `json:"max_port"`
}

func (b PortBlock) String() string { return fmt.Sprintf("%d-%d", b.First, b.Last) }

// AllRefused is how often it was refused something.
func (s *Subscriber) AllRefused() (n uint64) {
	for _, r := range s.Refused {
		n += r
	}
	return n
}

// SubscriberTotal is all subscribers of a pool or a class together.
type SubscriberTotal struct {
	Name        string            `json:"name"`
	Subscribers int               `json:"subscribers"`
	NearLimit   int               `json:"subscribers_near_limit"` // those that have 80 % of one of their limits
	Sessions    int               `json:"sessions"`
	Ports       *int              `json:"ports_used,omitempty"`
	Blocks      int               `json:"block_count"`
	Refused     map[string]uint64 `json:"refused_by_reason,omitzero"` // of those that are there now
}

// Subscribers is who uses how much.
type Subscribers struct {
	By      string            `json:"by"`          // what Rows are sorted by
	Count   int               `json:"subscribers"` // that were asked for, of which Rows are the first
	Rows    []Subscriber      `json:"rows"`
	Pools   []SubscriberTotal `json:"by_pool"`
	Classes []SubscriberTotal `json:"by_class"`
}

// In place of a pool: the sessions by rules that send them to the subscriber, and those that it opens where a map gives its
// address. Each has the limits of the subscriber to itself. No pool has such a name.
const (
	OfPublished = "(published)"
	OfMap       = "(map)"
)

// SubscriberOptions chooses subscribers.
type SubscriberOptions struct {
	Of    netip.Prefix // those that have an internal or external address in it; zero: all
	Class string       // "": all
	Pool  string       // "": all
	By    string       // SubscriberOrders; "" is ports
	Rows  int          // the first; 0: all
}

// subscriberOrders are what subscribers can be sorted by.
var subscriberOrders = map[string]func(s *Subscriber) float64{
	"ports":    func(s *Subscriber) float64 { return float64(s.raw.Ports) },
	"sessions": func(s *Subscriber) float64 { return float64(s.Sessions) },
	"refused":  func(s *Subscriber) float64 { return float64(s.AllRefused()) },
	"blocks":   func(s *Subscriber) float64 { return float64(len(s.Blocks)) },
	"share":    func(s *Subscriber) float64 { return s.Share },
}

// SubscriberOrders are the words for SubscriberOptions.By.
func SubscriberOrders() []string { return []string{"ports", "sessions", "blocks", "refused", "share"} }

// ReadSubscribers reads who uses how much of a namespace's external addresses.
func ReadSubscribers(ns *netns.Handle, o SubscriberOptions) (*Subscribers, error) {
	rec, file, err := inUse(ns)
	if err != nil {
		return nil, err
	}
	if rec.Engine != EngineEBPF {
		return nil, fmt.Errorf("engine %s counts no subscribers: the kernel's NAT keeps sessions, see `natkit conntrack top`", rec.Engine)
	}
	b := booksOf(rec, file)
	if err := b.known(o); err != nil {
		return nil, err
	}
	e, err := Open(ns)
	if err != nil {
		return nil, err
	}
	out, err := b.read(e, o)
	return out, errors.Join(err, e.Close())
}

// books give numbers of the engine their names, and limits.
type books struct {
	file    *rulefile.File
	counted bool // ports are
	pools   map[uint8]*pool
}

// pool is a pool by its number.
type pool struct {
	name      string
	only      netip.Addr // its one address, if it has only one
	blocks    rulefile.Blocks
	addresses []*datapath.ExternalAddress
	given     int // of these, how many the rules still want
}

func booksOf(rec *record, file *rulefile.File) *books {
	b := &books{file: file, pools: map[uint8]*pool{}}
	b.counted = file.Subscribers.Prefix > 0 || slices.ContainsFunc(file.Pools, func(p rulefile.Pool) bool { return !p.Blocks.IsZero() })
	for i := range rec.Addresses {
		a := &rec.Addresses[i]
		if a.Pool == 0 || a.Ports[0] == 0 && !a.OneToOne {
			continue
		}
		p := b.pools[a.Pool]
		if p == nil {
			p = &pool{name: a.Addr.String()}
			b.pools[a.Pool] = p
		}
		p.addresses = append(p.addresses, a)
		if a.Leaving {
			continue
		}
		p.name, p.blocks = b.poolName(rec, a), a.Blocks
		p.given++
		if p.only = a.Addr; p.given > 1 {
			p.only = netip.Addr{}
		}
	}
	return b
}

func (b *books) poolName(rec *record, a *datapath.ExternalAddress) string {
	if a.Masquerade {
		if i := slices.IndexFunc(rec.Links, func(l linkRecord) bool { return l.Index == a.Link }); i >= 0 {
			return rec.Links[i].Name
		}
	}
	for i := range b.file.Pools {
		if b.file.Pools[i].Contains(a.Addr) {
			return b.file.Pools[i].Name
		}
	}
	return a.Addr.String()
}

// known refuses names of pools and classes that are not there.
func (b *books) known(o SubscriberOptions) error {
	if o.By != "" && subscriberOrders[o.By] == nil {
		return fmt.Errorf("order %w", choice.Error(o.By, SubscriberOrders()...))
	}
	if classes := b.file.Subscribers.Names(); o.Class != "" && !slices.Contains(classes, o.Class) {
		return fmt.Errorf("class %w", choice.Error(o.Class, classes...))
	}
	pools := []string{OfPublished, OfMap}
	for _, n := range slices.Sorted(maps.Keys(b.pools)) {
		pools = append(pools, b.pools[n].name)
	}
	if o.Pool != "" && !slices.Contains(pools, o.Pool) {
		return fmt.Errorf("pool %w", choice.Error(o.Pool, pools...))
	}
	return nil
}

// read reads all subscribers, and of the rows that are wanted their ports in hold-down.
func (b *books) read(e *datapath.Engine, o SubscriberOptions) (*Subscribers, error) {
	out := &Subscribers{By: cmp.Or(o.By, "ports"), Rows: []Subscriber{}, Pools: []SubscriberTotal{}, Classes: []SubscriberTotal{}}
	pools, classes := map[string]*SubscriberTotal{}, map[string]*SubscriberTotal{}
	less := func(x, y *Subscriber) int {
		by := subscriberOrders[out.By]
		return cmp.Or(cmp.Compare(by(y), by(x)), cmp.Compare(y.Sessions, x.Sessions), x.Of.Addr().Compare(y.Of.Addr()), cmp.Compare(x.Interface, y.Interface), cmp.Compare(x.Pool, y.Pool))
	}
	trim := func() {
		slices.SortFunc(out.Rows, func(x, y Subscriber) int { return less(&x, &y) })
		if o.Rows > 0 && len(out.Rows) > o.Rows {
			out.Rows = slices.Delete(out.Rows, o.Rows, len(out.Rows))
		}
	}
	err := b.each(e, func(s *Subscriber) bool {
		if !o.wants(s) {
			return true
		}
		out.Count++
		total(pools, s.Pool, s)
		total(classes, s.Class, s)
		// Only the first rows are kept: most are thrown away again before there are many.
		if out.Rows = append(out.Rows, *s); o.Rows > 0 && len(out.Rows) >= 4*o.Rows+1024 {
			trim()
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	trim()
	byName := func(totals map[string]*SubscriberTotal) []SubscriberTotal {
		list := []SubscriberTotal{}
		for _, name := range slices.Sorted(maps.Keys(totals)) {
			list = append(list, *totals[name])
		}
		return list
	}
	out.Pools, out.Classes = byName(pools), byName(classes)
	return out, b.holdDown(e, out.Rows)
}

// each calls fn with every subscriber until it returns false.
func (b *books) each(e *datapath.Engine, fn func(*Subscriber) bool) error {
	prefix := cmp.Or(e.Size().SubscriberPrefix, 32)
	return e.Subscribers(func(raw *datapath.Subscriber) bool {
		s := b.subscriber(raw, prefix)
		s.Interface = e.ZoneName(raw.Zone)
		return fn(s)
	})
}

// holdDown counts the ports in hold-down of some subscribers.
func (b *books) holdDown(e *datapath.Engine, rows []Subscriber) error {
	if !b.counted {
		return nil
	}
	of := make([]datapath.Subscriber, len(rows))
	for i := range rows {
		of[i] = rows[i].raw
	}
	counts, err := e.HoldDown(of)
	for i := range counts {
		if rows[i].Ports != nil {
			n := min(counts[i], *rows[i].Ports) // it was read later
			rows[i].HoldDown = &n
		}
	}
	return err
}

// subscriber names what the engine numbers.
func (b *books) subscriber(m *datapath.Subscriber, prefix int) *Subscriber {
	s := &Subscriber{Of: netip.PrefixFrom(m.Addr, prefix), External: m.External, Sessions: m.Sessions, Since: m.Since, raw: *m}
	var share rulefile.Share
	s.Class, share = b.share(m)
	s.SessionLimit = share.Sessions
	switch m.Pool {
	case datapath.PoolPublished:
		s.Pool = OfPublished
	case datapath.PoolMap:
		s.Pool = OfMap
	default:
		if s.PortLimit = share.Ports; b.counted {
			s.Ports = &s.raw.Ports
		}
	}
	if p := b.pools[m.Pool]; p != nil {
		s.Pool = p.name
		if !s.External.IsValid() {
			s.External, s.raw.External = p.only, p.only
		}
		if !p.blocks.IsZero() {
			s.BlockLimit = 1 + p.blocks.AtMost
		}
	}
	for _, block := range m.Blocks {
		s.Blocks = append(s.Blocks, PortBlock{block.Address, block.Ports.First, block.Ports.Last})
	}
	for i, n := range m.Refused {
		if n > 0 {
			if s.Refused == nil {
				s.Refused = map[string]uint64{}
			}
			s.Refused[rulefile.Refusals[i]] = uint64(n)
		}
	}
	limits := [][2]int{{s.Sessions, s.SessionLimit}, {m.Ports, s.PortLimit}}
	if s.BlockLimit > 1 { // of one block everybody has all
		limits = append(limits, [2]int{len(s.Blocks), s.BlockLimit})
	}
	for _, l := range limits {
		if l[1] > 0 {
			s.Share = max(s.Share, float64(l[0])/float64(l[1]))
		}
	}
	return s
}

// share is the class of a subscriber, and what it may have.
func (b *books) share(m *datapath.Subscriber) (string, rulefile.Share) {
	if classes := b.file.Subscribers.Classes; m.Class > 0 && m.Class <= len(classes) {
		return classes[m.Class-1].Name, classes[m.Class-1].Share
	}
	return b.file.ShareOf(m.Addr)
}

func (o *SubscriberOptions) wants(s *Subscriber) bool {
	return (!o.Of.IsValid() || o.Of.Overlaps(s.Of) || s.External.IsValid() && o.Of.Contains(s.External)) &&
		(o.Class == "" || o.Class == s.Class) && (o.Pool == "" || o.Pool == s.Pool)
}

// nearLimit is the share of a limit from which on a subscriber is near it.
const nearLimit = 0.8

// total adds a subscriber to those of that name.
func total(totals map[string]*SubscriberTotal, name string, s *Subscriber) {
	t := totals[name]
	if t == nil {
		t = &SubscriberTotal{Name: name}
		totals[name] = t
	}
	t.Subscribers++
	if s.Share >= nearLimit {
		t.NearLimit++
	}
	t.Sessions += s.Sessions
	t.Blocks += len(s.Blocks)
	if s.Ports != nil {
		if t.Ports == nil {
			t.Ports = new(int)
		}
		*t.Ports += *s.Ports
	}
	for reason, n := range s.Refused {
		if t.Refused == nil {
			t.Refused = map[string]uint64{}
		}
		t.Refused[reason] += n
	}
}

// PoolStatus is what a pool of engine ebpf has and has left.
type PoolStatus struct {
	Name      string `json:"pool"`
	Addresses int    `json:"address_count"`
	Draining  int    `json:"draining_addresses,omitempty"` // besides
	Ports     int    `json:"usable_ports"`                 // of all addresses, of each protocol
	FreeTCP   int    `json:"free_tcp"`
	FreeUDP   int    `json:"free_udp"`
	FreeICMP  int    `json:"free_icmp"`
	// Share is how much of it is taken, 0 to 1: of its blocks, or of the ports of the protocol that
	// has fewest left.
	Share       float64           `json:"used_share"`
	Blocks      *PoolBlocks       `json:"port_blocks,omitempty"`
	Subscribers int               `json:"subscribers"`
	NearLimit   int               `json:"subscribers_near_limit"`     // those that have 80 % of one of their limits
	Refused     map[string]uint64 `json:"refused_by_reason,omitzero"` // packets of those that are there now
}

// PoolBlocks are the port blocks of a pool, without computed ones: datapath.BlockUse.
type PoolBlocks struct {
	Size   int `json:"block_size"` // ports of the first one of a subscriber, and of extra ones
	Extra  int `json:"extra_size"`
	AtMost int `json:"extra_max"`
	Used   int `json:"used"` // of all sizes
	Free   int `json:"free"` // of the first size
}

// poolStatus sums up addresses and subscribers by pools.
func (b *books) poolStatus(e *datapath.Engine, addresses []AddressStatus, totals map[string]*SubscriberTotal) ([]PoolStatus, error) {
	var out []PoolStatus
	have := map[netip.Addr]*AddressStatus{}
	for i := range addresses {
		have[addresses[i].Address] = &addresses[i]
	}
	for _, number := range slices.Sorted(maps.Keys(b.pools)) {
		p := b.pools[number]
		s := PoolStatus{Name: p.name}
		var blocks datapath.BlockUse
		for _, a := range p.addresses {
			if a.Leaving {
				s.Draining++
				continue
			}
			s.Addresses++
			if is := have[a.Addr]; is != nil {
				s.Ports += is.Ports
				s.FreeTCP, s.FreeUDP, s.FreeICMP = s.FreeTCP+is.FreeTCP, s.FreeUDP+is.FreeUDP, s.FreeICMP+is.FreeICMP
			}
			use, err := e.BlockUse(a)
			if err != nil {
				return nil, err
			}
			blocks.Used, blocks.Free = blocks.Used+use.Used, blocks.Free+use.Free
		}
		if s.Ports > 0 {
			s.Share = 1 - float64(min(s.FreeTCP, s.FreeUDP, s.FreeICMP))/float64(s.Ports)
		}
		if !p.blocks.IsZero() {
			s.Blocks = &PoolBlocks{p.blocks.Size, p.blocks.Extra, p.blocks.AtMost, blocks.Used, blocks.Free}
			s.Share = float64(blocks.Used) / float64(max(blocks.Used+blocks.Free, 1))
		}
		if t := totals[p.name]; t != nil {
			s.Subscribers, s.NearLimit, s.Refused = t.Subscribers, t.NearLimit, t.Refused
		}
		out = append(out, s)
	}
	return out, nil
}
