// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"

	"golang.org/x/term"
)

// progressLine is one line on stderr that long work rewrites. It exists only
// where stderr is a terminal; a nil one shows nothing.
type progressLine struct{ e *env }

func newProgressLine(e *env) *progressLine {
	if f, ok := e.stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return &progressLine{e}
	}
	return nil
}

func (p *progressLine) show(format string, args ...any) {
	if p != nil {
		fmt.Fprintf(p.e.stderr, "\r\x1b[K"+format, args...)
	}
}

// clear takes the line away before something else is written.
func (p *progressLine) clear() {
	if p != nil {
		fmt.Fprint(p.e.stderr, "\r\x1b[K")
	}
}
