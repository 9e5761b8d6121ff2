/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Headers -> struct packet. Lengths are checked against each other here; after that
 * the offsets in struct packet point at whole headers, as long as nobody cuts the
 * frame. The IPv4 checksum is not verified: it is updated, so a wrong one stays wrong
 * and the receiver sees it.
 */
#ifndef NATKIT_PARSE_H
#define NATKIT_PARSE_H

#include "lib/base.h"

struct ipv4 {
	__u8 version; /* 4 bits, then the header's length in words */
	__u8 tos;
	__be16 length;
	__be16 id;
	__be16 fragment; /* enum ipv4_fragment, 8-byte units */
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	struct nat_addr src, dst;
};

enum ipv4_fragment { IPV4_DF = 0x4000, IPV4_MF = 0x2000, IPV4_OFFSET = 0x1fff };

enum ip_protocol { ICMP = 1, TCP = 6, UDP = 17, UDPLITE = 136 };

/* enum nat_class of a protocol. */
static __always_inline __u8 protocol_class(__u8 protocol)
{
	switch (protocol) {
	case TCP:
		return NAT_TCP;
	case UDP:
	case UDPLITE:
		return NAT_UDP;
	case ICMP:
		return NAT_ICMP;
	default:
		return NAT_OTHER;
	}
}

struct tcp {
	__be16 sport, dport;
	__be32 sequence, acknowledged;
	__u8 offset; /* 4 bits: words */
	__u8 flags;  /* enum tcp_flag */
	__be16 window;
	__u16 check;
	__be16 urgent;
};

enum tcp_option_kind { TCP_MSS = 2 };

enum tcp_flag { TCP_FIN = 1, TCP_SYN = 2, TCP_RST = 4, TCP_ACK = 16 };

struct udp {
	__be16 sport, dport;
	__be16 length; /* UDP-Lite: how much the checksum covers */
	__u16 check;
};

struct icmp {
	__u8 type, code;
	__u16 check;
	__be16 id;   /* of a query */
	__be16 rest; /* MTU of "fragmentation needed" */
};

enum icmp_type {
	ICMP_ECHO_REPLY = 0,
	ICMP_UNREACHABLE = 3,
	ICMP_ECHO = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETER_PROBLEM = 12,
};

/* Types that are queries with an identifier: echo, timestamp, information, mask. */
enum icmp_types {
	ICMP_REQUESTS = 1 << ICMP_ECHO | 1 << 13 | 1 << 15 | 1 << 17,
	ICMP_REPLIES = 1 << ICMP_ECHO_REPLY | 1 << 14 | 1 << 16 | 1 << 18,
	ICMP_ERRORS = 1 << ICMP_UNREACHABLE | 1 << ICMP_TIME_EXCEEDED | 1 << ICMP_PARAMETER_PROBLEM,
};

enum packet_limit {
	PACKET_HEADERS = 14 + 60 + 60, /* Ethernet, IPv4, TCP: what parse reads at most */
	/* l3 <= 14, l4 <= 14 + 60. The masks are for the verifier, which forgets the
	 * bounds of a 16-bit number that went through memory (Linux 6.1 to 6.18: "R5
	 * offset is outside of the packet"). */
	PACKET_L3_MASK = 15,
	PACKET_L4_MASK = 127,
};

enum packet_flag {
	PACKET_DF = 1,
	PACKET_FRAGMENT_FIRST = 2,
	PACKET_FRAGMENT_LATER = 4, /* no ports: key has zeros */
	PACKET_ICMP_ERROR = 8,     /* or neither query nor error; key has zeros for ports */
	PACKET_QUERY = 16,         /* ICMP request: the identifier is sport */
	PACKET_GSO = 64,           /* stands for several frames */
	PACKET_CUT = 128,          /* too big for the egress interface, may be fragmented */
	PACKET_PROBE = 32,         /* this one goes through the neighbour table */
	PACKET_FOR_TC = PACKET_FRAGMENT_FIRST | PACKET_FRAGMENT_LATER | PACKET_ICMP_ERROR,
};

