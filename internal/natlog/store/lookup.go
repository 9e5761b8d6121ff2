// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sort"
	"strconv"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/natlog/parquet"
)

// Question is who had an external endpoint in a time.
type Question struct {
	Address     netip.Addr
	Port        uint16
	Protocol    uint8 // 0: any
	Since, Upto natlog.Micros
}

// Life is the time in which somebody had the endpoint.
type Life struct {
	natlog.Translation
	// Since is when it began; 0: before Log, when the log first has it.
	Since, Log natlog.Micros
	// Until is when it ended; 0: it had not at the end of the log. It ended not before
	// Least: between the two nobody saw it end, or the log cannot be read.
	Until, Least natlog.Micros
	// Gap is that the log has a gap in the middle: the same was there again after it.
	Gap bool
}

// began is when it began by the clock of the hour that has it: where the clock was set back, that is
// not when it began by the clock of then.
func (l *Life) began() natlog.Micros {
	if l.Since == 0 || l.Since > l.Log {
		return l.Log
	}
	return l.Since
}

// Span is a part of the time asked about that the log does not have, and why.
type Span struct {
	Since, Until natlog.Micros
	Why          string
}

// Answer of the log. Without lives, rules and gaps nobody had the endpoint.
type Answer struct {
	Lives       []Life
	Rules       []RuleOwner // who had it by the rules alone
	Gaps        []Span
	Twice       []Span        // times that were twice, as the clock was set back
	Begin, End  natlog.Micros // of the log
	FilesRead   int
	RecordsRead int
}

// hour is the parts of one.
type hour struct {
	parts      []part
	begin, end time.Time // rounded to seconds, outwards
}

// span is its number, and from when to when it is.
func (h *hour) span() (number uint64, begin, end natlog.Micros) {
	return h.parts[0].number, natlog.MicrosOf(h.begin), natlog.MicrosOf(h.end)
}

// openedFile is a Parquet file of the log.
type openedFile struct {
	*parquet.File
	file       *os.File
	begin, end natlog.Micros
}

func (f *openedFile) close() { f.file.Close() }

func openFile(path string) (*openedFile, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	var f *parquet.File
	if err == nil {
		f, err = parquet.Open(file, info.Size())
	}
	if err == nil {
		err = checkFile(f)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	begin, err1 := strconv.ParseInt(f.About["natkit.begin"], 10, 64)
	end, err2 := strconv.ParseInt(f.About["natkit.end"], 10, 64)
	if err1 != nil || err2 != nil {
		file.Close()
		return nil, fmt.Errorf("%w: it does not say from when to when it is", parquet.ErrDamaged)
	}
	return &openedFile{f, file, natlog.Micros(begin), natlog.Micros(end)}, nil
}

// reader answers one question.
type reader struct {
	q      Question
	answer Answer
	hours  []hour
	// journals that were read: the running hour's is asked for more than once. Only the records
	// asked for are kept: where no Parquet file can be written there is one for each hour.
	journals map[string]content
	// beginnings are parts that have only some of what their hour begins with.
	beginnings map[string]bool
}

// Who asks the log in a folder. It may be in use.
func Who(dir string, q Question) (Answer, error) {
	for try := 0; ; try++ {
		r := reader{q: q, journals: map[string]content{}, beginnings: map[string]bool{}}
		err := r.ask(dir)
		if errors.Is(err, fs.ErrNotExist) && try < 5 { // a journal became a Parquet file
			if _, gone := os.Stat(dir); gone == nil {
				continue
			}
		}
		return r.answer, err
	}
}

func (r *reader) ask(dir string) error {
	list, err := parts(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no log in %s: natkit log records one", dir)
	}
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return fmt.Errorf("there is no log in %s: natkit log writes it", dir)
	}
	if err := r.group(list); err != nil {
		return err
	}
	r.answer.Begin, r.answer.End = natlog.MicrosOf(r.hours[0].begin), 0
	for _, h := range r.hours {
		r.answer.Begin = min(r.answer.Begin, natlog.MicrosOf(h.begin))
		r.answer.End = max(r.answer.End, natlog.MicrosOf(h.end))
	}
	var covered []Span
	before := false // the hour before has some of the time asked about
	for i := range r.hours {
		touched, err := r.touches(i)
		if err != nil {
			return err
		}
		if !touched {
			if err := r.gapsBefore(i, before); err != nil {
				return err
			}
			before = false
			continue
		}
		before = true
		spans, err := r.askHour(i)
		if err != nil {
			return err
		}
		covered = append(covered, spans...)
	}
	r.uncovered(covered)
	if err := r.askRules(dir); err != nil {
		return err
	}
	slices.SortStableFunc(r.answer.Lives, func(a, b Life) int { return cmp.Compare(cmp.Or(a.Since, a.Log), cmp.Or(b.Since, b.Log)) })
	return nil
}

