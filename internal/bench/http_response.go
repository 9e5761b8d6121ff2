// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"math"
)

// A response reads one HTTP/1 response that arrives in pieces of any size. It
// keeps at most one line of it and believes nothing: whatever a server sends,
// it ends with a verdict or stays within its bounds. It judges the form, not
// what the response says.
//
// reset, then feed until done or an error; when the connection ends first,
// endOfInput tells whether that is the response's end.
type response struct {
	phase   responsePhase
	chunked bool
	// What the server said about the connection: a word of its own, or by its
	// version alone.
	saysClose, saysKeepAlive, http11 bool

	status int
	length int64 // of the body as announced, -1 when it was not
	body   int64 // bytes of the body so far, without the frame of chunks
	left   int64 // bytes of the body or of the chunk still to come
	head   int   // bytes of status line, header lines and trailer so far

	wantServer bool // keep the Server header; costs an allocation
	server     string

	lineLen int // of the unfinished line, of which line holds the beginning
	line    [maxResponseLine]byte
}

type responsePhase uint8

const (
	readStatus responsePhase = iota
	readHeader
	readCounted   // body of known length
	readToEnd     // body that the end of the connection ends
	readChunkSize // line before a chunk
	readChunk
	readChunkEnd // empty line after a chunk
	readTrailer
	readDone
)

const (
	// maxResponseLine is how much of a line is looked at. A longer one is fine
	// unless it decides where the response ends.
	maxResponseLine = 256
	// maxResponseHead bounds status line, header and trailer together, interim
	// responses included.
	maxResponseHead = 64 << 10
)

var (
	errNotHTTP      = errors.New("the answer is not HTTP")
	errHeadTooLarge = errors.New("the answer's header is larger than 64 KiB")
	errBadChunk     = errors.New("the answer's chunks are malformed")
	errShortBody    = errors.New("the connection ended before the answer's body did")
	errNoResponse   = errors.New("the connection ended before the answer's header did")
)

// reset makes r ready for the next response.
func (r *response) reset() {
	r.phase, r.status, r.body, r.head, r.lineLen = readStatus, 0, 0, 0, 0
	r.resetHead()
}

// resetHead forgets what the header said.
func (r *response) resetHead() {
	r.chunked, r.saysClose, r.saysKeepAlive, r.http11 = false, false, false, false
	r.length, r.left = -1, 0
}

func (r *response) done() bool { return r.phase == readDone }

// inBody tells that the header is complete.
func (r *response) inBody() bool { return r.phase > readHeader }

// persistent tells whether the server means to keep the connection.
func (r *response) persistent() bool {
	return !r.saysClose && (r.http11 || r.saysKeepAlive)
}

// feed takes the next piece and returns how much of it belongs to the response:
// less than all only when it is done.
func (r *response) feed(p []byte) (used int, err error) {
	for used < len(p) && r.phase != readDone {
		rest := p[used:]
		switch r.phase {
		case readToEnd:
			r.body += int64(len(rest))
			return len(p), nil
		case readCounted, readChunk:
			n := min(r.left, int64(len(rest)))
			r.left -= n
			r.body += n
			used += int(n)
			if r.left == 0 {
				if r.phase == readCounted {
					r.phase = readDone
				} else {
					r.phase = readChunkEnd
				}
			}
		default:
			line, n, whole := r.takeLine(rest)
			used += n
			if r.phase == readStatus && !couldBeStatus(line) {
				return used, errNotHTTP
			}
			if r.phase == readChunkSize || r.phase == readChunkEnd {
				if !whole && r.lineLen > maxResponseLine {
					return used, errBadChunk
				}
			} else if r.head += n; r.head > maxResponseHead {
				return used, errHeadTooLarge
			}
			if !whole {
				continue
			}
			if err := r.takeWhole(line); err != nil {
				return used, err
			}
			r.lineLen = 0
		}
	}
	return used, nil
}

// endOfInput tells what the end of the connection means: nil when it ends the
// response.
func (r *response) endOfInput() error {
	switch {
	case r.phase == readToEnd || r.phase == readDone:
		return nil
	case r.inBody():
		return errShortBody
	default:
		return errNoResponse
	}
}

// takeLine takes a line or a part of one off p. It returns the line without its
// end, cut to maxResponseLine; r.lineLen is its true length. When the line goes
// on beyond p it returns what has come of it.
func (r *response) takeLine(p []byte) (line []byte, used int, whole bool) {
	end := bytes.IndexByte(p, '\n')
	part := p
	if whole = end >= 0; whole {
		part, used = p[:end], end+1
	} else {
		used = len(p)
	}
	if r.lineLen == 0 && whole { // the usual case: nothing to keep
		line = part[:min(len(part), maxResponseLine)]
	} else {
		if r.lineLen < maxResponseLine {
			copy(r.line[r.lineLen:], part)
		}
		line = r.line[:min(r.lineLen+len(part), maxResponseLine)]
	}
	r.lineLen += len(part)
	if whole && r.lineLen <= maxResponseLine && len(line) > 0 && line[len(line)-1] == '\r' {
		line = line[:len(line)-1]
	}
	return line, used, whole
}

