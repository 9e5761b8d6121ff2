// SPDX-License-Identifier: Apache-2.0

// Package natproof has what the proof of an import is made of. Random rules are loaded into a kernel, and
// random packets sent through them. What the kernel does must be what the model of the rules
// says, and what the imported rule file says (rulefile.Explain) and both engines do with it, or
// the rule that decided is named in a note.
//
//	              ┌── eth0 ── everything else     outside, 203.0.113.1
//	router (tun) ─┼── ppp0 ── 198.51.100.0/24     outside, 203.0.113.129
//	              ├── eth1 ── 10.1.0.0/16         inside, 10.1.0.1
//	              └── eth2 ── 10.2.0.0/16         inside, 10.2.0.1
//
// NATKIT_IMPORT_ROUNDS is how many rule sets are tried, NATKIT_IMPORT_SEED the first of
// them.
package natproof

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
)

// Rounds gives the first seed and how many.
func Rounds(t *testing.T, usual int) (first, rounds uint64) {
	rounds = uint64(usual)
	for name, to := range map[string]*uint64{"NATKIT_IMPORT_ROUNDS": &rounds, "NATKIT_IMPORT_SEED": &first} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			*to = n
		}
	}
	return first, rounds
}

// Options of the import.
var Options = nft.ImportOptions{
	Name: "proof", Inside: []string{"eth1", "eth2"}, Outside: []string{"eth0", "ppp0"},
	Local: []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.129")},
}

// Surroundings is the router's surroundings, for rulefile.Explain and for the model.
type Surroundings struct {
	hairpin string // the interface that every outside address is said to be on, "" for its own
}

// Egress is the interface by which a packet leaves.
func (Surroundings) Egress(_, destination netip.Addr) string {
	if (Surroundings{}).IsLocal(destination) {
		return ""
	}
	for prefix, link := range map[string]string{"10.1.0.0/16": "eth1", "10.2.0.0/16": "eth2", "198.51.100.0/24": "ppp0"} {
		if netip.MustParsePrefix(prefix).Contains(destination) {
			return link
		}
	}
	return "eth0"
}

// LinkOf is the interface with that address.
func (s Surroundings) LinkOf(a netip.Addr) string {
	if s.hairpin != "" {
		return s.hairpin
	}
	for link, own := range addresses {
		if a.String() == own {
			return link
		}
	}
	return ""
}

// IsLocal is true of the addresses of the router.
func (Surroundings) IsLocal(a netip.Addr) bool { return (Surroundings{}).LinkOf(a) != "" }

var addresses = map[string]string{"eth0": "203.0.113.1", "ppp0": "203.0.113.129", "eth1": "10.1.0.1", "eth2": "10.2.0.1"}

// Imported is a set of rules, and the rule file that is to do the same.
type Imported struct {
	*nft.Imported
	Name  string
	Rules []byte
	Set   *ruleset.Ruleset
}

// Import reads rules, and wants a rule file of them that engines take.
func Import(name string, rules []byte) (*Imported, error) {
	i := &Imported{Name: name, Rules: rules}
	var err error
	if i.Imported, err = nft.Import(bytes.NewReader(rules), Options); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, err, rules)
	}
	if err := i.File.Validate(); err != nil {
		return nil, fmt.Errorf("%s: refused: %w\n%s\n%s", name, err, rules, i.File.Text())
	}
	if rules[0] == '{' {
		i.Set, err = ruleset.ReadNFTables(rules, name)
	} else {
		i.Set, err = ruleset.ReadIPTables(rules, name)
	}
	return i, err
}

// RandomPacket is a packet that may come to the router.
func RandomPacket(r *rand.Rand, n int) rulefile.Packet {
	p := rulefile.Packet{In: oneOf(r, Links...), Protocol: oneOf(r, rulefile.TCP, rulefile.TCP, rulefile.UDP, rulefile.ICMP, rulefile.GRE)}
	host := func(list ...string) netip.Addr { return netip.MustParseAddr(oneOf(r, list...)) }
	inside := p.In == "eth1" || p.In == "eth2"
	switch p.In {
	case "eth1":
		p.Source = host("10.1.2.3", "10.1.2.4", "10.1.3.5", "10.1.9.9", fmt.Sprintf("10.1.%d.%d", r.IntN(4), 2+r.IntN(250)))
	case "eth2":
		p.Source = host("10.2.0.7", "10.2.5.5", "10.2.0.99")
	case "ppp0":
		p.Source = host("198.51.100.7", "198.51.100.99")
	default:
		p.Source = host("192.0.2.9", "192.0.2.77", fmt.Sprintf("192.0.%d.%d", r.IntN(200), 1+r.IntN(250)))
	}
	switch k := r.IntN(10); {
	case k < 5:
		p.Destination = host(append(slices.Clone(madePublic), "203.0.113.4", "203.0.113.7", "100.64.1.9")...)
	case k < 7 || !inside:
		p.Destination = host("10.1.2.3", "10.2.0.7", "10.1.0.1", "10.2.9.9")
	default:
		p.Destination = host(append(slices.Clone(madeRemotes), "192.0.2.10")...)
	}
	if p.Protocol.HasPorts() {
		p.SourcePort = uint16(20000 + n)
		p.DestinationPort = uint16(oneOf(r, append(slices.Clone(madePorts), 79, 444, 1003, 3000)...))
	}
	if p.Source == p.Destination { // dropped by whoever sees it
		return RandomPacket(r, n)
	}
	return p
}

// Openers leaves out packets of connections that there are: those without ports that
// another one is like.
func Openers(packets []rulefile.Packet) (out []rulefile.Packet) {
	seen := map[rulefile.Packet]bool{}
	for _, p := range packets {
		flow := p
		flow.In = ""
		if p.Protocol.HasPorts() || !seen[flow] {
			out = append(out, p)
		}
		seen[flow] = true
	}
	return out
}

// Clashes: of protocols without ports two connections may want the same addresses, and the
// second gets nothing.
func Clashes(p rulefile.Packet) bool { return p.Protocol == rulefile.GRE }
