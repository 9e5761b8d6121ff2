/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Clamps the MSS that TCP's ends announce to each other.
 */
#ifndef NATKIT_MSS_H
#define NATKIT_MSS_H

#include "lib/rewrite.h"
#include "nat/count.h"

/* A walk over the options of a TCP header; offsets are from the start of the frame. */
struct option_walk {
	struct ctx *ctx;
	__u32 at, end; /* the option at hand, and where the header ends */
	__u32 kind;
	__u32 found; /* 0: not there */
};

static long option_next(__u32 n, struct option_walk *walk)
{
	__u8 *option = ctx_data(walk->ctx) + (walk->at & 255);

	if (walk->at + 4 > walk->end || (void *)(option + 4) > ctx_data_end(walk->ctx) || !*option)
		return 1;
	if (*option == walk->kind) {
		walk->found = walk->at;
		return 1;
	}
	if (*option != 1 && option[1] < 2)
		return 1;
	walk->at += *option == 1 ? 1 : option[1];
	return 0;
}

/* Lowers the MSS that a SYN announces. A SYN without one gets none. */
GLOBAL int rewrite_mss(struct ctx *ctx, __u32 l4, __u32 most)
{
	void *end = ctx_data_end(ctx);
	__u32 at = l4 & PACKET_L4_MASK, delta;
	struct tcp *tcp = ctx_data(ctx) + at;
	struct option_walk walk = {.ctx = ctx, .at = at + sizeof(*tcp), .kind = TCP_MSS};
	__u16 old, new = most;
	__u8 *mss;

	if ((void *)(tcp + 1) > end)
		return GO_ON;
	walk.end = at + (tcp->offset >> 4) * 4;
	bpf_loop(40, option_next, &walk, 0); /* no option is shorter than a byte */
	mss = ctx_data(ctx) + (walk.found & 255);
	if (!walk.found || (void *)(mss + 4) > end)
		return GO_ON;
	old = mss[2] << 8 | mss[3];
	if (mss[1] != 4 || old <= new)
		return GO_ON;
	mss[2] = new >> 8;
	mss[3] = new;
	/* In the order in which the checksum's words lie in memory. */
	if (!(walk.found & 1)) {
		old = bpf_htons(old);
		new = bpf_htons(new);
	}
	delta = (__u16)~old + new;
	delta = (delta & 0xffff) + (delta >> 16);
	count_add(NAT_MSS_CLAMPED);
	return ctx_checksum(ctx, &tcp->check, at + __builtin_offsetof(struct tcp, check), 0, delta,
			    0, 1);
}

#endif
