/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors: those of others, which carry a packet that we have translated (RFC
 * 5508), and our own. On tc; XDP passes both on to tc.
 *
 * The packet inside went the other way than the error does. Turned round it has the
 * key of a flow, and that flow's translation, turned round again, is what it must
 * become. Nothing of the session changes: an error neither keeps it alive nor ends it.
 *
 * What is neither query nor error is not translated (RFC 5508 REQ-11).
 */
#ifndef NATKIT_ICMP_H
#define NATKIT_ICMP_H

#include "nat/flow.h"

enum icmp_limit {
	ICMP_INNER = 60 + 8,  /* of the packet inside: header, and what has ports or identifier */
	ICMP_SUMMED = 1536,   /* errors up to that long have their checksum verified */
	ICMP_CHUNK = 512,     /* bpf_csum_diff: not more at once */
	ICMP_QUOTED = 548,    /* of a packet, in an error of ours: 576 with what is before it */
	ICMP_PROHIBITED = 13, /* code of "destination unreachable": administratively */
	ICMP_TOO_BIG = 4,
};

/* What an error of ours is made of; and a copy of one, to be summed. The flow is what the
 * packet inside an error becomes, for which Linux 6.1 has no more stack. */
struct icmp_room {
	__u8 bytes[ICMP_SUMMED];
	struct nat_flow flow;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct icmp_room);
	__uint(max_entries, 1);
} icmp_rooms SEC(".maps");

/* Sums the frame's bytes from offset on: 0xffff if they contain a right checksum. At
 * most ICMP_SUMMED. Negative if they can't be read. */
GLOBAL int icmp_sum(struct ctx *ctx, __u32 offset, __u32 bytes)
{
	__u32 zero = 0, at, chunk;
	struct icmp_room *room = bpf_map_lookup_elem(&icmp_rooms, &zero);
	__s64 sum = 0;

	if (!room || bytes < sizeof(struct icmp))
		return -1;
	OPAQUE(bytes); /* two comparisons: of one made of both Linux 6.1 learns nothing */
	if (bytes > ICMP_SUMMED - 4)
		return -1;
	*(__u32 *)(room->bytes + (bytes & ~3U)) = 0; /* an odd end is filled up with zeros */
	if (ctx_load(ctx, offset, room->bytes, bytes))
		return -1;
	for (at = 0; at < ICMP_SUMMED; at += ICMP_CHUNK) {
		OPAQUE(bytes); /* or clang leaves the loop's own end out */
		if (at >= bytes)
			break;
		chunk = (bytes - at + 3) & ~3U;
		if (chunk > ICMP_CHUNK)
			chunk = ICMP_CHUNK;
		OPAQUE(chunk);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)(room->bytes + at), chunk & 1023, sum);
	}
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	return (sum & 0xffff) + (sum >> 16);
}

/* The packet inside an error: where it is and what kind. */
struct inner {
	struct nat_flow_key key; /* turned round */
	__u32 l3, l4;
	__u32 bytes; /* that there are of its transport header and payload */
};

/* Reads the packet inside. Its length field may say more than is there. A subprogram for
 * the sake of the stack. */
