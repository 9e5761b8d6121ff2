// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strconv"

	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// EngineNote says beside facts of the kernel what natkit's own engine has to do with them.
type EngineNote struct {
	Kind     string `json:"engine"` // ebpf, nft, accel
	Sessions uint64 `json:"sessions,omitempty"`
	// Entries is how many of the entries shown rules of natkit translate, of engine nft.
	Entries *uint64  `json:"entries,omitempty"`
	Note    string   `json:"note"`
	See     []string `json:"see"` // commands

	labels bool // entries that rules of natkit translate have its label
}

// NewEngineNote is about an engine and the table of connection tracking, nil for none. table
// is what was counted of it, nil where nothing was; ref names the namespace.
func NewEngineNote(e *snapshot.Engine, table *snapshot.Table, ref string) *EngineNote {
	if e == nil {
		return nil
	}
	n := &EngineNote{Kind: e.Kind}
	switch {
	case e.Accelerates():
		n.See = []string{shell.Natkit(ref, "accel", "status")}
		n.Note = "natkit accel forwards established flows before the kernel stack; their entries are in this table"
	case e.InNftables():
		n.labels = true
		n.See = []string{shell.Natkit(ref, "rules"), shell.Natkit(ref, "conntrack", "list", "-o", "json")}
		n.Note = "natkit's engine nft translates here: its sessions are entries of this table, with label " + strconv.Itoa(nft.LabelBit)
		if table != nil {
			n.Entries = &table.Labelled
			n.Note += fmt.Sprintf(" (%d of %s)", table.Labelled, plural.Count(table.Entries, "entry"))
		}
	default:
		n.Sessions, n.See = e.Sessions, []string{shell.Natkit(ref, "sessions"), shell.Natkit(ref, "mappings")}
		n.Note = fmt.Sprintf("the eBPF engine translates here: %s that this table does not contain", plural.Count(e.Sessions, "session"))
	}
	return n
}

// NewHooksNote is about an engine and the hooks of netfilter, nil where all packets come to them.
func NewHooksNote(e *snapshot.Engine, ref string) *EngineNote {
	switch {
	case e == nil || e.InNftables():
		return nil
	case e.Accelerates():
		return &EngineNote{Kind: e.Kind, Note: "packets that natkit accel forwards bypass these hooks", See: []string{shell.Natkit(ref, "accel", "status")}}
	}
	return &EngineNote{Kind: e.Kind, Sessions: e.Sessions, Note: "packets that the eBPF engine translates bypass these hooks", See: []string{shell.Natkit(ref, "status")}}
}

// Line is the note in one line, with where to look.
func (n *EngineNote) Line() string {
	line := n.Note + ": "
	for i, command := range n.See {
		if i > 0 {
			line += ", "
		}
		line += "`" + command + "`"
	}
	return line + "\n"
}

// text writes the line, nothing without a note.
func (n *EngineNote) text(w io.Writer) error {
	if n == nil {
		return nil
	}
	_, err := io.WriteString(w, n.Line())
	return err
}
