// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// A real Docker: a trace names the rule that publishes a port, and finds the container by its name.
func TestTraceDocker(t *testing.T) {
	if testing.Short() {
		ktest.Unsupported(t, "takes long (-short)")
	}
	for _, tool := range []string{"dockerd", "docker", "busybox", "iptables"} {
		ktest.Tool(t, tool)
	}
	ktest.Lacking(t, func(t *testing.T) {
		const dir = "/run/trace" // of this machine alone: Docker leaves mounts behind
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		client := traceClient(t)
		docker := dockerDaemon(t, dir, "--data-root", "/var/lib/docker") // where natkit looks for names of containers
		image := busyboxImage(t, dir)
		docker("import", image, "web")
		docker("run", "-d", "--name", "web1", "-p", "8080:80", "web", "/busybox", "httpd", "-f", "-p", "80")
		for _, tt := range []struct {
			args  []string
			whole bool // from before the translation: a container's address is seen behind it only
		}{{[]string{"tcp any -> 198.51.100.1:8080"}, true}, {[]string{"--container", "web1"}, false}} {
			cmd, stdout := tracing(t, append(tt.args, "--now", "--packets", "20", "--for", "20s", "-o", "json")...)
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			ktest.Wait(t, 30*time.Second, "packets are traced", func() bool {
				_ = client.Do(func() error {
					c, err := net.DialTimeout("tcp4", "198.51.100.1:8080", time.Second)
					if err == nil {
						c.Close()
					}
					return err
				})
				return len(ended) > 0
			})
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			var published, arrived bool
			for dec := json.NewDecoder(stdout); ; {
				var p trace.Packet
				if err := dec.Decode(&p); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				published = published || slices.ContainsFunc(p.Steps, func(s trace.Step) bool {
					return s.What == trace.Translated && s.Rule != nil && s.Rule.Chain == "ip nat DOCKER" && strings.Contains(s.Rule.Text, "--dport 8080 -j DNAT --to-destination 172.17.0.2:80")
				})
				arrived = arrived || p.Kind == "SYN" && p.End.Outcome == trace.Arrived && strings.HasPrefix(p.End.Namespace, "pid:") && p.End.Interface == "eth0"
			}
			if published != tt.whole || !arrived {
				t.Errorf("%q: published by Docker's rule: %v, arrived in the container: %v\n%s", tt.args, published, arrived, stdout)
			}
		}
	})
}

// traceClient is a namespace beside this one, which has the address 198.51.100.1 there.
func traceClient(t *testing.T) *netns.Handle {
	t.Helper()
	client, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	up := func(name, address string) error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err == nil {
			err = netlink.AddrAdd(link, a)
		}
		return errors.Join(err, netlink.LinkSetUp(link))
	}
	err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "client0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(client.Fd())})
	if err == nil {
		err = errors.Join(up("client0", "198.51.100.1/24"), client.Do(func() error { return up("eth0", "198.51.100.2/24") }))
	}
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// busyboxImage is a file system with busybox alone.
func busyboxImage(t *testing.T, dir string) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	image := dir + "/image.tar"
	if out, err := exec.CommandContext(t.Context(), "tar", "-C", filepath.Dir(busybox), "-cf", image, filepath.Base(busybox)).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return image
}