static __noinline int icmp_parse(struct ctx *ctx, const struct packet *packet, struct inner *inner)
{
	__u32 l4 = packet->l4 & PACKET_L4_MASK, total = packet->bytes + packet->l3;
	__u32 l3 = l4 + sizeof(struct icmp), header, type;
	struct ipv4 ip;
	__be16 ports[4];

	if (total < l3 + sizeof(ip) || ctx_load(ctx, l3, &ip, sizeof(ip)))
		return NAT_DROP_MALFORMED;
	header = (ip.version & 15) * 4;
	if (ip.version >> 4 != 4 || header < sizeof(ip) || total < l3 + header + sizeof(ports))
		return NAT_DROP_MALFORMED;
	if (icmp_sum(ctx, l3, header) != 0xffff)
		return NAT_DROP_BAD_CHECKSUM;
	/* A later fragment has no ports. Its first one made the same error, or will. */
	if (ip.fragment & bpf_htons(IPV4_OFFSET))
		return NAT_DROP_NO_SESSION;
	if (ctx_load(ctx, l3 + header, ports, sizeof(ports)))
		return NAT_DROP_MALFORMED;
	inner->l3 = l3;
	inner->l4 = l3 + header;
	inner->bytes = total - l3 - header;
	inner->key.src = ip.dst;
	inner->key.dst = ip.src;
	inner->key.protocol = ip.protocol;
	inner->key.side = packet->key.side;
	inner->key.zone = packet->key.zone;
	inner->key.link = 0;
	inner->key.sport = 0;
	inner->key.dport = 0;
	if (ip.protocol == TCP || ip.protocol == UDP || ip.protocol == UDPLITE) {
		inner->key.sport = ports[1];
		inner->key.dport = ports[0];
	} else if (ip.protocol == ICMP) {
		type = bpf_ntohs(ports[0]) >> 8;
		if (type > 18)
			return NAT_DROP_NO_SESSION;
		if (1 << type & ICMP_REQUESTS)
			inner->key.dport = ports[2];
		else if (1 << type & ICMP_REPLIES)
			inner->key.sport = ports[2];
		else
			return NAT_DROP_NO_SESSION; /* an error about an error */
	}
	return GO_ON;
}

/* What the packet inside becomes that has left and come back: flow_hairpin. Nobody outside has
 * seen such a packet. */
static __always_inline int icmp_return(const struct packet *packet, struct nat_flow_key *key,
				       struct nat_flow *out)
{
	__u32 state = out->state;
	struct nat_flow *to;

	if (packet->key.side == NAT_OUTSIDE)
		return NAT_DROP_NO_SESSION;
	to = flow_receiver(key, out);
	flow_received(key, out);
	if (!to)
		return NAT_DROP_NO_SESSION;
	*out = *to;
	return (state | out->state) & (NAT_FLOW_DEAD | NAT_FLOW_GONE) ? NAT_DROP_NO_SESSION : GO_ON;
}

/* What the packet inside becomes. */
static __always_inline int icmp_find(struct ctx *ctx, struct packet *packet,
				     struct nat_flow_key *key, struct nat_flow *out)
{
	struct nat_flow *flow = flow_look(key);

	if (!flow)
		return flow_stateless(ctx, packet, key, out);
	*out = *flow;
	if (out->state & NAT_FLOW_RETURNS)
		return icmp_return(packet, key, out);
	return out->state & (NAT_FLOW_DEAD | NAT_FLOW_GONE) ? NAT_DROP_NO_SESSION : GO_ON;
}

/* Changes a checksum inside the error, and returns what that adds to the error's own. */
static __always_inline int icmp_inner_checksum(struct ctx *ctx, __u32 offset, __u32 delta, int udp,
					       __u32 *outer)
{
	__u16 old, new;

	if (ctx_load(ctx, offset, &old, sizeof(old)))
		return NAT_DROP_MALFORMED;
	if (udp && !old)
		return GO_ON;
	new = checksum_add(old, delta);
	if (udp && !new)
		new = 0xffff;
	*outer += (__u16)~old + new;
	return ctx_store(ctx, offset, &new, sizeof(new)) ? NAT_DROP_REWRITE : GO_ON;
}

/*
 * Writes the packet inside: addresses, its IPv4 checksum (the two keep the sum), ports
 * or identifier, and the transport checksum if that is there. *outer: what all this adds
 * to the complement of the error's checksum.
 */
