// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// TCP connections that nobody keeps a state of: what a segment says follows from
// the connection's flow, or from the segment that it answers.
//
//	client (left)              server (right)
//	SYN      C, -       ──►                       a flow's first packet
//	                    ◄──    SYN|ACK  S, C+1
//	ACK      C+1, S+1   ──►                       established
//	                    ◄──    FIN|ACK  S+1, C+1  only where the server closes
//	FIN|ACK  C+1, S+2   ──►
//	                    ◄──    ACK      S+2, C+2  complete: the router has TIME_WAIT
//
// Both numbers that a segment carries are cookies. C names the flow, whose addresses
// the client knows; S is a hash of the addresses that the server saw, so that it
// knows them again. A segment that a router translated to where it does not belong,
// or one of an earlier load, does not fit and is counted instead of answered. One
// lost segment ends its connection: nothing is sent twice.
#ifndef BENCH_TCP_H
#define BENCH_TCP_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>

#include "frame.h"

// bench_segment is what a load sends of TCP.
enum bench_segment {
	BENCH_NO_SEGMENT, // it is a load of UDP
	BENCH_CONNECT,    // SYNs
	BENCH_DATA,       // data on connections that are open, which nobody answers
};

enum { TCP_FIN = 1, TCP_SYN = 2, TCP_ACK = 16, TCP_FLAGS = 0x3f };

// A segment as it is written, 2 bytes aligned.
struct segment {
	__u8 macs[12];
	__be16 ether_type;
	__u8 version, tos;
	__be16 ip_length;
	__be16 id, fragment;
	__u8 ttl, protocol;
	__u16 ip_check;
	__be32 source, target;
	__be16 source_port, target_port;
	__be32 number, acknowledged;
	__u8 offset, flags;
	__be16 window;
	__u16 check;
	__be16 urgent;
} __attribute__((packed, aligned(2)));

enum { BENCH_IP_AND_TCP = 40 };

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static __always_inline __u32 halves(__u32 word)
{
	return (word & 0xffff) + (word >> 16);
}

static __always_inline __u32 mixed(__u32 x)
{
	x = (x ^ x >> 16) * 0x7feb352d;
	x = (x ^ x >> 15) * 0x846ca68b;
	return x ^ x >> 16;
}

// client_cookie has the flow in its upper 22 bits.
static __always_inline __u32 client_cookie(__u32 flow, __u32 salt)
{
	return flow << BENCH_COOKIE_BITS | mixed(flow ^ salt) >> (32 - BENCH_COOKIE_BITS);
}

static __always_inline __u32 server_cookie(__be32 source, __be16 port, __be32 target, __u32 salt)
{
	return mixed(mixed(mixed(source ^ salt) ^ target) ^ port);
}

// seal writes the headers' constant parts and the checksums. Bytes after the headers
// are to be 0.
static __always_inline void seal(struct segment *s, __u32 payload)
{
	__u32 addresses = halves(s->source) + halves(s->target);
	__be16 length = bpf_htons(BENCH_IP_AND_TCP + payload);

	s->ether_type = bpf_htons(0x0800);
	s->version = 0x45;
	s->tos = 0;
	s->ip_length = length;
	s->id = 0;
	s->fragment = 0;
	s->ttl = 64;
	s->protocol = 6;
	s->ip_check = ~fold((__u64)addresses + bpf_htons(0x4500) + length + bpf_htons(64 << 8 | 6));
	s->offset = 5 << 4;
	s->urgent = 0;
	s->check = ~fold((__u64)addresses + bpf_htons(6) + bpf_htons(20 + payload) +
			 s->source_port + s->target_port + halves(s->number) +
			 halves(s->acknowledged) + bpf_htons(5 << 12 | s->flags) + s->window);
}

// is_sound tells whether the TCP checksum of a segment is right whose payload is 0.
static __always_inline int is_sound(const struct segment *s)
{
	__u64 sum = halves(s->source) + halves(s->target) + bpf_htons(6) +
		    bpf_htons(bpf_ntohs(s->ip_length) - 20) + s->source_port + s->target_port +
		    halves(s->number) + halves(s->acknowledged) +
		    bpf_htons(s->offset << 8 | s->flags) + s->window + s->check + s->urgent;

	return fold(sum) == 0xffff;
}

// answer makes of a segment the one back to where it came from.
static __always_inline void answer(struct segment *s, __u8 flags, __u32 number, __u32 acknowledged)
{
	__u8 mac[6];
	__be32 source = s->source;
	__be16 port = s->source_port;

	__builtin_memcpy(mac, s->macs, 6);
	__builtin_memcpy(s->macs, s->macs + 6, 6);
	__builtin_memcpy(s->macs + 6, mac, 6);
	s->source = s->target;
	s->target = source;
	s->source_port = s->target_port;
	s->target_port = port;
	s->number = bpf_htonl(number);
	s->acknowledged = bpf_htonl(acknowledged);
	s->flags = flags;
	s->window = bpf_htons(0xffff);
	seal(s, 0);
}

#endif
