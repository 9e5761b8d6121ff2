// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"slices"
	"strconv"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/natlog"
	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
	"natkit/internal/snapshot"
)

// FactsFrom gives a reader of how the log of a namespace is kept (a probe.LogReader): in the
// folder of the rules in use, or in the usual one if it has this namespace. nil: there is none.
func FactsFrom(usual string) func(*netns.Handle) (*snapshot.Log, error) {
	return func(ns *netns.Handle) (*snapshot.Log, error) {
		file, err := control.RulesOf(context.Background(), ns, "")
		if err == nil && file != nil && file.Log.On {
			dir := file.Log.Folder
			if dir == "" {
				dir = usual
			}
			return readFacts(dir, 0)
		}
		return readFacts(usual, ns.Inode())
	}
}

// readFacts reads what a log and its sinks have written down: of one that the rules want, or of
// one that has a namespace.
func readFacts(dir string, namespace uint64) (*snapshot.Log, error) {
	state, err := store.ReadState(dir)
	missing := errors.Is(err, fs.ErrNotExist)
	if namespace != 0 && (missing || err == nil && state.Namespace != namespace) {
		return nil, nil
	}
	if err != nil && !missing {
		return nil, err
	}
	l := &snapshot.Log{Folder: dir, Wanted: namespace == 0, Written: state.Time, Lost: state.Lost, Error: state.Error}
	l.GapCount = len(state.Gaps)
	l.Gaps = slices.Clone(state.Gaps[max(0, l.GapCount-snapshot.TopN):])
	slices.Reverse(l.Gaps)
	sinks, err := sink.Read(dir)
	if err != nil {
		return l, err
	}
	for i := range sinks.Sinks {
		if s := &sinks.Sinks[i]; !s.Unused && len(l.Sinks) < snapshot.TopN {
			l.Sinks = append(l.Sinks, sinkFacts(s))
		}
	}
	return l, nil
}

func sinkFacts(s *sink.State) snapshot.LogSink {
	out := snapshot.LogSink{URL: s.URL, Connected: s.Connected, Since: s.Since, Behind: s.Behind, Unsent: s.Unsent, Lost: s.Lost, Error: s.LastError}
	to, err := natlog.ParseSink(s.URL)
	if err != nil || len(to.Addresses) == 0 {
		return out
	}
	if host, port, err := net.SplitHostPort(to.Addresses[0]); err == nil {
		n, _ := strconv.ParseUint(port, 10, 16) // ParseSink has read it
		out.Hostname, out.Port = host, uint16(n)
		out.Stream = to.Transport != natlog.UDP
	}
	return out
}
