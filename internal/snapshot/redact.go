// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Redact replaces what shows whose machine this is: addresses, hardware addresses,
// the names of the host, of namespaces, containers and users, and what people wrote into
// rules (comments, log prefixes, names of sets), in every field and every text of s.
// Names of interfaces, tables and chains stay: findings are read by them. The same is replaced by the same everywhere in s, and nothing
// links it with another redacted snapshot: the key is thrown away.
//
// Two addresses of one network stay in one network, private ones private, and what
// means the same on every machine (loopback, multicast, unspecified) stays, so
// that the snapshot is judged as before.
func Redact(s *Snapshot) { NewRedactor().Redact(s) }

// Redactor is Redact for several snapshots of one machine: the same is replaced by
// the same in all of them.
type Redactor struct {
	key   []byte
	addrs map[netip.Addr]netip.Addr
	// networks are those whose hosts stay hosts: none of them becomes its network's own or its
	// broadcast address, and these become those.
	networks []netip.Prefix
	names    map[string]string
	hosts    map[string]bool   // those of names that a domain may follow
	longest  []string          // names, long ones first, but for
	digits   []string          // those that could be a part of an address
	given    map[string]string // stand-ins for names of users and sets
}

// NewRedactor makes one with a key of its own.
func NewRedactor() *Redactor {
	key := make([]byte, 32)
	rand.Read(key) // never fails
	return newRedactor(string(key))
}

func newRedactor(key string) *Redactor {
	return &Redactor{key: []byte(key), addrs: map[netip.Addr]netip.Addr{}, names: map[string]string{}, hosts: map[string]bool{}}
}

// Know gives namespaces and their containers stand-ins before they are met, and has it heed
// their networks: what is redacted before them may speak of them.
func (r *Redactor) Know(namespaces []Netns, networks []netip.Prefix) {
	for _, n := range networks {
		r.heed(n)
	}
	for _, n := range namespaces {
		r.name("Namespace", n.Name)
		r.name("Container", n.Container)
		r.name("PodUID", n.PodUID)
	}
	r.sort()
}

// Text replaces in a text what it knows of: names of snapshots that were redacted, and
// addresses.
func (r *Redactor) Text(s string) string { return r.text(s) }

// Meet is Know for all names in a snapshot, which stays as it is.
func (r *Redactor) Meet(s *Snapshot) {
	for _, i := range s.Interfaces {
		for _, n := range i.Addresses {
			r.heed(n)
		}
	}
	r.collect(reflect.ValueOf(s).Elem())
	if s.Netns.Name != "" {
		r.name("Namespace", s.Netns.Name)
	}
	r.sort()
}

// Redact is the function of this name, with what this Redactor replaced before.
func (r *Redactor) Redact(s *Snapshot) {
	r.Meet(s)
	r.value(reflect.ValueOf(s).Elem())
	for i := range s.Chains { // what lay between two addresses lies elsewhere now
		c := &s.Chains[i]
		several := func(a AddrRange) bool { return a.First != a.Last }
		if slices.ContainsFunc(c.SNATTo, several) {
			c.SNATTo, c.SNATUnknown = slices.DeleteFunc(c.SNATTo, several), true
		}
		if slices.ContainsFunc(c.DNATTo, func(t Target) bool { return several(t.AddrRange) }) {
			c.DNATTo, c.DNATUnknown = slices.DeleteFunc(c.DNATTo, func(t Target) bool { return several(t.AddrRange) }), true
		}
		for n := range c.Walk {
			for m := range c.Walk[n].Matches {
				if match := &c.Walk[n].Matches[m]; slices.ContainsFunc(match.Values, addrRange) {
					match.Keys = nil // whether it holds can't be told any more
				}
			}
		}
	}
	for i := range s.Sets {
		set := &s.Sets[i]
		ranges := func(e Element) bool { return slices.ContainsFunc(e.Key, addrRange) }
		if slices.ContainsFunc(set.Elements, ranges) {
			set.Elements, set.Whole = slices.DeleteFunc(set.Elements, ranges), false
		}
	}
}

// addrRange says whether a value is a range of addresses that is no prefix.
func addrRange(value string) bool {
	first, last, ok := strings.Cut(value, "-")
	_, err1 := netip.ParseAddr(first)
	_, err2 := netip.ParseAddr(last)
	return ok && err1 == nil && err2 == nil
}

