// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
	"natkit/internal/words/schema"
	"natkit/internal/words/size"
)

// ConntrackStats is what is in a connection tracking table.
type ConntrackStats struct {
	Entries     uint64            `json:"entries"`
	Max         uint64            `json:"entries_max,omitempty"` // of the live table
	Seconds     float64           `json:"dump_s"`                // 0 for a dump from a file
	Interrupted bool              `json:"interrupted"`           // the table changed while it was read
	Unreadable  uint64            `json:"unreadable"`            // entries or lines not counted in the rest
	Cut         bool              `json:"truncated,omitempty"`   // the dump has no end
	ByProtocol  map[string]uint64 `json:"by_protocol"`
	ByState     map[string]uint64 `json:"by_state"`                // TCP
	ByStatus    map[string]uint64 `json:"by_status"`               // ASSURED, UNREPLIED, OFFLOAD, HW_OFFLOAD, SNAT, DNAT
	Engine      *EngineNote       `json:"natkit_engine,omitempty"` // natkit's own, where one is up
}

// NewConntrackStats takes the sums out of a table.
func NewConntrackStats(t *snapshot.Table) *ConntrackStats {
	return &ConntrackStats{
		Entries: t.Entries, Seconds: t.DumpSeconds, Interrupted: t.Interrupted, Unreadable: t.Malformed,
		ByProtocol: t.ByProtocol, ByState: t.ByState, ByStatus: t.ByStatus,
	}
}

// Text writes the sums as tables, most first, with bars of their shares.
func (s *ConntrackStats) Text(w io.Writer, bars Bars) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", plural.Count(s.Entries, "entry"))
	if s.Max > 0 {
		fmt.Fprintf(&b, ", the table holds %d", s.Max)
	}
	b.WriteByte('\n')
	for _, part := range []struct {
		title string
		rows  map[string]uint64
	}{{"protocol", s.ByProtocol}, {"TCP state", s.ByState}, {"status", s.ByStatus}} {
		if len(part.rows) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n%-14s %10s\n", part.title, "entries")
		for _, name := range byCount(part.rows) {
			line := fmt.Sprintf("%-14s %10d %7s  %s", name, part.rows[name], percent.Of(ratioOf(part.rows[name], s.Entries), 1), bars.draw(part.rows[name], s.Entries, 20))
			b.WriteString(strings.TrimRight(line, " ") + "\n")
		}
	}
	if s.Engine != nil {
		b.WriteString("\n" + s.Engine.Line())
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func byCount(rows map[string]uint64) []string {
	return slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		return cmp.Or(cmp.Compare(rows[b], rows[a]), cmp.Compare(a, b))
	})
}

// ConntrackTop is the entries by one key, most first.
type ConntrackTop struct {
	By          string         `json:"by"` // source, destination, dport, nat
	Entries     uint64         `json:"entries"`
	Interrupted bool           `json:"interrupted"`
	Unreadable  uint64         `json:"unreadable"`
	Rows        []ConntrackRow `json:"rows"`
	Engine      *EngineNote    `json:"natkit_engine,omitempty"` // natkit's own, where one is up
}

// ConntrackRow is one row: Addr for source and destination, Protocol and Port
// for dport, Protocol, Outside, Dest and ports for nat.
type ConntrackRow struct {
	Addr      *netip.Addr        `json:"address,omitempty"`
	Protocol  string             `json:"protocol,omitempty"`
	Port      *uint16            `json:"port,omitempty"`
	Outside   *netip.Addr        `json:"external_address,omitempty"`
	Dest      *snapshot.Endpoint `json:"destination,omitempty"`
	MinPort   *uint16            `json:"min_port,omitempty"` // lowest and highest outside port
	MaxPort   *uint16            `json:"max_port,omitempty"`
	Entries   uint64             `json:"entries"`
	Unreplied *uint64            `json:"unreplied,omitempty"`
	Missed    uint64             `json:"missed,omitempty"` // the count may be so much too low
}

