// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math/bits"
	"path"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/shell"
	"natkit/internal/words/size"
)

// DefaultMemoryShare is how much of the machine's memory the connection tracking
// table may take when it is full, unless the user says otherwise.
const DefaultMemoryShare = 0.10

// Sizes for a kernel whose slab information can't be read (only root may): the
// largest entry seen on current kernels, a translated flow with its extension,
// and one pointer.
const (
	assumedEntryBytes  = 512
	assumedBucketBytes = 8
)

// maxEntries is more than any table counts: 32 bits.
const maxEntries = 1 << 32

// PlanOptions is what the user and the findings add to the facts.
type PlanOptions struct {
	Wanted      []snapshot.Setting // most important first: of two values for one setting the first counts, of two sizes the larger
	MemoryShare float64            // 0 means DefaultMemoryShare
	// Confirmed are the codes of findings whose conditions (snapshot.Setting.If) hold,
	// as the user says. Without that the plan refuses such a change and says what it
	// depends on.
	Confirmed []string
	Unjudged  []string // codes of causes that the facts do not show
}

// MakePlan works out what to change on the machine that s describes: what the
// findings want, and tune's own rules about the size of the connection tracking
// table and its time-outs (rules.go). It reads nothing but s.
//
// The error is about the options. A change that is wanted but can't be made
// stands in the plan's Refused with the reason.
func MakePlan(s *snapshot.Snapshot, o PlanOptions) (*Plan, error) {
	if o.MemoryShare == 0 {
		o.MemoryShare = DefaultMemoryShare
	}
	if !(o.MemoryShare > 0 && o.MemoryShare <= 1) {
		return nil, fmt.Errorf("memory share %v: want more than 0 and at most 1", o.MemoryShare)
	}
	p := &planner{facts: s, confirmed: o.Confirmed, plan: &Plan{TakenAt: s.TakenAt, Host: s.Host, Netns: s.Netns, Changes: []Change{}, Refused: []Refusal{}, Unseen: []snapshot.Capability{}, Unjudged: o.Unjudged}}
	for _, c := range s.Capabilities {
		if !c.OK {
			p.plan.Unseen = append(p.plan.Unseen, c)
		}
	}
	for _, w := range o.Wanted {
		p.want(w)
	}
	for _, w := range timeoutRules(s) {
		if !p.plan.Has(w.Name) {
			p.want(w)
		}
	}
	// What one finding wants only on a condition another one may want anyway.
	p.plan.Refused = slices.DeleteFunc(p.plan.Refused, func(r Refusal) bool { return r.If != "" && p.plan.Has(r.Setting) })
	if ct := s.Conntrack; ct != nil {
		p.sizeTable(ct, o.MemoryShare)
	} else {
		p.refuseSizes("connection tracking could not be read: its sizes cannot be planned")
	}
	p.plan.Notes = engineNotes(s)
	inOrder(p.plan.Changes)
	for i := range p.plan.Changes {
		c := &p.plan.Changes[i]
		if old, err := strconv.ParseInt(c.Old, 10, 64); err == nil && c.Setting == settingReserve {
			now, _ := strconv.ParseInt(c.New, 10, 64) // checked by want
			c.MemoryBytes = (now - old) << 10
		}
		// They all act in the initial namespace.
		if c.Scope == ScopeHost || s.Netns.Init {
			c.Owners = owners(s.Owners, *c)
		}
	}
	return p.plan, nil
}

// engineNotes are what settings of the kernel do not reach where natkit's own engine translates.
func engineNotes(s *snapshot.Snapshot) []string {
	e := s.Engine
	if !e.Tracks() {
		return nil
	}
	up := append([]string{"up", "-f", rulefile.Argument(e.File)}, e.Flags...)
	return []string{
		fmt.Sprintf("The eBPF engine translates here and has its own sessions (%d of %d): nf_conntrack_max, nf_conntrack_buckets and the timeouts nf_conntrack_* do not affect them. "+
			"limits.sessions and defaults.timeouts in %s do; a new limits.sessions needs `%s` and `%s`.", e.Sessions, e.SessionsMax, e.File,
			shell.Natkit(s.Netns.Name, "down"), shell.Natkit(s.Netns.Name, up...)),
	}
}

