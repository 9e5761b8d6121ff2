// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// ping sends one echo request from a node and waits for the answer.
func ping(t *testing.T, from *lab.Node, to netip.Addr) {
	t.Helper()
	err := from.Do(func() error {
		c, err := net.DialIP("ip4:icmp", nil, &net.IPAddr{IP: to.AsSlice()})
		if err != nil {
			return err
		}
		defer c.Close()
		// Type 8, code 0, identifier 1, sequence 1: the checksum is that of 0x0800 + 1 + 1.
		echo := []byte{8, 0, 0, 0, 0, 1, 0, 1}
		binary.BigEndian.PutUint16(echo[2:], ^uint16(0x0802))
		if _, err := c.Write(echo); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		answer := make([]byte, 128)
		for {
			n, _, err := c.ReadFrom(answer) // without the IP header, unlike Read
			if err != nil {
				return err
			}
			if n >= 8 && answer[0] == 0 {
				return nil
			}
		}
	})
	if err != nil {
		t.Errorf("ping %s from %s: %v", to, from.Role, err)
	}
}

// get fetches a URL from a node by curl.
func get(t *testing.T, from *lab.Node, url string) (string, error) {
	t.Helper()
	out, err := from.Command(t.Context(), ktest.Tool(t, "curl"), "-sS", "-m", "5", url).CombinedOutput()
	return string(out), err
}

