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
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/ui/report"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// listers are the programs that can be asked for the rules of a namespace, and how.
var listers = map[string][]string{
	"iptables":        {"iptables-save"},
	"iptables-legacy": {"iptables-legacy-save"},
	"iptables-nft":    {"iptables-nft-save"},
	"nft":             {"nft", "-j", "list", "ruleset"},
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

// otherRules counts the NAT rules that other listers show: two sets of rules can be in one
// kernel, and each program lists its own only. What is listed already does not count.
func otherRules(ctx context.Context, h *netns.Handle, from string, listed []byte) []string {
	var others []string
	for _, other := range []string{"nft", "iptables-nft", "iptables-legacy"} {
		if other == from || other == "iptables-legacy" && !hasLegacyTables(h) { // to list them would make them
			continue
		}
		rules, err := listRules(ctx, h, listers[other])
		if err != nil || sameRules(rules, listed) {
			continue
		}
		if n := nft.CountNAT(rules); n > 0 {
			others = append(others, fmt.Sprintf("%s in %s: natkit import --from %s", plural.Count(n, "NAT rule"), other, other))
		}
	}
	return others
}

func hasLegacyTables(h *netns.Handle) bool {
	var names []byte
	err := h.Do(func() (err error) {
		names, err = os.ReadFile("/proc/thread-self/net/ip_tables_names")
		return err
	})
	return err == nil && slices.Contains(strings.Fields(string(names)), "nat")
}

// sameRules tells whether two listings have the same rules; comments have the time.
func sameRules(a, b []byte) bool {
	lines := func(text []byte) []string {
		var rules []string
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "-A") {
				rules = append(rules, line)
			}
		}
		return rules
	}
	return len(lines(b)) > 0 && slices.Equal(lines(a), lines(b))
}

// importSource is where rules are read from.
type importSource struct {
	io.Reader
	close  func() error
	others []string // where else there are NAT rules
}

// openImport opens what --from names, and completes the options.
func (e *env) openImport(ctx context.Context, from string, o *nft.ImportOptions) (importSource, error) {
	o.Name = from
	switch {
	case from == "":
		return importSource{}, usagef("--from is missing: name a file, - for stdin, iptables or nft")
	case listers[from] != nil:
		return e.listImport(ctx, from, o)
	case e.netns != "":
		return importSource{}, usagef("--netns %q: a file is the same in every namespace", e.netns)
	case from == "-":
		o.Name = "standard input"
		return importSource{Reader: e.stdin, close: func() error { return nil }}, nil
	}
	f, err := os.Open(from)
	if err != nil {
		return importSource{}, err
	}
	return importSource{Reader: f, close: f.Close}, nil
}

func (e *env) listImport(ctx context.Context, from string, o *nft.ImportOptions) (importSource, error) {
	h, err := netns.Open(e.netns)
	if err != nil {
		return importSource{}, err
	}
	defer h.Close()
	data, err := listRules(ctx, h, listers[from])
	if err != nil {
		return importSource{}, err
	}
	others := otherRules(ctx, h, from, data)
	if len(bytes.TrimSpace(data)) == 0 || nft.CountNAT(data) == 0 {
		if len(others) > 0 {
			return importSource{}, fmt.Errorf("%s lists no NAT rules here, but there is more: %s%s", listers[from][0], strings.Join(others, "; "), e.inNamespace())
		}
		neither := "do nft and the other kind of iptables"
		if from == "nft" {
			neither = "does iptables"
		}
		return importSource{}, fmt.Errorf("%s lists no NAT rules here, and neither %s", listers[from][0], neither)
	}
	if o.Local == nil {
		if o.Local, err = nft.LocalAddresses(h, o.Outside); err != nil {
			return importSource{}, err
		}
	}
	return importSource{bytes.NewReader(data), func() error { return nil }, others}, nil
}

// inNamespace is the flag that names the namespace again.
func (e *env) inNamespace() string {
	if e.netns == "" {
		return ""
	}
	return " --netns " + shell.Quote(e.netns)
}

func newImportCommand(e *env) *cobra.Command {
	var from string
	var o nft.ImportOptions
	var local []string
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Convert the NAT rules of iptables or nftables to a rule file",
		Long: `Convert the NAT rules of iptables or nftables to a rule file for natkit, and list
each rule that it cannot express, with its line and the reason.

SOURCE is a file with the output of iptables-save or of nft -j list ruleset (- is
stdin), or "iptables" or "nft": then natkit runs that program here, or in --netns.
If both kinds of iptables have rules, choose "iptables-nft" or "iptables-legacy".
natkit reports other NAT rules that the chosen program does not list.

In a chain the first rule that matches a packet decides; in a rule file the most
specific one does. So natkit follows all packets through the chains, including those
of Docker, firewalld and kube-proxy, and compares the result with the rule file:
each rule with a different effect is listed at the top of the file, with an example.
Targets used in turn become one rule, with their shares as weights.

The exit code is 3 if something is lost: if the rule file treats some packet
differently, or if other tables take part in NAT (notrack, zones, TPROXY, MSS
changes, stateless rewriting). Differences that all of natkit's NAT has, such as
hairpinning, are noted and do not count as lost.

Interfaces not named by --inside and --outside are taken from the rules. --local
names the gateway's own external addresses, for rules that match any local address;
if natkit runs the program, it reads them from the machine.`,
		Example: `  natkit import --from nft --inside eth1 --outside eth0 > nat.yaml
  natkit import --from iptables --netns blue --inside eth1 --outside eth0
  iptables-save | natkit import --from - --outside eth0 --local 203.0.113.5`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&from, "from", "", "where the rules are: a `FILE`, - for stdin, or iptables or nft")
	cmd.Flags().StringSliceVar(&o.Inside, "inside", nil, "`INTERFACES` of internal hosts")
	cmd.Flags().StringSliceVar(&o.Outside, "outside", nil, "`INTERFACES` towards the Internet")
	cmd.Flags().StringSliceVar(&local, "local", nil, "external `ADDRESSES` of the gateway itself")
	out := outputFlag(cmd, "yaml", "json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, text := range local {
			a, err := netip.ParseAddr(text)
			if err != nil || !a.Is4() {
				return usagef("--local %q: want IPv4 addresses", text)
			}
			o.Local = append(o.Local, a)
		}
		source, err := e.openImport(cmd.Context(), from, &o)
		if err != nil {
			return err
		}
		imported, err := nft.Import(source, o)
		if err := errors.Join(err, source.close()); err != nil {
			return err
		}
		for _, other := range source.others {
			imported.Notes = append(imported.Notes, nft.Note{Why: "not among these: " + other + e.inNamespace(), Lost: true})
		}
		switch {
		case len(imported.File.Inside) == 0 || len(imported.File.Outside) == 0:
			err = errors.New("the rules do not tell which interfaces are inside and which are outside: name them with --inside and --outside")
		case imported.Lost():
			err = errFindings
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
