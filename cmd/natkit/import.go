// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"natkit/internal/netns"
	"natkit/internal/plural"
	"natkit/nft"
	"natkit/report"
)

// listers are the programs that can be asked for the rules of a namespace, and how.
var listers = map[string][]string{
	"iptables": {"iptables-save", "-t", "nat"},
	"nft":      {"nft", "-j", "list", "ruleset"},
}

// listRules runs one of the listers in the namespace of h.
func listRules(ctx context.Context, h *netns.Handle, command []string) ([]byte, error) {
	var out, complaint bytes.Buffer
	err := h.Do(func() error {
		cmd := exec.CommandContext(ctx, command[0], command[1:]...)
		cmd.Stdout, cmd.Stderr = &out, &complaint
		return cmd.Run()
	})
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("list rules: %w (or give its output from elsewhere with --from FILE)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("run %s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(complaint.String()))
	}
	return out.Bytes(), nil
}

func newImportCommand(e *env) *cobra.Command {
	var from string
	var o nft.ImportOptions
	var local []string
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Read the NAT rules of iptables or nftables into a rule file",
		Long: `Read the NAT rules of iptables or nftables into a rule file for natkit, and name
each that it can't express, with its line and why.

SOURCE is a file with the output of iptables-save or of nft -j list ruleset (- is
stdin), or "iptables" or "nft": then that program is run here, or in --netns.

The first rule of a list that matches a packet decides; in a rule file the most
special one does. Rules that another leaves nothing for are left out, and where
the order decides otherwise it is said. Chains are followed, also Docker's,
firewalld's and kube-proxy's; targets that take turns become one balanced rule.

Interfaces that are not named by --inside and --outside are taken from the
rules. --local names the gateway's own outside addresses, for rules that say
"whatever is local"; where a program is run they are asked for.

With -o json: inside, outside; pools, a list of {name, addresses, ports}; rules,
a list of rules as text; notes, a list of {line, rule, why, lost}, lost where
the rule file does not do what the rule did.`,
		Example: `  natkit import --from nft --inside eth1 --outside eth0 > nat.yaml
  natkit import --from iptables --netns blue --inside eth1 --outside eth0
  iptables-save | natkit import --from - --outside eth0 --local 203.0.113.5`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&from, "from", "", "where the rules are: a `FILE`, - for stdin, or iptables or nft")
	cmd.Flags().StringSliceVar(&o.Inside, "inside", nil, "`INTERFACES` of inside hosts")
	cmd.Flags().StringSliceVar(&o.Outside, "outside", nil, "`INTERFACES` towards the world")
	cmd.Flags().StringSliceVar(&local, "local", nil, "outside `ADDRESSES` of the gateway itself")
	out := outputFlag(cmd, "yaml", "json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, text := range local {
			a, err := netip.ParseAddr(text)
			if err != nil || !a.Is4() {
				return usagef("--local %q: want IPv4 addresses", text)
			}
			o.Local = append(o.Local, a)
		}
		var in io.Reader
		o.Name = from
		switch {
		case from == "":
			return usagef("--from is missing: name a file, - for stdin, iptables or nft")
		case listers[from] != nil:
			h, err := netns.Open(e.netns)
			if err != nil {
				return err
			}
			defer h.Close()
			data, err := listRules(cmd.Context(), h, listers[from])
			if err != nil {
				return err
			}
			if o.Local == nil {
				if o.Local, err = nft.LocalAddresses(h, o.Outside); err != nil {
					return err
				}
			}
			in = bytes.NewReader(data)
		case e.netns != "":
			return usagef("--netns %q: a file is the same in every namespace", e.netns)
		case from == "-":
			in, o.Name = e.stdin, "standard input"
		default:
			f, err := os.Open(from)
			if err != nil {
				return err
			}
			defer f.Close()
			in = f
		}
		imported, err := nft.Import(in, o)
		if err != nil {
			return err
		}
		if len(imported.File.Inside) == 0 || len(imported.File.Outside) == 0 {
			err = errors.New("the rules do not tell which interfaces are inside and which are outside: name them with --inside and --outside")
		}
		if *out == "json" {
			return errors.Join(unlessPipeClosed(report.JSON(e.stdout, report.Import(imported))), err)
		}
		lost := 0
		for _, n := range imported.Notes {
			if n.Lost {
				lost++
			}
		}
		if lost > 0 {
			fmt.Fprintf(e.stderr, "natkit: %s at the top of the rule file: what it does not do\n", plural.Count(lost, "note"))
		}
		return errors.Join(unlessPipeClosed(report.ImportYAML(e.stdout, imported)), err)
	}
	return cmd
}
