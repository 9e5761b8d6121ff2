// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Status is what is up in a namespace.
type Status struct {
	Engine     Engine            `json:"engine"`
	Since      time.Time         `json:"since"`
	File       string            `json:"file"`
	Rules      int               `json:"rule_count"`
	Interfaces []InterfaceStatus `json:"interfaces"`
	Addresses  []AddressStatus   `json:"external_addresses,omitempty"` // of engine ebpf
	Pools      []PoolStatus      `json:"pools,omitempty"`              // likewise
	Limits     rulefile.Limits   `json:"-"`
	Sessions   int               `json:"sessions_max,omitempty"` // there can be at once
	Stats      *rulefile.Stats   `json:"stats,omitempty"`
	Serve      *ServeState       `json:"serve,omitempty"` // the natkit serve that keeps it
	Changes    []Change          `json:"changes"`         // of the namespace, that Down puts back
	Problems   []string          `json:"problems"`        // each with what to do

	drift []Drift
	file  *rulefile.File
	text  string // of the file

	attached map[int][]datapath.Hook // programs, by interface
	flags    []string                // of the record

	books *books // of engine ebpf
	quick bool   // subscribers are not read, of which there may be many
}

// InterfaceStatus is an interface of the rules in use.
type InterfaceStatus struct {
	Name   string   `json:"name"`
	Side   string   `json:"side"`                     // inside, outside, both
	Hooks  []string `json:"attached_hooks,omitempty"` // of engine ebpf, that are on it
	Reason string   `json:"reason,omitempty"`
}

// AddressStatus is an external address of engine ebpf.
type AddressStatus struct {
	Address    netip.Addr `json:"address,omitzero"`
	FirstPort  uint16     `json:"min_port,omitempty"`
	LastPort   uint16     `json:"max_port,omitempty"`
	Ports      int        `json:"usable_ports,omitempty"` // of these, that internal hosts can have: the rest is the gateway's own connections'
	FreeTCP    int        `json:"free_tcp"`
	FreeUDP    int        `json:"free_udp"`
	FreeICMP   int        `json:"free_icmp"`
	Masquerade bool       `json:"masquerade,omitempty"`
	OneToOne   bool       `json:"one_to_one,omitempty"`
	Leaving    bool       `json:"draining,omitempty"`         // no rule wants it; it goes with its last mapping
	Drains     bool       `json:"drained_by_rules,omitempty"` // key drain of its pool: nothing new is given from it
	Sessions   *int       `json:"sessions,omitempty"`         // of an address that is drained, or that no rule wants
	// EndsIn is when the last of these ends, if nothing more is sent in them.
	EndsIn *snapshot.Seconds `json:"last_session_ends_in_s,omitempty"`
}

// ReadStatus reads what is up in a namespace.
func ReadStatus(ns *netns.Handle) (*Status, error) { return readStatus(ns, false) }

// readStatus is ReadStatus; quick: without subscribers.
func readStatus(ns *netns.Handle, quick bool) (*Status, error) {
	serve, err := served(ns.Inode())
	if err != nil {
		return nil, err
	}
	rec, err := ofEngine(recordOf(ns))
	if errors.Is(err, ErrDown) && serve != nil && serve.Starting {
		err = serve.starting()
	}
	if err != nil {
		return nil, err
	}
	s := &Status{Engine: rec.Engine, Since: rec.Since, Serve: serve, Problems: []string{}, Changes: []Change{}, flags: rec.flags(), quick: quick}
	if !rec.Whole {
		why := rec.half(ns)
		if serve != nil && serve.Starting {
			why = serve.starting()
		}
		s.Problems = append(s.Problems, why.Error())
		return s, nil
	}
	e, err := rec.open(ns)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	if err := e.settle(rec); err != nil {
		return nil, err
	}
	file, err := rec.rules()
	if err != nil {
		return nil, fmt.Errorf("read the rules in use: %w", err)
	}
	if err := e.status(s, rec, file); err != nil {
		return nil, err
	}
	s.File, s.Rules, s.Limits, s.Sessions = rec.Rules.File, len(file.Rules), file.Limits, file.Limits.Sessions
	made, err := standing(instancePath(ns.Inode(), ".journal"))
	if err != nil {
		return nil, err
	}
	s.Changes = append(s.Changes, made...)
	drift, err := driftOf(ns, rec, file, e, made)
	if err != nil {
		return nil, err
	}
	s.drift, s.file, s.text = drift, file, rec.Rules.Text
	s.tell(ns, drift)
	return s, ns.Do(func() error {
		found, err := overlaps(file)
		for _, what := range found {
			s.problem("%s: give one side other addresses", what)
		}
		return errors.Join(err, s.readLinks(file, rec), s.checkLinks(file))
	})
}

// tell makes problems of what has changed on the machine, with who does something about it.
func (s *Status) tell(ns *netns.Handle, drift []Drift) {
	apply, serve := onFile(ns, "apply", s.File), onFile(ns, "serve", s.File, s.flags...)
	for _, d := range drift {
		switch {
		case s.Serve == nil && d.Waits:
			s.problem("%s: when it is back, %s follows; %s does so by itself", d.What, apply, serve)
		case s.Serve == nil:
			s.problem("%s: %s follows; %s does so by itself", d.What, apply, serve)
		case d.Waits:
			s.problem("%s: natkit serve waits for it", d.What)
		default:
			s.problem("%s: natkit serve follows", d.What)
		}
	}
	if s.Serve != nil && s.Serve.Error != "" {
		s.problem("natkit serve keeps the rules as they were: %s", s.Serve.Error)
	}
}

