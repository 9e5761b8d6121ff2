// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// facts is a Snapshot with the questions that several causes ask of it. It
// distrusts what it holds: a saved snapshot may be damaged or made up.
type facts struct {
	*snapshot.Snapshot
	ask  strictness
	memo *memo
}

// implausible is where an increase stops being one: a counter that went
// backwards shows as a number close to 2^64.
const implausible = 1 << 56

// counter is the increase of one of the stack's counters ("TcpExt.ListenOverflows").
func (f facts) counter(name string) (n uint64, known bool) { return plausible(f.Counters, name) }

// stat is the increase of a column of /proc/net/stat/nf_conntrack.
func (f facts) stat(column string) (n uint64, known bool) {
	if f.Conntrack == nil {
		return 0, false
	}
	return plausible(f.Conntrack.Stats, column)
}

func plausible(m map[string]uint64, key string) (uint64, bool) {
	n, ok := m[key]
	if !ok || n >= implausible {
		return 0, false
	}
	return n, true
}

// refused is how many packets the table turned away because it had no room: the
// column "drop" without the entries that could not be inserted, which both
// columns count.
func (f facts) refused() (n uint64, known bool) {
	drop, ok := f.stat("drop")
	if !ok {
		return 0, false
	}
	failed, _ := f.stat("insert_failed")
	return drop - min(drop, failed), true
}

// dropped is what the tracer saw dropped in this namespace for this cause.
func (f facts) dropped(cause snapshot.NATCause) (n uint64, rows []snapshot.Drop, known bool) {
	if f.Drops == nil {
		return 0, nil, false
	}
	for _, row := range f.Drops.Rows {
		if row.Cause != cause || row.Benign || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		n = saturate(n, row.Count)
		rows = append(rows, row)
	}
	return n, rows, true
}

// only is those packets of a row whose samples are wanted: as many as their share of the samples.
func only(row snapshot.Drop, wanted func(sample string) bool) (part snapshot.Drop, some bool) {
	all := uint64(len(row.Samples))
	row.Samples = slices.DeleteFunc(slices.Clone(row.Samples), func(s string) bool { return !wanted(s) })
	matching := uint64(len(row.Samples))
	if matching == 0 || row.Count >= implausible {
		return snapshot.Drop{}, false
	}
	row.Count = (row.Count*matching + all - 1) / all
	return row, true
}

// here says whether a namespace number is this namespace's, or unknown.
func (f facts) here(inode uint64) bool {
	return inode == 0 || f.Netns.Inode == 0 || inode == f.Netns.Inode
}

// limit is the table's limit; ok is false when it is not known or there is
// none: the kernel reads 0 as no limit.
func (f facts) limit() (max uint64, ok bool) {
	if f.Conntrack == nil || f.Conntrack.Max == 0 || f.Conntrack.Max >= implausible || f.Conntrack.Count >= implausible {
		return 0, false
	}
	return f.Conntrack.Max, true
}

// perSecond is n as a rate over the window; 0 when the window's length is not known.
func (f facts) perSecond(n uint64) float64 {
	w := f.WindowSeconds
	if !(w > 0) || math.IsInf(w, 0) {
		return 0
	}
	return float64(n) / w
}

// window names the time that the counters cover.
func (f facts) window() string {
	w := f.WindowSeconds
	if !(w > 0) || math.IsInf(w, 0) || w > 1e6 {
		return "in the window"
	}
	return "in " + strconv.FormatFloat(math.Round(w*10)/10, 'f', -1, 64) + " s"
}

// sysctl is the value of a setting that is a number.
func (f facts) sysctl(name string) (value int64, known bool) {
	text, ok := f.Sysctls[name]
	if !ok {
		return 0, false
	}
	value, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	return value, err == nil
}

// conf is net.ipv4.conf.DEVICE.KEY.
func (f facts) conf(device, key string) (value int64, known bool) {
	return f.sysctl(snapshot.SysctlName("net", "ipv4", "conf", device, key))
}

// links are the interfaces that packets can come in by: up, and not loopback.
func (f facts) links() []snapshot.Interface {
	var out []snapshot.Interface
	for _, i := range f.Interfaces {
		if i.Up && i.Name != "lo" {
			out = append(out, i)
		}
	}
	return out
}

func (f facts) link(name string) (snapshot.Interface, bool) {
	for _, i := range f.Interfaces {
		if i.Name == name && name != "" {
			return i, true
		}
	}
	return snapshot.Interface{}, false
}

// linkTo is the interface on whose network addr is.
func (f facts) linkTo(addr netip.Addr) (snapshot.Interface, bool) {
	best, bits := snapshot.Interface{}, -1
	for _, i := range f.links() {
		for _, p := range i.Addresses {
			if p.IsValid() && p.Bits() > bits && p.Masked().Contains(addr) {
				best, bits = i, p.Bits()
			}
		}
	}
	return best, bits >= 0
}

