/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where sessions are: an array of them by number, and a table (table.h) that leads from the
 * keys of both directions to the number. Numbers never used are given first, in order, so
 * that an engine of millions begins at once; then the one that has been free longest.
 */
#ifndef NATKIT_FLOWS_H
#define NATKIT_FLOWS_H

#include "lib/table.h"
#include "nat/maps.h"

/* By number. Packets write; a number is used for another session NAT_DEAD_TICKS after the
 * last one died, at the soonest. Read in place by natkit. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_session);
	__uint(max_entries, 65536);
} sessions SEC(".maps");

/* Which numbers are in use, 64 in a word. Packets set, GC clears. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 65536 / 64);
} session_bits SEC(".maps");

/* Numbers that were in use and are not, oldest first. GC puts in, packets take out
 * once every number has been in use. Has room for all. Empty: the new session is refused,
 * NAT_DROP_SESSIONS_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__type(value, __u32);
	__uint(max_entries, 65536);
} free_sessions SEC(".maps");

/* Key of a flow -> number of its session * NAT_DIRECTIONS + enum nat_direction, by table.h.
 * As large as there can be sessions, so that it is hardly ever full before they are. */
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

static __always_inline struct nat_session *flow_session(__u32 number)
{
	return bpf_map_lookup_elem(&sessions, &number);
}

static __always_inline __u32 flow_number(__u64 value)
{
	return value / NAT_DIRECTIONS;
}

static __always_inline __u32 flow_direction(__u64 value)
{
	return value % NAT_DIRECTIONS;
}

/* A number that was on the stack is any number to the verifier. */
static __always_inline struct nat_flow *flow_at(struct nat_session *s, __u32 direction)
{
	OPAQUE(direction);
	return &s->flows[direction % NAT_DIRECTIONS];
}

static __always_inline int flow_key_is(const struct nat_flow_key *key, struct flow_words words)
{
	const volatile __u64 *word = (const volatile __u64 *)key;

	return word[0] == words.addresses && word[1] == words.rest;
}

static __always_inline int flow_is_at(const struct nat_session *s, __u32 direction,
				      const struct nat_flow_key *key)
{
	OPAQUE(direction);
	return flow_key_is(&s->keys[direction % NAT_DIRECTIONS], flow_words(key));
}

static __always_inline int flow_is(const void *key, __u64 value)
{
	struct nat_session *s = flow_session(flow_number(value));

	return s && flow_key_is(&s->keys[flow_direction(value)], *(const struct flow_words *)key);
}

GLOBAL __u64 flow_within(const struct nat_bucket *bucket, __u64 hash, const struct flow_words *key)
{
	return bucket && key ? table_within(bucket, hash, flow_is, key) : 0;
}

static __always_inline __u64 flow_in(const struct nat_bucket *bucket, __u64 hash, const void *key)
{
	return flow_within(bucket, hash, key);
}

/* The key's entry in flow_table; 0: none. */
GLOBAL __u64 flow_entry(const struct nat_flow_key *key)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return 0;
	words = flow_words(key);
	return table_find(&flow_table, c->flow_mask, table_hash(c, words.addresses, words.rest),
			  flow_in, &words);
}

/* Makes the key lead to that session's direction; errors of table_insert. */
GLOBAL int flow_insert(const struct nat_flow_key *key, __u32 number, __u32 direction)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return E_BUSY;
	words = flow_words(key);
	return table_insert(&flow_table, c->flow_mask, table_hash(c, words.addresses, words.rest),
			    (__u64)number * NAT_DIRECTIONS + direction, flow_in, &words);
}

GLOBAL int flow_remove(const struct nat_flow_key *key, __u32 number, __u32 direction)
{
	struct nat_control *c = control_get();
	struct flow_words words;

	if (!c || !key)
		return 0;
	words = flow_words(key);
	table_remove(&flow_table, c->flow_mask, table_hash(c, words.addresses, words.rest),
		     (__u64)number * NAT_DIRECTIONS + direction);
	return 0;
}

/* The flow that packets with the key belong to, or NULL. */
static __always_inline struct nat_flow *flow_find(const struct nat_flow_key *key)
{
	struct nat_control *c = control_get();
	struct flow_words words = flow_words(key);
	struct nat_bucket *home;
	struct nat_session *s;
	__u64 hash, entry;

	if (!c)
		return NULL;
	hash = table_hash(c, words.addresses, words.rest);
	home = table_bucket(&flow_table, c->flow_mask, hash, 0);
	if (!home)
		return NULL;
	entry = table_first(home, hash);
	s = flow_session(flow_number(table_value(entry)));
	if (unlikely(!entry || !s || !flow_key_is(&s->keys[flow_direction(entry)], words))) {
		if (!entry && !home->reach)
			return NULL;
		entry = flow_entry(key);
		s = flow_session(flow_number(table_value(entry)));
		if (!entry || !s)
			return NULL;
	}
	return flow_at(s, flow_direction(entry));
}

/* For packets that are few: the session, and which direction of it the key is; or NULL. */
SUBPROGRAM struct nat_session *flow_look(const struct nat_flow_key *key, __u32 *direction)
{
	__u64 entry = flow_entry(key);

	*direction = flow_direction(entry);
	return entry ? flow_session(flow_number(table_value(entry))) : NULL;
}

/* A number for a new session; negative: all are in use. */
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
			return number;
	}
	if (bpf_map_pop_elem(&free_sessions, &number))
		return -1;
	return number;
}

/* Can't fail: there is room for every number. */
static __always_inline void flow_give(__u32 number)
{
	bpf_map_push_elem(&free_sessions, &number, 0);
}

static __always_inline __u64 *flow_bits(__u32 number)
{
	__u32 word = number / 64;

	return bpf_map_lookup_elem(&session_bits, &word);
}

#endif
