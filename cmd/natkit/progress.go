// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// silence is how long a command may say nothing to a pipe or a file.
const silence = 10 * time.Second

// progressLine is how long work says on stderr how far it is: on a terminal one line that
// is rewritten, elsewhere a line now and then, none from a command that is done soon.
type progressLine struct {
	mu       sync.Mutex
	w        io.Writer
	terminal bool
	width    func() int // of the terminal, 0 where it is not known
	last     time.Time  // something was written, or the work began
	now      func() time.Time
}

func newProgressLine(e *env) *progressLine {
	return &progressLine{w: e.stderr, terminal: isTerminal(e.stderr) && os.Getenv("TERM") != "dumb", width: func() int { return terminalWidth(e.stderr) }, last: time.Now(), now: time.Now}
}

// show says what is done now.
func (p *progressLine) show(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.terminal:
		fmt.Fprint(p.w, "\r\x1b[K"+p.fitted(fmt.Sprintf(format, args...)))
	case p.now().Sub(p.last) >= silence:
		p.write(fmt.Sprintf(format, args...))
	}
}

// fitted is as much of a line as one row of the terminal has: of two rows only the second could be
// rewritten.
func (p *progressLine) fitted(line string) string {
	if runes := []rune(line); p.width() > 0 && len(runes) >= p.width() {
		return string(runes[:p.width()-1])
	}
	return line
}

// say writes a line that stays.
func (p *progressLine) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.write(fmt.Sprintf(format, args...))
}

func (p *progressLine) write(line string) {
	p.erase()
	fmt.Fprintf(p.w, "natkit: %s\n", line)
	p.last = p.now()
}

// clear takes the line away before something else is written.
func (p *progressLine) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
}

func (p *progressLine) erase() {
	if p.terminal {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// counts shows how much of a file is read: of one that takes its time.
func (p *progressLine) counts(r io.Reader, name string) io.Reader {
	total := int64(0)
	if f, ok := r.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			total = info.Size()
		}
	}
	return &countingReader{Reader: r, line: p, name: name, total: total, next: p.now().Add(time.Second)}
}

type countingReader struct {
	io.Reader
	line        *progressLine
	name        string
	read, total int64
	next        time.Time // to show something
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.read += int64(n)
	if now := c.line.now(); now.After(c.next) {
		c.next = now.Add(time.Second)
		if c.total > 0 {
			c.line.show("%s: %d of %d MiB read", c.name, c.read>>20, c.total>>20)
		} else {
			c.line.show("%s: %d MiB read", c.name, c.read>>20)
		}
	}
	return n, err
}

// about writes a duration as people say it: 40 s, 6 min.
func about(d time.Duration) string {
	if d < 90*time.Second {
		return fmt.Sprintf("%.0f s", max(1, d.Seconds()))
	}
	return fmt.Sprintf("%.0f min", d.Minutes())
}

// output is standard output. Its reader's going away, as with `| head`, ends the command
// as an interrupt does, so that what it has made is removed. The first error of a write is
// kept: a command may not have looked.
type output struct {
	*os.File
	gone func()
	mu   sync.Mutex
	err  error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.File.Write(p)
	if err != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.err == nil {
			o.err = err
			o.gone()
		}
	}
	return n, err
}

func (o *output) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// isTerminal says whether people, and no program, read what is written to w.
func isTerminal(w io.Writer) bool {
	f, ok := w.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(f.Fd()))
}

// cutShort says that a window was ended before its time: what it holds is shown.
func (e *env) cutShort(ctx context.Context, got, window time.Duration) {
	if ctx.Err() != nil && got < window {
		fmt.Fprintf(e.stderr, "natkit: interrupted after %.1f s of %s: what is shown is of this time\n", got.Seconds(), about(window))
	}
}

// interrupted is the error of a command that was ended before it was done.
func interrupted(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return errInterrupted
	}
	return err
}
