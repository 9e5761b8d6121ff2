// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"natkit/internal/nat/control"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// SubscribersText writes who uses how much, and what pools and classes have together.
func SubscribersText(w io.Writer, s *control.Subscribers) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", plural.Count(s.Count, "subscriber"))
	if len(s.Rows) < s.Count {
		fmt.Fprintf(&b, ", the first %d by %s", len(s.Rows), s.By)
	}
	b.WriteString("\n")
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	if len(s.Rows) > 0 {
		fmt.Fprintln(t, "subscriber\tpool\tclass\texternal\tsessions\tports\thold-down\tblocks\tshare\trefused\tsince")
	}
	for i := range s.Rows {
		r := &s.Rows[i]
		of := r.Of.Addr().String()
		if r.Of.Bits() < 32 {
			of = r.Of.String()
		}
		of += onInterface(r.Interface)
		external, share := "-", "-"
		if r.External.IsValid() {
			external = r.External.String()
		}
		if r.SessionLimit > 0 || r.PortLimit > 0 {
			share = percent.Of(r.Share, 0)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", of, cmp.Or(r.Pool, "-"), r.Class, external, ofLimit(&r.Sessions, r.SessionLimit), ofLimit(r.Ports, r.PortLimit),
			ofLimit(r.HoldDown, 0), blocksText(r), share, refusedText(r.Refused), r.Since.Format(time.DateTime))
	}
	t.Flush()
	for _, totals := range []struct {
		title string
		rows  []control.SubscriberTotal
	}{{"pool", s.Pools}, {"class", s.Classes}} {
		if len(totals.rows) == 0 {
			continue
		}
		t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
		fmt.Fprintf(t, "\n%s\tsubscribers\tsessions\tports\tblocks\trefused\n", totals.title)
		for _, r := range totals.rows {
			fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%d\t%s\n", cmp.Or(r.Name, "-"), r.Subscribers, r.Sessions, ofLimit(r.Ports, 0), r.Blocks, refusedText(r.Refused))
		}
		t.Flush()
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// ofLimit writes a number and its limit, if there are these.
func ofLimit(n *int, limit int) string {
	switch {
	case n == nil:
		return "-"
	case limit > 0:
		return fmt.Sprintf("%d of %d", *n, limit)
	}
	return strconv.Itoa(*n)
}

// blocksText lists the blocks of a subscriber; their addresses only where they are of several.
func blocksText(s *control.Subscriber) string {
	if s.BlockLimit == 0 && len(s.Blocks) == 0 {
		return "-"
	}
	text := strconv.Itoa(len(s.Blocks))
	if s.BlockLimit > 0 {
		text += fmt.Sprintf(" of %d", s.BlockLimit)
	}
	var ranges []string
	for _, b := range s.Blocks {
		if b.Address == s.External {
			ranges = append(ranges, b.String())
		} else {
			ranges = append(ranges, fmt.Sprintf("%s:%s", b.Address, b))
		}
	}
	if len(ranges) > 0 {
		text += ": " + strings.Join(ranges, " ")
	}
	return text
}

// refusedText lists refused packets by reason, most first.
func refusedText(refused map[string]uint64) string {
	var words []string
	for _, reason := range byCount(refused) {
		words = append(words, fmt.Sprintf("%s %d", reason, refused[reason]))
	}
	return cmp.Or(strings.Join(words, ", "), "0")
}

// poolsText writes the pools of a gateway.
func poolsText(b *strings.Builder, pools []control.PoolStatus) {
	t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	if len(pools) > 0 {
		fmt.Fprintln(t, "pool\taddresses\tsubscribers\tused\tports free\tblocks\trefused")
	}
	for i := range pools {
		p := &pools[i]
		addresses := strconv.Itoa(p.Addresses)
		if p.Draining > 0 {
			addresses += fmt.Sprintf(", %d draining", p.Draining)
		}
		blocks := "-"
		if p.Blocks != nil {
			blocks = fmt.Sprintf("%d used, %d of %d ports free", p.Blocks.Used, p.Blocks.Free, p.Blocks.Size)
		}
		free := "-"
		if p.Ports > 0 {
			free = fmt.Sprintf("tcp %d, udp %d, icmp %d of %d", p.FreeTCP, p.FreeUDP, p.FreeICMP, p.Ports)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", p.Name, addresses, p.Subscribers, percent.Of(p.Share, 0), free, blocks, refusedText(p.Refused))
	}
	t.Flush()
}
