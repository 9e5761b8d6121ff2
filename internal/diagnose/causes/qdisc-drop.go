// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"math"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A full queue is how TCP learns what a line carries: it drops a little of
	// everything that is as fast as the line. What drops more is too short or too
	// slow for what comes.
	qdiscFew   = 10
	qdiscShare = 0.01 // of the packets to send: a warning
	qdiscMost  = 0.10 // critical
	// Queues that manage themselves drop early on purpose, to keep waiting short.
	activeShare = 0.05
)

// activeQueues keep their own length short by dropping (active queue management).
var activeQueues = map[string]bool{"fq_codel": true, "codel": true, "cake": true, "fq_pie": true, "pie": true, "red": true, "dualpi2": true}

var qdiscDrop = Cause{
	Code:     "qdisc-drop",
	Title:    "The queue of an interface drops packets before sending",
	Headline: "Slow uploads, packet loss under load: the qdisc drops (tc -s qdisc: dropped)",
	Search: []string{
		"tc -s qdisc: dropped",
		"reason: QDISC_DROP",
		"reason: QDISC_OVERLIMIT",
		"overlimits",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Thresholds: []Threshold{many(qdiscFew, "packets dropped by a queue"), portion(qdiscShare, "of the packets to send")},
	Needs:      []string{snapshot.CanQdiscs, snapshot.CanDrops, snapshot.CanInterfaces},
	Symptom:    "Uploads or downloads are slow and lossy, and ping times through the gateway vary with the load. The gateway's CPUs are idle.",
	Proof: fmt.Sprintf("The root queue of an interface dropped packets (QDISC_DROP and similar, the queue's own counter), at least %s of the packets to send there: a warning, from %s critical. Queues that drop early on purpose (fq_codel, cake) are allowed %s, and never get more than a warning. No counter of the interface or of IP shows it: Ip.OutTransmits counts what the queue drops.",
		percent.Whole(qdiscShare), percent.Whole(qdiscMost), percent.Whole(activeShare)),
	FalsePositive: "A line that TCP fills: the queue drops a packet now and then, and must.",
	Cure:          "Set a rate that the line carries, and a queue that holds a fifth of a second of it. Use a longer queue, or a fair queue instead of a short plain one. If the line itself is too slow, get a faster line.",
	judge:         judgeQdisc,
}

func judgeQdisc(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseQueue)
	tracedBy := map[string]uint64{}
	for _, row := range rows {
		tracedBy[row.Interface] = saturate(tracedBy[row.Interface], row.Count)
	}
	worst, lost := f.fullestQdisc(tracedBy)
	if lost < f.few(qdiscFew) {
		return nil
	}
	q := snapshot.Qdisc{Kind: "the queue"}
	sent := worst.TxPackets
	if worst.Qdisc != nil {
		q = *worst.Qdisc
		if q.Packets > 0 && q.Packets < implausible {
			sent = q.Packets
		}
	}
	part := share(lost, saturate(lost, sent))
	active := activeQueues[q.Kind]
	v := &verdict{impact: float64(lost)}
	switch {
	case active && part < activeShare:
		return nil
	case part < f.part(qdiscShare):
		v.Severity = Advice
	case part >= qdiscMost && !active:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s on %s dropped %s %s, %s of the packets to send", q.Kind, worst.Name, number(lost, "packet"), f.window(), percent.Whole(part))
	v.Evidence = qdiscEvidence(worst, q, sent, tracedBy[worst.Name], rows)
	v.Why = "The queue drops packets after they were forwarded and translated, and TCP senders retransmit them; other protocols lose them."
	v.Remedy, v.Settings = f.longerQdisc(worst, q, lost, sent)
	if v.Severity < Warning {
		for i := range v.Settings {
			v.Settings[i].If = "packets may wait longer there when the queue is full"
		}
	}
	v.Verify = f.look(f.run("tc -s qdisc show dev " + quote(worst.Name)))
	return v
}

// fullestQdisc is the interface whose queue dropped most.
func (f facts) fullestQdisc(tracedBy map[string]uint64) (worst snapshot.Interface, lost uint64) {
	for _, l := range f.links() {
		if l.Qdisc == nil && f.Can(snapshot.CanQdiscs) {
			continue // no queue to be full: what is dropped there finds no carrier
		}
		n := tracedBy[l.Name]
		if l.Qdisc != nil && l.Qdisc.Dropped < implausible {
			n = max(n, l.Qdisc.Dropped)
		}
		if n > lost {
			worst, lost = l, n
		}
	}
	return worst, lost
}

func qdiscEvidence(worst snapshot.Interface, q snapshot.Qdisc, sent, traced uint64, rows []snapshot.Drop) (out []Evidence) {
	if worst.Qdisc != nil {
		out = append(out, Evidence{"dropped by " + q.Kind + " of " + worst.Name, strconv.FormatUint(q.Dropped, 10), fromQdiscs},
			Evidence{"packets that it sent", strconv.FormatUint(sent, 10), fromQdiscs})
		if q.RateBytes > 0 {
			out = append(out, Evidence{"its rate", bitRate(q.RateBytes), fromQdiscs})
		}
		if q.LimitBytes > 0 {
			out = append(out, Evidence{"its length", amount(q.LimitBytes), fromQdiscs})
		}
	}
	if traced > 0 {
		out = append(out, Evidence{"packets dropped by a queue of " + worst.Name, strconv.FormatUint(traced, 10), fromTracer})
	}
	for _, row := range rows {
		if row.Interface == worst.Name && len(row.Samples) > 0 {
			out = append(out, Evidence{"one of them", row.Samples[0], fromTracer})
			break
		}
	}
	return out
}

// mostQueueLength is the longest queue that natkit makes.
const mostQueueLength = 1 << 17

// longerQdisc is how a queue of this kind gets to drop less.
func (f facts) longerQdisc(l snapshot.Interface, q snapshot.Qdisc, lost, sent uint64) (remedy []string, settings []snapshot.Setting) {
	dev := quote(l.Name)
	const stays = "# if it stays full the line is too slow; a fair queue then keeps one flow from delaying all others:"
	fair := f.run("tc qdisc replace dev " + dev + " root fq_codel")
	switch q.Kind {
	case "tbf":
		if q.RateBytes == 0 || q.RateBytes > 1<<50 {
			break
		}
		// What came is more than the rate by the share that was lost; a queue of a
		// fifth of a second lets bursts by.
		came := float64(q.RateBytes) * float64(saturate(lost, sent)) / math.Max(1, float64(sent))
		rate := uint64(math.Min(came*1.2, 1<<50))
		limit := max(rate/5, 4*min(q.LimitBytes, 1<<40))
		burst := max(q.BurstBytes, rate/250, 2*uint64(max(l.MTU, 0))) // 4 ms: what a timer of 250 Hz lets by at once
		return []string{
			fmt.Sprintf("# %s arrived where the shaper lets %s pass. If the line carries that, raise the rate, with room for bursts:", bitRate(uint64(math.Min(came, 1<<50))), bitRate(q.RateBytes)),
			f.run(fmt.Sprintf("tc qdisc replace dev %s root tbf rate %dkbit burst %d limit %d", dev, max(1, rate*8/1000), burst, limit)),
			"# if not, no queue helps: send less traffic, or get a faster line. See which flows send the most:",
			f.natkit("conntrack top"),
		}, nil
	case "pfifo", "bfifo":
		return []string{
			"# its length is the limit that it was made with, not txqueuelen: see that limit, and put a queue with a larger one in its place:",
			f.run("tc qdisc show dev " + dev), stays, fair,
		}, nil
	case "pfifo_fast", "mq":
		length := uint64(4000)
		if l.QueueLength > 0 {
			length = 4 * uint64(l.QueueLength)
		}
		if length > mostQueueLength {
			return []string{stays, fair}, nil
		}
		return []string{
			"# a longer queue absorbs bursts, but packets wait longer when it is full:",
			f.run(fmt.Sprintf("ip link set dev %s txqueuelen %d", dev, length)), stays, fair,
		}, []snapshot.Setting{f.device(l.Name, "tx_queue_len", strconv.FormatUint(length, 10))}
	case "fq_codel", "codel", "cake", "fq_pie", "pie", "red", "dualpi2":
		return []string{
			"# this queue drops to keep delays short: more arrives than the line carries, and a longer queue would only add delay. See which flows send the most:",
			f.natkit("conntrack top"), f.run("tc -s qdisc show dev " + dev),
		}, nil
	}
	return []string{"# see which class or queue drops, and its rate and limit:", f.run("tc -s qdisc show dev " + dev), f.run("tc -s class show dev " + dev)}, nil
}

// bitRate prints bytes a second as line rates are spoken of.
func bitRate(bytes uint64) string {
	switch bits := float64(bytes) * 8; {
	case bits >= 1e9:
		return fmt.Sprintf("%.1f Gbit/s", bits/1e9)
	case bits >= 1e6:
		return fmt.Sprintf("%.1f Mbit/s", bits/1e6)
	default:
		return fmt.Sprintf("%.0f kbit/s", bits/1e3)
	}
}
