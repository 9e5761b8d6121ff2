// SPDX-License-Identifier: Apache-2.0

// Package snapshot is the facts about one machine and one of its network
// namespaces as plain values: what package probe reads, what package causes
// judges and package tune plans from. It reads nothing itself; a Snapshot saved
// on one machine is judged on another with the same result.
//
// Counters are deltas over the window unless a comment says otherwise. A nil
// pointer or slice means "not known": the reason stands in Capabilities.
package snapshot

import (
	"net/netip"
	"time"
)

// Kind and Version are what a saved snapshot says of itself (package schema), and KindAll
// is the kind of a file of all namespaces. A reader takes its own version only.
const (
	Kind    = "snapshot"
	KindAll = "snapshots"
	Version = 1
)

// Snapshot is everything natkit knows about a machine at one moment, and what
// happened there during the window that ended at that moment.
type Snapshot struct {
	TakenAt       time.Time    `json:"time"`
	WindowSeconds float64      `json:"interval_s"`
	Host          Host         `json:"host"`
	Netns         Netns        `json:"namespace"`
	Capabilities  []Capability `json:"capabilities"`

	Conntrack    *Conntrack        `json:"conntrack,omitzero"`
	Sysctls      map[string]string `json:"sysctls,omitzero"`  // dotted name -> value, as sysctl(8) prints it
	Counters     map[string]uint64 `json:"counters,omitzero"` // "TcpExt.ListenOverflows" -> increase over the window
	CPUs         []CPU             `json:"cpus,omitzero"`     // the host's, whatever the namespace
	Drops        *Drops            `json:"drops,omitzero"`
	Leaving      []Leaving         `json:"leaving,omitzero"`
	Frames       *Frames           `json:"link_layer,omitzero"`
	Hooks        []Hook            `json:"hooks,omitzero"`
	Chains       []Chain           `json:"chains,omitzero"`
	Sets         []Set             `json:"sets,omitzero"` // that saved rules ask
	Interfaces   []Interface       `json:"interfaces,omitzero"`
	Neighbours   []Neighbours      `json:"neighbours,omitzero"`
	Xfrm         *Xfrm             `json:"xfrm,omitzero"`
	Routes       []RouteAnswer     `json:"routes,omitzero"`
	Listeners    []Listener        `json:"listeners,omitzero"`
	LocalPorts   []LocalPortUse    `json:"local_ports,omitzero"`
	KernelLog    *KernelLog        `json:"kernel_log,omitzero"`
	Owners       []Owner           `json:"owners,omitzero"`
	EventSockets []EventSocket     `json:"event_sockets,omitzero"`
	Engine       *Engine           `json:"natkit_engine,omitempty"`   // nil where natkit has nothing up
	Log          *Log              `json:"translation_log,omitempty"` // nil where none is kept
	Series       *Series           `json:"series,omitzero"`
}

// Host is what does not depend on the namespace.
type Host struct {
	Hostname    string `json:"hostname"`
	Kernel      string `json:"kernel"` // uname -r
	CPUs        int    `json:"cpu_count"`
	MemoryBytes uint64 `json:"ram_bytes"`
	// AvailableBytes is what programs could still have at the end of the window, 0
	// when not known.
	AvailableBytes uint64 `json:"ram_available_bytes,omitempty"`
}

// Netns is the network namespace that was looked at.
type Netns struct {
	Name  string `json:"netns"` // "" for the caller's own
	Inode uint64 `json:"netns_inode"`
	Init  bool   `json:"initial"` // it is the initial one, where the global limits are writable
	// Container is what the namespace belongs to, where a process in it tells:
	// "docker web1", "pod shop/cart-5d8f", "podman 3f2a9c0d1e2b", "service nginx".
	Container string `json:"container,omitempty"`
	// PodUID is the number of the Kubernetes pod that the namespace belongs to.
	PodUID string `json:"pod_uid,omitempty"`
}

// Title is how a namespace is spoken of: host, its container, or its name.
func (n Netns) Title() string {
	switch {
	case n.Init:
		return "host"
	case n.Container != "":
		return n.Container
	case n.Name == "":
		return "own"
	}
	return n.Name
}

// Capability is something natkit can or can't see here, and what that costs.
type Capability struct {
	Name   string `json:"name"` // kebab-case: "drop-tracing", "conntrack-dump", "kernel-log"
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"` // why not, in a sentence
	Costs  string `json:"costs,omitempty"`  // which part of the answer is missing
	// Waived: it is not missed, because there is nothing here that it could show, because it was
	// not asked for, or because it separates one rare cause that loses nothing and is the host's.
	Waived bool `json:"waived,omitempty"`
}