struct packet {
	struct nat_flow_key key; /* as it arrived */
	__u32 now;               /* ticks */
	__u32 ifindex;           /* ingress interface */
	__u32 bytes;    /* of IPv4; a GSO packet: of all its segments' payload and one header */
	__u16 segments; /* frames on the wire; 1 but for GSO */
	__u16 length;   /* of IPv4, of one segment */
	__u16 l3, l4;   /* offsets from the start of the frame */
	__u8 class;     /* enum nat_class */
	__u8 ttl, tos;
	__u8 tcp_flags; /* 0 for others */
	__u16 mtu;      /* of the egress interface, if the packet is too big for it */
	__u8 refused;   /* 1: no session could be made for it */
	__u8 zero;
	int action; /* the hook's verdict, once translated */
	__u8 flags; /* enum packet_flag */
	__u8 icmp_type;
	__be16 id;
};

/* Ports, and what follows them in the key, are written by 32 bits, because the hash reads
 * them so: a processor has to wait for narrower writes to reach its cache. */
static __always_inline void packet_ports(struct packet *packet, __be16 sport, __be16 dport)
{
	__u32 ports = (__u32)dport << 16 | sport;

	__builtin_memcpy(&packet->key.sport, &ports, sizeof(ports));
}

static __always_inline void packet_protocol(struct packet *packet, __u8 protocol, __u8 side,
					    __u8 zone)
{
	__u32 word = (__u32)zone << 16 | (__u32)side << 8 | protocol;

	__builtin_memcpy(&packet->key.protocol, &word, sizeof(word));
}

static __always_inline int parse_tcp(struct packet *packet, void *l4, void *end, __u32 bytes)
{
	struct tcp *tcp = l4;
	__u32 header;

	if ((void *)(tcp + 1) > end)
		return NAT_DROP_MALFORMED;
	header = (tcp->offset >> 4) * 4;
	if (header < sizeof(*tcp) || header > bytes)
		return NAT_DROP_MALFORMED;
	packet->class = NAT_TCP;
	packet->tcp_flags = tcp->flags;
	packet_ports(packet, tcp->sport, tcp->dport);
	packet->length = packet->l4 - packet->l3 + header; /* of a segment's headers */
	return GO_ON;
}

static __always_inline int parse_udp(struct packet *packet, void *l4, void *end, __u32 bytes)
{
	struct udp *udp = l4;
	__u32 length;

	if ((void *)(udp + 1) > end || bytes < sizeof(*udp))
		return NAT_DROP_MALFORMED;
	length = bpf_ntohs(udp->length);
	if (!(packet->flags & PACKET_FRAGMENT_FIRST) && length > bytes)
		return NAT_DROP_MALFORMED;
	/* UDP-Lite: 0 covers everything. */
	if (length < sizeof(*udp) && (packet->key.protocol == UDP || length))
		return NAT_DROP_MALFORMED;
	packet->class = NAT_UDP;
	packet_ports(packet, udp->sport, udp->dport);
	packet->length = packet->l4 - packet->l3 + sizeof(*udp);
	return GO_ON;
}

/* Errors are looked at further by icmp.h, on tc; and what is neither query nor error, which
 * has no identifier, and may quote a packet as source quench and redirect do. */
static __always_inline int parse_icmp(struct packet *packet, void *l4, void *end, __u32 bytes)
{
	struct icmp *icmp = l4;
	__u32 type;

	if ((void *)(icmp + 1) > end || bytes < sizeof(*icmp))
		return NAT_DROP_MALFORMED;
	packet->icmp_type = icmp->type;
	type = icmp->type < 32 ? 1U << icmp->type : 0;
	if (type & ICMP_REQUESTS) {
		packet->class = NAT_ICMP;
		packet->flags |= PACKET_QUERY;
		packet_ports(packet, icmp->id, 0);
	} else if (type & ICMP_REPLIES) {
		packet->class = NAT_ICMP;
		packet_ports(packet, 0, icmp->id);
	} else {
		packet->flags |= PACKET_ICMP_ERROR;
	}
	return GO_ON;
}

