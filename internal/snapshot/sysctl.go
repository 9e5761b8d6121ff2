// SPDX-License-Identifier: Apache-2.0

package snapshot

import "strings"

// SysctlName joins the parts of a setting's path to the name that sysctl(8)
// prints. A dot inside a part, as in the interface eth0.100, becomes a slash:
//
//	SysctlName("net", "ipv4", "conf", "eth0.100", "rp_filter") = "net.ipv4.conf.eth0/100.rp_filter"
func SysctlName(parts ...string) string {
	names := make([]string, len(parts))
	for i, p := range parts {
		names[i] = strings.ReplaceAll(p, ".", "/")
	}
	return strings.Join(names, ".")
}

// SysctlPath is the file of a setting below /proc/sys, the reverse of SysctlName.
func SysctlPath(name string) string {
	return strings.Map(func(r rune) rune {
		switch r {
		case '.':
			return '/'
		case '/':
			return '.'
		}
		return r
	}, name)
}
