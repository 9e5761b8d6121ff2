// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
)

// ICMP errors about packets of stateless maps: connection tracking, which translates the packet
// inside others, does not know these. An error reads, from the transport header on:
//
//	0 type, code, checksum, rest │ 8 IPv4 header of the packet inside │ 28 its transport header
//
// if that IPv4 header has no options. With options the transport header is elsewhere: then its
// checksum stays, and everything else is translated.

// Offsets from the transport header of an error on.
const (
	errorChecksum = 2
	aboutIPv4     = 8
	aboutSource   = aboutIPv4 + sourceOffset
	aboutDest     = aboutIPv4 + destOffset
	aboutPorts    = aboutIPv4 + 20 // without options
	aboutUDP      = aboutPorts + 6 // checksums
	aboutTCP      = aboutPorts + 16
)

func partAbout(t nftables.SetDatatype, offset uint32) part {
	return payloadPart(t, expr.PayloadBaseTransportHeader, offset)
}

// The packet inside an error that a host sends, as packets of that host are excluded: turned round.
var (
	partAboutSource   = partAbout(nftables.TypeIPAddr, aboutSource)
	partAboutDest     = partAbout(nftables.TypeIPAddr, aboutDest)
	partsExcludeAbout = []part{partAbout(nftables.TypeInetProto, aboutIPv4+9), partAboutDest, partAboutSource, partAbout(nftables.TypeInetService, aboutPorts)}
)

// setErrors has the types of errors.
const setErrors = "icmp_errors"

// icmp type @icmp_errors
func icmpError() []expr.Any {
	return append(protocol(unix.IPPROTO_ICMP), inSet(setErrors, payloadPart(nftables.TypeICMPType, expr.PayloadBaseTransportHeader, 0))...)
}

// statelessErrors are the rules for errors before connection tracking, of the gateway itself, and
// when they leave.
type statelessErrors struct{ in, own, out []Rule }

func (c *compiler) statelessErrors(rules []int, sources []string) statelessErrors {
	types := Set{Name: setErrors, Key: []nftables.SetDatatype{nftables.TypeICMPType}}
	for _, t := range []byte{3, 4, 5, 11, 12} { // those about which connection tracking asks for the packet inside
		types.Elements = append(types.Elements, Element{Key: []byte{t}, Rule: noRule})
	}
	c.set(types)
	toInside := c.chain("stateless_error_outside", c.rewritingAbout("stateless_error_outside", partAboutSource, aboutSource, rules,
		func(m rulefile.Map) (from, to netip.Prefix) { return m.Outside, m.Inside })...)
	toOutside := c.chain("stateless_error_inside", c.rewritingAbout("stateless_error_inside", partAboutDest, aboutDest, rules,
		func(m rulefile.Map) (from, to netip.Prefix) { return m.Inside, m.Outside })...)
	// Whoever on the way to the host sends the error, it leaves with the host's external address (RFC 5508 REQ-5).
	leaving := c.chain("stateless_error_leaving", rule(jumpTo(toOutside)), rule(concat(partAboutDest), rewriteMapped(sourceOffset)))

	var e statelessErrors
	for _, set := range sources {
		e.in = append(e.in, rule(inSet(setInside, partIn), icmpError(), inSet(set, partAboutDest), leavesBy(setOutside), notrack()))
		e.out = append(e.out, rule(untracked(), icmpError(), inSet(set, partAboutDest), goTo(leaving)))
	}
	e.in = append(e.in, rule(inSet(setLinks, partIn), icmpError(), jumpTo(toInside)))
	if c.armed { // both may be inside, where nothing was translated
		e.own = append(e.own, rule(inSet(setInsideHosts, partDest), verdictWord(expr.VerdictAccept)))
	}
	if c.excludes() {
		e.own = append(e.own, rule(icmpError(), inSet(setExclude, partsExcludeAbout...), verdictWord(expr.VerdictAccept)))
	}
	e.own = append(e.own, rule(inSet(setOutside, partOut), icmpError(), jumpTo(toOutside)))
	return e
}

