/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * On a miss: which rules want this packet, and what they make of its addresses.
 * Every question is a fixed number of look-ups, whatever the number of rules;
 * nat_config.lookups leaves out those that find nothing in this rule set.
 *
 * Rules of a kind are looked up from the most to the least special, and at each step
 * first bound to an interface, then unbound: no order in the file decides.
 */
#ifndef NATKIT_RULE_H
#define NATKIT_RULE_H

#include "nat/maps.h"

#define RULE_NONE (-1)

enum rule_limit { RULE_RECENT = 4096 };

/* The source rule that a host's packets between two interfaces matched, of that generation. src 0:
 * nothing here, for no host has that address. */
struct rule_recent {
	__be32 src;
	__u32 links; /* ingress and egress interface */
	__u32 generation;
	int index;
};

/* By hash of the address. One a CPU, so that nobody reads what is half written. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct rule_recent);
	__uint(max_entries, RULE_RECENT);
} rules_recent SEC(".maps");

/* One look-up in a rule map of the generation in use: an index of rules. A map that
 * is not there has no entries. */
static __always_inline int rule_lookup(void *generations, __u32 slot, const void *key)
{
	void *inner = bpf_map_lookup_elem(generations, &slot);
	__u32 *index = inner ? bpf_map_lookup_elem(inner, key) : NULL;

	return index ? (int)*index : RULE_NONE;
}

static __always_inline const struct nat_rule *rule_get(__u32 slot, int index)
{
	void *inner = bpf_map_lookup_elem(&rules, &slot);
	__u32 key = index;

	return inner ? bpf_map_lookup_elem(inner, &key) : NULL;
}

/*
 * Whether an exclusion names the packet. Prefixes are numbered by class: the longest
 * that matches the source, the longest that matches the destination; pairs are in a
 * hash, with the compiler having added the pairs that shorter prefixes imply. A port
 * always comes with its protocol.
 */
GLOBAL int rule_excluded(const struct nat_flow_key *key, __u32 lookups, __u32 slot)
{
	struct nat_prefix_key prefix = {.prefixlen = 32};
	struct nat_exclude_key pair = {};
	int class;

	if (!key)
		return 0;
	prefix.addr = key->src;
	class = rule_lookup(&exclude_src, slot, &prefix);
	if (class == RULE_NONE)
		return 0;
	pair.src = class;
	prefix.addr = key->dst;
	class = rule_lookup(&exclude_dst, slot, &prefix);
	if (class == RULE_NONE)
		return 0;
	pair.dst = class;
	if (rule_lookup(&excludes, slot, &pair) != RULE_NONE)
		return 1;
	if (!(lookups & NAT_LOOKUP_EXCLUDE_PORT))
		return 0;
	pair.protocol = key->protocol;
	if (rule_lookup(&excludes, slot, &pair) != RULE_NONE)
		return 1;
	pair.port = key->dport;
	return rule_lookup(&excludes, slot, &pair) != RULE_NONE;
}

/*
 * The destination rule for a packet, as an index of rules. link is the ingress interface, plus
 * 1. ICMP queries and protocols without ports are looked up with port 0.
 */
