// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// tree writes files below a new folder; a content "-> X" is a link to X.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestReadOwners(t *testing.T) {
	const max = "net.netfilter.nf_conntrack_max"
	const k3sWhere = "process 7 (k3s), /etc/rancher/k3s/config.yaml, /etc/systemd/system/k3s.service"
	args := func(words ...string) string { return strings.Join(words, "\x00") + "\x00" }
	own := func(who, setting, value, where string) snapshot.Owner {
		return snapshot.Owner{Setting: setting, Value: value, Who: who, Where: where}
	}
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []snapshot.Owner
	}{
		{"nobody", nil, nil},
		{"the last name wins, whatever the folder", map[string]string{
			"usr/lib/sysctl.d/50-a.conf": max + " = 1\n",
			"etc/sysctl.d/10-b.conf":     max + "=2\n",
		}, []snapshot.Owner{own("sysctl.d", max, "1", "/usr/lib/sysctl.d/50-a.conf:1")}},
		{"a file of the same name hides the later folder's", map[string]string{
			"usr/lib/sysctl.d/50-a.conf": max + "=1\nnet.core.somaxconn=5\n",
			"run/sysctl.d/50-a.conf":     "\n# nothing here\n; nor here\n" + max + "=3\n",
		}, []snapshot.Owner{own("sysctl.d", max, "3", "/run/sysctl.d/50-a.conf:4")}},
		{"/dev/null masks", map[string]string{
			"usr/lib/sysctl.d/50-a.conf": max + "=1\n",
			"etc/sysctl.d/50-a.conf":     "-> /dev/null",
		}, nil},
		{"sysctl.conf comes last, and its links count once", map[string]string{
			"etc/sysctl.conf":             max + "=9\n",
			"etc/sysctl.d/99-sysctl.conf": "-> ../sysctl.conf",
			"etc/sysctl.d/99-zz.conf":     max + "=8\n",
			"etc/sysctl.d/98-old.conf":    "-> /etc/sysctl.conf",
		}, []snapshot.Owner{own("sysctl.d", max, "9", "/etc/sysctl.conf:1")}},
		{"forms of a line", map[string]string{
			"etc/sysctl.d/a.conf": "-net/ipv4/conf/eth0.100/rp_filter = 2\n" +
				"net.ipv4.conf.*.rp_filter=1\n" +
				"net.ipv4.conf.eth1/7.rp_filter=0\n" +
				"net.ipv4.ip_local_port_range = 1024\t 65535\n" +
				"-net.ipv4.conf.lo.rp_filter\n" + // an exclusion sets nothing
				"kernel.panic=1\nrubbish\n" +
				"net.nf_conntrack_max = 7\n",
			"etc/sysctl.d/b.txt": "net.core.somaxconn=1\n",
		}, []snapshot.Owner{
			own("sysctl.d", "net.ipv4.conf.eth0/100.rp_filter", "2", "/etc/sysctl.d/a.conf:1"),
			own("sysctl.d", "net.ipv4.conf.*.rp_filter", "1", "/etc/sysctl.d/a.conf:2"),
			own("sysctl.d", "net.ipv4.conf.eth1/7.rp_filter", "0", "/etc/sysctl.d/a.conf:3"),
			own("sysctl.d", "net.ipv4.ip_local_port_range", "1024 65535", "/etc/sysctl.d/a.conf:4"),
			own("sysctl.d", max, "7", "/etc/sysctl.d/a.conf:8"),
		}},
		{"natkit's own file hides nobody", map[string]string{
			"etc/sysctl.d/90-natkit.conf": max + "=5\n",
			"etc/sysctl.d/10-b.conf":      max + "=2\n",
		}, []snapshot.Owner{
			own("sysctl.d", max, "2", "/etc/sysctl.d/10-b.conf:1"),
			own("natkit", max, "5", "/etc/sysctl.d/90-natkit.conf:1"),
		}},
		{"tuned, with what the profile includes", map[string]string{
			"etc/tuned/active_profile":                          "mine\n",
			"etc/tuned/mine/tuned.conf":                         "[main]\nsummary=x\ninclude=network-throughput, mine\n[sysctl]\nnet.core.somaxconn=>4096\n[cpu]\nnet.ipv4.x=1\n",
			"usr/lib/tuned/network-throughput/tuned.conf":       "[sysctl]\nnet.core.somaxconn=2048\n" + max + " = 77\n",
			"usr/lib/tuned/profiles/throughput-perf/tuned.conf": "[sysctl]\nnet.core.netdev_budget=600\n",
		}, []snapshot.Owner{
			own("tuned", max, "77", "/usr/lib/tuned/network-throughput/tuned.conf:3"),
			own("tuned", "net.core.somaxconn", "4096", "/etc/tuned/mine/tuned.conf:5"),
		}},
		{"a profile's name leads nowhere else", map[string]string{
			"etc/tuned/active_profile": "../../evil\n",
			"evil/tuned.conf":          "[sysctl]\nnet.core.somaxconn=1\n",
		}, nil},
		{"kube-proxy by default", map[string]string{
			"proc/41/cmdline": args("/usr/local/bin/kube-proxy", "--v=2"),
			"proc/42/cmdline": "",
			"proc/43/cmdline": args("bash"),
		}, []snapshot.Owner{
			own("kube-proxy", max, "131072", "process 41 (kube-proxy)"),
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_timeout_established", "86400", "process 41 (kube-proxy)"),
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_timeout_close_wait", "3600", "process 41 (kube-proxy)"),
		}},
		{"kube-proxy by flags", map[string]string{
			"proc/41/cmdline": args("kube-proxy", "--conntrack-max-per-core=65536", "--conntrack-min", "1", "--conntrack-tcp-timeout-established=0s",
				"--conntrack-tcp-timeout-close-wait", "60s", "--conntrack-udp-timeout=10s", "--conntrack-tcp-be-liberal"),
		}, []snapshot.Owner{
			own("kube-proxy", max, "262144", "process 41 (kube-proxy)"),
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_timeout_close_wait", "60", "process 41 (kube-proxy)"),
			own("kube-proxy", "net.netfilter.nf_conntrack_udp_timeout", "10", "process 41 (kube-proxy)"),
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_be_liberal", "1", "process 41 (kube-proxy)"),
		}},
		{"kube-proxy by its file, where the flags do not count", map[string]string{
			"proc/41/cmdline": args("kube-proxy", "--config=/var/lib/kube-proxy/config.conf", "--conntrack-max-per-core=1"),
			"proc/41/root/var/lib/kube-proxy/config.conf": "apiVersion: x\nconntrack:\n  maxPerCore: 0 # as it is\n  min: null\n" +
				"  tcpCloseWaitTimeout: \"2m\"\n  tcpEstablishedTimeout: null\nmode: iptables\n  maxPerCore: 7\n",
		}, []snapshot.Owner{
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_timeout_established", "86400", "process 41 (kube-proxy), /var/lib/kube-proxy/config.conf"),
			own("kube-proxy", "net.netfilter.nf_conntrack_tcp_timeout_close_wait", "120", "process 41 (kube-proxy), /var/lib/kube-proxy/config.conf"),
		}},
		{"docker", map[string]string{"proc/9/cmdline": args("/usr/bin/dockerd", "-H", "fd://")}, []snapshot.Owner{
			own("docker", "net.ipv4.ip_forward", "1", "process 9 (dockerd)"),
			own("docker", "net.bridge.bridge-nf-call-iptables", "1", "process 9 (dockerd)"),
			own("docker", "net.bridge.bridge-nf-call-ip6tables", "1", "process 9 (dockerd)"),
		}},
		{"docker without its proxy", map[string]string{
			"proc/9/cmdline":         args("dockerd"),
			"etc/docker/daemon.json": `{"userland-proxy": false, "ip-forward": false}`,
		}, []snapshot.Owner{
			own("docker", "net.bridge.bridge-nf-call-iptables", "1", "process 9 (dockerd)"),
			own("docker", "net.bridge.bridge-nf-call-ip6tables", "1", "process 9 (dockerd)"),
			own("docker", "net.ipv4.conf.docker0.route_localnet", "1", "process 9 (dockerd)"),
			own("docker", "net.ipv4.conf.br-*.route_localnet", "1", "process 9 (dockerd)"),
		}},
		{"k3s, which hides its arguments", map[string]string{
			"proc/7/cmdline":                  args("/usr/local/bin/k3s server", "", ""),
			"proc/8/cmdline":                  args("k3s", "kubectl", "get", "pods"),
			"etc/rancher/k3s/config.yaml":     "kube-proxy-arg:\n  - \"conntrack-max-per-core=0\"\n# - conntrack-tcp-timeout-established=7s\n",
			"etc/systemd/system/k3s.service":  "ExecStart=/usr/local/bin/k3s \\\n    server \\\n\t'--kube-proxy-arg' \\\n\t'conntrack-tcp-timeout-close-wait=60s' \\\n",
			"etc/rancher/rke2/config.yaml":    "kube-proxy-arg: conntrack-tcp-timeout-established=1h\n",
			"etc/systemd/system/rke2.service": "",
		}, []snapshot.Owner{
			own("k3s", "net.ipv4.conf.all.forwarding", "1", k3sWhere),
			own("k3s", "net.ipv4.conf.default.forwarding", "1", k3sWhere),
			own("k3s", "net.bridge.bridge-nf-call-iptables", "1", k3sWhere),
			own("k3s", "net.netfilter.nf_conntrack_tcp_timeout_established", "86400", k3sWhere),
			own("k3s", "net.netfilter.nf_conntrack_tcp_timeout_close_wait", "60", k3sWhere),
		}},
		{"ufw", map[string]string{
			"etc/ufw/ufw.conf":    "ENABLED=yes\n",
			"etc/default/ufw":     "# x\nIPT_SYSCTL=/etc/ufw/sysctl.conf\n",
			"etc/ufw/sysctl.conf": "#net/ipv4/ip_forward=1\nnet/ipv4/conf/all/rp_filter=1\n",
		}, []snapshot.Owner{own("ufw", "net.ipv4.conf.all.rp_filter", "1", "/etc/ufw/sysctl.conf:2")}},
		{"ufw that is off", map[string]string{
			"etc/ufw/ufw.conf":    "ENABLED=no\n",
			"etc/default/ufw":     "IPT_SYSCTL=/etc/ufw/sysctl.conf\n",
			"etc/ufw/sysctl.conf": "net/ipv4/conf/all/rp_filter=1\n",
		}, nil},
		{"firewalld that masquerades", map[string]string{
			"proc/5/cmdline":                    args("/usr/bin/python3", "-s", "/usr/sbin/firewalld", "--nofork", "--nopid"),
			"etc/firewalld/zones/home.xml":      "<zone>\n</zone>\n",
			"etc/firewalld/zones/public.xml":    "<zone>\n  <forward-port port=\"80\" to-port=\"8080\"/>\n</zone>\n",
			"etc/firewalld/policies/egress.xml": "<policy>\n  <masquerade/>\n</policy>\n",
		}, []snapshot.Owner{own("firewalld", "net.ipv4.ip_forward", "1", "/etc/firewalld/policies/egress.xml:2")}},
		{"firewalld that is not running", map[string]string{"etc/firewalld/zones/public.xml": "<masquerade/>\n"}, nil},
		{"NetworkManager", map[string]string{
			"proc/5/cmdline": args("/usr/sbin/NetworkManager", "--no-daemon"),
			"etc/NetworkManager/system-connections/a.nmconnection": "[connection]\ninterface-name=eth1\n[ipv4]\nmethod=shared\n",
			"run/NetworkManager/system-connections/b.nmconnection": "[ipv4]\nforwarding=no\nmethod=auto\n[connection]\ninterface-name=eth0.7\n",
		}, []snapshot.Owner{
			own("NetworkManager", "net.ipv4.ip_forward", "1", "/etc/NetworkManager/system-connections/a.nmconnection:4"),
			own("NetworkManager", "net.ipv4.conf.eth0/7.forwarding", "0", "/run/NetworkManager/system-connections/b.nmconnection:2"),
		}},
		{"systemd-networkd", map[string]string{
			"proc/5/cmdline":                                args("/usr/lib/systemd/systemd-networkd"),
			"etc/systemd/networkd.conf":                     "[Network]\nIPv6Forwarding=yes\n",
			"etc/systemd/network/10-a.network":              "[Match]\nName=eth0 en*\n[Network]\nIPv4ReversePathFilter=loose\n",
			"usr/lib/systemd/network/10-a.network":          "[Match]\nName=hidden\n[Network]\nIPForward=yes\n",
			"usr/lib/systemd/network/10-a.network.d/x.conf": "[Network]\nIPv4Forwarding=no\n",
			"usr/lib/systemd/network/80-vz.network":         "[Match]\nName=vz-*\n[Network]\nIPMasquerade=both\n",
		}, []snapshot.Owner{
			own("systemd-networkd", "net.ipv6.conf.all.forwarding", "1", "/etc/systemd/networkd.conf:2"),
			own("systemd-networkd", "net.ipv4.conf.eth0.rp_filter", "2", "/etc/systemd/network/10-a.network:4"),
			own("systemd-networkd", "net.ipv4.conf.en*.rp_filter", "2", "/etc/systemd/network/10-a.network:4"),
			own("systemd-networkd", "net.ipv4.conf.eth0.forwarding", "0", "/usr/lib/systemd/network/10-a.network.d/x.conf:2"),
			own("systemd-networkd", "net.ipv4.conf.en*.forwarding", "0", "/usr/lib/systemd/network/10-a.network.d/x.conf:2"),
			own("systemd-networkd", "net.ipv4.conf.vz-*.forwarding", "1", "/usr/lib/systemd/network/80-vz.network:4"),
		}},
		{"docker told not to", map[string]string{
			"proc/9/cmdline":         args("dockerd", "--ip-forward=false"),
			"etc/docker/daemon.json": `{"iptables": false}`,
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := readOwners(tree(t, c.files), 4); !slices.Equal(got, c.want) {
				t.Errorf("owners\n%+v\nwant\n%+v", got, c.want)
			}
		})
	}
}

