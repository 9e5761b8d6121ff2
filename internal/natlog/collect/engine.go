// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/words/plural"
)

// engineLog is what an engine records (control.Log).
type engineLog interface {
	Engine() (string, error)
	What() (record rulefile.LogRecord, destinations bool)
	Asked() bool
	Read([]datapath.LogRecord) ([]datapath.LogRecord, error)
	Release()
	Empty() bool
	Next() uint32
	Lost() datapath.LogLoss
	Recorded(datapath.LogLoss)
	Alive(func(datapath.LogKey, uint64)) error
	Use(func(datapath.SubscriberUse)) error
	Addresses(func(datapath.AddressUse)) error
	Interface(zone uint8) string
	Up() bool
	CloseAsked() error
	Abandon() error
}

// engineSource is an engine ebpf: the ring of its log, and its maps.
//
// The ring fills whether it is read or not, and remembers what was read, so after a kill it is read
// on. Its room is released when the store has the records; a mark that the store has together with
// them says which these are, so that none is stored twice. What is alive as of a place in the ring
// follows from the maps and from what comes after that place (rewind).
type engineSource struct {
	c    *collector
	log  engineLog
	name string // of the engine, no other one's
	file *rulefile.File
	pool map[[4]byte]string // of an external address: the pool's name

	alive   map[datapath.LogKey]natlog.Micros // since when; 0 not known
	uses    map[datapath.LogKey]use           // sessions that are one in the log, as their destinations are not kept
	backlog []datapath.LogRecord              // read by resume, not recorded yet
	lost    bool                              // of the backlog something is missing
	passed  bool                              // it was passed over, and is to be marked as recorded
	mark    mark                              // of what was recorded last
	ahead   map[uint32]bool                   // numbers after mark.next that were recorded: CPUs overtake each other
	holes   time.Time                         // since when there are numbers missing before those
	floor   natlog.Micros                     // when what was alive was recorded last in the middle of an hour
	ended   natlog.Micros                     // of the last end that is recorded: rows of a file are in the order of time, so what begins again does so after it
	touched map[datapath.LogKey]bool          // what records were about since a look at the maps began; nil: none is under way
	batch   []datapath.LogRecord
	what    what
}

// use is how many sessions are one in the log.
type use struct {
	sessions int
	since    natlog.Micros
}

// what is recorded.
type what struct {
	record       rulefile.LogRecord
	destinations bool
}

// mark is how far an engine's log was recorded.
type mark struct {
	engine string
	next   uint32 // number of the first record that was not
	at     uint64 // CLOCK_MONOTONIC when it was made
	offset int64  // of the wall clock from that
	passed uint64 // lost records whose numbers are before next
}

func (m mark) String() string {
	return fmt.Sprintf("%s %d %d %d %d", m.engine, m.next, m.at, m.offset, m.passed)
}

func parseMark(s string) (m mark, ok bool) {
	n, err := fmt.Sscanf(s, "%s %d %d %d %d", &m.engine, &m.next, &m.at, &m.offset, &m.passed)
	return m, err == nil && n == 5
}

// Bounds of a source.
const (
	// batchRecords are stored at once; each may become two, and the mark comes with them.
	batchRecords  = store.FrameRecords/2 - 1
	batchesAtOnce = 64
	// sameBeginning: two reports of when something began are of the same beginning if they are as
	// near: the engine's own clock is coarse.
	sameBeginning = natlog.Micros(100_000)
	holesFor      = 2 * time.Second
)

func newEngineSource(c *collector, log engineLog) (*engineSource, error) {
	name, err := log.Engine()
	if err != nil {
		return nil, errors.Join(err, log.Abandon())
	}
	s := &engineSource{
		c: c, log: log, name: name, alive: map[datapath.LogKey]natlog.Micros{}, uses: map[datapath.LogKey]use{}, ahead: map[uint32]bool{},
		batch: make([]datapath.LogRecord, 0, batchRecords),
	}
	s.what.record, s.what.destinations = log.What()
	return s, nil
}

// use has records name what rules call it.
func (s *engineSource) use(file *rulefile.File) { s.file, s.pool = file, map[[4]byte]string{} }

