// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
)

func TestAppendConntrackFlow(t *testing.T) {
	f := &conntrack.Flow{
		Family: unix.AF_INET, Proto: unix.IPPROTO_TCP, State: conntrack.TCPTimeWait, Has: conntrack.AllFields,
		Status: conntrack.StatusSeenReply | conntrack.StatusAssured, Timeout: 7, Mark: 1, Secmark: 2, Use: 3, ID: 4,
		Zone: 5, ZoneOrig: 6, ZoneReply: 7,
		Orig:         conntrack.Tuple{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2"), SrcPort: 1000, DstPort: 80},
		Reply:        conntrack.Tuple{Src: netip.MustParseAddr("172.17.0.2"), Dst: netip.MustParseAddr("100.64.0.1"), SrcPort: 8080, DstPort: 5000},
		OrigCounters: conntrack.Counters{Packets: 1<<64 - 1, Bytes: 2}, ReplyCounters: conntrack.Counters{Packets: 3, Bytes: 4},
		Start: 1_000_000_001, Stop: 2_000_000_000, DeltaSeconds: 1,
		Secctx: []byte("a:\"b\"\\\x1b[2J\xff"), Helper: []byte("ftp"), Labels: make([]byte, 16), Names: []byte("in,out"),
	}
	*(*[4]byte)(f.Labels[4:]) = [4]byte{0xff, 0xff, 0xff, 0xff} // the second word is the same in both byte orders
	line := sameAsTyped(t, f, nil)
	if want := `"secctx":"a:\"b\"\\?[2J?","helper":"ftp","labels":[32,33,`; !strings.Contains(line, want) {
		t.Errorf("%s\nlacks %s", line, want)
	}
	if want := `"original":{"source":{"address":"10.0.0.1","port":1000},"destination":{"address":"10.0.0.2","port":80},"zone":6,"packets":18446744073709551615,"bytes":2},"reply":`; !strings.Contains(line, want) {
		t.Errorf("%s\nlacks %s", line, want)
	}
	sameAsTyped(t, f, &EngineNote{labels: true})

	// An entry has only what it has.
	f = &conntrack.Flow{Family: unix.AF_INET, Proto: unix.IPPROTO_ICMP, Orig: f.Orig, Reply: f.Reply}
	const icmp = `{"schema":"natkit/conntrack-entry/1","family":"ipv4","protocol":"icmp","protocol_number":1,"status":["UNREPLIED","SNAT","DNAT"],` +
		`"original":{"source":{"address":"10.0.0.1"},"destination":{"address":"10.0.0.2"},"icmp_type":0,"icmp_code":0,"icmp_id":1000},` +
		`"reply":{"source":{"address":"172.17.0.2"},"destination":{"address":"100.64.0.1"},"icmp_type":0,"icmp_code":0,"icmp_id":8080}}`
	if line := sameAsTyped(t, f, nil); line != icmp {
		t.Errorf("got  %s\nwant %s", line, icmp)
	}
	f.Proto = unix.IPPROTO_GRE
	if line := sameAsTyped(t, f, nil); !strings.Contains(line, `"source_key":1000,"destination_key":80`) {
		t.Errorf("of GRE: %s", line)
	}
	buf := make([]byte, 0, 4096)
	if n := testing.AllocsPerRun(100, func() { AppendConntrackFlow(buf, f, nil) }); n > 0 {
		t.Errorf("%.0f allocations an entry", n)
	}
}

// sameAsTyped returns an entry's line, which is what encoding/json makes of it as a value.
func sameAsTyped(t *testing.T, f *conntrack.Flow, engine *EngineNote) string {
	t.Helper()
	line := AppendConntrackFlow(nil, f, engine)
	var entry struct {
		Schema string `json:"schema"`
		ConntrackEntry
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&entry); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	var want bytes.Buffer
	if err := JSONLine(&want, &entry.ConntrackEntry); err != nil {
		t.Fatal(err)
	}
	if got := string(line) + "\n"; got != want.String() {
		t.Errorf("got  %swant %s", got, want.String())
	}
	return string(line)
}

func TestConntrackBars(t *testing.T) {
	port := uint16(443)
	top := ConntrackTop{By: "dport", Entries: 100, Rows: []ConntrackRow{{Protocol: "tcp", Port: &port, Entries: 50, Unreplied: new(uint64)}, {Protocol: "udp", Port: &port, Entries: 3, Unreplied: new(uint64)}}}
	stats := ConntrackStats{Entries: 1000, ByProtocol: map[string]uint64{"tcp": 990, "udp": 1}}
	for bars, want := range map[Bars]string{
		NoBars: "ENTRIES  SHARE   UNREPLIED  PORT\n50       50.0 %  0          443/tcp\n3        3.0 %   0          443/udp\n" +
			"1000 entries\n\nprotocol          entries\ntcp                   990  99.0 %\nudp                     1   0.1 %\n",
		PlainBars: "ENTRIES  SHARE   UNREPLIED  PORT\n50       50.0 %  0          443/tcp  ##########\n3        3.0 %   0          443/udp  #\n" +
			"1000 entries\n\nprotocol          entries\ntcp                   990  99.0 %  ####################\nudp                     1   0.1 %  #\n",
		BlockBars: "ENTRIES  SHARE   UNREPLIED  PORT\n50       50.0 %  0          443/tcp  ██████████\n3        3.0 %   0          443/udp  ▋\n" +
			"1000 entries\n\nprotocol          entries\ntcp                   990  99.0 %  ███████████████████▊\nudp                     1   0.1 %  ▏\n",
	} {
		var b strings.Builder
		if err := errors.Join(top.Text(&b, bars), stats.Text(&b, bars)); err != nil || b.String() != want {
			t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
		}
	}
}

func TestConntrackMemoryText(t *testing.T) {
	m := conntrack.Memory{
		Limits:      conntrack.Limits{Count: 200000, Max: 262144, Buckets: 262144},
		ObjectBytes: 256, ObjectSource: "/proc/slabinfo", ExtensionBytes: 128, BucketBytes: 8,
		HostEntries: 200064, SlabBytes: 51_220_480,
	}
	for _, tt := range []struct {
		name, want string
		change     func()
	}{
		{"all known", `entries    200000 of at most 262144 (76.3 %) in this namespace
           200064 on the host, by its slab
entry      256 bytes (/proc/slabinfo)
           +128 bytes if masqueraded, accounted, time-stamped, labelled or
           watched
hash       262144 buckets of 8 bytes, 2.0 MiB, one for all namespaces
chain      1.53 entries a bucket on average now, 2.00 with a full table (an
           entry is in two chains)
now        48.8 MiB for this namespace's entries, 73.2 MiB if all have the
           extension
full       64.0 MiB for as many as it may have, 96.0 MiB if all have the
           extension
slab       48.8 MiB held now for the entries of all namespaces of the host, free
           ones included; this namespace's share is the line "now"
`, func() {}},
		{"no limit, no root", `entries    200000 in this namespace, without a limit (nf_conntrack_max is 0)
hash       262144 buckets of 8 bytes, 2.0 MiB, one for all namespaces
chain      1.53 entries a bucket on average now (an entry is in two chains)
unknown    size of an entry: needs root
`, func() {
			m.Max, m.ObjectBytes, m.ObjectSource, m.HostEntries, m.SlabBytes = 0, 0, "", 0, 0
			m.Unknown = []string{"size of an entry: needs root"}
		}},
	} {
		tt.change()
		var b strings.Builder
		if err := NewConntrackMemory(&m).Text(&b); err != nil {
			t.Fatal(err)
		}
		if b.String() != tt.want {
			t.Errorf("%s: got\n%swant\n%s", tt.name, b.String(), tt.want)
		}
	}
}

func TestConntrackRatesText(t *testing.T) {
	r := &conntrack.Rates{
		Seconds: 2, New: 1474, Destroyed: 3, Lost: 12, Limits: conntrack.Limits{Count: 738, Max: 1000},
		Entered: map[conntrack.State]uint64{conntrack.TCPTimeWait: 1434, conntrack.TCPSynSent: 1474},
		Ended:   map[conntrack.State]uint64{conntrack.TCPTimeWait: 3},
	}
	at := time.Date(2025, 11, 21, 2, 18, 33, 0, time.UTC)
	rates := NewConntrackRates(at, r)
	var b strings.Builder
	if err := rates.Text(&b); err != nil {
		t.Fatal(err)
	}
	const want = "    TIME    NEW/S  ENDED/S  ENTRIES  FILL    LOST  TCP FLOWS ENTERING A STATE, PER SECOND\n" +
		"02:18:33      737      1.5      738   74 %      12  SYN_SENT 737  TIME_WAIT 717\n"
	if got := ConntrackRatesHeader + b.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	b.Reset()
	few := NewConntrackRates(at, &conntrack.Rates{Seconds: 30, New: 1, Destroyed: 12, Limits: conntrack.Limits{Count: 999, Max: 1000},
		Entered: map[conntrack.State]uint64{conntrack.TCPSynSent: 6}})
	if err := few.Text(&b); err != nil || b.String() != "02:18:33     <0.1      0.4      999  >99 %       0  SYN_SENT 0.2\n" {
		t.Errorf("%v, %q", err, b.String())
	}
	if rates.Ended["TIME_WAIT"] != 1.5 || rates.Entered["SYN_SENT"] != 737 {
		t.Errorf("%+v", rates)
	}
}
