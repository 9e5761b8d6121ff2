// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"

	"natkit/internal/lab"
	"natkit/internal/words/shell"
)

// LabUp describes a lab that has just been made, and what to do with it.
func LabUp(w io.Writer, l *lab.Lab) error {
	o := l.Options()
	var b strings.Builder
	fmt.Fprintf(&b, "lab %s is up (topology %s, NAT rules %s, web server %s)\n\n", l.Name(), l.Topology(), o.Rules, o.Server)
	b.WriteString(l.Drawing())

	tab := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tab, "\nrole\tnetwork namespace\taddress\n")
	for _, n := range l.Nodes() {
		fmt.Fprintf(tab, "%s\t%s\t%s\n", n.Role, n.Netns, addrOrDash(n.Addr))
	}
	tab.Flush()

	client := l.Node(lab.RoleClient)
	if o.Server != lab.ServerNone {
		b.WriteByte('\n')
		if o.Rules != lab.RulesNone {
			fmt.Fprintf(&b, "through the NAT:  %s\n", l.URL())
		}
		if o.Rules == lab.RulesNone || l.DirectURL() != l.URL() {
			fmt.Fprintf(&b, "without NAT:      %s\n", l.DirectURL())
		}
	}
	next := func(words ...string) { b.WriteString("  " + shell.Natkit("", words...) + "\n") }
	b.WriteString("\nnext:\n")
	if o.Server != lab.ServerNone {
		url := l.URL()
		if o.Rules == lab.RulesNone {
			url = l.DirectURL()
		}
		next("lab", "exec", l.Name(), client.Role, "--", "curl", url)
		next("bench", "http", "--netns", client.Netns, "-c", "100", "-n", "10000", url)
	}
	next("conntrack", "stats", "--netns", l.NATNode().Netns)
	next("doctor", "--netns", l.NATNode().Netns)
	next("lab", "down", l.Name())
	_, err := io.WriteString(w, b.String())
	return err
}

// Labs is what natkit lab list prints with -o json.
type Labs struct {
	Labs []lab.Info `json:"labs"`
}

// LabPlan is what natkit lab up and down would do.
type LabPlan struct {
	Plan []string `json:"plan"` // one step a line
}

// LabList writes one line for each lab. The namespace of a role is LAB-ROLE.
func LabList(w io.Writer, infos []lab.Info) error {
	if len(infos) == 0 {
		_, err := fmt.Fprintln(w, "no lab")
		return err
	}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tab, "lab\ttopology\tstate\tPID\trules\tserver\tURL\troles\n")
	for _, i := range infos {
		var roles []string
		for _, n := range i.Nodes {
			roles = append(roles, n.Role)
		}
		fmt.Fprintf(tab, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n",
			i.Name, i.Topology, i.State, i.PID, i.Rules, i.Server, i.URL, strings.Join(roles, " "))
	}
	return tab.Flush()
}

// LabsDown is what natkit lab down did.
type LabsDown struct {
	Down  []string `json:"down"`   // names
	InUse []string `json:"in_use"` // why a lab was left alone
}

// Text names the labs that are down.
func (r LabsDown) Text(w io.Writer) error {
	for _, name := range r.Down {
		if _, err := fmt.Fprintf(w, "lab %s is down\n", name); err != nil {
			return err
		}
	}
	return nil
}

// addrOrDash stands for a node without address, a switch.
func addrOrDash(a netip.Addr) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}