func (s *engineSource) reported(at natlog.Micros) { s.floor, s.ended = at, min(s.ended, at) }

func (s *engineSource) close() error { return s.log.CloseAsked() }

// --- time ------------------------------------------------------------------------------------

func (s *engineSource) time(ns uint64) natlog.Micros { return s.c.time(int64(ns)) }

// begin is a time of the engine at which something began, as the log has it: by the clock of then.
func (s *engineSource) begin(ns uint64) natlog.Micros {
	if ns == 0 {
		return 0
	}
	return s.c.timeThen(int64(ns))
}

// --- resuming --------------------------------------------------------------------------------

// resume reads what the ring and the maps have, and decides how the log goes on. What the ring
// has is recorded by catchUp, when the log has begun.
func (s *engineSource) resume(left *store.Left) (store.Resumed, error) {
	found, err := s.snapshot()
	if err != nil {
		return store.Resumed{}, err
	}
	taken := s.log.Next()
	if err := s.readBacklog(); err != nil {
		return store.Resumed{}, err
	}
	loss := s.log.Lost()
	s.lost = loss.First != 0
	known := false
	if s.mark, known = parseMark(left.Marks[natlog.Engine]); known {
		known = s.mark.engine == s.name
	}
	missing := int64(0)
	if known {
		s.c.wasUntil(int64(s.mark.at), s.mark.offset)
		s.backlog = slices.DeleteFunc(s.backlog, func(r datapath.LogRecord) bool { return int32(r.Sequence-s.mark.next) < 0 })
		missing = int64(int32(taken-s.mark.next)) - int64(loss.Total-s.mark.passed)
		for i := range s.backlog {
			if int32(s.backlog[i].Sequence-taken) < 0 {
				missing--
			}
		}
	}
	const onTheirWay = 64 // numbers that packets on other CPUs have taken, and not yet written records with
	var out store.Resumed
	switch {
	case known && missing <= onTheirWay:
		out.At = left.End
	case left.End != 0:
		out = s.after(left, known)
	default:
		out.At = s.oldest(left.Now)
	}
	if !s.lost {
		s.rewind(found)
	} else {
		s.rewindLoss(found, loss.First)
		if known {
			s.remember(left)
		}
	}
	if step := s.c.offset - s.mark.offset; known && stepped(step) {
		// Rules of the last second may not have been kept, and their times are not known either.
		known := left.End - natlog.Micros(tick/time.Microsecond)
		out = store.Resumed{At: left.Now, Gaps: store.SteppedRecords(time.Duration(step), known, left.Now)}
		s.passOver()
	}
	if !known {
		s.mark = mark{engine: s.name, next: taken}
		if len(s.backlog) > 0 {
			s.mark.next = s.backlog[0].Sequence
		}
	}
	s.mark.offset = s.c.offset
	return out, nil
}

// passOver has the backlog change what is alive, and records nothing of it: its times are not known.
func (s *engineSource) passOver() {
	for i := range s.backlog {
		r := &s.backlog[i]
		s.number(r.Sequence)
		switch r.Event {
		case datapath.LogCreated:
			s.add(r.LogKey, s.time(r.Time))
		case datapath.LogEnded:
			s.drop(r.LogKey)
		}
	}
	s.backlog, s.passed = nil, true
}

// after is how the log goes on where the ring does not go on from it.
func (s *engineSource) after(left *store.Left, known bool) store.Resumed {
	at := s.oldest(left.Now)
	gap := left.Gap()[0]
	gap.Source, gap.Time = natlog.Engine, at
	switch {
	case known:
		gap.Note += ", and what the engine recorded was read by another program"
	case left.Marks[natlog.Engine] != "":
		gap.Note += ", and another engine was brought up"
	}
	return store.Resumed{At: at, Gaps: []natlog.Record{gap}}
}

// oldest is the time of the first record of the backlog, or now.
func (s *engineSource) oldest(now natlog.Micros) natlog.Micros {
	if len(s.backlog) == 0 {
		return now
	}
	return min(s.time(s.backlog[0].Time), now)
}

func (s *engineSource) readBacklog() error {
	for {
		s.backlog = slices.Grow(s.backlog, batchRecords)
		had := len(s.backlog)
		var err error
		if s.backlog, err = s.log.Read(s.backlog); err != nil {
			return err
		}
		if len(s.backlog) == had {
			return nil
		}
	}
}

