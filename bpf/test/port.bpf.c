// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Calls port.h alone, for its tests: many ports in one run, so that CPUs meet. The
// frame is a list of 16-bit ports; mark is the class, priority the address, cb[0] how
// many, cb[1] the port that is wished for, cb[2] whether its parity matters.
#include "lib/ctx_skb.h"
#include "lib/parse.h"
#include "nat/port.h"

struct test {
	struct ctx *ctx;
	struct nat_flow_key key;
	__u32 class, address, parity, done;
};

static __always_inline int port_any(struct test *t)
{
	__u32 index = t->address;
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	if (!address)
		return PORT_NONE;
	return port_take(t->ctx, &t->key, (t->class & PORT_CLASS) | (t->parity ? PORT_PARITY : 0),
			 index, port_range(address));
}

static long take_one(__u32 n, struct test *t)
{
	int port = port_any(t);
	__u16 out = port;

	if (port == PORT_NONE || bpf_skb_store_bytes(t->ctx, n * sizeof(out), &out, sizeof(out), 0))
		return 1;
	t->done++;
	return 0;
}

static long give_one(__u32 n, struct test *t)
{
	__u16 port;

	if (bpf_skb_load_bytes(t->ctx, n * sizeof(port), &port, sizeof(port)))
		return 1;
	port_give(t->address, t->class, port, 0);
	t->done++;
	return 0;
}

/* Returns how many it got; the list has them in host order. */
SEC("tc")
int take(struct ctx *ctx)
{
	struct test t = {
		.ctx = ctx, .class = ctx->mark, .address = ctx->priority, .parity = ctx->cb[2]};

	t.key.protocol = UDP;
	t.key.sport = bpf_htons(ctx->cb[1]);
	bpf_loop(ctx->cb[0], take_one, &t, 0);
	return t.done;
}

SEC("tc")
int give(struct ctx *ctx)
{
	struct test t = {.ctx = ctx, .class = ctx->mark, .address = ctx->priority};

	bpf_loop(ctx->cb[0], give_one, &t, 0);
	return t.done;
}

/* Takes a port and gives it back: for the benchmark. */
SEC("tc")
int churn(struct ctx *ctx)
{
	struct test t = {
		.ctx = ctx, .class = ctx->mark, .address = ctx->priority, .parity = ctx->cb[2]};
	int port;

	t.key.protocol = UDP;
	t.key.sport = bpf_htons(ctx->cb[1]);
	port = port_any(&t);
	if (port == PORT_NONE)
		return 0;
	port_give(ctx->priority, ctx->mark, port, 0);
	return port;
}

static long churn_one(__u32 n, struct test *t)
{
	int port = port_any(t);

	if (port == PORT_NONE)
		return 0;
	port_give(t->address, t->class, port, 0);
	t->done++;
	return 0;
}

/* The same many times over: CPUs meet between any two instructions. */
SEC("tc")
int storm(struct ctx *ctx)
{
	struct test t = {.ctx = ctx, .class = ctx->mark, .address = ctx->priority};

	bpf_loop(ctx->cb[0], churn_one, &t, 0);
	return t.done;
}

char _license[] SEC("license") = "Dual BSD/GPL";