static __noinline int icmp_rewrite(struct ctx *ctx, const struct inner *inner,
				   const struct nat_flow *flow, __u32 *outer)
{
	struct nat_addr addresses[2] = {flow->dst, flow->src};
	__be16 ports[2] = {flow->dport, flow->sport};
	__be16 id = flow->dport | flow->sport; /* of ICMP one is 0 */
	__u16 l3_delta = rewrite_l3_delta(&inner->key, flow);
	__u16 l4_delta = rewrite_l4_delta(&inner->key, flow);
	__u32 l4 = inner->l4, both = l3_delta + l4_delta, zero = 0;
	__u8 protocol = inner->key.protocol;
	int reason;

	*outer = l4_delta;
	reason = icmp_inner_checksum(ctx, inner->l3 + __builtin_offsetof(struct ipv4, check),
				     l3_delta, 0, &zero);
	if (reason != GO_ON)
		return reason;
	if (ctx_store(ctx, inner->l3 + __builtin_offsetof(struct ipv4, src), addresses,
		      sizeof(addresses)))
		return NAT_DROP_REWRITE;
	if (protocol == ICMP) {
		if (ctx_store(ctx, l4 + __builtin_offsetof(struct icmp, id), &id, sizeof(id)))
			return NAT_DROP_REWRITE;
		return icmp_inner_checksum(ctx, l4 + __builtin_offsetof(struct icmp, check),
					   l4_delta, 0, outer);
	}
	if (protocol != TCP && protocol != UDP && protocol != UDPLITE)
		return GO_ON;
	if (ctx_store(ctx, l4, ports, sizeof(ports)))
		return NAT_DROP_REWRITE;
	if (protocol != TCP)
		return icmp_inner_checksum(ctx, l4 + __builtin_offsetof(struct udp, check), both, 1,
					   outer);
	if (inner->bytes < __builtin_offsetof(struct tcp, urgent))
		return GO_ON; /* cut off: usual */
	return icmp_inner_checksum(ctx, l4 + __builtin_offsetof(struct tcp, check), both, 0, outer);
}

/*
 * Whether an error about a packet that is none of ours may go on as it is. From inside not
 * if that packet's receiver is not where the error comes from: then it was invented, to get
 * an internal address out untranslated.
 */
static __noinline int icmp_passes(struct ctx *ctx, const struct packet *packet,
				  const struct inner *inner)
{
	__u16 in = link_find(packet->ifindex);
	const struct nat_config *c;
	struct route back;
	__u32 slot;

	c = config_get(&slot);
	if (!c || session_pretends(ctx, packet, in, c->lookups, slot))
		return 0;
	if (packet->key.side == NAT_OUTSIDE)
		return 1;
	return route_find(ctx, packet, packet->key.dst, inner->key.src, packet->key.zone, &back) ==
		       GO_ON &&
	       back.ifindex == packet->ifindex;
}

static __always_inline int icmp_is_error(const struct packet *packet)
{
	return packet->icmp_type < 32 && ICMP_ERRORS >> packet->icmp_type & 1;
}

/* What a rule would translate is dropped: packets that are quoted would go on as they are. */
static __always_inline int icmp_other(struct ctx *ctx, struct packet *packet, struct nat_flow *out)
{
	int reason = flow_stateless(ctx, packet, &packet->key, out);

	return reason == GO_ON || reason == NAT_DROP_NO_SESSION ? NAT_DROP_UNSUPPORTED : reason;
}

/* By a link of both sides an error comes from the side of the host that got the packet inside,
 * whoever on the way to it has sent the error. */
static __always_inline void icmp_side(struct packet *packet, struct nat_flow_key *inner)
{
	if (!link_is_both(link_get(link_find(packet->ifindex))))
		return;
	flow_swap(&packet->key, inner);
	flow_side(packet);
	flow_swap(&packet->key, inner);
	packet->key.side = inner->side;
}

/*
 * An error from somebody else, to the sender of a packet that we have translated. Its
 * source is translated if it is the receiver of that packet; and from inside always, to the
 * receiver's external address (RFC 5508 REQ-5): routers there have none.
 */
