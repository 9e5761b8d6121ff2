// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"

	"natkit/internal/snapshot"
)

// blocksShare is the share of a pool's port blocks in use when a warning is due.
const blocksShare = 0.8

var portBlocksExhausted = Cause{
	Code:     "port-blocks-exhausted",
	Title:    "A pool has few or no port blocks left",
	Headline: "New subscribers get no port: the CGNAT pool has no port block left",
	Search: []string{
		"no-block",
		"port block allocation failed",
		"CGNAT pool exhausted",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{level(blocksShare, "of the port blocks of a pool in use")},
	Explains:      []string{"snat-ports-exhausted"},
	Needs:         []string{snapshot.CanEngine},
	Symptom:       "Subscribers that have no session yet, or need another block, cannot open connections. Those with free ports in their blocks notice nothing.",
	Proof:         "The eBPF engine refused packets during the window because the external address of their subscriber has no port block left. Without refusals, the share of a pool's blocks in use is a warning.",
	FalsePositive: "A pool below that share. Subscribers that have used up their own blocks while the pool has others are engine-source-limit or port-block-too-small.",
	Cure:          "Add external addresses to the pool. If subscribers use a small part of their blocks, give smaller ones: sessions continue, and blocks in use keep their size until their subscriber is idle.",
	judge:         judgePortBlocks,
}

func judgePortBlocks(f facts) *verdict {
	if f.Engine == nil {
		return nil
	}
	lost := f.counted("no-block")
	var p *snapshot.EnginePool
	for i := range f.Engine.Pools {
		q := &f.Engine.Pools[i]
		if q.BlockSize > 0 && (p == nil || q.Refused["no-block"] > p.Refused["no-block"]) {
			p = q
		}
	}
	if p == nil {
		return nil
	}
	counted := f.countedEvidence("no-block")
	if n := p.Refused["no-block"]; float64(n) < countedMost*float64(lost) && n > 0 {
		counted = append(counted, Evidence{"of them, of pool " + p.Name, fmt.Sprint(n), "natkit subscribers"})
		lost = n
	}
	v := &verdict{impact: float64(lost)}
	all := saturate(p.BlocksUsed, p.BlocksFree)
	switch {
	case lost > 0:
		v.Severity = Critical
		v.Title = fmt.Sprintf("pool %s has too few port blocks: the engine dropped %s %s", p.Name, number(lost, "packet"), f.window())
	case all > 0 && share(p.BlocksUsed, all) >= f.full(blocksShare):
		v.Severity = Warning
		v.impact = share(p.BlocksUsed, all)
		v.Title = fmt.Sprintf("pool %s has %d of %d port blocks left", p.Name, p.BlocksFree, all)
	default:
		return nil
	}
	v.Evidence = append(f.engineEvidence(), counted...)
	v.Evidence = append(v.Evidence,
		Evidence{"port blocks of pool " + p.Name, fmt.Sprintf("%d used, %d of %d ports free", p.BlocksUsed, p.BlocksFree, p.BlockSize), "natkit status"},
		Evidence{"subscribers of the pool", fmt.Sprintf("%d, with %s in use or in hold-down", p.Subscribers, number(p.Taken, "port")), "natkit subscribers"})
	v.Why = "A subscriber gets a port block with its first session and another one when it is full. Who finds no free block is refused new sessions; open ones continue."
	v.Remedy = f.moreBlocks(p)
	v.Verify = f.look(f.natkit("status"))
	return v
}

// moreBlocks is what gives a pool blocks: smaller ones where subscribers use few of their ports,
// else more addresses.
func (f facts) moreBlocks(p *snapshot.EnginePool) []string {
	mean := p.Taken / max(p.BlocksUsed, 1)
	size := min(max(powerOfTwo(float64(4*mean)), smallestBlock), p.BlockSize/2)
	if line := p.Lines["size"]; line > 0 && size >= smallestBlock && 4*mean <= p.BlockSize/2 {
		return []string{
			fmt.Sprintf("# a block of %d ports has %s taken on average; smaller blocks are enough for more subscribers. Sessions continue:", p.BlockSize, number(mean, "port")),
			setKey(line, "size", p.BlockSize, size, f.Engine.File), f.apply(),
		}
	}
	return []string{
		"# which subscribers have most blocks?", f.natkit("subscribers --by blocks --pool " + p.Name),
		fmt.Sprintf("# all need their blocks: add external addresses to pool %s in %s, and apply it. Sessions continue", p.Name, f.Engine.File),
	}
}

// smallestBlock and largestBlock are the sizes that a rule file can give.
const smallestBlock, largestBlock = 64, 4096

// setKey writes another number for a key on a line of the rule file.
func setKey(line int, key string, from, to uint64, file string) string {
	return fmt.Sprintf("sed -i -E '%ds/\\b%s: *%d\\b/%s: %d/' %s", line, key, from, key, to, quote(file))
}
