// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// The programs that are clients and servers.

// try runs a program in a namespace and gives what it said.
func (w *world) try(ns *netns.Handle, program string, args ...string) (string, error) {
	w.t.Helper()
	cmd := exec.CommandContext(w.background(), program, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := ns.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	return out.String(), err
}

// run is try for a program that must do well.
func (w *world) run(ns *netns.Handle, program string, args ...string) string {
	w.t.Helper()
	out, err := w.try(ns, program, args...)
	if err != nil {
		w.t.Fatalf("%s %s: %v\n%s", filepath.Base(program), strings.Join(args, " "), err, out)
	}
	return out
}

// start runs a server in a namespace until the end of the test, with as many open files
// as it may have, and waits until it listens at the address, by TCP or, with "/udp" behind it, by UDP. To connect
// would be a client that some servers do not take for nothing.
func (w *world) start(ns *netns.Handle, at, program string, args ...string) {
	w.t.Helper()
	cmd := exec.Command(program, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	w.in(ns, cmd.Start)
	ended := make(chan error)
	go func() {
		defer close(ended)
		ended <- cmd.Wait()
	}()
	w.t.Cleanup(func() {
		cmd.Process.Kill()
		for range ended {
		}
		if w.t.Failed() {
			w.t.Logf("%s: %s", filepath.Base(program), out.String())
		}
	})
	var files unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	if err == nil {
		err = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files.Max, Max: files.Max}, nil)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	at, udp := strings.CutSuffix(at, "/udp")
	file, state := "/proc/thread-self/net/tcp", "0A"
	if udp {
		file, state = "/proc/thread-self/net/udp", "07"
	}
	addr := netip.MustParseAddrPort(at)
	listens := fmt.Sprintf(": %08X:%04X 00000000:0000 %s ", binary.NativeEndian.Uint32(addr.Addr().AsSlice()), addr.Port(), state)
	ktest.Wait(w.t, patience, filepath.Base(program)+" to listen", func() (yes bool) {
		select {
		case err := <-ended:
			w.t.Fatalf("%s ended before it listened: %v", filepath.Base(program), err)
		default:
		}
		w.in(ns, func() error {
			sockets, err := os.ReadFile(file)
			yes = bytes.Contains(sockets, []byte(listens))
			return err
		})
		return yes
	})
}

func (w *world) write(path, text string) {
	w.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// nginx serves the payloads at /large and /small, and puts what is uploaded to /put/ into
// a folder.
func (w *world) nginx(ns *netns.Handle, at string) (puts string) {
	t := w.t
	t.Helper()
	nginx, dir := ktest.Tool(t, "nginx"), t.TempDir()
	puts = filepath.Join(dir, "put")
	if err := errors.Join(os.Mkdir(puts, 0o755), os.Mkdir(filepath.Join(dir, "body"), 0o755)); err != nil {
		t.Fatal(err)
	}
	w.write(filepath.Join(dir, "conf"), fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log stderr;
events { worker_connections 12000; }
http {
	access_log off; sendfile on; client_max_body_size 0;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	server {
		listen %[2]s backlog=12000;
		location = /large { alias %[3]s; }
		location = /small { alias %[4]s; }
		location /put/ { root %[1]s; dav_methods PUT; }
		location = /who { return 200 "$remote_addr"; }
	}
}
`, dir, at, w.large.path, w.small.path))
	w.start(ns, at, nginx, "-p", dir, "-c", filepath.Join(dir, "conf"))
	return puts
}

// curl runs curl, which must do well, and gives what it printed.
func (w *world) curl(ns *netns.Handle, args ...string) string {
	t := w.t
	t.Helper()
	return w.run(ns, ktest.Tool(t, "curl"), append([]string{"-sS", "--max-time", "300"}, args...)...)
}

// fetch is the SHA-256 of what curl downloads.
func (w *world) fetch(ns *netns.Handle, args ...string) string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "fetched")
	w.curl(ns, append(args, "-o", path)...)
	return w.digestOf(path)
}

func (w *world) digestOf(path string) string {
	w.t.Helper()
	f, err := os.Open(path)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	return w.digest(f)
}

// vsftpd serves the small payload to everybody, as a server that is seen as the address given,
// and takes uploads to up/.
func (w *world) vsftpd(ns *netns.Handle, at, seen string) (root string) {
	t := w.t
	t.Helper()
	vsftpd, dir := ktest.Tool(t, "vsftpd"), t.TempDir()
	root = filepath.Join(dir, "root")
	up := filepath.Join(root, "up")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "empty"), 0o555), os.Mkdir(root, 0o755), os.Mkdir(up, 0o777), os.Chmod(up, 0o777),
		os.Link(w.small.path, filepath.Join(root, "small"))); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(dir, "conf")
	w.write(conf, fmt.Sprintf(`listen=YES
listen_address=%[2]s
background=NO
anonymous_enable=YES
no_anon_password=YES
local_enable=NO
ftp_username=daemon
anon_root=%[1]s/root
secure_chroot_dir=%[1]s/empty
write_enable=YES
anon_upload_enable=YES
connect_from_port_20=YES
pasv_address=%[3]s
pasv_min_port=30000
pasv_max_port=30009
seccomp_sandbox=NO
isolate=NO
isolate_network=NO
`, dir, at, seen))
	w.start(ns, at+":21", vsftpd, conf)
	return root
}

// pings sends that many echo requests, all of which must be answered.
func (w *world) pings(ns *netns.Handle, to string, count int, args ...string) {
	t := w.t
	t.Helper()
	var out string
	for range 3 { // a processor that others keep busy may lose one
		out = w.run(ns, ktest.Tool(t, "ping"), append([]string{"-n", "-q", "-i", "0.01", "-W", "5", "-c", fmt.Sprint(count), to}, args...)...)
		if strings.Contains(out, fmt.Sprintf("%d received", count)) {
			return
		}
	}
	t.Errorf("ping %s %s: %s", to, args, out)
}

// tooBig sends an echo request that no path may cut, and gives who refused it with which
// MTU; "" if nobody did.
func (w *world) tooBig(ns *netns.Handle, to string, bytes int) string {
	t := w.t
	t.Helper()
	out, _ := w.try(ns, ktest.Tool(t, "ping"), "-n", "-c", "1", "-W", "1", "-M", "do", "-s", fmt.Sprint(bytes), to)
	m := regexp.MustCompile(`From (\S+) .*Frag needed and DF set \(mtu = (\d+)\)`).FindStringSubmatch(out)
	if m == nil {
		return ""
	}
	return m[1] + " " + m[2]
}

// hops are the routers and the host that traceroute names, "*" for who is silent.
func (w *world) hops(ns *netns.Handle, to string, args ...string) (hops []string) {
	t := w.t
	t.Helper()
	out := w.run(ns, ktest.Tool(t, "traceroute"), append([]string{"-n", "-q", "1", "-w", "5", "-m", "8", to}, args...)...)
	for _, m := range regexp.MustCompile(`(?m)^ *\d+  (\S+)`).FindAllStringSubmatch(out, -1) {
		hops = append(hops, m[1])
	}
	return hops
}

// iperf runs a client of iperf3 and gives the bytes that the receiver counted.
func (w *world) iperf(ns *netns.Handle, to string, args ...string) (received int64) {
	t := w.t
	t.Helper()
	out := w.run(ns, ktest.Tool(t, "iperf3"), append([]string{"-J", "-c", to}, args...)...)
	var result struct {
		Error string // with which it does not fail
		End   struct {
			Received struct{ Bytes int64 } `json:"sum_received"`
			Sum      struct {
				Bytes   int64
				Packets int64
				Lost    int64 `json:"lost_packets"`
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &result); err != nil || result.Error != "" {
		t.Fatalf("iperf3: %v %s\n%s", err, result.Error, out)
	}
	if sum := result.End.Sum; sum.Packets > 0 {
		return sum.Bytes * (sum.Packets - sum.Lost) / sum.Packets
	}
	return result.End.Received.Bytes
}
