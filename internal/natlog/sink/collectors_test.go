// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// Programs that other people wrote read what sinks send: each record is compared field by field.

func endpoint(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

var sentAt = natlog.MicrosOf(time.Date(2026, 11, 24, 3, 12, 7, 123456000, time.UTC))

var sentRecords = []natlog.Record{
	{Event: natlog.Created, Time: sentAt, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Engine, Protocol: 6,
		Internal: endpoint("10.0.0.9:1000"), External: endpoint("198.51.100.1:5000"), Destination: endpoint("192.0.2.1:443")}},
	{Event: natlog.Ended, Time: sentAt + 2_000_000, Since: sentAt, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Engine, Protocol: 6,
		Internal: endpoint("10.0.0.9:1000"), External: endpoint("198.51.100.1:5000"), Destination: endpoint("192.0.2.1:443")}},
	{Event: natlog.Created, Time: sentAt, Translation: natlog.Translation{Kind: natlog.Block, Source: natlog.Engine,
		Internal: endpoint("100.64.0.7:0"), External: endpoint("198.51.100.1:1024"), LastPort: 1535, Subscriber: "line 7"}},
	{Event: natlog.Ended, Time: sentAt + 1_000_000, Since: sentAt, Translation: natlog.Translation{Kind: natlog.Block, Source: natlog.Engine,
		Internal: endpoint("100.64.0.7:0"), External: endpoint("198.51.100.1:1024"), LastPort: 1535, Subscriber: "line 7"}},
}

// sendTo sends the records to a sink.
func sendTo(t *testing.T, url string) {
	t.Helper()
	sendRecords(t, url, sentRecords)
}

func sendRecords(t *testing.T, url string, records []natlog.Record) {
	t.Helper()
	s, err := natlog.ParseSink(url)
	if err != nil {
		t.Fatal(err)
	}
	out, err := dial(s, "gw1")
	if err != nil {
		t.Fatal(err)
	}
	defer out.close()
	if n, err := out.send(t.Context(), records); err != nil || n != len(records) {
		t.Fatalf("%s: %d sent: %v", url, n, err)
	}
}

// freePort is a UDP port that nobody has.
func freePort(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
	return port
}

// collect starts a collector and waits until its port is open.
func collect(t *testing.T, port string, name string, args ...string) (stop func()) {
	t.Helper()
	cmd := exec.Command(ktest.Tool(t, name), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it has children of its own
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	stop = func() {
		select {
		case <-ended:
			return
		default:
		}
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) // nfacctd ends by no other
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-ended
		}
	}
	t.Cleanup(stop)
	if port != "" {
		ktest.Wait(t, 30*time.Second, name+" to listen", func() bool {
			select {
			case <-ended:
				t.Fatalf("%s has ended: %v", name, cmd.ProcessState)
			default:
			}
			return socketOf(t, port) != "" // to open the port oneself would keep the collector from it
		})
	}
	return stop
}

// socketOf is the kernel's line of the socket of a UDP port, "" where there is none.
func socketOf(t *testing.T, port string) string {
	t.Helper()
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/self/net/udp")
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(fmt.Sprintf(`(?m)^ *\d+: [0-9A-F]+:%04X [0-9A-F]+:0000 .*$`, n)).FindString(string(b))
}

// drained tells whether nothing waits in the socket of a UDP port.
func drained(t *testing.T, port string) bool {
	t.Helper()
	return strings.Contains(socketOf(t, port), ":0000 07 00000000:00000000 ")
}

