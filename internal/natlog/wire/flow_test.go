// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// received is a record as a collector has it: values by information element.
type received struct {
	options bool
	values  map[uint16][]byte
}

// collector decodes messages. It trusts nothing that it reads.
type collector struct {
	templates map[uint16][]field
	options   map[uint16]bool
	sequence  uint32
	messages  int
	told      int // templates
}

var errBad = errors.New("not a message")

func (c *collector) read(b []byte) (records []received, err error) {
	if c.templates == nil {
		c.templates, c.options = map[uint16][]field{}, map[uint16]bool{}
	}
	if len(b) < netflowHeader-4 {
		return nil, errBad
	}
	be := binary.BigEndian
	ipfix := be.Uint16(b) == 10
	header, sequence := ipfixHeader, be.Uint32(b[8:])
	switch {
	case ipfix && int(be.Uint16(b[2:])) != len(b):
		return nil, fmt.Errorf("%w: %d bytes, and it says %d", errBad, len(b), be.Uint16(b[2:]))
	case !ipfix && (be.Uint16(b) != 9 || len(b) < netflowHeader):
		return nil, errBad
	case !ipfix:
		header, sequence = netflowHeader, be.Uint32(b[12:])
	}
	if sequence != c.sequence {
		return nil, fmt.Errorf("sequence %d, want %d", sequence, c.sequence)
	}
	all := 0
	for rest := b[header:]; len(rest) > 0; {
		if len(rest) < setHeader || int(be.Uint16(rest[2:])) < setHeader || int(be.Uint16(rest[2:])) > len(rest) {
			return nil, fmt.Errorf("%w: a set is longer than it", errBad)
		}
		id, set := be.Uint16(rest), rest[setHeader:be.Uint16(rest[2:])]
		rest = rest[be.Uint16(rest[2:]):]
		if !ipfix && (len(set)+setHeader)%4 != 0 {
			return nil, fmt.Errorf("%w: a set of %d bytes is not padded", errBad, len(set))
		}
		switch {
		case ipfix && (id == ipfixTemplates || id == ipfixOptions) || !ipfix && id == netflowTemplates:
			for len(set) >= 4 {
				if set, err = c.template(set, id == ipfixOptions); err != nil {
					return nil, err
				}
				all++
			}
		case c.templates[id] == nil:
			return nil, fmt.Errorf("%w: records of template %d, which is not known", errBad, id)
		default:
			for len(set) > 3 || len(set) > 0 && ipfix {
				var r received
				if r, set, err = c.record(id, set); err != nil {
					return nil, err
				}
				records = append(records, r)
				all++
			}
		}
	}
	c.messages++
	switch {
	case ipfix:
		c.sequence += uint32(len(records))
	case int(be.Uint16(b[2:])) != all:
		return nil, fmt.Errorf("%d records, and the header says %d", all, be.Uint16(b[2:]))
	default:
		c.sequence++
	}
	return records, nil
}

func (c *collector) template(set []byte, options bool) (rest []byte, err error) {
	be := binary.BigEndian
	id, n := be.Uint16(set), int(be.Uint16(set[2:]))
	set = set[4:]
	if options {
		if len(set) < 2 || be.Uint16(set) != 1 {
			return nil, fmt.Errorf("%w: an options template without a scope", errBad)
		}
		set = set[2:]
	}
	if id < 256 || n == 0 || len(set) < 4*n {
		return nil, fmt.Errorf("%w: template %d of %d fields", errBad, id, n)
	}
	var fields []field
	for range n {
		fields = append(fields, field{id: be.Uint16(set), length: be.Uint16(set[2:])})
		if set = set[4:]; fields[len(fields)-1].length == 0 {
			return nil, fmt.Errorf("%w: a field of no bytes", errBad)
		}
	}
	c.templates[id], c.options[id] = fields, options
	c.told++
	return set, nil
}

func (c *collector) record(id uint16, set []byte) (r received, rest []byte, err error) {
	r = received{c.options[id], map[uint16][]byte{}}
	for _, f := range c.templates[id] {
		n := int(f.length)
		if f.length == variableLength {
			if len(set) == 0 {
				return r, nil, errBad
			}
			n, set = int(set[0]), set[1:]
			if n == 255 {
				if len(set) < 2 {
					return r, nil, errBad
				}
				n, set = int(binary.BigEndian.Uint16(set)), set[2:]
			}
		}
		if n > len(set) {
			return r, nil, fmt.Errorf("%w: a value is longer than its set", errBad)
		}
		r.values[f.id], set = set[:n], set[n:]
	}
	return r, set, nil
}

