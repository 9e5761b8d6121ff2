// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Expiry: one timer, in a map of its own, that lives as long as the map is pinned, with
// no process running. The programs here are run once each, by BPF_PROG_TEST_RUN: to
// arm the timer (again, with this program's code, after an upgrade) and to stop it.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/sweep.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct sweep);
	__uint(max_entries, 1);
} sweeps SEC(".maps");

enum sweep_clock { SWEEP_CLOCK_MONOTONIC = 1, SWEEP_EBUSY = -16 };

/* 0, or the negative error of what failed: kernels refuse while nobody holds the map. */
SEC("tc")
int sweep_start(struct ctx *ctx)
{
	__u32 zero = 0;
	struct sweep *s = bpf_map_lookup_elem(&sweeps, &zero);
	long error;

	if (!s)
		return SWEEP_EBUSY;
	error = bpf_timer_init(&s->timer, &sweeps, SWEEP_CLOCK_MONOTONIC);
	if (error && error != SWEEP_EBUSY) /* it was there before: the upgrade */
		return error;
	error = bpf_timer_set_callback(&s->timer, sweep_tick);
	if (error)
		return error;
	return bpf_timer_start(&s->timer, 0, 0);
}

SEC("tc")
int sweep_stop(struct ctx *ctx)
{
	__u32 zero = 0;
	struct sweep *s = bpf_map_lookup_elem(&sweeps, &zero);

	return s ? bpf_timer_cancel(&s->timer) : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
