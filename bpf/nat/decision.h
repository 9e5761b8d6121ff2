/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the rules and the routes have decided of late for packets that differ in their source
 * port only: a host opens several sessions with one service, and who is refused tries again.
 * For half a second, and for the generation of the rules, it holds for the next one; so what
 * changes in the kernel has its effect within a second, like on a flow's next hop. What
 * depends on mappings is never in here, and what a packet may open or carry is not either.
 */
#ifndef NATKIT_DECISION_H
#define NATKIT_DECISION_H

#include "nat/home.h"
#include "nat/rule.h"

enum decision_limit {
	DECISIONS = 16384, /* entries of the map */
	DECISION_TICKS = ROUTE_CHECK_TICKS / 2,
};

/* Source and destination; way in and generation of the rules; port and protocol and what
 * else a decision depends on. Words, because what was just written by bytes is slow to read
 * by words. No host has the address 0, so no key in use is 0. */
struct decision_key {
	__u64 addresses, way, rest;
};

struct decided {
	__u64 hop;          /* nat_flow.hop; this, link, mtu and found are of struct route */
	struct nat_addr to; /* the destination that it becomes, and to_port */
	__u32 rule;         /* nat_rule.id */
	int source;         /* source rule, an index of rules, or RULE_NONE */
	__u32 found;
	__be16 to_port;
	__u16 flags; /* enum nat_flow_state, of the owner: HAIRPIN, CLAMP */
	__u16 link, mtu;
	__u16 in, way_out; /* links, plus 1: where it came in, and whose source rules it meets */
	__u8 by_rule;      /* the destination is translated by a rule */
	__u8 sessions;     /* some rule wants a session: not all are stateless */
	__u8 side;         /* of the way out */
	__u8 zero;
};

/* A cache line. */
struct decision {
	struct decision_key key;
	struct decided decided;
};

/* By hash. One a CPU, so that nobody reads what is half written. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct decision);
	__uint(max_entries, DECISIONS);
} decisions SEC(".maps");

static __always_inline struct decision_key decision_key(const struct packet *p, __u32 generation)
{
	struct decision_key key = {
		.addresses = (__u64)addr_word(p->key.dst) << 32 | addr_word(p->key.src),
		.way = (__u64)generation << 32 | p->ifindex,
		.rest = (__u64)p->key.side << 40 | (__u64)p->tos << 32 | (__u32)p->class << 24 |
			(__u32)p->key.protocol << 16 | p->key.dport,
	};

	return key;
}

static __always_inline int decision_holds(const struct decision *d, const struct decision_key *key,
					  __u32 now)
{
	return d->key.addresses == key->addresses && d->key.way == key->way &&
	       d->key.rest == key->rest && now - d->decided.found < DECISION_TICKS;
}

/* The decision of that key, or where to put it: of the two places that it may have, the one
 * whose decision is older. */
static __always_inline struct decision *decision_get(const struct decision_key *key, __u32 now)
{
	__u32 word = key->addresses * 31 + (key->addresses >> 32) + (__u32)key->rest * 0x9e3779b1;
	__u32 index = addr_hash(addr_of(word)) % DECISIONS, beside = index ^ 1;
	struct decision *d = bpf_map_lookup_elem(&decisions, &index), *other;

	if (!d || decision_holds(d, key, now))
		return d;
	other = bpf_map_lookup_elem(&decisions, &beside);
	if (!other || decision_holds(other, key, now))
		return other;
	return now - d->decided.found > now - other->decided.found ? d : other;
}

#endif