// NewConntrackTop takes one of a table's lists.
func NewConntrackTop(t *snapshot.Table, by string) *ConntrackTop {
	top := &ConntrackTop{
		By: by, Entries: t.Entries,
		Interrupted: t.Interrupted, Unreadable: t.Malformed, Rows: []ConntrackRow{},
	}
	switch by {
	case "source", "destination":
		list := t.Sources
		if by == "destination" {
			list = t.Destinations
		}
		for _, r := range list {
			top.Rows = append(top.Rows, ConntrackRow{Addr: &r.Addr, Entries: r.Entries, Unreplied: &r.Unreplied, Missed: r.Missed})
		}
	case "dport":
		for _, r := range t.DestPorts {
			top.Rows = append(top.Rows, ConntrackRow{Protocol: r.Protocol, Port: &r.Port, Entries: r.Entries, Unreplied: &r.Unreplied, Missed: r.Missed})
		}
	case "nat":
		for _, r := range t.SNATPorts {
			top.Rows = append(top.Rows, ConntrackRow{
				Protocol: r.Protocol, Outside: &r.Outside, Dest: &r.Dest,
				MinPort: &r.MinPort, MaxPort: &r.MaxPort, Entries: r.Used, Missed: r.Missed,
			})
		}
	}
	return top
}

// Text writes the rows as a table, with bars of their shares of the most.
func (t *ConntrackTop) Text(w io.Writer, bars Bars) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	most := uint64(0)
	for _, r := range t.Rows {
		most = max(most, r.Entries)
	}
	bar := func(r ConntrackRow) string {
		if bars == NoBars {
			return ""
		}
		return "\t" + bars.draw(r.Entries, most, 10)
	}
	switch t.By {
	case "nat":
		fmt.Fprintln(tw, "ENTRIES\tSHARE\tPROTOCOL\tOUTSIDE\tTO\tPORTS SEEN")
	case "dport":
		fmt.Fprintln(tw, "ENTRIES\tSHARE\tUNREPLIED\tPORT")
	default:
		fmt.Fprintf(tw, "ENTRIES\tSHARE\tUNREPLIED\t%s\n", strings.ToUpper(t.By))
	}
	missed := uint64(0)
	for _, r := range t.Rows {
		missed = max(missed, r.Missed)
		fmt.Fprintf(tw, "%d\t%s\t", r.Entries, percent.Of(ratioOf(r.Entries, t.Entries), 1))
		switch t.By {
		case "nat":
			fmt.Fprintf(tw, "%s\t%v\t%v\t%d-%d%s\n", r.Protocol, r.Outside, r.Dest, *r.MinPort, *r.MaxPort, bar(r))
		case "dport":
			fmt.Fprintf(tw, "%d\t%d/%s%s\n", *r.Unreplied, *r.Port, r.Protocol, bar(r))
		default:
			fmt.Fprintf(tw, "%d\t%v%s\n", *r.Unreplied, r.Addr, bar(r))
		}
	}
	if missed > 0 {
		fmt.Fprintf(tw, "Too many different ones to count each: a count may be up to %d too low.\n", missed)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	return t.Engine.text(w)
}

// ConntrackMemory is what the table takes, in bytes.
type ConntrackMemory struct {
	Count          uint64      `json:"entries"`
	Max            uint64      `json:"entries_max"` // 0: no limit
	Buckets        uint64      `json:"buckets"`
	HostEntries    uint64      `json:"host_entries,omitempty"`
	ObjectBytes    uint64      `json:"entry_bytes,omitempty"`
	ObjectSource   string      `json:"entry_source,omitempty"`
	ExtensionBytes uint64      `json:"extension_bytes"`
	BucketBytes    uint64      `json:"bucket_bytes"`
	ChainNow       float64     `json:"chain_length_now"`
	ChainFull      float64     `json:"chain_length_full"`
	HashBytes      uint64      `json:"hash_bytes"`    // of the hash, which all namespaces share
	EntriesBytes   uint64      `json:"entries_bytes"` // of this namespace's entries alone
	NowBytes       uint64      `json:"now_bytes"`
	NowMostBytes   uint64      `json:"now_with_extensions_bytes"`
	FullBytes      uint64      `json:"full_bytes"`
	FullMostBytes  uint64      `json:"full_with_extensions_bytes"`
	SlabBytes      uint64      `json:"slab_bytes,omitempty"` // held now for all namespaces
	Unknown        []string    `json:"unknown"`
	Engine         *EngineNote `json:"natkit_engine,omitempty"` // natkit's own, where one is up
}

