// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

// Report is what is wrong in a fleet, outliers first.
type Report struct {
	NodeCount int       `json:"node_count"` // that were read
	First     time.Time `json:"first_time,omitzero"`
	Last      time.Time `json:"last_time,omitzero"` // when the oldest and the youngest facts were taken
	// Causes are in the order in which to look at them: first those of few nodes, then those of many.
	Causes []Cause `json:"causes"`
	// Differences are what few nodes have configured otherwise than most.
	Differences []Difference `json:"differences"`
	// Nodes are those with a finding or a difference, those with most outliers first.
	Nodes []NodeSummary `json:"nodes"`
	// Unread are files and URLs of which no node could be read.
	Unread []Unread `json:"unread"`
	// Unjudged are how many nodes could not judge a cause, by its code.
	Unjudged map[string]int `json:"by_unjudged_code"`
}

// Cause is one cause and where it is at work.
type Cause struct {
	Code      string          `json:"code"`
	Title     string          `json:"title"` // of the cause, without numbers
	Severity  causes.Severity `json:"severity"`
	NodeCount int             `json:"node_count"`
	// Outlier says that few nodes have it: look at what these do otherwise. What many have is
	// the fleet's own.
	Outlier bool       `json:"outlier"`
	Since   time.Time  `json:"since,omitzero"` // the earliest that a monitor saw it
	On      []Sighting `json:"found_on"`       // the worst first
}

// Sighting is a finding on a node.
type Sighting struct {
	Node string `json:"hostname"`
	Finding
}

// Difference is something that few nodes have otherwise.
type Difference struct {
	What  string `json:"what"` // "setting net.ipv4.ip_forward", "rules of nft ip filter"
	Most  string `json:"most"` // the value of most, "" where they do not have it
	Nodes int    `json:"nodes_with_it_count"`
	// Others are the nodes with another value, "" where they do not have it.
	Others []OtherValue `json:"others"`
}

// OtherValue is the value on a node.
type OtherValue struct {
	Node  string `json:"hostname"`
	Value string `json:"node_value"`
}

// NodeSummary is one node in short.
type NodeSummary struct {
	Node     string          `json:"hostname"`
	Input    string          `json:"input"` // the file or URL
	At       time.Time       `json:"time"`
	Findings int             `json:"finding_count"`
	Worst    causes.Severity `json:"worst_severity,omitzero"`
	// Outliers is how many findings and differences it has that few others have.
	Outliers    int `json:"outlier_count"`
	Differences int `json:"difference_count"`
}

// Unread is a file or URL without a node, and why.
type Unread struct {
	Input  string `json:"input"`
	Reason string `json:"reason"`
}

const (
	// fewOf: a cause that at most one in so many nodes has is an outlier, and so is that of a single
	// node of at least leastNodes.
	fewOf      = 10
	leastNodes = 3
	// most: a value is that of most nodes from this share on.
	most = 2. / 3
)

// few says whether so many of all nodes are outliers.
func few(nodes, all int) bool { return nodes*fewOf <= all || nodes == 1 && all >= leastNodes }

// Gather collects nodes for a Report.
type Gather struct {
	nodes  []*gathered
	unread []Unread
}

type gathered struct {
	*Node
	summary NodeSummary
}

// Add takes the next input.
func (g *Gather) Add(in Input) {
	in.Name = snapshot.CleanText(in.Name) // it may stand in a list of targets that somebody else made
	if in.Err != nil {
		g.unread = append(g.unread, Unread{in.Name, in.Err.Error()})
		return
	}
	g.nodes = append(g.nodes, &gathered{Node: in.Node, summary: NodeSummary{
		Input: in.Name, At: in.Node.At, Findings: len(in.Node.Findings), Worst: in.Node.worst()}})
}

// Report compares the nodes. The order in which they came does not matter.
func (g *Gather) Report() *Report {
	g.name()
	r := &Report{NodeCount: len(g.nodes), Causes: []Cause{}, Differences: []Difference{}, Nodes: []NodeSummary{}, Unread: append([]Unread{}, g.unread...), Unjudged: map[string]int{}}
	slices.SortFunc(r.Unread, func(a, b Unread) int { return strings.Compare(a.Input, b.Input) })
	for _, n := range g.nodes {
		if r.First.IsZero() || !n.At.IsZero() && n.At.Before(r.First) {
			r.First = n.At
		}
		if n.At.After(r.Last) {
			r.Last = n.At
		}
		for _, code := range n.Unjudged {
			r.Unjudged[code]++
		}
	}
	g.causes(r)
	g.differences(r)
	for _, n := range g.nodes {
		if n.summary.Findings+n.summary.Differences > 0 {
			r.Nodes = append(r.Nodes, n.summary)
		}
	}
	slices.SortFunc(r.Nodes, func(a, b NodeSummary) int {
		return cmp.Or(cmp.Compare(b.Outliers, a.Outliers), cmp.Compare(b.Worst, a.Worst), cmp.Compare(b.Findings, a.Findings), strings.Compare(a.Node, b.Node))
	})
	return r
}

