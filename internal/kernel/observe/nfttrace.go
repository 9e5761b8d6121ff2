// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// RuleTrace is nftables' own trace in one namespace: each rule that a packet meets, reported by the
// kernel. The kernel reports packets that carry a mark, which a rule must set: natkit's stands in a
// table of its own, which only matching packets meet, and which belongs to natkit's socket. The
// kernel removes it with the socket, however natkit ends (NFT_TABLE_F_OWNER, Linux 5.12).
type RuleTrace struct {
	ref    string
	inode  uint64
	filter PacketFilter
	family uint8 // of the table
	// tracked are families whose connections are tracked. Each has a table: rules that ask for the connection have the
	// kernel track those of their table's family, and inet's are both.
	tracked []uint8
	waits   bool            // for new connections alone: see OpenWaiting
	marked  map[uint64]bool // while it waits: packets that the table has marked, by their trace ids
	owner   *netlink.Conn   // whose table it is
	events  *netlink.Conn
	names   map[uint32]string // of interfaces, for Read
	known   map[snapshot.TraceTuple]bool
	asks    bool // the rules that ask the sets of followed tuples are there
	mu      sync.Mutex
}

// ErrRulesLost is an error of Read after which it goes on: there was no room for rules that the kernel reported.
var ErrRulesLost = errors.New("rules that the kernel reported were lost")

// Netns is the inode number of the namespace.
func (t *RuleTrace) Netns() uint64 { return t.inode }

// ruleTraceTable names the table; the number of the process keeps two traces apart.
func ruleTraceTable() string { return fmt.Sprintf("%s%d", ruleTraceTables, os.Getpid()) }

const ruleTraceTables = "natkit-trace-"

// Kernel interface, linux/netfilter/nf_tables.h, as far as package unix does not have it.
const (
	nftTableOwner   = 2
	nftGroupTrace   = 9 // NFNLGRP_NFTRACE
	nftCtSrcIP      = 19
	nftCtDstIP      = 20
	nftCtSrcIP6     = 21
	nftCtDstIP6     = 22
	nftReg32        = 8 // NFT_REG32_00
	traceReadBuffer = 4 << 20
)

// OpenRuleTrace begins to trace rules in a namespace in which nftables has chains. Where connection tracking
// is on, replies are recognised by their entry. The error wraps ErrUnavailable where the kernel does not
// allow it, or where it would write each packet to the log.
func OpenRuleTrace(place HookedPlace, f PacketFilter) (*RuleTrace, error) {
	h, err := netns.Open(place.Ref)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	t := &RuleTrace{
		ref: place.Ref, inode: place.Inode, filter: f, family: unix.NFPROTO_INET, tracked: f.families(place.Tracks4, place.Tracks6), known: map[snapshot.TraceTuple]bool{},
	}
	if err := t.open(h); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *RuleTrace) open(h *netns.Handle) error {
	err := h.Do(func() (err error) {
		if logsTrace() {
			return &unavailableError{what: traceRules, why: "iptables-legacy has tables here, and would write each marked packet to the kernel's log"}
		}
		if t.events, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
			return err
		}
		_ = t.events.SetReadBuffer(traceReadBuffer) // smaller is as good for few packets
		if err := t.events.JoinGroup(nftGroupTrace); err != nil {
			return err
		}
		if t.owner, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
			return err
		}
		return t.batch(t.table())
	})
	if err != nil {
		t.Close()
		return refused(traceRules, err)
	}
	return nil
}

const traceRules = "trace rules of nftables"

// logsTrace says whether iptables-legacy would log marked packets of the calling thread's namespace.
func logsTrace() bool {
	names, _ := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	names6, _ := os.ReadFile("/proc/thread-self/net/ip6_tables_names")
	if len(names)+len(names6) == 0 {
		return false
	}
	loggers, _ := os.ReadFile("/proc/sys/net/netfilter/nf_log/2")
	loggers6, _ := os.ReadFile("/proc/sys/net/netfilter/nf_log/10")
	return !none(loggers) || !none(loggers6)
}