// rewritingAbout gives the rules that write what the maps say over an address of the packet inside.
func (c *compiler) rewritingAbout(name string, p part, offset uint32, rules []int, sides func(rulefile.Map) (from, to netip.Prefix)) []Rule {
	hosts := Set{Name: name, Key: datatypes([]part{p}), Data: []nftables.SetDatatype{nftables.TypeIPAddr}}
	nets := Set{Name: name + "_nets", Key: datatypes([]part{p}), Data: []nftables.SetDatatype{nftables.TypeVerdict}, Interval: true}
	var spans []span
	for _, i := range rules {
		from, to := sides(c.file.Rules[i].Action.(rulefile.Map))
		if singleHost(from) {
			hosts.Elements = append(hosts.Elements, Element{Key: from.Addr().AsSlice(), Value: to.Addr().AsSlice(), Rule: noRule})
			continue
		}
		spans = append(spans, c.statelessSpans(i, from)...)
	}
	for _, piece := range flatten(spans) {
		from, to := sides(c.file.Rules[piece.rule].Action.(rulefile.Map))
		chain := c.chain(name+"_"+from.String(), about(offset, inPrefix(p, to))...)
		nets.Elements = append(nets.Elements, Element{
			Key: binaryutil.BigEndian.PutUint32(piece.first), End: binaryutil.BigEndian.PutUint32(piece.last),
			Verdict: goToVerdict(chain), Rule: noRule,
		})
	}
	var out []Rule
	if hosts.Elements != nil {
		c.set(hosts)
		// One that was written is found no more: what is last ends it.
		out = append(out, about(offset, mapped(hosts.Name, p))...)
	}
	if nets.Elements != nil {
		c.set(nets)
		out = append(out, rule(verdictMapped(nets.Name, p)))
	}
	return out
}

// inPrefix loads an address and gives it the network of another, into the first register.
func inPrefix(p part, network netip.Prefix) []expr.Any {
	network = network.Masked()
	return append(concat(p), &expr.Bitwise{
		SourceRegister: register0, DestRegister: register0, Len: 4,
		Mask: binaryutil.BigEndian.PutUint32(^uint32(0) >> network.Bits()), Xor: network.Addr().AsSlice(),
	})
}

// about writes the address that the words have loaded over that of the packet inside, and returns.
//
// A write updates one checksum, so that the sum of the field and of what is written stays. The error's own
// checksum is over all of it, so the address and two checksums inside take three writes: the new address
// and with it the transport checksum; the old one again and with it that of the error; the new one and with
// it that of the IPv4 header. Each of them leaves the sum of the whole error as it was.
func about(offset uint32, address []expr.Any) []Rule {
	old := []expr.Any{&expr.Payload{DestRegister: registerOld, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 4}}
	transport := func(checksum uint32, conditions []expr.Any) Rule {
		return rule(conditions, address, old,
			writeAbout(register0, offset, checksum), writeAbout(registerOld, offset, errorChecksum))
	}
	return []Rule{
		transport(aboutUDP, aboutProtocol(unix.IPPROTO_UDP, aboutUDP)),
		transport(aboutUDP, aboutProtocol(unix.IPPROTO_UDPLITE, aboutUDP)),
		transport(aboutTCP, aboutProtocol(unix.IPPROTO_TCP, aboutTCP)),
		rule(address, writeAbout(register0, offset, aboutIPv4+checksumOffset), verdictWord(expr.VerdictReturn)),
	}
}

const registerOld = unix.NFT_REG32_04

func writeAbout(register, offset, checksum uint32) []expr.Any {
	return []expr.Any{&expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 4,
		CsumType: expr.CsumTypeInet, CsumOffset: checksum,
	}}
}

// aboutProtocol is so if the packet inside has no options, is no later fragment, and has a checksum
// of that protocol: not 0, and not cut off.
func aboutProtocol(protocol byte, checksum uint32) []expr.Any {
	load := func(offset, length uint32) expr.Any {
		return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
	}
	return []expr.Any{
		load(aboutIPv4, 1),
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0x45}},
		load(aboutIPv4+9, 1),
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		load(aboutIPv4+6, 2),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0x1f, 0xff}, Xor: []byte{0, 0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0, 0}},
		load(checksum, 2),
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0, 0}},
	}
}