// sort puts the names in the order in which they are looked for.
func (r *Redactor) sort() {
	all := slices.SortedFunc(maps.Keys(r.names), func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), strings.Compare(a, b)) })
	r.longest, r.digits = nil, nil
	for _, name := range all {
		if strings.Trim(name, "0123456789abcdefABCDEF.:-") == "" {
			r.digits = append(r.digits, name)
		} else {
			r.longest = append(r.longest, name)
		}
	}
}

// nameFields are the fields that hold a name, and what stands for it.
var nameFields = map[string]string{"Hostname": "host", "Sink": "host", "Namespace": "netns", "Container": "container", "PodUID": "uid"}

// setFields are the fields that hold the name of a set.
var setFields = map[reflect.Type]string{reflect.TypeFor[Set](): "Name", reflect.TypeFor[Match](): "Set", reflect.TypeFor[Rule](): "Map"}

// collect finds the names, wherever they stand.
func (r *Redactor) collect(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if sink, ok := v.Interface().(LogSink); ok {
			r.sinkHosts(sink.URL)
			return
		}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if !f.IsExported() {
				continue
			}
			if nameFields[f.Name] != "" && v.Field(i).Kind() == reflect.String {
				r.name(f.Name, v.Field(i).String())
			}
			r.collect(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			r.collect(v.Index(i))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			r.collect(v.Elem())
		}
	}
}

// common are words that files and tables hold on every machine. A namespace or container
// that is called so tells nobody whose it is, and the word means something else elsewhere.
var common = wordsOf("ip ip6 inet arp bridge netdev nat filter mangle raw security prerouting input forward output postrouting ingress egress " +
	"accept drop reject masquerade snat dnat redirect tcp udp udplite icmp icmpv6 sctp gre net kernel vm dev fs ipv4 ipv6 conf all default lo host " +
	"docker podman nerdctl containerd cri-o pod lxc machine service nft iptables conntrack netns systemd log syslog kafka broker collector")

func wordsOf(list string) map[string]bool {
	words := map[string]bool{}
	for _, w := range strings.Fields(list) {
		words[w] = true
	}
	return words
}

// name gives a name its stand-in. References by process number name nobody.
func (r *Redactor) name(field, name string) {
	if name == "" || r.names[name] != "" || strings.HasPrefix(name, "pid:") || name == "localhost" || common[name] || isAddress(name) {
		return
	}
	kind, n := nameFields[field], 1
	if field == "Container" { // "docker web1", "pod shop/cart-5d8f"; services are called alike everywhere
		engine, own, _ := strings.Cut(name, " ")
		if kind, name = engine, own; name == "" || engine == "service" || r.names[name] != "" || common[name] {
			return
		}
	}
	for _, given := range r.names {
		if strings.HasPrefix(given, kind+"-") {
			n++
		}
	}
	r.names[name] = fmt.Sprintf("%s-%d", kind, n)
	if _, last, cut := strings.Cut(name, "/"); cut && field == "Container" && r.names[last] == "" { // a pod without its namespace
		r.names[last] = r.names[name]
	}
	if field == "Hostname" {
		short, _, cut := strings.Cut(name, ".")
		if r.hosts[short] = true; cut && r.names[short] == "" && !common[short] {
			r.names[short] = r.names[name]
		}
	}
}

// isAddress says whether a name is an address, which is replaced as such.
func isAddress(name string) bool {
	_, err := netip.ParseAddr(name)
	return err == nil
}

// sinkHosts are the names of hosts in the URL of a sink of the log. They are those of others, and may begin with any
// word: without their domain they mean something else.
func (r *Redactor) sinkHosts(url string) {
	_, rest, _ := strings.Cut(url, "://")
	hosts, _, _ := strings.Cut(rest, "?")
	hosts, _, _ = strings.Cut(hosts, "/")
	for host := range strings.SplitSeq(hosts, ",") {
		switch host, _, _ = strings.Cut(host, ":"); {
		case strings.HasPrefix(host, "["): // an IPv6 address
		case strings.Contains(host, "."):
			r.name("Sink", host)
		default:
			r.name("Hostname", host)
		}
	}
}

var (
	addrType     = reflect.TypeFor[netip.Addr]()
	prefixType   = reflect.TypeFor[netip.Prefix]()
	addrPortType = reflect.TypeFor[netip.AddrPort]()
)