// NewConntrackMemory calculates the sums.
func NewConntrackMemory(m *conntrack.Memory) *ConntrackMemory {
	r := &ConntrackMemory{
		Count: m.Count, Max: m.Max, Buckets: m.Buckets, HostEntries: m.HostEntries,
		ObjectBytes: m.ObjectBytes, ObjectSource: m.ObjectSource, ExtensionBytes: m.ExtensionBytes, BucketBytes: m.BucketBytes,
		ChainNow: m.Chain(max(m.Count, m.HostEntries)), ChainFull: m.Chain(m.Max), SlabBytes: m.SlabBytes,
		Unknown: append([]string{}, m.Unknown...),
	}
	if m.ObjectBytes > 0 {
		r.NowBytes, r.NowMostBytes = m.Bytes(m.Count, m.Buckets)
		r.FullBytes, r.FullMostBytes = m.Bytes(m.Max, m.Buckets)
		r.HashBytes, _ = m.Bytes(0, m.Buckets)
		r.EntriesBytes = r.NowBytes - r.HashBytes
	}
	return r
}

// Text writes the sizes with what they are made of.
func (m *ConntrackMemory) Text(w io.Writer) error {
	var p page
	line := func(label, format string, args ...any) {
		p.text(fmt.Sprintf("%-11s", label), strings.Repeat(" ", 11), fmt.Sprintf(format, args...))
	}
	if m.Max > 0 {
		line("entries", "%d of at most %d (%s) in this namespace", m.Count, m.Max, percent.Of(ratioOf(m.Count, m.Max), 1))
	} else {
		line("entries", "%d in this namespace, without a limit (nf_conntrack_max is 0)", m.Count)
	}
	if m.HostEntries > 0 {
		line("", "%d on the host, by its slab", m.HostEntries)
	}
	if m.ObjectBytes > 0 {
		line("entry", "%d bytes (%s)", m.ObjectBytes, m.ObjectSource)
		line("", "+%d bytes if masqueraded, accounted, time-stamped, labelled or watched", m.ExtensionBytes)
	}
	line("hash", "%s of %d bytes, %s, one for all namespaces", plural.Count(m.Buckets, "bucket"), m.BucketBytes, size.Of(m.Buckets*m.BucketBytes))
	if m.Max > 0 {
		line("chain", "%.2f entries a bucket on average now, %.2f with a full table (an entry is in two chains)", m.ChainNow, m.ChainFull)
	} else {
		line("chain", "%.2f entries a bucket on average now (an entry is in two chains)", m.ChainNow)
	}
	if m.ObjectBytes > 0 {
		line("now", "%s for this namespace's entries, %s if all have the extension", size.Of(m.EntriesBytes), size.Of(m.NowMostBytes-m.HashBytes))
		if m.Max > 0 {
			line("full", "%s for as many as it may have, %s if all have the extension", size.Of(m.FullBytes-m.HashBytes), size.Of(m.FullMostBytes-m.HashBytes))
		}
	}
	if m.SlabBytes > 0 {
		line("slab", "%s held now for the entries of all namespaces of the host, free ones included; this namespace's share is the line \"now\"", size.Of(m.SlabBytes))
	}
	for _, u := range m.Unknown {
		line("unknown", "%s", u)
	}
	if _, err := io.WriteString(w, p.b.String()); err != nil {
		return err
	}
	return m.Engine.text(w)
}