// own says whether addr is one of the namespace's own addresses.
func (f facts) own(addr netip.Addr) bool {
	for _, i := range f.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr() == addr {
				return true
			}
		}
	}
	return false
}

// manifold says whether addr is not one host's: multicast, or broadcast, on this machine's
// networks too. What is sent there ends on its network.
func (f facts) manifold(addr netip.Addr) bool {
	if addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return true
	}
	if !addr.Is4() {
		return false
	}
	host := binary.BigEndian.Uint32(addr.AsSlice())
	for _, i := range f.Interfaces {
		for _, p := range i.Addresses {
			if ones := ^uint32(0) >> max(p.Bits(), 0); p.Addr().Is4() && p.Bits() < 31 && p.Contains(addr) && host&ones == ones {
				return true
			}
		}
	}
	return false
}

// recent is how many seconds ago the last packet was at most of flows that count as tried
// just now.
func (f facts) recent() uint64 {
	if t := f.Conntrack.Table; t != nil && t.RecentSeconds > 0 && t.RecentSeconds < implausible {
		return t.RecentSeconds
	}
	return snapshot.RecentSeconds
}

// translatesSources says whether a rule here rewrites source addresses, which
// only makes sense on a machine that forwards.
func (f facts) translatesSources() bool { return slices.ContainsFunc(f.Chains, translatesSources) }

// translatesSourcesOfIPv4 is translatesSources without rules that are about IPv6 only.
func (f facts) translatesSourcesOfIPv4() bool {
	return slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool { return c.Family != "ip6" && translatesSources(c) })
}

func translatesSources(c snapshot.Chain) bool {
	return c.NATRules["masquerade"] > 0 || c.NATRules["snat"] > 0
}

// tuple is what a sampled packet says: "tcp 10.0.0.2:4000 -> 10.0.1.2:80 SYN".
type tuple struct {
	protocol     string
	source, dest netip.AddrPort // port 0 where there is none
}

func parseSample(s string) (tuple, bool) {
	fields := strings.Fields(s)
	if len(fields) < 4 || fields[2] != "->" {
		return tuple{}, false
	}
	src, ok1 := parseEnd(fields[1])
	dst, ok2 := parseEnd(fields[3])
	return tuple{fields[0], src, dst}, ok1 && ok2
}

func parseEnd(s string) (netip.AddrPort, bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap, true
	}
	a, err := netip.ParseAddr(s)
	return netip.AddrPortFrom(a, 0), err == nil
}

// samples are the packets that the tracer kept of these rows, as far as they can be read.
func samples(rows []snapshot.Drop) []tuple {
	var out []tuple
	for _, row := range rows {
		for _, s := range row.Samples {
			if t, ok := parseSample(s); ok {
				out = append(out, t)
			}
		}
	}
	return out
}

// hookCallers are the functions that run a netfilter hook for a packet.
var hookCallers = map[string]string{
	"ip_forward":        "forward",
	"br_nf_forward":     "forward", // br_netfilter: bridged frames
	"br_nf_forward_ip":  "forward", // the same before Linux 6.8
	"ip_local_deliver":  "input",
	"__ip_local_out":    "output",
	"ip_output":         "postrouting",
	"ip_rcv":            "prerouting",
	"ip_sublist_rcv":    "prerouting", // a batch of packets
	"ip_list_rcv":       "prerouting",
	"br_nf_pre_routing": "prerouting",
}

// hookOf tells on which netfilter hook a row's packets were dropped: forward,
// input, output, prerouting, or "" when neither its stacks nor its packets tell.
func (f facts) hookOf(row snapshot.Drop) string {
	for _, st := range row.Stacks {
		// Innermost first: the function that ran the hook comes before those that
		// brought the packet to it.
		for _, frame := range st.Frames {
			name, _, _ := strings.Cut(frame, "+")
			if hook, ok := hookCallers[name]; ok {
				return hook
			}
		}
	}
	// Without a stack: what is not for an address of ours was to be forwarded.
	for _, t := range samples([]snapshot.Drop{row}) {
		switch {
		case f.own(t.dest.Addr()):
			return "input"
		case f.own(t.source.Addr()):
			return "output"
		case len(f.Interfaces) > 0 && t.dest.Addr().Is4() && !t.dest.Addr().IsMulticast():
			return "forward"
		}
	}
	return ""
}

// bridged is the bridge that the packets of rows, dropped on the forward hook,
// were crossing, "" for routed ones. br_netfilter shows a frame to the IP rules
// when its device is the port it is to leave by; a routed packet's is the bridge
// that it came in by, never a port.
func (f facts) bridged(rows []snapshot.Drop) string {
	for _, row := range rows {
		if bridge := f.bridgeOf(row.Interface); bridge != "" {
			return bridge
		}
	}
	return ""
}