// snapshot is what the maps have.
func (s *engineSource) snapshot() (map[datapath.LogKey]uint64, error) {
	found := map[datapath.LogKey]uint64{}
	if err := s.log.Alive(func(k datapath.LogKey, since uint64) { found[k] = since }); err != nil {
		return nil, fmt.Errorf("read what is alive: %w", err)
	}
	return found, nil
}

// rewind makes what is alive that of the place in the ring where the backlog begins. What no record
// is about was alive then if the maps have it, whenever they were looked at since; of the rest the
// first record tells: an end had begun before, a beginning had not.
func (s *engineSource) rewind(found map[datapath.LogKey]uint64) {
	first := map[datapath.LogKey]*datapath.LogRecord{}
	for i := range s.backlog {
		r := &s.backlog[i]
		if first[r.LogKey] == nil && (r.Event == datapath.LogCreated || r.Event == datapath.LogEnded) {
			first[r.LogKey] = r
		}
	}
	for k, since := range found {
		if first[k] == nil {
			s.add(k, s.begin(since))
		}
	}
	for k, r := range first {
		if r.Event == datapath.LogEnded {
			s.add(k, s.begin(r.Since))
		}
	}
}

// rewindLoss is rewind where records were lost, the first of them at a time: what has begun since then, or
// is not known to have begun before, was not alive. The maps are looked at again when that is recorded (compare).
func (s *engineSource) rewindLoss(found map[datapath.LogKey]uint64, lost uint64) {
	maps.DeleteFunc(found, func(_ datapath.LogKey, since uint64) bool {
		return since == 0 || s.begin(since)+sameBeginning > s.begin(lost)
	})
	s.rewind(found)
}

// remember adds what was alive when the log ended and of which no record is left: the end may be one of
// those that were lost, and it may have begun again since.
func (s *engineSource) remember(left *store.Left) {
	had := map[datapath.LogKey]bool{}
	for i := range s.backlog {
		k, _ := s.shown(s.backlog[i].LogKey)
		had[k] = true
	}
	for r := range left.Alive {
		if r.Source != natlog.Engine {
			continue
		}
		k := keyOf(&r.Translation)
		if _, known := s.alive[k]; !known && !had[k] && s.uses[k].sessions == 0 {
			s.add(k, r.Since)
		}
	}
}

// catchUp records what resume has read.
func (s *engineSource) catchUp() error {
	for part := range slices.Chunk(s.backlog, batchRecords) {
		s.store(part)
	}
	if s.backlog = nil; s.passed {
		s.noteMark(s.c.now())
		s.passed = false
	}
	s.log.Release()
	if s.lost {
		s.lost = false
		return s.recordLoss()
	}
	return nil
}

// --- records ---------------------------------------------------------------------------------

func (s *engineSource) take(context.Context) error {
	for range batchesAtOnce {
		var err error
		if s.batch, err = s.log.Read(s.batch[:0]); err != nil || len(s.batch) == 0 {
			return err
		}
		s.store(s.batch)
		s.log.Release()
	}
	return nil
}

// store records what an engine has, with the mark that says so.
func (s *engineSource) store(batch []datapath.LogRecord) {
	for i := range batch {
		s.number(batch[i].Sequence)
		s.apply(&batch[i])
	}
	s.noteMark(s.time(batch[len(batch)-1].Time))
}

// noteMark stores what was recorded, with how far that is.
func (s *engineSource) noteMark(at natlog.Micros) {
	s.mark.engine, s.mark.at, s.mark.offset = s.name, uint64(monotonic()), s.c.offset
	s.c.record(natlog.Mark(natlog.Engine, at, s.mark.String()))
	s.c.append()
}

// number counts a record. CPUs overtake each other by a little.
func (s *engineSource) number(n uint32) {
	if n != s.mark.next {
		if int32(n-s.mark.next) > 0 {
			s.ahead[n] = true
		}
		return
	}
	for s.mark.next++; s.ahead[s.mark.next]; s.mark.next++ {
		delete(s.ahead, s.mark.next)
	}
}