// Names of capabilities, for those who must know whether a fact is absent or
// was not looked for.
const (
	CanConntrack       = "conntrack"       // limits, counts and sizes
	CanConntrackStats  = "conntrack-stats" // the per-CPU counters of the table
	CanConntrackDump   = "conntrack-dump"  // the entries themselves
	CanConntrackMemory = "conntrack-memory"
	CanSysctls         = "sysctls"
	CanCounters        = "counters" // SNMP and netstat counters of the stack
	CanCPUs            = "cpus"
	CanSoftirqWait     = "softirq-wait" // how long ksoftirqd waited for its processor
	CanInterfaces      = "interfaces"
	CanQdiscs          = "qdiscs"     // queues of the interfaces
	CanNICs            = "nics"       // rings, queues and counters of network cards
	CanNeighbours      = "neighbours" // how full the host's neighbour tables are
	CanXfrm            = "ipsec"      // policies of IPsec
	CanRoutes          = "routes"     // where dropped packets would go
	CanNFTables        = "nftables"
	CanIPTablesLegacy  = "iptables-legacy"
	CanSets            = "rule-sets" // elements of sets that rules ask
	CanListeners       = "listeners"
	CanLocalPorts      = "local-ports"   // which of this machine's own connections hold many ports
	CanProcessNames    = "process-names" // whose socket a listener is
	CanEventSockets    = "event-sockets" // who listens to events of connection tracking
	CanRefused         = "refused-connections"
	CanKernelLog       = "kernel-log"
	CanLeaving         = "leaving-packets" // with which sources they do
	CanFrames          = "frames"          // of other hosts, VLANs, and ARP
	CanDrops           = "drop-tracing"
	CanHooks           = "hooks"
	CanOwners          = "owners" // who else sets a setting
	CanEngine          = "engine" // natkit's own
	CanLog             = "translation-log"
)

// Can says whether the named capability was there when the snapshot was taken.
func (s *Snapshot) Can(name string) bool {
	for _, c := range s.Capabilities {
		if c.Name == name {
			return c.OK
		}
	}
	return false
}

// Conntrack is the state of connection tracking in the namespace.
type Conntrack struct {
	Count      uint64 `json:"entries"` // entries of this namespace now
	CountStart uint64 `json:"entries_start"`
	Max        uint64 `json:"entries_max"` // nf_conntrack_max: one limit for the host, each namespace counts for itself
	Buckets    uint64 `json:"buckets"`     // one hash for all namespaces

	// Size of one entry from slab information, of its extension as allocated for
	// a translated flow, and of one bucket. Bytes; 0 when not readable.
	ObjectBytes    uint64 `json:"entry_bytes,omitempty"`
	ExtensionBytes uint64 `json:"extension_bytes,omitempty"`
	BucketBytes    uint64 `json:"bucket_bytes,omitempty"`
	HostObjects    uint64 `json:"host_entries,omitempty"` // entries of all namespaces, from slab information

	// Stats are the table's counters, by their names in conntrack -S (chaintoolong
	// and clash_resolve are chainlength and clashres in /proc/net/stat/nf_conntrack)
	// -> increase, summed over CPUs.
	Stats map[string]uint64 `json:"counters,omitzero"`
	Table *Table            `json:"conntrack_table,omitempty"` // nil without a dump

	// Refused is TCP connections whose only answer was a reset, in the window or, where
	// the table has many entries, in a tenth of it; most first, at most TopN.
	Refused []RefusedUse `json:"refused_connections,omitzero"`
}

// RefusedUse is connections to one destination that were refused.
type RefusedUse struct {
	Dest   Endpoint `json:"destination,omitzero"`
	Target Endpoint `json:"target,omitzero"` // where they really went: Dest, unless it is translated
	Count  uint64   `json:"connections"`
}