// nfdump has sessions, and blocks by their external address, from NetFlow v9.
func TestNfdump(t *testing.T) {
	port, dir := freePort(t), t.TempDir()
	stop := collect(t, port, "nfcapd", "-w", dir, "-l", dir, "-p", port, "-b", "127.0.0.1")
	sendTo(t, "netflow9+udp://127.0.0.1:"+port)
	ktest.Wait(t, 30*time.Second, "nfcapd to read its socket", func() bool { return drained(t, port) })
	stop()
	files, _ := filepath.Glob(filepath.Join(dir, "nfcapd.2*"))
	if len(files) == 0 {
		t.Fatal("nfcapd wrote no file")
	}
	cmd := exec.Command(ktest.Tool(t, "nfdump"), "-q", "-r", files[0], "-o", "raw")
	cmd.Env = append(os.Environ(), "TZ=UTC")
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nfdump: %v %s", err, b)
	}
	records := strings.Split(string(b), "Flow Record:")[1:]
	if len(records) != len(sentRecords) {
		t.Fatalf("%d records, want %d: %s", len(records), len(sentRecords), b)
	}
	for i, text := range records {
		r := &sentRecords[i]
		got := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^ *([a-zA-Z ]+?) *= +(.*?) *$`).FindAllStringSubmatch(text, -1) {
			got[m[1]] = m[2]
		}
		want := map[string]string{"src addr": r.Internal.Addr().String(), "src xlt ip": r.External.Addr().String(),
			"Event time": fmt.Sprintf("%d [%s]", r.Time/1000, r.Time.Time().Format("2006-01-02 15:04:05.000"))}
		if r.Kind == natlog.Session {
			want["proto"], want["src port"], want["src xlt port"] = "6 TCP", "1000", "5000"
			want["dst addr"], want["dst port"], want["dst xlt ip"], want["dst xlt port"] = "192.0.2.1", "443", "192.0.2.1", "443"
		}
		for name, w := range want {
			if got[name] != w {
				t.Errorf("record %d: %s is %q, want %q:%s", i, name, got[name], w, text)
			}
		}
		number := "1:"
		if r.Event == natlog.Ended {
			number = "2:"
		}
		if !strings.HasPrefix(got["nat event"], number) || strings.Contains(got["nat event"], "UNKNOW") {
			t.Errorf("record %d: event %q, want %s and a name", i, got["nat event"], number)
		}
		if r.Kind == natlog.Block && !regexp.MustCompile(`pblock start += +1024\n.*pblock end += +1535`).MatchString(text) {
			t.Errorf("record %d has no block:%s", i, text)
		}
	}
}

// nfacctd has sessions and, by custom primitives for elements 361 and 362, blocks from IPFIX.
func TestNfacctd(t *testing.T) {
	port, dir := freePort(t), t.TempDir()
	out := filepath.Join(dir, "out.json")
	for name, text := range map[string]string{
		"prim": "name=range_start field_type=361 len=2 semantics=u_int\nname=range_end field_type=362 len=2 semantics=u_int\n",
		"conf": "nfacctd_ip: 127.0.0.1\nnfacctd_port: " + port + "\nplugins: print\naggregate: src_host, dst_host, post_nat_src_host, post_nat_dst_host, src_port, dst_port, " +
			"post_nat_src_port, post_nat_dst_port, proto, nat_event, range_start, range_end\naggregate_primitives: " + filepath.Join(dir, "prim") +
			"\nprint_refresh_time: 1\nprint_output: json\nprint_output_file: " + out + "\nprint_output_file_append: true\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	collect(t, port, "nfacctd", "-f", filepath.Join(dir, "conf"))
	type decoded struct {
		Source   string `json:"ip_src"`
		External string `json:"post_nat_ip_src"`
		Peer     string `json:"ip_dst"`
		Event    int    `json:"nat_event"`
		Port     int    `json:"port_src"`
		Post     int    `json:"post_nat_port_src"`
		First    string `json:"range_start"`
		Last     string `json:"range_end"`
	}
	var got []decoded
	var sent time.Time
	ktest.Wait(t, 30*time.Second, "nfacctd to write", func() bool {
		if time.Since(sent) > 3*time.Second { // it opens its port before its plugin is there
			sendTo(t, "ipfix+udp://127.0.0.1:"+port)
			sent = time.Now()
		}
		b, _ := os.ReadFile(out)
		got = nil
		for line := range strings.Lines(string(b)) {
			var d decoded
			if json.Unmarshal([]byte(line), &d) == nil {
				got = append(got, d)
			}
		}
		return len(got) >= len(sentRecords)
	})
	for _, want := range []decoded{
		{"10.0.0.9", "198.51.100.1", "192.0.2.1", 4, 1000, 5000, "0", "0"},
		{"10.0.0.9", "198.51.100.1", "192.0.2.1", 5, 1000, 5000, "0", "0"},
		{"100.64.0.7", "198.51.100.1", "", 16, 0, 0, "1024", "1535"},
		{"100.64.0.7", "198.51.100.1", "", 17, 0, 0, "1024", "1535"},
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %+v in %+v", want, got)
		}
	}
}

// ipfixDump names every element of what is sent over TCP.
func TestIpfixDump(t *testing.T) {
	tool := ktest.Tool(t, "ipfixDump")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	taken := make(chan []byte, 1)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			taken <- nil
			return
		}
		defer conn.Close()
		b, _ := io.ReadAll(conn)
		taken <- b
	}()
	sendTo(t, "ipfix+tcp://"+ln.Addr().String())
	file := filepath.Join(t.TempDir(), "ipfix")
	if err := os.WriteFile(file, <-taken, 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := exec.Command(tool, "--in", file).CombinedOutput()
	if err != nil {
		t.Fatalf("ipfixDump: %v %s", err, b)
	}
	records := regexp.MustCompile(`--- data record \d+ ---`).Split(string(b), -1)[1:]
	if len(records) != len(sentRecords) {
		t.Fatalf("%d records: %s", len(records), b)
	}
	events := []string{"4", "5", "16", "17"}
	for i, text := range records {
		r := &sentRecords[i]
		want := map[string]string{"observationTimeMilliseconds": r.Time.Time().Format("2006-01-02 15:04:05.000"), "natEvent": events[i],
			"sourceIPv4Address": r.Internal.Addr().String(), "postNATSourceIPv4Address": r.External.Addr().String()}
		if r.Kind == natlog.Session {
			for name, v := range map[string]string{"protocolIdentifier": "6", "sourceTransportPort": "1000", "postNAPTSourceTransportPort": "5000",
				"destinationIPv4Address": "192.0.2.1", "destinationTransportPort": "443", "postNATDestinationIPv4Address": "192.0.2.1", "postNAPTDestinationTransportPort": "443"} {
				want[name] = v
			}
		} else {
			want["portRangeStart"], want["portRangeEnd"], want["userName"] = "1024", "1535", "line 7"
		}
		if r.Event == natlog.Ended {
			want["flowStartMilliseconds"], want["flowEndMilliseconds"] = r.Since.Time().Format("2006-01-02 15:04:05.000"), r.Time.Time().Format("2006-01-02 15:04:05.000")
		}
		got := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^\s+\(\d+\)\s+(\w+) : (.*?)\s*$`).FindAllStringSubmatch(text, -1) {
			got[m[1]] = strings.Trim(regexp.MustCompile(`^\(len: \d+\) `).ReplaceAllString(m[2], ""), `"`)
		}
		for name, w := range want {
			if got[name] != w {
				t.Errorf("record %d: %s is %q, want %q", i, name, got[name], w)
			}
		}
	}
}

