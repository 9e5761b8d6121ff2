// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

// sandbox makes of a mount namespace what systemd makes for a service: only $WRITABLE can be written
// to, and /proc, /sys and /dev, the first two not with $TUNABLES. What follows runs with $RIGHTS only.
const sandbox = `set -e
for dir in $WRITABLE; do mkdir -p "$dir"; mount --bind "$dir" "$dir"; done
if [ "$TUNABLES" = yes ]; then mount --bind /proc/sys /proc/sys; fi
while read -r _ _ _ _ dir _; do
    case " $WRITABLE " in *" $dir "*) continue ;; esac
    case $dir/ in
    /proc/sys/* | /sys/*) [ "$TUNABLES" = yes ] || continue ;;
    /proc/* | /dev/*) continue ;;
    esac
    mount -o remount,bind,ro "$dir" 2>/dev/null || :
done </proc/self/mountinfo
if touch /run/written /var/lib/written /usr/written 2>/dev/null; then echo "the file system can be written to"; exit 99; fi
exec setpriv --bounding-set "$RIGHTS" --no-new-privs "$@"`

// unit is what a service of deploy/systemd is allowed, and its commands.
type unit struct {
	name, start, stop string
	environment       []string
}

func readUnit(t *testing.T, name string, replaced ...string) unit {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../deploy/systemd", name+".service"))
	if err != nil {
		t.Fatal(err)
	}
	value := func(key string) string {
		if m := regexp.MustCompile(`(?m)^` + key + `=(.*)$`).FindSubmatch(text); m != nil {
			return string(m[1])
		}
		return ""
	}
	if value("ProtectSystem") != "strict" {
		t.Fatalf("%s: ProtectSystem=%s", name, value("ProtectSystem"))
	}
	var writable []string
	for key, parent := range map[string]string{"RuntimeDirectory": "/run/", "StateDirectory": "/var/lib/"} {
		if dir := value(key); dir != "" {
			writable = append(writable, parent+dir)
		}
	}
	rights := strings.ToLower(strings.ReplaceAll(value("CapabilityBoundingSet"), "CAP_", "+"))
	replace := strings.NewReplacer(append(replaced, "/usr/bin/natkit", ktest.Natkit(t))...)
	return unit{
		name: name, start: replace.Replace(value("ExecStart")), stop: replace.Replace(value("ExecStop")),
		environment: append(os.Environ(), "WRITABLE="+strings.Join(writable, " "), "TUNABLES="+value("ProtectKernelTunables"),
			"RIGHTS=-all,"+strings.Join(strings.Fields(rights), ",")),
	}
}

// command runs one of the unit's commands as systemd would.
func (u unit) command(t *testing.T, line string, out *log) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "sh", "-c", sandbox, "sh"}, strings.Fields(line)...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = u.environment, out, out
	return cmd
}

// during starts the service, waits until it is ready, and stops it.
func (u unit) during(t *testing.T, what string, ready func(out *log) bool) {
	t.Helper()
	out := &log{}
	cmd := u.command(t, u.start, out)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	ktest.Wait(t, time.Minute, u.name+" "+what, func() bool { return ready(out) || len(done) > 0 })
	if len(done) == 0 {
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
	} else {
		t.Errorf("%s, %s: it ended by itself", u.name, what)
	}
	if err := <-done; err != nil {
		t.Errorf("%s, %s: %v: %s", u.name, what, err, &out.text)
	}
}

// once runs a command of the unit to its end.
func (u unit) once(t *testing.T, line string) {
	t.Helper()
	out := &log{}
	if err := u.command(t, line, out).Run(); err != nil {
		t.Errorf("%s: %s: %v: %s", u.name, line, err, &out.text)
	}
}

// At boot a service starts before the network: an address of --metrics that no interface has yet does not keep it from
// its work, and is answered at once it is there.
func TestMetricsBeforeTheirAddress(t *testing.T) {
	ktest.Lacking(t, func(t *testing.T) {
		e := &env{stderr: &log{}}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			t.Fatal(err)
		}
		for _, address := range []string{"10.0.99.1/32", "2001:db8::99/128"} {
			a, err := netlink.ParseAddr(address)
			if err != nil {
				t.Fatal(err)
			}
			a.Flags = unix.IFA_F_NODAD
			at := net.JoinHostPort(a.IP.String(), "9640")
			l, err := e.listen(t.Context(), at)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if !e.stderr.(*log).has("no interface has the address of " + at) {
				t.Errorf("not reported: %s", &e.stderr.(*log).text)
			}
			if err := netlink.AddrAdd(lo, a); err != nil {
				t.Fatal(err)
			}
			ktest.Wait(t, 10*time.Second, "the route to "+at+", which the kernel makes a moment later, and a reply", func() bool {
				c, err := net.Dial("tcp", at)
				if err == nil {
					c.Close()
				}
				return err == nil
			})
			if _, err := e.listen(t.Context(), at); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("a second one at %s: %v", at, err)
			}
		}
	})
}

// Each service does its work with the capabilities that its unit leaves it, and with no other folder
// to write to than those of its unit.
func TestServicesInTheirSandbox(t *testing.T) {
	ktest.Tool(t, "setpriv")
	ktest.Tool(t, "unshare")
	ktest.Lacking(t, func(t *testing.T) {
		rules := filepath.Join(t.TempDir(), "nat.yaml")
		if err := os.WriteFile(rules, []byte("inside: [in]\noutside: [out]\nlimits: {sessions: 4096}\nrules:\n  - masquerade: 10.0.0.0/24\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		serve := readUnit(t, "natkit", "/etc/natkit/nat.yaml", rules, "$NATKIT_SERVE", "--metrics 192.0.2.77:9640")
		accel := readUnit(t, "natkit-accel", "$NATKIT_ACCEL", "in out --tcp-liberal --attach tc")
		record := readUnit(t, "natkit-log", "$NATKIT_LOG", "--age 180d")
		watch := readUnit(t, "natkit-monitor", "$NATKIT_MONITOR", "--metrics 127.0.0.1:9641 --interval 1s")
		recording := func(out *log) bool { return out.has("recording in /var/lib/natkit/log") }
		// The monitor sees the engine, too: it opens what is pinned.
		watching := func(engine string) func(*log) bool {
			return func(*log) bool {
				answer, err := http.Get("http://127.0.0.1:9641/metrics")
				if err != nil {
					return false
				}
				defer answer.Body.Close()
				text, err := io.ReadAll(answer.Body)
				return err == nil && strings.Contains(string(text), `natkit_engine_up{engine="`+engine+`"`) && strings.Contains(string(text), "\nnatkit_drop_tracing 1\n")
			}
		}

		record.during(t, "with nothing up", recording)
		serve.during(t, "brings the gateway up", func(out *log) bool { return out.has("up on engine ebpf") })
		serve.during(t, "adopts the gateway", func(out *log) bool { return out.has("adopted") })
		record.during(t, "beside engine ebpf", recording)
		watch.during(t, "beside engine ebpf", watching("ebpf"))
		serve.once(t, ktest.Natkit(t)+" down")
		accel.once(t, accel.start)
		record.during(t, "beside accel", recording)
		watch.during(t, "beside accel", watching("accel"))
		accel.once(t, accel.stop)
	})
}
