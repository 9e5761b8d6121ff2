// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Options says how to run a rule file.
type Options struct {
	Namespace *netns.Handle
	Engine    Engine // "" is defaultEngine; Apply keeps the one that is up
	Attach    Attach // "" is AttachAuto, or with Apply what it was
	Bypass    bool   // go past what the stack does with forwarded packets
	// Wait for interfaces of engine ebpf that are not there, or have no address to
	// masquerade behind, instead of refusing the file: Serve does.
	Wait bool
	// Chains are the filter chains of the namespace, to tell what is gone past.
	Chains []snapshot.Chain

	serve  *serving // whose instance it is; nil is nobody's
	follow bool     // the same rules on a machine that has changed: what they go past was accepted
}

// Plan is what Up or Apply would do, and why.
type Plan struct {
	Engine      Engine      `json:"engine"`
	Rules       int         `json:"rule_count"`
	Added       []string    `json:"added,omitempty"`            // rules that are not in use
	Removed     []string    `json:"removed,omitempty"`          // rules in use that are not in the file
	Set         []string    `json:"settings_added,omitempty"`   // other lines of the file that are not in use
	Unset       []string    `json:"settings_removed,omitempty"` // other lines in use that are not in the file
	Placements  []Placement `json:"interfaces,omitempty"`
	Detached    []string    `json:"detached,omitempty"` // interfaces in use that are not in the file
	Addresses   int         `json:"external_address_count,omitempty"`
	MemoryBytes int64       `json:"memory_bytes,omitempty"` // of the kernel, for the limits of the file
	Changes     []Change    `json:"changes,omitempty"`
	Undone      []Change    `json:"undone_changes,omitempty"` // changes of before that are not needed any more
	Awaited     []string    `json:"awaited,omitempty"`        // interfaces that are not there, or without an IPv4 address
	Unaddressed []string    `json:"unaddressed,omitempty"`    // those of them that are there
	Upgrade     bool        `json:"upgrade,omitempty"`        // programs of another natkit are replaced
	Bypassed    []Bypassed  `json:"bypassed,omitempty"`
	Warnings    []string    `json:"warnings,omitempty"`

	file    *rulefile.File
	tables  *datapath.Tables // of engine ebpf, with their size
	size    datapath.Size
	ruleset nft.Ruleset // of engine nft
	record  *record     // as it is to be
}

// MakePlan plans what Up would do in a namespace that has no engine, and changes nothing.
func MakePlan(file *rulefile.File, text string, o Options) (*Plan, error) {
	if err := vacant(o.Namespace, o.serve); err != nil {
		return nil, err
	}
	rec, err := newRecord(o)
	if err != nil {
		return nil, err
	}
	return makePlan(rec, file, text, o, nil)
}

