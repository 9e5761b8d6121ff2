/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The log of translations: what began and ended, and what was refused, as records in a ring that
 * fills whether somebody reads it or not. What is recorded is natkit's choice (nat_log.record);
 * packets of established sessions never come here. A record that finds no room is lost and counted,
 * with the times of the first and the last; packets go on.
 *
 *   log_block       a port block was given to a subscriber, or given back
 *   log_mapping     a port or an address was given to an internal endpoint, or given back
 *   log_session     a session was made or has ended
 *   log_quota       a subscriber was refused what its limits do not allow
 *   log_exhausted   a pool had none left
 *
 * An end is recorded while what ends is still in the maps, and so before it can be somebody else's;
 * a beginning when it is there. Package collect relies on both. Records of several CPUs may be out
 * of order by what is between two instructions.
 */
#ifndef NATKIT_LOG_H
#define NATKIT_LOG_H

#include "nat/port.h"
#include "nat/zone.h"

enum log_limit {
	LOG_EXHAUSTED_TICKS = 9537, /* 10 s: between two records of one pool */
	LOG_SECOND_SHIFT = 10,      /* of ticks */
	LOG_QUOTA_PER_SECOND = 64,  /* records of refused subscribers, of all together */
	LOG_NO_WAKEUP = 1,          /* BPF_RB_NO_WAKEUP: who reads looks by a clock of its own */
};

/* The ring, of struct nat_log_record; its size is the rule file's, and there is none while nothing
 * is recorded. Packets and GC write, one natkit reads. Full: nat_log.lost. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_RINGBUF);
			__uint(max_entries, 4096);
		});
} log_rings SEC(".maps");

/* natkit writes record and takes back times; packets and GC write the rest. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_log);
	__uint(max_entries, 1);
} log_states SEC(".maps");

static __always_inline struct nat_log *log_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&log_states, &zero);
}

/* Those of the bits of enum nat_log_what that are recorded. */
static __always_inline __u32 log_wants(__u32 what)
{
	struct nat_log *log = log_state();

	return log ? *(volatile __u32 *)&log->record & what : 0;
}

static __always_inline void log_lost(struct nat_log *log, __u64 now_ns)
{
	__sync_val_compare_and_swap(&log->lost_first_ns, 0, now_ns);
	*(volatile __u64 *)&log->lost_last_ns = now_ns;
	__sync_fetch_and_add(&log->lost, 1);
}

/* A record to be filled and given to log_end, or NULL. Its number is taken in any case. */
static __always_inline struct nat_log_record *log_begin(__u8 kind, __u8 event)
{
	__u32 zero = 0, sequence;
	struct nat_log *log = log_state();
	void *ring = bpf_map_lookup_elem(&log_rings, &zero);
	__u64 now_ns = bpf_ktime_get_ns();
	struct nat_log_record *r;

	if (!log || !ring)
		return NULL;
	sequence = __sync_fetch_and_add(&log->sequence, 1);
	r = bpf_ringbuf_reserve(ring, sizeof(*r), 0);
	if (!r) {
		log_lost(log, now_ns);
		return NULL;
	}
	__builtin_memset(r, 0, sizeof(*r));
	r->time_ns = now_ns;
	r->sequence = sequence;
	r->what = kind | event << NAT_LOG_EVENT_SHIFT;
	return r;
}

static __always_inline void log_end(struct nat_log_record *r)
{
	bpf_ringbuf_submit(r, LOG_NO_WAKEUP);
}

static __always_inline __u8 log_protocol(__u32 class)
{
	/* TCP, UDP, ICMP; 0 is all protocols of an address */
	return 0x00011106 >> (class & 3) * 8;
}

/* The block that begins with that granule is its owner's from now on, or until now. */
static __always_inline void log_block(__u32 event, __u32 index, __u32 first,
				      const struct nat_granule *g)
{
	struct nat_address *address;
	struct nat_log_record *r;
	__u64 age;

	if (!log_wants(NAT_LOG_BLOCKS))
		return;
	address = bpf_map_lookup_elem(&addresses, &index);
	r = address ? log_begin(NAT_LOG_KIND_BLOCK, event) : NULL;
	if (!r)
		return;
	age = (r->time_ns - g->since_ns) >> NAT_TICK_SHIFT;
	r->age = age > ~0U ? 0 : age;
	r->internal = g->addr;
	r->pool = g->pool;
	r->zone = g->zone;
	r->external = address->addr;
	r->external_port = bpf_htons(first * 64);
	r->last_port = bpf_htons(first * 64 + (64 << (g->order & 7)) - 1);
	log_end(r);
}

/* The external port of that class, or the whole address, is that of the internal endpoint which its
 * slot names, from now on or until now. */
