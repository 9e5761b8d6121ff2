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

// The vocabulary of compiled rule files: parts of packets that are looked up, several
// of them concatenated, and what is done with what is found.

// part is a part of a packet or of its connection that a set may have as key.
type part struct {
	datatype nftables.SetDatatype
	load     func(register uint32) expr.Any
}

func metaPart(t nftables.SetDatatype, key expr.MetaKey) part {
	return part{t, func(register uint32) expr.Any { return &expr.Meta{Key: key, Register: register} }}
}

func payloadPart(t nftables.SetDatatype, base expr.PayloadBase, offset uint32) part {
	return part{t, func(register uint32) expr.Any {
		return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: t.Bytes}
	}}
}

var (
	partIn       = metaPart(nftables.TypeIFName, expr.MetaKeyIIFNAME)
	partOut      = metaPart(nftables.TypeIFName, expr.MetaKeyOIFNAME)
	partProtocol = metaPart(nftables.TypeInetProto, expr.MetaKeyL4PROTO)
	partSource   = payloadPart(nftables.TypeIPAddr, expr.PayloadBaseNetworkHeader, sourceOffset)
	partDest     = payloadPart(nftables.TypeIPAddr, expr.PayloadBaseNetworkHeader, destOffset)
	partDestPort = payloadPart(nftables.TypeInetService, expr.PayloadBaseTransportHeader, 2)

	// As the connection's first packet arrived: ct original ip daddr.
	partFirstDest = part{nftables.TypeIPAddr, func(register uint32) expr.Any {
		return &expr.Ct{Register: register, Key: expr.CtKeyDST}
	}}
)

func datatypes(parts []part) []nftables.SetDatatype {
	types := make([]nftables.SetDatatype, len(parts))
	for i, p := range parts {
		types[i] = p.datatype
	}
	return types
}

// The registers that words use. Each holds four bytes, sixteen of them in a row.
const (
	register0 = unix.NFT_REG32_00
	register1 = unix.NFT_REG32_01
)

// concat loads parts one behind the other, from the first register on.
func concat(parts ...part) []expr.Any {
	var words []expr.Any
	register := uint32(register0)
	for _, p := range parts {
		words = append(words, p.load(register))
		register += (p.datatype.Bytes + 3) / 4
	}
	return words
}

// PARTS @SET
func inSet(set string, parts ...part) []expr.Any {
	return append(concat(parts...), &expr.Lookup{SourceRegister: register0, SetName: set})
}

// PARTS map @MAP, into the first registers; with a map to verdicts: PARTS vmap @MAP
func mapped(set string, parts ...part) []expr.Any {
	return append(concat(parts...),
		&expr.Lookup{SourceRegister: register0, DestRegister: register0, IsDestRegSet: true, SetName: set})
}

func verdictMapped(set string, parts ...part) []expr.Any {
	return append(concat(parts...), &expr.Lookup{SourceRegister: register0, IsDestRegSet: true, SetName: set})
}

// ... dnat to, ... snat to what the first register holds; withPort: and the second
func translate(kind expr.NATType, withPort bool) []expr.Any {
	n := &expr.NAT{Type: kind, Family: familyIPv4, RegAddrMin: register0}
	if withPort {
		n.RegProtoMin, n.Specified = register1, true
	}
	return []expr.Any{n}
}

// snat to ADDRESS[-ADDRESS][:PORT-PORT] [persistent]
func snatRange(r rulefile.AddressRange, ports rulefile.PortRange) []expr.Any {
	words := []expr.Any{&expr.Immediate{Register: 1, Data: r.First.AsSlice()}}
	n := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: familyIPv4, RegAddrMin: 1}
	if r.First != r.Last {
		words = append(words, &expr.Immediate{Register: 2, Data: r.Last.AsSlice()})
		n.RegAddrMax, n.Persistent = 2, true
	}
	return append(words, toPorts(n, ports)...)
}

// toPorts is a translation that gives ports of a range, if there is one, beside what it has
// of addresses in registers 1 and 2.
func toPorts(n *expr.NAT, ports rulefile.PortRange) []expr.Any {
	if ports.IsZero() {
		return []expr.Any{n}
	}
	n.RegProtoMin, n.RegProtoMax, n.Specified = 3, 4, true
	return []expr.Any{
		&expr.Immediate{Register: 3, Data: binaryutil.BigEndian.PutUint16(ports.First)},
		&expr.Immediate{Register: 4, Data: binaryutil.BigEndian.PutUint16(ports.Last)},
		n,
	}
}

