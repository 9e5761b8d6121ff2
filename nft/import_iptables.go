// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/nat"
)

// What iptables-save prints: of it the table nat. The others neither translate nor say
// what is translated.

// parseIPTablesSave reads tables "*NAME", chains ":NAME POLICY [counters]" and rules
// "-A CHAIN ..." up to COMMIT.
func parseIPTablesSave(data []byte, name string) (ruleLists, error) {
	l := ruleLists{chains: map[string][]listed{}}
	table, line := "", 0
	for text := range strings.Lines(string(data)) {
		line++
		text = strings.TrimSpace(text)
		fail := func(format string, args ...any) (ruleLists, error) {
			return ruleLists{}, &SyntaxError{name, line, fmt.Errorf(format, args...)}
		}
		switch {
		case text == "" || text[0] == '#':
		case text[0] == '*':
			table = text[1:]
		case text == "COMMIT":
			table = ""
		case table == "":
			return fail("%q is in no table: this is neither the output of iptables-save nor of nft -j list ruleset", text)
		case table != "nat":
		case text[0] == ':':
			chain, _, _ := strings.Cut(text[1:], " ")
			l.declare(chain)
		default:
			words, err := splitWords(text)
			if err != nil {
				return fail("%w", err)
			}
			if words[0][0] == '[' { // iptables-save -c
				words = words[1:]
			}
			if len(words) < 2 || words[0] != "-A" && words[0] != "--append" {
				return fail("%q is no rule: it should begin with -A CHAIN", text)
			}
			r, err := parseIPTablesRule(words[2:])
			if err != nil {
				return fail("%w", err)
			}
			r.line, r.text = line, text
			l.declare(words[1])
			l.chains[words[1]] = append(l.chains[words[1]], r)
		}
	}
	for chain, rules := range l.chains {
		for _, r := range rules {
			if _, ok := l.chains[r.chain]; !ok && r.chain != "" {
				return ruleLists{}, &SyntaxError{name, r.line, fmt.Errorf("chain %q jumps to %q, which is not there", chain, r.chain)}
			}
		}
	}
	return l, nil
}

// declare adds a chain; the built-in ones are on the hooks.
func (l *ruleLists) declare(chain string) {
	if _, ok := l.chains[chain]; ok {
		return
	}
	l.chains[chain] = nil
	if hook := slices.Index([]string{"PREROUTING", "OUTPUT", "POSTROUTING"}, chain); hook >= 0 {
		l.bases[hook] = append(l.bases[hook], chain)
	}
}

// splitWords cuts at blanks, but not within double quotes, where \ takes what follows
// as it is.
func splitWords(text string) ([]string, error) {
	var words []string
	var word strings.Builder
	quoted, begun := false, false
	for k := 0; k < len(text); k++ {
		switch c := text[k]; {
		case c == '"':
			quoted, begun = !quoted, true
		case c == '\\' && quoted && k+1 < len(text):
			k++
			word.WriteByte(text[k])
		case (c == ' ' || c == '\t') && !quoted:
			if begun {
				words = append(words, word.String())
				word.Reset()
				begun = false
			}
		default:
			begun = true
			word.WriteByte(c)
		}
	}
	if quoted {
		return nil, errors.New("a quotation mark is not closed")
	}
	if begun {
		words = append(words, word.String())
	}
	if len(words) == 0 || words[0] == "" {
		return nil, errors.New("the rule has no first word")
	}
	return words, nil
}

// iptablesArguments are how many words follow an option that is understood, or that
// changes nothing.
var iptablesArguments = map[string]int{
	"-i": 1, "--in-interface": 1, "-o": 1, "--out-interface": 1, "-s": 1, "--source": 1, "-d": 1, "--destination": 1,
	"-p": 1, "--protocol": 1, "-m": 1, "--match": 1, "--comment": 1, "--dport": 1, "--destination-port": 1, "--dports": 1,
	"--dst-type": 1, "--mode": 1, "--probability": 1, "--every": 1, "--packet": 1, "--src-range": 1, "--dst-range": 1,
	"-j": 1, "--jump": 1, "-g": 1, "--goto": 1, "--to-destination": 1, "--to-source": 1, "--to-ports": 1, "--to": 1,
	"--random": 0, "--random-fully": 0, "--persistent": 0, "-c": 2,
	"--set-xmark": 1, "--or-mark": 1, "--xor-mark": 1, "--and-mark": 1, "--set-mark": 1,
	"--log-prefix": 1, "--log-level": 1, "--nflog-group": 1, "--nflog-prefix": 1,
}

