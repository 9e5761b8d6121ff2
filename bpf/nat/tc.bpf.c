// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the tc hook: one program for each side, one for links of both, and all for
// links with and without Ethernet.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/pipeline.h"

SEC("tc")
int tc_inside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_INSIDE, NAT_ETHERNET);
}

SEC("tc")
int tc_outside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_OUTSIDE, NAT_ETHERNET);
}

SEC("tc")
int tc_both(struct ctx *ctx)
{
	return nat_process(ctx, NAT_BOTH, NAT_ETHERNET);
}

SEC("tc")
int tc_inside_raw(struct ctx *ctx)
{
	return nat_process(ctx, NAT_INSIDE, NAT_RAW);
}

SEC("tc")
int tc_outside_raw(struct ctx *ctx)
{
	return nat_process(ctx, NAT_OUTSIDE, NAT_RAW);
}

SEC("tc")
int tc_both_raw(struct ctx *ctx)
{
	return nat_process(ctx, NAT_BOTH, NAT_RAW);
}

char _license[] SEC("license") = "Dual BSD/GPL";
