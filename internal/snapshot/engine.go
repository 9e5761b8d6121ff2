// SPDX-License-Identifier: Apache-2.0

package snapshot

import "net/netip"

// What translates: natkit's engine, the kernel's NAT by a rule file of natkit's, and the
// kernel's NAT, accelerated.
const (
	EngineEBPF  = "ebpf"
	EngineNFT   = "nft"
	EngineAccel = "accel"
)

// Engine is what natkit itself has up in the namespace: an engine that translates, or
// acceleration of the kernel's NAT.
type Engine struct {
	Kind   string `json:"engine"`               // EngineEBPF, EngineNFT, EngineAccel
	File   string `json:"file,omitempty"`       // rule file, as it was given
	Rules  int    `json:"rule_count,omitempty"` // in use
	Table  string `json:"table,omitempty"`      // of nftables, that engine nft has made: "ip natkit"
	Served bool   `json:"served,omitempty"`     // natkit serve keeps it

	// Flags are those that bring it up again as it is, beside the file or the interfaces.
	Flags []string `json:"flags,omitzero"`

	// Interfaces are those that accel forwards between.
	Interfaces []string `json:"interface_names,omitzero"`

	Sessions    uint64 `json:"sessions"` // now; of accel directions of flows on the fast path
	SessionsMax uint64 `json:"sessions_max"`
	Mappings    uint64 `json:"mappings,omitempty"`
	MappingsMax uint64 `json:"mappings_max,omitempty"`
	// PerSource is limits.sessions_per_source, 0 where there is none; SourcesMax how many
	// inside hosts there can be.
	PerSource  uint64 `json:"per_source,omitempty"`
	SourcesMax uint64 `json:"sources_max,omitempty"`

	// Packets are what became of packets, and what else an engine counts, by the names of
	// nat.Reasons, for accel those of its own: increases, only those above zero.
	Packets map[string]uint64 `json:"by_reason,omitzero"`
	// Addresses are the outside addresses that give ports, fewest free first, and Sources
	// the subscribers that were refused most, before those with most sessions, at most TopN of each.
	Addresses []EngineAddress `json:"external_addresses,omitzero"`
	Sources   []EngineSource  `json:"sources,omitzero"`
	// Pools are the pools of outside addresses, fullest first, at most TopN, and Classes those of
	// subscribers that Sources are of.
	Pools   []EnginePool  `json:"pools,omitzero"`
	Classes []EngineClass `json:"classes,omitzero"`
	// Subscribers are how many there are with a session or a port.
	Subscribers uint64 `json:"subscriber_count,omitempty"`
	// HoldDown is for how many seconds a port that was left is given to nobody.
	HoldDown float64 `json:"hold_down_s,omitempty"`
	// Lines are the lines of the rule file at which keys of limits stand ("sessions").
	Lines map[string]int `json:"limit_lines,omitzero"`

	// RuleList are the rules of the file that translate, of engine nft: they stand in an
	// nftables table, where they have other names.
	RuleList []EngineRule  `json:"rules,omitzero"`
	Drift    []EngineDrift `json:"drift,omitzero"`
	Problems []string      `json:"problems,omitzero"` // of accel, each with what to do
}

// Tracks reports whether it has sessions and mappings that connection tracking knows nothing of.
func (e *Engine) Tracks() bool { return e != nil && e.Kind == EngineEBPF }

// InNftables reports whether it is rules of an nftables table, and its sessions are entries of
// connection tracking.
func (e *Engine) InNftables() bool { return e != nil && e.Kind == EngineNFT }

// Accelerates reports whether rules of others translate, and their flows are forwarded before
// the stack.
func (e *Engine) Accelerates() bool { return e != nil && e.Kind == EngineAccel }

// EngineAddress is an outside address of an engine.
type EngineAddress struct {
	Addr  netip.Addr `json:"address,omitzero"`
	Ports PortRange  `json:"ports"`
	// Given are the ports of it that inside hosts can have, Free those of each class that
	// are left.
	Given    uint64 `json:"usable_ports"`
	FreeTCP  uint64 `json:"free_tcp"`
	FreeUDP  uint64 `json:"free_udp"`
	FreeICMP uint64 `json:"free_icmp"`
	// Line is the line of the rule file where the ports are narrowed, 0 where they are not.
	Line int `json:"line,omitempty"`
}