// goflow2 has every field of every kind of record by the mapping of the documentation, but a
// gap and microseconds; NetFlow has no names and quotas.
func TestGoflow2(t *testing.T) {
	ktest.Collectors(t)
	const mapping = "../../../docs/goflow2.yaml"
	records := append(slices.Clone(sentRecords),
		natlog.Record{Event: natlog.Alive, Time: sentAt + 3, Since: sentAt, Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 17,
			Internal: endpoint("10.0.0.9:1001"), External: endpoint("198.51.100.1:65535"), VLAN: 4094, Zone: 65535}},
		natlog.Record{Event: natlog.Created, Time: sentAt, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Engine, Protocol: 6,
			Internal: endpoint("[2001:db8::9]:1000"), External: endpoint("198.51.100.1:5001"), Destination: endpoint("192.0.2.1:443")}},
		natlog.Record{Event: natlog.Created, Time: sentAt, Translation: natlog.Translation{Kind: natlog.Session, Source: natlog.Kernel, Protocol: 6,
			Internal: endpoint("[2001:db8::9]:1000"), External: endpoint("[2001:db8:1::1]:5001"), Destination: endpoint("[2001:db8:2::1]:443")}},
		natlog.Record{Event: natlog.Exhausted, Time: sentAt, Note: "pool cgn: no port left", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 6, External: endpoint("198.51.100.1:0")}},
		natlog.Record{Event: natlog.Quota, Time: sentAt, Note: "ports", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 17,
			Internal: endpoint("100.64.0.7:0"), Subscriber: "line 7"}},
		natlog.Record{Event: natlog.Gap, Time: sentAt, Since: sentAt - 5_000_000, Translation: natlog.Translation{Source: natlog.Kernel}},
	)
	events := map[string][]int{"IPFIX": {4, 5, 16, 17, 8, 6, 1, 12, 13}, "NETFLOW_V9": {1, 2, 1, 2, 1, 1, 1, 3}}
	for scheme, form := range map[string]string{"ipfix+udp": "IPFIX", "netflow9+udp": "NETFLOW_V9"} {
		has := records
		if form == "NETFLOW_V9" {
			has = records[:8]
		}
		t.Run(form, func(t *testing.T) {
			port, out := freePort(t), filepath.Join(t.TempDir(), "out.json")
			collect(t, port, "goflow2", "-listen", "netflow://127.0.0.1:"+port, "-addr", "127.0.0.1:0", "-mapping", mapping, "-transport.file", out)
			sendRecords(t, scheme+"://127.0.0.1:"+port, has)
			var got []map[string]any
			ktest.Wait(t, 30*time.Second, "goflow2 to write", func() bool {
				b, _ := os.ReadFile(out)
				got = nil
				for line := range strings.Lines(string(b)) {
					var row map[string]any
					if json.Unmarshal([]byte(line), &row) == nil {
						got = append(got, row)
					}
				}
				return len(got) >= len(events[form])
			})
			if len(got) != len(events[form]) {
				t.Fatalf("%d records, want %d: %v", len(got), len(events[form]), got)
			}
			for i, row := range got {
				if want := goflow2Row(&records[i], form, events[form][i]); !reflect.DeepEqual(row, want) {
					t.Errorf("record %d is\n%v, want\n%v", i, row, want)
				}
			}
		})
	}
}