/*
 * Makes the headers readable in one piece. Those of what a socket of this machine has sent
 * are, and the data lies elsewhere: to have some of that moved here would cost a buffer.
 */
static __always_inline int parse_pull(struct ctx *ctx, __u32 l3)
{
	void *end = ctx_data_end(ctx);
	struct ipv4 *ip = ctx_data(ctx) + l3;
	struct tcp *tcp;

	if (ctx_is_linear(ctx, PACKET_HEADERS))
		return 0;
	if ((void *)(ip + 1) <= end) {
		tcp = (void *)ip + (ip->version & 15) * 4;
		if (ip->protocol == UDP && (void *)tcp + sizeof(struct udp) <= end)
			return 0;
		if (ip->protocol == TCP && (void *)(tcp + 1) <= end &&
		    (void *)tcp + (tcp->offset >> 4) * 4 <= end)
			return 0;
	}
	return ctx_pull(ctx, PACKET_HEADERS);
}

/* l3 is where IPv4 begins: 14, or 0 on links without Ethernet. GO_ON: all of *packet is
 * written, without which Linux 6.1 lets no function have it that it checks by itself. */
static __always_inline int parse(struct ctx *ctx, enum nat_side side, __u32 l3,
				 struct packet *packet)
{
	__u32 header, total, fragment, gso;
	struct ipv4 *ip;
	void *data, *end, *l4;
	int reason = GO_ON;

	if (!ctx_is_ours(ctx, l3))
		return NAT_PASS_NOT_IPV4;
	if (parse_pull(ctx, l3))
		return NAT_DROP_MALFORMED;
	data = ctx_data(ctx);
	end = ctx_data_end(ctx);
	ip = data + l3;
	if ((void *)(ip + 1) > end || ip->version >> 4 != 4)
		return NAT_DROP_MALFORMED;
	header = (ip->version & 15) * 4;
	total = bpf_ntohs(ip->length);
	gso = ctx_gso_size(ctx);
	if (!total && gso) /* BIG TCP: longer than the field can hold */
		total = ctx_length(ctx) - l3;
	if (header < sizeof(*ip) || total < header || total + l3 > ctx_length(ctx))
		return NAT_DROP_MALFORMED;

	packet->key.src = ip->src;
	packet->key.dst = ip->dst;
	packet_ports(packet, 0, 0);
	packet_protocol(packet, ip->protocol, side, 0);
	packet->now = clock_now();
	packet->ifindex = ctx_ifindex(ctx);
	packet->bytes = total;
	packet->segments = ctx_segments(ctx);
	packet->l3 = l3;
	packet->l4 = l3 + header;
	packet->class = NAT_OTHER;
	packet->ttl = ip->ttl;
	packet->tos = ip->tos;
	packet->tcp_flags = 0;
	packet->mtu = 0;
	packet->refused = 0;
	packet->zero = 0;
	packet->action = 0;
	packet->icmp_type = 0;
	packet->length = header; /* of a segment, but for its payload */
	packet->id = ip->id;
	fragment = bpf_ntohs(ip->fragment);
	packet->flags = fragment & IPV4_DF ? PACKET_DF : 0;
	if (fragment & IPV4_OFFSET) {
		packet->flags |= PACKET_FRAGMENT_LATER;
		packet->length = total;
		return GO_ON;
	}
	if (fragment & IPV4_MF)
		packet->flags |= PACKET_FRAGMENT_FIRST;

	l4 = data + l3 + header;
	if (ip->protocol == TCP)
		reason = parse_tcp(packet, l4, end, total - header);
	else if (ip->protocol == UDP || ip->protocol == UDPLITE)
		reason = parse_udp(packet, l4, end, total - header);
	else if (ip->protocol == ICMP)
		reason = parse_icmp(packet, l4, end, total - header);
	if (gso) {
		packet->flags |= PACKET_GSO;
		packet->length += gso;
	} else {
		packet->length = total;
	}
	return reason;
}

#endif