// value replaces in all of v.
func (r *Redactor) value(v reflect.Value) {
	switch v.Type() {
	case addrType:
		v.Set(reflect.ValueOf(r.addr(v.Interface().(netip.Addr))))
		return
	case prefixType:
		if p := v.Interface().(netip.Prefix); p.IsValid() {
			v.Set(reflect.ValueOf(netip.PrefixFrom(r.addr(p.Addr()), p.Bits())))
		}
		return
	case addrPortType:
		if a := v.Interface().(netip.AddrPort); a.IsValid() {
			v.Set(reflect.ValueOf(netip.AddrPortFrom(r.addr(a.Addr()), a.Port())))
		}
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(r.text(v.String()))
	case reflect.Struct:
		if field := setFields[v.Type()]; field != "" {
			set := v.FieldByName(field)
			set.SetString(r.standIn("set", set.String()))
		}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if f.IsExported() && !(holdsName(v.Type(), f) && r.named(v.Field(i))) {
				r.value(v.Field(i))
			}
		}
		// A host called by a word that means something else in texts.
		if host, ok := v.Addr().Interface().(*Host); ok && common[host.Hostname] {
			host.Hostname = "host-1"
		}
		// A range stays one: what is replaced bit by bit may turn round.
		first, last := v.FieldByName("First"), v.FieldByName("Last")
		if first.IsValid() && last.IsValid() && first.Type() == addrType && last.Type() == addrType {
			if a, b := first.Interface().(netip.Addr), last.Interface().(netip.Addr); b.Less(a) {
				first.Set(reflect.ValueOf(b))
				last.Set(reflect.ValueOf(a))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			r.value(v.Index(i))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			r.value(v.Elem())
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			value := reflect.New(v.Type().Elem()).Elem()
			value.Set(v.MapIndex(key))
			r.value(value)
			to := key
			if key.Kind() == reflect.String {
				to = reflect.ValueOf(r.text(key.String())).Convert(key.Type())
			}
			if to.Interface() != key.Interface() {
				v.SetMapIndex(key, reflect.Value{})
			}
			v.SetMapIndex(to, value)
		}
	}
}

// holdsName says whether a field holds a name and nothing else.
func holdsName(of reflect.Type, f reflect.StructField) bool {
	return f.Type.Kind() == reflect.String && (nameFields[f.Name] != "" || f.Name == "Name" && of == reflect.TypeFor[Netns]())
}

// named replaces a name that is a number, which in texts is left, and says whether it did.
func (r *Redactor) named(v reflect.Value) bool {
	engine, own, cut := strings.Cut(v.String(), " ")
	if !cut {
		engine, own = "", v.String()
	}
	by := r.names[own]
	if by == "" || !isNumber(own) {
		return false
	}
	v.SetString(strings.TrimSpace(engine + " " + by))
	return true
}

func isNumber(name string) bool { return strings.Trim(name, "0123456789") == "" }

// token is what may be an address: hardware, two of them and the frame's type as the
// LOG target writes them, IPv6 perhaps with an IPv4 end, IPv4.
var token = regexp.MustCompile(`[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){13}|[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*|[0-9]{1,3}(?:\.[0-9]{1,3}){3}`)

// What people wrote themselves: into rules as nft and iptables list them, before a packet
// in the kernel's log, and their own names in paths and rules.
var (
	// nft escapes nothing between its quotes, iptables does.
	remark    = regexp.MustCompile(`(--comment|--log-prefix|--nflog-prefix) (?:"(?:[^"\\]|\\.)*(?:"|\\?$)|[^" ]\S*)|(comment|log prefix) "[^"]*(?:"|$)`)
	logPrefix = regexp.MustCompile(`^(?:\[[ 0-9.]+\] )?(.*?)\bIN=\S* OUT=`)
	setName   = regexp.MustCompile(`((?:^|[^\w.])@)([A-Za-z_](?:[\w./-]*\w)?)`)
	ipsetName = regexp.MustCompile(`(--match-set |--add-set |--del-set )([^\s"]+)`)
	sinkUser  = regexp.MustCompile(`([?&](?:user|name|ca|cert|key|password-file)=)[^&\s"]+`)
	userName  = regexp.MustCompile(`(/home/|/Users/|skuid "?|skgid "?|--uid-owner |--gid-owner )([A-Za-z_][\w.-]*)`)
)

// written replaces what people wrote in a text.
func (r *Redactor) written(s string) string {
	s = sinkUser.ReplaceAllString(remark.ReplaceAllString(s, `$1$2 "redacted"`), "${1}redacted")
	if at := logPrefix.FindStringSubmatchIndex(s); at != nil && at[3] > at[2] {
		s = s[:at[2]] + "redacted " + s[at[3]:]
	}
	for _, of := range []struct {
		kind  string
		names *regexp.Regexp
	}{{"set", setName}, {"set", ipsetName}, {"user", userName}} {
		s = of.names.ReplaceAllStringFunc(s, func(found string) string {
			m := of.names.FindStringSubmatch(found)
			return m[1] + r.standIn(of.kind, m[2])
		})
	}
	return s
}

