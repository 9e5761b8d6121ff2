/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What leaves an accelerated interface through the stack: it shows that the kernel still
 * forwards a flow, and by which path. Packets that bypassed the stack pass here too (on tc),
 * and show nothing.
 */
#ifndef NATKIT_LEAVING_H
#define NATKIT_LEAVING_H

#include "accel/learn.h"

/* The next hop that a frame goes to, as nat_flow.hop; 0 if it is not the accelerated
 * link's own frame. */
static __always_inline __u64 leaving_hop(struct ctx *ctx)
{
	__u16 index = link_find(ctx->ifindex);
	struct nat_link *link = link_get(index);
	__u8 *frame = ctx_data(ctx);

	if (!link || (void *)(frame + 14) > ctx_data_end(ctx) ||
	    *(__u32 *)(frame + 6) != *(__u32 *)link->mac ||
	    *(__u16 *)(frame + 10) != *(__u16 *)(link->mac + 4))
		return 0;
	return (__u64)index << ROUTE_LINK_SHIFT | (__u64) * (__u16 *)(frame + 4) << 32 |
	       *(__u32 *)frame;
}

/* Whether a TCP packet only acknowledges. */
static __always_inline int leaving_bare(struct ctx *ctx, const struct packet *packet)
{
	struct tcp *tcp = ctx_data(ctx) + (packet->l4 & PACKET_L4_MASK);

	return (void *)(tcp + 1) <= ctx_data_end(ctx) &&
	       packet->bytes == packet->l4 - packet->l3 + (tcp->offset >> 4) * 4;
}

/*
 * TCP's timeout, which the stack has just set by what it has seen of the connection
 * (conntrack_keep). Data will be acknowledged if the other end was heard lately. The table may
 * have evicted the entries of an accelerated connection: then a bare acknowledgement shows
 * that there is no unacknowledged data. Of data that has just left, an entry that has seen all of
 * the connection believes that it is unacknowledged: else the connection was accelerated, though
 * it has been silent for so long that its fast-path entries were not looked up.
 */
static __always_inline void leaving_keep(struct ctx *ctx, const struct packet *packet,
					 const struct nat_flow_key *key,
					 const struct nat_accel_entry *other)
{
	int bare = leaving_bare(ctx, packet), doubt = CONNTRACK_ACKNOWLEDGED;
	const struct nat_accel_entry *own = NULL;

	if (!other && !bare && !conntrack_unacknowledged(ctx, 0))
		other = bpf_map_lookup_elem(&accel_entries, key);
	if (other && other->carried)
		own = learn_other(packet, other);
	if (own && packet->now - own->left < LEARN_HEARD)
		doubt = CONNTRACK_ALIVE;
	else if (own && !bare)
		doubt = CONNTRACK_UNACKNOWLEDGED;
	else if (!bare || !conntrack_unacknowledged(ctx, 1))
		return;
	conntrack_keep(ctx, key, learn_tcp_milliseconds, doubt);
}

static __always_inline void learn_leaving(struct ctx *ctx)
{
	struct nat_accel_entry *other = NULL;
	struct packet packet;
	struct nat_flow_key key = {};
	__u64 hop;

	/* What opens or closes a connection is no proof for its data, and ends no doubt. */
	if (ctx_tagged(ctx) == LEARN_OWN || learn_turn(ctx) || parse(ctx, 0, 14, &packet) != GO_ON)
		return;
	if (packet.key.protocol != TCP && packet.key.protocol != UDP)
		return;
	if (packet.tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST))
		return;
	/* As packets of the other direction arrive. */
	key.src = packet.key.dst;
	key.dst = packet.key.src;
	key.sport = packet.key.dport;
	key.dport = packet.key.sport;
	key.protocol = packet.key.protocol;
	if (learn_lives(learn_key_addresses(&key), learn_key_ports(&key), packet.now))
		other = bpf_map_lookup_elem(&accel_entries, &key);
	hop = other ? leaving_hop(ctx) : 0;
	if (hop) {
		other->left_hop = hop;
		other->left_ifindex = ctx->ingress_ifindex;
		other->left = packet.now;
	}
	if (packet.class == NAT_TCP && learn_tcp_milliseconds)
		leaving_keep(ctx, &packet, &key, other);
}

#endif