// snat ip prefix to NET, dnat ip prefix to NET
func translatePrefix(kind expr.NATType, to netip.Prefix) []expr.Any {
	r := rulefile.RangeOf(to)
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: r.First.AsSlice()},
		&expr.Immediate{Register: 2, Data: r.Last.AsSlice()},
		&expr.NAT{Type: kind, Family: familyIPv4, RegAddrMin: 1, RegAddrMax: 2, Prefix: true},
	}
}

// masquerade [to :PORT-PORT]
func masqueradePorts(ports rulefile.PortRange) []expr.Any {
	if ports.IsZero() {
		return []expr.Any{&expr.Masq{}}
	}
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(ports.First)},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(ports.Last)},
		&expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 2},
	}
}

// snat to ct original ip daddr[:PORT-PORT]
func snatToAddressed(ports rulefile.PortRange) []expr.Any {
	return append(concat(partFirstDest), toPorts(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: familyIPv4, RegAddrMin: register0}, ports)...)
}

// ct status dnat; ct status ! dnat
func destTranslated() []expr.Any    { return destStatus(expr.CmpOpNeq) }
func destNotTranslated() []expr.Any { return destStatus(expr.CmpOpEq) }

func destStatus(op expr.CmpOp) []expr.Any {
	bit := binaryutil.NativeEndian.PutUint32(1 << 5) // IPS_DST_NAT
	none := make([]byte, 4)
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: bit, Xor: none},
		&expr.Cmp{Op: op, Register: 1, Data: none},
	}
}

// ct state untracked
func untracked() []expr.Any {
	state := binaryutil.NativeEndian.PutUint32(expr.CtStateBitUNTRACKED)
	none := make([]byte, 4)
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: state, Xor: none},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: none},
	}
}

// fib daddr type != local
func destIsNotLocal() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
	}
}

// fib daddr oifname @SET: where the packet would leave, asked before it is routed
func leavesBy(set string) []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: register0, FlagDADDR: true, ResultOIFNAME: true},
		&expr.Lookup{SourceRegister: register0, SetName: set},
	}
}

// oifname "lo"
func leavesByLoopback() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: keyLink("lo")},
	}
}

// jhash ip saddr mod N, into the first register
func hashOfSource(modulus int) []expr.Any {
	return append(concat(partSource), &expr.Hash{
		SourceRegister: register0, DestRegister: register0, Length: 4, Modulus: uint32(modulus), Seed: hashSeed, Type: expr.HashTypeJenkins,
	})
}

// hashSeed is the same in every namespace and after every start: a client keeps its target.
const hashSeed = 0x6e61746b

// notrack
func notrack() []expr.Any { return []expr.Any{&expr.Notrack{}} }

func goTo(chain string) []expr.Any { return []expr.Any{goToVerdict(chain)} }

// acceptVerdict ends the questions: the packet stays as it is.
func acceptVerdict() *expr.Verdict { return &expr.Verdict{Kind: expr.VerdictAccept} }

func goToVerdict(chain string) *expr.Verdict {
	return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}
}

// ip saddr set, ip daddr set what the first register holds
func rewriteMapped(offset uint32) []expr.Any {
	return []expr.Any{&expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: register0, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4,
		CsumType: expr.CsumTypeInet, CsumOffset: checksumOffset, CsumFlags: pseudoHeader,
	}}
}

// tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
func clampMSS() []expr.Any {
	const syn, rst = 2, 4
	return append(protocol(unix.IPPROTO_TCP),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | rst}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}},
		&expr.Rt{Register: 1, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.Exthdr{SourceRegister: 1, Type: 2, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt})
}

// add @SET { ip saddr ct count over N } drop
func overLimit(set string, n int) []expr.Any {
	return append(concat(partSource),
		&expr.Dynset{
			SrcRegKey: register0, SetName: set, Operation: uint32(unix.NFT_DYNSET_OP_ADD),
			Exprs: []expr.Any{&expr.Connlimit{Count: uint32(n), Flags: expr.NFT_CONNLIMIT_F_INV}},
		},
		&expr.Verdict{Kind: expr.VerdictDrop})
}

// ct timeout set NAME
func setTimeout(name string) []expr.Any {
	return []expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_CT_TIMEOUT, Name: name}}
}

// key joins the bytes of a key's parts, each padded to four.
func key(parts ...[]byte) []byte {
	var k []byte
	for _, p := range parts {
		k = append(k, p...)
		for len(k)%4 != 0 {
			k = append(k, 0)
		}
	}
	return k
}

func keyLink(name string) []byte {
	var padded [unix.IFNAMSIZ]byte
	copy(padded[:], name)
	return padded[:]
}

func keyPort(port uint16) []byte { return binaryutil.BigEndian.PutUint16(port) }
