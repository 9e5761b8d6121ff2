// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Opens many sessions in one run, for the benchmark: what session.h costs when its code
// and the tables are warm. No packet is made or changed.
#include "../ctx_skb.h"
#include "../session.h"

struct test {
	struct ctx *ctx;
	struct packet packet;
	struct nat_flow flow;
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

/* Opens cb[0] UDP sessions from 192.168.1.10 and the next to 198.51.100.9:53, and puts
 * the nanoseconds it took into the frame. Returns how many were opened. */
SEC("tc")
int open(struct ctx *ctx)
{
	struct test t = {.ctx = ctx};
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
	bpf_loop(ctx->cb[0], open_one, &t, 0);
	ns = bpf_ktime_get_ns() - ns;
	bpf_skb_store_bytes(ctx, 0, &ns, sizeof(ns), 0);
	return t.opened;
}

char _license[] SEC("license") = "Dual BSD/GPL";
