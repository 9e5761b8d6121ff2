/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What leaves an accelerated interface through the stack: it shows that the kernel
 * still lets a flow out, and by which way. Those that took the shortcut pass here too
 * (on tc), and show nothing.
 */
#ifndef NATKIT_LEAVING_H
#define NATKIT_LEAVING_H

#include "learn.h"

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

static __always_inline void learn_leaving(struct ctx *ctx)
{
	struct nat_shortcut *other;
	struct packet packet;
	struct nat_flow_key key = {};
	__u64 hop;

	if (ctx_tagged(ctx) == LEARN_OWN || parse(ctx, 0, 14, &packet) != GO_ON)
		return;
	if (packet.key.protocol != TCP && packet.key.protocol != UDP)
		return;
	/* As packets of the other direction arrive. */
	key.src = packet.key.dst;
	key.dst = packet.key.src;
	key.sport = packet.key.dport;
	key.dport = packet.key.sport;
	key.protocol = packet.key.protocol;
	other = bpf_map_lookup_elem(&shortcuts, &key);
	if (!other)
		return;
	hop = leaving_hop(ctx);
	if (hop) {
		other->left_hop = hop;
		other->left_ifindex = ctx->ingress_ifindex;
		other->left = packet.now;
	}
	if (other->carried && packet.class == NAT_TCP)
		conntrack_keep(ctx, &key, learn_tcp_milliseconds);
}

#endif
