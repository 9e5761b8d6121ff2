// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"natkit/internal/snapshot"
)

// The two settings that cost memory. Buckets are written first: a larger limit
// on a hash that is still small would lengthen the chains for a moment. The
// kernel keeps them apart: resizing the hash at run time does not touch the
// limit (nf_conntrack_hash_resize, Linux 6.18); it rounds the number of buckets
// up to whole pages.
const (
	settingMax     = "net.netfilter.nf_conntrack_max"
	settingBuckets = "net.netfilter.nf_conntrack_buckets"
)

// settingReserve is the one setting that is not of the network: entries are
// allocated where the kernel can't wait for memory.
const settingReserve = "vm.min_free_kbytes"

// setting is one thing natkit may write. A name with "*" has an interface, "all"
// or "default" there.
type setting struct {
	name  string
	scope Scope
	// Each of the value's numbers lies in [min, max].
	min, max int64
	numbers  int    // how many numbers the value has; 0 means 1
	mask     bool   // it is a mask of processors instead, one or one for each queue
	size     bool   // more is more room: a wish for less than there is, is fulfilled
	does     string // in a few words, for who reads a plan
	// spreads names what the kernel changes along with it, as a pattern.
	spreads []string
}

// Limits of the kernel: proc_dointvec_jiffies multiplies seconds by HZ (at most
// 1000) in an int.
const (
	maxInt     = 1<<31 - 1
	maxSeconds = maxInt / 1000
)

