// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/lab"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

func newLabCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Build test networks of namespaces, and faults in them",
		Long: `Create small networks of namespaces: clients, a NAT node, a server. They change
nothing on the host, and "natkit lab down" removes them completely.`,
		Example: `  natkit lab up published
  natkit lab exec published client -- curl http://192.168.0.96:8080/
  natkit lab down published
  natkit lab run mtu-drop`,
		Args: noArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if e.netns != "" {
				return usagef("--netns %q: a lab has namespaces of its own", e.netns)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newLabUpCommand(e),
		newLabDownCommand(e),
		newLabListCommand(e),
		newLabExecCommand(e),
		newLabRunCommand(e),
		newLabServeCommand(),
	)
	return cmd
}

func newLabUpCommand(e *env) *cobra.Command {
	var o lab.Options
	client, dryRun := "netns", false
	cmd := &cobra.Command{
		Use:   "up [flags] TOPOLOGY",
		Short: "Create a lab",
		Long: `Create a lab, which stays up until "natkit lab down".

  routed     client -- gateway -- server; the gateway masquerades the clients
  published  client -- host -- container; the host publishes a port of the
             container as Docker does: DNAT, masquerading, a bridge with
             br_netfilter, a FORWARD chain that drops by default
  carrier    routed, whose client also has the addresses of 1024 subscribers,
             100.64.4.0/22

Remains of labs whose natkit was killed are removed first.`,
		Example: `  natkit lab up published
  natkit lab up published --client local --rules iptables --server nginx
  natkit lab up routed --name two --clients 4 --client-addr 10.1.0.10/16 --near-addr 10.1.0.1
  natkit lab up carrier --rules none
  natkit lab up routed --dry-run`,
		Args:      asUsage(cobra.ExactArgs(1)),
		ValidArgs: lab.Topologies(),
	}
	f := cmd.Flags()
	f.StringVar(&o.Name, "name", "", "the lab's name; its namespaces are NAME-client and so on (default the topology's)")
	f.IntVar(&o.Clients, "clients", 1, "client namespaces: client, client2, client3 ...")
	f.StringVar(&client, "client", client, "where the client is: netns, or local for the host itself (published only)")
	f.StringVar((*string)(&o.Rules), "rules", string(lab.RulesNft), "who sets the NAT rules: nft, iptables, iptables-legacy or none")
	f.StringVar((*string)(&o.Server), "server", string(lab.ServerBuiltin), "web server: builtin, nginx or none")
	f.Var((*prefixFlag)(&o.Addresses.Client), "client-addr", "the first client's `ADDRESS/LENGTH`")
	f.Var((*addrFlag)(&o.Addresses.Near), "near-addr", "the NAT node's `address` on the clients' side")
	f.Var((*prefixFlag)(&o.Addresses.Far), "far-addr", "the NAT node's `ADDRESS/LENGTH` on the server's side")
	f.Var((*addrFlag)(&o.Addresses.Server), "server-addr", "the server's `address`")
	f.Uint16Var(&o.Addresses.Port, "port", 0, "published port of the host (default 8080; published only)")
	f.BoolVar(&dryRun, "dry-run", false, "print what would be made, and make nothing")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch client {
		case "netns":
		case "local":
			o.LocalClient = true
		default:
			return usagef("--client %w", choice.Error(client, "netns", "local"))
		}
		if o.Clients < 1 {
			return usagef("--clients %d: want 1 or more", o.Clients)
		}
		plan, err := lab.Plan(args[0], o)
		if err != nil {
			return usagef("%w", err)
		}
		if dryRun {
			return showPlan(e, *out, plan)
		}
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find own program: %w", err)
		}
		o.ServeCommand = []string{self, "lab", "serve"}
		l, err := lab.Up(cmd.Context(), args[0], o)
		if err != nil {
			return err
		}
		defer l.Close()
		for _, note := range l.Notes() {
			fmt.Fprintf(e.stderr, "natkit: note: %s\n", note)
		}
		if *out == "json" {
			info, err := l.Info()
			if err != nil {
				return err
			}
			return report.JSON(e.stdout, info)
		}
		return report.LabUp(e.stdout, l)
	}
	return cmd
}

