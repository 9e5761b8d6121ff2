// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// refusing is a program that gives these reasons, one each time that it is asked.
type refusing []string

func (refusing) Forwarded(snapshot.TraceTuple, snapshot.TraceTuple, uint64) string { return "" }
func (refusing) Unseen() bool                                                      { return true }
func (refusing) Close() error                                                      { return nil }

func (r *refusing) Refused() string {
	why := (*r)[0]
	*r = (*r)[1:]
	return why
}

// A packet ended by what a program dropped while it was there, not by what it dropped before or long after.
func TestRefused(t *testing.T) {
	a := &attachment{programs: []programOf{{Program: &refusing{"before", "then", "", "after"}, place: netns.Place{Inode: 7, Ref: "gateway"}}}}
	r := &Run{at: a}
	p := &a.programs[0]
	p.ask(0)
	at := monotonic()
	if got := r.Refused(7, at); got != "" {
		t.Errorf("got %q, which was before", got)
	}
	for range 3 {
		p.ask(0)
	}
	if got := r.Refused(7, at); got != "then" {
		t.Errorf("got %q, want what was dropped then", got)
	}
	if got := r.Refused(8, at); got != "" {
		t.Errorf("in another namespace: %q", got)
	}
	if got := r.RefusedUnseen(8, at); got != "gateway, then" {
		t.Errorf("sent to it from another namespace: %q", got)
	}
	if got := r.RefusedUnseen(7, at); got != "" {
		t.Errorf("sent by its own namespace: %q", got)
	}
}