GLOBAL int rule_destination(const struct nat_flow_key *key, __u32 link, __u32 lookups, __u32 slot)
{
	struct nat_destination_key k = {};
	struct nat_exact_key point = {};
	int found;

	if (!key)
		return RULE_NONE;
	point.addr = key->dst;
	point.port = key->dport;
	point.protocol = key->protocol;
	if (lookups & NAT_LOOKUP_EXACT_LINK) {
		point.link = link;
		found = rule_lookup(&exact, slot, &point);
		if (found != RULE_NONE)
			return found;
		point.link = 0;
	}
	if (lookups & NAT_LOOKUP_EXACT) {
		found = rule_lookup(&exact, slot, &point);
		if (found != RULE_NONE)
			return found;
	}

	k.addr = key->dst;
	k.kind = NAT_BY_RANGE;
	k.prefixlen = 80; /* link, kind, protocol, address, port */
	k.protocol = key->protocol;
	k.port = key->dport;
	if (lookups & NAT_LOOKUP_RANGE_LINK) {
		k.link = bpf_htons(link);
		found = rule_lookup(&destinations, slot, &k);
		if (found != RULE_NONE)
			return found;
		k.link = 0;
	}
	if (lookups & NAT_LOOKUP_RANGE) {
		found = rule_lookup(&destinations, slot, &k);
		if (found != RULE_NONE)
			return found;
	}

	k.kind = NAT_BY_PREFIX;
	k.prefixlen = 64; /* link, kind, protocol, address */
	k.port = 0;
	if (lookups & NAT_LOOKUP_PREFIX_PROTOCOL_LINK) {
		k.link = bpf_htons(link);
		found = rule_lookup(&destinations, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	if (lookups & NAT_LOOKUP_PREFIX_LINK) {
		k.link = bpf_htons(link);
		k.protocol = 0;
		found = rule_lookup(&destinations, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	k.link = 0;
	if (lookups & NAT_LOOKUP_PREFIX_PROTOCOL) {
		k.protocol = key->protocol;
		found = rule_lookup(&destinations, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	if (lookups & NAT_LOOKUP_PREFIX) {
		k.protocol = 0;
		return rule_lookup(&destinations, slot, &k);
	}
	return RULE_NONE;
}

/* Whether the address is in a prefix of that kind, which is no rule. */
SUBPROGRAM int rule_within(struct nat_addr addr, __u32 kind, __u32 slot)
{
	struct nat_destination_key k = {.prefixlen = 64, .kind = kind, .addr = addr};

	return rule_lookup(&destinations, slot, &k) != RULE_NONE;
}

/* Whether the address is in the outside prefix of a map, whatever that is bound to. */
static __always_inline int rule_owns(struct nat_addr addr, __u32 lookups, __u32 slot)
{
	return lookups & NAT_LOOKUP_OWNED && rule_within(addr, NAT_OWNED, slot);
}

/* Whether the address is a target of a forward: its packets may belong to a session that was opened
 * from outside, though no source rule is for them. */
static __always_inline int rule_forwards_to(struct nat_addr addr, __u32 lookups, __u32 slot)
{
	return lookups & NAT_LOOKUP_TARGETS && rule_within(addr, NAT_TARGETS, slot);
}

/* The side of a host that is behind a link of both sides: inside are the sources of rules. */
static __always_inline __u8 rule_side(struct nat_addr addr, __u32 slot)
{
	return rule_within(addr, NAT_INTERNAL_HOSTS, slot) ? NAT_INSIDE : NAT_OUTSIDE;
}

/* The source rule for a packet from that address, as an index of rules. in and out are its
 * ingress and egress links, plus 1. */
SUBPROGRAM int rule_origin(__be32 src, __u32 in, __u32 out, __u32 lookups, __u32 slot)
{
	struct nat_origin_key k = {.prefixlen = 64, .addr = addr_of(src)};
	int found;

	if (lookups & NAT_LOOKUP_SOURCE_IN_OUT) {
		k.in = bpf_htons(in);
		k.out = bpf_htons(out);
		found = rule_lookup(&origins, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	if (lookups & NAT_LOOKUP_SOURCE_OUT) {
		k.in = 0;
		k.out = bpf_htons(out);
		found = rule_lookup(&origins, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	k.out = 0;
	if (lookups & NAT_LOOKUP_SOURCE_IN) {
		k.in = bpf_htons(in);
		found = rule_lookup(&origins, slot, &k);
		if (found != RULE_NONE)
			return found;
	}
	k.in = 0;
	return lookups & NAT_LOOKUP_SOURCE ? rule_lookup(&origins, slot, &k) : RULE_NONE;
}

/*
 * rule_origin in that generation of the rules, with a cache: hosts open many sessions, and among
 * thousands of prefixes a look-up waits for memory several times.
 */
GLOBAL int rule_source(__be32 src, __u32 in, __u32 out, __u32 lookups, __u32 generation)
{
	__u32 key = addr_hash(addr_of(src)) % RULE_RECENT, links = in << 16 | out;
	struct rule_recent *r = bpf_map_lookup_elem(&rules_recent, &key);
	__u32 slot = generation % NAT_GENERATIONS;

	if (!r)
		return rule_origin(src, in, out, lookups, slot);
	if (r->src != src || r->links != links || r->generation != generation) {
		r->index = rule_origin(src, in, out, lookups, slot);
		r->src = src;
		r->links = links;
		r->generation = generation;
	}
	return r->index;
}

/* Prefix to prefix: the host's bits stay. */
static __always_inline struct nat_addr rule_map_address(const struct nat_rule *rule,
							struct nat_addr addr)
{
	__u32 mask = rule->prefix ? ~0U << (32 - (rule->prefix & 31)) : 0;

	if (rule->prefix >= 32)
		return rule->to;
	return addr_of((addr_word(rule->to) & bpf_htonl(mask)) |
		       (addr_word(addr) & ~bpf_htonl(mask)));
}

/*
 * Where a port forward sends a client. One of several targets is chosen by the
 * client's address alone, so all its connections meet the same one; the table is
 * made so that a change of targets moves few clients, and sessions stay where they are.
 */
static __always_inline int rule_forward(const struct nat_rule *rule, __u32 slot,
					struct nat_addr client, struct nat_addr *dst, __be16 *dport,
					__u8 *zone)
{
	void *inner = bpf_map_lookup_elem(&targets, &slot);
	__u32 index = rule->targets;
	struct nat_target *target;

	if (rule->target_count > 1)
		index += addr_hash(client) % rule->target_count;
	target = inner ? bpf_map_lookup_elem(inner, &index) : NULL;
	if (!target)
		return NAT_DROP_BYPASS;
	*dst = target->addr;
	*zone = target->zone;
	if (!(rule->flags & NAT_RULE_KEEP_PORT))
		*dport = bpf_htons(bpf_ntohs(target->port) + bpf_ntohs(*dport) - rule->from_port);
	return GO_ON;
}

#endif
