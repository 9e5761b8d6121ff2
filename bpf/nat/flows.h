/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where sessions are: an array of flows by number, and a table (table.h) that leads from the key
 * of each to its number. A session is two flows, whose numbers follow each other. Numbers never
 * used are given first, in order, so that an engine of millions begins at once; then those that
 * have been free longest.
 */
#ifndef NATKIT_FLOWS_H
#define NATKIT_FLOWS_H

#include "lib/table.h"
#include "nat/maps.h"

enum flow_limit_of_numbers {
	FLOW_GIANT_SHIFT = 35,   /* of nat_flow.bytes: fewer aren't 2^31 packets */
	FLOW_CARRIED_SHIFT = 16, /* of nat_flow_rest.created: the peer's */
};

/* By number. Packets write; a number is used for another flow NAT_DEAD_TICKS after the
 * last session died, at the soonest. Read in place by natkit. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_flow);
	__uint(max_entries, 131072);
} flows SEC(".maps");

/* By number. Who makes a session writes, and GC. Read in place by natkit. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_flow_rest);
	__uint(max_entries, 131072);
} flow_details SEC(".maps");

/* Which numbers are taken, 64 in a word. Packets set, GC clears. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 131072 / 64);
} flow_bits SEC(".maps");

/* First numbers of sessions that were there and are not, oldest first. GC puts in, packets take out
 * once every number has been in use. Has room for all. Empty: the new session is refused,
 * NAT_DROP_SESSIONS_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__type(value, __u32);
	__uint(max_entries, 65536);
} free_flows SEC(".maps");

/* Key of a flow -> its number, by table.h. As large as there can be sessions, so that it is hardly
 * ever full before they are. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_bucket);
	__uint(max_entries, 32768);
} flow_table SEC(".maps");

/* A key as the two numbers that are hashed and compared. It is read by 32 bits, as it was
 * written a moment ago (packet_ports): a wider read would wait for the writes. */
struct flow_words {
	__u64 addresses, rest;
};

static __always_inline struct flow_words flow_words(const struct nat_flow_key *key)
{
	const volatile __u32 *word = (const volatile __u32 *)key;
	struct flow_words words = {.addresses = (__u64)word[1] << 32 | word[0],
				   .rest = (__u64)word[3] << 32 | word[2]};

	return words;
}

static __always_inline struct nat_flow *flow_at(__u32 number)
{
	return bpf_map_lookup_elem(&flows, &number);
}

static __always_inline struct nat_flow_rest *flow_rest(__u32 number)
{
	return bpf_map_lookup_elem(&flow_details, &number);
}

static __always_inline __u64 *flow_bits_at(__u32 number)
{
	__u32 word = number / 64;

	return bpf_map_lookup_elem(&flow_bits, &word);
}

/* The session's other flow. */
static __always_inline struct nat_flow *flow_other(const struct nat_flow *flow)
{
	return flow_at(flow->other);
}

static __always_inline __u32 flow_state(const struct nat_flow *flow)
{
	return *(const volatile __u32 *)&flow->state;
}

/* Whether packets may use a flow with that state, if the key is theirs. */
static __always_inline int flow_lives(__u32 state)
{
	return (state & (NAT_FLOW_MADE | NAT_FLOW_DEAD | NAT_FLOW_GONE)) == NAT_FLOW_MADE;
}

/* All but the link, which packets don't have. */
static __always_inline int flow_key_is(const struct nat_flow_key *key, struct flow_words words)
{
	const volatile __u64 *word = (const volatile __u64 *)key;

	return word[0] == words.addresses && !((word[1] ^ words.rest) << 8);
}

static __always_inline int flow_is(const void *key, __u64 number)
{
	struct nat_flow *flow = flow_at(number);

	return flow && flow_key_is(&flow->key, *(const struct flow_words *)key);
}

GLOBAL __u64 flow_within(const struct nat_bucket *bucket, __u64 hash, const struct flow_words *key)
{
	return bucket && key ? table_within(bucket, hash, flow_is, key) : 0;
}

static __always_inline __u64 flow_in(const struct nat_bucket *bucket, __u64 hash, const void *key)
{
	return flow_within(bucket, hash, key);
}

static __always_inline __u64 flow_hash(const struct nat_control *c, struct flow_words words)
{
	return table_hash(c, words.addresses, words.rest);
}

/* The key's entry in flow_table; 0: none. */
GLOBAL __u64 flow_entry(const struct nat_flow_key *key)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return 0;
	words = flow_words(key);
	return table_find(&flow_table, c->flow_mask, flow_hash(c, words), flow_in, &words);
}

