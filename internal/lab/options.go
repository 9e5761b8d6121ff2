// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"natkit/internal/words/choice"
	"natkit/internal/words/plural"
)

// RuleSet is who puts the NAT rules into the lab. What they say is the same.
type RuleSet string

const (
	RulesNft            RuleSet = "nft"             // nftables, by netlink
	RulesIPTables       RuleSet = "iptables"        // the program iptables-nft-restore
	RulesIPTablesLegacy RuleSet = "iptables-legacy" // the program iptables-legacy-restore
	RulesNone           RuleSet = "none"            // no rule at all: nothing is translated, netfilter is not asked
)

// Server is the web server that Up leaves running behind the NAT.
type Server string

const (
	ServerNone    Server = "none"
	ServerBuiltin Server = "builtin" // natkit's own, see HTTPServer
	ServerNginx   Server = "nginx"
)

// Options is what may differ between two labs of one topology. The zero value is
// the published case with addresses as published; every empty field is filled by Up.
type Options struct {
	// Name is the lab's; its namespaces are NAME-client and so on. "" takes the
	// topology's name, with a number when that is taken.
	Name string `json:"name"`
	// Clients is how many client namespaces there are: roles client, client2,
	// client3 ... with consecutive addresses. More than one are joined by a switch
	// in a namespace of its own, role lan.
	Clients int `json:"clients"`
	// LocalClient puts the client on the host itself (published only): source and
	// destination of a connection are the same machine, and the rules of the OUTPUT
	// hook translate.
	LocalClient bool    `json:"local_client"`
	Rules       RuleSet `json:"rules"`
	// Owned ties the lab to this process: once the process is dead, whatever killed
	// it, the next Up of anybody removes the lab.
	Owned bool `json:"owned"`
	// Server is started in the background and lives until Down: where the URLs of
	// the lab lead. ServeCommand is the command line, without arguments, of a
	// program that calls Serve: natkit's own hidden one.
	Server       Server   `json:"server"`
	ServeCommand []string `json:"-"`

	Addresses Addresses `json:"addresses"`
}

// Addresses are the two networks on either side of the NAT node.
type Addresses struct {
	Client netip.Prefix `json:"client,omitzero"` // of the first client, with its network
	Near   netip.Addr   `json:"near,omitzero"`   // of the NAT node in that network
	Far    netip.Prefix `json:"far,omitzero"`    // of the NAT node on the server's side, with its network
	Server netip.Addr   `json:"server,omitzero"` // of the server in that network
	Port   uint16       `json:"port"`            // published port of the host (published only)
}

const (
	serverPort = 80
	maxClients = 200
)

// Names become parts of namespace and file names, which people type into shells.
var validName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$`)

// fill puts defaults into empty fields and reports every field that can't be.
func (o Options) fill(defaults Addresses) (Options, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	if o.Name != "" && !validName.MatchString(o.Name) {
		bad("name %q: want at most 64 letters, digits, '-', '_' and '.', beginning with a letter or digit", o.Name)
	}
	if o.Rules == "" {
		o.Rules = RulesNft
	}
	if rules := []string{string(RulesNft), string(RulesIPTables), string(RulesIPTablesLegacy), string(RulesNone)}; !slices.Contains(rules, string(o.Rules)) {
		bad("rules %w", choice.Error(string(o.Rules), rules...))
	}
	if o.Server == "" {
		o.Server = ServerNone
	}
	if servers := []string{string(ServerBuiltin), string(ServerNginx), string(ServerNone)}; !slices.Contains(servers, string(o.Server)) {
		bad("server %w", choice.Error(string(o.Server), servers...))
	}
	if o.Clients == 0 {
		o.Clients = 1
	}
	if o.Clients < 1 || o.Clients > maxClients {
		bad("%s: want 1 to %d", plural.Count(o.Clients, "client"), maxClients)
	}
	if o.LocalClient && o.Clients > 1 {
		bad("%s: only one client can be on the host itself", plural.Count(o.Clients, "client"))
	}

	a := &o.Addresses
	if a.Client == (netip.Prefix{}) {
		a.Client = defaults.Client
	}
	if a.Near == (netip.Addr{}) {
		a.Near = defaults.Near
	}
	if a.Far == (netip.Prefix{}) {
		a.Far = defaults.Far
	}
	if a.Server == (netip.Addr{}) {
		a.Server = defaults.Server
	}
	if a.Port == 0 {
		a.Port = defaults.Port
	}
	return o, errors.Join(append(errs, a.check(min(max(o.Clients, 1), maxClients), o.LocalClient)...)...)
}

// check reports every address that can't serve.
func (a Addresses) check(clients int, local bool) (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	host := func(what string, addr netip.Addr, in netip.Prefix) {
		switch network := in.Masked(); {
		case !addr.Is4():
			bad("%s address %s: the lab is IPv4", what, addr)
		case addr.IsLoopback() || addr.IsMulticast() || addr.IsUnspecified() || addr.As4()[0] >= 240:
			bad("%s address %s: not an address a host can have", what, addr)
		case !network.Contains(addr):
			bad("%s address %s: not in the network %s", what, addr, network)
		case in.Bits() > 30:
			bad("%s network %s: no room for two hosts, want /30 or shorter", what, network)
		case addr == network.Addr() || addr == last(network):
			bad("%s address %s: the network's own or its broadcast address", what, addr)
		}
	}
	host("client", a.Client.Addr(), a.Client)
	host("near", a.Near, a.Client)
	host("far", a.Far.Addr(), a.Far)
	host("server", a.Server, a.Far)
	if len(errs) > 0 {
		return errs
	}
	if a.Client.Masked().Overlaps(a.Far.Masked()) {
		bad("networks %s and %s overlap: a router needs two that do not", a.Client.Masked(), a.Far.Masked())
	}
	if a.Far.Addr() == a.Server {
		bad("address %s: given to both the far side of the NAT and the server", a.Server)
	}
	if !local {
		if a.Client.Addr() == a.Near {
			bad("address %s: given to both the client and the near side of the NAT", a.Near)
		}
		addrs := a.clients(clients)
		if end := addrs[len(addrs)-1]; !a.Client.Contains(end) || end == last(a.Client.Masked()) {
			bad("%s from %s on: no room in %s", plural.Count(clients, "client"), a.Client.Addr(), a.Client.Masked())
		}
	}
	return errs
}

// clients returns the addresses of n clients, leaving out the NAT node's.
func (a Addresses) clients(n int) []netip.Addr {
	out := make([]netip.Addr, 0, n)
	for addr := a.Client.Addr(); len(out) < n; addr = addr.Next() {
		if addr != a.Near {
			out = append(out, addr)
		}
	}
	return out
}

// last is the broadcast address of an IPv4 network.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(b)
}

func clientRole(i int) string {
	if i == 0 {
		return RoleClient
	}
	return fmt.Sprintf("%s%d", RoleClient, i+1)
}
