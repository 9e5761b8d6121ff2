// SPDX-License-Identifier: Apache-2.0

// Package fleet compares the nodes of a fleet: what is wrong on which of them, and where one
// differs from the others. Of each node only what is compared is kept; its facts are judged and
// let go.
package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/words/schema"
)

// Kind and Version are what a Node says of itself as JSON (package schema).
const (
	Kind    = "node"
	Version = 1
)

// Node is what one machine of a fleet is compared by.
type Node struct {
	Name string `json:"hostname"`
	// At is when the youngest of the facts was taken.
	At         time.Time `json:"time"`
	Namespaces int       `json:"namespace_count"`
	Findings   []Finding `json:"findings"`
	// Configuration is what nodes that do the same work have in common, of the host's namespace: what it is -> its value.
	Configuration map[string]string `json:"configuration"`
	// Unjudged are the codes of causes that could not be judged somewhere on the node.
	Unjudged []string `json:"unjudged_codes,omitempty"`
}

// Finding is a finding of one namespace of a node, in short.
type Finding struct {
	Code      string          `json:"code"`
	Severity  causes.Severity `json:"severity"`
	Title     string          `json:"title"`
	Namespace string          `json:"netns"` // as natkit monitor calls it: host, a container, a name
	// Since is when natkit monitor first saw it; facts of one window do not show that.
	Since time.Time `json:"since,omitzero"`
}

// worst is the severity of the worst finding, 0 without one.
func (n *Node) worst() (s causes.Severity) {
	for _, f := range n.Findings {
		s = max(s, f.Severity)
	}
	return s
}

// Judging makes a Node of the facts of its namespaces, one after the other.
type Judging struct {
	machine causes.Machine
	node    Node
}

// Add judges the next namespace.
func (j *Judging) Add(s *snapshot.Snapshot) {
	n := &j.node
	if n.Namespaces == 0 || s.Netns.Init || s.Netns.Name == "" {
		n.Name, n.Configuration = s.Host.Hostname, snapshot.Comparable(s)
	}
	n.Namespaces++
	if s.TakenAt.After(n.At) {
		n.At = s.TakenAt
	}
	found := j.machine.Judge(s)
	n.add(found, s.Netns.Title())
	for _, u := range causes.NotJudged(s, found) {
		if !slices.Contains(n.Unjudged, u.Code) {
			n.Unjudged = append(n.Unjudged, u.Code)
		}
	}
}

// add takes findings with those folded under them: on another node they may stand alone.
func (n *Node) add(found []causes.Finding, namespace string) {
	for _, f := range found {
		n.Findings = append(n.Findings, Finding{Code: f.Code, Severity: f.Severity, Title: f.Title, Namespace: namespace})
		n.add(f.Consequences, namespace)
	}
}

// Node is the whole of it.
func (j *Judging) Node() *Node {
	j.node.Findings = append([]Finding{}, j.node.Findings...)
	return &j.node
}

// Limits of a node's JSON: beyond these it is no node but an attempt to use up memory.
const (
	maxNodeBytes = 16 << 20
	maxFindings  = 20000
	maxValues    = 100000
	// mostCommas bounds what it takes to read it: of two bytes each becomes a finding of some eighty.
	mostCommas = 1 << 19
)

// Marshal is a node as JSON in one line.
func Marshal(n *Node) ([]byte, error) {
	b, err := json.Marshal(n)
	return schema.Put(schema.Name(Kind, Version), b), err
}

var (
	errTooMuch = errors.New("it holds more than a machine can have")
	errNotOurs = errors.New("it is not as natkit monitor writes it")
)

// load reads what Marshal wrote, from whatever source, and makes all texts safe to print.
func load(r io.Reader) (*Node, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxNodeBytes+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxNodeBytes {
		return nil, fmt.Errorf("longer than %d MiB", maxNodeBytes>>20)
	}
	if bytes.Count(b, []byte{','}) > mostCommas {
		return nil, errTooMuch
	}
	n, cut := &Node{}, errors.New("it is no JSON, or cut off")
	name, err := schema.Of(b)
	if err != nil {
		return nil, cut
	}
	if _, version, _ := schema.Parse(name); version > Version {
		return nil, fmt.Errorf("it is %q, this natkit reads %q: use a newer natkit", name, schema.Name(Kind, Version))
	}
	if err := json.Unmarshal(b, n); err != nil {
		if _, ok := errors.AsType[*json.SyntaxError](err); ok {
			return nil, cut
		}
		return nil, errNotOurs
	}
	if len(n.Findings) > maxFindings || len(n.Configuration) > maxValues || n.Namespaces < 0 {
		return nil, errTooMuch
	}
	// Without a severity the report of the whole fleet could not be written.
	if slices.ContainsFunc(n.Findings, func(f Finding) bool { return f.Severity == 0 }) {
		return nil, errNotOurs
	}
	n.clean()
	return n, nil
}

func (n *Node) clean() {
	n.Name = snapshot.CleanText(n.Name)
	for i := range n.Findings {
		f := &n.Findings[i]
		f.Code, f.Title, f.Namespace = snapshot.CleanText(f.Code), snapshot.CleanText(f.Title), snapshot.CleanText(f.Namespace)
	}
	clean := make(map[string]string, len(n.Configuration))
	for what, value := range n.Configuration {
		clean[snapshot.CleanText(what)] = snapshot.CleanText(value)
	}
	n.Configuration = clean
	for i := range n.Unjudged {
		n.Unjudged[i] = snapshot.CleanText(n.Unjudged[i])
	}
	slices.Sort(n.Unjudged)
	n.Unjudged = slices.Compact(n.Unjudged)
}
