/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the core may do to a packet on XDP. ctx_skb.h has the same names for tc. Other
 * headers know no hook's types, helpers or return codes; where a step is for one hook
 * alone they test CTX_TC, which is a constant.
 *
 * XDP has no skb: no metadata, no neighbour output, no clone. What needs one is a
 * stub that sends the packet on to tc, untranslated, which does it all again.
 */
#ifndef NATKIT_CTX_H
#define NATKIT_CTX_H

#include <linux/bpf.h>
#include "lib/links.h"

/* Renames the parameter as well as the type: struct ctx *ctx is the hook's context. */
#define ctx xdp_md

enum ctx_hook {
	CTX_TC = 0,
	CTX_PASS = XDP_PASS,
	CTX_DROP = XDP_DROP,
};

static __always_inline void *ctx_data(struct ctx *ctx)
{
	return (void *)(long)ctx->data;
}

static __always_inline void *ctx_data_end(struct ctx *ctx)
{
	return (void *)(long)ctx->data_end;
}

static __always_inline __u32 ctx_length(struct ctx *ctx)
{
	return ctx->data_end - ctx->data;
}

static __always_inline __u32 ctx_ifindex(struct ctx *ctx)
{
	return ctx->ingress_ifindex;
}

/* An IPv4 packet for this machine. A tagged frame is its VLAN device's, whose own
 * ingress meets it; broadcast and multicast frames are the stack's. */
static __always_inline int ctx_is_ours(struct ctx *ctx, __u32 l3)
{
	__u8 *frame = ctx_data(ctx);

	if ((void *)(frame + 14) > ctx_data_end(ctx))
		return 0;
	return *(__be16 *)(frame + 12) == bpf_htons(0x0800) && !(frame[0] & 1);
}

/* Whether a frame is to that link's address: not, if the card takes in what is for others.
 * Checked before a session is made; another host's frame with the addresses and ports of a
 * session of ours does not occur. */
static __always_inline int ctx_is_addressed(struct ctx *ctx, const struct nat_link *link)
{
	__u8 *frame = ctx_data(ctx);

	return link && (void *)(frame + 6) <= ctx_data_end(ctx) &&
	       *(__u32 *)frame == *(__u32 *)link->mac &&
	       *(__u16 *)(frame + 4) == *(__u16 *)(link->mac + 4);
}

/* Everything is in one piece already. */
static __always_inline int ctx_is_linear(struct ctx *ctx, __u32 bytes)
{
	return 1;
}

static __always_inline int ctx_pull(struct ctx *ctx, __u32 bytes)
{
	return 0;
}

static __always_inline __u32 ctx_gso_size(struct ctx *ctx)
{
	return 0;
}

static __always_inline __u32 ctx_segments(struct ctx *ctx)
{
	return 1;
}

/*
 * Adds to the complement of a transport checksum, which lies at check: l3_delta is for
 * the addresses in the pseudo-header, l4_delta for the ports. udp: zero means that there
 * is no checksum, and none may become zero. offset and partial are for tc.
 */
static __always_inline int ctx_checksum(struct ctx *ctx, __u16 *check, __u32 offset, __u16 l3_delta,
					__u16 l4_delta, int udp, int partial)
{
	__u16 sum;

	if (udp && !*check)
		return GO_ON;
	sum = checksum_add(*check, l3_delta + l4_delta);
	*check = udp && !sum ? 0xffff : sum;
	return GO_ON;
}

static __always_inline long ctx_fib_lookup(struct ctx *ctx, struct bpf_fib_lookup *fib, __u32 flags)
{
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), flags);
}

/* Out by that link; the frame has its MACs. */
static __always_inline int ctx_transmit(struct ctx *ctx, __u32 index, const struct nat_link *link)
{
	return bpf_redirect_map(&transmit, index, XDP_DROP);
}

static __always_inline int ctx_transmit_neighbour(struct ctx *ctx, __u32 ifindex, __be32 gateway)
{
	return CTX_DROP; /* used on tc only */
}

/* What XDP sends passes no egress. */
static __always_inline void ctx_tag(struct ctx *ctx, __u32 tag)
{
}

static __always_inline int ctx_can_transmit(const struct nat_link *link)
{
	return link->flags & NAT_LINK_XDP;
}

/* Used on tc only. */
static __always_inline long ctx_frame(struct ctx *ctx)
{
	return -1;
}

static __always_inline long ctx_load(struct ctx *ctx, __u32 offset, void *to, __u32 bytes)
{
	return -1;
}

static __always_inline long ctx_store(struct ctx *ctx, __u32 offset, const void *from, __u32 bytes)
{
	return -1;
}

static __always_inline long ctx_forget(struct ctx *ctx, __u32 l3)
{
	return -1;
}

static __always_inline long ctx_reply(struct ctx *ctx, __u32 l3, __u32 quoted, __u32 header)
{
	return -1;
}

static __always_inline int ctx_return(struct ctx *ctx, __u32 l3)
{
	return CTX_DROP;
}

static __always_inline long ctx_resize(struct ctx *ctx, __u32 bytes)
{
	return -1;
}

static __always_inline long ctx_shrink(struct ctx *ctx, __u32 bytes)
{
	return -1;
}

static __always_inline long ctx_copy(struct ctx *ctx, __u32 ifindex)
{
	return -1;
}

static __always_inline long ctx_copy_up(struct ctx *ctx, __u32 ifindex)
{
	return -1;
}

#endif
