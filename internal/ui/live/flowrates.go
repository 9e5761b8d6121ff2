// SPDX-License-Identifier: Apache-2.0

package live

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// FlowRate is what one flow carried between two readings of its counters, in both directions.
type FlowRate struct {
	Protocol         string            `json:"protocol"`
	Source           snapshot.Endpoint `json:"source,omitzero"` // of its first packet; of ICMP the port is the identifier
	Destination      snapshot.Endpoint `json:"destination,omitzero"`
	PacketsPerSecond float64           `json:"packets_per_second"`
	BytesPerSecond   float64           `json:"bytes_per_second"`
	Engine           bool              `json:"of_engine,omitempty"` // a session of the eBPF engine
}

// NoAccounting is the note where the kernel counts nothing per flow.
const NoAccounting = "not counted; sysctl -w net.netfilter.nf_conntrack_acct=1 counts new flows"

// mostFlows bounds the memory: of a larger table only so many flows are compared.
const mostFlows = 100_000

// flowKey is one flow; zones and namespaces of the same addresses are not told apart.
type flowKey struct {
	proto  uint8
	engine bool
	source netip.AddrPort
	dest   netip.AddrPort
}

type carried struct{ packets, bytes uint64 }

// flowMeter compares the counters of flows with those of the reading before. It is for one
// goroutine.
type flowMeter struct {
	next   map[flowKey]carried
	cut    bool // more flows than mostFlows
	counts bool // a flow had counters

	readings int // so far
	before   map[flowKey]carried
	wasCut   bool
	last     time.Time
}

// begin is before a reading. One that does not come about leaves no trace.
func (m *flowMeter) begin() {
	m.next, m.cut, m.counts = map[flowKey]carried{}, false, false
}

func (m *flowMeter) put(k flowKey, c carried) {
	if len(m.next) >= mostFlows {
		m.cut = true
		return
	}
	m.next[k] = c
}

// add takes an entry of the table.
func (m *flowMeter) add(f *conntrack.Flow) {
	if f.Has&conntrack.HasCounters == 0 {
		return
	}
	m.counts = true
	m.put(flowKey{f.Proto, false, netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)},
		carried{f.OrigCounters.Packets + f.ReplyCounters.Packets, f.OrigCounters.Bytes + f.ReplyCounters.Bytes})
}

// addEngine takes the sessions of the eBPF engine.
func (m *flowMeter) addEngine(ns *netns.Handle) error {
	e, err := control.Open(ns)
	if err != nil {
		return err
	}
	err = e.Sessions(func(s *rulefile.Session) bool {
		m.put(flowKey{uint8(s.Protocol), true, s.Source.AddrPort, s.Destination.AddrPort}, carried{s.Packets[0] + s.Packets[1], s.Bytes[0] + s.Bytes[1]})
		return true
	})
	return errors.Join(err, e.Close())
}

// rates ends a reading: of the flows that carried something since the one before. After the first
// one nothing is known.
func (m *flowMeter) rates(at time.Time) (out []FlowRate) {
	seconds := at.Sub(m.last).Seconds()
	for k, c := range m.next {
		was, known := m.before[k]
		if m.readings == 0 || seconds <= 0 || !known && m.wasCut { // it may have been there
			continue
		}
		if c.packets < was.packets || c.bytes < was.bytes { // another flow of the same addresses
			was = carried{}
		}
		if c.packets > was.packets {
			out = append(out, FlowRate{conntrack.ProtoName(k.proto), snapshot.EndpointOf(k.source), snapshot.EndpointOf(k.dest),
				float64(c.packets-was.packets) / seconds, float64(c.bytes-was.bytes) / seconds, k.engine})
		}
	}
	m.before, m.wasCut, m.last, m.readings = m.next, m.cut, at, m.readings+1
	return out
}

// busiest are the flows with most bytes.
func busiest(flows []FlowRate) []FlowRate {
	slices.SortFunc(flows, func(a, b FlowRate) int {
		return cmp.Or(cmp.Compare(b.BytesPerSecond, a.BytesPerSecond), a.Source.Compare(b.Source), a.Destination.Compare(b.Destination), strings.Compare(a.Protocol, b.Protocol))
	})
	return flows[:min(len(flows), snapshot.TopN)]
}

// accounted says whether the kernel counts for each flow that starts.
func accounted(ns *netns.Handle) (on bool) {
	_ = ns.Do(func() error { // where it can't be read nothing is counted
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_acct")
		on = err == nil && strings.TrimSpace(string(text)) == "1"
		return nil
	})
	return on
}

// flowMeters are of the connection tracking table, which is not read in each window, and of the
// eBPF engine's sessions.
type flowMeters struct {
	kernel, engine flowMeter
	rates          []FlowRate // of the kernel's last reading
	table          *snapshot.Table
}

// judged gives the judgement of a window the rates of flows.
func (m *flowMeters) judged(j *Judged, ns *netns.Handle) {
	if j.Table != nil && j.Table != m.table {
		m.rates, m.table = m.kernel.rates(time.Now()), j.Table
	}
	flows := slices.Clone(m.rates)
	engine := j.Engine.Tracks()
	var err error
	if engine {
		m.engine.begin()
		if err = m.engine.addEngine(ns); err == nil {
			flows = append(flows, m.engine.rates(time.Now())...)
		}
	} else {
		m.engine = flowMeter{}
	}
	j.TopFlows = busiest(flows)
	switch {
	case err != nil:
		j.FlowsNote = "sessions of the eBPF engine: " + err.Error()
	case m.kernel.cut || m.engine.cut:
		j.FlowsNote = "of the first " + plural.Count(mostFlows, "flow") + " that were read"
	case j.Engine.Accelerates():
		j.FlowsNote = "without packets that accel forwards before the stack"
	case engine && m.engine.readings == 1:
		j.FlowsNote = "rates need a second reading"
	case engine:
	case j.Table == nil:
		j.FlowsNote = "table not read"
	case !m.kernel.counts && !accounted(ns):
		j.FlowsNote = NoAccounting
	case m.kernel.readings == 1:
		j.FlowsNote = "rates need a second reading of the table"
	}
}
