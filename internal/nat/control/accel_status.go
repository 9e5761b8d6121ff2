// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// ErrAccelOff says that nothing is accelerated in the namespace.
var ErrAccelOff = errors.New("acceleration is off here: `natkit accel on INTERFACE...` turns it on")

// AccelInterface is an accelerated interface.
type AccelInterface struct {
	Name   string   `json:"name"`
	Hooks  []string `json:"attached_hooks"` // tc, xdp, egress; none when it is gone
	Reason string   `json:"reason"`
}

// AccelStatus is what is accelerated in a namespace.
type AccelStatus struct {
	Since      time.Time            `json:"since"`
	Interfaces []AccelInterface     `json:"interfaces"`
	TCP        bool                 `json:"tcp"`
	Flows      int                  `json:"flows_max"`       // that are remembered
	Stats      *rulefile.AccelStats `json:"stats,omitempty"` // nil: they cannot be read
	Changes    []Change             `json:"changes"`         // of the namespace, that AccelOff puts back
	Problems   []string             `json:"problems"`        // each with what to do

	flags []string // of the record
}

// Share is which part of the TCP and UDP packets that came in for others bypassed the stack
// since acceleration was turned on: rulefile.AccelShare. Negative: it is not known.
func (s *AccelStatus) Share() float64 {
	if s.Stats == nil {
		return -1
	}
	return rulefile.AccelShare(s.Stats.Reasons)
}

// ReadAccelStatus reads what is accelerated in a namespace.
func ReadAccelStatus(ns *netns.Handle) (s *AccelStatus, err error) {
	rec, err := ofAccel(recordOf(ns))
	if err != nil {
		return nil, err
	}
	dir := pinsOf(ns.Inode())
	s = &AccelStatus{Since: rec.Since, Flows: rec.Accel.Flows, TCP: rec.Accel.TCPTimeout > 0, flags: rec.flags(), Interfaces: []AccelInterface{}, Problems: []string{}, Changes: []Change{}}
	if made, err := standing(instancePath(ns.Inode(), ".journal")); err == nil {
		s.Changes = append(s.Changes, made...)
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	again := rec.restart(ns)
	other := rec.Make != datapath.MakeAccel()
	a, err := datapath.OpenAccelerator(dir)
	if !rec.Whole || errors.Is(err, os.ErrNotExist) {
		if a != nil {
			a.Close()
		}
		s.problem(rec.half(ns).Error())
		return s, nil
	}
	if err == nil {
		s.Stats, err = a.Stats()
		err = errors.Join(err, a.Close())
	}
	switch {
	case err != nil && other:
		s.Stats = nil
		s.problem("the programs are another natkit's, whose counters this one can't read: " + again + " replace them, and no connection ends")
	case err != nil:
		return nil, err
	case other:
		s.problem("the programs are another natkit's: " + again + " replace them, and no connection ends")
	}
	return s, ns.Do(func() error {
		s.checkSettings(ns, rec, again)
		return s.readLinks(ns, rec, dir, again)
	})
}

// ofAccel passes on what reading a record gave, but for one that is of no acceleration.
func ofAccel(rec *record, err error) (*record, error) {
	if errors.Is(err, ErrDown) || err == nil && rec.Accel == nil {
		return nil, ErrAccelOff
	}
	return rec, err
}

func (s *AccelStatus) problem(text string) { s.Problems = append(s.Problems, text) }

// checkSettings finds settings that are no longer what the programs were made for. The
// calling thread is in the namespace.
func (s *AccelStatus) checkSettings(ns *netns.Handle, rec *record, again string) {
	if !s.TCP {
		return
	}
	if v, err := readSetting(settingLiberal); err == nil && v != "1" {
		s.problem("connection tracking is strict about TCP windows again (" + settingLiberal + " is " + v + "), and drops packets of connections as invalid: set it to 1, or " + rec.down(ns))
	}
	if v, err := readSetting(settingEstablished); err == nil && v != strconv.Itoa(rec.Accel.TCPTimeout) {
		s.problem(settingEstablished + " is " + v + " now; accelerated connections have " + strconv.Itoa(rec.Accel.TCPTimeout) + " until " + again)
	}
}

// CheckBypassed finds what packets go past that was set up after acceleration was turned
// on, or that nobody has accepted for another reason. chains are those of the namespace.
func (s *AccelStatus) CheckBypassed(ns *netns.Handle, chains []snapshot.Chain) error {
	rec, err := ofAccel(recordOf(ns))
	if err != nil {
		return err
	}
	var links []datapath.Link
	err = ns.Do(func() error {
		for i, known := range rec.Links {
			if l, err := netlink.LinkByName(known.Name); err == nil && l.Attrs().Index == known.Ifindex {
				links = append(links, datapath.Link{Name: known.Name, Ifindex: known.Ifindex, Transmit: rec.Accel.Placements[i].Transmit})
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	found, err := accelBypassed(ns, chains, links)
	for _, b := range found {
		if !slices.Contains(rec.Accepted, b) {
			s.problem("packets bypass what was set up after acceleration was turned on: " + b.What + ": " + b.Effect + "; " + rec.down(ns) + " lets it see them")
		}
	}
	return err
}

// readLinks reports where packets are met, and what has changed since. The calling thread
// is in the namespace.
func (s *AccelStatus) readLinks(ns *netns.Handle, rec *record, dir, again string) error {
	attached, err := datapath.Attached(dir)
	if err != nil {
		return err
	}
	for i, known := range rec.Links {
		out := AccelInterface{Name: known.Name, Hooks: []string{}, Reason: rec.Accel.Placements[i].Reason}
		l, err := netlink.LinkByName(known.Name)
		renamed, gone := netlink.LinkByIndex(known.Ifindex)
		switch {
		case err != nil && gone == nil:
			next := *rec
			next.Links = slices.Clone(rec.Links)
			next.Links[i].Name = renamed.Attrs().Name
			s.problem("interface " + known.Name + " was renamed to " + renamed.Attrs().Name + ", where its packets are accelerated as before: " + next.restart(ns) + " use that name")
		case err != nil:
			s.problem("interface " + known.Name + " is gone; when it is back, " + again + " follow it")
		case l.Attrs().Index != known.Ifindex:
			s.problem("interface " + known.Name + " was recreated, and its packets go through the stack: " + again + " follow it")
		case l.Attrs().HardwareAddr.String() != rec.Accel.MACs[i]:
			s.problem("interface " + known.Name + " has another MAC, and what leaves there goes through the stack: " + again + " follow it")
		}
		hooks := attached[known.Ifindex]
		if err == nil && l.Attrs().Index == known.Ifindex {
			if hooks, err = datapath.Hooks(attached, known.Ifindex); err != nil {
				return err
			}
		}
		for _, h := range hooks {
			out.Hooks = append(out.Hooks, string(h))
		}
		s.Interfaces = append(s.Interfaces, out)
	}
	return nil
}