func newLabDownCommand(e *env) *cobra.Command {
	all, dryRun := false, false
	cmd := &cobra.Command{
		Use:   "down [flags] NAME...",
		Short: "Remove labs",
		Long: `Remove labs: everything that natkit created according to their journals, and nothing
else. A lab that a running natkit owns or is creating is left alone; with --all that
is not an error.`,
		Example: "  natkit lab down published\n  natkit lab down --all",
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if all == (len(args) > 0) {
			return usagef("want names of labs, or --all (see %s --help)", cmd.CommandPath())
		}
		return nil
	}
	cmd.Flags().BoolVar(&all, "all", false, "every lab, also what killed natkits left")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be removed, and remove nothing")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if dryRun {
			plan, err := lab.PlanDown(args)
			if plan == nil {
				return err
			}
			return errors.Join(err, showPlan(e, *out, plan))
		}
		r := report.LabsDown{Down: []string{}, InUse: []string{}}
		var err error
		if all {
			r.Down, r.InUse, err = lab.DownAll()
		} else {
			for _, name := range args {
				downErr := lab.Down(name)
				if downErr == nil {
					r.Down = append(r.Down, name)
				}
				err = errors.Join(err, downErr)
			}
		}
		if *out == "json" {
			return errors.Join(err, report.JSON(e.stdout, r))
		}
		for _, why := range r.InUse {
			fmt.Fprintf(e.stderr, "natkit: left alone: %s\n", why)
		}
		return errors.Join(err, r.Text(e.stdout))
	}
	return cmd
}

// showPlan prints what a dry run found.
func showPlan(e *env, format string, plan []string) error {
	if format == "json" {
		return report.JSON(e.stdout, report.LabPlan{Plan: plan})
	}
	for _, line := range plan {
		fmt.Fprintln(e.stdout, line)
	}
	return nil
}

func newLabListCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the labs on this machine",
		Long: `List the labs. The network namespace of a role is LAB-ROLE.

States: up (until removed), owned (ends with the process that created it), making
(not complete yet), remains (left by a killed process; the next "natkit lab up" and
"natkit lab down --all" remove it).`,
		Example: "  natkit lab list\n  natkit lab list -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		infos, err := lab.List()
		if infos == nil {
			return err
		}
		if *out == "json" {
			return errors.Join(err, report.JSON(e.stdout, report.Labs{Labs: infos}))
		}
		return errors.Join(err, report.LabList(e.stdout, infos))
	}
	return cmd
}

func newLabExecCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec NAME ROLE [--] COMMAND [ARGUMENT...]",
		Short: "Run a program inside a lab",
		Long: `Run a program in the network namespace of one node of a lab. Terminal, signals
and exit code are the program's own, and /sys shows the namespace's devices.`,
		Example: `  natkit lab exec published client -- curl http://192.168.0.96:8080/
  natkit lab exec published host -- conntrack -L
  natkit lab exec published host -- sh`,
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Args = asUsage(cobra.MinimumNArgs(3))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		name, role, argv := args[0], args[1], args[2:]
		if argv[0] == "--" {
			argv = argv[1:]
		}
		if len(argv) == 0 {
			return usagef("no command to run (see %s --help)", cmd.CommandPath())
		}
		l, err := lab.Open(name)
		if err != nil {
			return err
		}
		defer l.Close()
		node := l.Node(role)
		if node == nil {
			var roles []string
			for _, n := range l.Nodes() {
				roles = append(roles, n.Role)
			}
			return usagef("lab %q: no node %w", name, choice.Error(role, roles...))
		}
		return node.Exec(argv)
	}
	return cmd
}

// newLabServeCommand is what `lab up` starts in the background.
func newLabServeCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "serve",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE:               func(cmd *cobra.Command, args []string) error { return lab.Serve(cmd.Context(), args) },
	}
}

// prefixFlag and addrFlag are flags that hold an address.
type prefixFlag netip.Prefix

var _ pflag.Value = (*prefixFlag)(nil)

func (p *prefixFlag) Type() string { return "ADDRESS/LENGTH" }

func (p *prefixFlag) String() string {
	if v := netip.Prefix(*p); v.IsValid() {
		return v.String()
	}
	return ""
}

func (p *prefixFlag) Set(s string) error {
	v, err := netip.ParsePrefix(s)
	*p = prefixFlag(v)
	return err
}

type addrFlag netip.Addr

func (a *addrFlag) Type() string { return "address" }

func (a *addrFlag) String() string {
	if v := netip.Addr(*a); v.IsValid() {
		return v.String()
	}
	return ""
}

func (a *addrFlag) Set(s string) error {
	v, err := netip.ParseAddr(s)
	*a = addrFlag(v)
	return err
}
