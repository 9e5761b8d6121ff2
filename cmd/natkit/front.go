// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/control"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
)

// natkit alone answers within frontTime, of which drops are counted for frontWindow at most.
const (
	frontTime   = 1200 * time.Millisecond
	frontWindow = 500 * time.Millisecond
)

// front shows the state of the namespace in three lines.
func front(ctx context.Context, e *env) error {
	ns, err := netns.Open(e.netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	return unlessPipeClosed(readFront(ctx, ns, e.netns).Text(e.stdout))
}

// readFront reads everything at once: each part has its reason where it could not be read.
func readFront(ctx context.Context, ns *netns.Handle, ref string) *report.Front {
	ctx, cancel := context.WithTimeout(ctx, frontTime)
	defer cancel()
	f := &report.Front{Root: os.Geteuid() == 0, In: ref}
	var all sync.WaitGroup
	all.Go(func() {
		f.Table, f.TableUnseen = within(ctx, func() (l conntrack.Limits, err error) {
			err = ns.Do(func() (err error) {
				l, err = conntrack.ReadLimits()
				return err
			})
			return l, err
		})
	})
	all.Go(func() {
		f.Kernel, f.KernelUnseen = within(ctx, func() ([]trim.Translator, error) { return translators(ns) })
	})
	all.Go(func() {
		f.Engine, f.EngineUnseen = within(ctx, func() (*snapshot.Engine, error) { return control.ReadFacts(ns, nil, false) })
	})
	all.Go(func() { readFrontDrops(ctx, ns, f) })
	all.Wait()
	return f
}

func translators(ns *netns.Handle) ([]trim.Translator, error) {
	chains, err := probe.Chains(ns)
	if found := trim.Translators(chains); len(found) > 0 {
		return found, nil
	}
	return nil, err
}

// readFrontDrops traces drops for a moment; where that is not possible, the counters of
// connection tracking are what there is.
func readFrontDrops(ctx context.Context, ns *netns.Handle, f *report.Front) {
	type counted struct {
		drops   snapshot.Drops
		seconds float64
	}
	got, unseen := within(ctx, func() (c counted, err error) {
		d, err := observe.OpenDrops(observe.DropOptions{Netns: ns.Inode()})
		if err != nil {
			return c, err
		}
		defer d.Close()
		began := time.Now()
		window := frontWindow
		if end, ok := ctx.Deadline(); ok {
			window = min(window, time.Until(end)-frontWindow/4) // reading takes time too
		}
		select {
		case <-time.After(window):
		case <-ctx.Done():
		}
		c.seconds = time.Since(began).Seconds()
		c.drops, err = d.Read()
		return c, err
	})
	f.Drops, f.DropsSeconds, f.DropsUnseen = got.drops, got.seconds, unseen
	if unseen == "" {
		return
	}
	type refused struct{ create, confirm uint64 }
	r, why := within(context.WithoutCancel(ctx), func() (r refused, err error) { // two small files
		r.create, r.confirm, err = observe.Refused(ns)
		return r, err
	})
	f.Create, f.Confirm, f.RefusedUnseen = r.create, r.confirm, why
}

// within reads a part, and gives up on it when the time is over: the reader is left behind.
func within[T any](ctx context.Context, read func() (T, error)) (value T, unseen string) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := read()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, frontReason(r.err)
	case <-ctx.Done():
		return value, "it took too long; natkit doctor waits for it"
	}
}

// frontReason is why a part could not be read, in few words.
func frontReason(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, os.ErrPermission) && os.Geteuid() != 0:
		return "root is needed"
	case errors.Is(err, os.ErrPermission):
		return strings.Join(append([]string{"not permitted"}, missingCapabilities(processStatus())...), ", without ")
	}
	return inWords(err)
}
