// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
)

// Events calls fn with what happens until the context ends or fn returns false. The
// engine makes events only while somebody reads them. Two readers share them: each
// event goes to one.
func (e *Engine) Events(ctx context.Context, fn func(*rulefile.Event) bool) (err error) {
	reader, err := ringbuf.NewReader(e.m.Events)
	if err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	defer reader.Close()
	if err := e.enableEvents(true); err != nil {
		return err
	}
	renewed, over := make(chan struct{}), make(chan struct{})
	go func() { defer close(renewed); e.renewEvents(over) }()
	defer func() {
		close(over)
		<-renewed
		err = errors.Join(err, e.enableEvents(false))
	}()
	boot, err := bootTime()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { reader.Flush() }) // a deadline would wait for the reader
	defer stop()
	for {
		record, err := reader.Read()
		if errors.Is(err, ringbuf.ErrFlushed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
		var raw abiNatEvent
		if err := binary.Read(bytes.NewReader(record.RawSample), binary.NativeEndian, &raw); err != nil {
			return fmt.Errorf("read event of %d bytes: %w", len(record.RawSample), err)
		}
		if event := e.eventOf(&raw, boot); !fn(&event) {
			return nil
		}
	}
}

// renewEvents has the engine go on making events until over: another reader's end would end them.
func (e *Engine) renewEvents(over <-chan struct{}) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-over:
			return
		case <-ticker.C:
			_ = e.enableEvents(true) // it is tried again
		}
	}
}

var eventKinds = map[abiNatEventKind]string{
	abiNatEventKindNAT_EVENT_CREATE: "created", abiNatEventKindNAT_EVENT_DELETE: "ended", abiNatEventKindNAT_EVENT_REFUSED: "refused",
}

func (e *Engine) eventOf(raw *abiNatEvent, boot time.Time) rulefile.Event {
	flow := &abiNatFlow{Key: raw.Key, Src: raw.Src, Dst: raw.Dst, Sport: raw.Sport, Dport: raw.Dport}
	event := rulefile.Event{Time: boot.Add(time.Duration(raw.TimeNs)), Kind: eventKinds[abiNatEventKind(raw.Kind)], Session: e.session(flow, raw.Rule)}
	event.Session.DestinationInterface = e.ZoneName(raw.Zone)
	event.Session.State = ""
	event.Session.Packets, event.Session.Bytes = raw.Packets, raw.Bytes
	if raw.Kind == uint8(abiNatEventKindNAT_EVENT_REFUSED) {
		event.Reason = rulefile.Reason(raw.Reason).String()
	}
	return event
}

// enableEvents sets whether the engine makes events, in the configuration in use and
// the next one's slot.
func (e *Engine) enableEvents(on bool) error {
	for slot := range uint32(abiNatLimitNAT_GENERATIONS) {
		var config abiNatConfig
		if err := e.m.Config.Lookup(slot, &config); err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		had := config.Flags
		config.Flags &^= uint32(abiNatConfigFlagNAT_CONFIG_EVENTS)
		if on {
			config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_EVENTS)
		}
		if config.Flags == had {
			continue
		}
		if err := e.m.Config.Put(slot, &config); err != nil {
			return fmt.Errorf("switch events: %w", err)
		}
	}
	return nil
}

// bootTime is when CLOCK_MONOTONIC was zero.
func bootTime() (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return time.Time{}, fmt.Errorf("read clock: %w", err)
	}
	return time.Now().Add(-time.Duration(ts.Nano())), nil
}