func (r received) number(id uint16) (n uint64) {
	for _, b := range r.values[id] {
		n = n<<8 | uint64(b)
	}
	return n
}

func (r received) endpoint(id4, id6, port uint16) netip.AddrPort {
	v := r.values[id4]
	if v == nil {
		v = r.values[id6]
	}
	a, ok := netip.AddrFromSlice(v)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, uint16(r.number(port)))
}

// undo makes of what was received what was sent, as far as it is in there. Times are in
// microseconds in IPFIX, else in milliseconds, and Since in milliseconds.
func (r received) undo(source natlog.Source) natlog.Record {
	if r.options {
		return natlog.Record{Event: natlog.Gap, Since: natlog.Micros(r.number(272) * 1000), Time: natlog.Micros(r.number(269) * 1000)}
	}
	out := natlog.Record{Time: natlog.Micros(r.number(323) * 1000), Since: natlog.Micros(r.number(152) * 1000)}
	out.Source = source
	if stamp, ok := r.values[324]; ok {
		n := binary.BigEndian.Uint64(stamp)
		out.Time = natlog.Micros((n>>32-2_208_988_800)*1e6 + (n&0xffffffff)*1e6>>32)
	}
	out.Internal, out.External = r.endpoint(8, 27, 7), r.endpoint(225, 281, 227)
	out.Destination = r.endpoint(226, 282, 228)
	out.Protocol, out.VLAN, out.Zone = uint8(r.number(4)), uint16(r.number(58)), uint16(r.number(234))
	out.Subscriber, out.Note = string(r.values[371]), string(r.values[284])
	event := r.number(230)
	if r.values[361] != nil {
		out.LastPort, out.External = uint16(r.number(362)), r.endpoint(225, 281, 361)
	}
	switch event {
	case natAddressExhausted, natPortsExhausted:
		out.Event = natlog.Exhausted
		return out
	case natQuotaExceeded:
		out.Event = natlog.Quota
		return out
	case natThreshold:
		out.Event = map[uint64]natlog.Event{thresholdOfPool: natlog.Exhausted, thresholdOfUser: natlog.Quota}[r.number(467)]
		return out
	case natBlockAllocate, natBlockFree:
		out.Kind = natlog.Block
	case nat44SessionCreate, nat44SessionDelete, nat64SessionCreate, nat64SessionDelete:
		out.Kind = natlog.Session
	default:
		out.Kind = natlog.Mapping
	}
	switch {
	case slices.Contains([]uint64{natDelete, nat44SessionDelete, nat64SessionDelete, nat44BIBDelete, nat64BIBDelete, natBindingDelete, natBlockFree}, event):
		out.Event = natlog.Ended
	case out.Since != 0:
		out.Event = natlog.Alive
	default:
		out.Event = natlog.Created
	}
	return out
}

