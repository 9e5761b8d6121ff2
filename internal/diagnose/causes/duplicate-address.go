// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// routerClaims is how often each of two hardware addresses must answer for a router: a virtual address
// that moves (VRRP) is announced by its new holder once or twice.
const routerClaims = 2

// azureMAC replies to every ARP request in a virtual network of Azure, also to one for the asker's own address.
const azureMAC = "12:34:56:78:9a:bc"

var duplicateAddress = Cause{
	Code:     "duplicate-address",
	Title:    "Two machines reply to ARP for one address",
	Headline: "Clients lose their gateway at random: duplicate IP address on the network",
	Search: []string{
		"arping -D: Received 1 response",
		"duplicate use of 192.0.2.1 detected",
		"duplicate address detected",
		"IPv4 duplicate address",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{{What: "ARP packets of each of two machines for a router", Enter: routerClaims, Leave: routerClaims}},
	Explains:      []string{"next-hop-silent", "clients-unreached", "answers-lost", "wrong-destination-mac"},
	Needs:         []string{snapshot.CanFrames, snapshot.CanInterfaces},
	Symptom:       "Clients lose their gateway for minutes and get it back, each at different times; or one client or server loses its connections. Open connections hang. The machine that replies to ARP last wins.",
	Proof:         fmt.Sprintf("A hardware address that no interface here has replied to an ARP probe for an address of this machine, or sent other ARP packets with that address: critical. Two hardware addresses that each sent at least %d ARP packets with the address of a router in use here: a warning. Two that both replied to this machine for the address of another neighbour: advice, or as severe as clients-unreached or backend-silent if these report the same address. The doctor sends one probe (RFC 5227) for each address of this machine, and for each of the %d neighbours that it used last; the monitor asks for addresses of this machine only, and by default only when a symptom gives reason to.", routerClaims, snapshot.AskedNeighbours),
	FalsePositive: "A virtual address that moves to another machine and is announced there; cluster addresses with a multicast hardware address; a virtual network of Azure, where 12:34:56:78:9a:bc replies for every address; interfaces of this machine on one network, which reply for each other. A host with two interfaces on one network may also reply from both: that is why a neighbour's address is only advice as long as nothing is lost.",
	Cure:          "Change the address of the other machine, or remove the rule or proxy that replies for it. The finding names its hardware address; the switch knows its port.",
	judge:         judgeDuplicate,
}

func judgeDuplicate(f facts) *verdict {
	if f.Frames == nil {
		return nil
	}
	var own, routers, others []snapshot.AddressClaim
	for _, c := range f.Frames.Claims {
		switch {
		case !c.Addr.IsValid() || c.Count == 0 || c.Count >= implausible || groupMAC(c.MAC) || c.MAC == azureMAC:
		case c.Own && f.own(c.Addr):
			own = append(own, c)
		case c.Router && c.Count >= routerClaims:
			routers = append(routers, c)
		case !c.Own && !c.Router && c.Replies > 0:
			others = append(others, c)
		}
	}
	routers, others = twice(routers), twice(others)
	v := &verdict{}
	var claims []snapshot.AddressClaim
	switch {
	case len(own) > 0:
		v.Severity, claims = Critical, claimsOf(own, own[0].Addr)
	case len(routers) > 0:
		v.Severity, claims = Warning, claimsOf(routers, routers[0].Addr)
	case len(others) > 0:
		v.Severity, claims = Advice, claimsOf(others, others[0].Addr)
		for _, c := range others {
			if lost := f.lostFor(c.Addr); lost != nil && lost.Severity > v.Severity {
				v.Severity, v.explains, claims = lost.Severity, []string{lost.Code}, claimsOf(others, c.Addr)
			}
		}
	default:
		return nil
	}
	v.impact = float64(len(claims))
	f.describeDuplicate(v, claims, len(own) > 0)
	return v
}

// lostFor is what is lost of a neighbour's connections, nil for nothing.
func (f facts) lostFor(addr netip.Addr) *verdict {
	if v := judgeClientsUnreached(f); v != nil && f.unreached().example.Source == addr {
		v.Code = clientsUnreached.Code
		return v
	}
	if bad := f.failingBackends(); slices.ContainsFunc(bad, func(b backend) bool { return b.target.Addr() == addr }) {
		v := judgeBackend(f)
		v.Code = backendSilent.Code
		return v
	}
	return nil
}

// describeDuplicate says which machines claim one address, and how to find the one too many.
func (f facts) describeDuplicate(v *verdict, claims []snapshot.AddressClaim, own bool) {
	addr, link := claims[0].Addr, claims[0].Interface
	var macs []string
	for _, c := range claims {
		macs = append(macs, c.MAC)
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("ARP packets of %s with the address %s", c.MAC, addr), fmt.Sprintf("%d, on %s", c.Count, c.Interface), fromFrames})
	}
	who := strings.Join(macs, " and ")
	last := macs[len(macs)-1]
	again := []string{fmt.Sprintf("# ask again; each line with another hardware address is one machine too many (the switch knows the port of %s):", last),
		f.run(fmt.Sprintf("arping -D -c 3 -I %s %s", quote(link), addr)) + " || echo another machine has it"}
	remove := fmt.Sprintf("# on that machine: remove the address (ip addr del %s/BITS dev INTERFACE), or the proxy that replies for it (proxy_arp, ip neigh show proxy)", addr)
	forget := []string{"# then delete this machine's entry, so that it is resolved again:", f.run(fmt.Sprintf("ip neigh flush to %s dev %s", addr, quote(link)))}
	const remembers = "Each host of the network remembers the hardware address that replied last, and sends there. "
	switch {
	case own:
		v.Title = fmt.Sprintf("%s replies to ARP for %s, an address of this machine (%s)", who, addr, link)
		v.Evidence = append(v.Evidence, Evidence{"interface with " + addr.String(), f.holder(addr), fromLinks})
		v.Why = remembers + "What is sent to the other machine is lost unless it forwards these packets and has entries for their connections."
		v.Remedy = append(again, remove, "# then announce the right one, so that clients update their ARP entries:",
			f.run(fmt.Sprintf("arping -U -c 3 -I %s %s", quote(link), addr)))
	case claims[0].Router:
		v.Title = fmt.Sprintf("%s both reply to ARP for router %s on %s", who, addr, link)
		v.Why = remembers + "If the second one is no router, or has no entries for the connections, what is sent to it is lost."
		v.Remedy = append(append(again, remove), forget...)
	default:
		v.Title = fmt.Sprintf("%s both reply to ARP for %s on %s", who, addr, link)
		v.Why = remembers + "If these are two machines, what is sent to the one that did not open a connection is lost, and it may reset the connection. If they are two interfaces of one host, nothing is wrong."
		v.Remedy = append(append([]string{"# is one host behind both? On it, both hardware addresses are listed by: ip link",
			"# otherwise one machine is too many; the switch knows their ports. Ask again:",
			f.run(fmt.Sprintf("arping -c 3 -I %s %s", quote(link), addr))}, remove), forget...)
	}
	v.Verify = f.look(f.run("ip neigh show to " + addr.String()))
}

// claimsOf are the claims of one address.
func claimsOf(claims []snapshot.AddressClaim, addr netip.Addr) []snapshot.AddressClaim {
	return slices.DeleteFunc(slices.Clone(claims), func(c snapshot.AddressClaim) bool { return c.Addr != addr })
}

// twice are those claims whose address has more than one hardware address.
func twice(claims []snapshot.AddressClaim) []snapshot.AddressClaim {
	return slices.DeleteFunc(slices.Clone(claims), func(c snapshot.AddressClaim) bool {
		return !slices.ContainsFunc(claims, func(o snapshot.AddressClaim) bool {
			return o.Addr == c.Addr && o.MAC != c.MAC && o.Interface == c.Interface
		})
	})
}

// groupMAC says whether a hardware address is a group's.
func groupMAC(mac string) bool {
	first, err := strconv.ParseUint(strings.SplitN(mac, ":", 2)[0], 16, 8)
	return err != nil || first&1 == 1
}
