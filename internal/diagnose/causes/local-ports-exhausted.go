// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Sockets that are bound without a connection take ports that are not seen here, so
	// the last ones are not waited for.
	localPortsOut  = 0.98
	localPortsNear = 0.80
	// widestLow is where the widest port range begins that needs no privilege.
	widestLow = 1024
)

var localPortsExhausted = Cause{
	Code:     "local-ports-exhausted",
	Title:    "A program on this machine has no local port left towards one destination",
	Headline: "Cannot assign requested address: a proxy has no free local port",
	Search: []string{
		"Cannot assign requested address",
		"connect() failed (99: Cannot assign requested address)",
		"EADDRNOTAVAIL",
		"net.ipv4.ip_local_port_range",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{level(localPortsNear, "of the local ports in use")},
	Needs:         []string{snapshot.CanLocalPorts, snapshot.CanSysctls, snapshot.CanListeners, snapshot.CanProcessNames},
	Symptom:       `A proxy (docker-proxy, haproxy, nginx, envoy, a load generator) sometimes fails to reach its backend with "Cannot assign requested address", under load; others reach it. No packet is lost, because none is sent.`,
	Proof:         fmt.Sprintf("TCP connections of local programs from one address to one destination hold %s or more of the unreserved ports of net.ipv4.ip_local_port_range (a warning), from %s critical. Connections in TIME_WAIT count if their ports may not be reused (net.ipv4.tcp_tw_reuse).", percent.Whole(localPortsNear), percent.Whole(localPortsOut)),
	FalsePositive: "As many connections to several destinations, which may share ports; connections that local programs accept; forwarded flows, whose ports NAT allocates (snat-ports-exhausted).",
	Cure:          "Widen the port range, free the ports of closed connections sooner, reuse connections (keep-alive), or add addresses to the backend or to this machine. For published ports of Docker: disable the userland proxy.",
	judge:         judgeLocalPorts,
}

func judgeLocalPorts(f facts) *verdict {
	low, high, ok := f.localPortRange()
	if !ok {
		return nil
	}
	reserved, known := countPorts(f.Sysctls["net.ipv4.ip_local_reserved_ports"], low, high)
	room := high - low + 1 - reserved
	if !known || room == 0 {
		return nil
	}
	var worst snapshot.LocalPortUse
	var held uint64
	for _, u := range f.LocalPorts {
		if u.Used > math.MaxUint16 || u.TimeWait > u.Used || !u.Source.IsValid() || !u.Dest.IsValid() {
			continue
		}
		taken := u.Used
		if f.portsUsedAgain(u) {
			taken -= u.TimeWait
		}
		if taken > held {
			worst, held = u, taken
		}
	}
	used := share(held, room)
	if used < f.full(localPortsNear) {
		return nil
	}
	v := &verdict{impact: used}
	v.Severity = Warning
	v.Title = fmt.Sprintf("connections from %s to %s hold %s of the local ports", worst.Source, worst.Dest, percent.Whole(used))
	if used >= localPortsOut {
		v.Severity = Critical
		v.Title = fmt.Sprintf("no local port left for connections from %s to %s", worst.Source, worst.Dest)
	}
	if worst.Process != "" {
		v.Title += " (" + worst.Process + ")"
	}
	v.Evidence = []Evidence{
		{"ports in use by connections", fmt.Sprintf("%d of %d", held, room), fromOwnTCP},
		{"of them closed, in TIME_WAIT", strconv.FormatUint(worst.TimeWait-(worst.Used-held), 10), fromOwnTCP},
		{"net.ipv4.ip_local_port_range", fmt.Sprintf("%d %d", low, high), fromSettings},
	}
	if reserved > 0 {
		v.Evidence = append(v.Evidence, Evidence{"reserved ports in that range", strconv.FormatUint(reserved, 10), fromSettings + ": ip_local_reserved_ports"})
	}
	v.Why = "Each connection from one address to one destination needs its own port, and keeps it for 60 s after its end if this side closed it first (TIME_WAIT). When all ports of the range are in use connect() fails at once, and no kernel counter shows it. Before that, each connect() takes longer to find a free one."
	v.Remedy, v.Settings = f.moreLocalPorts(low, high, worst)
	v.Verify = f.look(f.run("ss -Htan " + quote("dst "+worst.Dest.String()) + " | wc -l"))
	return v
}

// localPortRange is net.ipv4.ip_local_port_range.
func (f facts) localPortRange() (low, high uint64, ok bool) {
	fields := strings.Fields(f.Sysctls["net.ipv4.ip_local_port_range"])
	if len(fields) != 2 {
		return 0, 0, false
	}
	low, err1 := strconv.ParseUint(fields[0], 10, 16)
	high, err2 := strconv.ParseUint(fields[1], 10, 16)
	return low, high, err1 == nil && err2 == nil && low <= high
}

// countPorts is how many of the ports from low to high a list such as "80,1000-1009" has,
// in which the kernel lets nothing overlap.
func countPorts(list string, low, high uint64) (n uint64, ok bool) {
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		if part == "" {
			continue
		}
		from, to, isRange := strings.Cut(part, "-")
		first, err1 := strconv.ParseUint(from, 10, 16)
		last, err2 := first, error(nil)
		if isRange {
			last, err2 = strconv.ParseUint(to, 10, 16)
		}
		if err1 != nil || err2 != nil || first > last {
			return 0, false
		}
		if first, last = max(first, low), min(last, high); first <= last {
			n += last - first + 1
		}
	}
	return min(n, high-low+1), true
}

// portsUsedAgain says whether a new connection may have the port of one that is over: after
// a second, by timestamps.
func (f facts) portsUsedAgain(u snapshot.LocalPortUse) bool {
	reuse, _ := f.sysctl("net.ipv4.tcp_tw_reuse")
	return reuse == 1 || reuse == 2 && u.Dest.Addr().IsLoopback()
}

func (f facts) moreLocalPorts(low, high uint64, worst snapshot.LocalPortUse) (remedy []string, settings []snapshot.Setting) {
	if low > widestLow || high < math.MaxUint16 {
		s := snapshot.Setting{Name: "net.ipv4.ip_local_port_range", Value: fmt.Sprintf("%d %d", min(low, widestLow), math.MaxUint16), Netns: f.Netns.Name}
		settings = append(settings, provided(s, "no program here will listen on one of these ports later; such ports belong in net.ipv4.ip_local_reserved_ports"))
		remedy = append(remedy, "# the widest range; a program that listens on one of these ports may find it in use, so reserve such ports first (net.ipv4.ip_local_reserved_ports):", f.set(s))
	}
	if worst.TimeWait > worst.Used/2 && !f.portsUsedAgain(worst) {
		s := f.local("net.ipv4.tcp_tw_reuse", 1)
		settings = append(settings, s)
		remedy = append(remedy, "# most of these connections are closed: let new ones reuse their ports after a second:", f.set(s))
	}
	return append(remedy,
		"# let the program reuse connections (nginx: keepalive in upstream; haproxy: http-reuse), or give it more addresses to connect from or to",
		`# if it is docker-proxy: set "userland-proxy": false in /etc/docker/daemon.json and restart dockerd, so that the kernel's NAT serves published ports`,
		f.run("ss -tanp "+quote("dst "+worst.Dest.String())+" | head")), settings
}