// Table is one dump of the conntrack table, aggregated.
type Table struct {
	Entries      uint64            `json:"entries"`
	DumpSeconds  float64           `json:"dump_s"`
	Interrupted  bool              `json:"interrupted,omitempty"` // the table changed while it was read: entries may be missing or counted twice
	Malformed    uint64            `json:"unreadable,omitempty"`  // entries that could not be read, not in Entries
	ByProtocol   map[string]uint64 `json:"by_protocol,omitzero"`
	ByState      map[string]uint64 `json:"by_state,omitzero"`          // TCP states
	ByStatus     map[string]uint64 `json:"by_status,omitzero"`         // ASSURED, UNREPLIED, OFFLOAD, HW_OFFLOAD, SNAT, DNAT
	Labelled     uint64            `json:"labelled_entries,omitempty"` // translated, with the label that was asked for
	Sources      []Talker          `json:"sources,omitzero"`           // most entries first, at most TopN
	Destinations []Talker          `json:"destinations,omitzero"`
	DestPorts    []PortUse         `json:"destination_ports,omitzero"`
	SNATPorts    []SNATUse         `json:"snat_ports,omitzero"` // fullest first, at most TopN

	// OneWay is TCP entries taken up in the middle of a connection of which only one
	// direction was ever seen.
	OneWay uint64 `json:"one_way_entries,omitempty"`
	// Idle is ESTABLISHED TCP entries without a packet for IdleSeconds, as far as
	// the time that they have left tells.
	Idle       uint64          `json:"idle_entries,omitempty"`
	Outsides   []OutsideUse    `json:"external_addresses,omitzero"` // most entries first, at most TopN
	Unanswered []UnansweredUse `json:"unreplied_flows,omitzero"`    // the same
	// Halfway is opening TCP connections that were answered a second ago or more, and whose
	// client has not confirmed that (SYN_RECV).
	Halfway  []UnansweredUse   `json:"half_open,omitzero"`
	ByHelper map[string]uint64 `json:"by_helper,omitzero"`
	Targets  []TargetUse       `json:"targets,omitzero"`         // of translated destinations, most unanswered first, at most TopN
	Strays   []StrayUse        `json:"foreign_replies,omitzero"` // most flows first, at most TopN
	Controls []ControlUse      `json:"controls,omitzero"`        // at most TopN
	// RecentSeconds is how young a packet was that counted as sent just now; 0 is the constant of that name.
	RecentSeconds uint64 `json:"recent_s,omitempty"`
}

// TargetUse is where a translated destination leads to, and the flows with a packet in
// the last RecentSeconds there. Of UDP most expects no answer.
type TargetUse struct {
	Protocol   string   `json:"protocol"`
	Dest       Endpoint `json:"destination,omitzero"`
	Target     Endpoint `json:"target,omitzero"`
	Answered   uint64   `json:"replied"`
	Unanswered uint64   `json:"unreplied"`
}

// IdleSeconds is longer than the default keepalive needs to show that both ends
// of a connection are alive (7200 s, then 9 probes at intervals of 75 s), and
// RecentSeconds how young a packet is that counts as sent just now, where the window is
// not shorter: what was before it may have been cured since.
const (
	IdleSeconds   = 3 * 3600
	RecentSeconds = 10
)

// OutsideUse is an address that sources are translated to, and the flows behind it.
type OutsideUse struct {
	Addr    netip.Addr `json:"address,omitzero"`
	Entries uint64     `json:"entries"`
	Recent  uint64     `json:"recent"` // with a packet in the last RecentSeconds, where that can be told
	// Unanswered of these were never answered.
	Unanswered uint64 `json:"unreplied,omitempty"`
	Missed     uint64 `json:"missed,omitempty"`
}

// UnansweredUse is UDP flows and opening TCP connections of one source to one
// destination that nobody has answered.
type UnansweredUse struct {
	Protocol string     `json:"protocol"`
	Source   netip.Addr `json:"source_address,omitzero"`
	Dest     Endpoint   `json:"destination,omitzero"`
	Target   Endpoint   `json:"target,omitzero"` // where they really go: Dest, unless it is translated
	SNAT     bool       `json:"snat"`            // their source is translated
	Entries  uint64     `json:"entries"`
	Recent   uint64     `json:"recent"`
	Missed   uint64     `json:"missed,omitempty"`
}

// StrayUse is UDP flows of the last RecentSeconds that nobody has answered, while another
// address than the one that was asked sent to the very port that waits for the answer, from
// the port that was asked: the answer, as the client will never know.
type StrayUse struct {
	Source netip.Addr `json:"source_address,omitzero"`            // one of those that asked
	Seen   netip.Addr `json:"source_translated_address,omitzero"` // and its address as Target sees it
	Dest   Endpoint   `json:"destination,omitzero"`
	Target Endpoint   `json:"target,omitzero"`        // where the flows really go: Dest, unless it is translated
	From   netip.Addr `json:"reply_address,omitzero"` // who sent instead, from Target's port
	Flows  uint64     `json:"flows"`
}