GLOBAL int log_mapping(__u32 event, __u32 index, __u32 class, __u32 port)
{
	struct nat_address *address;
	struct nat_log_record *r;
	struct nat_slot *slot, value;
	__u32 wanted = log_wants(NAT_LOG_MAPPINGS | NAT_LOG_LOOSE);

	if (!wanted)
		return 0;
	address = bpf_map_lookup_elem(&addresses, &index);
	slot = address ? port_slot(index, address, class, port) : NULL;
	if (!slot)
		return 0;
	if (!(wanted & NAT_LOG_MAPPINGS) && *(volatile __u8 *)&slot->held & NAT_HELD_IN_BLOCK)
		return 0;
	value = slot_read(slot);
	r = log_begin(NAT_LOG_KIND_MAPPING, event);
	if (!r)
		return 0;
	r->protocol = log_protocol(class);
	r->pool = value.pool;
	r->zone = slot->zone;
	r->internal = value.addr;
	r->internal_port = value.port;
	r->external = address->addr;
	r->external_port = bpf_htons(port);
	log_end(r);
	return 0;
}

/* One internal host of a session; remote is whom it talks to, if that is recorded. */
static __always_inline void log_conversation(__u32 event, const struct nat_flow_key *key, __u8 zone,
					     struct nat_addr internal, __be16 internal_port,
					     struct nat_addr external, __be16 external_port,
					     struct nat_addr remote, __be16 remote_port, __u32 age)
{
	struct nat_log_record *r = log_begin(NAT_LOG_KIND_SESSION, event);

	if (!r)
		return;
	r->protocol = key->protocol;
	r->zone = zone;
	r->internal = internal;
	r->internal_port = internal_port;
	r->external = external;
	r->external_port = external_port;
	r->age = age;
	if (log_wants(NAT_LOG_DESTINATIONS)) {
		r->destination = remote;
		r->destination_port = remote_port;
	}
	log_end(r);
}

/* The session that its owner's packets open as key and leave as flow: of each host whose address is
 * translated one record. age is in ticks. */
SUBPROGRAM void log_session(__u32 event, const struct nat_flow_key *key,
			    const struct nat_flow *flow, __u32 age)
{
	int query = key->protocol == 1; /* ICMP: sport is the identifier, of both ends */

	if (!addr_equal(key->src, flow->src) || (key->sport != flow->sport && !query))
		log_conversation(event, key, key->zone, key->src, key->sport, flow->src,
				 flow->sport, key->dst, key->dport, age);
	if (addr_equal(key->dst, flow->dst) && key->dport == flow->dport)
		return;
	log_conversation(event, key, zone_to(flow), flow->dst, query ? flow->sport : flow->dport,
			 key->dst, query ? key->sport : key->dport, key->src,
			 query ? 0 : key->sport, age);
}

/* The subscriber was refused, times by now. Who is refused all the time is recorded as often as
 * times doubles, and all of them together some times a second. */
GLOBAL int log_quota(__be32 host, __u32 pool, __u32 zone, __u32 refusal, __u32 times)
{
	struct nat_log *log = log_state();
	__u32 second = (bpf_ktime_get_ns() >> NAT_TICK_SHIFT) >> LOG_SECOND_SHIFT, old;
	struct nat_log_record *r;

	if (times & (times - 1) || !log || !log_wants(NAT_LOG_LIMITS))
		return 0;
	old = *(volatile __u32 *)&log->quota_second;
	if (old != second && __sync_val_compare_and_swap(&log->quota_second, old, second) == old)
		*(volatile __u32 *)&log->quota_records = 0;
	if (__sync_fetch_and_add(&log->quota_records, 1) >= LOG_QUOTA_PER_SECOND)
		return 0;
	r = log_begin(NAT_LOG_KIND_NONE, NAT_LOG_QUOTA);
	if (!r)
		return 0;
	r->internal = addr_of(host);
	r->pool = pool;
	r->zone = zone;
	r->protocol = refusal;
	r->age = times;
	log_end(r);
	return 0;
}

/* The pool had no port, block or address left at that address, for the reason of enum
 * nat_reason. */
GLOBAL int log_exhausted(__u32 pool, __u32 index, __u32 reason)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	__u32 now = bpf_ktime_get_ns() >> NAT_TICK_SHIFT, old, *last;
	struct nat_log *log = log_state();
	struct nat_log_record *r;

	if (!log || !address || !log_wants(NAT_LOG_LIMITS))
		return 0;
	OPAQUE(pool);
	last = &log->exhausted[pool & (NAT_LOG_POOLS - 1)];
	old = *(volatile __u32 *)last;
	if ((old && now - old < LOG_EXHAUSTED_TICKS) ||
	    __sync_val_compare_and_swap(last, old, now) != old)
		return 0;
	r = log_begin(NAT_LOG_KIND_NONE, NAT_LOG_EXHAUSTED);
	if (!r)
		return 0;
	r->external = address->addr;
	r->pool = pool;
	r->protocol = reason;
	log_end(r);
	return 0;
}

#endif
