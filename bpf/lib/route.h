/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where a packet goes: the kernel's routes and neighbours, looked up when a session is
 * made and once a second after that. Policy routing by source, incoming interface
 * and protocol is obeyed, as the stack would for the same packet: with the
 * destination translated and the source not yet.
 *
 * A host in a zone is behind that interface: of several routes to its address the one that leaves
 * there is meant.
 */
#ifndef NATKIT_ROUTE_H
#define NATKIT_ROUTE_H

#include "lib/links.h"
#include "lib/parse.h"

enum route_limit {
	ROUTE_CHECK_TICKS = 953, /* a second, rounded down: how long a next hop is trusted */
	ROUTE_LINK_SHIFT = 48,   /* in nat_flow.hop */
	ROUTE_AF_INET = 2,
};

struct route {
	__u64 hop;      /* as nat_flow.hop; 0: the neighbour is not resolved */
	__u32 ifindex;  /* of the egress interface */
	__be32 gateway; /* IPv4 address of the neighbour; 0: it is not IPv4, the stack knows */
	__u16 link; /* index of the egress interface plus 1; 0: not an interface of the rule file */
	__u16 mtu;
	__u32 found; /* ticks: when it was looked up */
};

/* A packet that has no route: from inside the stack sends its sender an ICMP error, unless it
 * might find one that we can't take, and let the packet out untranslated. */
static __always_inline int route_none(const struct packet *packet, long result)
{
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT || packet->key.side == NAT_OUTSIDE)
		return NAT_DROP_NO_ROUTE;
	return NAT_PASS_NO_ROUTE;
}

/*
 * The route from src to dst for a packet that came in by packet->ifindex, or, if route->link is
 * not 0, that leaves by that link. GO_ON: *route is set, with hop 0 if only the neighbour is
 * missing. NAT_PASS_LOCAL: dst is an address of the gateway, or broadcast.
 */
GLOBAL int route_ask(struct ctx *ctx, const struct packet *packet, __be32 src, __be32 dst,
		     struct route *route)
{
	struct bpf_fib_lookup fib;
	struct nat_link *link;
	__u16 low, middle, high;
	__u32 flags = 0;
	long result;

	if (!packet || !route)
		return NAT_DROP_BYPASS;
	fib = (struct bpf_fib_lookup){
		.family = ROUTE_AF_INET,
		.l4_protocol = packet->key.protocol,
		.tot_len = sizeof(struct ipv4), /* not 0: then the result has the route's MTU */
		.ifindex = packet->ifindex,
		.tos = packet->tos,
		.ipv4_src = src,
		.ipv4_dst = dst,
	};
	if (route->link) {
		link = link_get(route->link);
		if (!link || !link->ifindex)
			return NAT_DROP_NO_ROUTE;
		fib.ifindex = link->ifindex;
		flags = BPF_FIB_LOOKUP_OUTPUT;
	}
	result = ctx_fib_lookup(ctx, &fib, flags);
	if (result == BPF_FIB_LKUP_RET_NOT_FWDED)
		return NAT_PASS_LOCAL;
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return route_none(packet, result);
	route->hop = 0;
	route->ifindex = fib.ifindex;
	route->gateway = fib.family == ROUTE_AF_INET ? fib.ipv4_dst : 0;
	route->mtu = 0;
	route->found = packet->now;
	route->link = link_find(fib.ifindex);
	link = link_get(route->link);
	if (!link)
		return GO_ON;
	/* Without a neighbour the result has no MTU. */
	route->mtu = result == BPF_FIB_LKUP_RET_SUCCESS ? fib.mtu_result : link->mtu;
	if (link->flags & NAT_LINK_NO_ETHERNET) {
		route->hop = (__u64)route->link << ROUTE_LINK_SHIFT;
	} else if (result == BPF_FIB_LKUP_RET_SUCCESS) {
		low = *(__u16 *)&fib.dmac[0];
		middle = *(__u16 *)&fib.dmac[2];
		high = *(__u16 *)&fib.dmac[4];
		route->hop = (__u64)route->link << ROUTE_LINK_SHIFT | (__u64)high << 32 |
			     (__u64)middle << 16 | low;
	}
	return GO_ON;
}

static __always_inline int route_find(struct ctx *ctx, const struct packet *packet,
				      struct nat_addr src, struct nat_addr dst, __u8 zone,
				      struct route *route)
{
	__builtin_memset(route, 0, sizeof(*route));
	route->link = zone;
	return route_ask(ctx, packet, addr_word(src), addr_word(dst), route);
}

/*
 * Whether a packet that is to go to dst and can't may be passed to the stack as it came: from
 * inside, the stack then sends the ICMP error. But where its destination was to be another
 * (hairpin) the stack would take it for its own, or let it out untranslated.
 */
static __always_inline int route_up(const struct packet *packet, struct nat_addr dst)
{
	return packet->key.side == NAT_INSIDE && addr_equal(packet->key.dst, dst);
}

/* route_find for what the packet is to become: dst is in that zone. */
static __always_inline int route_to(struct ctx *ctx, const struct packet *packet,
				    struct nat_addr dst, __u8 zone, struct route *route)
{
	int reason = route_find(ctx, packet, packet->key.src, dst, zone, route);

	if (reason == NAT_PASS_LOCAL && !addr_equal(packet->key.dst, dst))
		return NAT_DROP_UNSUPPORTED;
	return reason == NAT_PASS_NO_ROUTE && !route_up(packet, dst) ? NAT_DROP_NO_ROUTE : reason;
}

/*
 * Whether a packet can be sent to dst by a route with that MTU. Where the stack may not send the
 * ICMP error (route_up) we do. Without DF tc cuts what is too big, but never what
 * stands for several frames.
 */
static __always_inline int route_carries(struct packet *packet, struct nat_addr dst, __u16 mtu)
{
	if (unlikely(packet->ttl <= 1))
		return route_up(packet, dst) ? NAT_PASS_TTL : NAT_DROP_TTL;
	if (!mtu || packet->length <= mtu)
		return GO_ON;
	packet->mtu = mtu;
	if (packet->flags & PACKET_DF)
		return route_up(packet, dst) ? NAT_PASS_TOO_BIG : NAT_DROP_TOO_BIG;
	if (packet->flags & PACKET_GSO)
		return NAT_DROP_TOO_BIG;
	packet->flags |= PACKET_CUT;
	return CTX_TC ? GO_ON : NAT_PASS_TO_TC;
}

#endif