// ConntrackRates is one interval of natkit conntrack watch.
type ConntrackRates struct {
	Time               time.Time          `json:"time"`
	Seconds            float64            `json:"interval_s"`
	NewPerSecond       float64            `json:"new_per_second"`
	DestroyedPerSecond float64            `json:"ended_per_second"`
	Entered            map[string]float64 `json:"entered_per_second_by_state"` // TCP state -> flows that came into it
	Ended              map[string]float64 `json:"ended_per_second_by_state"`   // TCP state -> flows destroyed in it
	LostEvents         uint64             `json:"lost_events"`
	Count              uint64             `json:"entries"`
	Max                uint64             `json:"entries_max"`
}

// NewConntrackRates divides by the time.
func NewConntrackRates(at time.Time, r *conntrack.Rates) *ConntrackRates {
	out := &ConntrackRates{
		Time: at, Seconds: r.Seconds, LostEvents: r.Lost, Count: r.Count, Max: r.Max,
		NewPerSecond: float64(r.New) / r.Seconds, DestroyedPerSecond: float64(r.Destroyed) / r.Seconds,
		Entered: map[string]float64{}, Ended: map[string]float64{},
	}
	for state, n := range r.Entered {
		out.Entered[state.String()] = float64(n) / r.Seconds
	}
	for state, n := range r.Ended {
		out.Ended[state.String()] = float64(n) / r.Seconds
	}
	return out
}

// ConntrackRatesHeader is the line above those of ConntrackRates.Text.
const ConntrackRatesHeader = "    TIME    NEW/S  ENDED/S  ENTRIES  FILL    LOST  TCP FLOWS ENTERING A STATE, PER SECOND\n"

// Text writes one line.
func (r *ConntrackRates) Text(w io.Writer) error {
	var states []string
	for s := conntrack.TCPSynSent; s <= conntrack.TCPSynSent2; s++ {
		if n := r.Entered[s.String()]; n > 0 {
			states = append(states, fmt.Sprintf("%s %s", s, perSecond(n)))
		}
	}
	fill := "     -"
	if r.Max > 0 {
		fill = fmt.Sprintf("%6s", percent.Of(ratioOf(r.Count, r.Max), 0))
	}
	line := fmt.Sprintf("%s %8s %8s %8d %s %7d  %s", r.Time.Format(time.TimeOnly),
		perSecond(r.NewPerSecond), perSecond(r.DestroyedPerSecond), r.Count, fill, r.LostEvents, strings.Join(states, "  "))
	_, err := io.WriteString(w, strings.TrimRight(line, " ")+"\n")
	return err
}

// perSecond is a rate in few digits; what is more than nothing is not written as 0.
func perSecond(rate float64) string {
	switch {
	case rate <= 0 || rate >= 9.95:
		return fmt.Sprintf("%.0f", rate)
	case rate < 0.05:
		return "<0.1"
	}
	return fmt.Sprintf("%.1f", rate)
}

// ConntrackEntry is one entry of the table, as natkit conntrack list prints it. A field that
// the entry does not have is left out.
type ConntrackEntry struct {
	Family         string   `json:"family"` // ipv4, ipv6
	Protocol       string   `json:"protocol"`
	ProtocolNumber uint8    `json:"protocol_number"`
	TimeoutSeconds *uint32  `json:"timeout_s,omitempty"` // until the entry expires; an offloaded one has none
	State          string   `json:"state,omitempty"`     // of TCP, SCTP and DCCP
	Status         []string `json:"status"`              // UNREPLIED, ASSURED, OFFLOAD, HW_OFFLOAD, SNAT, DNAT

	Original ConntrackDirection `json:"original"`
	Reply    ConntrackDirection `json:"reply"`

	Mark       *uint32    `json:"mark,omitempty"`
	Secmark    *uint32    `json:"secmark,omitempty"`
	Zone       *uint16    `json:"zone,omitempty"`  // of both directions
	AgeSeconds *uint64    `json:"age_s,omitempty"` // with nf_conntrack_timestamp
	Use        *uint32    `json:"use,omitempty"`   // references
	ID         *uint32    `json:"entry_id,omitempty"`
	Since      *time.Time `json:"since,omitempty"` // when it began, with nf_conntrack_timestamp
	Ended      *time.Time `json:"ended,omitempty"`
	Secctx     *string    `json:"secctx,omitempty"`
	Helper     *string    `json:"helper,omitempty"`
	Labels     []int      `json:"labels,omitzero"`       // numbers of the labels that are set
	LabelNames *string    `json:"label_names,omitempty"` // separated by commas
	// Natkit says whether rules of natkit translate it; absent where no engine of natkit's is up.
	Natkit *bool `json:"by_natkit,omitempty"`
}