GLOBAL int icmp_error(struct ctx *ctx, struct packet *packet)
{
	__u32 zero = 0, check, delta;
	struct icmp_room *room = bpf_map_lookup_elem(&icmp_rooms, &zero);
	struct inner inner = {};
	struct nat_flow *flow;
	int reason;

	if (!room || !packet)
		return NAT_DROP_BYPASS;
	check = packet->l4 + __builtin_offsetof(struct icmp, check);
	flow = &room->flow;
	if (!icmp_is_error(packet))
		return icmp_other(ctx, packet, flow);
	reason = icmp_parse(ctx, packet, &inner);
	if (reason != GO_ON)
		return reason;
	icmp_side(packet, &inner.key);
	if (!addr_equal(inner.key.dst, packet->key.dst))
		return NAT_DROP_NO_SESSION; /* it is not to the sender of what it is about */
	if (packet->bytes - (packet->l4 - packet->l3) <= ICMP_SUMMED - 4 &&
	    icmp_sum(ctx, packet->l4, packet->bytes - (packet->l4 - packet->l3)) != 0xffff)
		return NAT_DROP_BAD_CHECKSUM;
	reason = icmp_find(ctx, packet, &inner.key, flow);
	if (reason == NAT_PASS_NO_RULE && !icmp_passes(ctx, packet, &inner))
		return NAT_DROP_SPOOFED;
	if (reason != GO_ON)
		return reason;
	if (packet->ttl <= 1)
		return NAT_DROP_TTL;

	reason = icmp_rewrite(ctx, &inner, flow, &delta);
	if (reason != GO_ON)
		return reason;
	delta = (delta & 0xffff) + (delta >> 16);
	reason = icmp_inner_checksum(ctx, check, delta, 0, &delta);
	if (reason != GO_ON)
		return reason;
	if (!addr_equal(inner.key.src, packet->key.src) && packet->key.side == NAT_OUTSIDE)
		flow->src = packet->key.src;
	flow->mtu = 0;
	reason = flow_send(ctx, packet, flow);
	if (reason < NAT_TRANSLATED_IN)
		return NAT_DROP_NO_ROUTE; /* no more what the stack should see */
	if (reason < NAT_DROP_MALFORMED)
		count_add(NAT_ICMP_TRANSLATED);
	return reason;
}

/* --- our own --------------------------------------------------------------------- */

/* The error to send about a packet that ended so, as type and code; 0: none. */
static __always_inline __u32 icmp_error_for(const struct packet *packet, int reason)
{
	if (packet->flags & (PACKET_ICMP_ERROR | PACKET_FRAGMENT_LATER))
		return 0;
	switch (reason) {
	case NAT_DROP_TTL:
		return ICMP_TIME_EXCEEDED << 8;
	case NAT_DROP_TOO_BIG:
		return ICMP_UNREACHABLE << 8 | ICMP_TOO_BIG;
	case NAT_DROP_NO_PORT:
	case NAT_DROP_NO_ADDRESS:
	case NAT_DROP_SESSIONS_FULL:
	case NAT_DROP_MAPPINGS_FULL:
	case NAT_DROP_SOURCE_LIMIT:
	case NAT_DROP_PORT_LIMIT:
	case NAT_DROP_RATE_LIMIT:
	case NAT_DROP_NO_BLOCK:
	case NAT_DROP_SOURCES_FULL:
		return packet->key.side == NAT_INSIDE ? ICMP_UNREACHABLE << 8 | ICMP_PROHIBITED : 0;
	default:
		return 0;
	}
}

/* Whether one more may be sent in this second, of all CPUs together. The limit may be
 * passed by a few when the second changes. take: it will be. */
static __always_inline int icmp_allowed(const struct packet *packet, int take)
{
	__u32 zero = 0, slot;
	struct nat_control *c = bpf_map_lookup_elem(&control, &zero);
	const struct nat_config *limits = config_get(&slot);

	if (!c || !limits)
		return 0;
	if (packet->now - c->icmp_tick >= ROUTE_CHECK_TICKS) {
		c->icmp_tick = packet->now;
		c->icmp_sent = 0;
	}
	if (*(volatile __u32 *)&c->icmp_sent >= limits->icmp_per_second)
		return 0;
	if (take)
		__sync_fetch_and_add(&c->icmp_sent, 1);
	return 1;
}

/*
 * The address that an error comes from. Outside: the one that was addressed. Inside: the
 * gateway's towards the sender, as the stack would take; before Linux 6.7, which can't look that
 * up, also the one that was addressed.
 */
