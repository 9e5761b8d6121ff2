// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
)

// nftEngine is the kernel's own NAT: an nftables table, and entries of connection tracking.
type nftEngine struct{}

func (nftEngine) pinned() bool { return false }

func (nftEngine) exists(r *record) error { return engineExists(r) }

// remove also ends the connections that the table has translated, as those of engine ebpf end
// with it.
func (nftEngine) remove(in *instance, rec *record) (kept []string, err error) {
	if err := nft.RemoveRules(in.ns); err != nil {
		return nil, err
	}
	if err := in.ns.Do(func() error { return rec.endTranslated(context.Background(), nil) }); err != nil {
		kept = append(kept, fmt.Sprintf("connections that were translated, which stay so while they last: %v", err))
	}
	return kept, nil
}

func (nftEngine) create(in *instance, _ *Plan) (running, error) { return nftRunning{in.ns}, nil }
func (nftEngine) open(ns *netns.Handle) (running, error)        { return nftRunning{ns}, nil }

func (nftEngine) tables(*netns.Handle) (*datapath.Engine, error) {
	return nil, errors.New("engine nft is up here: its sessions are the kernel's, `natkit conntrack list` shows them")
}

func (nftEngine) watch(w *watcher, ns *netns.Handle) error { return w.nftables(ns) }

// plan compiles the file to a table.
func (nftEngine) plan(p *Plan, file *rulefile.File, o Options, made []Change) error {
	facts, err := nft.ReadFacts(o.Namespace)
	if err != nil {
		return err
	}
	var warnings []nft.Warning
	if p.ruleset, warnings, err = nft.CompileRules(file, facts); err != nil {
		return err
	}
	for _, w := range warnings {
		p.Warnings = append(p.Warnings, fmt.Sprintf("%s: %s", file.Name, w))
	}
	for _, name := range missing(file) {
		p.Warnings = append(p.Warnings, fmt.Sprintf("interface %s is not there: its packets are translated when it is", name))
	}
	proxies, tooMany, err := kernelProxies(file)
	if err != nil {
		return err
	}
	if tooMany != "" {
		return fmt.Errorf("%s: %s", file.Name, tooMany)
	}
	_, reserved, err := localPorts()
	if err != nil {
		return err
	}
	return p.planChanges(file, nil, proxies, reserved, made)
}

// missing are the interfaces of a file that are not there. nftables knows them by name, so
// they may come later; but a name may be mistyped as well. The calling thread is in the
// namespace.
func missing(file *rulefile.File) (names []string) {
	for _, name := range interfacesOf(file) {
		if _, err := netlink.LinkByName(name); errors.As(err, new(netlink.LinkNotFoundError)) {
			names = append(names, name)
		}
	}
	return names
}

// retrack forgets what connection tracking knows of flows that are not translated, and
// that the rules would translate: the kernel asks its NAT rules about a flow's first packet
// only, so one that goes on would stay untranslated, and a datagram between the making of
// the hooks and the rules is enough for that. A TCP connection that both ends have spoken
// on stays as it is. The calling thread is in the namespace.
func retrack(ctx context.Context, file *rulefile.File) error {
	sources, destinations := translations(file)
	var here kernelSurroundings
	_, err := conntrack.DeleteFunc(ctx, conntrack.Filter{Family: unix.AF_INET}, func(f *conntrack.Flow) bool {
		if f.SNAT() || f.DNAT() || f.Proto == unix.IPPROTO_TCP && !f.Unreplied() {
			return false
		}
		from, to := sources.of(f.Orig.Src), destinations.of(f.Orig.Dst)
		excluded := slices.ContainsFunc(from, func(r *rulefile.Rule) bool {
			a, ok := r.Action.(rulefile.Exclude)
			return ok && a.Destination.Contains(f.Orig.Dst) && isOf(f, a.Protocol, a.Ports)
		})
		if len(from)+len(to) == 0 || excluded || here.IsLocal(f.Orig.Src) {
			return false
		}
		if slices.ContainsFunc(to, func(r *rulefile.Rule) bool {
			a, ok := r.Action.(rulefile.DNAT)
			return !ok || isOf(f, a.Protocol, a.Ports)
		}) {
			return true
		}
		way := here.Egress(f.Orig.Src, f.Orig.Dst)
		return slices.ContainsFunc(from, func(r *rulefile.Rule) bool {
			return way != "" && (r.Out == way || r.Out == "" && file.IsOutside(way))
		})
	})
	return err
}

