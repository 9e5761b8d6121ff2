/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments, on tc. The first one has the ports, is translated like any packet, and
 * leaves a note for those that come after it. One that comes before it is dropped: to
 * keep it would let strangers fill memory.
 */
#ifndef NATKIT_FRAGMENT_H
#define NATKIT_FRAGMENT_H

#include "session.h"

static __always_inline void fragment_key(const struct packet *packet, struct nat_fragment_key *key)
{
	key->src = packet->key.src;
	key->dst = packet->key.dst;
	key->id = packet->id;
	key->protocol = packet->key.protocol;
	key->side = packet->key.side;
}

/* Before the first fragment goes: what it becomes is what the others become. An entry
 * that is there is overwritten: identifiers are used again. */
static __noinline int fragment_first(const struct packet *packet, const struct nat_flow *flow)
{
	struct nat_fragment value = {
		.src = flow->src, .dst = flow->dst, .seen = packet->now, .flags = flow->state};
	struct nat_fragment_key key;
	long error;

	fragment_key(packet, &key);
	error = bpf_map_update_elem(&fragments, &key, &value, BPF_NOEXIST);
	if (error == E_EXIST)
		return bpf_map_update_elem(&fragments, &key, &value, BPF_EXIST)
			       ? NAT_DROP_FRAGMENTS_FULL
			       : GO_ON;
	if (error)
		return NAT_DROP_FRAGMENTS_FULL;
	if (bpf_map_push_elem(&fragment_queue, &key, 0)) {
		bpf_map_delete_elem(&fragments, &key);
		return NAT_DROP_FRAGMENTS_FULL;
	}
	return GO_ON;
}

/* What a later fragment becomes: addresses only. *out has no next hop: the neighbour
 * output finds it. */
static __always_inline int fragment_later(const struct packet *packet, struct nat_flow *out)
{
	struct nat_fragment_key key;
	struct nat_fragment *first;
	const struct nat_config *c;
	__u32 slot;

	fragment_key(packet, &key);
	first = bpf_map_lookup_elem(&fragments, &key);
	c = config_get(&slot);
	if (!first || !c || packet->now - first->seen > c->timeouts[NAT_TIMEOUT_FRAGMENT])
		return NAT_DROP_FRAGMENT;
	__builtin_memset(out, 0, sizeof(*out));
	out->src = first->src;
	out->dst = first->dst;
	session_deltas(&packet->key, out);
	return GO_ON;
}

#endif
