// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the XDP hook: one program for each side, and one for links of both.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_xdp.h"
#include "nat/pipeline.h"

SEC("xdp")
int xdp_inside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_INSIDE, NAT_ETHERNET);
}

SEC("xdp")
int xdp_outside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_OUTSIDE, NAT_ETHERNET);
}

SEC("xdp")
int xdp_both(struct ctx *ctx)
{
	return nat_process(ctx, NAT_BOTH, NAT_ETHERNET);
}

char _license[] SEC("license") = "Dual BSD/GPL";