// ConntrackDirection is one direction of an entry: where its packets come from and go to.
type ConntrackDirection struct {
	Source      ConntrackEnd `json:"source"`
	Destination ConntrackEnd `json:"destination"`
	// Of ICMP, in the place of ports.
	ICMPType *uint8  `json:"icmp_type,omitempty"`
	ICMPCode *uint8  `json:"icmp_code,omitempty"`
	ICMPID   *uint16 `json:"icmp_id,omitempty"`
	// Of GRE, in the place of ports.
	SourceKey      *uint16 `json:"source_key,omitempty"`
	DestinationKey *uint16 `json:"destination_key,omitempty"`

	Zone    *uint16 `json:"zone,omitempty"` // of this direction only
	Packets *uint64 `json:"packets,omitempty"`
	Bytes   *uint64 `json:"bytes,omitempty"`
}

// ConntrackEnd is one end of a direction.
type ConntrackEnd struct {
	Address netip.Addr `json:"address,omitzero"`
	Port    *uint16    `json:"port,omitempty"` // of protocols that have ports
}

const kindConntrackEntry = "conntrack-entry"

// entryHead is how an entry begins.
var entryHead = []byte(`{"` + schema.Key + `":"` + Kind{Name: kindConntrackEntry, Version: 1}.Schema() + `","family":"`)

// AppendConntrackFlow appends a flow as one ConntrackEntry in one line, without
// allocation: a table has hundreds of thousands. engine is what of natkit's own is up,
// whose entries are marked; nil leaves that out.
func AppendConntrackFlow(b []byte, f *conntrack.Flow, engine *EngineNote) []byte {
	b = append(b, entryHead...)
	b = append(b, conntrack.FamilyName(f.Family)...)
	b = append(b, `","protocol":"`...)
	b = append(b, conntrack.ProtoName(f.Proto)...)
	b = appendNumber(append(b, '"'), "protocol_number", uint64(f.Proto))
	if f.Has&conntrack.HasTimeout != 0 {
		b = appendNumber(b, "timeout_s", uint64(f.Timeout))
	}
	if f.Has&conntrack.HasState != 0 {
		b = append(append(append(b, `,"state":"`...), f.State.String()...), '"')
	}
	b = appendStatus(append(b, `,"status":`...), f)
	b = appendTuple(append(b, `,"original":`...), f, &f.Orig, &f.OrigCounters, conntrack.HasZoneOrig, f.ZoneOrig)
	b = appendTuple(append(b, `,"reply":`...), f, &f.Reply, &f.ReplyCounters, conntrack.HasZoneReply, f.ZoneReply)
	for _, n := range [...]struct {
		has   conntrack.Fields
		key   string
		value uint64
	}{
		{conntrack.HasMark, "mark", uint64(f.Mark)}, {conntrack.HasSecmark, "secmark", uint64(f.Secmark)},
		{conntrack.HasZone, "zone", uint64(f.Zone)}, {conntrack.HasDelta, "age_s", f.DeltaSeconds},
		{conntrack.HasUse, "use", uint64(f.Use)}, {conntrack.HasID, "entry_id", uint64(f.ID)},
	} {
		if f.Has&n.has != 0 {
			b = appendNumber(b, n.key, n.value)
		}
	}
	if f.Has&conntrack.HasStart != 0 {
		b = appendTime(b, "since", f.Start)
	}
	if f.Has&conntrack.HasStop != 0 {
		b = appendTime(b, "ended", f.Stop)
	}
	if f.Has&conntrack.HasSecctx != 0 {
		b = appendString(b, "secctx", f.Secctx)
	}
	if f.Has&conntrack.HasHelper != 0 {
		b = appendString(b, "helper", f.Helper)
	}
	if f.Has&conntrack.HasLabels != 0 {
		b = appendLabels(append(b, `,"labels":`...), f)
	}
	if f.Has&conntrack.HasNames != 0 {
		b = appendString(b, "label_names", f.Names)
	}
	if engine != nil {
		b = strconv.AppendBool(append(b, `,"by_natkit":`...), engine.labels && (f.SNAT() || f.DNAT()) && f.Label(nft.LabelBit))
	}
	return append(b, '}')
}