func none(logger []byte) bool {
	name := strings.TrimSpace(string(logger))
	return name == "" || name == "NONE"
}

// Close ends the trace; the table goes with its socket.
func (t *RuleTrace) Close() error {
	var errs []error
	for _, c := range []*netlink.Conn{t.owner, t.events} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// Follow marks packets of these tuples, too: a connection behind a translation.
func (t *RuleTrace) Follow(tuples ...snapshot.TraceTuple) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var messages []netlink.Message
	var added []snapshot.TraceTuple
	for _, tuple := range tuples {
		if t.known[tuple] || !portsByName(tuple.Protocol) {
			continue
		}
		t.known[tuple] = true
		added = append(added, tuple)
		messages = append(messages, t.element(tuple))
	}
	if messages == nil {
		return nil
	}
	if !t.asks { // until now they would only have cost time
		for _, chain := range markChains {
			messages = append(messages, t.rule(chain, followedMatch(0)), t.rule(chain, followedMatch(1)))
		}
	}
	if err := t.batch(messages); err != nil { // nothing of it is there
		for _, tuple := range added {
			delete(t.known, tuple)
		}
		return err
	}
	t.asks = true
	return nil
}

// Forget marks packets of the filter alone again.
func (t *RuleTrace) Forget() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.known)
	if !t.asks {
		return nil
	}
	return t.batch([]netlink.Message{emptied(0), emptied(1)})
}

func portsByName(protocol string) bool {
	for number := range uint8(255) {
		if hasPorts(number) && protocolName(number) == protocol {
			return true
		}
	}
	return false
}

// Read returns the next event, os.ErrDeadlineExceeded if there is none until then. Rules are not
// named but by their handles, and chains have no hooks yet.
func (t *RuleTrace) Read(until time.Time) ([]snapshot.TraceEvent, error) {
	if err := t.events.SetReadDeadline(until); err != nil {
		return nil, fmt.Errorf("%s: %w", traceRules, err)
	}
	messages, err := t.events.Receive()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, os.ErrDeadlineExceeded
	}
	if errors.Is(err, unix.ENOBUFS) {
		return nil, ErrRulesLost
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", traceRules, err)
	}
	var out []snapshot.TraceEvent
	for _, m := range messages {
		if m.Header.Type != netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE) || len(m.Data) < 4 {
			continue
		}
		e, device, err := traceEvent(m.Data[4:])
		e.Rule.Family = traceFamilies[m.Data[0]]
		if err != nil {
			return out, ErrRulesLost
		}
		if e.Rule.Table == ruleTraceTable() && e.Rule.Handle != 0 {
			t.mark(e.Packet)
		}
		if strings.HasPrefix(e.Rule.Table, ruleTraceTables) || e.Rule.Handle == 0 && e.Point == snapshot.PointRule && e.Head == nil {
			continue // a trace's own, or the end of a chain that was jumped to
		}
		if t.waits && !t.marked[e.Packet] {
			continue // another trace has marked the packet, or a rule of somebody's
		}
		e.Netns, e.Namespace, e.TimeNS, e.Interface = t.inode, t.ref, monotonicNow(), t.device(device)
		out = append(out, e)
	}
	return out, nil
}

// maxMarked bounds what is remembered of packets: a trace that waits ends soon behind the first.
const maxMarked = 4096

func (t *RuleTrace) mark(packet uint64) {
	if !t.waits {
		return
	}
	if len(t.marked) >= maxMarked || t.marked == nil {
		t.marked = map[uint64]bool{}
	}
	t.marked[packet] = true
}

// device names an interface of the namespace, "" for none.
func (t *RuleTrace) device(number uint32) string {
	if number == 0 || t.names[number] != "" {
		return t.names[number]
	}
	t.names = map[uint32]string{number: fmt.Sprintf("if%d", number)}
	h, err := netns.Open(t.ref)
	if err != nil {
		return t.names[number]
	}
	defer h.Close()
	_ = h.Do(func() error { // without a list the number stays
		all, err := net.Interfaces()
		for _, dev := range all {
			t.names[uint32(dev.Index)] = dev.Name
		}
		return err
	})
	return t.names[number]
}

