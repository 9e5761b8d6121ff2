// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// Refusals counts TCP connections that were refused: a reset was their only answer.
// The table never shows them, since connection tracking forgets such an entry at once,
// and an event is all there is.
type Refusals struct {
	s    *socket
	stop context.CancelFunc
	done chan struct{}

	mu     sync.Mutex
	counts map[refusedKey]uint64
	failed error
}

type refusedKey struct {
	dest, target         addrKey
	destPort, targetPort uint16
}

const (
	// Each event costs the kernel about as much as the entry itself, so that where
	// flows may be many they are listened to in one slice of a second only.
	refusalsBusy  = 20000 // entries of the table
	refusalsSlice = 100 * time.Millisecond
	refusalsRound = time.Second

	maxRefused = 4096 // destinations told apart
)

// refusedOnly lets an event by if its entry is a TCP connection in state CLOSE that saw no
// answer: who listens for those that are refused has nothing to do with all others that end.
var refusedOnly = func() []unix.SockFilter {
	const (
		attribute = 0xfffff000 + 12 // SKF_AD_OFF + SKF_AD_NLATTR: where attribute X is, from A on, or 0
		nested    = 0xfffff000 + 16 // SKF_AD_NLATTR_NEST: where it is in the attribute at A
		accept    = 19
		drop      = 20
	)
	load := func(size uint16, mode uint16, k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | size | mode, K: k}
	}
	set := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_IMM, K: k} }
	begin, find, in := load(0, unix.BPF_IMM, nlHeaderLen+nfHeaderLen), load(unix.BPF_W, unix.BPF_ABS, attribute), load(unix.BPF_W, unix.BPF_ABS, nested)
	toX := unix.SockFilter{Code: unix.BPF_MISC | unix.BPF_TAX}
	out := []unix.SockFilter{
		begin, set(ctaProtoinfo), find, {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: drop},
		set(ctaProtoinfoTCP), in, {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: drop},
		set(ctaProtoinfoState), in, {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: drop},
		toX, load(unix.BPF_B, unix.BPF_IND, 4), {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(TCPClose), Jf: drop},
		begin, set(ctaStatus), find,
		toX, load(unix.BPF_W, unix.BPF_IND, 4), {Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: uint32(StatusSeenReply), Jt: drop}, // every event has a status
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	for i := range out[:accept] { // jumps count from the next instruction on
		if out[i].Jt == drop {
			out[i].Jt = uint8(drop - i - 1)
		}
		if out[i].Jf == drop {
			out[i].Jf = uint8(drop - i - 1)
		}
	}
	return out
}()

// OpenRefusals begins to count those of the calling thread's namespace. Close must be called.
func OpenRefusals() (*Refusals, error) {
	mode, err := ReadEventsMode()
	if err == nil && mode == EventsOff {
		err = errors.New("events of connection tracking are off (net.netfilter.nf_conntrack_events is 0)")
	}
	if err != nil {
		return nil, err
	}
	s, err := openUnwatched(0)
	if err != nil {
		return nil, err
	}
	program := unix.SockFprog{Len: uint16(len(refusedOnly)), Filter: &refusedOnly[0]}
	if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
		s.close()
		return nil, fmt.Errorf("filter conntrack events: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &Refusals{s: s, stop: stop, done: make(chan struct{}), counts: map[refusedKey]uint64{}}
	if err := r.listen(true); err != nil {
		s.close()
		stop()
		return nil, explain(err)
	}
	limits, _ := ReadLimits()
	go r.collect(ctx, limits.Count >= refusalsBusy)
	return r, nil
}

// listen joins the group of entries that end, or leaves it.
func (r *Refusals) listen(on bool) error {
	option := unix.NETLINK_DROP_MEMBERSHIP
	if on {
		option = unix.NETLINK_ADD_MEMBERSHIP
	}
	if err := unix.SetsockoptInt(r.s.fd, unix.SOL_NETLINK, option, unix.NFNLGRP_CONNTRACK_DESTROY); err != nil {
		return fmt.Errorf("listen to conntrack events: %w", err)
	}
	return nil
}

// collect reads events until the context ends; sliced, it listens a slice of each second.
func (r *Refusals) collect(ctx context.Context, sliced bool) {
	defer close(r.done)
	every := refusalsRound // the buffer has room for thousands
	if sliced {
		every = refusalsSlice
	}
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		err := r.read()
		if sliced {
			switch n % int(refusalsRound/refusalsSlice) {
			case 1:
				err = errors.Join(err, r.listen(false))
			case 0:
				err = errors.Join(err, r.listen(true))
			}
		}
		if err != nil {
			r.mu.Lock()
			r.failed = err
			r.mu.Unlock()
			return
		}
	}
}

// read takes in what is in the socket's buffer.
func (r *Refusals) read() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var f Flow
	return r.s.drain(time.Now().Add(refusalsSlice/2), func(typ, _ uint16, _ uint32, payload []byte) bool {
		if typ != msgDelete || f.parse(payload) != nil || f.Proto != unix.IPPROTO_TCP || !f.Unreplied() || f.Has&HasState == 0 || f.State != TCPClose || f.zoned() {
			return true
		}
		key := refusedKey{f.Orig.Dst.As16(), f.Reply.Src.As16(), f.Orig.DstPort, f.Reply.SrcPort}
		if _, there := r.counts[key]; there || len(r.counts) < maxRefused {
			r.counts[key]++
		}
		return true
	})
}

// Read is what was refused since the last Read, most first, at most rows rows. Events that
// were lost are not in it.
func (r *Refusals) Read(rows int) ([]snapshot.RefusedUse, error) {
	if err := r.read(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed != nil {
		return nil, r.failed
	}
	keys := make([]refusedKey, 0, len(r.counts))
	for key := range r.counts {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b refusedKey) int {
		return cmp.Or(cmp.Compare(r.counts[b], r.counts[a]), a.compare(b))
	})
	out := []snapshot.RefusedUse{} // known to be none
	for _, key := range keys[:min(len(keys), rows)] {
		out = append(out, snapshot.RefusedUse{Dest: snapshot.EndpointOf(netip.AddrPortFrom(key.dest.addr(), key.destPort)),
			Target: snapshot.EndpointOf(netip.AddrPortFrom(key.target.addr(), key.targetPort)), Count: r.counts[key]})
	}
	clear(r.counts)
	return out, nil
}

func (k refusedKey) compare(l refusedKey) int {
	return cmp.Or(bytes.Compare(k.dest[:], l.dest[:]), bytes.Compare(k.target[:], l.target[:]),
		cmp.Compare(k.destPort, l.destPort), cmp.Compare(k.targetPort, l.targetPort))
}

// Close ends the counting.
func (r *Refusals) Close() {
	r.stop()
	<-r.done
	r.s.close()
}