// ControlUse is flows of one client to one server's port whose protocol agrees on further
// connections: FTP, SIP and the like.
type ControlUse struct {
	Protocol string     `json:"protocol"`
	Source   netip.Addr `json:"source_address,omitzero"`
	Dest     Endpoint   `json:"destination,omitzero"`
	Target   Endpoint   `json:"target,omitzero"`                    // where they really go: Dest, unless it is translated
	Seen     netip.Addr `json:"source_translated_address,omitzero"` // Source, unless it is translated
	Entries  uint64     `json:"entries"`
	Helped   uint64     `json:"helped"` // of them have a helper of connection tracking
}

// HelperPort is a protocol that agrees on further connections, which only a helper of connection
// tracking foresees.
type HelperPort struct {
	Protocol string // tcp, udp
	Port     uint16
	Helper   string // "ftp"
	Module   string // "nf_nat_ftp"
}

// HelperPorts are the protocols that the kernel has helpers for, by the ports that they are at.
var HelperPorts = []HelperPort{
	{"tcp", 21, "ftp", "nf_nat_ftp"},
	{"udp", 5060, "sip", "nf_nat_sip"},
	{"tcp", 5060, "sip", "nf_nat_sip"},
	{"udp", 69, "tftp", "nf_nat_tftp"},
	{"tcp", 1723, "pptp", "nf_nat_pptp"},
	{"tcp", 6667, "irc", "nf_nat_irc"},
	{"tcp", 1720, "Q.931", "nf_nat_h323"},
	{"udp", 10080, "amanda", "nf_nat_amanda"},
}

// TopN is how many rows the top lists of a Table hold. Their counts are never
// too high; a row's Missed is by how much its count may be too low, because more
// different addresses were seen than are counted exactly. It is 0 for nearly all.
const TopN = 20

// Talker is an address and its entries in the table.
type Talker struct {
	Addr      netip.Addr `json:"address,omitzero"`
	Entries   uint64     `json:"entries"`
	Unreplied uint64     `json:"unreplied"`
	HalfOpen  uint64     `json:"half_open_entries,omitempty"` // of a source: its TCP connections that are not complete
	Missed    uint64     `json:"missed,omitempty"`
}

// PortUse is a destination port and the entries that go to it.
type PortUse struct {
	Protocol  string `json:"protocol"`
	Port      uint16 `json:"port"`
	Entries   uint64 `json:"entries"`
	Unreplied uint64 `json:"unreplied"`
	Missed    uint64 `json:"missed,omitempty"`
}

// SNATUse is how many ports one outside address uses towards one destination:
// the tuple in which source translation must stay unique.
type SNATUse struct {
	Protocol string     `json:"protocol"`
	Outside  netip.Addr `json:"external_address,omitzero"`
	Dest     Endpoint   `json:"destination,omitzero"`
	Used     uint64     `json:"entries"`  // translated flows
	MinPort  uint16     `json:"min_port"` // lowest and highest outside port seen
	MaxPort  uint16     `json:"max_port"`
	Missed   uint64     `json:"missed,omitempty"`
}

// Leaving is packets between an interface and the Internet: the first few hundred
// of the window of all interfaces, and where there are too many, of its first moment. Of
// TCP only those count that open a connection.
type Leaving struct {
	Interface string `json:"interface"`
	Family    string `json:"family,omitempty"` // ipv6; "" for IPv4
	// Inside left with a source that means something within a site only, is not this
	// machine's, and is reached by another interface.
	Inside  uint64   `json:"internal_packets"`
	Others  uint64   `json:"other_packets"`    // left with another one
	Back    uint64   `json:"returned_packets"` // came in for an address such as Inside counts
	Samples []string `json:"examples"`         // of Inside
	// Datagrams is where UDP went, at most MaxDatagrams.
	Datagrams []Endpoint `json:"udp_destinations,omitzero"`
}

// MaxDatagrams is how many destinations of UDP a Leaving holds at most.
const MaxDatagrams = 64

// OnlyInside says whether an address means something within a site only.
func OnlyInside(a netip.Addr) bool {
	return a.IsPrivate() || a.IsLinkLocalUnicast() || a.IsLoopback() || sharedSpace.Contains(a)
}

var sharedSpace = netip.MustParsePrefix("100.64.0.0/10") // RFC 6598

// Drops is what the kernel dropped during the window, by place and reason.
type Drops struct {
	Rows       []Drop `json:"rows"` // most first
	LostEvents uint64 `json:"lost_events"`
	// Elsewhere is what other namespaces of the machine dropped for a cause that natkit
	// knows, most first, at most MaxElsewhere, where all of them are watched.
	Elsewhere []Drop `json:"elsewhere,omitzero"`
}