// group makes hours of parts. Journals have no times in their names: they are read.
func (r *reader) group(list []part) error {
	for _, p := range list {
		if p.journal {
			c, err := readJournal(p.path)
			if err != nil && errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if err != nil || c.begin == 0 {
				continue // what it should have had is a gap
			}
			p.begin, p.end = c.begin.Time(), (c.end + 999_999).Time()
			c.rows = len(c.records)
			c.records = slices.Clone(slices.DeleteFunc(c.records, func(rec natlog.Record) bool { return !r.asked(&rec) }))
			r.journals[p.path] = c
		}
		if n := len(r.hours); n > 0 && r.hours[n-1].parts[0].number == p.number {
			h := &r.hours[n-1]
			h.parts = append(h.parts, p)
			if p.end.After(h.end) {
				h.end = p.end
			}
			continue
		}
		r.hours = append(r.hours, hour{parts: []part{p}, begin: p.begin, end: p.end})
	}
	if len(r.hours) == 0 {
		return errors.New("the log has no file that can be read")
	}
	return nil
}

// asked reports whether a record is about what is asked, or of a gap.
func (r *reader) asked(rec *natlog.Record) bool {
	return rec.Event == natlog.Gap || rec.External.Addr() == r.q.Address && rec.Has(r.q.Port, r.q.Protocol)
}

// touches reports whether an hour can have something of the time asked about.
func (r *reader) touches(at int) (bool, error) {
	_, begin, end := r.hours[at].span()
	if end < r.q.Since {
		return false, nil
	}
	if begin <= r.q.Upto+late {
		return true, nil
	}
	last, err := r.lastPart(&r.hours[at])
	return last >= 0, err
}

// lastPart is the last part of an hour that has something of the time asked about; -1: none has.
func (r *reader) lastPart(h *hour) (int, error) {
	for i := range slices.Backward(h.parts) {
		if has, err := r.hasOf(&h.parts[i]); has || err != nil {
			return i, err
		}
	}
	return -1, nil
}

// hasOf reports whether a part has something of the time asked about, or of before: what was read late
// may be in a part that begins later.
func (r *reader) hasOf(p *part) (bool, error) {
	begin := natlog.MicrosOf(p.begin)
	if begin <= r.q.Upto+late || begin > r.q.Upto+knownBy {
		return begin <= r.q.Upto+late, nil
	}
	if p.journal {
		return r.hasEarlier(r.journals[p.path].records), nil
	}
	f, err := openFile(p.path)
	if err != nil {
		return false, unlessGone(err)
	}
	earliest := natlog.MicrosOf(p.end)
	for i := range f.Groups {
		least, _ := f.Groups[i].Ints(columnTime)
		earliest = min(earliest, natlog.Micros(least))
	}
	if f.close(); earliest > r.q.Upto {
		return false, nil
	}
	records, _, _, err := r.read(*p)
	return r.hasEarlier(records), unlessGone(err)
}

// hasEarlier reports whether records asked for are not after the time asked about.
func (r *reader) hasEarlier(records []natlog.Record) bool {
	return slices.ContainsFunc(records, func(rec natlog.Record) bool { return rec.Event != natlog.Gap && rec.Time <= r.q.Upto })
}

// unlessGone is an error that a file is gone: it is listed again. What else is wrong with a file of
// later matters to who asks about that time.
func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// gapsBefore reads the gaps that an hour has of the time before it, if they can be of the time asked
// about: what was lost may be known only in the next hour.
func (r *reader) gapsBefore(at int, touched bool) error {
	if at == 0 {
		return nil
	}
	_, begin, _ := r.hours[at].span()
	_, _, end := r.hours[at-1].span()
	if !touched && (min(begin, end) > r.q.Upto+between || max(begin, end)+between < r.q.Since) {
		return nil
	}
	return r.gapsOf(r.hours[at].parts, begin+knownBy)
}

