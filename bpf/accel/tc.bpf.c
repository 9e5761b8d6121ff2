// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// `natkit accel` at the tc hooks: ingress, ingress of an interface where XDP comes
// first, and egress.
#include "nat/abi.h"
#include "lib/control.h" /* for natkit: NAT_ABI */
#include "lib/ctx_skb.h"
#define CONNTRACK_LOOKUP bpf_skb_ct_lookup
#include "accel/leaving.h"

SEC("tc")
int accel_tc(struct ctx *ctx)
{
	return learn_process(ctx, 0);
}

SEC("tc")
int accel_tc_rest(struct ctx *ctx)
{
	return learn_process(ctx, 1);
}

SEC("tc")
int accel_egress(struct ctx *ctx)
{
	learn_leaving(ctx);
	return CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