// goflow2Row is a record as goflow2 prints it. A field of flows that the record lacks is 0 or
// empty, any other is not there.
func goflow2Row(r *natlog.Record, form string, event int) map[string]any {
	number := func(n uint16) float64 { return float64(n) }
	row := map[string]any{"type": form, "observation_domain_id": 1.0, "time": float64(r.Time / 1000), "nat_event": float64(event),
		"proto": map[uint8]string{0: "HOPOPT", 6: "TCP", 17: "UDP"}[r.Protocol], "src_addr": "", "src_port": 0.0, "dst_addr": "", "dst_port": 0.0, "vlan_id": number(r.VLAN)}
	if a := r.Internal; a.IsValid() {
		row["src_addr"], row["src_port"] = a.Addr().String(), number(a.Port())
	}
	if a := r.External; a.IsValid() {
		row["post_nat_src_addr"] = a.Addr().String()
	}
	switch r.Kind {
	case natlog.Block:
		row["port_range_start"], row["port_range_end"] = number(r.External.Port()), number(r.LastPort)
	case natlog.Mapping, natlog.Session:
		row["post_nat_src_port"] = number(r.External.Port())
	}
	if a := r.Destination; a.IsValid() {
		row["post_nat_dst_addr"], row["post_nat_dst_port"] = a.Addr().String(), number(a.Port())
		if a.Addr().Is4() == r.Internal.Addr().Is4() {
			row["dst_addr"], row["dst_port"] = a.Addr().String(), number(a.Port())
		}
	}
	if r.Since != 0 {
		row["since"], row["until"] = float64(r.Since/1000), float64(r.Time/1000)
	}
	if r.Zone != 0 {
		row["zone"] = number(r.Zone)
	}
	if form == "IPFIX" {
		if r.Subscriber != "" {
			row["subscriber"] = r.Subscriber
		}
		if name := r.Pool(); name != "" {
			row["pool"] = name
		}
		if r.Event == natlog.Quota {
			row["quota_event"] = 3.0
		}
	}
	return row
}