func (s *Status) problem(format string, args ...any) {
	s.Problems = append(s.Problems, fmt.Sprintf(format, args...))
}

// readAddresses reads what the external addresses have left. One that is just being
// added, or forgotten, is left out.
func readAddresses(e *datapath.Engine, rec *record) ([]AddressStatus, error) {
	all, err := readPorts(e, rec)
	if err != nil {
		return nil, err
	}
	return all, remaining(e, all)
}

// readPorts reads all that is known of external addresses without a look at sessions.
func readPorts(e *datapath.Engine, rec *record) (all []AddressStatus, err error) {
	for _, a := range rec.Addresses {
		out := AddressStatus{
			Address: a.Addr, FirstPort: a.Ports[0], LastPort: a.Ports[1],
			Masquerade: a.Masquerade, OneToOne: a.OneToOne, Leaving: a.Leaving, Drains: a.Draining,
		}
		if a.Ports[0] > 0 {
			free, err := e.FreePorts(a.Index)
			if errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			out.Ports = int(a.Ports[1]) - int(a.Ports[0]) + 1 - len(a.Reserved)
			out.FreeTCP, out.FreeUDP, out.FreeICMP = free[rulefile.ClassTCP], free[rulefile.ClassUDP], free[rulefile.ClassICMP]
		}
		all = append(all, out)
	}
	return all, nil
}

// remaining counts the sessions of addresses that get no new ones.
func remaining(e *datapath.Engine, all []AddressStatus) error {
	of := map[netip.Addr]*AddressStatus{}
	for i := range all {
		if a := &all[i]; a.Leaving || a.Drains {
			a.Sessions, a.EndsIn = new(int), new(snapshot.Seconds)
			of[a.Address] = a
		}
	}
	if len(of) == 0 {
		return nil
	}
	return e.Sessions(func(s *rulefile.Session) bool {
		a := of[s.SourceAfter.Addr()]
		if a == nil || s.Source.Addr() == s.SourceAfter.Addr() {
			a = of[s.Destination.Addr()] // a stranger's, to a mapping
		}
		if a != nil && s.State != rulefile.StateDead {
			*a.Sessions++
			*a.EndsIn = max(*a.EndsIn, s.Expires)
		}
		return true
	})
}

// readLinks reports where the engine meets packets. The calling thread is in the namespace.
func (s *Status) readLinks(file *rulefile.File, rec *record) error {
	for _, name := range interfacesOf(file) {
		out := InterfaceStatus{Name: name, Side: "outside"}
		if file.IsInside(name) {
			out.Side = "inside"
			if file.IsOutside(name) {
				out.Side = "both"
			}
		}
		if i := slices.IndexFunc(rec.Rules.Placements, func(p Placement) bool { return p.Interface == name }); i >= 0 {
			out.Reason = rec.Rules.Placements[i].Reason
		}
		if l, err := netlink.LinkByName(name); err == nil {
			hooks, err := datapath.Hooks(s.attached, l.Attrs().Index)
			if err != nil {
				return err
			}
			for _, h := range hooks {
				out.Hooks = append(out.Hooks, string(h))
			}
		}
		s.Interfaces = append(s.Interfaces, out)
	}
	return nil
}

// checkLinks finds interfaces that carry no packets, where that is not drift already. The
// calling thread is in the namespace.
func (s *Status) checkLinks(file *rulefile.File) error {
	down, err := linksDown(file)
	for _, d := range down {
		if !slices.ContainsFunc(s.Problems, func(p string) bool { return strings.HasPrefix(p, "interface "+d.name+" ") }) {
			s.problem("%s: its packets are translated when that is over", d)
		}
	}
	return err
}

// RuleUse is a rule in use, and what of it can be counted.
type RuleUse struct {
	ID       rulefile.RuleID `json:"rule_id"` // as sessions give it
	Rule     string          `json:"rule"`
	Line     int             `json:"line"`
	Sessions *int            `json:"sessions,omitempty"` // now; engine ebpf
	Uses     *uint64         `json:"uses,omitempty"`     // since it was applied; engine nft
}

// Rules lists the rules in use with their use.
func Rules(ns *netns.Handle) ([]RuleUse, error) {
	rec, file, err := inUse(ns)
	if err != nil {
		return nil, err
	}
	out := make([]RuleUse, len(file.Rules))
	ids := file.RuleIDs()
	for i := range file.Rules {
		r := &file.Rules[i]
		out[i] = RuleUse{ID: ids[i], Rule: r.String(), Line: r.Position.Line}
	}
	e, err := rec.open(ns)
	if err != nil {
		return nil, err
	}
	return out, errors.Join(e.uses(file, out), e.Close())
}

// inUse reads the record of an engine, and the file whose rules are in use.
func inUse(ns *netns.Handle) (*record, *rulefile.File, error) {
	rec, err := readSettled(ns)
	if err != nil {
		return nil, nil, err
	}
	file, err := rec.rules()
	if err != nil {
		return nil, nil, fmt.Errorf("read the rules in use: %w", err)
	}
	return rec, file, nil
}

// readSettled reads the record of an engine, with the rules that it has.
func readSettled(ns *netns.Handle) (*record, error) {
	rec, err := ofEngine(recordOf(ns))
	if err != nil {
		return rec, err
	}
	e, err := rec.open(ns)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(e.settle(rec), e.Close()); err != nil {
		return nil, err
	}
	return rec, nil
}
