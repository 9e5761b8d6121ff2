// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Opens many sessions in one run, for the benchmark: what session.h costs when its code
// and the tables are warm. No packet is made or changed.
#include "lib/ctx_skb.h"
#include "nat/session.h"

struct test {
	struct ctx *ctx;
	struct packet packet;
	struct nat_flow flow;
	__u32 first, base, modulus;
	__u32 opened;
};

static long open_one(__u32 n, struct test *t)
{
	t->packet.key.src.octet[3] = 10 + (n & 127);
	t->packet.key.sport = bpf_htons(3000 + (n >> 7));
	if (session_open(t->ctx, &t->packet, &t->flow) == GO_ON)
		t->opened++;
	return 0;
}

/* Session number first + n of modulus, in an order that leaps about, as flow.h opens one. */
static long open_scattered(__u32 n, struct test *t)
{
	__u32 flow, host, state;

	if (!t->modulus)
		return 1;
	flow = t->base + (__u64)(t->first + n) * 1000003 % t->modulus;
	host = flow / 63;
	t->packet.key.src = addr_of(bpf_htonl(0xc0a81000 + host));
	t->packet.key.sport = bpf_htons(1024 + flow - host * 63);
	t->packet.key.dst = addr_of(bpf_htonl(0xc6336409 + flow / 32768));
	if (!flow_find(&t->packet.key, &state) &&
	    session_open(t->ctx, &t->packet, &t->flow) == GO_ON)
		t->opened++;
	return 0;
}

/* Opens cb[0] sessions and puts the nanoseconds it took into the frame. */
static __always_inline int run(struct ctx *ctx, long (*open)(__u32 n, struct test *t))
{
	struct test t = {
		.ctx = ctx, .first = ctx->cb[1], .base = ctx->cb[2], .modulus = ctx->cb[3]};
	__u64 ns;

	t.packet.key.src = addr_of(bpf_htonl(0xc0a80100));
	t.packet.key.dst = addr_of(bpf_htonl(0xc6336409));
	t.packet.key.dport = bpf_htons(53);
	t.packet.key.protocol = UDP;
	t.packet.class = NAT_UDP;
	t.packet.ttl = 64;
	t.packet.ifindex = ctx->ifindex;
	t.packet.segments = 1;
	t.packet.bytes = 28;
	t.packet.now = bpf_ktime_get_ns() >> NAT_TICK_SHIFT;
	ns = bpf_ktime_get_ns();
	bpf_loop(ctx->cb[0], open, &t, 0);
	ns = bpf_ktime_get_ns() - ns;
	bpf_skb_store_bytes(ctx, 0, &ns, sizeof(ns), 0);
	return t.opened;
}

/* UDP sessions from 192.168.1.10 and the next to 198.51.100.9:53. Returns how many were
 * opened. */
SEC("tc")
int open(struct ctx *ctx)
{
	return run(ctx, open_one);
}

/* Of cb[3] sessions, 63 a host from 192.168.16.0 on, those from number cb[1] on; cb[2] others
 * come before them. */
SEC("tc")
int scatter(struct ctx *ctx)
{
	return run(ctx, open_scattered);
}

char _license[] SEC("license") = "Dual BSD/GPL";