// takeWhole takes the meaning of a complete line.
func (r *response) takeWhole(line []byte) error {
	overlong := r.lineLen > maxResponseLine
	switch r.phase {
	case readStatus:
		return r.takeStatus(line)
	case readHeader:
		if len(line) == 0 {
			r.headDone()
			return nil
		}
		return r.takeHeader(line, overlong)
	case readChunkSize:
		size, ok := chunkSize(line)
		switch {
		case !ok || overlong || size > math.MaxInt64-r.body:
			return errBadChunk
		case size == 0:
			r.phase = readTrailer
		default:
			r.phase, r.left = readChunk, size
		}
	case readChunkEnd:
		if len(line) != 0 {
			return errBadChunk
		}
		r.phase = readChunkSize
	case readTrailer:
		if len(line) == 0 {
			r.phase = readDone
		}
	}
	return nil
}

// couldBeStatus tells, from as much as is there, whether a line can be a status
// line: a server of another protocol is known by its first byte.
func couldBeStatus(line []byte) bool {
	const start = "HTTP/1."
	n := min(len(line), len(start))
	return string(line[:n]) == start[:n]
}

// takeStatus reads "HTTP/1.x NNN" and ignores the reason after it.
func (r *response) takeStatus(line []byte) error {
	if len(line) < 12 || line[7] < '0' || line[7] > '9' || line[8] != ' ' || (len(line) > 12 && line[12] != ' ') {
		return errNotHTTP
	}
	status, ok := decimal(line[9:12])
	if !ok || status < 100 {
		return errNotHTTP
	}
	r.http11 = line[7] >= '1'
	r.status = int(status)
	r.phase = readHeader
	return nil
}

// takeHeader reads a header line. Only those that say where the response ends
// matter, and they have to be right.
func (r *response) takeHeader(line []byte, overlong bool) error {
	if line[0] == ' ' || line[0] == '\t' { // continues the line before
		return nil
	}
	colon := bytes.IndexByte(line, ':')
	if colon <= 0 {
		if overlong {
			return nil
		}
		return errNotHTTP
	}
	name, value := line[:colon], bytes.Trim(line[colon+1:], " \t")
	switch {
	case isName(name, "content-length"):
		n, ok := decimal(value)
		if !ok || overlong || (r.length >= 0 && r.length != n) {
			return errNotHTTP
		}
		r.length = n
	case isName(name, "transfer-encoding"):
		if overlong {
			return errNotHTTP
		}
		r.chunked = hasToken(value, "chunked")
	case isName(name, "connection"):
		r.saysClose = r.saysClose || hasToken(value, "close")
		r.saysKeepAlive = r.saysKeepAlive || hasToken(value, "keep-alive")
	case r.wantServer && isName(name, "server"):
		r.server = string(value)
	}
	return nil
}

// headDone decides from the complete header how the body ends.
func (r *response) headDone() {
	switch {
	case r.status < 200 && r.status != 101: // interim: the response proper follows
		r.resetHead()
		r.phase = readStatus
	case r.status == 204 || r.status == 304 || r.status == 101:
		r.phase = readDone
	case r.chunked:
		r.phase = readChunkSize
	case r.length == 0:
		r.phase = readDone
	case r.length > 0:
		r.phase, r.left = readCounted, r.length
	default:
		r.phase = readToEnd
	}
}

// isName compares a header's name with one in lower case.
func isName(name []byte, lower string) bool {
	if len(name) != len(lower) {
		return false
	}
	for i, c := range name {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// hasToken looks for a word in a list separated by commas.
func hasToken(list []byte, lower string) bool {
	for len(list) > 0 {
		word := list
		if comma := bytes.IndexByte(list, ','); comma >= 0 {
			word, list = list[:comma], list[comma+1:]
		} else {
			list = nil
		}
		if isName(bytes.Trim(word, " \t"), lower) {
			return true
		}
	}
	return false
}

// decimal reads a number of digits alone.
func decimal(p []byte) (int64, bool) {
	var n int64
	for _, c := range p {
		if c < '0' || c > '9' || n > (math.MaxInt64-9)/10 {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, len(p) > 0
}

// chunkSize reads the hexadecimal number that begins a chunk; extensions after
// a semicolon are ignored.
func chunkSize(line []byte) (int64, bool) {
	if end := bytes.IndexByte(line, ';'); end >= 0 {
		line = line[:end]
	}
	line = bytes.Trim(line, " \t")
	var n int64
	for _, c := range line {
		digit := int64(0)
		switch lower := c | 0x20; {
		case c >= '0' && c <= '9':
			digit = int64(c - '0')
		case lower >= 'a' && lower <= 'f':
			digit = int64(lower-'a') + 10
		default:
			return 0, false
		}
		if n >= 1<<59 {
			return 0, false
		}
		n = n<<4 + digit
	}
	return n, len(line) > 0
}
