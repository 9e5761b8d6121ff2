// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"slices"
	"strings"

	"natkit/internal/snapshot"
)

// ownerOf names a program that keeps chains of that name.
func ownerOf(chain, table string) string {
	if program := programOf(chain, table); program != "" {
		return program
	}
	if slices.Contains([]string{"INPUT", "FORWARD", "OUTPUT", "PREROUTING", "POSTROUTING"}, chain) {
		return "iptables-nft"
	}
	return ""
}

// programs give their chains, or tables, names that begin so. Those that keep their rules write them again when they see fit.
var programs = []struct {
	name, chain, table string
	keeps              bool
}{
	{name: "kube-proxy", chain: "KUBE-", table: "kube-proxy", keeps: true},
	{name: "Docker", chain: "DOCKER", table: "docker-bridges", keeps: true},
	{name: "Podman", chain: "NETAVARK", table: "netavark", keeps: true},
	{name: "a container network (CNI)", chain: "CNI-", table: "cni_hostport", keeps: true},
	{name: "libvirt", chain: "LIBVIRT_", table: "libvirt_", keeps: true},
	{name: "Incus", chain: "incusbr", table: "incus", keeps: true},
	{name: "LXD", chain: "lxdbr", table: "lxd", keeps: true},
	{name: "firewalld", chain: "FORWARD_IN_ZONES", table: "firewalld", keeps: true},
	{name: "ufw", chain: "ufw-"},
	{name: "natkit", table: "natkit"},
}

// programOf names the program that gives chains, or tables, such names: not the tool by
// which it does.
func programOf(chain, table string) string {
	for _, p := range programs {
		if p.chain != "" && strings.HasPrefix(chain, p.chain) || p.table != "" && strings.HasPrefix(table, p.table) {
			return p.name
		}
	}
	return ""
}

// Keeper names the first program whose chains these are that would write them again, "" for none that can be told.
func Keeper(chains []snapshot.Chain) string {
	for _, p := range programs {
		if p.keeps && slices.ContainsFunc(chains, func(c snapshot.Chain) bool { return programOf(c.Name, c.Table) == p.name }) {
			return p.name
		}
	}
	return ""
}

// Translator is a table of the kernel's rule set that has NAT rules.
type Translator struct {
	Backend, Family, Table string
	Rules                  int      // that translate
	Programs               []string // that have chains in it, as far as their names are known
}

// Translators are the tables by which the kernel translates, most rules first.
func Translators(chains []snapshot.Chain) []Translator {
	var all []Translator
	for _, c := range chains {
		same := func(t Translator) bool { return t.Backend == c.Backend && t.Family == c.Family && t.Table == c.Table }
		at := slices.IndexFunc(all, same)
		if at < 0 {
			at = len(all)
			all = append(all, Translator{Backend: c.Backend, Family: c.Family, Table: c.Table})
		}
		for _, n := range c.NATRules {
			all[at].Rules += n
		}
		if p := programOf(c.Name, c.Table); p != "" && !slices.Contains(all[at].Programs, p) {
			all[at].Programs = append(all[at].Programs, p)
		}
	}
	all = slices.DeleteFunc(all, func(t Translator) bool { return t.Rules == 0 })
	slices.SortStableFunc(all, func(a, b Translator) int { return b.Rules - a.Rules })
	return all
}
