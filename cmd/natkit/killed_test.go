// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// killedCommand is a command that is killed. Lines are arguments of natkit, or after "$" a line of the shell.
type killedCommand struct {
	name    string
	long    bool // with make test-long only
	lacks   []ktest.Lack
	machine []string // done once
	before  []string // done before each kill
	flows   bool     // packets come through before the command, and while it works
	command string
	refuses string // what the same command may say after a kill, where it need not succeed
	back    string // takes everything back
	off     string // what back says where nothing is to be taken back
}

const (
	upTC     = "up --engine ebpf --attach tc -f a.yaml"
	upXDP    = "up --engine ebpf --attach xdp -f a.yaml"
	upNFT    = "up --engine nft -f n.yaml"
	accelOn  = "accel on in out"
	tuneOn   = "tune apply --from facts.json --no-host-write"
	isUp     = "an engine is up already: "
	noEngine = "natkit is not the gateway here"
	noAccel  = "acceleration is off here"
)

// byNft is a gateway without natkit.
var byNft = []string{
	`$nft 'table ip nat { chain post { type nat hook postrouting priority 100; oifname "out" masquerade; }; }'`,
	"$sysctl -q net.ipv4.ip_forward=1",
}

// keeps has settings that the kernel changes with ip_forward.
var keeps = []string{"$sysctl -q net.ipv4.conf.all.accept_redirects=0 net.ipv4.conf.in.forwarding=1"}

// otherMake makes the engine that is up one of another natkit: apply replaces its programs.
const otherMake = `$sed -i -E 's/("make": ")[0-9a-f]+/\1another/w /dev/stderr' /run/natkit/nat/*.json 2>&1 | grep -q another`

var killedCommands = []killedCommand{
	{name: "up", machine: keeps, command: upTC, refuses: isUp, back: "down", off: noEngine},
	{name: "up XDP", long: true, command: upXDP, refuses: isUp, back: "down", off: noEngine},
	{name: "up without a BPF file system", long: true, lacks: []ktest.Lack{ktest.NoBPFFS}, command: upTC, refuses: isUp, back: "down", off: noEngine},
	{name: "up nft", command: upNFT, refuses: isUp, back: "down", off: noEngine},
	{name: "apply", before: []string{upTC}, flows: true, command: "apply -f b.yaml", back: "down", off: noEngine},
	{name: "apply fewer", long: true, before: []string{"up --engine ebpf --attach tc -f b.yaml"}, flows: true, command: "apply -f c.yaml", back: "down", off: noEngine},
	{name: "apply nft", before: []string{upNFT}, flows: true, command: "apply -f m.yaml", back: "down", off: noEngine},
	{name: "upgrade", long: true, before: []string{upTC, otherMake}, flows: true, command: "apply -f a.yaml", back: "down", off: noEngine},
	{name: "down", machine: keeps, before: []string{"up --engine ebpf --attach tc -f b.yaml"}, command: "down", back: "down", off: noEngine},
	{name: "down XDP", long: true, before: []string{upXDP}, command: "down", back: "down", off: noEngine},
	{name: "down nft", machine: keeps, before: []string{upNFT}, command: "down", back: "down", off: noEngine},
	{name: "accel on", machine: byNft, flows: true, command: accelOn, refuses: "accelerated here already: ", back: "accel off", off: noAccel},
	{name: "accel off", machine: byNft, before: []string{accelOn}, flows: true, command: "accel off", back: "accel off", off: noAccel},
	{name: "tune apply", command: tuneOn, refuses: "run natkit tune rollback first", back: "tune rollback"},
	{name: "tune rollback", before: []string{tuneOn}, command: "tune rollback", back: "tune rollback"},
}

// killedFiles are the rule files of those commands.
var killedFiles = map[string]string{
	"a.yaml": `inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
pools:
  p: {addresses: [198.51.100.16-198.51.100.17]}
rules:
  - {dnat: "tcp 198.51.100.1:8080", to: "10.0.0.2:80"}
  - {snat: 10.0.0.0/24, to: p}
`,
	"b.yaml": `inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
pools:
  p: {addresses: [198.51.100.16-198.51.100.20], blocks: {size: 512, extra: 256, at_most: 3}}
subscribers:
  classes:
    default: {ports: 1000, sessions: 2000, new_per_second: 100, burst: 500}
pcp: {on: [in]}
log: {}
rules:
  - {dnat: "tcp 198.51.100.1:8080", to: "10.0.0.3:80"}
  - {dnat: "udp 198.51.100.1:53", to: "10.0.0.3:53"}
  - {snat: 10.0.0.0/24, to: p}
`,
	"c.yaml": `inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
pools:
  p: {addresses: [198.51.100.16-198.51.100.17], blocks: {size: 512, extra: 256, at_most: 3}}
rules:
  - {dnat: "tcp 198.51.100.1:8080", to: "10.0.0.2:80"}
  - {snat: 10.0.0.0/24, to: p}
`,
	"n.yaml": `inside: [in]
outside: [out]
rules:
  - {dnat: "tcp 198.51.100.1:8080", to: "10.0.0.2:80"}
  - {masquerade: 10.0.0.0/24}
`,
	"m.yaml": `inside: [in]
outside: [out]
rules:
  - {dnat: "tcp 198.51.100.1:8081", to: "10.0.0.3:80"}
  - {masquerade: 10.0.0.0/24}
`,
}