// gapsOf reads the gaps of parts that begin not after a time.
func (r *reader) gapsOf(list []part, latest natlog.Micros) error {
	for _, p := range list {
		if natlog.MicrosOf(p.begin) > latest {
			break
		}
		records, err := r.readGaps(p)
		for k := range records {
			r.gap(&records[k])
		}
		if err := unlessGone(err); err != nil { // who could not be read is no gap of that time
			return err
		}
	}
	return nil
}

// readGaps gives at least the gaps of a part. They have no address, so they are the first rows: of most
// files the end alone is read.
func (r *reader) readGaps(p part) ([]natlog.Record, error) {
	if !p.journal {
		f, err := openFile(p.path)
		if err != nil {
			return nil, err
		}
		f.close()
		if len(f.Groups) == 0 {
			return nil, nil
		}
		if least, _ := f.Groups[0].Strings(columnExternal); least != "" {
			return nil, nil
		}
	}
	records, _, _, err := r.read(p)
	return records, err
}

// askHour adds the lives of an hour that touch the time asked about, and gives what of time
// the hour has.
func (r *reader) askHour(at int) ([]Span, error) {
	h := &r.hours[at]
	live := map[natlog.Translation]*Life{}
	var ended []Life
	var covered []Span
	last, err := r.lastPart(h)
	if err != nil {
		return nil, err
	}
	whole := true // no part before this one is missing
	for i, p := range h.parts {
		if whole = whole && p.index == i; !whole {
			break // who was alive is not known from here on
		}
		if i > max(0, last) && len(live) == 0 {
			covered[0].Until = max(covered[0].Until, r.q.Upto)
			if err := r.gapsOf(h.parts[i:], r.q.Upto+knownBy); err != nil { // what was lost may be known only in a later part
				return nil, err
			}
			break
		}
		records, begin, end, err := r.read(p)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err != nil {
			r.answer.Gaps = append(r.answer.Gaps, Span{natlog.MicrosOf(p.begin), natlog.MicrosOf(p.end), fmt.Sprintf("%s cannot be read: %v", p.path, err)})
			whole = false
			break
		}
		if i == 0 {
			covered = []Span{{Since: begin, Until: end}}
		}
		covered[0].Until = max(covered[0].Until, end)
		for k := range records {
			if life, ok := follow(live, &records[k]); ok {
				ended = append(ended, life)
			}
			r.gap(&records[k])
		}
	}
	for _, life := range ended {
		if life.began() <= r.q.Upto && life.Until >= r.q.Since {
			r.add(life)
		}
	}
	for _, life := range live {
		if life.began() > r.q.Upto {
			continue
		}
		// Of the hour it was alive until the end, whatever the clock was when it ended.
		if r.end(life, at); life.Until == 0 || life.Until >= r.q.Since || r.q.Since <= covered[0].Until {
			r.add(*life)
		}
	}
	return covered, nil
}

// sameMoment reports whether two times are of one beginning: an engine knows some to a few
// milliseconds only, and nobody has the same port twice in so short a time.
func sameMoment(a, b natlog.Micros) bool {
	const near = 50_000
	return a == b || a != 0 && b != 0 && a-b < near && b-a < near
}

// follow has a record change who is alive, and gives the life that it ends.
func follow(live map[natlog.Translation]*Life, rec *natlog.Record) (ended Life, ok bool) {
	switch rec.Event {
	case natlog.Created, natlog.Alive:
		if live[rec.Translation] == nil {
			since := rec.Since
			if rec.Event == natlog.Created {
				since = cmp.Or(since, rec.Time)
			}
			live[rec.Translation] = &Life{Translation: rec.Translation, Since: since, Log: rec.Time}
		}
	case natlog.Ended:
		life, least := live[rec.Translation], rec.Least()
		if life == nil {
			life = &Life{Translation: rec.Translation, Since: rec.Since, Log: rec.Time}
		} else {
			least = max(least, life.Log)
		}
		delete(live, rec.Translation)
		life.Until, life.Least = rec.Time, min(max(least, rec.Since), rec.Time)
		return *life, true
	}
	return ended, false
}

