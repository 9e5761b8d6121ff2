// SPDX-License-Identifier: Apache-2.0

package conntrack

// Reading of the table as text: what `conntrack -L` prints (plain, -o extended,
// id, ktimestamp, labels) and what is in /proc/net/nf_conntrack. The format has
// no specification; this is what nf_conntrack_standalone.c and
// libnetfilter_conntrack's snprintf_default.c print:
//
//	[family number] protocol number [timeout] [STATE] tuple [UNREPLIED] tuple [ASSURED] key=value...

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// TextResult is what a text dump was like.
type TextResult struct {
	Lines   uint64 // of entries, good and bad
	Entries uint64 // given to the function
	Bad     uint64 // lines that could not be read
	// Cut: the last line does not end with a newline, so more may be missing. The
	// line itself is used when nothing is missing in it.
	Cut bool
	// Announced is the number in the line that `conntrack -L` ends with ("... flow
	// entries have been shown"), where the dump has one.
	Announced    uint64
	HasAnnounced bool
}

// LineError is a line that could not be read.
type LineError struct {
	Line uint64 // counted from 1
	Text string // its beginning
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %v: %q", e.Line, e.Err, e.Text) }

func (e *LineError) Unwrap() error { return e.Err }

// maxLine is far above what an entry takes; a longer line is no dump.
const maxLine = 64 << 10

// ReadText gives every entry of a text dump that w chooses to fn; the Flow is
// used again for the next entry. A line that can't be read is given to bad and
// counted, and reading goes on. ReadText ends with fn's error when there is one.
func ReadText(ctx context.Context, r io.Reader, w Filter, fn func(*Flow) error, bad func(*LineError)) (TextResult, error) {
	var res TextResult
	var f Flow
	var torn []byte // an entry's beginning that the announcement cut off
	in := bufio.NewReaderSize(r, maxLine)
	for line := uint64(1); ; line++ {
		if line%4096 == 0 && ctx.Err() != nil {
			return res, fmt.Errorf("read conntrack dump: %w", ctx.Err())
		}
		b, err := in.ReadSlice('\n')
		last := errors.Is(err, io.EOF)
		tooLong := errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !last && !tooLong {
			return res, fmt.Errorf("read conntrack dump: %w", err)
		}
		if last && len(b) == 0 && torn == nil {
			return res, nil
		}
		parsed := false
		text := trimEnd(b)
		if torn != nil {
			text, torn = append(torn, text...), nil
		}
		switch {
		case tooLong:
			err = errLongLine
			text = bytes.Clone(text[:min(len(text), badTextLen)])
			for ferr := error(bufio.ErrBufferFull); errors.Is(ferr, bufio.ErrBufferFull); {
				_, ferr = in.ReadSlice('\n')
				res.Cut = errors.Is(ferr, io.EOF)
			}
		case len(text) == 0:
			continue
		case bytes.HasPrefix(text, []byte(announcement)):
			res.Announced, res.HasAnnounced = announced(text)
			continue
		default:
			err = f.parseText(text)
			if err != nil {
				if beginning, n, ok := tornLine(text); ok {
					torn, res.Announced, res.HasAnnounced = beginning, n, true
					continue
				}
			}
			res.Cut = last
			if err == nil && last && f.Has&HasUse == 0 {
				err = errCutLine // perhaps in the middle of an address or number
			}
			parsed = err == nil
		}
		res.Lines++
		if !parsed {
			res.Bad++
			bad(&LineError{Line: line, Text: string(text[:min(len(text), badTextLen)]), Err: err})
			continue
		}
		if !w.Match(&f) {
			continue
		}
		res.Entries++
		if err := fn(&f); err != nil {
			return res, err
		}
	}
}

const badTextLen = 200

var (
	errLongLine = errors.New("longer than any entry")
	errCutLine  = errors.New("the last line ends in the middle of an entry")
)

// tornLine finds the announcement within a line: `conntrack -L >FILE 2>&1` writes
// it, by way of stderr, before the last block of stdout. It returns what is
// before it, the beginning of an entry that the next line ends.
func tornLine(line []byte) (beginning []byte, n uint64, ok bool) {
	at := bytes.LastIndex(line, []byte(announcement))
	if at < 0 {
		return nil, 0, false
	}
	if n, ok = announced(line[at:]); !ok {
		return nil, 0, false
	}
	return bytes.Clone(line[:at]), n, true
}

const announcement = "conntrack v"

// announced reads N from "conntrack v1.4.7 (conntrack-tools): N flow entries
// have been shown."
func announced(line []byte) (uint64, bool) {
	_, after, ok := bytes.Cut(line, []byte("): "))
	if !ok {
		return 0, false
	}
	digits, _, _ := bytes.Cut(after, []byte(" "))
	return number(digits, 1<<63)
}

// parseText sets f from a line. Words of the form key=value or [FLAG] that it
// does not know are passed over: later kernels may print more.
func (f *Flow) parseText(line []byte) error {
	*f = Flow{}
	word, rest := nextWord(line)
	if s := string(word); s == "ipv4" || s == "ipv6" {
		if _, rest = nextWord(rest); len(rest) == 0 { // its number
			return errors.New("ends after the address family")
		}
		word, rest = nextWord(rest)
	}
	name := word
	word, rest = nextWord(rest)
	proto, ok := number(word, 255)
	if !ok || bytes.IndexByte(name, '=') >= 0 {
		return errors.New("does not begin with a protocol and its number")
	}
	f.Proto = uint8(proto)
	f.Status = StatusSeenReply | StatusConfirmed

	word, after := nextWord(rest)
	if n, ok := timeout(word); ok {
		f.Timeout, f.Has = n, f.Has|HasTimeout
		rest = after
		word, after = nextWord(rest)
	}
	if len(word) > 0 && word[0] >= 'A' && word[0] <= 'Z' {
		if err := f.textState(word); err != nil {
			return err
		}
		rest = after
	}
	var seen seenFields
	for {
		if used := f.commonTuple(rest, &seen); used > 0 {
			rest = rest[used:]
			continue
		}
		var eq int
		word, eq, rest = nextField(rest)
		switch {
		case len(word) == 0:
			return f.finishText(&seen)
		case word[0] == '[':
			rest = f.textFlag(word, rest)
		case eq > 0:
			if err := f.textField(word[:eq], word[eq+1:], &seen); err != nil {
				return err
			}
		case string(word) != "labels": // labels without a name
			return fmt.Errorf("word %q is neither key=value nor a flag", word)
		}
	}
}

// commonTuple reads a whole tuple of the form that nearly all have,
// "src=A dst=A sport=N dport=N ", and returns its length. It returns 0, and has
// read nothing, for any other; textField reads those.
func (f *Flow) commonTuple(b []byte, seen *seenFields) int {
	dir, to := 0, &f.Orig
	if seen.src[0] {
		dir, to = 1, &f.Reply
	}
	if len(b) < 4 || string(b[:4]) != "src=" || seen.src[dir] || !f.hasPorts() {
		return 0
	}
	var t Tuple
	rest := b[4:]
	src, n := addressPrefix(rest)
	if n == 0 || !hasKey(rest, n, " dst=") {
		return 0
	}
	rest = rest[n+5:]
	dst, n := addressPrefix(rest)
	if n == 0 || !hasKey(rest, n, " sport=") {
		return 0
	}
	rest = rest[n+7:]
	sport, n := port(rest)
	if n == 0 || !hasKey(rest, n, " dport=") {
		return 0
	}
	rest = rest[n+7:]
	dport, n := port(rest)
	if n == 0 || n == len(rest) || rest[n] != ' ' {
		return 0
	}
	t.Src, t.Dst, t.SrcPort, t.DstPort = src, dst, sport, dport
	*to = t
	seen.reply = dir == 1
	seen.src[dir], seen.dst[dir], seen.sport[dir], seen.dport[dir] = true, true, true, true
	return len(b) - len(rest) + n + 1
}

func hasKey(b []byte, at int, key string) bool {
	return len(b) >= at+len(key) && string(b[at:at+len(key)]) == key
}

// seenFields is what a line had, by direction.
type seenFields struct {
	reply                            bool // reading the reply direction
	src, dst, sport, dport, icmp, id [2]bool
}

func (f *Flow) textState(word []byte) error {
	first, ok := firstState(f.Proto)
	if !ok {
		return fmt.Errorf("state %q: protocol %s has no states", word, ProtoName(f.Proto))
	}
	for i, name := range stateNames[first : first+sctpStates] {
		if name != "" && string(word) == name {
			f.State, f.Has = first+State(i), f.Has|HasState
			return nil
		}
	}
	if string(word) == "LISTEN" && f.Proto == unix.IPPROTO_TCP {
		f.State, f.Has = TCPSynSent2, f.Has|HasState
		return nil
	}
	return fmt.Errorf("state %q: not a state of %s", word, ProtoName(f.Proto))
}

// textFlag reads a word in brackets. A time has blanks in it, so it may take
// more of the line; what is left is returned.
func (f *Flow) textFlag(word, rest []byte) []byte {
	switch string(word) {
	case "[UNREPLIED]":
		f.Status &^= StatusSeenReply
	case "[ASSURED]":
		f.Status |= StatusAssured
	case "[OFFLOAD]":
		f.Status |= StatusOffload
	case "[HW_OFFLOAD]":
		f.Status |= StatusOffload | StatusHWOffload
	default:
		start := bytes.HasPrefix(word, []byte("[start="))
		if !start && !bytes.HasPrefix(word, []byte("[stop=")) {
			return rest
		}
		end := bytes.IndexByte(rest, ']')
		if end < 0 {
			return rest
		}
		text := string(word[bytes.IndexByte(word, '=')+1:]) + " " + string(rest[:end])
		// conntrack(8) prints local time, without a zone.
		if t, err := time.ParseInLocation(time.ANSIC, text, time.Local); err == nil {
			if start {
				f.Start, f.Has = t.UnixNano(), f.Has|HasStart
			} else {
				f.Stop, f.Has = t.UnixNano(), f.Has|HasStop
			}
		}
		return rest[end+1:]
	}
	return rest
}

// textField reads one key=value.
func (f *Flow) textField(key, value []byte, seen *seenFields) error {
	var n uint64
	ok := true
	// The reply tuple begins with the second src=.
	if string(key) == "src" {
		if seen.src[0] {
			seen.reply = true
		}
	}
	dir, t, c := 0, &f.Orig, &f.OrigCounters
	if seen.reply {
		dir, t, c = 1, &f.Reply, &f.ReplyCounters
	}
	switch string(key) {
	case "src":
		t.Src, ok = address(value)
		ok = ok && !seen.src[dir]
		seen.src[dir] = true
	case "dst":
		t.Dst, ok = address(value)
		ok = ok && !seen.dst[dir]
		seen.dst[dir] = true
	case "sport":
		n, ok = number(value, 1<<16-1)
		t.SrcPort, seen.sport[dir] = uint16(n), true
	case "dport":
		n, ok = number(value, 1<<16-1)
		t.DstPort, seen.dport[dir] = uint16(n), true
	case "srckey":
		n, ok = hexadecimal(value)
		t.SrcPort, seen.sport[dir] = uint16(n), true
	case "dstkey":
		n, ok = hexadecimal(value)
		t.DstPort, seen.dport[dir] = uint16(n), true
	case "type":
		n, ok = number(value, 255)
		t.ICMPType, seen.icmp[dir] = uint8(n), true
	case "code":
		n, ok = number(value, 255)
		t.ICMPCode = uint8(n)
	case "id":
		// An ICMP tuple has one; the entry's own comes after them.
		if f.isICMP() && !seen.id[dir] {
			n, ok = number(value, 1<<16-1)
			t.SrcPort, seen.id[dir] = uint16(n), true
			break
		}
		n, ok = number(value, 1<<32-1)
		f.ID, f.Has = uint32(n), f.Has|HasID
	case "packets":
		c.Packets, ok = number(value, 1<<64-1)
		f.Has |= HasCounters
	case "bytes":
		c.Bytes, ok = number(value, 1<<64-1)
		f.Has |= HasCounters
	case "mark":
		n, ok = number(value, 1<<32-1)
		f.Mark, f.Has = uint32(n), f.Has|HasMark
	case "secmark":
		n, ok = number(value, 1<<32-1)
		f.Secmark, f.Has = uint32(n), f.Has|HasSecmark
	case "use":
		n, ok = number(value, 1<<32-1)
		f.Use, f.Has = uint32(n), f.Has|HasUse
	case "zone":
		n, ok = number(value, 1<<16-1)
		f.Zone, f.Has = uint16(n), f.Has|HasZone
	case "zone-orig":
		n, ok = number(value, 1<<16-1)
		f.ZoneOrig, f.Has = uint16(n), f.Has|HasZoneOrig
	case "zone-reply":
		n, ok = number(value, 1<<16-1)
		f.ZoneReply, f.Has = uint16(n), f.Has|HasZoneReply
	case "delta-time":
		f.DeltaSeconds, ok = number(value, 1<<64-1)
		f.Has |= HasDelta
	case "secctx":
		f.Secctx, f.Has = value, f.Has|HasSecctx
	case "helper":
		f.Helper, f.Has = value, f.Has|HasHelper
	case "labels":
		f.Names, f.Has = value, f.Has|HasNames
	}
	if !ok {
		return fmt.Errorf("%s=%s: not a value of that key", key, value)
	}
	return nil
}

// finishText checks that nothing is missing, and sets what follows from the rest.
func (f *Flow) finishText(seen *seenFields) error {
	for dir, name := range [2]string{"original", "reply"} {
		switch {
		case !seen.src[dir] || !seen.dst[dir]:
			return fmt.Errorf("no addresses of the %s direction", name)
		// A kernel built without tracking of another protocol shows it without ports.
		case (f.Proto == unix.IPPROTO_TCP || f.Proto == unix.IPPROTO_UDP) && (!seen.sport[dir] || !seen.dport[dir]):
			return fmt.Errorf("no ports of the %s direction", name)
		case f.isICMP() && !seen.icmp[dir]:
			return fmt.Errorf("no ICMP type of the %s direction", name)
		}
	}
	f.Family = unix.AF_INET
	if f.Orig.Src.Is6() {
		f.Family = unix.AF_INET6
	}
	for _, a := range [3]netip.Addr{f.Orig.Dst, f.Reply.Src, f.Reply.Dst} {
		if a.Is6() != f.Orig.Src.Is6() {
			return errors.New("addresses of two families")
		}
	}
	if f.SNAT() {
		f.Status |= StatusSrcNAT
	}
	if f.DNAT() {
		f.Status |= StatusDstNAT
	}
	return nil
}

// trimEnd takes away the end of the line and the blank that /proc has before it.
func trimEnd(b []byte) []byte {
	for len(b) > 0 && (b[len(b)-1] == '\n' || b[len(b)-1] == ' ' || b[len(b)-1] == '\r') {
		b = b[:len(b)-1]
	}
	return b
}

// nextWord splits the first word off a line.
func nextWord(b []byte) (word, rest []byte) {
	for len(b) > 0 && b[0] == ' ' {
		b = b[1:]
	}
	for i, c := range b {
		if c == ' ' {
			return b[:i], b[i+1:]
		}
	}
	return b, nil
}

// nextField is nextWord that also says where the word has its first '='; 0 when
// it has none.
func nextField(b []byte) (word []byte, eq int, rest []byte) {
	for len(b) > 0 && b[0] == ' ' {
		b = b[1:]
	}
	for i, c := range b {
		switch {
		case c == ' ':
			return b[:i], eq, b[i+1:]
		case c == '=' && eq == 0:
			eq = i
		}
	}
	return b, eq, nil
}

func number(b []byte, limit uint64) (uint64, bool) {
	var n uint64
	if len(b) == 0 || len(b) > 20 {
		return 0, false
	}
	for _, c := range b {
		d := uint64(c - '0')
		if d > 9 || n > (limit-d)/10 {
			return 0, false
		}
		n = n*10 + d
	}
	return n, true
}

// timeout reads seconds; old kernels print an entry that expired already with a
// negative number.
func timeout(b []byte) (uint32, bool) {
	negative := len(b) > 1 && b[0] == '-'
	if negative {
		b = b[1:]
	}
	n, ok := number(b, 1<<32-1)
	if negative {
		n = 0
	}
	return uint32(n), ok
}

func hexadecimal(b []byte) (uint64, bool) {
	if len(b) < 3 || len(b) > 6 || b[0] != '0' || b[1] != 'x' {
		return 0, false
	}
	var n uint64
	for _, c := range b[2:] {
		h := hexValue[c]
		if h > 15 {
			return 0, false
		}
		n = n<<4 | uint64(h)
	}
	return n, true
}

// address reads an address without a zone.
func address(b []byte) (netip.Addr, bool) {
	if a, n := addressPrefix(b); n > 0 && n == len(b) {
		return a, true
	}
	a, err := netip.ParseAddr(stringOf(b))
	// The error keeps the string, which is ours only for now: it is dropped here.
	return a, err == nil && a.Is6() && a.Zone() == ""
}

// addressPrefix reads an address that b begins with, and returns its length; 0
// when there is none. It leaves IPv6 with an IPv4 tail to netip.
func addressPrefix(b []byte) (netip.Addr, int) {
	if a, n := address4(b); n > 0 {
		return netip.AddrFrom4(a), n
	}
	if a, n := address6(b); n > 0 {
		return netip.AddrFrom16(a), n
	}
	return netip.Addr{}, 0
}

// address6 is address4 for IPv6.
func address6(b []byte) (a [16]byte, n int) {
	filled, gap := 0, -1 // bytes of a, and where among them the zeros of "::" belong
	if len(b) >= 2 && b[0] == ':' && b[1] == ':' {
		gap, n = 0, 2
	}
	for {
		v, digits := uint16(0), 0
		for ; n < len(b) && digits < 5 && hexValue[b[n]] < 16; n++ {
			v = v<<4 | uint16(hexValue[b[n]])
			digits++
		}
		if digits == 0 && gap == filled { // ends with "::"
			break
		}
		if digits == 0 || digits > 4 {
			return a, 0
		}
		a[filled], a[filled+1] = byte(v>>8), byte(v)
		if filled += 2; filled == len(a) || n == len(b) || b[n] != ':' {
			break
		}
		if n++; n < len(b) && b[n] == ':' {
			if gap >= 0 {
				return a, 0
			}
			gap = filled
			n++
		}
	}
	switch {
	case n < len(b) && (b[n] == ':' || b[n] == '.'):
		return a, 0
	case gap < 0 && filled < len(a) || gap >= 0 && filled == len(a):
		return a, 0
	case gap >= 0:
		tail := filled - gap
		copy(a[len(a)-tail:], a[gap:filled])
		clear(a[gap : len(a)-tail])
	}
	return a, n
}

// hexValue is what a hexadecimal digit is worth; above 15 for what is none.
var hexValue = func() (v [256]uint8) {
	for i := range v {
		v[i] = 16
	}
	for i := range 10 {
		v['0'+i] = uint8(i)
	}
	for i := range 6 {
		v['a'+i], v['A'+i] = uint8(10+i), uint8(10+i)
	}
	return v
}()

// address4 reads an IPv4 address that b begins with, and returns its length; 0
// when there is none.
func address4(b []byte) (a [4]byte, n int) {
	for octet := range a {
		if octet > 0 {
			if n >= len(b) || b[n] != '.' {
				return a, 0
			}
			n++
		}
		v, digits := uint(0), 0
		for ; n < len(b) && b[n]-'0' <= 9; n++ {
			v = v*10 + uint(b[n]-'0')
			digits++
		}
		if digits == 0 || digits > 3 || v > 255 {
			return a, 0
		}
		a[octet] = byte(v)
	}
	return a, n
}

// port reads a port number that b begins with, and returns its length; 0 when
// there is none.
func port(b []byte) (p uint16, n int) {
	v := uint(0)
	for ; n < len(b) && b[n]-'0' <= 9; n++ {
		v = v*10 + uint(b[n]-'0')
	}
	if n == 0 || n > 5 || v > 1<<16-1 {
		return 0, 0
	}
	return uint16(v), n
}
