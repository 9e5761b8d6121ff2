// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ExtendedFields are the optional fields that `conntrack -L -o extended` shows.
const ExtendedFields = HasTimeout | HasState | HasCounters | HasMark | HasSecmark | HasSecctx |
	HasZone | HasZoneOrig | HasZoneReply | HasDelta | HasHelper | HasUse

// AllFields is everything there is, as after `-o extended,id,ktimestamp,labels`.
const AllFields Fields = 1<<32 - 1

// AppendText appends the flow as a line of `conntrack -L -o extended`, without a
// newline: those of its fields that are in show. ReadText reads it back.
// Labels are shown by name only; the bit mask has no text form without the
// machine's connlabel.conf.
func (f *Flow) AppendText(b []byte, show Fields) []byte {
	has := f.Has & show
	b = padded(b, FamilyName(f.Family), 8)
	b = append(strconv.AppendUint(b, uint64(f.Family), 10), ' ')
	name := protoName(f.Proto)
	if name == "" {
		name = "unknown"
	}
	b = padded(b, name, 8)
	b = append(strconv.AppendUint(b, uint64(f.Proto), 10), ' ')
	if has&HasTimeout != 0 {
		b = append(strconv.AppendUint(b, uint64(f.Timeout), 10), ' ')
	}
	if has&HasState != 0 {
		b = append(append(b, f.State.String()...), ' ')
	}
	b = f.appendTuple(b, &f.Orig)
	if has&HasZoneOrig != 0 {
		b = field(b, "zone-orig=", uint64(f.ZoneOrig))
	}
	if has&HasCounters != 0 {
		b = field(b, "packets=", f.OrigCounters.Packets)
		b = field(b, "bytes=", f.OrigCounters.Bytes)
	}
	if f.Unreplied() {
		b = append(b, "[UNREPLIED] "...)
	}
	b = f.appendTuple(b, &f.Reply)
	if has&HasZoneReply != 0 {
		b = field(b, "zone-reply=", uint64(f.ZoneReply))
	}
	if has&HasCounters != 0 {
		b = field(b, "packets=", f.ReplyCounters.Packets)
		b = field(b, "bytes=", f.ReplyCounters.Bytes)
	}
	switch {
	case f.Status&StatusHWOffload != 0:
		b = append(b, "[HW_OFFLOAD] "...)
	case f.Status&StatusOffload != 0:
		b = append(b, "[OFFLOAD] "...)
	case f.Status&StatusAssured != 0:
		b = append(b, "[ASSURED] "...)
	}
	if has&HasMark != 0 {
		b = field(b, "mark=", uint64(f.Mark))
	}
	if has&HasSecmark != 0 {
		b = field(b, "secmark=", uint64(f.Secmark))
	}
	if has&HasSecctx != 0 {
		b = textField(b, "secctx=", f.Secctx)
	}
	if has&HasZone != 0 {
		b = field(b, "zone=", uint64(f.Zone))
	}
	if has&HasDelta != 0 {
		b = field(b, "delta-time=", f.DeltaSeconds)
	}
	if has&HasStart != 0 {
		b = timeField(b, "[start=", f.Start)
	}
	if has&HasStop != 0 {
		b = timeField(b, "[stop=", f.Stop)
	}
	if has&HasHelper != 0 {
		b = textField(b, "helper=", f.Helper)
	}
	if has&HasUse != 0 {
		b = field(b, "use=", uint64(f.Use))
	}
	if has&HasID != 0 {
		b = field(b, "id=", uint64(f.ID))
	}
	if has&HasNames != 0 {
		b = textField(b, "labels=", f.Names)
	}
	return b[:len(b)-1]
}

func (f *Flow) appendTuple(b []byte, t *Tuple) []byte {
	b = addrField(b, "src=", t.Src)
	b = addrField(b, "dst=", t.Dst)
	switch {
	case f.Proto == unix.IPPROTO_GRE:
		b = keyField(b, "srckey=0x", t.SrcPort)
		b = keyField(b, "dstkey=0x", t.DstPort)
	case f.hasPorts():
		b = field(b, "sport=", uint64(t.SrcPort))
		b = field(b, "dport=", uint64(t.DstPort))
	case f.isICMP():
		b = field(b, "type=", uint64(t.ICMPType))
		b = field(b, "code=", uint64(t.ICMPCode))
		b = field(b, "id=", uint64(t.SrcPort))
	}
	return b
}

func field(b []byte, key string, n uint64) []byte {
	return append(strconv.AppendUint(append(b, key...), n, 10), ' ')
}

func keyField(b []byte, key string, n uint16) []byte {
	return append(strconv.AppendUint(append(b, key...), uint64(n), 16), ' ')
}

func addrField(b []byte, key string, a netip.Addr) []byte {
	return append(a.AppendTo(append(b, key...)), ' ')
}

// textField replaces what a terminal would take for a command: the text may come
// from somebody else's dump.
func textField(b []byte, key string, value []byte) []byte {
	b = append(b, key...)
	for _, c := range value {
		if c < ' ' || c == 0x7f {
			c = '?'
		}
		b = append(b, c)
	}
	return append(b, ' ')
}

func timeField(b []byte, key string, ns int64) []byte {
	return append(time.Unix(0, ns).AppendFormat(append(b, key...), time.ANSIC), "] "...)
}

// padded appends s, filled up with blanks to width, and one more blank.
func padded(b []byte, s string, width int) []byte {
	b = append(b, s...)
	for n := len(s); n < width; n++ {
		b = append(b, ' ')
	}
	return append(b, ' ')
}