// parseIPTablesRule reads what follows -A CHAIN.
func parseIPTablesRule(words []string) (listed, error) {
	var r listed
	not := false
	for k := 0; k < len(words); {
		option := words[k]
		k++
		if option == "!" {
			not = true
			continue
		}
		n, known := iptablesArguments[option]
		if !known { // a match that rule files do not have, with all its words
			odd := option
			for ; k < len(words) && !strings.HasPrefix(words[k], "-") && words[k] != "!"; k++ {
				odd += " " + words[k]
			}
			r.match.odd = append(r.match.odd, negated(not, odd))
			not = false
			continue
		}
		if k+n > len(words) {
			return r, fmt.Errorf("%s wants %d words behind it", option, n)
		}
		if err := r.option(option, words[k:k+n], not); err != nil {
			return r, err
		}
		not = false
		k += n
	}
	if not {
		return r, errors.New("nothing follows the last exclamation mark")
	}
	return r, r.finish()
}

func negated(not bool, text string) string {
	if not {
		return "! " + text
	}
	return text
}

// option adds one option with its words to the rule.
func (r *listed) option(option string, words []string, not bool) error {
	m := &r.match
	odd := func() { m.odd = append(m.odd, negated(not, option+" "+strings.Join(words, " "))) }
	word := strings.Join(words, " ")
	switch option {
	case "-i", "--in-interface":
		return bindLink(word, not, &m.in, &m.notIn, odd)
	case "-o", "--out-interface":
		return bindLink(word, not, &m.out, &m.notOut, odd)
	case "-s", "--source":
		return addPrefix(word, not, &m.src, &m.notSrc)
	case "-d", "--destination":
		return addPrefix(word, not, &m.dst, &m.notDst)
	case "-p", "--protocol":
		p, err := protocolOf(word)
		if err != nil {
			return err
		}
		if not {
			odd()
		} else if p != nat.AnyProtocol {
			m.protocols = []nat.Protocol{p}
		}
	case "--dport", "--destination-port", "--dports":
		if not {
			odd()
			return nil
		}
		for part := range strings.SplitSeq(word, ",") {
			ports, err := parsePorts(part, ":")
			if err != nil {
				return err
			}
			m.ports = append(m.ports, ports)
		}
	case "--dst-type":
		if word == "LOCAL" && !not {
			m.local = true
		} else {
			odd()
		}
	case "--mode":
		r.share = true
	case "--src-range", "--dst-range":
		odd()
	case "-j", "--jump", "-g", "--goto":
		r.chain = word
		r.action = actJump
		if option[len(option)-1] == 'g' || option == "--goto" {
			r.action = actGoto
		}
	case "--to-destination", "--to-source", "--to", "--to-ports":
		return r.target(option, word)
	case "--set-xmark", "--or-mark", "--xor-mark", "--and-mark", "--set-mark":
		r.notes = append(r.notes, "marks packets, which a rule file can't ask for")
	}
	return nil
}

// bindLink adds a condition on an interface; a name that ends with + is a pattern.
func bindLink(name string, not bool, is *string, isNot *[]string, odd func()) error {
	switch {
	case name == "" || len(name) > 15 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '/' || r == ':' }):
		return fmt.Errorf("%q is no interface", name)
	case name == "+" && !not:
	case strings.HasSuffix(name, "+"):
		odd()
	case not:
		*isNot = append(*isNot, name)
	default:
		*is = name
	}
	return nil
}

func addPrefix(text string, not bool, is, isNot *[]netip.Prefix) error {
	for part := range strings.SplitSeq(text, ",") {
		p, err := parsePrefix(part)
		if err != nil {
			return err
		}
		if not {
			*isNot = append(*isNot, p)
		} else {
			*is = append(*is, p)
		}
	}
	return nil
}

// parsePrefix reads an IPv4 address or prefix; a mask may be an address too.
func parsePrefix(text string) (netip.Prefix, error) {
	address, mask, ok := strings.Cut(text, "/")
	a, err := netip.ParseAddr(address)
	if err != nil || !a.Is4() {
		return netip.Prefix{}, fmt.Errorf("%q is no IPv4 address", text)
	}
	bits := 32
	if ok {
		if m, err := netip.ParseAddr(mask); err == nil && m.Is4() {
			ones := number(m)
			for bits = 0; bits < 32 && ones&(1<<31) != 0; bits++ {
				ones <<= 1
			}
			if ones != 0 {
				return netip.Prefix{}, fmt.Errorf("the mask of %q is not that of a prefix", text)
			}
		} else if bits, err = strconv.Atoi(mask); err != nil {
			return netip.Prefix{}, fmt.Errorf("%q is no prefix", text)
		}
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is no prefix", text)
	}
	return p, nil
}