// Whatever changes the machine may be killed before any system call that changes something: packets that came through
// still do, the same command goes on or is refused with what helps, and everything can be taken back.
//
// NATKIT_KILLS is how often each command is killed, NATKIT_KILL a kill to be repeated.
func TestKilled(t *testing.T) {
	if os.Getenv("NATKIT_TEST_PROGRAM") == "" {
		t.Setenv("NATKIT_TEST_PROGRAM", ktest.Natkit(t)) // for the machines of the commands
	}
	kills := 10
	if testing.Short() {
		kills = 1
	}
	if text := os.Getenv("NATKIT_KILLS"); text != "" {
		var err error
		if kills, err = strconv.Atoi(text); err != nil {
			t.Fatalf("NATKIT_KILLS=%s: a number", text)
		}
	}
	for i, c := range killedCommands {
		if testing.Short() && c.long {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // machines of their own, whose commands mostly wait
			ktest.Lacking(t, func(t *testing.T) { newKilling(t, c, uint64(i)).run(kills) }, c.lacks...)
		})
	}
}

// killing is a machine in which a command is killed.
type killing struct {
	*testing.T
	killedCommand
	random *rand.Rand
	dir    string
	clean  string // the machine's state without natkit
}

// killPoint is the nth call of all that change something, and how it goes on after the kill.
type killPoint struct {
	nth   int
	again bool // by the same command first
}

func (p killPoint) String() string { return fmt.Sprintf("%d %v", p.nth, p.again) }

