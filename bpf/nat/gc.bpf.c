// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Expiry: one timer, in a map of its own, that lives as long as the map is pinned, with
// no process running. The programs here are run once each, by BPF_PROG_TEST_RUN: to
// arm the timer (again, with this program's code, after an upgrade) and to stop it.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/gc.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gc);
	__uint(max_entries, 1);
} gc_timers SEC(".maps");

enum gc_clock { GC_CLOCK_MONOTONIC = 1, GC_EBUSY = -16 };

/* 0, or the negative error of what failed: kernels refuse while nobody holds the map. */
SEC("tc")
int gc_start(struct ctx *ctx)
{
	__u32 zero = 0;
	struct gc *s = bpf_map_lookup_elem(&gc_timers, &zero);
	long error;

	if (!s)
		return GC_EBUSY;
	error = bpf_timer_init(&s->timer, &gc_timers, GC_CLOCK_MONOTONIC);
	if (error && error != GC_EBUSY) /* it was there before: the upgrade */
		return error;
	error = bpf_timer_set_callback(&s->timer, gc_tick);
	if (error)
		return error;
	return bpf_timer_start(&s->timer, 0, 0);
}

SEC("tc")
int gc_stop(struct ctx *ctx)
{
	__u32 zero = 0;
	struct gc *s = bpf_map_lookup_elem(&gc_timers, &zero);

	return s ? bpf_timer_cancel(&s->timer) : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
