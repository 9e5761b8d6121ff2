/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Cached verdicts of rules and routes, for packets that differ in their source port only: a
 * host opens several sessions with one service, and one that is refused tries again. A verdict
 * is valid for half a second and for one generation of the rules, so changes in the kernel take
 * effect within a second, as for a flow's next hop. What depends on mappings is never in here,
 * and neither is what a packet may open or carry.
 */
#ifndef NATKIT_VERDICT_H
#define NATKIT_VERDICT_H

#include "nat/home.h"
#include "nat/rule.h"

enum verdict_limit {
	VERDICTS = 16384, /* entries of the map */
	VERDICT_TICKS = ROUTE_CHECK_TICKS / 2,
};

/* Source and destination; ingress interface and generation of the rules; port and protocol and
 * what else a verdict depends on. Words, because what was just written by bytes is slow to read
 * by words. No host has the address 0, so no key in use is 0. */
struct verdict_key {
	__u64 addresses, from, rest;
};

struct verdict {
	__u64 hop;          /* nat_flow.hop; this, link, mtu and found are of struct route */
	struct nat_addr to; /* the destination that it becomes, and to_port */
	__u32 rule;         /* nat_rule.id */
	int source;         /* source rule, an index of rules, or RULE_NONE */
	__u32 found;
	__be16 to_port;
	__u16 flags; /* enum nat_flow_state, of the owner: HAIRPIN, CLAMP */
	__u16 link, mtu;
	__u16 in, egress; /* links, plus 1: where it came in, and whose source rules it meets */
	__u8 by_rule;     /* the destination is translated by a rule */
	__u8 sessions;    /* some rule wants a session: not all are stateless */
	__u8 side;        /* of the egress interface */
	__u8 zone;        /* that it goes to */
};

/* A cache line. */
struct verdict_entry {
	struct verdict_key key;
	struct verdict verdict;
};

/* By hash. One a CPU, so that nobody reads what is half written. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct verdict_entry);
	__uint(max_entries, VERDICTS);
} verdicts SEC(".maps");

static __always_inline struct verdict_key verdict_key(const struct packet *p, __u32 generation)
{
	struct verdict_key key = {
		.addresses = (__u64)addr_word(p->key.dst) << 32 | addr_word(p->key.src),
		.from = (__u64)generation << 32 | p->ifindex,
		.rest = (__u64)p->key.side << 40 | (__u64)p->tos << 32 | (__u32)p->class << 24 |
			(__u32)p->key.protocol << 16 | p->key.dport,
	};

	return key;
}

static __always_inline int verdict_holds(const struct verdict_entry *e,
					 const struct verdict_key *key, __u32 now)
{
	return e->key.addresses == key->addresses && e->key.from == key->from &&
	       e->key.rest == key->rest && now - e->verdict.found < VERDICT_TICKS;
}

/* The entry of that key, or where to put it: of the two slots that it may have, the one whose
 * verdict is older. */
static __always_inline struct verdict_entry *verdict_get(const struct verdict_key *key, __u32 now)
{
	__u32 word = key->addresses * 31 + (key->addresses >> 32) + (__u32)key->rest * 0x9e3779b1;
	__u32 index = addr_hash(addr_of(word)) % VERDICTS, beside = index ^ 1;
	struct verdict_entry *e = bpf_map_lookup_elem(&verdicts, &index), *other;

	if (!e || verdict_holds(e, key, now))
		return e;
	other = bpf_map_lookup_elem(&verdicts, &beside);
	if (!other || verdict_holds(other, key, now))
		return other;
	return now - e->verdict.found > now - other->verdict.found ? e : other;
}

#endif