// translations are a file's rules by the prefix of the sources and of the destinations that
// they are about.
func translations(file *rulefile.File) (sources, destinations rulesByPrefix) {
	sources, destinations = rulesByPrefix{}, rulesByPrefix{}
	for i := range file.Rules {
		r := &file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.Exclude:
			sources.add(a.Source, r)
		case rulefile.Masquerade:
			sources.add(a.Source, r)
		case rulefile.SNAT:
			sources.add(a.Source, r)
		case rulefile.Map:
			sources.add(a.Inside, r)
			destinations.add(a.Outside, r)
		case rulefile.DNAT:
			destinations.add(netip.PrefixFrom(a.Address, 32), r)
		}
	}
	return sources, destinations
}

// endTranslated makes connection tracking forget the connections that the rules of the record
// have translated, but for those that a rule of the file, which may be nil, translates so as
// well: without that the kernel goes on, whatever the rules say. What others have
// translated has no label of natkit's. The calling thread is in the namespace.
func (r *record) endTranslated(ctx context.Context, file *rulefile.File) error {
	var gone []func(*conntrack.Flow) bool
	for _, text := range []*ruleText{&r.Rules, r.Next} {
		if text == nil {
			continue
		}
		if used, err := rulefile.ParseRecorded(text.File, []byte(text.Text)); err == nil {
			gone = append(gone, withoutRule(used))
		}
	}
	if len(gone) == 0 {
		return errRecord
	}
	kept := func(*conntrack.Flow) bool { return false }
	if file != nil {
		without := withoutRule(file)
		kept = func(f *conntrack.Flow) bool { return !without(f) }
	}
	_, err := conntrack.DeleteFunc(ctx, conntrack.Filter{Family: unix.AF_INET}, func(f *conntrack.Flow) bool {
		return (f.SNAT() || f.DNAT()) && f.Label(nft.LabelBit) && !kept(f) &&
			slices.ContainsFunc(gone, func(without func(*conntrack.Flow) bool) bool { return !without(f) })
	})
	return err
}

// withoutRule gives a function that reports whether no rule of the file translates as a connection
// is. To what a rule is bound, and of several targets which, may have changed: that does
// not end what goes on.
func withoutRule(file *rulefile.File) func(*conntrack.Flow) bool {
	sources, destinations := translations(file)
	var here kernelSurroundings
	return func(f *conntrack.Flow) bool {
		destined := slices.ContainsFunc(destinations.of(f.Orig.Dst), func(r *rulefile.Rule) bool {
			switch a := r.Action.(type) {
			case rulefile.DNAT:
				return isOf(f, a.Protocol, a.Ports)
			case rulefile.Map:
				return a.Inside.Contains(f.Reply.Src)
			}
			return false
		})
		hidden := slices.ContainsFunc(sources.of(f.Orig.Src), func(r *rulefile.Rule) bool {
			switch a := r.Action.(type) {
			case rulefile.Masquerade:
				return here.IsLocal(f.Reply.Dst) || f.DNAT() && f.Reply.Dst == f.Orig.Dst // hairpin
			case rulefile.SNAT:
				p := file.Pool(a.Pool)
				return a.Address == f.Reply.Dst || p != nil && p.Contains(f.Reply.Dst)
			case rulefile.Map:
				return a.Outside.Contains(f.Reply.Dst)
			}
			return false
		})
		return f.DNAT() && !destined || f.Reply.Dst != f.Orig.Src && !hidden
	}
}

// nftRunning is the kernel's NAT in a namespace, which has no tables of natkit's: what asks for
// those has nothing to do.
type nftRunning struct{ ns *netns.Handle }

// settle leaves both texts: the kernel does not say which of them it has.
func (nftRunning) settle(*record) error  { return nil }
func (nftRunning) refresh(*record) error { return nil }
func (nftRunning) fits(*Plan) error      { return nil }
func (nftRunning) Close() error          { return nil }

func (nftRunning) prepare(*Plan) (undo func() error, err error) {
	return func() error { return nil }, nil
}

func (e nftRunning) start(ctx context.Context, p *Plan) error { return e.replace(ctx, p) }

// replace also lets the rules hold for flows of before. They hold for new ones without that, so
// that it fails is no reason to undo them.
func (e nftRunning) replace(ctx context.Context, p *Plan) error {
	if err := p.ruleset.Apply(e.ns); err != nil {
		return err
	}
	if err := e.ns.Do(func() error { return retrack(ctx, p.file) }); err != nil {
		p.Warnings = append(p.Warnings, fmt.Sprintf("flows of before the rules stay untranslated while they last: %v", err))
	}
	if err := e.ns.Do(func() error { return p.record.endTranslated(ctx, p.file) }); err != nil {
		p.Warnings = append(p.Warnings, fmt.Sprintf("connections of rules that are gone stay translated while they last: %v", err))
	}
	return nil
}

