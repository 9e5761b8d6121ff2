// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/datapath"
	"natkit/internal/netns"
	"natkit/nat"
	"natkit/nft"
)

// Status is what is up in a namespace.
type Status struct {
	Engine     Engine            `json:"engine"`
	Since      time.Time         `json:"since"`
	File       string            `json:"file"`
	Rules      int               `json:"rules"`
	Interfaces []InterfaceStatus `json:"interfaces"`
	Addresses  []AddressStatus   `json:"outside_addresses,omitempty"` // of engine ebpf
	Limits     nat.Limits        `json:"-"`
	Sessions   int               `json:"sessions_limit,omitempty"` // there can be at once
	Stats      *nat.Stats        `json:"stats,omitempty"`
	Changes    []Change          `json:"changes"`  // of the namespace, that Down puts back
	Problems   []string          `json:"problems"` // each with what to do
}

// InterfaceStatus is an interface of the rules in use.
type InterfaceStatus struct {
	Name   string   `json:"name"`
	Side   string   `json:"side"`            // inside, outside
	Hooks  []string `json:"hooks,omitempty"` // of engine ebpf, that are on it
	Reason string   `json:"reason,omitempty"`
}

// AddressStatus is an outside address of engine ebpf.
type AddressStatus struct {
	Address    netip.Addr `json:"address"`
	FirstPort  uint16     `json:"first_port,omitempty"`
	LastPort   uint16     `json:"last_port,omitempty"`
	FreeTCP    int        `json:"free_tcp"`
	FreeUDP    int        `json:"free_udp"`
	FreeICMP   int        `json:"free_icmp"`
	Masquerade bool       `json:"masquerade,omitempty"`
	OneToOne   bool       `json:"one_to_one,omitempty"`
	Leaving    bool       `json:"leaving,omitempty"` // no rule wants it; it goes with its last mapping
}