func endpoint(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

const at = natlog.Micros(1764000000_123456)

// examples are one record of each kind that there is.
var examples = []natlog.Record{
	{Event: natlog.Created, Time: at, Since: at, Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 6,
		Internal: endpoint("10.0.0.9:1000"), External: endpoint("198.51.100.1:5000")}},
	{Event: natlog.Ended, Time: at + 2_000_000, Since: at - at%1000, Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 6,
		Internal: endpoint("10.0.0.9:1000"), External: endpoint("198.51.100.1:5000")}},
	{Event: natlog.Created, Time: at, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Kernel, Protocol: 17, Zone: 7, VLAN: 12,
		Internal: endpoint("10.0.0.9:1000"), External: endpoint("198.51.100.1:5000"), Destination: endpoint("192.0.2.1:443")}},
	{Event: natlog.Ended, Time: at, Since: 1764000000_000000, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Kernel, Protocol: 17,
		Internal: endpoint("[2001:db8::9]:1000"), External: endpoint("198.51.100.1:5000"), Destination: endpoint("192.0.2.1:443")}},
	{Event: natlog.Created, Time: at, Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 17,
		Internal: endpoint("[2001:db8::9]:1000"), External: endpoint("[2001:db8:1::1]:5000")}},
	{Event: natlog.Created, Time: at, Translation: natlog.Translation{Kind: natlog.Block, Source: natlog.Engine,
		Internal: endpoint("100.64.0.7:0"), External: endpoint("198.51.100.1:1024"), LastPort: 1535, Subscriber: "line 7"}},
	{Event: natlog.Alive, Time: at, Since: 1763990000_000000, Translation: natlog.Translation{Kind: natlog.Block, Source: natlog.Engine,
		Internal: endpoint("100.64.0.7:0"), External: endpoint("198.51.100.1:1024"), LastPort: 1535}},
	{Event: natlog.Ended, Time: at, Since: 1763990000_000000, Translation: natlog.Translation{Kind: natlog.Block, Source: natlog.Engine,
		External: endpoint("198.51.100.1:64512"), LastPort: 65535, VLAN: 12}},
	{Event: natlog.Created, Time: at, Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Engine,
		Internal: endpoint("10.0.0.9:0"), External: endpoint("198.51.100.2:0")}},
	{Event: natlog.Exhausted, Time: at, Note: "pool main: no port left", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 6, External: endpoint("198.51.100.1:0")}},
	{Event: natlog.Exhausted, Time: at, Note: "pool main", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 17}},
	{Event: natlog.Quota, Time: at, Note: "ports", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 17, Internal: endpoint("100.64.0.7:0"), Subscriber: "line 7"}},
	{Event: natlog.Gap, Time: at + 500, Since: at - 1_000_000, Note: "natkit log was not running"},
	{Event: natlog.Exhausted, Time: at, Note: natlog.Nearly(812, 1000, "ports of pool main"), Translation: natlog.Translation{Source: natlog.Engine, External: endpoint("198.51.100.1:0")}},
	{Event: natlog.Quota, Time: at, Note: natlog.Nearly(90, 100, "ports"), Translation: natlog.Translation{Source: natlog.Engine, Internal: endpoint("100.64.0.7:0"), Subscriber: "line 7"}},
	{Event: natlog.Quota, Time: at, Note: "pool main: port-limit: 4 packets refused until then", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 17, Internal: endpoint("100.64.0.7:0"), External: endpoint("198.51.100.1:0")}},
}

// expected is what of a record can be received.
func expected(r natlog.Record, form natlog.Form) (e natlog.Record, ok bool) {
	e = r
	if r.Event == natlog.Gap {
		return natlog.Record{Event: natlog.Gap, Since: r.Since / 1000 * 1000, Time: (r.Time + 999) / 1000 * 1000}, form == natlog.IPFIX
	}
	e.Since = r.Since / 1000 * 1000
	if r.Event == natlog.Created || r.Event == natlog.Exhausted || r.Event == natlog.Quota {
		e.Since = 0
	}
	switch r.Event {
	case natlog.Exhausted, natlog.Quota:
		e.Kind, e.Internal, e.External = natlog.NoKind, portless(r.Internal), portless(r.External)
		e.Destination, e.LastPort = netip.AddrPort{}, 0
		e.Note = r.Pool() // which limit it is has no element
	default:
		e.Note = ""
		if r.Kind == natlog.Block {
			e.Internal, e.Protocol, e.Destination = portless(r.Internal), 0, netip.AddrPort{}
		}
	}
	if form == natlog.NetFlow9 {
		e.Time, e.Subscriber, e.Note = r.Time/1000*1000, "", ""
	}
	return e, form == natlog.IPFIX || r.Event != natlog.Quota && !r.Nearly()
}

func portless(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr(), 0) }