// A file in the search path may be anything; it must not hang the probe.
func TestReadOwnersOddFiles(t *testing.T) {
	root := tree(t, map[string]string{
		"etc/sysctl.d/20-long.conf": strings.Repeat("x", 1<<20) + "\nnet.core.somaxconn=1\n",
		"etc/sysctl.d/30-loop.conf": "-> 30-loop.conf",
		"etc/docker/daemon.json":    "{",
		"proc/9/cmdline":            "\x00\x00dockerd\x00",
	})
	if err := os.Mkdir(filepath.Join(root, "etc/sysctl.d/40-dir.conf"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(root, "etc/sysctl.d/50-pipe.conf"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := readOwners(root, 4); len(got) != 0 {
		t.Errorf("owners %+v", got)
	}
}

// Any user may run a program under the name of one that owns settings, with any argument: a file that it names is read only if
// it is a regular one, and what a container names only inside of it.
func TestReadOwnersHostileArguments(t *testing.T) {
	root := tree(t, map[string]string{
		"proc/9/cmdline":     "dockerd\x00--config-file=/pipe\x00",
		"proc/41/cmdline":    "kube-proxy\x00--config=/etc/link.conf\x00",
		"proc/41/root/etc/x": "",
		"host.conf":          "conntrack:\n  maxPerCore: 7777777\n",
	})
	if err := os.Symlink(filepath.Join(root, "host.conf"), filepath.Join(root, "proc/41/root/etc/link.conf")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(root, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := make(chan []snapshot.Owner, 1)
	go func() { got <- readOwners(root, 4) }()
	select {
	case owners := <-got:
		for _, o := range owners {
			if o.Setting == "net.netfilter.nf_conntrack_max" && o.Value != "131072" {
				t.Errorf("a file outside of the container was read: %+v", o)
			}
		}
	case <-time.After(10 * time.Second):
		t.Error("a pipe was opened, and nobody writes into it")
	}
}

func FuzzSysctlLine(f *testing.F) {
	for _, s := range []string{"net.ipv4.ip_forward = 1", "-net/ipv4/conf/eth0.1/rp_filter=2", "# net.x=1", "=", "net.", "-", "net/=/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		name, value, ok := sysctlLine(line)
		if ok && (!strings.HasPrefix(name, "net.") || strings.TrimSpace(value) != value) {
			t.Errorf("%q: name %q, value %q", line, name, value)
		}
	})
}
