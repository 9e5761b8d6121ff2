// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the tc hook: one program for each side.
#include "nat.h"
#include "maps.h"
#include "ctx_skb.h"
#include "pipeline.h"

SEC("tc")
int tc_inside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_INSIDE, 14);
}

SEC("tc")
int tc_outside(struct ctx *ctx)
{
	return nat_process(ctx, NAT_OUTSIDE, 14);
}

char _license[] SEC("license") = "Dual BSD/GPL";
