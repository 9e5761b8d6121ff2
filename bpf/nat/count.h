/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What is reported to user space: counters, one set a CPU, and events, made only while somebody
 * reads them. Counting decides nothing.
 */
#ifndef NATKIT_COUNT_H
#define NATKIT_COUNT_H

#include "lib/base.h"
#include "nat/zone.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_stats);
	__uint(max_entries, 1);
} stats SEC(".maps");

/* struct nat_event. Full: the event is lost and counted in nat_stats.events_lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

static __always_inline struct nat_stats *count_stats(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&stats, &zero);
}

/* Programs of one CPU don't interrupt each other here (softirq, or test runs with
 * bottom halves off), so a plain addition loses nothing. */
static __always_inline void count_add(__u32 reason)
{
	struct nat_stats *s = count_stats();

	if (s && reason < NAT_REASONS)
		s->packets[reason]++;
}

struct event_totals {
	__u64 packets[2], bytes[2]; /* of the owner, the peer */
};

static __always_inline struct nat_event *event_begin(enum nat_event_kind kind)
{
	struct nat_event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	struct nat_stats *s;

	if (!e) {
		s = count_stats();
		if (s)
			s->events_lost++;
		return NULL;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time_ns = bpf_ktime_get_ns();
	e->kind = kind;
	return e;
}

/* A session was made, by the rule with that id, or has ended: its owner's flow, and how much there
 * was of each direction's packets. */
SUBPROGRAM void event_session(enum nat_event_kind kind, const struct nat_flow *owner, __u32 rule,
			      const struct event_totals *totals)
{
	struct nat_event *e = event_begin(kind);

	if (!e)
		return;
	e->key = owner->key;
	e->zone = zone_to(owner);
	e->key.link = 0;
	e->src = owner->src;
	e->dst = owner->dst;
	e->sport = owner->sport;
	e->dport = owner->dport;
	e->rule = rule;
	if (totals) {
		e->packets[0] = totals->packets[0];
		e->bytes[0] = totals->bytes[0];
		e->packets[1] = totals->packets[1];
		e->bytes[1] = totals->bytes[1];
	}
	bpf_ringbuf_submit(e, 0);
}

SUBPROGRAM void event_refused(const struct nat_flow_key *key, __u32 reason)
{
	struct nat_event *e = event_begin(NAT_EVENT_REFUSED);

	if (!e)
		return;
	e->key = *key;
	e->reason = reason;
	bpf_ringbuf_submit(e, 0);
}

#endif
