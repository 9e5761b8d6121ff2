// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// `natkit accel` at the XDP hook.
#include "nat/abi.h"
#include "lib/control.h" /* for natkit: NAT_ABI */
#include "lib/ctx_xdp.h"
#define CONNTRACK_LOOKUP bpf_xdp_ct_lookup
#include "accel/learn.h"

SEC("xdp")
int accel_xdp(struct ctx *ctx)
{
	return learn_process(ctx, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
