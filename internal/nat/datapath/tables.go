// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"

	"natkit/internal/nat/rulefile"
)

// Facts are what compiling a rule file needs to know of the machine and of an
// engine that is up.
type Facts struct {
	// Links are the interfaces that the rule file names and that are there, with the
	// index that each has, or is to get, in the engine.
	Links []Link
	// Addresses are those that the engine has had an index for. An index is for life:
	// mappings hold it.
	Addresses []ExternalAddress
	// Local are the gateway's own addresses, of all its interfaces.
	Local []netip.Addr
	// LocalPorts are what the gateway's own connections take their ports from:
	// net.ipv4.ip_local_port_range, both included.
	LocalPorts [2]uint16
	// ReservedPorts are those of net.ipv4.ip_local_reserved_ports already.
	ReservedPorts PortList
}

// Link is an interface of the rule file.
type Link struct {
	Name      string
	Index     int // in the engine's map of links
	Ifindex   int // 0: it is not there
	MAC       [6]byte
	MTU       int
	Inside    bool           // hosts behind it are to be translated
	Outside   bool           // it leads to the world; both: the sources of rules tell who is inside
	Zone      bool           // Inside, and its hosts may have addresses that others have behind other interfaces
	Transmit  bool           // XDP may send here
	Ethernet  bool           // frames have MACs; else packets come without: tunnels, PPP
	Awaited   bool           // it, or its address, is not there: nothing is masqueraded behind it for now
	Addresses []netip.Prefix // IPv4, the primary one first
}

// ExternalAddress is an address that internal endpoints are translated to.
type ExternalAddress struct {
	Index      int
	Addr       netip.Addr
	Ports      [2]uint16                      // that may be given, both included; {0, 0}: none
	Reserved   PortList                       `json:",omitempty"` // of these, what the gateway's own connections have
	Forwarded  [rulefile.PortClasses]PortList `json:",omitzero"`  // of these, what port forwards of a class have
	Owned      bool                           // the gateway's own
	Masquerade bool                           // follows the address of Link
	OneToOne   bool                           // given whole, to one internal host
	Before     int                            `json:",omitempty"` // the index that it had in a smaller pool, plus 1: both are it from now on
	Leaving    bool                           // no rule wants it any more; it goes when its last mapping does
	Draining   bool                           `json:",omitempty"` // nothing new is given from it; what there is goes on
	Link       int                            // index of the interface it is on, -1 none
	Pool       uint8
	Blocks     rulefile.Blocks `json:",omitzero"` // ports are given in blocks
	Computed   [2]uint16       `json:",omitzero"` // ports of computed blocks, both included: others get none of them
}

// Kept are the ports of a class that no internal host is given.
func (a *ExternalAddress) Kept(class rulefile.Class) PortList {
	return a.Reserved.With(a.Forwarded[class]...)
}

// Tables are what a rule file becomes: the contents of the engine's maps of rules and
// configuration, for one generation, in the maps' own types. Compile makes them,
// Engine.Apply puts them into the kernel.
type Tables struct {
	Config       abiNatConfig
	Rules        []abiNatRule
	Targets      []abiNatTarget
	Exact        map[abiNatExactKey]uint32
	Destinations map[abiNatDestinationKey]uint32
	Origins      map[abiNatOriginKey]uint32
	ExcludeSrc   map[abiNatPrefixKey]uint32
	ExcludeDst   map[abiNatPrefixKey]uint32
	Excludes     map[abiNatExcludeKey]uint32
	Classes      []abiNatLimits // of subscribers; the first is nobody's, who is in no class has Config.Limits
	InClass      map[abiNatPrefixKey]uint32
	Log          uint32                               // enum nat_log_what; 0: nothing is recorded
	Computed     map[abiNatComputedKey]abiNatComputed // port blocks

	Links     []Link // with the pool and address each masquerades behind
	Masks     []Masking
	Addresses []ExternalAddress

	// ReservePorts are to be put into ip_local_reserved_ports before packets flow, so
	// that the gateway's own connections leave them alone.
	ReservePorts PortList
	// ProxyNeighbours are addresses to be answered for on the interface of that name.
	ProxyNeighbours []ProxyNeighbour
}

// Masking says what a link's masqueraded packets get.
type Masking struct {
	Link    int // index
	Pool    uint8
	Address int // index of an external address
}

// ProxyNeighbour is an address that the gateway answers ARP for though it is not its own.
type ProxyNeighbour struct {
	Link string
	Addr netip.Addr
}
