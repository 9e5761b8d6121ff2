// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"strings"
)

// clientBoxes are the drawing's left side.
func (p *plan) clientBoxes() [][]string {
	a := p.options.Addresses
	network := fmt.Sprintf("/%d", a.Client.Bits())
	lan := []string{"lan", "br0", "(a switch)"}
	if p.options.LocalClient {
		return [][]string{lan}
	}
	clients := a.clients(p.options.Clients)
	if len(clients) == 1 {
		return [][]string{{"client", "eth0", clients[0].String() + network}}
	}
	end := len(clients) - 1
	return [][]string{{
		fmt.Sprintf("client ... %s", clientRole(end)), "eth0",
		clients[0].String() + network, "... " + clients[end].String() + network,
	}, lan}
}

// draw puts boxes side by side, each a list of lines, and joins them by their
// second line, the one that names their interfaces.
func draw(boxes ...[]string) string {
	const joint = 1
	height := 0
	for _, b := range boxes {
		height = max(height, len(b))
	}
	rows := make([]strings.Builder, height+2)
	for i, b := range boxes {
		width := 0
		for _, line := range b {
			width = max(width, len([]rune(line)))
		}
		gap, line := "", ""
		if i > 0 {
			gap, line = "     ", "─────"
		}
		rows[0].WriteString(gap + "┌" + strings.Repeat("─", width+2) + "┐")
		rows[height+1].WriteString(gap + "└" + strings.Repeat("─", width+2) + "┘")
		for n := range height {
			text := ""
			if n < len(b) {
				text = b[n]
			}
			left, right, before := "│", "│", gap
			if n == joint {
				before = line
				if i > 0 {
					left = "┤"
				}
				if i < len(boxes)-1 {
					right = "├"
				}
			}
			rows[n+1].WriteString(before + left + " " + text + strings.Repeat(" ", width-len([]rune(text))+1) + right)
		}
	}
	var out strings.Builder
	for i := range rows {
		out.WriteString(rows[i].String() + "\n")
	}
	return out.String()
}
