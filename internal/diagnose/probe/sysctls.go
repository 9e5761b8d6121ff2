// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// sysctlPatterns are the settings that bear on NAT, as paths below /proc/sys.
// A star is one path element; what this kernel does not have is left out.
var sysctlPatterns = []string{
	"net/netfilter/nf_conntrack_*",
	"net/bridge/bridge-nf-*",
	"net/core/somaxconn",
	"net/core/netdev_max_backlog",
	"net/core/rmem_max",
	"net/core/netdev_budget",
	"net/core/netdev_budget_usecs",
	"net/core/dev_weight",
	"net/core/default_qdisc",
	"net/core/rps_sock_flow_entries",
	"net/ipv4/ip_forward",
	"net/ipv4/ip_local_port_range",
	"net/ipv4/ip_local_reserved_ports",
	"net/ipv4/ip_no_pmtu_disc",
	"net/ipv4/ip_forward_use_pmtu",
	"net/ipv4/ip_nonlocal_bind",
	"net/ipv4/ip_early_demux",
	"net/ipv4/ipfrag_high_thresh",
	"net/ipv4/ipfrag_low_thresh",
	"net/ipv4/ipfrag_time",
	"net/ipv4/tcp_max_syn_backlog",
	"net/ipv4/tcp_keepalive_*",
	"net/ipv4/tcp_syncookies",
	"net/ipv4/tcp_abort_on_overflow",
	"net/ipv4/tcp_max_tw_buckets",
	"net/ipv4/tcp_tw_reuse",
	"net/ipv4/tcp_fin_timeout",
	"net/ipv4/tcp_mtu_probing",
	"vm/min_free_kbytes",
	"net/ipv4/neigh/default/gc_thresh*",
	"net/ipv6/neigh/default/gc_thresh*",
	"net/ipv4/conf/*/forwarding",
	"net/ipv4/conf/*/rp_filter",
	"net/ipv4/conf/*/accept_local",
	"net/ipv4/conf/*/src_valid_mark",
	"net/ipv4/conf/*/route_localnet",
	"net/ipv4/conf/*/log_martians",
	"net/ipv4/conf/*/proxy_arp",
	"net/ipv4/conf/*/arp_ignore",
	"net/ipv4/conf/*/arp_filter",
	"net/ipv4/conf/*/send_redirects",
	"net/ipv6/conf/*/forwarding",
}

// maxInterfaces is how many interfaces a Snapshot tells of, with their settings.
const maxInterfaces = snapshot.MaxInterfaces

// sysctls reads the settings of the namespace, and of the host where they are
// the host's.
func sysctls() source {
	return source{
		name:  snapshot.CanSysctls,
		costs: "settings that hinder NAT (forwarding, rp_filter, timeouts) are not judged",
		end: func(v *view, s *snapshot.Snapshot) error {
			dir := filepath.Join(v.root, "proc/sys")
			if _, err := os.Stat(filepath.Join(dir, "net")); err != nil {
				return err
			}
			s.Sysctls = map[string]string{}
			folders := settingFolders{dir: dir, open: map[string]*settingFolder{}}
			defer folders.close()
			for _, pattern := range sysctlPatterns {
				in, files := folders.find(pattern)
				for _, file := range files {
					// Some can be written but not read, some need root; what can't be read is
					// not known, like what does not exist.
					if text, err := readBelow(in.fd, file, true); err == nil {
						name := snapshot.SysctlName(slices.Concat(in.path, strings.Split(file, "/"))...)
						s.Sysctls[name] = strings.Join(strings.Fields(text), " ")
					}
				}
			}
			if len(s.Sysctls) == 0 {
				return fmt.Errorf("read %s: none of the settings is there", dir)
			}
			return nil
		},
	}
}

// settingFolders are the folders below dir that patterns begin with, each opened and listed once. What a setting
// is called is then looked for in its folder only: to find those on the way to it the kernel goes
// through the ones of all namespaces. And filepath.Glob would list them again for each pattern.
type settingFolders struct {
	dir  string
	open map[string]*settingFolder
}

type settingFolder struct {
	path  []string
	fd    int // -1: there is none
	names []string
}

// find returns the folder that a pattern begins with, and the files in or below it that the pattern may mean.
func (f *settingFolders) find(pattern string) (*settingFolder, []string) {
	before, rest, starred := strings.Cut(pattern, "*")
	name, prefix := path.Split(before)
	in := f.open[name]
	if in == nil {
		in = &settingFolder{path: strings.Split(path.Clean(name), "/"), fd: -1}
		f.open[name] = in
		if fd, err := unix.Open(filepath.Join(f.dir, name), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			in.fd = fd
			entries, _ := os.ReadDir(filepath.Join(f.dir, name))
			for _, e := range entries {
				in.names = append(in.names, e.Name())
			}
		}
	}
	if !starred {
		return in, []string{prefix}
	}
	var files []string
	for _, name := range in.names {
		if strings.HasPrefix(name, prefix) && len(files) < maxInterfaces {
			files = append(files, name+rest)
		}
	}
	return in, files
}

func (f *settingFolders) close() {
	for _, in := range f.open {
		if in.fd >= 0 {
			unix.Close(in.fd)
		}
	}
}

// escapeGlob makes a folder's name stand for itself in a pattern.
func escapeGlob(dir string) string {
	var b strings.Builder
	for _, r := range dir {
		if slices.Contains([]rune(`*?[\`), r) {
			b.WriteByte('\\')
		}
		b.WriteRune(r)
	}
	return b.String()
}