// inOrder puts the hash before the limit and both before everything else: they
// cost most and fail first.
func inOrder(changes []Change) {
	rank := map[string]int{settingBuckets: -2, settingMax: -1}
	slices.SortStableFunc(changes, func(a, b Change) int { return rank[a.Setting] - rank[b.Setting] })
}

type planner struct {
	facts     *snapshot.Snapshot
	confirmed []string
	plan      *Plan
}

func (p *planner) index(name string) int {
	return slices.IndexFunc(p.plan.Changes, func(c Change) bool { return c.Setting == name })
}

// want adds one change, unless the facts show that it is not needed.
func (p *planner) want(w snapshot.Setting) {
	k, err := find(w.Name)
	if err != nil {
		p.refuse(w, err.Error())
		return
	}
	value, err := k.value(w.Value)
	if err != nil {
		p.refuse(w, err.Error())
		return
	}
	old := p.present(k)
	if k.fulfilled(old, value) {
		return
	}
	if w.If != "" && !slices.Contains(p.confirmed, w.Code) {
		p.plan.Refused = append(p.plan.Refused, Refusal{Setting: k.name, Value: value, Code: w.Code, Netns: p.facts.Netns.Name,
			Why: fmt.Sprintf("right only if %s: confirm that with --confirm %s", w.If, w.Code), Chosen: true, If: w.If})
		return
	}
	c := Change{Setting: k.name, Scope: k.scope, Old: old, New: value, Code: w.Code, Reason: w.Reason, Does: k.does, Owners: []Owner{}}
	if k.scope == ScopeNamespace {
		c.Netns = p.facts.Netns.Name
	}
	switch i := p.index(k.name); {
	case i < 0:
		p.plan.Changes = append(p.plan.Changes, c)
	case k.size && !k.fulfilled(p.plan.Changes[i].New, value):
		p.plan.Changes[i] = c
	}
}

func (p *planner) refuse(w snapshot.Setting, why string) {
	p.plan.Refused = append(p.plan.Refused, Refusal{Setting: w.Name, Value: w.Value, Code: w.Code, Why: why, Netns: p.facts.Netns.Name})
}

// present is a setting's value according to the facts, "" when they do not hold
// a valid one.
func (p *planner) present(k setting) string {
	if ct := p.facts.Conntrack; ct != nil {
		switch k.name {
		case settingMax:
			return strconv.FormatUint(ct.Max, 10)
		case settingBuckets:
			return strconv.FormatUint(ct.Buckets, 10)
		}
	}
	text := p.facts.Sysctls[k.name]
	if isDevice(k.name) {
		text = p.ofDevice(k.name)
	}
	value, err := k.value(text)
	if err != nil {
		return ""
	}
	return value
}

// ofDevice is the value of a device's setting as far as the facts hold it; 0 of
// what they count is not known.
func (p *planner) ofDevice(name string) string {
	device, key := deviceOf(name)
	i := slices.IndexFunc(p.facts.Interfaces, func(i snapshot.Interface) bool { return i.Name == device })
	if i < 0 {
		return ""
	}
	l := p.facts.Interfaces[i]
	nic := snapshot.NIC{}
	if l.NIC != nil {
		nic = *l.NIC
	}
	switch {
	case key == "rx_ring" && nic.RxRing > 0:
		return strconv.FormatUint(uint64(nic.RxRing), 10)
	case key == "combined_channels" && nic.Channels > 0:
		return strconv.FormatUint(uint64(nic.Channels), 10)
	case key == "tx_queue_len" && l.QueueLength > 0:
		return strconv.Itoa(l.QueueLength)
	case key == "threaded" && l.NIC != nil && nic.Threaded:
		return "1"
	case key == "threaded" && l.NIC != nil:
		return "0"
	}
	return ""
}

// planned is the number that a setting will have.
func (p *planner) planned(name string, now uint64) uint64 {
	if i := p.index(name); i >= 0 {
		n, _ := strconv.ParseUint(p.plan.Changes[i].New, 10, 64) // checked by want
		return n
	}
	return now
}