func monotonicNow() uint64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it can't fail
	return uint64(ts.Nano())
}

var traceFamilies = map[uint8]string{
	unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6",
	unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge",
}

// traceEvent reads the attributes of NFT_MSG_TRACE, and the number of the interface.
func traceEvent(attrs []byte) (snapshot.TraceEvent, uint32, error) {
	e := snapshot.TraceEvent{Source: snapshot.TraceNFTables, Point: snapshot.PointRule, Rule: &snapshot.TraceRule{}}
	ad, err := netlink.NewAttributeDecoder(attrs)
	if err != nil {
		return e, 0, err
	}
	ad.ByteOrder = binary.BigEndian
	var network, transport []byte
	var policy, in, out uint32
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_TRACE_TABLE:
			e.Rule.Table = ad.String()
		case unix.NFTA_TRACE_CHAIN:
			e.Rule.Chain = ad.String()
		case unix.NFTA_TRACE_RULE_HANDLE:
			e.Rule.Handle = ad.Uint64()
		case unix.NFTA_TRACE_TYPE:
			switch ad.Uint32() {
			case unix.NFT_TRACETYPE_POLICY:
				e.Point = snapshot.PointPolicy
			case unix.NFT_TRACETYPE_RETURN:
				e.Rule.Verdict = "return"
			}
		case unix.NFTA_TRACE_VERDICT:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					switch ad.Type() {
					case unix.NFTA_VERDICT_CODE:
						e.Rule.Verdict = traceVerdict(int32(ad.Uint32()))
					case unix.NFTA_VERDICT_CHAIN:
						e.Rule.To = ad.String()
					}
				}
				return nil
			})
		case unix.NFTA_TRACE_ID:
			e.Packet = uint64(ad.Uint32())
		case unix.NFTA_TRACE_POLICY:
			policy = ad.Uint32()
		case unix.NFTA_TRACE_IIF:
			in = ad.Uint32()
		case unix.NFTA_TRACE_OIF:
			out = ad.Uint32()
		case unix.NFTA_TRACE_MARK:
			e.Mark = ad.Uint32()
		case unix.NFTA_TRACE_NETWORK_HEADER:
			network = ad.Bytes()
		case unix.NFTA_TRACE_TRANSPORT_HEADER:
			transport = ad.Bytes()
		}
	}
	if e.Point == snapshot.PointPolicy {
		e.Rule.Verdict = traceVerdict(int32(policy))
	}
	if len(network) > 0 {
		readHead(&e, append(network, transport...))
	}
	return e, cmp.Or(in, out), ad.Err()
}

func traceVerdict(code int32) string {
	switch code {
	case 0:
		return "drop"
	case 1:
		return "accept"
	case 2:
		return "stolen"
	case 3:
		return "queue"
	case -1:
		return "continue"
	case -2:
		return "break"
	case -3:
		return "jump"
	case -4:
		return "goto"
	case -5:
		return "return"
	}
	return fmt.Sprintf("verdict %d", code)
}

// What follows writes the table:
//
//	table inet natkit-trace-PID { flags owner
//	  chain prerouting, output: before all others: packets of the filter and, as soon as there are
//	    any, of @followed4 and @followed6
//	}
//	table ip natkit-trace-PID { flags owner; and ip6: where connections of that family are tracked
//	  chain tracked: behind connection tracking: replies to packets of the filter
//	}

// message is one of a transaction.
func message(kind uint16, flags netlink.HeaderFlags, encode func(*netlink.AttributeEncoder)) netlink.Message {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	encode(ae)
	attrs, err := ae.Encode()
	if err != nil {
		panic(err) // attributes of fixed size
	}
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: netlink.Request | netlink.Acknowledge | flags},
		Data:   append([]byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0}, attrs...),
	}
}

// batch sends messages about the table as one transaction.
func (t *RuleTrace) batch(messages []netlink.Message) error {
	for i := range messages {
		if messages[i].Data[0] == unix.NFPROTO_UNSPEC {
			messages[i].Data[0] = t.family
		}
	}
	return batch(t.owner, messages)
}