var standsIn = regexp.MustCompile(`^(?:set|user)-[0-9]+$`)

// standIn is what stands for a name that people gave to a thing of this kind.
func (r *Redactor) standIn(kind, name string) string {
	if name == "" || standsIn.MatchString(name) || strings.HasPrefix(name, "__") { // redacted before, or the kernel's: __set0
		return name
	}
	key := kind + " " + name
	if r.given == nil {
		r.given = map[string]string{}
	}
	if r.given[key] == "" {
		n := 1
		for _, other := range r.given {
			if strings.HasPrefix(other, kind+"-") {
				n++
			}
		}
		r.given[key] = fmt.Sprintf("%s-%d", kind, n)
	}
	return r.given[key]
}

// text replaces what people wrote, the names, then the addresses of a text.
func (r *Redactor) text(s string) string {
	if by := r.names[s]; by != "" && !isNumber(s) {
		return by
	}
	s = r.replaceWords(r.written(s), r.longest)
	var b strings.Builder
	end := 0
	for _, at := range token.FindAllStringIndex(s, -1) {
		word := s[at[0]:at[1]]
		if at[0] > 0 && wordByte(s[at[0]-1]) || at[1] < len(s) && wordByte(s[at[1]]) && strings.Contains(word, ".") {
			continue // part of a longer word
		}
		if to, is := r.address(word); is {
			b.WriteString(r.replaceWords(s[end:at[0]], r.digits) + to)
			end = at[1]
		}
	}
	return b.String() + r.replaceWords(s[end:], r.digits)
}

func (r *Redactor) replaceWords(s string, names []string) string {
	for _, name := range names {
		s = replaceWord(s, name, r.names[name], r.hosts[name])
	}
	return s
}

func wordByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
}

// domain is what may follow the name of a host, and fileEnding what is none.
var (
	domain     = regexp.MustCompile(`^(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*\.[A-Za-z][A-Za-z0-9-]*[A-Za-z0-9]`)
	fileEnding = regexp.MustCompile(`^\.(?:conf|service|log|rules|ya?ml|json|sock|scope|slice|sh|py|d)$`)
)

// domainAt is how many bytes at the start of rest are a domain.
func domainAt(rest string) int {
	d := domain.FindString(rest)
	if fileEnding.MatchString(d) || len(d) < len(rest) && wordByte(rest[len(d)]) {
		return 0
	}
	return len(d)
}

// replaceWord replaces a name where it stands for itself, of a host with the domain behind
// it. In a text, a name of one letter or of digits is left: it is more likely to be something else.
func replaceWord(s, name, by string, host bool) string {
	if len(name) < 2 || isNumber(name) {
		return s
	}
	var b strings.Builder
	for rest := s; ; {
		i := strings.Index(rest, name)
		if i < 0 {
			b.WriteString(rest)
			return b.String()
		}
		after := i + len(name)
		alone := (i == 0 || !wordByte(rest[i-1])) && (after == len(rest) || !wordByte(rest[after]))
		b.WriteString(rest[:i])
		if alone {
			b.WriteString(by)
			if host && (i == 0 || rest[i-1] != '.') { // in the middle of dots it is a setting
				after += domainAt(rest[after:])
			}
		} else {
			b.WriteString(name)
		}
		rest = rest[after:]
	}
}

// address replaces a word that is an address, with what stands behind it.
func (r *Redactor) address(word string) (to string, is bool) {
	if len(word) == 17 && (strings.Count(word, ":") == 5 || strings.Count(word, "-") == 5) {
		return r.mac(word), true
	}
	if strings.Count(word, ":") == 13 && len(word) == 41 {
		return r.mac(word[:17]) + ":" + r.mac(word[18:35]) + word[35:], true
	}
	for end := len(word); end > 0; end-- {
		if a, err := netip.ParseAddr(word[:end]); err == nil {
			return r.addr(a).String() + word[end:], true
		}
		if c := word[end-1]; c != ':' && c != '.' { // only what a sentence puts there
			break
		}
	}
	return word, false
}