// settings is the whole list. What is not in it is never written, whatever a
// finding or a snapshot says. Host settings are those that a namespace other
// than the initial one does not have or has read-only (Linux 6.18).
var settings = func() map[string]setting {
	list := []setting{
		{name: settingMax, scope: ScopeHost, min: 1, max: maxInt, size: true, does: "room for more connections at once"},
		{name: settingBuckets, scope: ScopeHost, min: 1, max: maxInt, size: true, does: "fewer entries in each bucket of the hash"},
		{name: "net.netfilter.nf_conntrack_expect_max", scope: ScopeHost, min: 1, max: maxInt, size: true, does: "room for more connections that helpers expect"},
		{name: "net.core.netdev_max_backlog", scope: ScopeHost, min: 1, max: maxInt, size: true, does: "longer queues of packets that wait for a CPU"},
		{name: "net.core.netdev_budget", scope: ScopeHost, min: 1, max: maxInt, size: true, does: "more packets per polling round"},
		{name: "net.core.netdev_budget_usecs", scope: ScopeHost, min: 1, max: maxInt, size: true, does: "longer polling rounds"},
		{name: "net.core.rmem_max", scope: ScopeHost, min: 1, max: maxInt, size: true, does: "larger receive buffers for programs that ask for them"},
		{name: settingReserve, scope: ScopeHost, min: 1, max: maxInt, size: true, does: "a larger memory reserve for allocations that cannot wait, such as entries"},
		{name: "net.ipv4.neigh.default.gc_thresh1", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "more neighbours before garbage collection starts"},
		{name: "net.ipv4.neigh.default.gc_thresh2", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "more neighbours before forced garbage collection"},
		{name: "net.ipv4.neigh.default.gc_thresh3", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "room for more neighbours, for all namespaces together"},
		{name: "net.ipv6.neigh.default.gc_thresh1", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "more neighbours before garbage collection starts"},
		{name: "net.ipv6.neigh.default.gc_thresh2", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "more neighbours before forced garbage collection"},
		{name: "net.ipv6.neigh.default.gc_thresh3", scope: ScopeHost, min: 0, max: maxInt, size: true, does: "room for more neighbours, for all namespaces together"},

		{name: "net.core.somaxconn", min: 1, max: maxInt, size: true, does: "longer accept queues for programs that ask for them, from their next listen(): restart them"},
		{name: "net.ipv4.tcp_max_syn_backlog", min: 1, max: maxInt, size: true, does: "room for more half-open connections"},
		{name: "net.ipv4.tcp_syncookies", max: 2, does: "1: SYN cookies when the queue of half-open connections is full"},
		{name: "net.ipv4.tcp_tw_reuse", max: 2, does: "whether a new outgoing connection may reuse a port in TIME_WAIT"},
		{name: "net.ipv4.tcp_mtu_probing", max: 2, does: "whether TCP probes for the path MTU"},
		{name: "net.ipv4.ip_no_pmtu_disc", max: 3, does: "whether packets are sent without DF"},
		{name: "net.ipv4.ip_local_port_range", min: 1, max: 65535, numbers: 2, does: "ports for outgoing connections of this machine"},
		{name: "net.ipv4.ipfrag_high_thresh", min: 1, max: maxInt, size: true, does: "more memory for fragments that wait for reassembly"},
		{name: "net.ipv4.ipfrag_low_thresh", min: 1, max: maxInt, size: true, does: "more memory for fragments that wait for reassembly"},

		// Forwarding for the whole namespace is written to every interface as well,
		// and switches the acceptance of redirects over (inet_forward_change,
		// addrconf_fixup_forwarding).
		{name: "net.ipv4.ip_forward", max: 1, spreads: []string{"net.ipv4.conf.*.forwarding", "net.ipv4.conf.all.accept_redirects"}, does: "whether packets are forwarded"},
		{name: "net.ipv4.conf.all.forwarding", max: 1, spreads: []string{"net.ipv4.conf.*.forwarding", "net.ipv4.conf.all.accept_redirects"}, does: "whether packets are forwarded"},
		{name: "net.ipv6.conf.all.forwarding", max: 1, spreads: []string{"net.ipv6.conf.*.forwarding"}, does: "whether packets are forwarded"},
		{name: "net.ipv4.conf.*.forwarding", max: 1, does: "whether packets that arrive there are forwarded"},
		{name: "net.ipv6.conf.*.forwarding", max: 1, does: "whether packets that arrive there are forwarded"},
		{name: "net.ipv4.conf.*.rp_filter", max: 2, does: "0: no check; 1: the route back must use the same interface; 2: there must be a route back"},
		{name: "net.ipv4.conf.*.accept_local", max: 1, does: "whether packets from this machine's own addresses may arrive there"},
		{name: "net.ipv4.conf.*.arp_filter", max: 1, does: "1: reply to ARP only if the route back to the sender uses that interface"},
		{name: "net.ipv4.conf.*.arp_ignore", max: 8, does: "0: reply to ARP for every address of this machine; 1: for those of the interface; 2: also only to its own network; 8: never"},
		{name: "net.ipv4.conf.*.route_localnet", max: 1, does: "whether packets to 127.0.0.0/8 may arrive there"},

		{name: "dev.*.rx_ring", min: 1, max: maxInt, size: true, does: "a longer receive ring; the link may go down for a moment"},
		{name: "dev.*.combined_channels", min: 1, max: 1 << 16, size: true, does: "more queues, each with its own CPU; the link may go down for a moment"},
		{name: "dev.*.rx_checksum", max: 1, does: "whether the card verifies checksums of received packets"},
		{name: "dev.*.threaded", max: 1, does: "whether separate threads receive packets; they can have a priority"},
		{name: "dev.*.tx_queue_len", max: maxInt, size: true, does: "a longer queue of packets that wait to be sent"},
		{name: "dev.*.rps_cpus", mask: true, does: "CPUs to which packets of a receive queue are distributed, by flow"},

		{name: "net.bridge.bridge-nf-call-iptables", max: 1, does: "whether bridged frames pass the IPv4 rules"},
		{name: "net.bridge.bridge-nf-call-ip6tables", max: 1, does: "whether bridged frames pass the IPv6 rules"},
		{name: "net.bridge.bridge-nf-call-arptables", max: 1, does: "whether bridged frames pass the ARP rules"},

		{name: "net.netfilter.nf_conntrack_acct", max: 1, does: "whether each entry counts packets and bytes, which costs memory"},
		{name: "net.netfilter.nf_conntrack_timestamp", max: 1, does: "whether each entry records its start time, which costs memory"},
		{name: "net.netfilter.nf_conntrack_events", max: 2, does: "whether programs get events of entries"},
		{name: "net.netfilter.nf_conntrack_helper", max: 1, does: "whether helpers are assigned to connections by port"},
		{name: "net.netfilter.nf_conntrack_log_invalid", max: 255, does: "the protocol whose invalid packets are logged"},
		{name: "net.netfilter.nf_conntrack_tcp_be_liberal", max: 1, does: "whether segments outside the window stay valid"},
		{name: "net.netfilter.nf_conntrack_tcp_loose", max: 1, does: "whether connections that started unseen are tracked"},
	}
	for timeout, entries := range map[string]string{
		"tcp_timeout_syn_sent":       "connections without a reply",
		"tcp_timeout_syn_recv":       "connections with a SYN-ACK that were not completed",
		"tcp_timeout_established":    "open connections",
		"tcp_timeout_fin_wait":       "connections that one side has closed",
		"tcp_timeout_close_wait":     "connections that one side has closed",
		"tcp_timeout_last_ack":       "connections that both sides have closed",
		"tcp_timeout_time_wait":      "closed connections",
		"tcp_timeout_close":          "reset connections",
		"tcp_timeout_max_retrans":    "connections with unacknowledged retransmissions",
		"tcp_timeout_unacknowledged": "connections with unacknowledged data",
		"udp_timeout":                "UDP flows without a reply",
		"udp_timeout_stream":         "UDP flows in both directions",
		"icmp_timeout":               "pings",
		"icmpv6_timeout":             "IPv6 pings",
		"generic_timeout":            "flows of other protocols",
		"gre_timeout":                "GRE flows without a reply",
		"gre_timeout_stream":         "GRE flows in both directions",
	} {
		list = append(list, setting{name: "net.netfilter.nf_conntrack_" + timeout, min: 1, max: maxSeconds,
			does: "seconds that " + entries + " stay in the table without a packet"})
	}
	byName := make(map[string]setting, len(list))
	for _, s := range list {
		if s.scope == "" {
			s.scope = ScopeNamespace
		}
		byName[s.name] = s
	}
	return byName
}()