// peer accepts one connection in a node on port 80 and returns who it is from, as
// the node sees it, when client connects to the lab's URL.
func peer(t *testing.T, server, client *lab.Node, to netip.AddrPort) netip.Addr {
	t.Helper()
	var l *net.TCPListener
	if err := server.Do(func() (err error) {
		l, err = net.ListenTCP("tcp4", &net.TCPAddr{Port: 80})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := client.Do(func() error {
		c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(to))
		if err == nil {
			defer c.Close()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	l.SetDeadline(time.Now().Add(30 * time.Second))
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
}

// Every topology with every rule set carries pings and HTTP, and the server sees
// the source that the rules are to give.
func TestTraffic(t *testing.T) {
	ktest.Root(t)
	for _, rules := range []lab.RuleSet{lab.RulesNft, lab.RulesIPTables, lab.RulesIPTablesLegacy, lab.RulesNone} {
		if rules == lab.RulesIPTables || rules == lab.RulesIPTablesLegacy {
			ktest.Tool(t, "iptables-legacy")
		}
		t.Run("routed/"+string(rules), func(t *testing.T) {
			l := up(t, "routed", lab.Options{Rules: rules})
			client, server := l.Node(lab.RoleClient), l.Node(lab.RoleServer)
			ping(t, client, server.Addr)
			want := netip.MustParseAddr("203.0.113.1") // the gateway's outside address
			if rules == lab.RulesNone {
				want = client.Addr
			}
			if got := peer(t, server, client, netip.AddrPortFrom(server.Addr, 80)); got != want {
				t.Errorf("server sees the client as %s, want %s", got, want)
			}
			if _, err := server.ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{}); err != nil {
				t.Fatal(err)
			}
			if body, err := get(t, client, l.URL()); err != nil || !strings.HasPrefix(body, "natkit lab") {
				t.Errorf("GET %s: %v: %q", l.URL(), err, body)
			}
		})
		t.Run("published/"+string(rules), func(t *testing.T) {
			l := up(t, "published", lab.Options{Rules: rules})
			client, host, container := l.Node(lab.RoleClient), l.Node(lab.RoleHost), l.Node(lab.RoleContainer)
			ping(t, client, host.Addr)
			ping(t, host, container.Addr)
			if rules != lab.RulesNone {
				// Published ports keep the client's address; what the container sends out
				// has the host's.
				if got := peer(t, container, client, netip.AddrPortFrom(host.Addr, 8080)); got != client.Addr {
					t.Errorf("container sees the client as %s, want %s", got, client.Addr)
				}
				if got := peer(t, client, container, netip.AddrPortFrom(client.Addr, 80)); got != host.Addr {
					t.Errorf("client sees the container as %s, want %s", got, host.Addr)
				}
			}
			if _, err := container.ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{Body: []byte("container")}); err != nil {
				t.Fatal(err)
			}
			if _, err := host.ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{Body: []byte("host")}); err != nil {
				t.Fatal(err)
			}
			body, err := get(t, client, l.URL())
			if rules == lab.RulesNone && err == nil {
				t.Errorf("GET %s without rules: %q", l.URL(), body)
			} else if rules != lab.RulesNone && (err != nil || body != "container") {
				t.Errorf("GET %s: %v: %q", l.URL(), err, body)
			}
			if body, err := get(t, client, l.DirectURL()); err != nil || body != "host" {
				t.Errorf("GET %s: %v: %q", l.DirectURL(), err, body)
			}
			if rules != lab.RulesNone { // the FORWARD chain lets nothing else in
				if _, err := container.ServeHTTP(t.Context(), ":81", lab.HTTPServerOptions{}); err != nil {
					t.Fatal(err)
				}
				if out, err := client.Command(t.Context(), "curl", "-sS", "-m", "0.2", "http://172.17.0.2:81/").CombinedOutput(); err == nil {
					t.Errorf("a port that is not published answers: %q", out)
				}
			}
		})
	}
}

// A client on the host itself is translated by the rule of the OUTPUT hook: both
// ends of its connection are the same address.
func TestLocalClient(t *testing.T) {
	for _, rules := range []lab.RuleSet{lab.RulesNft, lab.RulesIPTables} {
		t.Run(string(rules), func(t *testing.T) {
			l := up(t, "published", lab.Options{LocalClient: true, Rules: rules})
			client := l.Node(lab.RoleClient)
			if client != l.NATNode() {
				t.Fatalf("the client is %s", client.Role)
			}
			if got := peer(t, l.ServerNode(), client, netip.AddrPortFrom(client.Addr, 8080)); got != client.Addr {
				t.Errorf("container sees the client as %s, want %s", got, client.Addr)
			}
			out, err := client.Command(t.Context(), ktest.Tool(t, "nft"), "list", "chain", "ip", "nat", "OUTPUT").CombinedOutput()
			if err != nil || !strings.Contains(string(out), "counter packets 1 ") {
				t.Errorf("OUTPUT rule did not see the packet: %v\n%s", err, out)
			}
		})
	}
}

// Each subscriber of the carrier is reached at its own address, and sends from it.
func TestCarrier(t *testing.T) {
	l := up(t, "carrier", lab.Options{Rules: lab.RulesNone})
	gateway, client := l.NATNode(), l.Node(lab.RoleClient)
	subscribers := l.Subscribers()
	if subscribers.String() != "100.64.4.0/22" {
		t.Fatalf("subscribers are %s", subscribers)
	}
	for _, host := range []netip.Addr{subscribers.Addr(), netip.MustParseAddr("100.64.7.255"), client.Addr} {
		ping(t, gateway, host)
		dialer := net.Dialer{LocalAddr: &net.UDPAddr{IP: host.AsSlice()}}
		if err := client.Do(func() error {
			c, err := dialer.Dial("udp4", netip.AddrPortFrom(gateway.Addr, 9).String())
			if err == nil {
				err = c.Close()
			}
			return err
		}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if l := up(t, "routed", lab.Options{}); l.Subscribers().IsValid() {
		t.Errorf("routed has subscribers %s", l.Subscribers())
	}
}

// Several clients on a switch have addresses of their own and reach the server.
func TestClients(t *testing.T) {
	l := up(t, "published", lab.Options{Clients: 3, Addresses: lab.Addresses{Client: netip.MustParsePrefix("192.168.0.95/24")}})
	for role, want := range map[string]string{"client": "192.168.0.95", "client2": "192.168.0.97", "client3": "192.168.0.98"} {
		n := l.Node(role)
		if n == nil || n.Addr.String() != want {
			t.Fatalf("%s: %+v, want address %s", role, n, want)
		}
		if got := peer(t, l.ServerNode(), n, netip.AddrPortFrom(l.NATNode().Addr, 8080)); got != n.Addr {
			t.Errorf("server sees %s as %s", role, got)
		}
	}
	if l.Node("client4") != nil {
		t.Error("there is a fourth client")
	}
}

func TestSettings(t *testing.T) {
	l := up(t, "published", lab.Options{})
	host := l.NATNode()
	for key, want := range map[string]string{"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1"} {
		got, err := host.SysctlValue(key)
		if errors.Is(err, os.ErrNotExist) && strings.Contains(key, "bridge") {
			if !slices.ContainsFunc(l.Notes(), func(n string) bool { return strings.Contains(n, "br_netfilter") }) {
				t.Errorf("no br_netfilter here, and no note says so: %q", l.Notes())
			}
			continue
		}
		if err != nil || got != want {
			t.Errorf("%s = %q, %v, want %s", key, got, err, want)
		}
	}
	if err := host.Sysctl("net/ipv4/conf/docker0/rp_filter", "2"); err != nil {
		t.Error(err)
	}
	if got, _ := host.SysctlValue("net.ipv4.conf.docker0.rp_filter"); got != "2" {
		t.Errorf("rp_filter of docker0 = %q", got)
	}
	if err := host.Sysctl("net.ipv4.no_such_thing", "1"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "no_such_thing") {
		t.Errorf("unknown setting: %v", err)
	}
	if err := host.Sysctl("net.ipv4.ip_forward", "many"); err == nil || !strings.Contains(err.Error(), `"many"`) {
		t.Errorf("bad value: %v", err)
	}
}

func TestFillConntrack(t *testing.T) {
	l := up(t, "routed", lab.Options{})
	gateway := l.NATNode()
	var limits conntrack.Limits
	read := func() {
		if err := gateway.Do(func() (err error) { limits, err = conntrack.ReadLimits(); return err }); err != nil {
			t.Fatal(err)
		}
	}
	read()
	leave := int(limits.Max) - 1000 // a full table takes time: this one is full but for nearly all
	res, err := gateway.FillConntrack(t.Context(), leave, nil)
	if err != nil {
		t.Fatal(err)
	}
	if read(); int(limits.Max-limits.Count) != leave || res.Added == 0 {
		t.Errorf("%+v after filling (%+v), want %d places left", limits, res, leave)
	}
	if res, err := gateway.FillConntrack(t.Context(), leave+1, nil); err != nil || res.Added != 0 {
		t.Errorf("nothing to fill: %+v, %v", res, err)
	}
}

// A program sees the namespace's own devices, in /proc and in /sys.
func TestCommand(t *testing.T) {
	l := up(t, "published", lab.Options{})
	out, err := l.NATNode().Command(t.Context(), "sh", "-c", "ls /sys/class/net; grep -c veth0 /proc/net/dev").CombinedOutput()
	if want := "docker0\neth0\nlo\nveth0\n1\n"; err != nil || string(out) != want {
		t.Errorf("in the host: %v: %q, want %q", err, out, want)
	}
	var exit *exec.ExitError
	if err := l.NATNode().Command(t.Context(), "sh", "-c", "exit 5").Run(); !errors.As(err, &exit) || exit.ExitCode() != 5 {
		t.Errorf("exit 5: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cmd := l.NATNode().Command(ctx, "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := cmd.Wait(); err == nil {
		t.Error("the end of the context did not end the program")
	}
	if out, err := exec.Command("ls", "/sys/class/net").Output(); err != nil || strings.Contains(string(out), "docker0\neth0\nlo\nveth0") {
		t.Errorf("this process sees the lab's devices: %v: %s", err, out)
	}
}

// Whatever step fails, nothing is left: no namespace, file, process, descriptor.
func TestFailureAtEveryStep(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nginx")
	name := ktest.Name(t)
	options := lab.Options{Name: name, Clients: 2, Server: lab.ServerNginx, ServeCommand: serveCommand(name), Owned: true}
	var steps []string
	lab.FailStep(t, func(what string) error { steps = append(steps, what); return nil })
	l, err := lab.Up(t.Context(), "published", options)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if len(steps) < 12 {
		t.Fatalf("steps: %q", steps)
	}
	for n, failing := range steps {
		for _, how := range []string{"error", "context"} {
			before := openFiles(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			injected := errors.New("injected")
			lab.FailStep(t, func(what string) error {
				switch {
				case what != failing:
					return nil
				case how == "context":
					cancel(injected) // noticed before the next step
					return nil
				}
				return injected
			})
			l, err := lab.Up(ctx, "published", options)
			cancel(nil)
			if how == "context" && n == len(steps)-1 && err == nil {
				err = errors.Join(injected, l.Down()) // it was complete by then
			}
			if !errors.Is(err, injected) {
				t.Errorf("%s at %q: %v", how, failing, err)
			}
			nothingLeft(t, name)
			// A server that was killed has a descriptor until it was waited for.
			ktest.Wait(t, 10*time.Second, how+" at "+failing+": no more descriptors than before", func() bool { return openFiles(t) <= before })
		}
	}
}

// Up and Down leave no descriptor and no namespace, with servers and without.
func TestNoLeak(t *testing.T) {
	ktest.Root(t)
	once := func() {
		l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.ServerNode().ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{}); err != nil {
			t.Fatal(err)
		}
		other, err := lab.Open(l.Name())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(other.Close(), l.Down(), l.Down()); err != nil {
			t.Fatal(err)
		}
		nothingLeft(t, l.Name())
	}
	once()
	before := openFiles(t)
	for range 3 {
		once()
	}
	ktest.Wait(t, 5*time.Second, "the servers close", func() bool { return openFiles(t) <= before })
}

// The background server is there for whoever opens the lab later, and gone with it.
func TestBackgroundServer(t *testing.T) {
	for _, server := range []lab.Server{lab.ServerBuiltin, lab.ServerNginx} {
		t.Run(string(server), func(t *testing.T) {
			if server == lab.ServerNginx {
				ktest.Tool(t, "nginx")
			}
			l := up(t, "published", lab.Options{Server: server})
			if got := len(processesOf(t, l.Name())); got != 2 {
				t.Errorf("%d servers run, want one in the container and one on the host", got)
			}
			again, err := lab.Open(l.Name())
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			for _, url := range []string{l.URL(), l.DirectURL()} {
				if body, err := get(t, again.Node(lab.RoleClient), url); err != nil || !strings.HasPrefix(body, "natkit lab") {
					t.Errorf("GET %s: %v: %q", url, err, body)
				}
			}
		})
	}
	t.Run("fails", func(t *testing.T) {
		ktest.Root(t)
		name := ktest.Name(t)
		_, err := lab.Up(t.Context(), "routed", lab.Options{Name: name, Server: lab.ServerBuiltin, ServeCommand: []string{"/bin/false"}})
		if err == nil || !strings.Contains(err.Error(), "web server") {
			t.Errorf("a server that ends at once: %v", err)
		}
		nothingLeft(t, name)
	})
}

// What somebody mounted below a lab's folder is not the lab's, though on the same file system:
// it stays whole, and the lab can be taken down once it is detached, by whichever name of its folder.
func TestMountedBelow(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nginx")
	real := os.Getenv("NATKIT_RUN_DIR")
	other := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(real, other); err != nil {
		t.Fatal(err)
	}
	l := up(t, "published", lab.Options{Server: lab.ServerNginx})
	folders, err := filepath.Glob(filepath.Join(os.Getenv("NATKIT_RUN_DIR"), "lab", l.Name()+".*", "client"))
	if err != nil || len(folders) == 0 {
		t.Fatalf("folders of nginx: %v, %v", folders, err)
	}
	theirs := t.TempDir()
	file := filepath.Join(theirs, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(theirs, folders[0], "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	detach := sync.OnceValue(func() error { return unix.Unmount(folders[0], unix.MNT_DETACH) })
	defer detach()
	for _, name := range []string{real, other} {
		t.Setenv("NATKIT_RUN_DIR", name)
		if err := lab.Down(l.Name()); err == nil || !strings.Contains(err.Error(), folders[0]) {
			t.Errorf("by %s a lab with a mount below its folder was taken down: %v", name, err)
		}
		if _, err := os.Stat(file); err != nil {
			t.Errorf("by %s a file that was mounted below it: %v", name, err)
		}
	}
	if err := detach(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := lab.DownAll(); err != nil {
		t.Error(err)
	}
	nothingLeft(t, l.Name())
}

// Labs that are made at the same time do not meet; of those with one name, one wins.
func TestAtTheSameTime(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	const n = 4
	var mu sync.Mutex
	var labs []*lab.Lab
	var errs []error
	var wg sync.WaitGroup
	for i := range 2 * n {
		o := lab.Options{Name: name}
		if i%2 == 1 {
			o.Name = "" // and these find names for themselves
		}
		wg.Go(func() {
			l, err := lab.Up(t.Context(), "routed", o)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			} else {
				labs = append(labs, l)
			}
		})
	}
	wg.Wait()
	if len(labs) != n+1 || len(errs) != n-1 {
		t.Errorf("%d labs, %d errors, want %d and %d: %v", len(labs), len(errs), n+1, n-1, errs)
	}
	for _, err := range errs {
		if !strings.Contains(err.Error(), fmt.Sprintf("lab %q exists", name)) {
			t.Errorf("error %q", err)
		}
	}
	for _, l := range labs {
		ping(t, l.Node(lab.RoleClient), l.ServerNode().Addr)
		if err := l.Down(); err != nil {
			t.Error(err)
		}
		nothingLeft(t, l.Name())
	}
}

// A namespace that somebody else made under a name we want stays, and so does one
// that took the place of ours.
func TestForeignNamespaces(t *testing.T) {
	ktest.Root(t)
	foreign := func(t *testing.T, name string) uint64 {
		h, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			h.Close()
			netns.Delete(name)
		})
		return h.Inode()
	}
	stays := func(t *testing.T, name string, inode uint64) {
		h, err := netns.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		if h.Inode() != inode {
			t.Errorf("%s is namespace %d, was %d", name, h.Inode(), inode)
		}
	}
	t.Run("before", func(t *testing.T) {
		name := ktest.Name(t)
		inode := foreign(t, name+"-server")
		_, err := lab.Up(t.Context(), "routed", lab.Options{Name: name})
		if err == nil || !strings.Contains(err.Error(), name+"-server") || !strings.Contains(err.Error(), "another name") {
			t.Errorf("error %v", err)
		}
		stays(t, name+"-server", inode)
		netns.Delete(name + "-server")
		nothingLeft(t, name)
	})
	t.Run("after", func(t *testing.T) {
		l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t)})
		if err != nil {
			t.Fatal(err)
		}
		name := l.Name() + "-server"
		if err := netns.Delete(name); err != nil {
			t.Fatal(err)
		}
		inode := foreign(t, name)
		if _, err := lab.Open(l.Name()); err == nil || !strings.Contains(err.Error(), "not the one natkit made") {
			t.Errorf("Open: %v", err)
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
		stays(t, name, inode)
		netns.Delete(name)
		nothingLeft(t, l.Name())
	})
	t.Run("generated name", func(t *testing.T) {
		name := "routed-client"
		h, err := netns.Create(name)
		if err != nil {
			ktest.Missing(t, "the name %s: %v", name, err)
		}
		defer netns.Delete(name)
		defer h.Close()
		l, err := lab.Up(t.Context(), "routed", lab.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Down()
		if l.Name() == "routed" {
			t.Error("it took a name of which a namespace is somebody else's")
		}
	})
}

// A lab of a process that was killed is removed by the next Up; the lab of a
// living one is left alone by all.
func TestOwnedByTheDead(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	owner := exec.Command(serveCommand(name)[0], "own", name)
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	defer owner.Wait()
	defer owner.Process.Kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatalf("owner: %v: %s", err, line)
	}

	state := func() lab.State {
		infos, err := lab.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range infos {
			if i.Name == name {
				return i.State
			}
		}
		return "gone"
	}
	if got := state(); got != lab.StateOwned {
		t.Errorf("state %s, want owned", got)
	}
	inUse := fmt.Sprintf("in use by process %d", owner.Process.Pid)
	if err := lab.Down(name); err == nil || !strings.Contains(err.Error(), inUse) {
		t.Errorf("Down of a lab in use: %v", err)
	}
	if down, left, err := lab.DownAll(); err != nil || slices.Contains(down, name) || !strings.Contains(strings.Join(left, "\n"), inUse) {
		t.Errorf("DownAll: %q down, %q left, %v", down, left, err)
	}
	if _, err := lab.Up(t.Context(), "routed", lab.Options{Name: name}); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("Up with a name in use: %v", err)
	}
	if got := state(); got != lab.StateOwned {
		t.Errorf("state %s after all that, want owned", got)
	}

	owner.Process.Kill()
	owner.Wait()
	if got := state(); got != lab.StateRemains {
		t.Errorf("state %s of the dead owner's, want remains", got)
	}
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	if notes := strings.Join(l.Notes(), "\n"); !strings.Contains(notes, name) || !strings.Contains(notes, fmt.Sprint(owner.Process.Pid)) {
		t.Errorf("notes %q do not say what was removed", notes)
	}
	if err := l.Down(); err != nil {
		t.Error(err)
	}
	nothingLeft(t, name)
}

// A journal of an earlier boot, a damaged one and an empty one.
func TestOldJournals(t *testing.T) {
	ktest.Root(t)
	dir := filepath.Join(os.Getenv("NATKIT_RUN_DIR"), "lab")
	h, err := netns.Create(ktest.Name(t))
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(h.Name())
	defer h.Close()
	id, err := h.ID()
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) string {
		path := filepath.Join(dir, name+".journal")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(path) })
		return path
	}
	header := `{"lab":{"topology":"routed","options":{},"maker":{"pid":1,"start":1},"boot":"some earlier one"}}`
	old := write("old", header+fmt.Sprintf("\n{\"netns\":{\"name\":%q,\"id\":{\"inode\":%d,\"cookie\":%d}}}\n{\"complete\":true}\n", h.Name(), id.Inode, id.Cookie))
	empty := write("empty", "")
	damaged := write("damaged", "{}\n")
	if _, err := lab.Open("old"); err == nil {
		t.Error("Open of a lab of an earlier boot")
	}
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Down()
	for _, path := range []string{old, empty} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there", path)
		}
	}
	if again, err := netns.Open(h.Name()); err != nil {
		t.Errorf("a namespace of this boot that the old journal seems to name: %v", err)
	} else {
		again.Close()
	}
	if notes := strings.Join(l.Notes(), "\n"); !strings.Contains(notes, damaged) {
		t.Errorf("notes %q do not name the damaged journal", notes)
	}
	if _, _, err := lab.DownAll(); err == nil || !strings.Contains(err.Error(), damaged) {
		t.Errorf("DownAll with a damaged journal: %v", err)
	}
	if _, err := os.Stat(damaged); err != nil {
		t.Error("the damaged journal was removed")
	}
}

