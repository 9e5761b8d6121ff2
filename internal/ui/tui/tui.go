// SPDX-License-Identifier: Apache-2.0

// Package tui is the live screen of natkit top: panels, keys and the terminal.
// What it shows comes from package live; it reads nothing of the kernel itself.
//
// state.go obeys keys, draw.go and panels.go draw on a grid of cells and know no
// terminal; this file owns the terminal and sends it the cells that changed.
package tui

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"

	"github.com/gdamore/tcell/v2"
	"github.com/gdamore/tcell/v2/terminfo"
	"golang.org/x/sys/unix"

	"natkit/internal/ui/live"
)

// Options connect the screen with what it shows.
type Options struct {
	Netns string // reference as for netns.Open
	// Watch gives moments of a namespace until its context ends.
	Watch func(ctx context.Context, netns string, fn func(*live.Moment) error) error
	// Namespaces are those that can be chosen from.
	Namespaces func() ([]live.Namespace, error)
}

// ErrTerminal is wrapped by errors about a terminal that no screen can be drawn on.
var ErrTerminal = errors.New("no screen can be drawn on this terminal")

// Open takes the terminal that is the process's. Close it whatever happens.
func Open() (tcell.Screen, error) {
	name := os.Getenv("TERM")
	if name == "" || name == "dumb" {
		return nil, fmt.Errorf("%w: TERM is %q", ErrTerminal, name)
	}
	// Known ones only: for others the library would run a program (infocmp).
	info, err := terminfo.LookupTerminfo(name)
	if err != nil {
		return nil, fmt.Errorf("%w: TERM is %q, which natkit does not know (xterm, screen, tmux, linux, vt100 and their like it does)", ErrTerminal, name)
	}
	screen, err := tcell.NewTerminfoScreenFromTtyTerminfo(nil, info)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTerminal, err)
	}
	if err := screen.Init(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTerminal, err)
	}
	return screen, nil
}

// Run shows the screen until a key or ctx ends it, and leaves the terminal as it
// was, also when something panics.
func Run(ctx context.Context, screen tcell.Screen, o Options) error {
	defer screen.Fini()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, stop := make(chan tcell.Event, 16), make(chan struct{})
	defer close(stop)
	go screen.ChannelEvents(events, stop)

	s := newState()
	r := &runner{Options: o, ctx: ctx, screen: screen}
	r.watch(o.Netns)
	defer func() { r.cancel() }()
	for {
		r.show(s)
		select {
		case <-ctx.Done():
			return nil
		case m := <-r.moments:
			r.before = nil
			s.add(m)
		case err := <-r.ended:
			if r.before == nil { // the first namespace, or one that was fine
				return err
			}
			s.refused = err.Error()
			before := *r.before
			s.forget()
			r.watch(before)
			r.before = nil
		case event := <-events:
			if done, err := r.obey(s, event); done || err != nil {
				return err
			}
		}
	}
}

// runner joins the terminal and one namespace that is watched.
type runner struct {
	Options
	ctx    context.Context
	screen tcell.Screen

	netns   string
	before  *string // to go back to when the new namespace can't be watched
	cancel  context.CancelFunc
	moments chan *live.Moment
	ended   chan error
}

// watch begins with a namespace. What watched another before is told to end and
// not waited for: it may be in the middle of a dump.
func (r *runner) watch(netns string) {
	if r.cancel != nil {
		r.cancel()
	}
	ctx, cancel := context.WithCancel(r.ctx)
	moments, ended := make(chan *live.Moment), make(chan error, 1)
	r.netns, r.cancel, r.moments, r.ended = netns, cancel, moments, ended
	go func() {
		defer func() {
			if p := recover(); p != nil {
				ended <- fmt.Errorf("watch: %v\n%s", p, debug.Stack())
			}
		}()
		err := r.Watch(ctx, netns, func(m *live.Moment) error {
			select {
			case moments <- m:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		if ctx.Err() == nil {
			ended <- err
		}
	}()
}

// obey does what a key asks.
func (r *runner) obey(s *state, event tcell.Event) (done bool, err error) {
	switch event := event.(type) {
	case nil: // the terminal has gone
		return true, nil
	case *tcell.EventError:
		return true, fmt.Errorf("read the terminal: %w", event)
	case *tcell.EventResize:
		r.screen.Sync()
	case *tcell.EventKey:
		s.refused = ""
		switch s.key(event.Key(), event.Rune()) {
		case quit:
			return true, nil
		case redraw:
			r.screen.Sync()
		case suspend:
			return false, r.suspend()
		case listNamespaces:
			list, err := r.Namespaces()
			if err != nil {
				s.refused = err.Error()
				return false, nil
			}
			s.choice = &choice{list: list}
			for i, n := range list {
				if n.Ref == r.netns {
					s.choice.at = i
				}
			}
		case enterNamespace:
			ref := s.choice.list[s.choice.at].Ref
			s.choice = nil
			if ref != r.netns {
				before := r.netns
				r.before = &before
				s.forget()
				r.watch(ref)
			}
		}
	}
	return false, nil
}

// suspend gives the terminal back and stops the process, as other programs do for
// ctrl-z; it goes on where the shell says so.
func (r *runner) suspend() error {
	if err := r.screen.Suspend(); err != nil {
		return err
	}
	if err := unix.Kill(unix.Getpid(), unix.SIGSTOP); err != nil {
		return err
	}
	return r.screen.Resume()
}

// show draws the state. Each cell is given to the terminal's part once, with what
// it ends up with: clearing the screen first would have all of it sent again.
func (r *runner) show(s *state) {
	w, h := r.screen.Size()
	type cell struct {
		r  rune
		st style
	}
	cells := slices.Repeat([]cell{{' ', plain}}, w*h)
	s.draw(&canvas{w: w, h: h, ascii: r.screen.CharacterSet() != "UTF-8", put: func(x, y int, r rune, st style) { cells[y*w+x] = cell{r, st} }})
	styles := stylesFor(r.screen.Colors() >= 8)
	for i, c := range cells {
		r.screen.SetContent(i%w, i/w, c.r, nil, styles[c.st])
	}
	r.screen.Show()
}

// stylesFor are the terminal's looks of the styles; without colours the severe is
// bold, and the words say the rest.
func stylesFor(colours bool) [inverse + 1]tcell.Style {
	d := tcell.StyleDefault
	looks := [inverse + 1]tcell.Style{plain: d, bold: d.Bold(true), dim: d, good: d, warn: d.Bold(true), bad: d.Bold(true), inverse: d.Reverse(true)}
	if colours {
		looks[dim] = d.Foreground(tcell.ColorTeal)
		looks[good] = d.Foreground(tcell.ColorGreen)
		looks[warn] = d.Foreground(tcell.ColorOlive).Bold(true)
		looks[bad] = d.Foreground(tcell.ColorMaroon).Bold(true)
	}
	return looks
}