/* Makes the key lead to that flow; errors of table_insert. */
GLOBAL int flow_insert(const struct nat_flow_key *key, __u32 number)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return E_BUSY;
	words = flow_words(key);
	return table_insert(&flow_table, c->flow_mask, flow_hash(c, words), number, flow_in,
			    &words);
}

/* The key may be the flow's own, with its link. */
GLOBAL int flow_remove(const struct nat_flow_key *key, __u32 number)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return 0;
	words = flow_words(key);
	words.rest = words.rest << 8 >> 8;
	table_remove(&flow_table, c->flow_mask, flow_hash(c, words), number);
	return 0;
}

/*
 * The flow that packets with the key belong to, or NULL, and its state from before the key was
 * compared: if it lived (flow_lives) its memory is no other flow's for NAT_DEAD_TICKS, whatever
 * becomes of it now.
 */
static __always_inline struct nat_flow *flow_find(const struct nat_flow_key *key, __u32 *state)
{
	struct nat_control *c = control_get();
	struct flow_words words = flow_words(key);
	struct nat_bucket *home;
	struct nat_flow *flow;
	__u64 hash, entry;

	if (!c)
		return NULL;
	hash = flow_hash(c, words);
	home = table_bucket(&flow_table, c->flow_mask, hash, 0);
	if (!home)
		return NULL;
	entry = table_first(home, hash);
	flow = flow_at(table_value(entry));
	*state = flow ? flow_state(flow) : 0;
	if (unlikely(!entry || !flow || !flow_key_is(&flow->key, words))) {
		if (!entry && !home->reach)
			return NULL;
		entry = flow_entry(key);
		flow = flow_at(table_value(entry));
		if (!entry || !flow)
			return NULL;
		*state = flow_state(flow);
		if (!flow_key_is(&flow->key, words))
			return NULL;
	}
	return flow;
}

/* For packets that are few: the flow, or NULL. */
SUBPROGRAM struct nat_flow *flow_look(const struct nat_flow_key *key)
{
	__u64 entry = flow_entry(key);

	return entry ? flow_at(table_value(entry)) : NULL;
}

/* --- numbers ----------------------------------------------------------------------- */

/* The first of two numbers for a new session; negative: all are in use. */
SUBPROGRAM __s64 flow_take(void)
{
	struct nat_control *c = control_get();
	__u32 zero = 0, number;
	struct nat_counts *n = bpf_map_lookup_elem(&counts, &zero);

	if (!c || !n)
		return -1;
	/* Several CPUs may count past the end at once, but none that sees it passed. */
	if (*(volatile __u32 *)&n->sessions < c->sessions_max) {
		number = __sync_fetch_and_add(&n->sessions, 1);
		if (number < c->sessions_max)
			return 2 * number;
	}
	if (bpf_map_pop_elem(&free_flows, &number))
		return -1;
	return number;
}

/* A session's numbers, to which no key leads any more. Can't fail: there is room for every one. */
static __always_inline void flow_give(__u32 number)
{
	bpf_map_push_elem(&free_flows, &number, 0);
}

/* Those of both flows of the session: they are in one word. */
static __always_inline __u64 flow_bits_of(__u32 number)
{
	return 3ULL << (number & 62);
}

/* --- counters ---------------------------------------------------------------------- */

/*
 * packets of a flow with more than 2^31 of them: how often bit 31 has changed is noted in the
 * peer's rest, for which GC comes by more often than that can be.
 */
static __always_inline void flow_carry(const struct nat_flow *flow)
{
	int owner = !!(flow_state(flow) & NAT_FLOW_OWNER);
	__u32 shift = owner ? 0 : FLOW_CARRIED_SHIFT;
	struct nat_flow_rest *rest;
	struct nat_flow *other;

	if (!(flow->bytes >> FLOW_GIANT_SHIFT))
		return;
	other = flow_other(flow);
	rest = other ? flow_rest(owner ? flow->other : other->other) : NULL;
	if (rest && (rest->created >> shift & 1) != flow->packets >> 31)
		rest->created += 1U << shift;
}

/* All packets of a flow, whose half of the carries that is. */
static __always_inline __u64 flow_packets(const struct nat_flow *flow, __u16 carried)
{
	__u32 top = flow->packets >> 31;

	return (((__u64)carried + ((carried & 1) != top)) >> 1) << 32 | flow->packets;
}

#endif
