/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Writes a flow's translation into a packet: addresses, ports or identifier, TTL,
 * checksums, MACs. Checksums are updated by the delta of what is written (RFC 1624,
 * equation 3): HC' = ~(~HC + delta).
 */
#ifndef NATKIT_REWRITE_H
#define NATKIT_REWRITE_H

#include "lib/parse.h"

/* What a change of addresses adds to the complement of the IPv4, TCP and UDP checksum. To work it
 * out takes less time than four more bytes of a flow would. */
static __always_inline __u16 rewrite_l3_delta(const struct nat_flow_key *key,
					      const struct nat_flow *flow)
{
	return delta_fold_words((__u64)(__u32)~addr_word(key->src) + addr_word(flow->src) +
				(__u32)~addr_word(key->dst) + addr_word(flow->dst));
}

/* Likewise of ports, or the identifier, of TCP, UDP and ICMP. */
static __always_inline __u16 rewrite_l4_delta(const struct nat_flow_key *key,
					      const struct nat_flow *flow)
{
	__u32 old = *(const volatile __u32 *)&key->sport;
	__u32 new;

	__builtin_memcpy(&new, &flow->sport, sizeof(new));
	return delta_fold_words((__u64)(__u32)~old + new);
}

/* One less hop, in the word of TTL and protocol: TTL is its first byte in memory,
 * so on a little-endian machine the word becomes less by 1. */
static __always_inline void rewrite_ttl(struct ipv4 *ip, __u32 delta)
{
	ip->ttl--;
	ip->check = checksum_add(ip->check, delta + 0xfffe);
}

/* The next hop's MAC lies in hop as in the frame. */
static __always_inline void rewrite_macs(void *frame, __u64 hop, const struct nat_link *link)
{
	*(__u32 *)frame = hop;
	*(__u16 *)(frame + 4) = hop >> 32;
	__builtin_memcpy(frame + 6, link->mac, sizeof(link->mac));
}

/*
 * Whether a transport checksum may be partial: only the sum of the pseudo-header, to which
 * a device adds the rest when it sends. One of 65536 full checksums looks so too. The sum
 * that the kernel puts into a packet of several segments is not relied on.
 */
static __always_inline int rewrite_partial(const struct packet *packet, __u16 check)
{
	__u32 bytes = packet->bytes - (packet->l4 - packet->l3);

	return packet->flags & PACKET_GSO ||
	       check == checksum_pseudo(addr_word(packet->key.src), addr_word(packet->key.dst),
					packet->key.protocol, bytes);
}

/*
 * All of it, in a packet whose transport header is there. No link: the MACs are the
 * neighbour output's. Packet pointers from before are void.
 */
static __always_inline int rewrite_by(struct ctx *ctx, const struct packet *packet,
				      const struct nat_flow *flow, __u16 l3_delta, __u16 l4_delta,
				      __u64 hop, const struct nat_link *link)
{
	void *data = ctx_data(ctx), *end = ctx_data_end(ctx);
	__u32 at = packet->l4 & PACKET_L4_MASK;
	/* Who gives a link has Ethernet; the verifier wants the constant. */
	struct ipv4 *ip = data + (link ? 14 : packet->l3 & PACKET_L3_MASK);
	struct icmp *icmp;
	struct tcp *tcp;
	struct udp *udp;
	void *l4 = data + at;

	if ((void *)(ip + 1) > end)
		return NAT_DROP_REWRITE;
	ip->src = flow->src;
	ip->dst = flow->dst;
	rewrite_ttl(ip, l3_delta);
	if (link)
		rewrite_macs(data, hop, link);

	if (packet->class == NAT_UDP) {
		udp = l4;
		if ((void *)(udp + 1) > end)
			return NAT_DROP_REWRITE;
		udp->sport = flow->sport;
		udp->dport = flow->dport;
		return ctx_checksum(ctx, &udp->check, at + __builtin_offsetof(struct udp, check),
				    l3_delta, l4_delta, 1, rewrite_partial(packet, udp->check));
	}
	if (packet->class == NAT_TCP) {
		tcp = l4;
		if ((void *)(tcp + 1) > end)
			return NAT_DROP_REWRITE;
		tcp->sport = flow->sport;
		tcp->dport = flow->dport;
		return ctx_checksum(ctx, &tcp->check, at + __builtin_offsetof(struct tcp, check),
				    l3_delta, l4_delta, 0, rewrite_partial(packet, tcp->check));
	}
	if (packet->class == NAT_ICMP) {
		icmp = l4;
		if ((void *)(icmp + 1) > end)
			return NAT_DROP_REWRITE;
		/* No pseudo-header: identifier and checksum keep the sum on both hooks. */
		icmp->id = packet->flags & PACKET_QUERY ? flow->sport : flow->dport;
		icmp->check = checksum_add(icmp->check, l4_delta);
	}
	return GO_ON;
}

static __always_inline int rewrite(struct ctx *ctx, const struct packet *packet,
				   const struct nat_flow *flow, __u64 hop,
				   const struct nat_link *link)
{
	return rewrite_by(ctx, packet, flow, rewrite_l3_delta(&packet->key, flow),
			  rewrite_l4_delta(&packet->key, flow), hop, link);
}

#endif
