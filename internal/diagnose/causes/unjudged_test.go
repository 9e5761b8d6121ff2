// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"maps"
	"slices"
	"testing"

	"natkit/internal/snapshot"
)

// blind takes out of a Snapshot what a source gives.
var blind = map[string]func(s *snapshot.Snapshot){
	snapshot.CanConntrack: func(s *snapshot.Snapshot) {
		ct := s.Conntrack
		ct.Count, ct.CountStart, ct.Max, ct.Buckets = 0, 0, 0, 0
	},
	snapshot.CanConntrackStats: func(s *snapshot.Snapshot) { s.Conntrack.Stats = nil },
	snapshot.CanConntrackDump:  func(s *snapshot.Snapshot) { s.Conntrack.Table = nil },
	snapshot.CanRefused:        func(s *snapshot.Snapshot) { s.Conntrack.Refused = nil },
	snapshot.CanSysctls:        func(s *snapshot.Snapshot) { s.Sysctls = nil },
	snapshot.CanCounters:       func(s *snapshot.Snapshot) { s.Counters = nil },
	snapshot.CanCPUs:           func(s *snapshot.Snapshot) { s.CPUs = nil },
	snapshot.CanSoftirqWait: func(s *snapshot.Snapshot) {
		for i := range s.CPUs {
			s.CPUs[i].KsoftirqdRuns, s.CPUs[i].KsoftirqdWait = nil, nil
		}
	},
	snapshot.CanInterfaces: func(s *snapshot.Snapshot) { s.Interfaces = nil },
	snapshot.CanQdiscs: func(s *snapshot.Snapshot) {
		for i := range s.Interfaces {
			s.Interfaces[i].Qdisc = nil
		}
	},
	snapshot.CanNICs: func(s *snapshot.Snapshot) {
		for i := range s.Interfaces {
			s.Interfaces[i].NIC = nil
		}
	},
	snapshot.CanNeighbours:     func(s *snapshot.Snapshot) { s.Neighbours = nil },
	snapshot.CanXfrm:           func(s *snapshot.Snapshot) { s.Xfrm = nil },
	snapshot.CanRoutes:         func(s *snapshot.Snapshot) { s.Routes = nil },
	snapshot.CanNFTables:       func(s *snapshot.Snapshot) { withoutChains(s, "nft") },
	snapshot.CanIPTablesLegacy: func(s *snapshot.Snapshot) { withoutChains(s, "iptables-legacy") },
	snapshot.CanSets:           func(s *snapshot.Snapshot) { s.Sets = nil },
	snapshot.CanListeners:      func(s *snapshot.Snapshot) { s.Listeners = nil },
	snapshot.CanLocalPorts:     func(s *snapshot.Snapshot) { s.LocalPorts = nil },
	snapshot.CanProcessNames:   func(*snapshot.Snapshot) {},
	snapshot.CanEventSockets:   func(s *snapshot.Snapshot) { s.EventSockets = nil },
	snapshot.CanKernelLog:      func(s *snapshot.Snapshot) { s.KernelLog = nil },
	snapshot.CanLeaving:        func(s *snapshot.Snapshot) { s.Leaving = nil },
	snapshot.CanFrames:         func(s *snapshot.Snapshot) { s.Frames = nil },
	snapshot.CanDrops:          func(s *snapshot.Snapshot) { s.Drops = nil },
	snapshot.CanHooks:          func(s *snapshot.Snapshot) { s.Hooks = nil },
	snapshot.CanEngine:         func(s *snapshot.Snapshot) { s.Engine = nil },
	snapshot.CanLog:            func(s *snapshot.Snapshot) { s.Log = nil },
	snapshot.CanOwners:         func(s *snapshot.Snapshot) { s.Owners = nil },
}

func withoutChains(s *snapshot.Snapshot, backend string) {
	s.Chains = slices.DeleteFunc(s.Chains, func(c snapshot.Chain) bool { return c.Backend == backend })
	if len(s.Chains) == 0 {
		s.Chains = nil
	}
}

// without are the capabilities of who can read everything but some sources.
func without(names ...string) (out []snapshot.Capability) {
	for name := range blind {
		out = append(out, snapshot.Capability{Name: name, OK: !slices.Contains(names, name)})
	}
	return out
}

// What is said of a cause's sources is what it does: with those that decide it finds its
// example, and without one of them it does not.
func TestDecisiveSources(t *testing.T) {
	for _, c := range Catalogue() {
		for name, close := range blind {
			s := gateway()
			examples[c.Code](s)
			close(s)
			s.Capabilities = without(name)
			alone := slices.ContainsFunc(decisive(&c), func(g []string) bool { return slices.Equal(g, []string{name}) })
			// Of several the example may show it by this one.
			several := slices.ContainsFunc(decisive(&c), func(g []string) bool { return len(g) > 1 && slices.Contains(g, name) })
			has := found(Judge(s), c.Code)
			if has == alone && !several {
				t.Errorf("%s without %s: found %v, said to decide %v", c.Code, name, has, alone)
			}
			unjudged := slices.ContainsFunc(NotJudged(s, nil), func(u Unjudged) bool { return u.Code == c.Code && slices.Contains(u.Lacks, name) })
			if unjudged != alone {
				t.Errorf("%s without %s: told as not judged %v", c.Code, name, unjudged)
			}
		}
		for _, group := range decisive(&c) {
			s := gateway()
			examples[c.Code](s)
			for _, name := range group {
				blind[name](s)
			}
			s.Capabilities = without(group...)
			if found(Judge(s), c.Code) || len(c.lacks(s)) == 0 {
				t.Errorf("%s without all of %v: found, or not told as not judged", c.Code, group)
			}
			for i := range s.Capabilities {
				s.Capabilities[i].Waived = true
			}
			if len(c.lacks(s)) > 0 {
				t.Errorf("%s: what is waived is missed", c.Code)
			}
			for _, name := range group {
				if !slices.Contains(c.Needs, name) {
					t.Errorf("%s: %s decides and is not among its needs", c.Code, name)
				}
			}
		}
	}
}

// Who can see nothing has judged nothing.
func TestNothingSeen(t *testing.T) {
	s := &snapshot.Snapshot{Capabilities: without(slices.Collect(maps.Keys(blind))...)}
	if n := len(NotJudged(s, Judge(s))); n != len(Catalogue()) {
		t.Errorf("%d of %d causes are told as not judged", n, len(Catalogue()))
	}
	if n := len(NotJudged(&snapshot.Snapshot{}, nil)); n != len(Catalogue()) {
		t.Errorf("%d of %d causes are told as not judged where nothing was read", n, len(Catalogue()))
	}
	s = gateway()
	s.Capabilities = without()
	if n := len(NotJudged(s, nil)); n > 0 {
		t.Errorf("%d causes of a machine that could be seen whole", n)
	}
}