// name gives each node a name of its own: several machines may be called localhost.
func (g *Gather) name() {
	slices.SortFunc(g.nodes, func(a, b *gathered) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.summary.Input, b.summary.Input))
	})
	times := map[string]int{}
	for _, n := range g.nodes {
		times[n.Name]++
	}
	for _, n := range g.nodes {
		n.summary.Node = n.Name
		if n.Name == "" || times[n.Name] > 1 {
			n.summary.Node = strings.TrimSpace(n.Name + " (" + n.summary.Input + ")")
		}
	}
}

// causes puts the findings of all nodes in order.
func (g *Gather) causes(r *Report) {
	titles, rank := map[string]string{}, map[string]int{}
	for i, c := range causes.Catalogue() {
		titles[c.Code], rank[c.Code] = c.Title, i
	}
	by, on := map[string]*Cause{}, map[string]map[*gathered]bool{}
	for _, n := range g.nodes {
		for _, f := range n.Findings {
			c := by[f.Code]
			if c == nil {
				c = &Cause{Code: f.Code, Title: cmp.Or(titles[f.Code], f.Title)}
				by[f.Code], on[f.Code] = c, map[*gathered]bool{}
			}
			c.On = append(c.On, Sighting{n.summary.Node, f})
			c.Severity = max(c.Severity, f.Severity)
			if !f.Since.IsZero() && (c.Since.IsZero() || f.Since.Before(c.Since)) {
				c.Since = f.Since
			}
			on[f.Code][n] = true
		}
	}
	for code, c := range by {
		c.NodeCount = len(on[code])
		if c.Outlier = few(c.NodeCount, r.NodeCount); c.Outlier {
			for n := range on[code] {
				n.summary.Outliers++
			}
		}
		slices.SortStableFunc(c.On, func(a, b Sighting) int {
			return cmp.Or(cmp.Compare(b.Severity, a.Severity), a.Since.Compare(b.Since), strings.Compare(a.Node, b.Node), strings.Compare(a.Namespace, b.Namespace))
		})
	}
	for _, c := range by {
		r.Causes = append(r.Causes, *c)
	}
	slices.SortFunc(r.Causes, func(a, b Cause) int {
		if a.Outlier != b.Outlier {
			return map[bool]int{true: -1, false: 1}[a.Outlier]
		}
		few := cmp.Compare(a.NodeCount, b.NodeCount)
		if !a.Outlier {
			few = -few
		}
		return cmp.Or(cmp.Compare(b.Severity, a.Severity), few, cmp.Compare(rank[a.Code], rank[b.Code]), strings.Compare(a.Code, b.Code))
	})
}

// valueOf is what a node has of one key.
type valueOf struct {
	node  *gathered
	value string
}

// differences finds what few nodes have configured otherwise than most.
func (g *Gather) differences(r *Report) {
	values := map[string][]valueOf{}
	for _, n := range g.nodes {
		for what, value := range n.Configuration {
			values[what] = append(values[what], valueOf{n, value})
		}
	}
	for what, have := range values {
		// Rules may be missing on a node. A setting that is not there may be of an interface that the
		// node does not have.
		if strings.HasPrefix(what, "rules of ") {
			for _, n := range g.nodes {
				if _, ok := n.Configuration[what]; !ok && len(n.Configuration) > 0 {
					have = append(have, valueOf{n, ""})
				}
			}
		}
		if len(have) < leastNodes {
			continue
		}
		count := map[string]int{}
		for _, v := range have {
			count[v.value]++
		}
		usual := slices.MaxFunc(slices.Sorted(maps.Keys(count)), func(a, b string) int { return cmp.Compare(count[a], count[b]) })
		others := len(have) - count[usual]
		if others == 0 || float64(count[usual]) < most*float64(len(have)) {
			continue
		}
		d := Difference{What: what, Most: usual, Nodes: count[usual]}
		for _, v := range have {
			if v.value == usual {
				continue
			}
			d.Others = append(d.Others, OtherValue{v.node.summary.Node, v.value})
			v.node.summary.Differences++
			if few(others, len(have)) {
				v.node.summary.Outliers++
			}
		}
		slices.SortFunc(d.Others, func(a, b OtherValue) int { return strings.Compare(a.Node, b.Node) })
		r.Differences = append(r.Differences, d)
	}
	slices.SortFunc(r.Differences, func(a, b Difference) int {
		return cmp.Or(cmp.Compare(len(a.Others), len(b.Others)), strings.Compare(a.What, b.What))
	})
}

// Worst is the severity of the worst finding of all nodes, 0 without one.
func (r *Report) Worst() (s causes.Severity) {
	for _, c := range r.Causes {
		s = max(s, c.Severity)
	}
	return s
}