// find returns what natkit knows about the setting called name, and refuses
// everything else: this is what keeps a name such as "net.ipv4.conf.//.x"
// ("../" on disk) from leading anywhere.
func find(name string) (setting, error) {
	if s, ok := settings[name]; ok && !strings.Contains(name, "*") {
		return s, nil
	}
	parts := strings.Split(name, ".")
	if at := interfacePart(parts); at >= 0 && validInterface(strings.ReplaceAll(parts[at], "/", ".")) {
		parts[at] = "*"
		if s, ok := settings[strings.Join(parts, ".")]; ok {
			s.name = name
			return s, nil
		}
	}
	return setting{}, fmt.Errorf("setting %q: not one of those that natkit changes", name)
}

// interfacePart is where an interface, "all" or "default" stands among the parts of a setting's name, -1 where none does.
func interfacePart(parts []string) int {
	switch {
	case len(parts) == 3 && parts[0] == "dev":
		return 1
	case len(parts) == 5 && parts[2] == "conf":
		return 3
	}
	return -1
}

// validInterface is stricter than the kernel (dev_valid_name): of the other
// characters that a device's name may have, each means something in sysctl.d.
func validInterface(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 15 {
		return false
	}
	for _, r := range name {
		if !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-_.@+", r) {
			return false
		}
	}
	return true
}