func protocolOf(text string) (nat.Protocol, error) {
	if text == "all" || text == "0" || text == "ip" {
		return nat.AnyProtocol, nil
	}
	return nat.ParseProtocol(text)
}

// parsePorts reads PORT or FIRST<separator>LAST. A missing end is the first or last port.
func parsePorts(text, separator string) (nat.PortRange, error) {
	first, last, isRange := strings.Cut(text, separator)
	if isRange && first == "" {
		first = "1"
	}
	if isRange && last == "" {
		last = "65535"
	}
	if !isRange {
		last = first
	}
	if isRange && first == "0" { // nobody has port 0
		first = "1"
	}
	a, err1 := strconv.ParseUint(first, 10, 16)
	b, err2 := strconv.ParseUint(last, 10, 16)
	if err1 != nil || err2 != nil || a > b || a == 0 {
		return nat.PortRange{}, fmt.Errorf("%q are no ports", text)
	}
	return nat.PortRange{First: uint16(a), Last: uint16(b)}, nil
}

// target reads what is translated to: ADDRESS[-ADDRESS][:PORT[-PORT]], ports, or the
// prefix of NETMAP.
func (r *listed) target(option, text string) error {
	if option == "--to-ports" {
		ports, err := parsePorts(text, "-")
		r.ports = ports
		return err
	}
	if option == "--to" {
		net, err := parsePrefix(text)
		r.net = net
		return err
	}
	addresses, ports, hasPorts := strings.Cut(text, ":")
	if hasPorts {
		ports, base, shifted := strings.Cut(ports, "/")
		p, err := parsePorts(ports, "-")
		if err != nil {
			return err
		}
		r.ports = p
		if shifted {
			r.lost = fmt.Sprintf("shifts ports from the base %q: write a range of ports for a range", base)
		}
	}
	if addresses == "" {
		r.lost = "changes the port only, of whatever address"
		return nil
	}
	first, last, isRange := strings.Cut(addresses, "-")
	if !isRange {
		last = first
	}
	a, err1 := netip.ParseAddr(first)
	b, err2 := netip.ParseAddr(last)
	if err1 != nil || err2 != nil || !a.Is4() || !b.Is4() || b.Less(a) {
		return fmt.Errorf("%q are no IPv4 addresses", addresses)
	}
	r.pool = nat.AddressRange{First: a, Last: b}
	return nil
}

// maxTargets bounds what a range of addresses becomes as a list of targets.
const maxTargets = 256

// targets of dnat to the rule's addresses and ports.
func (r *listed) targets() {
	if !r.pool.First.IsValid() {
		return
	}
	if r.pool.Count() > maxTargets {
		r.lost = fmt.Sprintf("sends to %d addresses: a list of targets has at most %d", r.pool.Count(), maxTargets)
		return
	}
	for n := range r.pool.Count() {
		r.to = append(r.to, nat.Target{Address: r.pool.At(n), Ports: r.ports})
	}
}

// finish turns what was written behind -j into an action.
func (r *listed) finish() error {
	lost := func(why string) {
		r.action, r.chain = actLost, ""
		r.lost = why
	}
	missing := func(option string) error { return fmt.Errorf("%s has no %s", r.chain, option) }
	target := r.chain
	if r.action == actGoto {
		return nil
	}
	switch target {
	case "": // a rule that only counts
		r.action = actNothing
	case "ACCEPT":
		r.action, r.chain = actAccept, ""
	case "RETURN":
		r.action, r.chain = actReturn, ""
	case "DROP":
		lost("drops packets, which a rule file does not do")
	case "MASQUERADE":
		r.action, r.chain = actMasquerade, ""
	case "SNAT":
		if !r.pool.First.IsValid() && r.lost == "" {
			return missing("--to-source")
		}
		r.action, r.chain = actSNAT, ""
	case "DNAT":
		if !r.pool.First.IsValid() && r.lost == "" {
			return missing("--to-destination")
		}
		r.action, r.chain = actDNAT, ""
		r.targets()
	case "NETMAP":
		if !r.net.IsValid() {
			return missing("--to")
		}
		r.action, r.chain = actNetmap, ""
	case "REDIRECT":
		lost("sends to the gateway itself, which a rule file does not do")
	case "LOG", "NFLOG", "ULOG", "TRACE":
		r.action, r.chain = actNothing, ""
	case "MARK", "CONNMARK":
		r.action, r.chain = actNothing, ""
		r.lost = "marks packets, which no rule file asks for"
	default:
		r.action = actJump // a chain; if there is none of that name the parser says so
	}
	if r.lost != "" && r.action != actLost && r.action != actNothing {
		lost(r.lost)
	}
	return nil
}