func (r *reader) gap(rec *natlog.Record) {
	if rec.Event != natlog.Gap || min(rec.Since, rec.Time) > r.q.Upto || max(rec.Since, rec.Time) < r.q.Since {
		return
	}
	if rec.Since > rec.Time { // of a time that was twice
		r.answer.Twice = append(r.answer.Twice, Span{rec.Time, rec.Since, rec.Note})
		return
	}
	r.answer.Gaps = append(r.answer.Gaps, Span{rec.Since, rec.Time, rec.Note})
}

// add adds a life, once.
func (r *reader) add(life Life) {
	for i := range r.answer.Lives {
		if had := &r.answer.Lives[i]; had.Translation == life.Translation && sameMoment(had.Since, life.Since) && had.Until == life.Until {
			return
		}
	}
	r.answer.Lives = append(r.answer.Lives, life)
}

// end finds when a life ended that was there at the end of an hour: in the last hour that
// begins with it, or before the next one.
func (r *reader) end(life *Life, at int) {
	later := r.hours[at+1:]
	n := firstWithout(len(later), func(i int) bool { has, read := r.begins(&later[i], life, false); return has || !read })
	if n < len(later) && life.Since != 0 {
		if has, _ := r.begins(&later[n], life, true); has { // there after a gap: since when is not known of it
			life.Gap = true
			n += firstWithout(len(later)-n, func(i int) bool { has, read := r.begins(&later[n+i], life, true); return has || !read })
		}
	}
	last := n - 1 // of those that can be read
	for last >= 0 {
		if _, read := r.begins(&later[last], life, false); read {
			break
		}
		last--
	}
	in := &r.hours[at]
	if last >= 0 {
		in = &later[last]
	}
	end, ended, whole := r.endIn(in, life, last >= 0)
	switch {
	case ended:
	case n < len(later):
		life.Least, life.Until = end, natlog.MicrosOf(later[n].begin)
	case last+1 < n || !whole:
		life.Least = end
	}
}

// begins reports whether an hour begins with a life, and whether it can be read: who was killed before
// the beginning was whole has left an hour that says nothing of what it does not have. unsure: also one that
// looks the same, of which the hour does not know since when it was there.
func (r *reader) begins(h *hour, life *Life, unsure bool) (has, read bool) {
	for _, p := range h.parts {
		records, _, _, err := r.read(p)
		if err != nil {
			return false, false
		}
		for k := range records {
			rec := &records[k]
			if rec.Event == natlog.Alive && rec.Translation == life.Translation && (sameMoment(rec.Since, life.Since) || unsure && rec.Since == 0) {
				return true, true
			}
		}
		read = read || !r.beginnings[p.path]
	}
	return false, read
}

// endIn looks for the end of a life in an hour. begun: the hour begins with it. It gives how far the
// hour goes, and whether all of it could be read.
func (r *reader) endIn(h *hour, life *Life, begun bool) (end natlog.Micros, ended, whole bool) {
	open := map[natlog.Translation]*Life{}
	for i, p := range h.parts {
		records, _, upto, err := r.read(p)
		if err != nil || p.index != i {
			return end, false, false
		}
		end = max(end, upto)
		for k := range records {
			rec := &records[k]
			if was, ok := follow(open, rec); ok && was.Translation == life.Translation && (was.Since == 0 || sameMoment(was.Since, life.Since)) && (begun || rec.Time >= life.Log) {
				life.Until, life.Least = was.Until, was.Least
				return end, true, true
			}
		}
	}
	return end, false, true
}

// firstWithout is the first of n hours that does not have what the first ones have. It looks at the
// next ones first: what has ended may have begun again much later.
func firstWithout(n int, has func(i int) bool) int {
	least, most := 0, n
	for i, step := 0, 1; i < n; i, step = i+step, 2*step {
		if !has(i) {
			most = i
			break
		}
		least = i + 1
	}
	return least + sort.Search(most-least, func(i int) bool { return !has(least + i) })
}

// read gives the records of a part about what is asked, and of gaps.
func (r *reader) read(p part) (records []natlog.Record, begin, end natlog.Micros, err error) {
	r.answer.FilesRead++
	if p.journal {
		c := r.journals[p.path]
		r.beginnings[p.path] = !c.begun
		r.answer.RecordsRead += c.rows
		records = slices.Clone(c.records)
		if c.damaged > 0 {
			records = append(records, natlog.Record{Event: natlog.Gap, Since: c.begin, Time: c.end, Note: "the journal was damaged"})
		}
		return records, c.begin, c.end, nil
	}
	f, err := openFile(p.path)
	if err != nil {
		return nil, 0, 0, err
	}
	defer f.close()
	for g := range f.Groups {
		found, err := r.readGroup(f.File, g)
		if err != nil {
			return nil, 0, 0, err
		}
		records = append(records, found...)
	}
	asWritten(records, f.begin)
	r.beginnings[p.path] = f.About[beginningKey] != ""
	return records, f.begin, f.end, nil
}