// EngineSource is a subscriber in a pool: an inside host, or the hosts of a prefix.
type EngineSource struct {
	Addr netip.Addr `json:"address,omitzero"` // of a prefix the first
	// Interface is what it is behind, where subscribers are told apart by that.
	Interface string `json:"interface,omitempty"`
	Prefix    int    `json:"prefix_length,omitempty"`
	Pool      string `json:"pool,omitempty"`
	Class     string `json:"class,omitempty"`
	Sessions  uint64 `json:"sessions"`
	// Ports are those of all protocols, those in hold-down too, HoldDown only these.
	Ports    uint64 `json:"ports_used,omitempty"`
	HoldDown uint64 `json:"ports_in_hold_down,omitempty"`
	// Blocks are how many port blocks it has, BlockPorts how many ports, of each protocol.
	Blocks     uint64 `json:"block_count,omitempty"`
	BlockPorts uint64 `json:"block_ports,omitempty"`
	// Refused are packets that would have opened a session, by the names of nat.Refusals:
	// increases, only those above zero.
	Refused map[string]uint64 `json:"refused_by_reason,omitzero"`
}

// Name is the subscriber as people write it.
func (s *EngineSource) Name() string {
	if s.Interface != "" {
		return s.Hosts() + " on " + s.Interface
	}
	return s.Hosts()
}

// Hosts is its address or prefix.
func (s *EngineSource) Hosts() string {
	if s.Prefix > 0 && s.Prefix < 32 {
		return netip.PrefixFrom(s.Addr, s.Prefix).String()
	}
	return s.Addr.String()
}

// AllRefused are all packets that it was refused for.
func (s *EngineSource) AllRefused() (sum uint64) {
	for _, n := range s.Refused {
		sum += n
	}
	return sum
}

// EnginePool is a pool of outside addresses.
type EnginePool struct {
	Name        string  `json:"pool"`
	Addresses   uint64  `json:"address_count"`
	Subscribers uint64  `json:"subscribers"`
	NearLimit   uint64  `json:"subscribers_near_limit,omitempty"` // those that have 80 % of one of their limits
	Ports       uint64  `json:"usable_ports"`                     // of all addresses, of each protocol
	FreeTCP     uint64  `json:"free_tcp"`
	FreeUDP     uint64  `json:"free_udp"`
	FreeICMP    uint64  `json:"free_icmp"`
	Share       float64 `json:"used_share"` // of its blocks, or of the protocol with fewest ports left; 0 to 1
	// Where ports are given in blocks: ports of the first one of a subscriber and of extra ones,
	// how many extra ones there may be, blocks in use of all sizes, and how many of the first size
	// are free.
	BlockSize  uint64 `json:"block_size,omitempty"`
	ExtraSize  uint64 `json:"extra_size,omitempty"`
	ExtraMax   uint64 `json:"extra_max,omitempty"`
	BlocksUsed uint64 `json:"blocks_used,omitempty"`
	BlocksFree uint64 `json:"blocks_free,omitempty"`
	// Taken are ports of blocks that subscribers have taken, those in hold-down too.
	Taken uint64 `json:"ports_taken,omitempty"`
	// Refused are packets of its subscribers, as in EngineSource. What those were refused that
	// have gone since is not in it.
	Refused map[string]uint64 `json:"refused_by_reason,omitzero"`
	// Lines are the lines of the rule file at which keys of the pool stand ("size").
	Lines map[string]int `json:"pool_lines,omitzero"`
}

// EngineClass is a class of subscribers with its limits, 0 where there is none.
type EngineClass struct {
	Name         string         `json:"class"`
	Ports        uint64         `json:"port_limit,omitempty"`
	Sessions     uint64         `json:"session_limit,omitempty"`
	NewPerSecond uint64         `json:"new_per_second_limit,omitempty"`
	Burst        uint64         `json:"burst_limit,omitempty"`
	Lines        map[string]int `json:"class_lines,omitzero"` // of the rule file, at which its keys stand ("ports")
}

// EngineRule is a rule of a rule file.
type EngineRule struct {
	ID   string `json:"rule_id"` // as `natkit rules` lists it
	Line int    `json:"line"`    // of the rule file
	Rule string `json:"rule"`
	// Ports are those that its source translation may choose from, zero: all; PortsLine is
	// the line that gives them, 0 where that is not known.
	Ports     PortRange `json:"ports,omitzero"`
	PortsLine int       `json:"ports_line,omitempty"`
	// To are the first addresses and ports that its destination translation leads to.
	To []Endpoint `json:"targets,omitzero"`
}

// EngineDrift is how the machine has moved away from what the engine was told of it.
type EngineDrift struct {
	What  string `json:"what"`
	Waits bool   `json:"waits,omitempty"` // nothing can be done before more happens on the machine
	Stops bool   `json:"stops,omitempty"` // packets are not translated until then
}
