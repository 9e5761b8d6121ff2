// SPDX-License-Identifier: Apache-2.0

// Package wire writes records as other programs read them: IPFIX, NetFlow v9, syslog and
// JSON. Pure.
package wire

import (
	"encoding/binary"
	"time"

	"natkit/internal/natlog"
)

// Flow writes records as messages of IPFIX (RFC 7011, events of RFC 8158) or NetFlow v9
// (RFC 3954). A message is sets, and a set is templates, or records of one template:
//
//	header  set: templates 256, 300  set of 256: record record  set of 300: record
//
// A template is in a message before the first of its records, and again, over UDP, after
// Refresh and after refreshMessages.
type Flow struct {
	Form    natlog.Form   // IPFIX or NetFlow9
	Domain  uint32        // observation domain, source ID
	Size    int           // of a message, at most
	Refresh time.Duration // of templates; 0: they are sent once

	sequence uint32 // IPFIX: of records; NetFlow: of messages
	started  time.Time

	templates map[shape]*template
	told      time.Time // when all templates were due the last time
	messages  int       // since then

	message []byte
	set     int // where the open set begins; 0: none is open
	setID   uint16
	records int // in the message, templates too
	counted int // those that the sequence counts
}

// template is how records of a shape are written.
type template struct {
	id     uint16
	fields []field
	told   bool
}

const (
	refreshMessages = 1000

	ipfixHeader, netflowHeader = 16, 20
	setHeader                  = 4

	// Identifiers of sets of templates.
	ipfixTemplates, ipfixOptions = 2, 3
	netflowTemplates             = 0
)

// NewFlow makes the encoder of a connection to a sink: the other end knows no templates, and records are
// counted from 0 (RFC 7011, section 3.1: a sequence is a transport session's).
func NewFlow(s natlog.Sink) *Flow {
	f := &Flow{Form: s.Form, Domain: s.Domain, Size: s.Size, templates: map[shape]*template{}}
	if s.Transport == natlog.UDP {
		f.Refresh = s.Refresh
	}
	return f
}

func (f *Flow) forget() {
	for _, t := range f.templates {
		t.told = false
	}
	f.messages = 0
}

// Encode writes records as whole messages and hands each to emit, until that fails. It gives
// how many records were in messages that emit took, and how many have no form: neither has
// one for rules that came into force, and NetFlow none for gaps, quotas and the approach of limits.
func (f *Flow) Encode(records []natlog.Record, now time.Time, emit func(message []byte) error) (sent, formless int, err error) {
	if f.started.IsZero() {
		f.started = now
	}
	if f.Refresh > 0 && (now.Sub(f.told) >= f.Refresh || now.Before(f.told) || f.messages >= refreshMessages) {
		f.forget()
		f.told = now
	}
	in := 0
	flush := func() error {
		if f.records == 0 {
			return nil
		}
		err := emit(f.finish(now))
		if err == nil {
			sent += in
		}
		in = 0
		return err
	}
	f.begin()
	var body []byte
	for i := range records {
		r := &records[i]
		if r.Event == natlog.Applied || f.Form == natlog.NetFlow9 && (r.Event == natlog.Gap || r.Event == natlog.Quota || r.Nearly()) {
			formless++
			continue
		}
		t := f.template(r)
		body = body[:0]
		for _, field := range t.fields {
			body = field.put(body, r)
		}
		if len(f.message)+f.room(t, len(body)) > f.Size && in > 0 {
			if err := flush(); err != nil {
				return sent, formless, err
			}
			f.begin()
		}
		if !t.told {
			f.putTemplate(t)
		}
		f.open(t.id)
		f.message = append(f.message, body...)
		f.records++
		f.counted++
		in++
	}
	return sent, formless, flush()
}

func (f *Flow) template(r *natlog.Record) *template {
	s := shapeOf(r)
	if f.Form == natlog.NetFlow9 {
		s.subscriber, s.pool = false, false
	}
	t := f.templates[s]
	if t == nil {
		t = &template{id: s.id(), fields: s.fields(f.Form == natlog.IPFIX)}
		if s.topic == ofGap {
			t.fields = gapFields()
		}
		f.templates[s] = t
	}
	return t
}

// room is how much a record takes at most, with its template and the headers of two sets,
// padded.
func (f *Flow) room(t *template, body int) int {
	n := body
	if f.setID != t.id || f.set == 0 || !t.told {
		n += setHeader
	}
	if !t.told {
		n += setHeader + 6 + 4*len(t.fields)
	}
	if f.Form == natlog.NetFlow9 {
		n += 6
	}
	return n
}

func (f *Flow) begin() {
	header := ipfixHeader
	if f.Form == natlog.NetFlow9 {
		header = netflowHeader
	}
	f.message = append(f.message[:0], make([]byte, header)...)
	f.set, f.records, f.counted = 0, 0, 0
}

// open begins a set, unless it is the open one.
func (f *Flow) open(id uint16) {
	if f.set != 0 && f.setID == id {
		return
	}
	f.close()
	f.set, f.setID = len(f.message), id
	f.message = binary.BigEndian.AppendUint16(f.message, id)
	f.message = append(f.message, 0, 0)
}

func (f *Flow) close() {
	if f.set == 0 {
		return
	}
	if f.Form == natlog.NetFlow9 { // its sets are padded
		for (len(f.message)-f.set)%4 != 0 {
			f.message = append(f.message, 0)
		}
	}
	binary.BigEndian.PutUint16(f.message[f.set+2:], uint16(len(f.message)-f.set))
	f.set = 0
}

func (f *Flow) putTemplate(t *template) {
	options := t.fields[0].id == 144 // exportingProcessId, a scope
	switch {
	case options:
		f.open(ipfixOptions)
	case f.Form == natlog.IPFIX:
		f.open(ipfixTemplates)
	default:
		f.open(netflowTemplates)
	}
	f.message = binary.BigEndian.AppendUint16(f.message, t.id)
	f.message = binary.BigEndian.AppendUint16(f.message, uint16(len(t.fields)))
	if options {
		f.message = binary.BigEndian.AppendUint16(f.message, 1)
	}
	for _, field := range t.fields {
		f.message = binary.BigEndian.AppendUint16(f.message, field.id)
		f.message = binary.BigEndian.AppendUint16(f.message, field.length)
	}
	t.told = true
	f.records++
}

// finish writes the header and counts the message.
func (f *Flow) finish(now time.Time) []byte {
	f.close()
	b, be := f.message, binary.BigEndian
	if f.Form == natlog.IPFIX {
		be.PutUint16(b[0:], 10)
		be.PutUint16(b[2:], uint16(len(b)))
		be.PutUint32(b[4:], uint32(now.Unix()))
		be.PutUint32(b[8:], f.sequence)
		be.PutUint32(b[12:], f.Domain)
		f.sequence += uint32(f.counted)
	} else {
		be.PutUint16(b[0:], 9)
		be.PutUint16(b[2:], uint16(f.records))
		be.PutUint32(b[4:], uint32(now.Sub(f.started).Milliseconds()))
		be.PutUint32(b[8:], uint32(now.Unix()))
		be.PutUint32(b[12:], f.sequence)
		be.PutUint32(b[16:], f.Domain)
		f.sequence++
	}
	f.messages++
	return b
}