// value checks a value and brings it into the form that the kernel prints, with
// single spaces.
func (s setting) value(text string) (string, error) {
	fields := strings.Fields(text)
	if s.mask {
		return s.masks(fields, text)
	}
	if want := max(s.numbers, 1); len(fields) != want {
		return "", fmt.Errorf("setting %s: value %q: want %d number(s)", s.name, text, want)
	}
	last := s.min
	for i, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil || n < s.min || n > s.max {
			return "", fmt.Errorf("setting %s: value %q: want %d to %d", s.name, text, s.min, s.max)
		}
		if n < last { // the only pairs are ranges
			return "", fmt.Errorf("setting %s: value %q: not in ascending order", s.name, text)
		}
		last = n
		fields[i] = strconv.FormatInt(n, 10) // the kernel reads 010 as eight
	}
	return strings.Join(fields, " "), nil
}

// maxQueues is how many queues a device may have.
const maxQueues = 4096

func (s setting) masks(fields []string, text string) (string, error) {
	if len(fields) == 0 || len(fields) > maxQueues {
		return "", fmt.Errorf("setting %s: value %q: want a mask of processors, in hexadecimal, or one for each queue", s.name, text)
	}
	for i, f := range fields {
		mask, err := canonicalMask(f)
		if err != nil {
			return "", fmt.Errorf("setting %s: %w", s.name, err)
		}
		fields[i] = mask
	}
	return strings.Join(fields, " "), nil
}

// canonicalMask writes a mask of processors as the kernel takes it: hexadecimal, in
// words of 32 bits with commas between, without zeros before.
func canonicalMask(text string) (string, error) {
	digits := strings.TrimLeft(strings.ReplaceAll(strings.ToLower(text), ",", ""), "0")
	if text == "" || strings.Trim(digits, "0123456789abcdef") != "" || len(digits) > 2048 {
		return "", fmt.Errorf("mask of processors %q: want hexadecimal digits", text)
	}
	if digits == "" {
		return "0", nil
	}
	for i := len(digits) - 8; i > 0; i -= 8 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits, nil
}

// sameMasks compares masks of queues; one stands for all queues.
func sameMasks(present, wanted string) bool {
	p, w := strings.Fields(present), strings.Fields(wanted)
	if len(w) != 1 {
		return slices.Equal(p, w)
	}
	return len(p) > 0 && !slices.ContainsFunc(p, func(mask string) bool { return mask != w[0] })
}

// fulfilled says whether a setting at present needs no change to get to wanted.
func (s setting) fulfilled(present, wanted string) bool {
	if s.name == settingMax && present == "0" { // no limit at all
		return true
	}
	if s.size {
		p, errP := strconv.ParseUint(present, 10, 64)
		w, errW := strconv.ParseUint(wanted, 10, 64)
		return errP == nil && errW == nil && p >= w
	}
	if s.mask {
		return sameMasks(present, wanted)
	}
	return present == wanted
}

// bucketPage is the most buckets that one page holds (64 KiB pages, 8 bytes a
// bucket): how far the kernel may round up.
const bucketPage = 65536 / 8

// took says whether a setting that reads present is what writing written gives.
func (s setting) took(present, written string) bool {
	if present == written {
		return true
	}
	if s.mask {
		return sameMasks(present, written)
	}
	if strings.HasSuffix(s.name, ".rx_ring") { // drivers round up to what their hardware has
		p, errP := strconv.ParseInt(present, 10, 64)
		w, errW := strconv.ParseInt(written, 10, 64)
		return errP == nil && errW == nil && p > w && p < 2*w
	}
	if s.name == settingBuckets {
		p, errP := strconv.ParseInt(present, 10, 64)
		w, errW := strconv.ParseInt(written, 10, 64)
		return errP == nil && errW == nil && p > w && p < w+bucketPage && p%(4096/8) == 0
	}
	return false
}

// path is the setting's file below /proc/sys.
func (s setting) path() string { return snapshot.SysctlPath(s.name) }