func sinkOf(t testing.TB, url string) natlog.Sink {
	t.Helper()
	s, err := natlog.ParseSink(url)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var now = time.Date(2026, 11, 24, 3, 12, 7, 0, time.UTC)

// What is written is read back, field by field, in messages that are not too large.
func TestFlow(t *testing.T) {
	for _, url := range []string{"ipfix+udp://c?size=768", "ipfix+tcp://c", "netflow9+udp://c?size=768"} {
		sink := sinkOf(t, url)
		f := NewFlow(sink)
		var c collector
		var got []natlog.Record
		var records []natlog.Record
		for range 50 {
			records = append(records, examples...)
		}
		sent, formless, err := f.Encode(records, now, func(message []byte) error {
			if len(message) > sink.Size {
				t.Errorf("%s: a message of %d bytes", url, len(message))
			}
			list, err := c.read(message)
			for _, r := range list {
				got = append(got, r.undo(0))
			}
			return err
		})
		if err != nil || sent+formless != len(records) {
			t.Fatalf("%s: %d sent, %d formless of %d: %v", url, sent, formless, len(records), err)
		}
		var want []natlog.Record
		for _, r := range records {
			if e, ok := expected(r, sink.Form); ok {
				e.Source = 0
				want = append(want, e)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%s: %d records, want %d", url, len(got), len(want))
		}
		for i := range want {
			if sink.Form == natlog.NetFlow9 {
				got[i].Kind, want[i].Kind = natlog.NoKind, natlog.NoKind
			}
			if got[i] != want[i] {
				t.Errorf("%s: record %d:\n%+v, want\n%+v", url, i%len(examples), got[i], want[i])
			}
		}
		if c.messages < 2 {
			t.Errorf("%s: %d messages", url, c.messages)
		}
	}
}

// Templates are sent once over TCP; over UDP again after a time and after so many messages.
func TestTemplateRefresh(t *testing.T) {
	one := examples[:1]
	for _, tt := range []struct {
		url    string
		step   time.Duration
		told   int
		rounds int
	}{
		{"ipfix+tcp://c", time.Hour, 1, 2500},
		{"ipfix+udp://c?refresh=10s", time.Second, 10, 100},
		{"ipfix+udp://c", time.Millisecond, 3, 2500},
		{"netflow9+udp://c", time.Millisecond, 3, 2500},
		{"netflow9+udp://c?refresh=10s", -time.Second, 100, 100}, // the clock was set back
	} {
		f, c := NewFlow(sinkOf(t, tt.url)), collector{}
		for i := range tt.rounds {
			if _, _, err := f.Encode(one, now.Add(time.Duration(i)*tt.step), func(m []byte) error { _, err := c.read(m); return err }); err != nil {
				t.Fatalf("%s: %v", tt.url, err)
			}
		}
		if c.told != tt.told {
			t.Errorf("%s: %d templates in %d messages, want %d", tt.url, c.told, tt.rounds, tt.told)
		}
	}
}

// What emit does not take is not sent.
func TestFlowFails(t *testing.T) {
	f := NewFlow(sinkOf(t, "ipfix+udp://c?size=768"))
	var records []natlog.Record
	for range 100 {
		records = append(records, examples[0])
	}
	taken := 0
	var c collector
	sent, _, err := f.Encode(records, now, func(m []byte) error {
		if c.messages == 2 {
			return errBad
		}
		list, err := c.read(m)
		taken += len(list)
		return err
	})
	if !errors.Is(err, errBad) || sent != taken || sent == 0 || sent == len(records) {
		t.Errorf("%d sent, %d taken: %v", sent, taken, err)
	}
}

// Shapes with other fields have other templates.
func TestTemplateIDs(t *testing.T) {
	seen := map[uint16]shape{}
	for topic := ofTranslation; topic <= ofThreshold; topic++ {
		for n := range 27 << 5 {
			bits := n / 27
			s := shape{topic: topic, internal: family(n % 3), external: family(n / 3 % 3), destination: family(n / 9 % 3),
				since: bits&1 != 0, network: bits&2 != 0, subscriber: bits&4 != 0, pool: bits&8 != 0, quota: bits&16 != 0}
			if had, ok := seen[s.id()]; ok && had != s {
				t.Fatalf("%+v and %+v have template %d", had, s, s.id())
			}
			if seen[s.id()] = s; s.id() < 256 {
				t.Fatalf("%+v has template %d", s, s.id())
			}
		}
	}
}

func TestMicroseconds(t *testing.T) {
	for m := natlog.Micros(1764000000_000000); m < 1764000000_000000+1_000_000; m += 7 {
		n := ntp(m)
		if n&(1<<11-1) != 0 {
			t.Fatalf("%d: the lowest bits of %#x", m, n)
		}
		if got := natlog.Micros((n>>32-2_208_988_800)*1e6 + (n&0xffffffff)*1e6>>32); got != m {
			t.Fatalf("%d is read as %d", m, got)
		}
	}
}

// The bytes themselves.
func TestFlowBytes(t *testing.T) {
	for _, tt := range []struct {
		url  string
		r    natlog.Record
		want string
	}{
		{"ipfix+tcp://c?domain=7", examples[0], `
			000a005a 6b050087 00000000 00000007 00020028 03800008 01430008 01440008 00e60001 00080004 00e10004 00040001
			00070002 00e30002 03800022 0000019a b697e87b ecceff80 1f9ad000 080a0000 09c63364 010603e8 1388`}, // a mapping begins
		{"ipfix+tcp://c", examples[2], `
			000a0084 6b050087 00000000 00000001 00020040 03a8000e 01430008 01440008 00e60001 00080004 00e10004 00040001
			00070002 00e30002 000c0004 000b0002 00e20004 00e40002 003a0002 00ea0004 03a80034 0000019a b697e87b ecceff80
			1f9ad000 040a0000 09c63364 011103e8 1388c000 020101bb c0000201 01bb000c 00000007`}, // a session of a VLAN and a zone begins
		{"ipfix+tcp://c", examples[7], `
			000a0073 6b050087 00000000 00000001 00020030 0998000a 01430008 01440008 00e60001 00e10004 01690002 016a0002
			00980008 00990008 003a0002 00ea0004 09980033 0000019a b697e87b ecceff80 1f9ad000 11c63364 01fc00ff ff000001
			9ab5ff51 80000001 9ab697e8 7b000c00 000000`}, // a block ends
		{"ipfix+tcp://c", examples[12], `
			000a003e 6b050087 00000000 00000001 00030016 19000003 00010090 00040110 0008010d 00081900 00180000 00010000
			019ab697 e4930000 019ab697 e87c`}, // a gap
		{"netflow9+udp://c?domain=7", examples[5], `
			00090002 00000000 6b050087 00000000 00000007 00000020 0b800006 01430008 00e60001 00080004 00e10004 01690002
			016a0002 0b80001c 0000019a b697e87b 01644000 07c63364 01040005 ff000000`}, // a block begins
	} {
		var got []byte
		if _, _, err := NewFlow(sinkOf(t, tt.url)).Encode([]natlog.Record{tt.r}, now, func(m []byte) error { got = m; return nil }); err != nil {
			t.Fatal(err)
		}
		if want := strings.Join(strings.Fields(tt.want), ""); hex.EncodeToString(got) != want {
			t.Errorf("%s:\n%x, want\n%s", tt.url, got, want)
		}
	}
}

// Reading ends, whatever is read.
func FuzzCollector(f *testing.F) {
	for _, url := range []string{"ipfix+tcp://c", "netflow9+udp://c"} {
		_, _, _ = NewFlow(sinkOf(f, url)).Encode(examples, now, func(m []byte) error { f.Add(slices.Clone(m)); return nil })
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		var c collector
		_, _ = c.read(b)
	})
}

// Whatever a record has, it is received.
func FuzzFlow(f *testing.F) {
	for i := range examples {
		f.Add(natlog.AppendFrame(nil, examples[i:i+1]))
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		records, _, err := natlog.NextFrame(frame, nil)
		if err != nil {
			return
		}
		records = slices.DeleteFunc(records, func(r natlog.Record) bool { return r.Event == natlog.Tick })
		for _, url := range []string{"ipfix+tcp://c", "netflow9+udp://c?size=768"} {
			var c collector
			got := 0
			sent, formless, err := NewFlow(sinkOf(t, url)).Encode(records, now, func(m []byte) error {
				list, err := c.read(m)
				got += len(list)
				return err
			})
			if err != nil || got != sent || sent+formless != len(records) {
				t.Fatalf("%s: %d of %d records, %d formless: %v", url, got, len(records), formless, err)
			}
		}
	})
}

// Rules that came into force are no NAT event: a collector is sent none of them.
func TestAppliedHasNoForm(t *testing.T) {
	for _, form := range []natlog.Form{natlog.IPFIX, natlog.NetFlow9} {
		f := NewFlow(natlog.Sink{Form: form, Size: 1400})
		r := natlog.Record{Translation: natlog.Translation{Source: natlog.Engine}, Event: natlog.Applied, Time: 1, Note: "rules/x.yaml"}
		sent, formless, err := f.Encode([]natlog.Record{r}, time.Unix(0, 0), func(message []byte) error {
			t.Errorf("%s: % x", form, message)
			return nil
		})
		if sent != 0 || formless != 1 || err != nil {
			t.Errorf("%s: %d sent, %d without a form: %v", form, sent, formless, err)
		}
	}
}