// asWritten puts records of a Parquet file into the order in which they were written, as far as it
// matters: by time, but what was alive when the file began first. Of what ended a moment before, and
// was read a moment later, the end has an earlier time.
func asWritten(records []natlog.Record, begin natlog.Micros) {
	later := func(r *natlog.Record) int {
		if r.Event == natlog.Alive && r.Time == begin {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(records, func(a, b natlog.Record) int {
		return cmp.Or(cmp.Compare(later(&a), later(&b)), cmp.Compare(a.Time, b.Time))
	})
}

// readGroup gives the records of a row group about what is asked, and of gaps, which have no
// external address and so are in the first ones.
func (r *reader) readGroup(f *parquet.File, g int) ([]natlog.Record, error) {
	asked := r.q.Address.String()
	group := &f.Groups[g]
	least, most := group.Strings(columnExternal)
	if least != "" && (asked < least || asked > most) {
		return nil, nil
	}
	if least == asked && most == asked { // rows are sorted by port, too
		first, last := group.Ints(columnPort)
		_, lastOfBlocks := group.Ints(columnLast)
		if port := int64(r.q.Port); first > port || first > 0 && max(last, lastOfBlocks) < port {
			return nil, nil
		}
	}
	have := map[int]parquet.Column{}
	for _, c := range []int{columnExternal, columnPort, columnLast, columnProtocol} {
		column, err := f.Column(g, c)
		if err != nil {
			return nil, err
		}
		have[c] = column
		if c == columnExternal && !slices.Contains(column.Dict, asked) && !slices.Contains(column.Dict, "") {
			return nil, nil
		}
	}
	r.answer.RecordsRead += group.Rows
	addresses, ports, lasts := have[columnExternal], have[columnPort].Ints, have[columnLast].Ints
	want := slices.Index(addresses.Dict, asked)
	none := slices.Index(addresses.Dict, "")
	var rows []int
	for row, index := range addresses.Index {
		port := int64(r.q.Port)
		if int(index) == none || int(index) == want && (ports[row] == port || ports[row] == 0 || ports[row] <= port && port <= lasts[row]) {
			rows = append(rows, row)
		}
	}
	if len(rows) == 0 {
		return nil, nil
	}
	records, err := readRows(f, g, rows, have)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(records, func(rec natlog.Record) bool {
		return rec.Event != natlog.Gap && (rec.External.Addr() != r.q.Address || !rec.Has(r.q.Port, r.q.Protocol))
	}), nil
}

// uncovered adds the time asked about that no file has. Between two files there is none: the
// next one begins when the one before ends, or with a record of the gap.
func (r *reader) uncovered(covered []Span) {
	known := slices.Concat(covered, r.answer.Gaps)
	slices.SortFunc(known, func(a, b Span) int { return cmp.Compare(a.Since, b.Since) })
	miss := func(since, until natlog.Micros) {
		why := "the log has no file of that time"
		switch {
		case until <= r.answer.Begin+between:
			why = "the log begins later"
		case since+between >= r.answer.End:
			why = "the log ends before"
		}
		r.answer.Gaps = append(r.answer.Gaps, Span{since, until, why})
	}
	at, end := r.q.Since, r.q.Upto+1 // the first time not known, the first not asked about
	for _, s := range known {
		if s.Since >= end {
			break
		}
		if s.Until < at {
			continue
		}
		if s.Since > at {
			miss(at, s.Since)
		}
		at = s.Until + 1
	}
	if at < end {
		miss(at, r.q.Upto)
	}
}

const (
	// between is how far the end of a file and of the log can be off: ticks are a second apart,
	// names have seconds.
	between = natlog.Micros(2 * time.Second / time.Microsecond)
	// late is how long after it has happened something is recorded, at most: maybe in the next hour.
	late = natlog.Micros(time.Second / time.Microsecond)
	// knownBy is how long after it has happened a gap is recorded, at most, where all else is.
	knownBy = natlog.Micros(5 * time.Minute / time.Microsecond)
)