// bridgeOf is the bridge that an interface is a port of, "" for none.
func (f facts) bridgeOf(name string) string {
	port, ok := f.link(name)
	if !ok || port.Master == "" {
		return ""
	}
	if master, ok := f.link(port.Master); ok && master.Kind == "bridge" {
		return master.Name
	}
	return ""
}

// devices are the interfaces that rows name, most packets first, each once.
func devices(rows []snapshot.Drop) []string {
	var out []string
	seen := map[string]bool{"": true}
	for _, row := range rows {
		if !seen[row.Interface] {
			seen[row.Interface] = true
			out = append(out, row.Interface)
		}
	}
	return out
}

// run is a command as the user types it to have it run in this namespace.
func (f facts) run(command string) string { return shell.In(f.Netns.Name, command) }

// sysfs is a script about files of /sys/class/net. They are those of the namespace that mounted /sys,
// which ip netns exec does itself.
func (f facts) sysfs(script string) string {
	if ref := f.Netns.Name; strings.HasPrefix(ref, "pid:") || strings.HasPrefix(ref, "/") {
		return f.run("unshare -m sh -c " + quote("mount -t sysfs sysfs /sys && { "+script+"; }"))
	}
	return f.run("sh -c " + quote(script))
}

// natkit is a natkit command that looks at this namespace.
func (f facts) natkit(args string) string { return natkitIn(f.Netns.Name, args) }

func natkitIn(ref, args string) string {
	if ref == "" {
		return "natkit " + args
	}
	return "natkit --netns " + quote(ref) + " " + args
}

// set is the command that makes a setting, in the setting's own namespace.
func (f facts) set(s snapshot.Setting) string {
	command := "sysctl -w " + quote(s.Name+"="+s.Value)
	if s.Netns == "" {
		return command
	}
	return f.run(command)
}

// enough says whether a setting of which more is more room has as much as s already.
func (f facts) enough(s snapshot.Setting) bool {
	now, known := f.sysctl(s.Name)
	want, err := strconv.ParseInt(s.Value, 10, 64)
	return known && err == nil && now >= want
}

// applied is a remedy's settings by natkit itself. What persists are settings of the
// initial namespace: sysctl.d is read for no other one.
func (f facts) applied() []string {
	if f.Netns.Init {
		return []string{"# the same, journalled and kept after a reboot:", f.natkit("tune apply --persist")}
	}
	return []string{"# the same, journalled; it lasts as long as the namespace:", f.natkit("tune apply")}
}

// local is a setting of this namespace.
func (f facts) local(name string, value uint64) snapshot.Setting {
	return snapshot.Setting{Name: name, Value: strconv.FormatUint(value, 10), Netns: f.Netns.Name}
}

// device is a setting of a network device of this namespace.
func (f facts) device(name, key, value string) snapshot.Setting {
	return snapshot.Setting{Name: snapshot.SysctlName("dev", name, key), Value: value, Netns: f.Netns.Name}
}

// linkMayGo is what speaks against settings for which a driver stops its card.
const linkMayGo = "its link may go down for a moment"

// provided is a setting that is right only if a condition holds which the facts
// can't show.
func provided(s snapshot.Setting, condition string) snapshot.Setting {
	s.If = condition
	return s
}

// look are the commands that show whether the cure worked.
func (f facts) look(more ...string) []string {
	return append([]string{f.natkit("doctor --for 10s")}, more...)
}

func quote(s string) string { return shell.Quote(s) }

// share is part of whole, from 0 to 1; 0 when there is no whole.
func share(part, whole uint64) float64 {
	if whole == 0 {
		return 0
	}
	return math.Min(1, float64(part)/float64(whole))
}

// number counts things: "1 packet", "5 packets".
func number(n uint64, thing string) string {
	return plural.Count(n, thing)
}

// amount prints a size in the unit that suits it.
func amount(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 10<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d bytes", n)
}

// saturate adds without wrapping round.
func saturate(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}

// Where evidence comes from.
const (
	fromTracer   = "packets dropped, by tracepoint skb:kfree_skb"
	fromStats    = "/proc/net/stat/nf_conntrack"
	fromDump     = "dump of the connection tracking table"
	fromLog      = "kernel log"
	fromSnmp     = "/proc/net/snmp"
	fromNetstat  = "/proc/net/netstat"
	fromRules    = "packet filter rules"
	fromSettings = "/proc/sys"
	fromLinks    = "interfaces"
	fromNetlink  = "/proc/net/netlink"
	fromCPUs     = "/proc/stat"
	fromSoftnet  = "/proc/net/softnet_stat"
	fromDrivers  = "drivers, by ethtool"
	fromQdiscs   = "queues of the interfaces"
	fromHooks    = "registered netfilter hooks, and rules"
	fromRoutes   = "routing tables, read at the end of the window"
	fromSockets  = "listening sockets"
	fromOwnTCP   = "sockets of TCP connections"
	fromSlab     = "/proc/slabinfo"
)