// batch sends messages as one transaction.
func batch(conn *netlink.Conn, messages []netlink.Message) error {
	edge := func(kind int) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	all := append([]netlink.Message{edge(unix.NFNL_MSG_BATCH_BEGIN)}, messages...)
	if _, err := conn.SendMessages(append(all, edge(unix.NFNL_MSG_BATCH_END))); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	for answers := 0; answers < len(messages); {
		got, err := conn.Receive()
		if err != nil {
			return errors.Join(err, forget(conn, len(messages)))
		}
		answers += len(got)
	}
	return nil
}

// forget reads the other answers to a transaction that was refused: the next one would take them for
// its own. The kernel has queued all of them before what sent the messages returned.
func forget(conn *netlink.Conn, most int) error {
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		return err
	}
	for range most {
		if _, err := conn.Receive(); errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	return nil
}

func (t *RuleTrace) table() []netlink.Message {
	name := ruleTraceTable()
	made := func() netlink.Message {
		return message(unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Excl, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_TABLE_NAME, name)
			ae.Uint32(unix.NFTA_TABLE_FLAGS, nftTableOwner)
		})
	}
	out := []netlink.Message{made()}
	if t.waits {
		return append(out, t.waitingChains()...)
	}
	for i, keyLength := range []uint32{20, 44} {
		out = append(out, message(unix.NFT_MSG_NEWSET, netlink.Create, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_SET_TABLE, name)
			ae.String(unix.NFTA_SET_NAME, followedSets[i])
			ae.Uint32(unix.NFTA_SET_FLAGS, 0)
			ae.Uint32(unix.NFTA_SET_KEY_TYPE, 0)
			ae.Uint32(unix.NFTA_SET_KEY_LEN, keyLength)
			ae.Uint32(unix.NFTA_SET_ID, uint32(i+1))
		}))
	}
	for hook, chain := range markChains {
		out = append(out, t.chain(chain, "filter", hook, math.MinInt32+1))
		for _, match := range t.filterMatches() {
			out = append(out, t.rule(chain, match))
		}
	}
	for _, family := range t.tracked {
		tracked := []netlink.Message{made(), t.chain("tracked", "filter", unix.NF_INET_PRE_ROUTING, conntrackPriority+1)}
		for _, match := range t.replyMatches() {
			tracked = append(tracked, t.rule("tracked", match))
		}
		for _, m := range tracked {
			m.Data[0] = family
		}
		out = append(out, tracked...)
	}
	return out
}

// markChains are the first of their hooks.
var markChains = map[uint32]string{unix.NF_INET_PRE_ROUTING: "prerouting", unix.NF_INET_LOCAL_OUT: "output"}

var followedSets = []string{"followed4", "followed6"}

func (t *RuleTrace) chain(name, kind string, hook uint32, priority int32) netlink.Message {
	return message(unix.NFT_MSG_NEWCHAIN, netlink.Create, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, ruleTraceTable())
		ae.String(unix.NFTA_CHAIN_NAME, name)
		ae.String(unix.NFTA_CHAIN_TYPE, kind)
		ae.Nested(unix.NFTA_CHAIN_HOOK, func(ae *netlink.AttributeEncoder) error {
			ae.Uint32(unix.NFTA_HOOK_HOOKNUM, hook)
			ae.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))
			return nil
		})
	})
}

// expression is one of a rule.
type expression struct {
	name string
	data func(*netlink.AttributeEncoder)
}