// newKilling makes a gateway of the machine, with a client and a server.
func newKilling(t *testing.T, c killedCommand, seed uint64) *killing {
	k := &killing{T: t, killedCommand: c, random: rand.New(rand.NewPCG(seed, 3)), dir: t.TempDir()}
	for name, text := range killedFiles {
		if err := os.WriteFile(filepath.Join(k.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	facts := fullTable(t, func(s *snapshot.Snapshot) { // that tune changes some settings for
		s.Counters = map[string]uint64{"Ip.ReasmFails": 1000, "Ip.ReasmTimeout": 0, "Ip.ReasmOKs": 100}
		s.Sysctls["net.ipv4.ipfrag_high_thresh"], s.Sysctls["net.ipv4.ipfrag_low_thresh"] = "4194304", "3145728"
	})
	if err := os.Rename(facts, filepath.Join(k.dir, "facts.json")); err != nil {
		t.Fatal(err)
	}
	k.must("$for n in client:in:10.0.0 server:out:198.51.100; do IFS=: read -r name link net <<<$n; ip netns add $name; ip link set $link-peer netns $name up; " +
		"ip -n $name link set $link-peer up; ip netns exec $name ethtool -K $link-peer gro on; ip -n $name addr add $net.2/24 dev $link-peer; done; ip -n client route add default via 10.0.0.1")
	ktest.Wait(t, 10*time.Second, "the gateway's links", func() bool {
		return k.do("$ip netns exec client ping -c 1 -W 1 10.0.0.1 && ip netns exec server ping -c 1 -W 1 198.51.100.1").code == 0
	})
	k.must(c.machine...)
	k.clean = k.state()
	return k
}

// run kills the command so many times.
func (k *killing) run(kills int) {
	if text := os.Getenv("NATKIT_KILL"); text != "" {
		var p killPoint
		if _, err := fmt.Sscan(text, &p.nth, &p.again); err != nil {
			k.Fatalf("NATKIT_KILL=%s: %v", text, err)
		}
		k.kill(p)
		return
	}
	points := k.points()
	if kills > 0 {
		points = points[:min(kills, len(points))]
	}
	lived := 0
	for _, p := range points {
		if !k.kill(p) {
			lived++ // it made fewer calls than the one that was not killed
		}
		if k.Failed() {
			k.Fatalf("to repeat it: NATKIT_KILL='%v' go test ./cmd/natkit -run '^TestKilled$/^%s$'", p, strings.ReplaceAll(k.name, " ", "_"))
		}
	}
	if lived > 1+len(points)/10 {
		k.Errorf("natkit lived through %d of %d kills", lived, len(points))
	}
}

// points are those of the command that is not killed: one of each kind of call, then another one, and so on.
func (k *killing) points() (points []killPoint) {
	k.must(k.before...)
	calls, output, end := ktest.KillAt(k, 0, k.dir, ktest.Natkit(k), strings.Fields(k.command)...)
	if end.ExitStatus() != exitOK {
		k.Fatalf("%s: exit %d: %s", k.command, end.ExitStatus(), output)
	}
	k.takeBack()
	seen, turn := map[string]int{}, make([]int, len(calls)+1)
	for _, i := range k.random.Perm(len(calls)) {
		seen[calls[i]]++
		turn[i+1] = seen[calls[i]]
		points = append(points, killPoint{i + 1, k.random.IntN(2) == 0})
	}
	slices.SortStableFunc(points, func(a, b killPoint) int { return cmp.Compare(turn[a.nth], turn[b.nth]) })
	return points
}

// kill plays one kill, and judges what is there after it. It reports whether the command was killed.
func (k *killing) kill(p killPoint) bool {
	k.must(k.before...)
	calls, output, end := ktest.KillAt(k, p.nth, k.dir, ktest.Natkit(k), strings.Fields(k.command)...)
	if !end.Signaled() && end.ExitStatus() != exitOK {
		k.Errorf("%v: %s: exit %d: %s", p, k.command, end.ExitStatus(), output)
	}
	what := fmt.Sprintf("%s, killed before call %d", k.command, p.nth)
	if len(calls) >= p.nth {
		what += ", " + calls[p.nth-1]
	}
	if k.flows && !k.reaches() {
		k.Errorf("%s: no packet comes through", what)
	}
	for _, reads := range []string{"status", "accel status", "tune history"} {
		if r := k.do(reads); r.code != exitOK && r.code != exitError {
			k.Errorf("%s: %v", what, r)
		}
	}
	if p.again && k.command != k.back {
		if r := k.do(k.command); r.code != exitOK && (k.refuses == "" || !strings.Contains(r.text, k.refuses)) {
			k.Errorf("%s: again: %v", what, r)
		}
		if k.back != "tune rollback" && !k.reaches() {
			k.Errorf("%s, and again: no packet comes through", what)
		}
	}
	k.takeBack()
	if k.Failed() {
		k.Log(what)
	}
	return end.Signaled()
}

// takeBack takes back what the command did, and checks that nothing is left.
func (k *killing) takeBack() {
	if r := k.do(k.back); r.code != exitOK && (k.off == "" || !strings.Contains(r.text, k.off)) {
		k.Errorf("%v", r)
	}
	if left := k.state(); left != k.clean {
		k.Errorf("left behind by %s:\n%s", k.back, lineDiff(k.clean, left))
	}
	k.must("$rm -rf --one-file-system /run/natkit /var/lib/natkit") // its history: each kill finds the same machine
}

// reaches reports whether the client reaches the server, whose network knows no way back but by NAT.
func (k *killing) reaches() bool {
	for range 5 { // a machine that others keep busy may lose one
		if k.do("$ip netns exec client ping -c 1 -W 1 198.51.100.2").code == 0 {
			return true
		}
	}
	return false
}

// changesOnTheirOwn are what a machine's state has that no program changes, or that the kernel numbers.
var changesOnTheirOwn = regexp.MustCompile(`(?m)^/proc/sys/\S*(count|random|stable_secret|_hash|tcp_metrics|uuid|flow_limit|current|fastopen_key).*\n|\b(id|tag|prog_id|link_id|handle) [0-9a-f]+`)

// state is everything that natkit may change, but for the history of tune.
func (k *killing) state() string {
	r := k.do(`$for d in in out; do tc qdisc show dev $d; tc filter show dev $d ingress; tc filter show dev $d egress; done
ip -d link; ip -4 addr; ip -4 rule; ip -4 route show table all; ip neigh show proxy; ip neigh show nud permanent; nft list ruleset; bpftool net; awk '$3 == "bpf" && $2 ~ "^/(run|sys)/"' /proc/self/mounts
find /run /var/lib /sys/fs/bpf ! -type d ! -path /var/lib/natkit/tune/journal -o -path '/sys/fs/bpf/*' | sort
cd /proc/sys/net; grep -rsH . $PWD/ipv4 $PWD/ipv6/conf $PWD/netfilter $PWD/core | sort`)
	return changesOnTheirOwn.ReplaceAllString(r.text, "")
}

// outcome is what became of a line.
type outcome struct {
	line, text string
	code       int
}

func (r outcome) String() string {
	return fmt.Sprintf("%s: exit %d: %s", r.line, r.code, strings.TrimSpace(r.text))
}

// do runs natkit with the arguments in line, or what follows "$" in a shell.
func (k *killing) do(line string) outcome {
	k.Helper()
	cmd := exec.CommandContext(k.Context(), ktest.Natkit(k), strings.Fields(line)...)
	if shell, ok := strings.CutPrefix(line, "$"); ok {
		cmd = exec.CommandContext(k.Context(), "bash", "-c", shell)
	}
	cmd.Dir = k.dir
	out, err := cmd.CombinedOutput()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		k.Fatal(err)
	}
	return outcome{line, string(out), cmd.ProcessState.ExitCode()}
}

// must runs lines that succeed.
func (k *killing) must(lines ...string) {
	k.Helper()
	for _, line := range lines {
		if r := k.do(line); r.code != 0 {
			k.Fatal(r)
		}
	}
}

// lineDiff is the lines that only one of two texts has.
func lineDiff(before, after string) string {
	var b strings.Builder
	for _, side := range []struct{ mark, of, not string }{{"-", before, after}, {"+", after, before}} {
		for line := range strings.Lines(side.of) {
			if !strings.Contains("\n"+side.not, "\n"+line) {
				b.WriteString(side.mark + line)
			}
		}
	}
	return b.String()
}
