// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"
	"slices"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// The vocabulary of rules. Each word is the expressions the nft program makes of
// the words in its comment, so that `nft list ruleset` shows them as such; all
// of them may use register 1, and a translation also registers 2 and 3.

// Offsets in an IPv4 header, RFC 791.
const (
	checksumOffset = 10
	sourceOffset   = 12
	destOffset     = 16
)

const (
	familyIPv4   = unix.NFPROTO_IPV4
	pseudoHeader = 1 // NFT_PAYLOAD_L4CSUM_PSEUDOHDR: the transport checksum follows
)

// rule joins words to a rule.
func rule(words ...[]expr.Any) Rule { return slices.Concat(words...) }

// iifname NAME, oifname NAME; not: iifname != NAME, oifname != NAME
func in(name string) []expr.Any     { return device(expr.MetaKeyIIFNAME, expr.CmpOpEq, name) }
func notIn(name string) []expr.Any  { return device(expr.MetaKeyIIFNAME, expr.CmpOpNeq, name) }
func out(name string) []expr.Any    { return device(expr.MetaKeyOIFNAME, expr.CmpOpEq, name) }
func notOut(name string) []expr.Any { return device(expr.MetaKeyOIFNAME, expr.CmpOpNeq, name) }

func device(key expr.MetaKey, op expr.CmpOp, name string) []expr.Any {
	var padded [unix.IFNAMSIZ]byte
	copy(padded[:], name)
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: padded[:]},
	}
}

// ip saddr NET; ip daddr NET; ip daddr != NET
func source(p netip.Prefix) []expr.Any  { return address(sourceOffset, expr.CmpOpEq, p) }
func dest(p netip.Prefix) []expr.Any    { return address(destOffset, expr.CmpOpEq, p) }
func notDest(p netip.Prefix) []expr.Any { return address(destOffset, expr.CmpOpNeq, p) }

// address compares the IPv4 address at an offset of the network header.
func address(offset uint32, op expr.CmpOp, p netip.Prefix) []expr.Any {
	p = p.Masked()
	words := []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}}
	if p.Bits() < 32 {
		mask := binaryutil.BigEndian.PutUint32(^uint32(0) << (32 - p.Bits()))
		words = append(words, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)})
	}
	return append(words, &expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()})
}

// meta l4proto PROTOCOL, that of IP: tcp 6, udp 17
func protocol(number uint8) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

// PROTOCOL dport PORT
func destPort(number uint8, port uint16) []expr.Any {
	return append(protocol(number),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)})
}

// fib daddr type local
func destIsLocal() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
	}
}

// ct state established,related
func established() []expr.Any {
	states := binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	none := make([]byte, 4)
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: states, Xor: none},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: none},
	}
}

// counter, and the verdicts; every rule counts, as iptables' do.
func accept() []expr.Any { return verdict(expr.VerdictAccept, "") }
func drop() []expr.Any   { return verdict(expr.VerdictDrop, "") }
func ret() []expr.Any    { return verdict(expr.VerdictReturn, "") }

func jump(chain string) []expr.Any { return verdict(expr.VerdictJump, chain) }

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: kind, Chain: chain}}
}

// counter dnat to ADDRESS:PORT
func dnatTo(to netip.AddrPort) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: familyIPv4, RegAddrMin: 1, RegProtoMin: 2, Specified: true},
	}
}

// counter masquerade
func masquerade() []expr.Any { return []expr.Any{&expr.Counter{}, &expr.Masq{}} }

// counter snat to ADDRESS:MIN-MAX
func snatTo(to netip.Addr, ports snapshot.PortRange) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: to.AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(ports.Min)},
		&expr.Immediate{Register: 3, Data: binaryutil.BigEndian.PutUint16(ports.Max)},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: familyIPv4, RegAddrMin: 1, RegProtoMin: 2, RegProtoMax: 3, Specified: true},
	}
}