// appendStatus is the list of what the kernel says of an entry.
func appendStatus(b []byte, f *conntrack.Flow) []byte {
	b = append(b, '[')
	at := len(b)
	for _, s := range [...]struct {
		name string
		on   bool
	}{
		{"UNREPLIED", f.Unreplied()}, {"ASSURED", f.Status&conntrack.StatusAssured != 0},
		{"OFFLOAD", f.Status&conntrack.StatusOffload != 0}, {"HW_OFFLOAD", f.Status&conntrack.StatusHWOffload != 0},
		{"SNAT", f.SNAT()}, {"DNAT", f.DNAT()},
	} {
		if s.on {
			if len(b) > at {
				b = append(b, ',')
			}
			b = append(append(append(b, '"'), s.name...), '"')
		}
	}
	return append(b, ']')
}

// appendLabels is the list of the bits that are set.
func appendLabels(b []byte, f *conntrack.Flow) []byte {
	b = append(b, '[')
	at := len(b)
	for bit := range 8 * len(f.Labels) {
		if f.Label(bit) {
			if len(b) > at {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(bit), 10)
		}
	}
	return append(b, ']')
}

func appendTuple(b []byte, f *conntrack.Flow, t *conntrack.Tuple, c *conntrack.Counters, hasZone conntrack.Fields, zone uint16) []byte {
	var ports bool
	switch f.Proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		ports = true
	}
	b = appendEnd(append(b, `{"source":`...), t.Src, t.SrcPort, ports)
	b = appendEnd(append(b, `,"destination":`...), t.Dst, t.DstPort, ports)
	switch f.Proto {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		b = appendNumber(b, "icmp_type", uint64(t.ICMPType))
		b = appendNumber(b, "icmp_code", uint64(t.ICMPCode))
		b = appendNumber(b, "icmp_id", uint64(t.SrcPort))
	case unix.IPPROTO_GRE:
		b = appendNumber(b, "source_key", uint64(t.SrcPort))
		b = appendNumber(b, "destination_key", uint64(t.DstPort))
	}
	if f.Has&hasZone != 0 {
		b = appendNumber(b, "zone", uint64(zone))
	}
	if f.Has&conntrack.HasCounters != 0 {
		b = appendNumber(b, "packets", c.Packets)
		b = appendNumber(b, "bytes", c.Bytes)
	}
	return append(b, '}')
}

func appendEnd(b []byte, a netip.Addr, port uint16, hasPort bool) []byte {
	b = append(a.AppendTo(append(b, `{"address":"`...)), '"')
	if hasPort {
		b = appendNumber(b, "port", uint64(port))
	}
	return append(b, '}')
}

func appendNumber(b []byte, key string, n uint64) []byte {
	b = append(append(append(b, `,"`...), key...), `":`...)
	return strconv.AppendUint(b, n, 10)
}

func appendTime(b []byte, key string, ns int64) []byte {
	b = append(append(append(b, `,"`...), key...), `":"`...)
	return append(time.Unix(0, ns).UTC().AppendFormat(b, time.RFC3339Nano), '"')
}

// appendString appends text from the kernel or a dump; what is not printable
// ASCII is replaced, since JSON must be UTF-8 and a terminal may be reading.
func appendString(b []byte, key string, value []byte) []byte {
	b = append(append(append(b, `,"`...), key...), `":"`...)
	for _, c := range value {
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < 0x20 || c >= 0x7f:
			b = append(b, '?')
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
