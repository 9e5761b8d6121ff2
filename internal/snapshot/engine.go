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
	// the inside hosts with most sessions, at most TopN of each.
	Addresses []EngineAddress `json:"external_addresses,omitzero"`
	Sources   []EngineSource  `json:"sources,omitzero"`
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

// EngineSource is an inside host with its sessions.
type EngineSource struct {
	Addr     netip.Addr `json:"address,omitzero"`
	Sessions uint64     `json:"sessions"`
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