// MaxElsewhere is how many rows of other namespaces Drops holds at most.
const MaxElsewhere = 50

// Drop is one row: packets of one namespace dropped at one place for one reason.
type Drop struct {
	Count     uint64   `json:"packets"`
	Location  string   `json:"location"`            // "nf_hook_slow+0xa6"
	Reason    string   `json:"reason"`              // the running kernel's name: "NETFILTER_DROP"
	Netns     uint64   `json:"netns_inode"`         // inode, 0 when not known
	Namespace string   `json:"netns,omitempty"`     // reference as for --netns; "" for the caller's own, or when not known
	Container string   `json:"container,omitempty"` // of a namespace elsewhere, as Netns.Container
	Interface string   `json:"interface,omitempty"`
	Cause     NATCause `json:"cause,omitempty"`
	Benign    bool     `json:"benign,omitempty"`  // ends of sockets and the like, no lost traffic
	Samples   []string `json:"examples,omitzero"` // "tcp 10.0.0.2:4000 -> 10.0.1.2:80 SYN"
	// Sampled are the packets whose addresses were looked at, and Matching those of them that
	// were asked for; 0 where any packet would do. Samples are of those that match.
	Sampled  uint64 `json:"sampled_packets,omitzero"`
	Matching uint64 `json:"matching_packets,omitzero"`
	// Packets are what rules ask for of some of them, of drops by rules only.
	Packets []DroppedPacket `json:"packet_details,omitzero"`
	Stacks  []Stack         `json:"stacks,omitzero"`
}

// Stack is a kernel stack and how often it was seen; innermost function first.
type Stack struct {
	Count  uint64   `json:"packets"`
	Frames []string `json:"functions"`
}

// NATCause says what a drop means for NAT, where that can be told from the packet.
type NATCause string

const (
	CauseNone           NATCause = ""
	CauseTableFull      NATCause = "conntrack-table-full" // refused before it had an entry
	CauseConfirm        NATCause = "nat-confirm"          // entry could not be inserted: ports exhausted, a race, or a full chain
	CauseRule           NATCause = "firewall-rule"
	CauseIPForwardOff   NATCause = "ip-forward-off"
	CauseReversePath    NATCause = "rp-filter"
	CauseNoRoute        NATCause = "no-route" // or one of type blackhole, unreachable or prohibit
	CauseMartian        NATCause = "martian"  // an address that no packet may have that comes in there
	CauseTooBig         NATCause = "mtu"
	CauseTTL            NATCause = "ttl-expired"
	CauseQueue          NATCause = "queue-full"
	CauseNeighbour      NATCause = "neighbour"
	CauseListenOverflow NATCause = "listen-overflow"
	CauseChecksum       NATCause = "checksum"
	CauseFragment       NATCause = "fragment"
	CauseBacklog        NATCause = "cpu-backlog"
)

// NATCauses are all of them but CauseNone.
var NATCauses = []NATCause{
	CauseTableFull, CauseConfirm, CauseRule, CauseIPForwardOff, CauseReversePath, CauseNoRoute, CauseMartian, CauseTooBig,
	CauseTTL, CauseQueue, CauseNeighbour, CauseListenOverflow, CauseChecksum, CauseFragment, CauseBacklog,
}

// Hook is one function registered on a netfilter hook.
type Hook struct {
	Family   string `json:"family"` // ipv4, ipv6, bridge, arp, netdev, inet
	Hook     string `json:"hook"`   // prerouting, input, forward, output, postrouting, ingress, egress
	Priority int    `json:"priority"`
	Function string `json:"function"`
	Owner    string `json:"owner,omitempty"`     // nf_tables, iptables, bpf, flowtable, ""
	Device   string `json:"interface,omitempty"` // netdev family
	Chain    string `json:"chain,omitempty"`     // "table/chain" where it can be told
	// Via is the function on the hook that calls this one, which is not on the hook
	// itself: the chains that the NAT core asks about the first packet of a flow.
	Via string `json:"via,omitempty"`
}