// hasAll reports whether all records before a number were recorded, but for those that were lost.
func (s *engineSource) hasAll(upto uint32) bool {
	if int32(s.mark.next-upto) >= 0 {
		return true
	}
	for n := range s.ahead {
		if int32(n-upto) >= 0 {
			return true
		}
	}
	return false
}

// shown is a key as the log has it; hides: others may be the same there.
func (s *engineSource) shown(k datapath.LogKey) (_ datapath.LogKey, hides bool) {
	if s.what.destinations || k.Destination == [4]byte{} {
		return k, false
	}
	k.Destination, k.DestinationPort = [4]byte{}, 0
	return k, true
}

// add notes that something has begun, and reports whether that is a beginning in the log.
func (s *engineSource) add(k datapath.LogKey, since natlog.Micros) (first bool) {
	_, known := s.alive[k]
	s.alive[k] = since
	shown, hides := s.shown(k)
	if !hides {
		return true
	}
	u := s.uses[shown]
	if first = u.sessions == 0; first {
		u.since = since
	}
	if !known {
		u.sessions++
	}
	s.uses[shown] = u
	return first
}

// drop notes that something has ended, and reports whether that is an end in the log, and since when it
// was there.
func (s *engineSource) drop(k datapath.LogKey) (since natlog.Micros, last bool) {
	since, known := s.alive[k]
	delete(s.alive, k)
	shown, _ := s.shown(k)
	u := s.uses[shown]
	if u.sessions == 0 {
		return since, true
	}
	if known && shown != k {
		u.sessions--
	}
	if s.uses[shown] = u; u.sessions > 0 {
		return since, false
	}
	delete(s.uses, shown)
	return u.since, true
}

// apply has a record change what is alive, and records it.
func (s *engineSource) apply(r *datapath.LogRecord) {
	at := s.time(r.Time)
	if s.touched != nil {
		s.touched[r.LogKey] = true
	}
	switch r.Event {
	case datapath.LogCreated:
		since, known := s.alive[r.LogKey]
		if known && (since == 0 || at-since < sameBeginning) {
			return // the maps had it before its record was read
		}
		if known {
			if since, last := s.drop(r.LogKey); last {
				s.record(r.LogKey, natlog.Ended, at, since, natlog.Unseen(max(since, s.floor)))
			}
		}
		if s.add(r.LogKey, at) {
			s.record(r.LogKey, natlog.Created, max(at, s.ended), at, "")
		}
	case datapath.LogEnded:
		_, known := s.alive[r.LogKey]
		since, last := s.drop(r.LogKey)
		if !known {
			since = s.begin(r.Since)
		}
		if last {
			s.record(r.LogKey, natlog.Ended, max(at, s.floor), since, "")
		}
	case datapath.LogExhausted:
		s.record(r.LogKey, natlog.Exhausted, at, 0, exhausted[r.Reason])
	case datapath.LogQuota:
		s.record(r.LogKey, natlog.Quota, at, 0, fmt.Sprintf("%s: %s refused until then", r.Reason, plural.Count(int(r.Times), "packet")))
	}
}

// exhausted says what a pool has none left of, by the reason for which packets are dropped.
var exhausted = map[string]string{"no-port": "no port left", "no-block": "no port block left", "no-address": "no address left"}

func (s *engineSource) record(k datapath.LogKey, event natlog.Event, at, since natlog.Micros, note string) {
	if k, _ = s.shown(k); event == natlog.Ended {
		s.ended = max(s.ended, at)
	}
	s.c.record(natlog.Record{Translation: s.translation(k), Event: event, Time: at, Since: since, Note: s.note(k, note)})
}

// note names the pool of blocks and of refusals.
func (s *engineSource) note(k datapath.LogKey, note string) string {
	if k.Kind != datapath.LogBlock && k.Kind != datapath.LogNothing {
		return note
	}
	if name := s.poolOf(k.External); name != "" {
		return natlog.OfPool(name, note)
	}
	return note
}

