// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
)

// LabelBit: connections that the rules of a compiled rule file translate carry a label, by which they
// are distinguished from those that others translate, even in the same way: their entries outlive the
// rules by minutes, and the kernel goes on translating by them. A label is one of 128 bits
// that everybody may set; who deletes by it looks at the translation too.
const (
	LabelBit   = 110
	labelBytes = 16
)

// setLabel is ct label set, by the last registers, which no other word of a translation uses.
func setLabel() []expr.Any {
	label := make([]byte, labelBytes)
	binary.NativeEndian.PutUint32(label[LabelBit/32*4:], 1<<(LabelBit%32))
	return []expr.Any{
		&expr.Immediate{Register: unix.NFT_REG_4, Data: label},
		&expr.Ct{Key: expr.CtKeyLABELS, Register: unix.NFT_REG_4, SourceRegister: true},
	}
}

// label makes every rule that translates label the connection before.
func (c *compiler) label(facts Facts) {
	if !facts.Labels {
		c.warn(rulefile.Position{}, "connections are translated for as long as the kernel knows them, also after natkit down: it has no labels for single connections (CONFIG_NF_CONNTRACK_LABELS)")
		return
	}
	for i := range c.table.Chains {
		for j, r := range c.table.Chains[i].Rules {
			c.table.Chains[i].Rules[j] = labelling(r)
		}
	}
}

// labelling puts the label in front of what translates, with the registers that this loads.
func labelling(r Rule) Rule {
	for at, word := range r {
		switch word.(type) {
		case *expr.NAT, *expr.Masq:
		default:
			continue
		}
		for at > 0 {
			if _, loads := r[at-1].(*expr.Immediate); !loads {
				break
			}
			at--
		}
		return slices.Concat(r[:at], setLabel(), r[at:])
	}
	return r
}

// probeLabels is a table by which a kernel is asked whether it has labels.
func probeLabels() Ruleset {
	base := &Base{nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, nftables.ChainPolicyAccept}
	return Ruleset{{Name: "natkit_probe", Chains: []Chain{{Name: "probe", Base: base, Rules: []Rule{setLabel()}}}}}
}
