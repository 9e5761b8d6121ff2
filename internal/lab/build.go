// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
)

// beforeStep lets a test make any step fail.
var beforeStep func(what string) error

// build makes what the plan says, in its order. What must be undone is in the
// journal before it exists; links, routes and rules end with their namespaces.
func (l *Lab) build(ctx context.Context, j *journal.Journal) error {
	step := func(what string, do func() error) error {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if beforeStep != nil {
			if err := beforeStep(what); err != nil {
				return err
			}
		}
		if err := do(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	p := l.plan
	for _, n := range p.nodes {
		if err := step("make node "+n.role, func() error { return l.addNode(n, j) }); err != nil {
			return err
		}
	}
	for _, b := range p.bridges {
		if err := step("make bridge "+b.role+"/"+b.name, func() error { return l.addBridge(b) }); err != nil {
			return err
		}
	}
	for _, link := range p.links {
		if err := step(fmt.Sprintf("make link %s -- %s", link.a, link.b), func() error { return l.addLink(link) }); err != nil {
			return err
		}
	}
	if err := step("wait for links", func() error { return l.awaitLinks(ctx) }); err != nil {
		return err
	}
	for _, r := range p.routes {
		if err := step("route "+r.role, func() error { return l.addRoute(r) }); err != nil {
			return err
		}
	}
	for _, o := range p.owned {
		if err := step("addresses of "+o.role, func() error { return l.mustNode(o.role).Do(func() error { return Own(o.network) }) }); err != nil {
			return err
		}
	}
	if err := step("set NAT rules in "+p.natRole, func() error { return l.addRules(ctx) }); err != nil {
		return err
	}
	if p.options.Server != ServerNone {
		for _, at := range p.listen {
			what := fmt.Sprintf("start web server in %s", at.role)
			if err := step(what, func() error { return l.startServer(ctx, at, j) }); err != nil {
				return err
			}
		}
	}
	return step("finish", func() error { return j.Append(record{Complete: true}) })
}

// addNode makes a namespace. It exists without a name first, so that the journal
// knows exactly which one the name will stand for.
func (l *Lab) addNode(n nodePlan, j *journal.Journal) error {
	h, err := netns.New()
	if err != nil {
		return err
	}
	node := &Node{Role: n.role, Netns: netnsName(l.name, n.role), Addr: n.addr, handle: h, lab: l}
	l.nodes = append(l.nodes, node) // closed by release from here on
	id, err := h.ID()
	if err != nil {
		return err
	}
	if err := j.Append(record{Netns: &netnsRecord{Name: node.Netns, ID: id}}); err != nil {
		return err
	}
	if err := h.Pin(node.Netns); err != nil {
		if errors.Is(err, os.ErrExist) {
			return netnsTakenError{node.Netns}
		}
		return err
	}
	for _, s := range n.sysctls {
		err := node.Sysctl(s.key, s.value)
		if s.optional && errors.Is(err, os.ErrNotExist) {
			if s.note != "" {
				l.notes = append(l.notes, s.note)
			}
			continue
		}
		if err != nil {
			return err
		}
	}
	return node.Do(func() error { return setUp("lo", "", end{}.addr) })
}

func (l *Lab) addBridge(b bridgePlan) error {
	return l.mustNode(b.role).Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = b.name
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			return err
		}
		return setUp(b.name, "", b.addr)
	})
}

func (l *Lab) addLink(p linkPlan) error {
	a, b := l.mustNode(p.a.role), l.mustNode(p.b.role)
	if err := a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = p.a.name
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: p.b.name, PeerNamespace: netlink.NsFd(b.handle.Fd())}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return setUp(p.a.name, p.a.master, p.a.addr)
	}); err != nil {
		return err
	}
	return b.Do(func() error { return setUp(p.b.name, p.b.master, p.b.addr) })
}

// awaitLinks waits until both ends of every link carry packets. A bridge does not
// forward on a port before the kernel's link watch has seen its carrier, which
// takes up to a second; a first packet lost there would cost a SYN retransmission.
func (l *Lab) awaitLinks(ctx context.Context) error {
	for _, p := range l.plan.links {
		for _, e := range []end{p.a, p.b} {
			if err := l.mustNode(e.role).Do(func() error { return awaitUp(ctx, e.name) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *Lab) addRoute(r routePlan) error {
	return l.mustNode(r.role).Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Gw: r.via.AsSlice()})
	})
}

// Own makes every address of a network one of the calling thread's namespace, by one route:
// sockets can have it, and neighbours get an answer.
func Own(network netip.Prefix) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.RouteReplace(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: &net.IPNet{IP: network.Addr().AsSlice(), Mask: net.CIDRMask(network.Bits(), 32)},
		Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	}); err != nil {
		return fmt.Errorf("own %s: %w", network, err)
	}
	return nil
}

// addRules puts the NAT rules in.
func (l *Lab) addRules(ctx context.Context) error {
	switch r := l.plan.options.Rules; r {
	case RulesNone:
		return nil
	case RulesNft:
		return l.plan.rules.nft.Apply(l.NATNode().Handle())
	default:
		return l.NATNode().RestoreIPTables(ctx, r, l.plan.rules.restore)
	}
}

// RestoreIPTables puts rules in, in the form of iptables-save(8), by the programs
// of a rule set, RulesIPTables or RulesIPTablesLegacy. They get them as one file,
// and no lock file: theirs is outside the lab, and nobody else is in the namespace.
func (n *Node) RestoreIPTables(ctx context.Context, by RuleSet, rules string) error {
	program := "iptables-nft-restore"
	if by == RulesIPTablesLegacy {
		program = "iptables-legacy-restore"
	}
	path, err := lookPath(program)
	if err != nil {
		return &MissingProgramError{program}
	}
	cmd := n.Command(ctx, path)
	cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE=/dev/null")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// MissingProgramError is a rule set whose program is not on this machine.
type MissingProgramError struct{ Program string }

func (e *MissingProgramError) Error() string {
	return e.Program + " is not installed: install iptables, or use --rules nft, which needs no program"
}

// mustNode is for roles that the plan itself names.
func (l *Lab) mustNode(role string) *Node {
	for _, n := range l.nodes {
		if n.Role == role {
			return n
		}
	}
	panic("lab: the plan names no node " + role)
}

// sbin is where a user's PATH often does not lead. A test points it elsewhere.
var sbin = "/usr/sbin"

func lookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return exec.LookPath(filepath.Join(sbin, program))
	}
	return path, nil
}