// Chain is one chain of a packet filter, nftables' own or an iptables back end's.
type Chain struct {
	Backend  string `json:"backend"` // nft, iptables-legacy
	Family   string `json:"family"`
	Table    string `json:"table"`
	Name     string `json:"name"`
	Hook     string `json:"hook,omitempty"` // "" when it is not a base chain
	Type     string `json:"type,omitempty"` // filter, nat, route
	Priority int    `json:"priority"`
	Policy   string `json:"policy,omitempty"` // accept, drop
	Rules    int    `json:"rule_count"`
	// PolicyPackets is how many packets reached the policy during the window; nil
	// where that is not counted (nftables counts only if the chain was made so).
	PolicyPackets *uint64 `json:"policy_packets,omitempty"`
	// DropRules are its rules that drop or reject, busiest first, at most TopN.
	DropRules []DropRule `json:"drop_rules,omitzero"`
	// Walk are all its rules, of chains from which a packet may be dropped; nil where they
	// are not known.
	Walk []Rule `json:"rules,omitzero"`
	// PerPacket are what of its rules must see each packet of an established flow of IPv4
	// that is forwarded, by the names that nftables and iptables give them: limit, quota,
	// NFQUEUE. Rules that such packets do not meet have none.
	PerPacket []string `json:"per_packet,omitzero"`
	// Offloads is how many rules give flows to a flowtable.
	Offloads int `json:"offload_rule_count,omitzero"`
	// Devices are those of a hook that is on devices.
	Devices []string `json:"interface_names,omitzero"`
	// NATRules is how many rules translate, by kind: masquerade, snat, dnat, redirect.
	NATRules map[string]int `json:"nat_rules_by_kind,omitzero"`
	// SNATRanges are the port ranges that its source translations allow; an empty
	// one means no range was given.
	SNATRanges []PortRange `json:"snat_ranges,omitzero"`
	// SNATTo are the addresses that its rules give to sources, DNATTo the addresses
	// and ports that they give to destinations, at most MaxTargets of each. Unknown
	// says that there are others, from a map or the packet.
	SNATTo      []AddrRange `json:"snat_to,omitzero"`
	DNATTo      []Target    `json:"dnat_to,omitzero"`
	SNATUnknown bool        `json:"snat_unknown,omitempty"`
	DNATUnknown bool        `json:"dnat_unknown,omitempty"`
}

// What a Snapshot holds at most: targets of one chain, chains of one back end
// (Kubernetes makes a few a service), and interfaces (a host of many thousand
// containers has as many, all alike).
const (
	MaxTargets    = 64
	MaxChains     = 20000
	MaxInterfaces = 2000
)

// AddrRange is an inclusive range of addresses.
type AddrRange struct {
	First netip.Addr `json:"first,omitzero"`
	Last  netip.Addr `json:"last,omitzero"`
}

// Target is where a destination translation leads: addresses, and ports where it
// says so. Protocol and DestPorts are its rule's conditions, where it has these
// in the plain form; Dest is that on the address, not valid where there is none.
type Target struct {
	AddrRange
	Ports     PortRange  `json:"ports"`
	Protocol  string     `json:"protocol,omitempty"`
	DestPorts PortRange  `json:"destination_port_range"`
	Dest      netip.Addr `json:"destination_address,omitzero"`
}

// DropRule is a rule that refuses packets.
type DropRule struct {
	Number  int     `json:"number"`            // place in its chain, from 1
	Verdict string  `json:"verdict"`           // drop, reject
	All     bool    `json:"all"`               // it has no condition: every packet that reaches it
	Packets *uint64 `json:"packets,omitempty"` // in the window; nil without a counter
}

// PortRange is an inclusive range of ports.
type PortRange struct {
	Min uint16 `json:"min"`
	Max uint16 `json:"max"`
}

// CPU is what one processor did during the window.
type CPU struct {
	Number  int     `json:"cpu"`
	Busy    float64 `json:"busy_share"`    // share of the window, 0 to 1, softirq included
	Softirq float64 `json:"softirq_share"` // share of the window
	Steal   float64 `json:"steal_share"`   // share that the hypervisor kept
	// From /proc/net/softnet_stat.
	Packets        uint64 `json:"packets"`
	BacklogDropped uint64 `json:"backlog_dropped"` // queue of netdev_max_backlog was full
	Squeezed       uint64 `json:"squeezed"`        // poll ended by its budget with work left
	// KsoftirqdRuns is how often ksoftirqd, which does what softirqs leave undone,
	// was given the processor, and KsoftirqdWait how long it waited for that in
	// all. Nil where the kernel does not say.
	KsoftirqdRuns *uint64  `json:"ksoftirqd_runs,omitempty"`
	KsoftirqdWait *float64 `json:"ksoftirqd_wait_s,omitempty"`
}