// ReadStatus reads what is up in a namespace.
func ReadStatus(ns *netns.Handle) (*Status, error) {
	rec, err := readRecord(ns.Inode())
	if err != nil {
		return nil, err
	}
	id, err := ns.ID()
	if err != nil {
		return nil, err
	}
	if id != rec.ID {
		return nil, ErrDown // of an earlier namespace with that number
	}
	s := &Status{Engine: rec.Engine, Since: rec.Since, Problems: []string{}, Changes: []Change{}}
	if !rec.Whole {
		s.Problems = append(s.Problems, errHalf.Error())
		return s, nil
	}
	if rec.Engine == EngineEBPF {
		if err := s.readEngine(ns, rec); err != nil {
			return nil, err
		}
	} else if rec.Next != nil {
		s.problem("an apply of %s was killed: `natkit apply -f %s`, or the file that is meant", rec.Next.File, rec.Next.File)
	}
	file, err := rec.rules()
	if err != nil {
		return nil, fmt.Errorf("read the rules in use: %w", err)
	}
	s.File, s.Rules, s.Limits, s.Sessions = rec.Rules.File, len(file.Rules), file.Limits, file.Limits.Sessions
	if made, err := standing(instancePath(ns.Inode(), ".journal")); err == nil {
		s.Changes = append(s.Changes, made...)
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return s, ns.Do(func() error { return s.readLinks(ns, file, rec) })
}

func (s *Status) problem(format string, args ...any) {
	s.Problems = append(s.Problems, fmt.Sprintf(format, args...))
}

// staleSweep is how old the last run of expiry may be. It comes several times a second.
const staleSweep = 5 * time.Second

func (s *Status) readEngine(ns *netns.Handle, rec *record) (err error) {
	e, err := Open(ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	generation, err := e.Generation()
	if err != nil {
		return err
	}
	rec.settle(generation)
	if s.Stats, err = e.Stats(); err != nil {
		return err
	}
	if s.Stats.SweepAge > staleSweep {
		s.problem("expiry has not run for %v: `natkit apply` of the rules in use starts it again", s.Stats.SweepAge.Round(time.Second))
	}
	if rec.Make != datapath.Make() {
		s.problem("the programs are another natkit's: `natkit apply` replaces them, and no session is lost")
	}
	for _, a := range rec.Addresses {
		out := AddressStatus{
			Address: a.Addr, FirstPort: a.Ports[0], LastPort: a.Ports[1],
			Masquerade: a.Masquerade, OneToOne: a.OneToOne, Leaving: a.Leaving,
		}
		if a.Ports[0] > 0 {
			free, err := e.FreePorts(a.Index)
			if err != nil {
				return err
			}
			out.FreeTCP, out.FreeUDP, out.FreeICMP = free[nat.ClassTCP], free[nat.ClassUDP], free[nat.ClassICMP]
		}
		s.Addresses = append(s.Addresses, out)
	}
	return nil
}

// readLinks tells where the engine meets packets, and what has changed since it was
// told about the interfaces. The calling thread is in the namespace.
func (s *Status) readLinks(ns *netns.Handle, file *nat.File, rec *record) error {
	var attached map[int][]datapath.Hook
	if rec.Engine == EngineEBPF {
		root, err := datapath.Root(runDir())
		if err != nil {
			return err
		}
		if attached, err = datapath.Attached(datapath.InstanceDir(root, ns.Inode())); err != nil {
			return err
		}
	}
	again := "`natkit apply` of the rules in use does"
	for _, name := range append(slices.Clone(file.Inside), file.Outside...) {
		out := InterfaceStatus{Name: name, Side: "outside"}
		if file.IsInside(name) {
			out.Side = "inside"
		}
		l, err := netlink.LinkByName(name)
		if err != nil {
			s.problem("interface %s is gone; when it is back, it needs attaching: %s", name, again)
			s.Interfaces = append(s.Interfaces, out)
			continue
		}
		for _, h := range attached[l.Attrs().Index] {
			out.Hooks = append(out.Hooks, string(h))
		}
		slices.Sort(out.Hooks)
		if i := slices.IndexFunc(rec.Rules.Placements, func(p Placement) bool { return p.Interface == name }); i >= 0 {
			out.Reason = rec.Rules.Placements[i].Reason
		}
		known := slices.IndexFunc(rec.Links, func(r linkRecord) bool { return r.Name == name })
		switch {
		case rec.Engine != EngineEBPF:
		case known >= 0 && rec.Links[known].Ifindex != l.Attrs().Index:
			s.problem("interface %s was made anew and carries no program: %s", name, again)
		case l.Attrs().Flags&1 == 0:
			s.problem("interface %s is down", name)
		}
		if rec.Engine == EngineEBPF {
			if err := s.checkMasquerade(l, rec); err != nil {
				return err
			}
		}
		s.Interfaces = append(s.Interfaces, out)
	}
	return nil
}

// checkMasquerade finds an address that an interface no longer has.
func (s *Status) checkMasquerade(l netlink.Link, rec *record) error {
	known := slices.IndexFunc(rec.Links, func(r linkRecord) bool { return r.Name == l.Attrs().Name })
	for _, a := range rec.Addresses {
		if !a.Masquerade || a.Leaving || known < 0 || a.Link != rec.Links[known].Index {
			continue
		}
		have, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			return fmt.Errorf("addresses of %q: %w", l.Attrs().Name, err)
		}
		if !slices.ContainsFunc(have, func(h netlink.Addr) bool { return h.IP.Equal(a.Addr.AsSlice()) }) {
			s.problem("interface %s no longer has the address %s that it masquerades behind: `natkit apply` of the rules in use follows it", l.Attrs().Name, a.Addr)
		}
	}
	return nil
}

// RuleUse is a rule in use, and what of it can be counted.
type RuleUse struct {
	ID       uint32  `json:"id"` // as sessions give it
	Rule     string  `json:"rule"`
	Line     int     `json:"line"`
	Sessions *int    `json:"sessions,omitempty"` // now; engine ebpf
	Uses     *uint64 `json:"uses,omitempty"`     // since it was applied; engine nft
}

// Rules lists the rules in use with their use.
func Rules(ns *netns.Handle) ([]RuleUse, error) {
	file, rec, err := InUse(ns)
	if err != nil {
		return nil, err
	}
	out := make([]RuleUse, len(file.Rules))
	for i := range file.Rules {
		r := &file.Rules[i]
		out[i] = RuleUse{ID: datapath.RuleID(r), Rule: r.String(), Line: r.Position.Line}
	}
	if rec == EngineNFT {
		return out, countNFT(ns, file, out)
	}
	e, err := Open(ns)
	if err != nil {
		return nil, err
	}
	sessions := map[uint32]int{}
	err = e.Sessions(func(s *nat.Session) bool {
		if s.State != "dead" {
			sessions[s.Rule]++
		}
		return true
	})
	for i := range out {
		n := sessions[out[i].ID]
		out[i].Sessions = &n
	}
	return out, errors.Join(err, e.Close())
}

func countNFT(ns *netns.Handle, file *nat.File, out []RuleUse) error {
	facts, err := nft.ReadFacts(ns)
	if err != nil {
		return err
	}
	ruleset, _, err := nft.CompileRules(file, facts)
	if err != nil {
		return err
	}
	uses, err := ruleset.Uses(ns)
	for i, u := range uses {
		n := u.Packets
		out[i].Uses = &n
	}
	return err
}

// InUse is the file whose rules are in use, and the engine.
func InUse(ns *netns.Handle) (*nat.File, Engine, error) {
	rec, err := readRecord(ns.Inode())
	if err != nil {
		return nil, "", err
	}
	if rec.Engine == EngineEBPF {
		e, err := Open(ns)
		if err != nil {
			return nil, "", err
		}
		generation, err := e.Generation()
		if err := errors.Join(err, e.Close()); err != nil {
			return nil, "", err
		}
		rec.settle(generation)
	}
	file, err := rec.rules()
	if err != nil {
		return nil, "", fmt.Errorf("read the rules in use: %w", err)
	}
	return file, rec.Engine, nil
}