func TestRefusals(t *testing.T) {
	for _, name := range []string{"no-such-lab", "../x", ""} {
		if _, err := lab.Open(name); err == nil {
			t.Errorf("Open(%q) succeeded", name)
		}
		if err := lab.Down(name); err == nil {
			t.Errorf("Down(%q) succeeded", name)
		}
	}
	if os.Geteuid() != 0 {
		if _, err := lab.Up(t.Context(), "routed", lab.Options{}); err == nil || !strings.Contains(err.Error(), "root") {
			t.Errorf("Up without root: %v", err)
		}
	}
}

// A missing program is named, with the remedy, and costs the lab. Without them all
// nothing that needs none is missed.
func TestMissingPrograms(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	lab.NoPrograms(t)
	for want, o := range map[string]lab.Options{
		"install iptables":       {Rules: lab.RulesIPTables},
		"iptables-legacy":        {Rules: lab.RulesIPTablesLegacy},
		"nginx is not installed": {Server: lab.ServerNginx},
	} {
		o.Name, o.ServeCommand = name, serveCommand(name)
		if _, err := lab.Up(t.Context(), "routed", o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		nothingLeft(t, name)
	}
	up(t, "published", lab.Options{Server: lab.ServerBuiltin})
}

// A namespace of the name that Up found may be made by somebody else before Up makes
// it: natkit with another run folder, as tests of other packages are.
func TestUpNameTakenAtOnce(t *testing.T) {
	ktest.Root(t)
	once := true
	lab.FailStep(t, func(what string) error {
		if what != "make node client" || !once {
			return nil
		}
		once = false
		for n := 1; ; n++ { // the name that Up has found
			name := "routed-client"
			if n > 1 {
				name = fmt.Sprintf("routed-%d-client", n)
			}
			h, err := netns.Create(name)
			if errors.Is(err, os.ErrExist) {
				continue
			}
			if err != nil {
				return err
			}
			t.Cleanup(func() {
				h.Close()
				if err := netns.Delete(name); err != nil {
					t.Error(err)
				}
			})
			return nil
		}
	})
	l, err := lab.Up(t.Context(), "routed", lab.Options{Owned: true})
	if err != nil {
		t.Fatal(err)
	}
	if once {
		t.Error("no step was taken")
	}
	if err := l.Down(); err != nil {
		t.Error(err)
	}
}