// Interface is one network device of the namespace.
type Interface struct {
	Name      string         `json:"name"`
	Index     int            `json:"index"`
	Kind      string         `json:"kind"` // veth, bridge, device, ...
	Master    string         `json:"master,omitempty"`
	MTU       int            `json:"mtu"`
	Up        bool           `json:"up"`
	NoCarrier bool           `json:"no_carrier,omitempty"` // up, and nothing at its other end
	Addresses []netip.Prefix `json:"addresses,omitzero"`
	RxDropped uint64         `json:"rx_dropped"` // increases over the window
	TxDropped uint64         `json:"tx_dropped"`
	RxErrors  uint64         `json:"rx_errors"`
	TxErrors  uint64         `json:"tx_errors"`
	// Default says that a default route leads out by it.
	Default   bool   `json:"default_route,omitempty"`
	RxPackets uint64 `json:"rx_packets"`
	TxPackets uint64 `json:"tx_packets"`
	// RxMissed is packets that the device had no room for (missed, FIFO and ring
	// buffer overruns): they never reached the stack.
	RxMissed    uint64 `json:"rx_missed,omitempty"`
	QueueLength int    `json:"queue_length,omitempty"` // txqueuelen
	Qdisc       *Qdisc `json:"qdisc,omitempty"`        // nil when it has none, or that is not known
	NIC         *NIC   `json:"nic,omitempty"`          // of the busiest interfaces
}

// Qdisc is the root queue of an interface: what waits there to be sent.
type Qdisc struct {
	Kind       string `json:"kind"`
	Packets    uint64 `json:"packets"` // increases over the window
	Dropped    uint64 `json:"dropped"`
	Overlimits uint64 `json:"overlimits"`
	// LimitPackets or LimitBytes is its length, RateBytes what it lets go a second,
	// BurstBytes what it lets go at once; 0 where it has none or that is not known.
	LimitPackets uint64 `json:"limit_packets,omitempty"`
	LimitBytes   uint64 `json:"limit_bytes,omitempty"`
	RateBytes    uint64 `json:"rate_bytes_per_second,omitempty"`
	BurstBytes   uint64 `json:"burst_bytes,omitempty"`
}

// NIC is what the driver of an interface says, and how the packets that it
// receives are spread over processors. Zero is not known.
type NIC struct {
	Driver      string `json:"driver,omitempty"`
	RxRing      uint32 `json:"rx_ring,omitempty"`
	RxRingMax   uint32 `json:"rx_ring_max,omitempty"`
	Channels    uint32 `json:"channels,omitempty"` // receive queues in use, as ethtool -l counts them
	ChannelsMax uint32 `json:"channels_max,omitempty"`
	RxQueues    int    `json:"rx_queues,omitempty"`
	RPSQueues   int    `json:"rps_queues,omitempty"` // of them with processors in rps_cpus
	Threaded    bool   `json:"threaded,omitempty"`   // polled by threads of their own, not in softirq
	// Lost are the driver's own counters of packets that never reached the stack ->
	// increase; only those that increased.
	Lost map[string]uint64 `json:"lost_by_counter,omitzero"`
}

// Neighbours is the table of one family's neighbours (ARP or neighbour
// discovery). It is one for all namespaces of the host, and so are its limits.
type Neighbours struct {
	Family     string `json:"family"`            // ipv4, ipv6
	Entries    uint64 `json:"entries"`           // of all namespaces, permanent ones included
	Here       uint64 `json:"here"`              // entries of this namespace
	Busiest    string `json:"busiest,omitempty"` // interface of this namespace with most of them
	Thresh2    uint64 `json:"gc_thresh2"`
	Thresh3    uint64 `json:"gc_thresh3"`
	TableFulls uint64 `json:"table_fulls"`    // increases: no room for a new one
	ForcedRuns uint64 `json:"forced_gc_runs"` // had to be cleared on the spot
	Failed     uint64 `json:"res_failed"`     // that did not answer
}

// Xfrm is how many policies and states of IPsec the namespace has.
type Xfrm struct {
	// Policies are those that packets on their way out are compared with, Prefixes
	// those of them whose ends are networks and no single addresses.
	Policies int `json:"policies"`
	Prefixes int `json:"prefixes"`
}