func (s *engineSource) poolOf(external [4]byte) string {
	if s.file == nil || external == [4]byte{} {
		return ""
	}
	name, known := s.pool[external]
	if !known {
		for i := range s.file.Pools {
			if slices.ContainsFunc(s.file.Pools[i].Addresses, func(r rulefile.AddressRange) bool { return r.Contains(netip.AddrFrom4(external)) }) {
				name = s.file.Pools[i].Name
			}
		}
		s.pool[external] = name
	}
	return name
}

var kinds = map[datapath.LogKind]natlog.Kind{
	datapath.LogNothing: natlog.NoKind, datapath.LogMapping: natlog.Mapping, datapath.LogSession: natlog.Session, datapath.LogBlock: natlog.Block,
}

func (s *engineSource) translation(k datapath.LogKey) natlog.Translation {
	tr := natlog.Translation{Kind: kinds[k.Kind], Source: natlog.Engine, Protocol: k.Protocol, Zone: uint16(k.Zone), LastPort: k.LastPort}
	set := func(to *netip.AddrPort, addr [4]byte, port uint16) {
		if addr != [4]byte{} {
			*to = netip.AddrPortFrom(netip.AddrFrom4(addr), port)
		}
	}
	set(&tr.Internal, k.Internal, k.InternalPort)
	set(&tr.External, k.External, k.ExternalPort)
	set(&tr.Destination, k.Destination, k.DestinationPort)
	if (tr.Kind != natlog.Mapping && tr.Kind != natlog.Session || k.Zone != 0) && tr.Internal.IsValid() {
		tr.Subscriber = s.subscriber(tr.Internal.Addr(), k.Zone)
	}
	return tr
}

// subscriber is what a block belongs to: a host, or all of a prefix; with its interface where that
// tells subscribers apart.
func (s *engineSource) subscriber(a netip.Addr, zone uint8) string {
	text := a.String()
	if s.file != nil && s.file.Subscribers.Prefix > 0 && s.file.Subscribers.Prefix < 32 {
		text = netip.PrefixFrom(a, s.file.Subscribers.Prefix).Masked().String()
	}
	if zone != 0 {
		text += " on " + strings.ToValidUTF8(s.log.Interface(zone), "?") // as files have it
	}
	return text
}

// keyOf is the inverse of translation.
func keyOf(tr *natlog.Translation) (k datapath.LogKey) {
	for kind, is := range kinds {
		if is == tr.Kind {
			k.Kind = kind
		}
	}
	get := func(a netip.AddrPort) ([4]byte, uint16) {
		if !a.Addr().Is4() {
			return [4]byte{}, 0
		}
		return a.Addr().As4(), a.Port()
	}
	k.Protocol, k.LastPort, k.Zone = tr.Protocol, tr.LastPort, uint8(tr.Zone)
	k.Internal, k.InternalPort = get(tr.Internal)
	k.External, k.ExternalPort = get(tr.External)
	k.Destination, k.DestinationPort = get(tr.Destination)
	return k
}

func (s *engineSource) each(yield func(natlog.Record) bool) {
	for k, since := range s.eachShown {
		if !yield(natlog.Record{Translation: s.translation(k), Event: natlog.Alive, Since: since, Note: s.note(k, "")}) {
			return
		}
	}
}

// eachShown gives what is alive as the log has it.
func (s *engineSource) eachShown(yield func(datapath.LogKey, natlog.Micros) bool) {
	for k, since := range s.alive {
		shown, hides := s.shown(k)
		if !hides && s.uses[shown].sessions == 0 && !yield(k, since) {
			return
		}
	}
	for k, u := range s.uses {
		if !yield(k, u.since) {
			return
		}
	}
}

// --- what is missing -------------------------------------------------------------------------

func (s *engineSource) tick(context.Context) (over bool, err error) {
	if !s.log.Up() {
		return true, s.end("the engine was taken down")
	}
	var now what
	now.record, now.destinations = s.log.What()
	switch {
	case s.log.Lost().First != 0:
		return false, s.recordLoss()
	case now.record == rulefile.LogDefault: // it is opened again, and asked to record
		return true, s.end("the rules have nothing recorded any more")
	case now != s.what:
		return false, s.compare(s.c.now())
	case len(s.ahead) == 0:
		s.holes = time.Time{}
	case s.holes.IsZero():
		s.holes = time.Now()
	case time.Since(s.holes) > holesFor:
		if since := s.begin(s.mark.at); !s.skip() { // cannot happen: a number is taken where a loss is counted, too
			s.c.gap(natlog.Engine, since, s.c.now(), "records of the engine are missing")
			return false, s.compare(since)
		}
	}
	return false, nil
}