// mac replaces a hardware address. Those of all stations, of none and of groups
// stay.
func (r *Redactor) mac(word string) string {
	separator := word[2:3]
	plain := strings.ToLower(strings.ReplaceAll(word, separator, ""))
	if plain == "000000000000" || plain[1]&1 == 1 && plain[1] < 'a' || strings.ContainsRune("bdf", rune(plain[1])) {
		return word
	}
	sum := r.sum([]byte("mac" + plain))
	parts := make([]string, 6)
	for i := range parts {
		parts[i] = fmt.Sprintf("%02x", sum[i])
	}
	parts[0] = "02" // locally administered
	return strings.Join(parts, separator)
}

func (r *Redactor) sum(b []byte) []byte {
	h := hmac.New(sha256.New, r.key)
	h.Write(b)
	return h.Sum(nil)
}

// kept are networks that stay what they are, with how many leading bits: all of
// them, where an address says nothing about the machine.
var kept = []struct {
	network netip.Prefix
	bits    int
}{
	{netip.MustParsePrefix("0.0.0.0/8"), 32}, {netip.MustParsePrefix("127.0.0.0/8"), 32},
	{netip.MustParsePrefix("224.0.0.0/3"), 32}, // groups, broadcast, masks
	{netip.MustParsePrefix("10.0.0.0/8"), 8}, {netip.MustParsePrefix("172.16.0.0/12"), 12}, {netip.MustParsePrefix("192.168.0.0/16"), 16},
	{netip.MustParsePrefix("100.64.0.0/10"), 10}, {netip.MustParsePrefix("169.254.0.0/16"), 16},
	{netip.MustParsePrefix("::/127"), 128}, {netip.MustParsePrefix("ff00::/8"), 128},
	{netip.MustParsePrefix("fe80::/10"), 64}, {netip.MustParsePrefix("fc00::/7"), 8}, {netip.MustParsePrefix("2000::/3"), 3},
}

func keptBits(a netip.Addr) int {
	for _, k := range kept {
		if k.network.Contains(a) {
			return k.bits
		}
	}
	return 0
}

// addr replaces an address: each bit behind those that are kept is turned or not by
// all bits before it, so that addresses with a common prefix keep one of its
// length; but for those of a host while they are all alike, so that the first and the last
// address of a network stay these. What falls into another kind of network is replaced again.
func (r *Redactor) addr(a netip.Addr) netip.Addr {
	if !a.IsValid() {
		return a
	}
	if a.Is4In6() {
		return netip.AddrFrom16(r.addr(a.Unmap()).As16())
	}
	zone := a.Zone()
	a = a.WithZone("")
	to, known := r.addrs[a]
	if !known {
		bits, lengths := keptBits(a), r.lengths(a)
		for to = r.turn(a, bits, lengths); keptBits(to) != bits; {
			to = r.turn(to, bits, lengths)
		}
		r.addrs[a] = to
	}
	if to.Is6() {
		to = to.WithZone(zone)
	}
	return to
}

// heed adds a network, unless it comes too late: what was replaced stays replaced as it was.
func (r *Redactor) heed(n netip.Prefix) {
	n = n.Masked()
	if !n.Addr().Is4() || n.Bits() > 30 || slices.Contains(r.networks, n) {
		return // IPv6 has no broadcast
	}
	for a := range r.addrs {
		if n.Contains(a) {
			return
		}
	}
	r.networks = append(r.networks, n)
}

// lengths are those of the networks that an address is in.
func (r *Redactor) lengths(a netip.Addr) (out []int) {
	for _, n := range r.networks {
		if n.Contains(a) {
			out = append(out, n.Bits())
		}
	}
	return out
}

func (r *Redactor) turn(a netip.Addr, from int, lengths []int) netip.Addr {
	in := a.AsSlice()
	out := slices.Clone(in)
	for bit := from; bit < a.BitLen(); bit++ {
		if slices.ContainsFunc(lengths, func(length int) bool { return length <= bit && uniform(in, length, bit) }) {
			continue // the address may be its network's own or its broadcast address
		}
		prefix, err := a.Prefix(bit)
		if err != nil {
			return a // bit is within the address: never
		}
		b, _ := prefix.MarshalBinary()
		out[bit/8] ^= r.sum(b)[0] & 1 << (7 - bit%8)
	}
	to, _ := netip.AddrFromSlice(out)
	return to
}

// uniform says whether the bits from first up to end are all the same.
func uniform(b []byte, first, end int) bool {
	at := func(bit int) byte { return b[bit/8] >> (7 - bit%8) & 1 }
	for bit := first + 1; bit < end; bit++ {
		if at(bit) != at(first) {
			return false
		}
	}
	return true
}