// RouteAnswer is what the routing tables said at the end of the window about a
// packet that was dropped in it.
type RouteAnswer struct {
	In     string     `json:"ingress_interface"` // interface that it came in by
	Source netip.Addr `json:"source_address,omitzero"`
	Dest   netip.Addr `json:"destination_address,omitzero"`
	Answer RouteKind  `json:"result"`
	Out    string     `json:"egress_interface,omitempty"` // of a route: by which interface, and to which router
	Via    netip.Addr `json:"next_hop_address,omitzero"`
	// Match is the route that an answer of unreachable, blackhole or prohibit comes
	// from; not valid where a rule says it. Table is where it, or the route that was found, stands.
	Match netip.Prefix `json:"match,omitzero"`
	Table int          `json:"table_id,omitempty"`
}

// RouteKind is how a look-up of a route ends.
type RouteKind string

// The ends of a look-up.
const (
	RouteFound       RouteKind = "route"
	RouteNone        RouteKind = "none"        // no route matches
	RouteUnreachable RouteKind = "unreachable" // a route or rule of that type matches
	RouteBlackhole   RouteKind = "blackhole"
	RouteProhibited  RouteKind = "prohibit"
)

// Listener is a listening TCP socket: how full its accept queue is.
type Listener struct {
	Addr    Endpoint `json:"local,omitzero"`
	Queue   uint32   `json:"queue"`               // connections waiting for accept
	Backlog uint32   `json:"backlog"`             // its limit
	Drops   uint64   `json:"dropped_connections"` // connections it refused in the window
	Inode   uint64   `json:"inode"`
	Process string   `json:"process,omitempty"`
}

// LocalPortUse is TCP connections that programs of the namespace itself hold, or that
// are over and in TIME_WAIT, from one of its addresses to one destination: each needs a
// port of its own out of net.ipv4.ip_local_port_range. Only connections whose local port is
// of that range and that nobody listens at count, and only where at least MinLocalPorts of
// it may be taken; most first, at most TopN.
type LocalPortUse struct {
	Source   netip.Addr `json:"source_address,omitzero"`
	Dest     Endpoint   `json:"destination,omitzero"`
	Used     uint64     `json:"connections"`
	TimeWait uint64     `json:"time_wait"` // of Used
	// Process is a program that holds one of them, "" where all are over or it is not told.
	Process string `json:"process,omitempty"`
	Inode   uint64 `json:"inode,omitempty"` // of that one's socket
}

// MinLocalPorts is the share of the port range that must be in use before it is looked at
// by whom.
const MinLocalPorts = 0.5

// KernelLog is what the kernel said about NAT during the window and before.
type KernelLog struct {
	TableFull       uint64   `json:"table_full"`             // "table full" lines in the window
	TableFullBefore uint64   `json:"table_full_total"`       // all that are still in the log
	Suppressed      uint64   `json:"suppressed"`             // "callbacks suppressed" in the window: the true number is larger
	OtherTableFull  uint64   `json:"other_table_full"`       // "table full" lines in the window that name another namespace, or none
	NoMemory        uint64   `json:"no_memory,omitempty"`    // lines in the window about kernel memory that could not be had
	HelperDrops     uint64   `json:"helper_drops,omitempty"` // "nf_ct_sip: dropping packet" and the like in the window
	Lines           []string `json:"lines,omitzero"`         // the last few, as evidence
}

// EventSocket is a netlink socket that gets the events of connection tracking.
type EventSocket struct {
	PortID     uint32 `json:"port_id"` // mostly the process's number
	QueueBytes uint64 `json:"queue_bytes"`
	Drops      uint64 `json:"lost_events"` // events in the window that it had no room for
	Inode      uint64 `json:"inode"`
	Process    string `json:"process,omitempty"`
}

// Owner is somebody besides natkit who sets a setting.
type Owner struct {
	Setting string `json:"setting"` // dotted name
	Value   string `json:"value"`
	Who     string `json:"who"`   // sysctl.d, tuned, kube-proxy, k3s, docker, firewalld, ...
	Where   string `json:"where"` // file and line, or unit
}

// Setting is one change of one kernel setting: what a finding wants and what
// tune plans, applies and takes back.
type Setting struct {
	Name  string `json:"setting"`         // dotted: "net.netfilter.nf_conntrack_max"
	Value string `json:"value"`           // as it is written
	Netns string `json:"netns,omitempty"` // reference as for --netns; "" is the caller's own
	// If is what must be so for it to be right and the facts can't show, a clause: it
	// is planned only when the user says that it is so. "" asks for nothing.
	If string `json:"condition,omitempty"`
	// Code is that of the finding that wants it and Reason its one line; not filled
	// within the finding itself.
	Code   string `json:"code,omitempty"`
	Reason string `json:"reason,omitempty"`
}