// rule marks packets that match, no more in a second than are traced.
func (t *RuleTrace) rule(chain string, match []expression) netlink.Message {
	all := append(match, expression{"limit", func(ae *netlink.AttributeEncoder) {
		ae.Uint64(unix.NFTA_LIMIT_RATE, uint64(t.filter.Rate))
		ae.Uint64(unix.NFTA_LIMIT_UNIT, 1)
		ae.Uint32(unix.NFTA_LIMIT_BURST, 5)
	}}, expression{"immediate", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_IMMEDIATE_DREG, nftReg32)
		value(ae, unix.NFTA_IMMEDIATE_DATA, []byte{1})
	}}, expression{"meta", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_META_KEY, unix.NFT_META_NFTRACE)
		ae.Uint32(unix.NFTA_META_SREG, nftReg32)
	}})
	return message(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, ruleTraceTable())
		ae.String(unix.NFTA_RULE_CHAIN, chain)
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(ae *netlink.AttributeEncoder) error {
			for _, e := range all {
				ae.Nested(unix.NFTA_LIST_ELEM, func(ae *netlink.AttributeEncoder) error {
					ae.String(unix.NFTA_EXPR_NAME, e.name)
					ae.Nested(unix.NFTA_EXPR_DATA, func(ae *netlink.AttributeEncoder) error {
						e.data(ae)
						return nil
					})
					return nil
				})
			}
			return nil
		})
	})
}

func value(ae *netlink.AttributeEncoder, attr uint16, b []byte) {
	ae.Nested(attr, func(ae *netlink.AttributeEncoder) error {
		ae.Bytes(unix.NFTA_DATA_VALUE, b)
		return nil
	})
}

func compare(b []byte) expression {
	return expression{"cmp", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_CMP_SREG, unix.NFT_REG_1)
		ae.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		value(ae, unix.NFTA_CMP_DATA, b)
	}}
}

func meta(register, key uint32) expression {
	return expression{"meta", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_META_DREG, register)
		ae.Uint32(unix.NFTA_META_KEY, key)
	}}
}

func payload(register, base, offset, length uint32) expression {
	return expression{"payload", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_PAYLOAD_DREG, register)
		ae.Uint32(unix.NFTA_PAYLOAD_BASE, base)
		ae.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		ae.Uint32(unix.NFTA_PAYLOAD_LEN, length)
	}}
}

func original(key uint32) expression {
	return expression{"ct", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_CT_DREG, unix.NFT_REG_1)
		ae.Uint32(unix.NFTA_CT_KEY, key)
		if key != unix.NFT_CT_DIRECTION {
			ae.Uint8(unix.NFTA_CT_DIRECTION, 0)
		}
	}}
}

