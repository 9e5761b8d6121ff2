// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

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
			lists := map[string][]string{}
			for _, pattern := range sysctlPatterns {
				for _, file := range sysctlPaths(dir, pattern, lists) {
					// Some can be written but not read, some need root; what can't be read is
					// not known, like what does not exist.
					if text, err := v.read("proc/sys/" + file); err == nil {
						name := snapshot.SysctlName(strings.Split(file, "/")...)
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

// sysctlPaths are the files below dir that a pattern may mean. Lists are the folders that were
// listed before: filepath.Glob would list them again for each pattern, and ask for each file.
func sysctlPaths(dir, pattern string, lists map[string][]string) []string {
	folder, rest, ok := strings.Cut(pattern, "*")
	if !ok {
		return []string{pattern}
	}
	folder, prefix := path.Split(folder)
	names, listed := lists[folder]
	if !listed {
		entries, _ := os.ReadDir(filepath.Join(dir, folder))
		for _, e := range entries {
			names = append(names, e.Name())
		}
		lists[folder] = names
	}
	var out []string
	for _, name := range names {
		if strings.HasPrefix(name, prefix) && len(out) < maxInterfaces {
			out = append(out, folder+name+rest)
		}
	}
	return out
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