// sizeTable completes the table's two sizes and weighs them against the memory.
func (p *planner) sizeTable(ct *snapshot.Conntrack, share float64) {
	m := &Memory{
		RAMBytes:    p.facts.Host.MemoryBytes,
		Share:       share,
		EntryBytes:  ct.ObjectBytes + ct.ExtensionBytes,
		BucketBytes: ct.BucketBytes,
	}
	// An object smaller than its two tuples is not true: 0 from a kernel that
	// does not say, anything from a file that was tampered with.
	if ct.ObjectBytes < 128 || ct.ObjectBytes > 1<<16 || ct.ExtensionBytes > 1<<16 {
		m.EntryBytes, m.EntryAssumed = assumedEntryBytes, true
	}
	if ct.BucketBytes < 8 || ct.BucketBytes > 64 {
		m.BucketBytes = assumedBucketBytes
	}
	p.plan.Memory = m
	m.Growth = growth(p.facts)
	m.Now = m.table(ct.Max, ct.Buckets)

	if w, ok := limitRule(ct); ok && !p.plan.Has(settingMax) {
		p.want(w)
	}
	limit := p.planned(settingMax, ct.Max)
	if w, ok := bucketsRule(ct, limit); ok && !p.plan.Has(settingBuckets) {
		p.want(w)
	}
	m.Then = m.table(limit, p.planned(settingBuckets, ct.Buckets))

	if m.Then != m.Now {
		if why := m.tooMuch(); why != "" {
			p.refuseSizes(why)
			m.Then = m.Now
		}
	}
	m.Now.fill(ct.Count, m.Growth)
	m.Then.fill(p.settled(ct), m.Growth)
	for i := range p.plan.Changes {
		switch c := &p.plan.Changes[i]; c.Setting {
		case settingMax:
			c.MemoryBytes = int64(mul(m.Then.Max-m.Now.Max, m.EntryBytes))
		case settingBuckets:
			c.MemoryBytes = int64(mul(m.Then.Buckets-m.Now.Buckets, m.BucketBytes))
		}
	}
}

// refuseSizes moves the changes of the table's sizes to the refused ones.
func (p *planner) refuseSizes(why string) {
	var need uint64
	if m := p.plan.Memory; m != nil {
		need = m.Then.Bytes
	}
	inOrder(p.plan.Changes)
	p.plan.Changes = slices.DeleteFunc(p.plan.Changes, func(c Change) bool {
		if c.Setting != settingMax && c.Setting != settingBuckets {
			return false
		}
		p.plan.Refused = append(p.plan.Refused, Refusal{Setting: c.Setting, Value: c.New, Code: c.Code, Why: why, NeedBytes: need})
		return true
	})
}

// table is the cost of a table with these limits.
func (m *Memory) table(limit, buckets uint64) Table {
	t := Table{Max: limit, Buckets: buckets, Bytes: mul(limit, m.EntryBytes) + mul(buckets, m.BucketBytes)}
	if buckets > 0 {
		t.Chain = 2 * float64(limit) / float64(buckets)
	}
	return t
}

// fill says how many entries are in the table, and when it is full if as many come
// as now.
func (t *Table) fill(entries uint64, growth float64) {
	t.Entries = entries
	if t.Max == 0 { // no limit
		return
	}
	seconds := 0.0
	if entries < t.Max {
		if growth <= 0 {
			return
		}
		seconds = float64(t.Max-entries) / growth
	}
	t.FullSeconds = &seconds
}

// growth is how many entries a second the table gained in the window, or would
// have if it had room: those that were refused want one as well.
func growth(s *snapshot.Snapshot) float64 {
	ct := s.Conntrack
	if !(s.WindowSeconds > 0) || s.WindowSeconds > maxInt || ct.Count > maxEntries || ct.CountStart > maxEntries {
		return 0
	}
	gained := float64(ct.Count) - float64(ct.CountStart)
	// The column counts as well what could not be inserted for another reason.
	if drop, failed := ct.Stats["drop"], ct.Stats["insert_failed"]; drop > failed && drop < maxEntries {
		gained += float64(drop - failed)
	}
	return gained / s.WindowSeconds
}

// settled is how many entries the table will hold with the planned time-outs.
// Entries of a state that ends by its time-out are as many as come in that time.
// Entries that are there keep theirs until their next packet.
func (p *planner) settled(ct *snapshot.Conntrack) uint64 {
	if ct.Table == nil || ct.Count > maxEntries {
		return ct.Count
	}
	var gone uint64
	for state, timeout := range endingStates {
		i := p.index("net.netfilter.nf_conntrack_" + timeout)
		entries := ct.Table.ByState[state]
		if i < 0 || entries > ct.Count {
			continue
		}
		before, err1 := strconv.ParseFloat(p.plan.Changes[i].Old, 64)
		after, err2 := strconv.ParseFloat(p.plan.Changes[i].New, 64)
		if err1 != nil || err2 != nil || !(before > after) {
			continue
		}
		gone += uint64(float64(entries) * (1 - after/before))
	}
	return ct.Count - min(ct.Count, gone)
}