// within compares what is in the first register with a prefix.
func within(p netip.Prefix) []expression {
	address := p.Masked().Addr().AsSlice()
	if p.IsSingleIP() {
		return []expression{compare(address)}
	}
	mask := make([]byte, len(address))
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return []expression{{"bitwise", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
		ae.Uint32(unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
		ae.Uint32(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		value(ae, unix.NFTA_BITWISE_MASK, mask)
		value(ae, unix.NFTA_BITWISE_XOR, make([]byte, len(mask)))
	}}, compare(address)}
}

// Where headers have addresses: of source, of destination, and their length.
var addressOffsets = map[bool][3]uint32{true: {12, 16, 4}, false: {8, 24, 16}}

// both calls one for the filter as it is and turned round, and for its port at either end.
func (t *RuleTrace) both(one func(source, destination PacketEnd) []expression) (out [][]expression) {
	for _, ends := range [][2]PacketEnd{{t.filter.A, t.filter.B}, {t.filter.B, t.filter.A}} {
		if t.filter.Port == 0 {
			out = append(out, one(ends[0], ends[1]))
			continue
		}
		for i := range ends {
			with := ends
			if with[i].Port == 0 {
				with[i].Port = t.filter.Port
			}
			out = append(out, one(with[0], with[1]))
		}
	}
	return out
}

func nfproto(four bool) []byte {
	if four {
		return []byte{unix.NFPROTO_IPV4}
	}
	return []byte{unix.NFPROTO_IPV6}
}

func port(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

// common is what both kinds of matches begin with.
func (t *RuleTrace) common() (out []expression) {
	if four, known := t.filter.family4(); known {
		out = append(out, meta(unix.NFT_REG_1, unix.NFT_META_NFPROTO), compare(nfproto(four)))
	}
	if t.filter.Protocol != 0 {
		out = append(out, meta(unix.NFT_REG_1, unix.NFT_META_L4PROTO), compare([]byte{t.filter.Protocol}))
	}
	return out
}

// filterMatches are the conditions of packets as they are.
func (t *RuleTrace) filterMatches() [][]expression {
	four, _ := t.filter.family4()
	at := addressOffsets[four]
	return t.both(func(source, destination PacketEnd) []expression {
		var out []expression // addresses first: they decide for most packets, and fast
		for i, end := range []PacketEnd{source, destination} {
			if end.Addresses.IsValid() {
				out = append(append(out, payload(unix.NFT_REG_1, unix.NFT_PAYLOAD_NETWORK_HEADER, at[i], at[2])), within(end.Addresses)...)
			}
		}
		out = append(out, t.common()...)
		for i, end := range []PacketEnd{source, destination} {
			if end.Port != 0 {
				out = append(out, payload(unix.NFT_REG_1, unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*i), 2), compare(port(end.Port)))
			}
		}
		return out
	})
}

// replyMatches are the conditions of replies, by the original direction of their entry.
func (t *RuleTrace) replyMatches() [][]expression {
	addresses := [2]uint32{nftCtSrcIP, nftCtDstIP}
	if four, known := t.filter.family4(); known && !four {
		addresses = [2]uint32{nftCtSrcIP6, nftCtDstIP6}
	}
	return t.both(func(source, destination PacketEnd) []expression {
		out := append([]expression{original(unix.NFT_CT_DIRECTION), compare([]byte{1})}, t.common()...)
		for i, end := range []PacketEnd{source, destination} {
			if end.Addresses.IsValid() {
				out = append(append(out, original(addresses[i])), within(end.Addresses)...)
			}
			if end.Port != 0 {
				out = append(out, original([]uint32{unix.NFT_CT_PROTO_SRC, unix.NFT_CT_PROTO_DST}[i]), compare(port(end.Port)))
			}
		}
		return out
	})
}

// followedMatch looks a packet's tuple up in the set of a family, in registers of 4 bytes:
// protocol, source, its port, destination, its port.
func followedMatch(i int) []expression {
	four := i == 0
	at := addressOffsets[four]
	words := at[2] / 4
	return []expression{
		meta(unix.NFT_REG_1, unix.NFT_META_NFPROTO), compare(nfproto(four)),
		meta(nftReg32, unix.NFT_META_L4PROTO),
		payload(nftReg32+1, unix.NFT_PAYLOAD_NETWORK_HEADER, at[0], at[2]),
		payload(nftReg32+1+words, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2),
		payload(nftReg32+2+words, unix.NFT_PAYLOAD_NETWORK_HEADER, at[1], at[2]),
		payload(nftReg32+2+2*words, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2),
		{"lookup", func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_LOOKUP_SET, followedSets[i])
			ae.Uint32(unix.NFTA_LOOKUP_SET_ID, uint32(i+1))
			ae.Uint32(unix.NFTA_LOOKUP_SREG, nftReg32)
		}},
	}
}

// emptied takes all elements out of the set of a family.
func emptied(i int) netlink.Message {
	return message(unix.NFT_MSG_DELSETELEM, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, ruleTraceTable())
		ae.String(unix.NFTA_SET_ELEM_LIST_SET, followedSets[i])
	})
}

// element adds a tuple to its set.
func (t *RuleTrace) element(tuple snapshot.TraceTuple) netlink.Message {
	set := followedSets[0]
	if tuple.Source.Addr().Is6() {
		set = followedSets[1]
	}
	var key []byte
	for number := range uint8(255) {
		if protocolName(number) == tuple.Protocol {
			key = append(key, number, 0, 0, 0)
			break
		}
	}
	for _, end := range []netip.AddrPort{tuple.Source, tuple.Destination} {
		key = append(key, end.Addr().AsSlice()...)
		key = append(binary.BigEndian.AppendUint16(key, end.Port()), 0, 0)
	}
	return message(unix.NFT_MSG_NEWSETELEM, netlink.Create, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, ruleTraceTable())
		ae.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		ae.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.NFTA_LIST_ELEM, func(ae *netlink.AttributeEncoder) error {
				value(ae, unix.NFTA_SET_ELEM_KEY, key)
				return nil
			})
			return nil
		})
	})
}