func (e nftRunning) drift(d *drifting) error {
	there, err := nft.RulesThere(e.ns)
	if err != nil {
		return err
	}
	if !there {
		d.stop("somebody has removed the nftables table natkit: nothing is translated")
	}
	return d.unanswered()
}

func (e nftRunning) status(s *Status, rec *record, _ *rulefile.File) error {
	if rec.Next != nil {
		s.problem("an apply of %s was killed: %s, or the file that is meant", rec.Next.File, onFile(e.ns, "apply", rec.Next.File))
	}
	return nil
}

// uses counts what the rules were chosen for. The file is compiled again, to know which
// elements of the table are which rule's.
func (e nftRunning) uses(file *rulefile.File, rules []RuleUse) error {
	ruleset, err := e.compile(file)
	if err != nil {
		return err
	}
	uses, err := ruleset.Uses(e.ns)
	for i, u := range uses {
		n := u.Packets
		rules[i].Uses = &n
	}
	return err
}

func (e nftRunning) compile(file *rulefile.File) (nft.Ruleset, error) {
	facts, err := nft.ReadFacts(e.ns)
	if err != nil {
		return nil, err
	}
	ruleset, _, err := nft.CompileRules(file, facts)
	return ruleset, err
}

// isOf reports whether a flow is of the protocol, and to one of the ports; zero is any.
func isOf(f *conntrack.Flow, p rulefile.Protocol, ports rulefile.PortRange) bool {
	return (p == rulefile.AnyProtocol || uint8(p) == f.Proto) && (ports.IsZero() || ports.First <= f.Orig.DstPort && f.Orig.DstPort <= ports.Last)
}

// rulesByPrefix finds the rules whose prefix an address is in.
type rulesByPrefix map[netip.Prefix][]*rulefile.Rule

func (m rulesByPrefix) add(p netip.Prefix, r *rulefile.Rule) {
	m[p.Masked()] = append(m[p.Masked()], r)
}

func (m rulesByPrefix) of(a netip.Addr) (rules []*rulefile.Rule) {
	for bits := 0; bits <= 32 && a.Is4(); bits++ {
		p, _ := a.Prefix(bits)
		rules = append(rules, m[p]...)
	}
	return rules
}

// kernelProxies are the addresses of the file that nobody else has on the networks of
// its outside interfaces, and why some can't be answered for. The interfaces need not be there:
// nftables knows them by name.
func kernelProxies(file *rulefile.File) (out []datapath.ProxyNeighbour, tooMany string, err error) {
	var ranges []rulefile.AddressRange
	for i := range file.Pools {
		if !file.Pools[i].Silent {
			ranges = append(ranges, file.Pools[i].Addresses...)
		}
	}
	pooled := len(ranges) // of which each pool has as many as it may
	for i := range file.Rules {
		if !file.Rules[i].Silent {
			ranges = append(ranges, file.Rules[i].OutsideAddresses()...)
		}
	}
	local, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, "", fmt.Errorf("list addresses: %w", err)
	}
	own := func(a netip.Addr) bool {
		return slices.ContainsFunc(local, func(l netlink.Addr) bool { return l.IP.Equal(a.AsSlice()) })
	}
	known := map[datapath.ProxyNeighbour]bool{}
	for _, name := range file.Outside {
		l, err := netlink.LinkByName(name)
		if err != nil {
			continue
		}
		for _, at := range local {
			if at.LinkIndex != l.Attrs().Index {
				continue
			}
			network, err := netip.ParsePrefix(at.IPNet.String())
			if err != nil {
				return nil, "", fmt.Errorf("addresses of %q: %w", name, err)
			}
			for k, r := range ranges {
				part, ok := r.Within(rulefile.RangeOf(network))
				if !ok {
					continue
				}
				if k >= pooled && part.Count() > datapath.MaxProxies {
					tooMany = datapath.TooManyProxies(part)
					continue
				}
				for i := range part.Count() {
					n := datapath.ProxyNeighbour{Link: name, Addr: part.At(i)}
					if !own(n.Addr) && !known[n] {
						known[n] = true
						out = append(out, n)
					}
				}
			}
		}
	}
	return out, tooMany, nil
}