// PlanApply plans what Apply would do, and changes nothing.
func PlanApply(file *rulefile.File, text string, o Options) (_ *Plan, err error) {
	inode := o.Namespace.Inode()
	rec, err := ofEngine(recordOf(o.Namespace))
	if err == nil && !rec.Whole {
		err = rec.half(o.Namespace)
	}
	if err != nil {
		return nil, err
	}
	made, err := standing(instancePath(inode, ".journal"))
	if err != nil {
		return nil, err
	}
	e, err := rec.open(o.Namespace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := e.refresh(rec); err != nil {
		return nil, err
	}
	p, err := makePlan(rec, file, text, o, made)
	if err == nil {
		err = e.fits(p)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// makePlan plans to go on from what the record says, with the changes of the namespace
// that the instance has made.
func makePlan(rec *record, file *rulefile.File, text string, o Options, made []Change) (_ *Plan, err error) {
	p := &Plan{Engine: rec.Engine, record: rec, file: file, Rules: len(file.Rules)}
	if o.Attach != "" {
		rec.Attach = o.Attach
	}
	if rec.Whole {
		p.compare(file)
	}
	rec.Next = &ruleText{File: file.Name, Text: text, inForce: rec.Rules.next(text)}
	for _, w := range file.Warnings() {
		p.Warnings = append(p.Warnings, w.String())
	}
	err = o.Namespace.Do(func() error {
		if err := refuseAlternatives(file); err != nil {
			return err
		}
		found, err := overlaps(file)
		if err != nil {
			return err
		}
		p.Warnings = append(p.Warnings, found...)
		return rec.Engine.rules().plan(p, file, o, made)
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

func newRecord(o Options) (*record, error) {
	id, err := o.Namespace.ID()
	if err != nil {
		return nil, err
	}
	return &record{
		Engine: cmp.Or(o.Engine, defaultEngine), Namespace: o.Namespace.Name(), ID: id, Attach: AttachAuto, Since: time.Now(),
	}, nil
}

// compare says which rules and settings come and go. A rule is its text.
func (p *Plan) compare(file *rulefile.File) {
	used, err := p.record.rules()
	if err != nil {
		return // of another natkit's language: everything is new
	}
	texts := func(f *rulefile.File) (out []string) {
		for i := range f.Rules {
			out = append(out, f.Rules[i].String())
		}
		return out
	}
	p.Added, p.Removed = without(texts(file), texts(used)), without(texts(used), texts(file))
	p.Set, p.Unset = without(file.Settings(), used.Settings()), without(used.Settings(), file.Settings())
}

// without gives those of a that are not in b.
func without(a, b []string) (out []string) {
	have := make(map[string]bool, len(b))
	for _, s := range b {
		have[s] = true
	}
	for _, s := range a {
		if !have[s] {
			out = append(out, s)
		}
	}
	return out
}

// planChanges plans what an instance needs of its namespace besides what it has made,
// and what it does not need any more. The calling thread is in the namespace.
func (p *Plan) planChanges(file *rulefile.File, reserve datapath.PortList, proxies []datapath.ProxyNeighbour, reserved datapath.PortList, made []Change) error {
	var errs []error
	add := func(name, value, reason string, ifindex int) {
		c, err := settingChange(name, value, reason)
		errs = append(errs, err)
		if c != nil {
			c.Ifindex = ifindex
			p.Changes = append(p.Changes, *c)
		}
	}
	for _, l := range redirecting(file) {
		add(redirectSetting(l.Name), "0", "internal hosts would be sent past the gateway, to the next router on the same interface, and go there untranslated", l.Ifindex)
	}
	add(settingForward, "1", "without it the kernel neither forwards packets nor sends ICMP errors to their senders", 0)
	if last := len(p.Changes) - 1; last >= 0 && p.Changes[last].Setting == settingForward {
		var err error
		p.Changes[last].Keep, err = keptFromForwarding()
		errs = append(errs, err)
	}
	// Ports that an earlier file of this instance wanted left alone need not be any more.
	others, err := reservedByOthers(reserved, made)
	errs = append(errs, err)
	if want := others.With(reserve...).String(); want != reserved.String() {
		add(settingReservedPorts, want, "the gateway's own connections leave alone the ports that the rules give away", 0)
	}
	warnings, err := foreign(proxies)
	errs = append(errs, err)
	p.Warnings = append(p.Warnings, warnings...)
	have, err := proxied()
	errs = append(errs, err)
	routes, err := hostRoutes()
	errs = append(errs, err)
	for _, n := range proxies {
		if !routes[n.Addr] && !file.KeepsAddress(n.Addr) {
			p.Changes = append(p.Changes, Change{Kind: changeRoute, Interface: "lo", Address: n.Addr, Reason: "the kernel answers ARP only for what it would not find on " + n.Link + " itself"})
		}
		if !slices.Contains(have, n) {
			l, err := netlink.LinkByName(n.Link)
			if err != nil {
				errs = append(errs, fmt.Errorf("interface %q: %w", n.Link, err))
				continue
			}
			p.Changes = append(p.Changes, Change{Kind: changeNeighbour, Interface: n.Link, Ifindex: l.Attrs().Index, Address: n.Addr, Reason: "nobody else has the address on that network"})
		}
	}
	for _, c := range made {
		wanted := slices.ContainsFunc(proxies, func(n datapath.ProxyNeighbour) bool {
			return n.Addr == c.Address && (n.Link == c.Interface || c.Kind == changeRoute && !file.KeepsAddress(n.Addr))
		})
		if c.Kind != changeSetting && !wanted {
			p.Undone = append(p.Undone, c)
		}
	}
	return errors.Join(errs...)
}

// reservedByOthers are the reserved ports without those that these changes have reserved.
func reservedByOthers(reserved datapath.PortList, made []Change) (datapath.PortList, error) {
	var own datapath.PortList
	for _, c := range made {
		if c.Setting != settingReservedPorts {
			continue
		}
		before, err1 := datapath.ParsePortList(c.Old)
		after, err2 := datapath.ParsePortList(c.New)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		own = own.Without(before.Without(after...)...).With(after.Without(before...)...)
	}
	return reserved.Without(own...), nil
}

// redirecting are the interfaces that would send hosts past a gateway with one of them, with their indices, then "all":
// either of the two is enough to send redirects. The calling thread is in the namespace.
func redirecting(file *rulefile.File) (links []linkRecord) {
	for _, name := range file.OneArmed() {
		if l, err := netlink.LinkByName(name); err == nil {
			links = append(links, linkRecord{Name: name, Ifindex: l.Attrs().Index})
		}
	}
	if len(file.OneArmed()) > 0 {
		links = append(links, linkRecord{Name: "all"})
	}
	return links
}

// redirectSetting is by which an interface sends ICMP redirects; a dot of its name is a slash,
// as sysctl has it.
func redirectSetting(link string) string {
	return "net.ipv4.conf." + strings.ReplaceAll(link, ".", "/") + ".send_redirects"
}

// proxied lists the addresses that are answered for already.
func proxied() (out []datapath.ProxyNeighbour, err error) {
	neighbours, err := netlink.NeighListExecute(netlink.Ndmsg{Family: netlink.FAMILY_V4, Flags: netlink.NTF_PROXY})
	if err != nil {
		return nil, fmt.Errorf("list proxy neighbours: %w", err)
	}
	for _, n := range neighbours {
		l, err := netlink.LinkByIndex(n.LinkIndex)
		if err != nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(n.IP.To4()); ok {
			out = append(out, datapath.ProxyNeighbour{Link: l.Attrs().Name, Addr: addr})
		}
	}
	return out, nil
}

// hostRoutes lists the addresses that have a route of their own.
func hostRoutes() (map[netip.Addr]bool, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	out := map[netip.Addr]bool{}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(r.Dst.IP.To4()); ok && len(r.Dst.Mask) == 4 && r.Dst.Mask[3] == 255 {
			out[addr] = true
		}
	}
	return out, nil
}

// refusal is the error for what a plan goes past and nobody has accepted.
func (p *Plan) refusal(o Options) error {
	if o.follow {
		return nil
	}
	var open []Bypassed
	for _, b := range p.Bypassed {
		if !slices.Contains(p.record.Accepted, b) {
			open = append(open, b)
		}
	}
	if len(open) > 0 && !o.Bypass {
		return &BypassError{Packets: "packets of engine ebpf do not go through the stack", Otherwise: ", or use --engine nft", Bypassed: open}
	}
	p.record.Accepted = p.Bypassed
	return nil
}
