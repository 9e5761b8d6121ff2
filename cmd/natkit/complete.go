// SPDX-License-Identifier: Apache-2.0

// What a shell offers after a flag or for an argument.

package main

import (
	"net"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/scenario"
)

// words are what can stand in one place of a command line.
type words func() []string

func these(list ...string) words { return func() []string { return list } }

// flagWords are the values of flags, by the flag's name, or by command and name where several
// commands call different things alike.
var flagWords = map[string]words{
	"netns": namespaceNames, "server-netns": namespaceNames, "rx-netns": namespaceNames,
	"tx": interfaceNames, "rx": interfaceNames, "inside": interfaceNames, "outside": interfaceNames,
	"router": routerNames, "natkit bench subscribers router": subscriberRouterNames, "confirm": causeCodes, "cause": dropCauses,
	"engine": these(control.Engines()...),
	"attach": these(string(control.AttachAuto), string(control.AttachXDP), string(control.AttachTC)),
	"by":     these(countsBy...), "direction": these("up", "down", "both"), "size": these("64", "128", "256", "512", "1024", "1518", "imix"),
	"family": these("ipv4", "ipv6"), "proto": these("tcp", "udp", "icmp", "icmpv6", "gre", "sctp", "dccp", "udplite"),
	"protocol": these("tcp", "udp", "icmp", "gre", "esp", "sctp"), "natkit bench cps protocol": these("udp", "tcp"),
	"state": conntrack.TCPStates, "natkit sessions state": sessionStates, "natkit events state": sessionStates,
	"kind":   these("created", "ended", "refused"),
	"client": these("netns", "local"), "rules": these("nft", "iptables", "iptables-legacy", "none"), "server": these("builtin", "nginx", "none"),
	"root": these("nf_hook_slow", "net_rx_action", "all"), "site": these("1", "2"),
	"natkit trace container": containerNames, "natkit subscribers by": these(control.SubscriberOrders()...),
	"natkit monitor tune":       these(tuneModes...),
	"natkit monitor arp-probes": these(probeModes...),
	"natkit import from":        these("iptables", "nft"),
}

// argumentWords are the arguments of commands, one function for each place; the last one goes on.
var argumentWords = map[string][]words{
	"natkit accel on": {interfaceNames},
	"natkit lab up":   {lab.Topologies}, "natkit lab down": {labNames}, "natkit lab exec": {labNames, these("client", "host", "router", "server")},
	"natkit lab run": {faultCodes},
}

// takesFiles are the commands whose arguments, and the flags whose values, are files.
var takesFiles = map[string]bool{"natkit report": true, "natkit fleet report": true, "natkit import from": true}

// completions gives every command of the tree what a shell may offer.
func completions(cmd *cobra.Command) {
	path := cmd.CommandPath()
	if at := argumentWords[path]; at != nil {
		cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
			return offer(at[min(len(args), len(at)-1)](), begun, false), cobra.ShellCompDirectiveNoFileComp
		}
	} else if !cmd.HasSubCommands() && !takesFiles[path] {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	add := func(f *pflag.Flag) {
		of := flagWords[path+" "+f.Name]
		if of == nil {
			of = flagWords[f.Name]
		}
		if of == nil || f.Value.Type() == "bool" {
			return
		}
		several := strings.HasSuffix(f.Value.Type(), "Slice") || f.Name == "state" || f.Name == "kind"
		directive := cobra.ShellCompDirectiveNoFileComp
		if takesFiles[path+" "+f.Name] {
			directive = cobra.ShellCompDirectiveDefault
		}
		// The only error is that of a flag which is not there.
		_ = cmd.RegisterFlagCompletionFunc(f.Name, func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return offer(of(), begun, several), directive
		})
	}
	cmd.LocalFlags().VisitAll(add)
	for _, sub := range cmd.Commands() {
		completions(sub)
	}
}

// offer are the words that go on as what was begun; of several with commas, the last one.
func offer(all []string, begun string, several bool) (out []string) {
	before := ""
	if at := strings.LastIndexByte(begun, ','); several && at >= 0 {
		before = begun[:at+1]
	}
	for _, w := range all {
		// Upper and lower case are the same to natkit where they are not to the shell.
		if strings.HasPrefix(strings.ToLower(before+w), strings.ToLower(begun)) {
			out = append(out, before+w)
		}
	}
	return out
}

func namespaceNames() (names []string) {
	all, _ := netns.List()
	for _, n := range all {
		names = append(names, n.Name)
	}
	return names
}

func interfaceNames() (names []string) {
	all, _ := net.Interfaces()
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names
}

func routerNames() []string { return namesOf(scenario.Routers()) }

func subscriberRouterNames() []string { return namesOf(scenario.SubscriberRouters()) }

func namesOf(routers []bench.Router) (names []string) {
	for _, r := range routers {
		names = append(names, r.Name())
	}
	return names
}

func labNames() (names []string) {
	all, _ := lab.List()
	for _, l := range all {
		names = append(names, l.Name)
	}
	return names
}

func causeCodes() (codes []string) {
	for _, c := range causes.Catalogue() {
		codes = append(codes, c.Code)
	}
	return codes
}

func faultCodes() (codes []string) {
	for _, f := range scenario.Faults() {
		codes = append(codes, f.Code)
	}
	return codes
}