static __always_inline __be32 icmp_source(struct ctx *ctx, const struct packet *packet)
{
	struct bpf_fib_lookup fib = {
		.family = ROUTE_AF_INET,
		.ifindex = packet->ifindex,
		.ipv4_dst = addr_word(packet->key.src),
	};
	__u32 flags = BPF_FIB_LOOKUP_SRC | BPF_FIB_LOOKUP_SKIP_NEIGH;

	if (packet->key.zone)
		flags |= BPF_FIB_LOOKUP_OUTPUT;
	if (packet->key.side == NAT_INSIDE &&
	    ctx_fib_lookup(ctx, &fib, flags) == BPF_FIB_LKUP_RET_SUCCESS)
		return fib.ipv4_src;
	return addr_word(packet->key.dst);
}

/* Whether the checksum of a packet, which is in the room, may be partial. */
static __always_inline int icmp_unfinished(const struct packet *packet,
					   const struct icmp_room *room)
{
	__u32 at = packet->l4 - packet->l3;
	__u16 check;

	if (packet->class != NAT_TCP && packet->class != NAT_UDP)
		return 0;
	at += packet->class == NAT_TCP ? __builtin_offsetof(struct tcp, check)
				       : __builtin_offsetof(struct udp, check);
	OPAQUE(at);
	__builtin_memcpy(&check, room->bytes + (at & PACKET_L4_MASK), sizeof(check));
	return rewrite_partial(packet, check);
}

/* Turns the packet into the error about it, and sends that back the way it came. GO_ON:
 * packet->action does; else the packet is only dropped. */
GLOBAL int icmp_send(struct ctx *ctx, struct packet *packet, __u32 error)
{
	__u32 zero = 0, quoted, header = sizeof(struct ipv4) + sizeof(struct icmp);
	struct icmp_room *room = bpf_map_lookup_elem(&icmp_rooms, &zero);
	struct icmp icmp = {.type = error >> 8, .code = error};
	struct ipv4 ip = {.version = 0x45, .ttl = 64, .protocol = ICMP};
	int sum, unfinished;

	if (!packet || !room)
		return NAT_DROP_BYPASS;
	if (!icmp_allowed(packet, 1))
		return NAT_DROP_REWRITE;
	/* RFC 1812 section 4.3.2.5: precedence 6, the rest as in the packet it is about. */
	ip.tos = 0xc0 | (packet->tos & 0x1e);
	quoted = packet->bytes;
	if (quoted > ICMP_QUOTED)
		quoted = ICMP_QUOTED;
	if (error == (ICMP_UNREACHABLE << 8 | ICMP_TOO_BIG))
		icmp.rest = bpf_htons(packet->mtu);
	ip.src = addr_of(icmp_source(ctx, packet));
	ip.dst = packet->key.src;
	ip.length = bpf_htons(header + quoted);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0);
	sum = (sum & 0xffff) + ((__u32)sum >> 16);
	ip.check = checksum_add(0xffff, sum);
	sum = icmp_sum(ctx, packet->l3, quoted);
	if (sum < 0)
		return NAT_DROP_REWRITE;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&icmp, sizeof(icmp), sum);
	sum = (sum & 0xffff) + ((__u32)sum >> 16);
	icmp.check = checksum_add(0xffff, sum);
	unfinished = icmp_unfinished(packet, room);
	if (unfinished && ctx_forget(ctx, packet->l3))
		return NAT_DROP_REWRITE;
	if (ctx_reply(ctx, packet->l3, quoted, header) ||
	    ctx_store(ctx, packet->l3, &ip, sizeof(ip)) ||
	    ctx_store(ctx, packet->l3 + sizeof(ip), &icmp, sizeof(icmp)))
		return NAT_DROP_REWRITE;
	OPAQUE(quoted);
	if (quoted < sizeof(ip))
		return NAT_DROP_REWRITE;
	OPAQUE(quoted);
	if (quoted > ICMP_QUOTED ||
	    (unfinished && ctx_store(ctx, packet->l3 + header, room->bytes, quoted)))
		return NAT_DROP_REWRITE;
	packet->action = ctx_return(ctx, packet->l3);
	count_add(NAT_ICMP_SENT);
	return GO_ON;
}

#endif
