// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Calls table.h alone, for its tests. A value's key is its low 16 bits, so that many have the
// same. The frame is a list of values, which the results replace; cb[0] says how many.
#include "lib/ctx_skb.h"
#include "nat/flows.h"

enum { TEST_KEY = 0xffff, TEST_KEYS = 256 };

/* How many have the key at the moment. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, TEST_KEYS);
} holders SEC(".maps");

static __always_inline int test_is(const void *key, __u64 value)
{
	return *(const __u32 *)key == (value & TEST_KEY);
}

static __always_inline __u64 test_in(const struct nat_bucket *bucket, __u64 hash, const void *key)
{
	return table_within(bucket, hash, test_is, key);
}

GLOBAL int insert_value(__u32 value)
{
	struct nat_control *c = control_get();
	__u32 key = value & TEST_KEY;

	return c ? table_insert(&flow_table, c->flow_mask, table_hash(c, key, 0), value, test_in,
				&key)
		 : E_BUSY;
}

/* The value of the key, or -1. */
GLOBAL int find_value(__u32 value)
{
	struct nat_control *c = control_get();
	__u32 key = value & TEST_KEY;
	__u64 entry =
		c ? table_find(&flow_table, c->flow_mask, table_hash(c, key, 0), test_in, &key) : 0;

	return entry ? (int)table_value(entry) : -1;
}

GLOBAL int remove_value(__u32 value)
{
	struct nat_control *c = control_get();

	if (c)
		table_remove(&flow_table, c->flow_mask, table_hash(c, value & TEST_KEY, 0), value);
	return 0;
}

struct test {
	struct ctx *ctx;
	__u32 seed, cpu, inserted, wrong;
};

static __always_inline long each(__u32 n, struct test *t, int (*one)(__u32 value))
{
	__u32 value;
	int result;

	if (bpf_skb_load_bytes(t->ctx, n * sizeof(value), &value, sizeof(value)))
		return 1;
	result = one(value);
	return bpf_skb_store_bytes(t->ctx, n * sizeof(result), &result, sizeof(result), 0) ? 1 : 0;
}

static long insert_one(__u32 n, struct test *t)
{
	return each(n, t, insert_value);
}

static long find_one(__u32 n, struct test *t)
{
	return each(n, t, find_value);
}

static long remove_one(__u32 n, struct test *t)
{
	return each(n, t, remove_value);
}

SEC("tc")
int insert(struct ctx *ctx)
{
	struct test t = {.ctx = ctx};

	return bpf_loop(ctx->cb[0], insert_one, &t, 0);
}

SEC("tc")
int find(struct ctx *ctx)
{
	struct test t = {.ctx = ctx};

	return bpf_loop(ctx->cb[0], find_one, &t, 0);
}

SEC("tc")
int remove(struct ctx *ctx)
{
	struct test t = {.ctx = ctx};

	return bpf_loop(ctx->cb[0], remove_one, &t, 0);
}

/* Inserts a key that other CPUs insert, too: only one may have it at a time. Who has it
 * finds its own value and takes it back. */
static long storm_one(__u32 n, struct test *t)
{
	__u32 key, value, *holder;

	t->seed = t->seed * 1664525 + 1013904223;
	key = t->seed >> 16 & (TEST_KEYS - 1);
	value = t->cpu << 16 | key;
	if (insert_value(value))
		return 0;
	t->inserted++;
	holder = bpf_map_lookup_elem(&holders, &key);
	if (!holder)
		return 1;
	if (__sync_fetch_and_add(holder, 1) || find_value(key) != (int)value)
		t->wrong++;
	__sync_fetch_and_add(holder, -1);
	remove_value(value);
	return 0;
}

/* cb[1] is a number of this CPU. Returns how often something was wrong; the frame begins with
 * how many it inserted. */
SEC("tc")
int storm(struct ctx *ctx)
{
	struct test t = {.ctx = ctx, .cpu = ctx->cb[1], .seed = ctx->cb[1] * 12345};

	bpf_loop(ctx->cb[0], storm_one, &t, 0);
	bpf_skb_store_bytes(ctx, 0, &t.inserted, sizeof(t.inserted), 0);
	return t.wrong;
}

char _license[] SEC("license") = "Dual BSD/GPL";
