// SPDX-License-Identifier: Apache-2.0

// Package lab makes small networks of namespaces in which NAT is shown, broken,
// cured and measured: clients, a NAT node, a server.
//
// A topology is a file that turns [Options] into a plan (values, with a drawing);
// [Up] makes what the plan says, by netlink, and undoes all of it when a step
// fails or the context ends. A journal in the run directory names each thing
// before it exists, so that what a killed process left is removed by the next
// [Up] or by [DownAll], and nothing else is. Nothing outside the lab's own
// namespaces is touched.
package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/words/choice"
)

// The roles of nodes. Further clients are client2, client3 ...
const (
	RoleClient    = "client"
	RoleLAN       = "lan" // the switch between several clients and the NAT node
	RoleGateway   = "gateway"
	RoleServer    = "server"
	RoleHost      = "host"
	RoleContainer = "container"
)

// Lab is a lab that is up. Its methods may be called from several goroutines,
// except Down and Close.
type Lab struct {
	name  string
	plan  plan
	nodes []*Node
	notes []string

	// ctx ends with the lab: what runs in this process on its behalf ends then.
	ctx    context.Context
	cancel context.CancelFunc
	// journal is held, and so locked, as long as the lab is owned; nil otherwise.
	journal *journal.Journal
}

// Up makes a lab. What labs of dead processes left is removed first.
func Up(ctx context.Context, topology string, o Options) (*Lab, error) {
	p, err := newPlan(topology, o)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab needs root: it makes network namespaces")
	}
	for {
		l := &Lab{plan: p, notes: removeRemains()}
		j, err := l.claim()
		if err != nil {
			return nil, err
		}
		l.ctx, l.cancel = context.WithCancel(context.Background())
		if err := l.build(ctx, j); err != nil {
			l.release()
			down := takeDown(j)
			// A natkit with a run folder of its own, whose labs are not known here, was
			// faster: a name that nobody asked for may as well be another.
			if p.options.Name == "" && errors.As(err, new(netnsTakenError)) && down == nil && ctx.Err() == nil {
				continue
			}
			return nil, errors.Join(fmt.Errorf("lab %q: %w", l.name, err), down)
		}
		if p.options.Owned {
			l.journal = j
			return l, nil
		}
		return l, j.Close()
	}
}

// claim takes the lab's name, or finds one, by making its journal.
func (l *Lab) claim() (*journal.Journal, error) {
	if name := l.plan.options.Name; name != "" {
		j, err := claimName(name, l.plan)
		l.name = name
		return j, err
	}
	for n := 1; ; n++ {
		name := l.plan.topology
		if n > 1 {
			name = fmt.Sprintf("%s-%d", name, n)
		}
		taken, err := l.plan.namespaceTaken(name)
		if err != nil {
			return nil, err
		}
		if taken != "" {
			continue
		}
		j, err := claimName(name, l.plan)
		if errors.As(err, new(nameTakenError)) {
			continue
		}
		l.name = name
		return j, err
	}
}

// namespaceTaken returns a namespace that has a name this lab would need.
func (p plan) namespaceTaken(lab string) (string, error) {
	list, err := netns.List()
	if err != nil {
		return "", err
	}
	for _, n := range p.nodes {
		name := netnsName(lab, n.role)
		if slices.ContainsFunc(list, func(have netns.Named) bool { return have.Name == name }) {
			return name, nil
		}
	}
	return "", nil
}

func netnsName(lab, role string) string { return lab + "-" + role }

// Plan returns what Up would make, one thing a line, without making it.
func Plan(topology string, o Options) ([]string, error) {
	p, err := newPlan(topology, o)
	if err != nil {
		return nil, err
	}
	name := o.Name
	if name == "" {
		name = topology
	}
	return p.steps(name), nil
}

// Open opens a lab that is up, whoever made it. Close it after use; Down ends the
// lab itself.
func Open(name string) (*Lab, error) {
	if !validName.MatchString(name) {
		return nil, fmt.Errorf("lab %q: not a valid name", name)
	}
	r, err := readRecords(journalPath(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, notThere(name)
	}
	if err != nil {
		return nil, err
	}
	if !r.complete || !r.thisBoot() {
		return nil, fmt.Errorf("lab %q: not up: it is being created, or a killed process left it (natkit lab down %s)", name, name)
	}
	p, err := newPlan(r.header.Topology, r.header.Options)
	if err != nil {
		return nil, fmt.Errorf("lab %q: %w", name, err)
	}
	l := &Lab{name: name, plan: p}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for _, n := range p.nodes {
		h, err := r.openNetns(netnsName(name, n.role))
		if err != nil {
			l.release()
			return nil, fmt.Errorf("lab %q: %w", name, err)
		}
		l.nodes = append(l.nodes, &Node{Role: n.role, Netns: h.Name(), Addr: n.addr, handle: h, lab: l})
	}
	return l, nil
}

func notThere(name string) error {
	all, _ := names()
	if near := choice.Nearest(name, all); near != "" {
		return fmt.Errorf("lab %q: there is none; did you mean %s?", name, near)
	}
	return fmt.Errorf("lab %q: there is none (see natkit lab list)", name)
}

// Down removes the lab: servers, namespaces and all that is in them. A lab that
// is gone is no error.
func (l *Lab) Down() error {
	l.release()
	if j := l.journal; j != nil {
		l.journal = nil
		return takeDown(j)
	}
	return downByName(l.name, whatever)
}

// Close gives up what this process holds of the lab, which stays up, unless it is
// owned by this process: then it is removed.
func (l *Lab) Close() error {
	if l.journal != nil {
		return l.Down()
	}
	l.release()
	return nil
}

func (l *Lab) release() {
	l.cancel()
	for _, n := range l.nodes {
		n.handle.Close()
	}
	l.nodes = nil
}

// Name is the lab's name.
func (l *Lab) Name() string { return l.name }

// Topology is the name it was made with.
func (l *Lab) Topology() string { return l.plan.topology }

// Options are the lab's, with every default filled in.
func (l *Lab) Options() Options { return l.plan.options }

// Notes are sentences for the user: what this kernel lacks of the real case, and
// what was cleaned up on the way.
func (l *Lab) Notes() []string { return l.notes }

// Rules are the NAT node's rules where natkit put them in (RulesNft): none where
// somebody's programs did, or nobody.
func (l *Lab) Rules() nft.Ruleset {
	if l.plan.options.Rules != RulesNft {
		return nil
	}
	return slices.Clone(l.plan.rules.nft)
}

// Drawing is the topology with its addresses in box characters, with a newline at
// its end.
func (l *Lab) Drawing() string { return l.plan.drawing }

// Nodes returns all nodes.
func (l *Lab) Nodes() []*Node { return l.nodes }

// Node returns the node of a role, nil if there is none. A client on the host
// itself has the host's node.
func (l *Lab) Node(role string) *Node {
	if role == RoleClient && l.plan.options.LocalClient {
		role = RoleHost
	}
	for _, n := range l.nodes {
		if n.Role == role {
			return n
		}
	}
	return nil
}

// NATNode is where NAT and connection tracking happen: the gateway or the host.
func (l *Lab) NATNode() *Node { return l.Node(l.plan.natRole) }

// ServerNode is behind the NAT: the server or the container.
func (l *Lab) ServerNode() *Node { return l.Node(l.plan.serverRole) }

// URL leads from a client to the server through the NAT.
func (l *Lab) URL() string { return l.plan.url }

// DirectURL is the baseline without NAT: in published the same server on the host
// itself, in routed the same URL, which means something else only without rules.
func (l *Lab) DirectURL() string { return l.plan.directURL }