// skip gives up the numbers that are missing before those that were read. It reports whether they are
// those of lost records.
func (s *engineSource) skip() (lost bool) {
	last := s.mark.next
	for n := range s.ahead {
		if int32(n-last) >= 0 {
			last = n + 1
		}
	}
	missing := uint64(last-s.mark.next) - uint64(len(s.ahead))
	lost = missing <= s.log.Lost().Total-s.mark.passed
	s.mark.passed += missing
	s.mark.next = last
	clear(s.ahead)
	s.holes = time.Time{}
	return lost
}

// recordLoss records that the ring was full, and what is alive after that.
func (s *engineSource) recordLoss() error {
	loss := s.log.Lost()
	first, last := s.begin(loss.First), s.time(loss.Last)
	s.c.gap(natlog.Engine, first, last, "the engine's log was full: nobody read it, or not fast enough")
	if err := s.compare(first); err != nil {
		return err
	}
	s.log.Recorded(loss)
	s.c.o.Say(fmt.Sprintf("the engine's log was full: it has a gap from %s to %s, and what is alive was read again", first.Time().Format(time.RFC3339), last.Time().Format(time.RFC3339)))
	return nil
}

// compare looks what is alive. What the maps do not have has ended unseen, after a time until which
// nothing was missed, what only they have has begun so; but for what records are about that came since the look began: they are right, since an
// end is recorded while the maps still have what ends, and a beginning when they have it.
func (s *engineSource) compare(missed natlog.Micros) error {
	now := s.what
	if now.record, now.destinations = s.log.What(); now.destinations != s.what.destinations {
		s.endAll("recorded otherwise from here on")
	}
	s.what = now
	s.touched = map[datapath.LogKey]bool{}
	defer func() { s.touched = nil }()
	found, err := s.snapshot()
	if err != nil {
		return err
	}
	for upto := s.log.Next(); ; { // not until nothing comes any more: in a flood that does not end
		if err := s.take(context.Background()); err != nil {
			return err
		}
		if s.log.Empty() || s.hasAll(upto) {
			break
		}
	}
	if len(s.ahead) > 0 {
		s.skip()
	}
	at := s.c.now()
	for k := range s.alive {
		if _, there := found[k]; there || s.touched[k] {
			continue
		}
		note := natlog.Unseen(max(missed, s.alive[k]))
		if !s.recorded(k.Kind) {
			note = "not recorded from here on"
		}
		if since, last := s.drop(k); last {
			s.record(k, natlog.Ended, at, since, note)
		}
	}
	for k, since := range found {
		since := s.begin(since)
		had, known := s.alive[k]
		if s.touched[k] || known && (since < missed || since-had < sameBeginning) {
			continue
		}
		if known { // it ended, and began again
			if since, last := s.drop(k); last {
				s.record(k, natlog.Ended, at, since, natlog.Unseen(max(missed, had)))
			}
		}
		if s.add(k, since) {
			s.record(k, natlog.Alive, at, since, "")
		}
	}
	s.floor = at
	s.noteMark(at)
	return nil
}

// recorded reports whether that kind is recorded now; mappings also where only those in no block are.
func (s *engineSource) recorded(kind datapath.LogKind) bool {
	switch kind {
	case datapath.LogBlock:
		return s.what.record != rulefile.LogDefault
	case datapath.LogSession:
		return s.what.record == rulefile.LogSessions
	}
	return s.what.record == rulefile.LogMappings || s.what.record == rulefile.LogBlocks
}

// end records the end of everything.
func (s *engineSource) end(note string) error {
	if err := s.take(context.Background()); err != nil {
		return err
	}
	s.endAll(note)
	s.c.append()
	s.c.o.Say(note)
	return nil
}

func (s *engineSource) endAll(note string) {
	now := s.c.now()
	for k, since := range s.eachShown {
		s.record(k, natlog.Ended, now, since, note)
	}
	clear(s.alive)
	clear(s.uses)
}
