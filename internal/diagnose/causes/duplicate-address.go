// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// routerClaims is how often each of two hardware addresses must answer for a router: a virtual address
// that moves (VRRP) is announced by its new holder once or twice.
const routerClaims = 2

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
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{{What: "ARP packets of each of two machines for a router", Enter: routerClaims, Leave: routerClaims}},
	Explains:      []string{"next-hop-silent", "clients-unreached", "answers-lost", "wrong-destination-mac"},
	Needs:         []string{snapshot.CanFrames, snapshot.CanInterfaces},
	Symptom:       "Clients lose their gateway for minutes and get it back, each at different times. Open connections hang. The machine that replies to ARP last wins.",
	Proof:         fmt.Sprintf("A hardware address that no interface here has replied to an ARP probe for an address of this machine, or sent other ARP packets with that address: critical. The doctor sends one probe for each address (RFC 5227). Two hardware addresses that each sent at least %d ARP packets with the address of a router in use here: a warning.", routerClaims),
	FalsePositive: "A virtual address that moves to another machine and is announced there; cluster addresses with a multicast hardware address; interfaces of this machine on one network, which reply for each other.",
	Cure:          "Change the address of the other machine, or remove the rule or proxy that replies for it. The finding names its hardware address; the switch knows its port.",
	judge:         judgeDuplicate,
}

func judgeDuplicate(f facts) *verdict {
	if f.Frames == nil {
		return nil
	}
	var own, others []snapshot.AddressClaim
	for _, c := range f.Frames.Claims {
		switch {
		case !c.Addr.IsValid() || c.Count == 0 || c.Count >= implausible || groupMAC(c.MAC):
		case c.Own && f.own(c.Addr):
			own = append(own, c)
		case c.Router && c.Count >= routerClaims:
			others = append(others, c)
		}
	}
	claims := own
	v := &verdict{}
	v.Severity = Critical
	if len(own) == 0 {
		claims = twice(others)
		v.Severity = Warning
	}
	if len(claims) == 0 {
		return nil
	}
	addr, link := claims[0].Addr, claims[0].Interface
	claims = slices.DeleteFunc(claims, func(c snapshot.AddressClaim) bool { return c.Addr != addr })
	v.impact = float64(len(claims))
	var macs []string
	for _, c := range claims {
		macs = append(macs, c.MAC)
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("ARP packets of %s with the address %s", c.MAC, addr), fmt.Sprintf("%d, on %s", c.Count, c.Interface), fromFrames})
	}
	who := strings.Join(macs, " and ")
	if len(own) > 0 {
		v.Title = fmt.Sprintf("%s replies to ARP for %s, an address of this machine (%s)", who, addr, link)
		v.Evidence = append(v.Evidence, Evidence{"interface with " + addr.String(), f.holder(addr), fromLinks})
	} else {
		v.Title = fmt.Sprintf("%s both reply to ARP for router %s on %s", who, addr, link)
	}
	v.Why = "Each host of the network remembers the hardware address that replied last, and sends there. The other machine does not forward these packets, or has no entries for their connections: they are lost."
	last := macs[len(macs)-1]
	v.Remedy = []string{fmt.Sprintf("# ask again; each line with another hardware address is one machine too many (the switch knows the port of %s):", last),
		f.run(fmt.Sprintf("arping -D -c 3 -I %s %s", quote(link), addr)) + " || echo another machine has it",
		fmt.Sprintf("# on that machine: remove the address (ip addr del %s/BITS dev INTERFACE), or the proxy that replies for it (proxy_arp, ip neigh show proxy)", addr)}
	if len(own) > 0 {
		v.Remedy = append(v.Remedy, "# then announce the right one, so that clients update their ARP entries:",
			f.run(fmt.Sprintf("arping -U -c 3 -I %s %s", quote(link), addr)))
	} else {
		v.Remedy = append(v.Remedy, "# then delete this machine's entry, so that it is resolved again:", f.run(fmt.Sprintf("ip neigh flush to %s dev %s", addr, quote(link))))
	}
	v.Verify = f.look(f.run("ip neigh show to " + addr.String()))
	return v
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
