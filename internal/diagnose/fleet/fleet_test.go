// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

var (
	nodes  = flag.Int("nodes", 60, "how many nodes the made fleet has")
	folder = flag.String("fleet", "", "keep the made fleet in this folder, to measure with")
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// saved are the facts of a machine that was recorded, with what its rules are.
func saved(t testing.TB, name string) *snapshot.Snapshot {
	t.Helper()
	f, err := os.Open("../../ui/report/testdata/corpus/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := snapshot.Load(f)
	if err != nil {
		t.Fatal(err)
	}
	s.Netns.Init = true
	return s
}

// writeNode saves facts as natkit doctor --all-netns does where there are several.
func writeNode(t testing.TB, path string, all ...*snapshot.Snapshot) {
	t.Helper()
	var b bytes.Buffer
	if len(all) == 1 {
		if err := snapshot.Save(&b, all[0]); err != nil {
			t.Fatal(err)
		}
	} else {
		w := snapshot.NewWriter(&b)
		for _, s := range all {
			if err := w.Add(s); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.End(snapshot.LeftOut{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// full makes the table of a node full.
func full(s *snapshot.Snapshot) {
	ct := *s.Conntrack
	ct.Max, ct.Count, ct.CountStart = 65536, 65536, 65536
	ct.Stats = map[string]uint64{"drop": 1200}
	s.Conntrack = &ct
}

// madeFleet writes a fleet of machines alike, with two namespaces each: node 7's table is full and
// its rp_filter differs, node 9 lacks a table of rules, all even nodes have the same advice.
func madeFleet(t testing.TB, dir string, n int) (names []string) {
	t.Helper()
	host, pod := saved(t, "ufw"), saved(t, "docker")
	pod.Netns = snapshot.Netns{Name: "pod", Inode: 4026532999, Container: "pod shop/cart"}
	for i := range n {
		h := *host
		h.Host.Hostname, h.TakenAt = fmt.Sprintf("node-%04d", i), noon.Add(time.Duration(i)*time.Millisecond)
		h.Sysctls = map[string]string{}
		for k, v := range host.Sysctls {
			h.Sysctls[k] = v
		}
		switch i {
		case 7:
			full(&h)
			h.Sysctls["net.ipv4.conf.all.rp_filter"] = "1"
		case 9:
			h.Chains = slices.DeleteFunc(slices.Clone(h.Chains), func(c snapshot.Chain) bool { return c.Table == h.Chains[0].Table })
		}
		p := *pod
		p.Host = h.Host
		path := filepath.Join(dir, h.Host.Hostname+".json")
		writeNode(t, path, &h, &p)
		names = append(names, path)
	}
	return names
}

func gathered1(ctx context.Context, names []string) *Report {
	var g Gather
	Read(ctx, names, 20*time.Second, g.Add)
	return g.Report()
}

// A fleet of machines alike, of which two differ: what is kept of each is small, and the two stand out.
func TestFleet(t *testing.T) {
	dir := *folder
	if dir == "" {
		dir = t.TempDir()
	}
	names := madeFleet(t, dir, *nodes)
	rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	begun := time.Now()
	var g Gather
	Read(t.Context(), names, time.Minute, g.Add)
	r := g.Report()
	t.Logf("%d nodes in %v", len(names), time.Since(begun).Round(time.Millisecond))
	runtime.GC()
	runtime.ReadMemStats(&after)
	if kept := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / int64(len(names)); kept > 64<<10 {
		t.Errorf("%d bytes of each node are kept", kept)
	}
	runtime.KeepAlive(g)
	if len(r.Unread) > 0 || r.NodeCount != *nodes {
		t.Fatalf("%d nodes, %+v", r.NodeCount, r.Unread)
	}
	first := r.Causes[0]
	if first.Code != "conntrack-table-full" || !first.Outlier || first.NodeCount != 1 || first.On[0].Node != "node-0007" || first.On[0].Namespace != "host" {
		t.Errorf("first: %+v", first)
	}
	for _, c := range r.Causes[1:] {
		if c.Outlier && c.On[0].Node != "node-0007" {
			t.Errorf("outlier %+v", c)
		}
	}
	what := map[string]Difference{}
	for _, d := range r.Differences {
		what[d.What] = d
	}
	rp := what["setting net.ipv4.conf.all.rp_filter"]
	if rp.Nodes != *nodes-1 || len(rp.Others) != 1 || rp.Others[0] != (OtherValue{"node-0007", "1"}) {
		t.Errorf("%+v", rp)
	}
	rules := 0
	for name, d := range what {
		if strings.HasPrefix(name, "rules of ") {
			if rules++; len(d.Others) != 1 || d.Others[0].Node != "node-0009" || !strings.Contains(d.Most, "digest") {
				t.Errorf("%+v", d)
			}
		}
	}
	if rules != 2 || len(r.Differences) != 3 { // ip and ip6
		t.Errorf("%d differences of rules of %d: %+v", rules, len(r.Differences), r.Differences)
	}
	if top := r.Nodes[0]; top.Node != "node-0007" || top.Worst != causes.Critical || top.Outliers < 2 || r.Nodes[1].Node != "node-0009" {
		t.Errorf("%+v", r.Nodes[:2])
	}
}

// node is a small one.
func node(name string, config map[string]string, codes ...string) Input {
	n := &Node{Name: name, At: noon, Namespaces: 1, Configuration: config}
	for _, code := range codes {
		n.Findings = append(n.Findings, Finding{Code: code, Severity: causes.Warning, Title: code, Namespace: "host"})
	}
	return Input{Name: name + ".json", Node: n}
}

func TestOutliers(t *testing.T) {
	var g Gather
	for i := range 20 {
		config := map[string]string{"kernel": "6.1", "setting own": fmt.Sprint(i), "rules of nft ip nat": "3 rules"}
		var codes []string
		if i < 12 {
			codes = append(codes, "everywhere")
		}
		if i < 3 {
			codes = append(codes, "some")
		}
		if i == 4 || i == 5 {
			codes = append(codes, "rare")
			config["kernel"] = "6.12"
		}
		if i >= 14 {
			delete(config, "rules of nft ip nat")
		}
		if i >= 8 { // 8 to 12: no majority of two thirds
			config["setting mixed"] = "b"
		} else {
			config["setting mixed"] = "a"
		}
		if i == 6 {
			config["setting veth1"] = "1"
		}
		g.Add(node(fmt.Sprintf("n%02d", i), config, codes...))
	}
	g.Add(Input{Name: "z.json", Err: io.ErrUnexpectedEOF})
	g.Add(Input{Name: "a.json", Err: io.ErrUnexpectedEOF})
	r := g.Report()
	var order []string
	for _, c := range r.Causes {
		order = append(order, fmt.Sprint(c.Code, " ", c.NodeCount, " ", c.Outlier))
	}
	if want := []string{"rare 2 true", "everywhere 12 false", "some 3 false"}; !slices.Equal(order, want) {
		t.Errorf("%q, want %q", order, want)
	}
	var differences []string
	for _, d := range r.Differences {
		differences = append(differences, fmt.Sprint(d.What, ": ", d.Most, " ", d.Nodes, " ", len(d.Others)))
	}
	if want := []string{"kernel: 6.1 18 2", "rules of nft ip nat: 3 rules 14 6"}; !slices.Equal(differences, want) {
		t.Errorf("%q, want %q", differences, want)
	}
	if r.Nodes[0].Node != "n04" || r.Nodes[0].Outliers != 2 || len(r.Unread) != 2 || r.Unread[0].Input != "a.json" {
		t.Errorf("%+v, %+v", r.Nodes[0], r.Unread)
	}
}

// Of two nodes neither is an outlier, and machines of one name stay apart.
func TestFewNodes(t *testing.T) {
	var g Gather
	a, b := node("localhost", map[string]string{"kernel": "1"}, "x"), node("localhost", map[string]string{"kernel": "2"})
	a.Name, b.Name = "a.json", "b.json"
	g.Add(a)
	g.Add(b)
	r := g.Report()
	if len(r.Causes) != 1 || r.Causes[0].Outlier || len(r.Differences) != 0 || r.Causes[0].On[0].Node != "localhost (a.json)" {
		t.Errorf("%+v", r)
	}
	if empty := new(Gather).Report(); empty.NodeCount != 0 || empty.Worst() != 0 {
		t.Errorf("%+v", empty)
	}
}

// What can't be read says why, and the rest goes on.
func TestUnread(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := filepath.Join(dir, "good.json")
	writeNode(t, good, saved(t, "ufw"))
	whole, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	mine, err := Marshal(&Node{Name: "monitored", At: noon, Namespaces: 2, Configuration: map[string]string{"kernel": "x"},
		Findings: []Finding{{Code: "no-route", Severity: causes.Critical, Title: "t\x1b[31m", Namespace: "host", Since: noon.Add(-time.Hour)}}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case Path:
			w.Write(mine)
		case "/facts":
			w.Write(whole)
		case "/cut":
			w.Header().Set("Content-Length", fmt.Sprint(len(mine)))
			w.Write(mine[:len(mine)/2])
		case "/busy":
			http.Error(w, "the host was not examined yet", http.StatusServiceUnavailable)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	strange, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer strange.Close()
	go func() {
		for {
			conn, err := strange.Accept()
			if err != nil {
				return
			}
			io.WriteString(conn, "SSH-2.0-x\r\n\r\n")
			conn.Close()
		}
	}()
	reasons := map[string]string{
		filepath.Join(dir, "none.json"): "no such file",
		dir:                             "it is a directory",
		file("empty.json", ""):          "it is empty",
		file("text.json", "hello"):      "not JSON",
		file("cut.json", string(whole[:len(whole)/2])):                                 "cut off",
		file("other.json", `{"schema":"natkit/lab/1"}`):                                "not a file of natkit doctor --save",
		file("later.json", `{"schema":"natkit/node/9","hostname":"x"}`):                "use a newer natkit",
		file("none-in-it.json", `{"schema":"natkit/snapshots/1","namespaces":[]}`):     "no namespace",
		file("odd.json", `{"schema":"natkit/node/1","findings":[{"severity":"odd"}]}`): "not as natkit monitor writes it",
		file("unrated.json", `{"schema":"natkit/node/1","findings":[{"code":"x"}]}`):   "not as natkit monitor writes it",
		server.URL + "/cut":                 "cut off",
		server.URL + "/busy":                "HTTP status 503 Service Unavailable: the host was not examined yet",
		server.URL + "/old":                 "does an older natkit monitor run there?",
		"http://" + silent.Addr().String():  "no reply within",
		"http://" + closed.Addr().String():  "connection refused",
		"http://" + strange.Addr().String(): "no HTTP",
		"https://127.0.0.1:1":               "http only",
		"ftp://127.0.0.1":                   "want http://",
		"http://":                           "want http://HOST:PORT",
	}
	names := []string{good, server.URL, server.URL + "/facts"}
	for name := range reasons {
		names = append(names, name)
	}
	var g Gather
	Read(t.Context(), names, 5*time.Second, g.Add)
	r := g.Report()
	if r.NodeCount != 3 {
		t.Errorf("%d nodes", r.NodeCount)
	}
	for _, u := range r.Unread {
		if want := reasons[u.Input]; want == "" || !strings.Contains(u.Reason, want) {
			t.Errorf("%s: %q, want %q", u.Input, u.Reason, want)
		}
		delete(reasons, u.Input)
	}
	if len(reasons) > 0 {
		t.Errorf("not listed: %v", reasons)
	}
	i := slices.IndexFunc(r.Causes, func(c Cause) bool { return c.Code == "no-route" })
	if i < 0 || r.Causes[i].On[0].Node != "monitored" || !r.Causes[i].Since.Equal(noon.Add(-time.Hour)) || strings.ContainsRune(r.Causes[i].On[0].Title, '\x1b') {
		t.Errorf("%+v", r.Causes)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := gathered1(ctx, []string{good, server.URL}); r.NodeCount != 0 || len(r.Unread) != 2 {
		t.Errorf("%+v", r)
	}
}

// Long replies of many nodes at once take bounded memory, and none is lost for waiting.
func TestLongReplies(t *testing.T) {
	const nodes, most = 24, 300 << 20
	before, err := Marshal(&Node{Name: "n", Namespaces: 1})
	if err != nil {
		t.Fatal(err)
	}
	rest := bytes.Repeat([]byte(" "), 1<<20)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write(before)
		for range 15 {
			w.Write(rest)
		}
	}))
	defer server.Close()
	var names []string
	for i := range nodes {
		names = append(names, fmt.Sprintf("%s/%d", server.URL, i))
	}
	begun, peak := heap(), uint64(0)
	Read(t.Context(), names, 30*time.Second, func(in Input) {
		peak = max(peak, heap())
		if in.Err != nil {
			t.Errorf("%s: %v", in.Name, in.Err)
		}
	})
	if peak > begun+most {
		t.Errorf("%d MB were taken for %d replies, want at most %d", (peak-begun)>>20, nodes, most>>20)
	}
}

// A node that claims more than a machine has takes little more memory than its text.
func TestTooManyFindings(t *testing.T) {
	const most = 200 << 20
	for name, value := range map[string]string{"findings": "{}", "unjudged_codes": `""`, "configuration": "1"} {
		text := fmt.Sprintf(`{"schema":"natkit/node/1",%q:[%s0]}`, name, strings.Repeat(value+",", (15<<20)/(len(value)+1)))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if n, err := parse(strings.NewReader(text)); err == nil {
			t.Errorf("%s: %d findings", name, len(n.Findings))
		}
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > most {
			t.Errorf("%s: %d MB were taken, want at most %d", name, took>>20, most>>20)
		}
	}
}

// A node counts once for each cause that it could not judge, and names have nothing that a terminal obeys.
func TestHostileNode(t *testing.T) {
	n, err := parse(strings.NewReader(`{"schema":"natkit/node/1","hostname":"a","unjudged_codes":["x","y","x"],"findings":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	var g Gather
	g.Add(Input{Name: "a\x1b[2J.json", Node: n})
	g.Add(Input{Name: "b\x1b[2J.json", Err: io.ErrUnexpectedEOF})
	r := g.Report()
	if r.Unjudged["x"] != 1 || r.Unjudged["y"] != 1 || r.Unread[0].Input != "b?[2J.json" {
		t.Errorf("%+v", r)
	}
}

// heap is how much memory the process has for its objects, those of the past that were not collected among them.
func heap() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

// Who is interrupted does not wait for nodes that do not reply.
func TestInterrupted(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	begun := time.Now()
	var got Input
	Read(ctx, []string{"http://" + silent.Addr().String()}, time.Minute, func(in Input) { got = in })
	if took := time.Since(begun); took > 10*time.Second || got.Err == nil {
		t.Errorf("after %v: %v", took, got.Err)
	}
}