// endingStates are the states of TCP that entries leave by their time-out.
var endingStates = map[string]string{
	"SYN_SENT":   "tcp_timeout_syn_sent",
	"SYN_RECV":   "tcp_timeout_syn_recv",
	"FIN_WAIT":   "tcp_timeout_fin_wait",
	"CLOSE_WAIT": "tcp_timeout_close_wait",
	"LAST_ACK":   "tcp_timeout_last_ack",
	"TIME_WAIT":  "tcp_timeout_time_wait",
}

// tooMuch says why the planned table would take too much memory, or "".
func (m *Memory) tooMuch() string {
	if m.RAMBytes == 0 {
		return "the size of the machine's memory is unknown, so natkit does not enlarge the table"
	}
	allowed := uint64(float64(m.RAMBytes) * m.Share)
	if m.Then.Bytes <= allowed {
		return ""
	}
	need := float64(m.Then.Bytes) / float64(m.RAMBytes)
	why := fmt.Sprintf("full, the table would need %s, %.1f %% of this machine's %s, and %.1f %% is allowed",
		size.Of(m.Then.Bytes), 100*need, size.Of(m.RAMBytes), 100*m.Share)
	// The largest power of two that fits, with as many buckets.
	fits := uint64(1)
	for mul(2*fits, m.EntryBytes+m.BucketBytes) <= allowed {
		fits *= 2
	}
	if fits > m.Now.Max {
		why += fmt.Sprintf("; a limit of %d would fit", fits)
	}
	if need < 1 {
		why += fmt.Sprintf("; to allow it: --memory-share %.2f", need+0.005)
	}
	return why + "; otherwise shorten timeouts, or find what fills the table (natkit conntrack top)"
}

// mul multiplies and stays at the largest number instead of wrapping: sizes come
// from files.
func mul(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi != 0 || lo > 1<<62 {
		return 1 << 62
	}
	return lo
}

// owners is who else sets the setting of a change, with what it means for it. An
// owner may name a pattern, as sysctl.d(5) files do.
func owners(all []snapshot.Owner, c Change) []Owner {
	out := []Owner{}
	for _, o := range all {
		if o.Who == "natkit" {
			continue
		}
		ok, err := path.Match(snapshot.SysctlPath(oneName(o.Setting)), snapshot.SysctlPath(oneName(c.Setting)))
		if err != nil || !ok {
			continue
		}
		own := Owner{Who: o.Who, Where: o.Where, Value: o.Value}
		if strings.Join(strings.Fields(o.Value), " ") != c.New {
			own.Warning = warning(o)
		}
		out = append(out, own)
	}
	return out
}

// oneName is the one name of a setting that has two.
func oneName(name string) string {
	if name == "net.ipv4.conf.all.forwarding" {
		return "net.ipv4.ip_forward"
	}
	return name
}

// warning says when an owner will write its own value back.
func warning(o snapshot.Owner) string {
	switch o.Who {
	case "sysctl.d":
		file, _, _ := strings.Cut(o.Where, ":")
		if file == "/etc/sysctl.conf" || path.Base(file) > persistName {
			return "sets it at boot, after natkit's own file: change it there too"
		}
		return "sets it at boot; natkit's own file (--persist) comes later and wins"
	case "tuned":
		return "tuned writes it when it starts or its profile is applied: change the profile too"
	case "kube-proxy":
		return "kube-proxy writes it when it starts: change its configuration too"
	case "k3s", "rke2":
		return o.Who + " writes it when it starts: change its kube-proxy-arg too, or its unit"
	case "ufw":
		return "ufw writes it when it starts or is reloaded: change its file too"
	case "firewalld":
		return "firewalld writes it when it starts or is reloaded, as long as a zone or policy masquerades or forwards a port"
	case "NetworkManager":
		return "NetworkManager writes it when the connection comes up: change the connection too"
	case "systemd-networkd":
		return "systemd-networkd writes it when the interface comes up or is reconfigured: change its file too"
	case "docker":
		return "dockerd may write it when it starts or creates a network"
	}
	return o.Who + " may write it back"
}
