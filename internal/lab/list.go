// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
)

// State is what a lab is at the moment.
type State string

const (
	StateUp      State = "up"      // stays until it is taken down
	StateOwned   State = "owned"   // ends with the process that made it
	StateMaking  State = "making"  // not complete yet
	StateRemains State = "remains" // left by a process that died
)

// Info is one lab as List shows it.
type Info struct {
	Name      string     `json:"name"`
	Topology  string     `json:"topology"`
	State     State      `json:"state"`
	PID       int        `json:"pid"` // of the process that made it
	Rules     RuleSet    `json:"rule_set"`
	Server    Server     `json:"server"`
	URL       string     `json:"url"`
	DirectURL string     `json:"direct_url"`
	Nodes     []NodeInfo `json:"nodes"`
}

// NodeInfo is one node of a lab as List shows it.
type NodeInfo struct {
	Role  string     `json:"role"`
	Netns string     `json:"netns"`
	Addr  netip.Addr `json:"address,omitzero"`
}

// List returns all labs that have a journal, sorted by name. With the error of those that
// can't be read come the others.
func List() ([]Info, error) {
	all, err := names()
	if err != nil {
		return nil, err
	}
	out := []Info{}
	var errs []error
	for _, name := range all {
		info, err := readInfo(name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case info != nil:
			out = append(out, *info)
		}
	}
	return out, errors.Join(errs...)
}

// readInfo reads a lab's journal: nil if it is gone since, or just beginning.
func readInfo(name string) (*Info, error) {
	r, err := readRecords(journalPath(name))
	if errors.Is(err, os.ErrNotExist) || err == nil && r.header == nil {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lab %q: %w", name, err)
	}
	p, err := newPlan(r.header.Topology, r.header.Options)
	if err != nil {
		return nil, fmt.Errorf("lab %q: %w", name, err)
	}
	info := p.info(name, r)
	return &info, nil
}

// Info describes the lab as List does.
func (l *Lab) Info() (Info, error) {
	r, err := readRecords(journalPath(l.name))
	if err != nil {
		return Info{}, err
	}
	return l.plan.info(l.name, r), nil
}

func (p plan) info(name string, r records) Info {
	info := Info{
		Name: name, Topology: p.topology, State: StateUp, PID: r.header.Maker.PID,
		Rules: p.options.Rules, Server: p.options.Server, URL: p.url, DirectURL: p.directURL,
	}
	switch {
	case r.remains():
		info.State = StateRemains
	case !r.complete:
		info.State = StateMaking
	case p.options.Owned:
		info.State = StateOwned
	}
	for _, n := range p.nodes {
		info.Nodes = append(info.Nodes, NodeInfo{Role: n.role, Netns: netnsName(name, n.role), Addr: n.addr})
	}
	return info
}

// PlanDown returns what taking down the labs of these names, or all, would remove,
// one thing a line; of all those that can be read, with the error of the others.
func PlanDown(which []string) ([]string, error) {
	infos, err := List()
	if len(which) > 0 {
		infos, err = nil, nil
		for _, name := range slices.Compact(slices.Sorted(slices.Values(which))) {
			if !validName.MatchString(name) {
				return nil, fmt.Errorf("lab %q: not a valid name", name)
			}
			info, err := readInfo(name)
			if err != nil {
				return nil, err
			}
			if info == nil {
				return nil, notThere(name)
			}
			infos = append(infos, *info)
		}
	}
	out := []string{}
	for _, i := range infos {
		switch {
		case i.State == StateOwned || i.State == StateMaking:
			out = append(out, fmt.Sprintf("lab %s: nothing, process %d uses it", i.Name, i.PID))
		default:
			out = append(out, fmt.Sprintf("lab %s", i.Name))
			for _, n := range i.Nodes {
				out = append(out, fmt.Sprintf("  network namespace %s", n.Netns))
			}
			if i.Server != ServerNone {
				out = append(out, fmt.Sprintf("  web server (%s)", i.Server))
			}
		}
	}
	return out, err
}
