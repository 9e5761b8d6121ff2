/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Explicit mappings (PCP, RFC 6887): a lease holds a mapping, or a session, until a time, without
 * packets; and says whom the mapping lets in. nat/lease.bpf.c makes leases, `natkit serve` asks it
 * to; packets ask here whom one admits, and GC ends those that are over.
 *
 *   MAP    remote is 0: holds the mapping of the internal endpoint, and lets in anybody, or those
 *          of its filters
 *   PEER   holds the mapping, keeps the session with that remote endpoint alive, and lets that in
 *
 * A lease is a reservation like a session's: one reference on the mapping, and one session of
 * the subscriber. It ends once, by whoever changes nat_lease.expires to 0.
 */
#ifndef NATKIT_LEASE_H
#define NATKIT_LEASE_H

#include "nat/mapping.h"
#include "nat/flows.h"

enum lease_limit {
	LEASE_ROUNDS = 100,    /* slices of GC in a second, while little is to do */
	LEASES_PER_SLICE = 64, /* looked at, at most */
};

/* Internal endpoint, and remote one -> lease. nat/lease.bpf.c makes them, one at a time (natkit
 * serve runs it); it and GC remove them. Full: NAT_DROP_MAPPINGS_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct nat_lease_key);
	__type(value, struct nat_lease);
	__uint(max_entries, NAT_MAX_LEASES);
} leases SEC(".maps");

/* Leases in the order in which GC looks at them, round and round. A lease that has gone leaves its
 * entry, which GC drops; one with the same key has another serial number. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__type(value, struct nat_lease_entry);
	__uint(max_entries, 2 * NAT_MAX_LEASES);
} lease_queue SEC(".maps");

/* How many leases a subscriber has. Written with leases. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct nat_source_key);
	__type(value, __u32);
	__uint(max_entries, NAT_MAX_LEASES);
} lease_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_lease_state);
	__uint(max_entries, 1);
} lease_state SEC(".maps");

/* natkit writes and reads; here so that it is made with the others. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_lease_epoch);
	__uint(max_entries, 1);
} lease_epoch SEC(".maps");

static __always_inline struct nat_lease_state *lease_state_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&lease_state, &zero);
}

static __always_inline int lease_over(const struct nat_lease *l, __u32 now)
{
	__u32 expires = *(const volatile __u32 *)&l->expires;

	return !expires || (__s32)(now - expires) >= 0;
}

/* Whether one of the filters has that remote endpoint. Without branches, of which the verifier
 * would follow all. */
static __always_inline int lease_filtered(const struct nat_lease *l, __be32 remote, __be16 port)
{
	__u64 differs, found = 0;
	__u32 n;

	for (n = 0; n < NAT_LEASE_FILTERS; n++) {
		const struct nat_lease_filter *f = &l->filters[n];

		differs = (addr_word(f->addr) ^ remote) & addr_word(f->mask);
		differs |= (__u16)((f->port ^ port) & f->port_mask);
		differs |= f->used ^ 1;
		found |= (differs - 1) >> 63;
	}
	return found;
}

/*
 * Whether a lease lets in a packet that no session expects, to the internal endpoint and from the
 * remote one of key. NAT_DROP_NO_MAPPING: none says anything about it, the rule's filtering
 * decides.
 */
GLOBAL int lease_admits(const struct nat_lease_key *key, __u32 now)
{
	struct nat_lease_key k;
	struct nat_lease *l;
	int reason = NAT_DROP_NO_MAPPING;

	if (!key)
		return NAT_DROP_BYPASS;
	k = *key;
	l = bpf_map_lookup_elem(&leases, &k);
	if (l && !lease_over(l, now))
		return GO_ON;
	k.remote = addr_of(0);
	k.remote_port = 0;
	l = bpf_map_lookup_elem(&leases, &k);
	if (l && !lease_over(l, now))
		reason = !(l->flags & NAT_LEASE_FILTERED) ||
					 lease_filtered(l, addr_word(key->remote), key->remote_port)
				 ? GO_ON
				 : NAT_DROP_FILTERED;
	return reason;
}

/* --- its session, its end --------------------------------------------------------- */

/* Keeps the session of a PEER lease alive for as long as that lives, or not any more. The session
 * may be made later than the lease, so GC does so again. */
SUBPROGRAM int lease_keep(const struct nat_lease_key *key, __u8 protocol, int on)
{
	struct nat_flow_key flow = {.src = key->internal.addr,
				    .dst = key->remote,
				    .sport = key->internal.port,
				    .dport = key->remote_port,
				    .protocol = protocol,
				    .side = NAT_INSIDE,
				    .zone = key->internal.zone};
	struct nat_flow *owner = flow_look(&flow), *peer;

	peer = owner ? flow_at(owner->other) : NULL;
	if (!peer)
		return 0;
	if (*(volatile __u32 *)&peer->state & NAT_FLOW_OWNER) /* the remote endpoint opened it */
		peer = owner;
	if (on)
		__sync_fetch_and_or(&peer->state, NAT_FLOW_LEASED);
	else
		__sync_fetch_and_and(&peer->state, ~NAT_FLOW_LEASED);
	return 1;
}

static __always_inline void lease_count(const struct nat_lease_key *key, int one)
{
	struct nat_source_key host = source_key(&key->internal);
	struct nat_lease_state *state = lease_state_get();
	__u32 *n = bpf_map_lookup_elem(&lease_counts, &host), first = 1;

	if (state)
		__sync_fetch_and_add(&state->leases, one);
	if (key->internal.class == NAT_OTHER)
		return; /* an address, no mapping */
	if (n)
		__sync_fetch_and_add(n, one);
	else if (one > 0)
		bpf_map_update_elem(&lease_counts, &host, &first, BPF_NOEXIST);
	if (n && one < 0 && !*(volatile __u32 *)n)
		bpf_map_delete_elem(&lease_counts, &host);
}

/* What the lease of that key holds. */
static __always_inline void lease_reservation(const struct nat_lease_key *key, __u32 flags,
					      struct reservation *r)
{
	r->internal = key->internal;
	if (flags & NAT_LEASE_WHOLE) {
		r->internal.class = NAT_OTHER;
		r->internal.port = 0;
	}
	r->flags = NAT_FLOW_SOURCE | (flags & NAT_LEASE_SESSION ? 0 : NAT_FLOW_MAPPED);
}

/* Ends the lease, if it still expires then. */
GLOBAL int lease_end(const struct nat_lease_key *key, __u32 expires, __u32 now)
{
	struct reservation r = {};
	struct nat_lease_key k;
	struct nat_lease *l;
	__u32 flags;
	__u8 protocol;

	if (!key)
		return 0;
	k = *key;
	l = bpf_map_lookup_elem(&leases, &k);
	if (!l || !expires || __sync_val_compare_and_swap(&l->expires, expires, 0) != expires)
		return 0;
	flags = l->flags;
	protocol = l->protocol;
	bpf_map_delete_elem(&leases, &k);
	if (addr_word(k.remote))
		lease_keep(&k, protocol, 0);
	lease_reservation(&k, flags, &r);
	lease_count(&k, -1);
	reservation_drop(&r, 0, now);
	return 1;
}

/* Whether the lease's external address is not what it was, or belongs to no rule any more. */
static __always_inline int lease_homeless(const struct nat_lease *l)
{
	__u32 index = l->address;
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	return !address || address->flags & NAT_ADDRESS_LEAVING ||
	       !addr_equal(address->addr, l->external);
}

/* GC: one lease, the head of the queue. */
GLOBAL int lease_look(__u32 now)
{
	struct nat_lease_entry entry = {};
	struct nat_lease_state *state;
	struct nat_lease *l;
	__u32 expires;

	if (bpf_map_pop_elem(&lease_queue, &entry))
		return 0;
	l = bpf_map_lookup_elem(&leases, &entry.key);
	if (!l || l->serial != entry.serial)
		return 1;
	expires = *(volatile __u32 *)&l->expires;
	state = lease_state_get();
	if (lease_over(l, now)) {
		lease_end(&entry.key, expires, now);
		return 1;
	}
	if (lease_homeless(l)) {
		if (lease_end(&entry.key, expires, now) && state)
			__sync_fetch_and_add(&state->lost, 1);
		return 1;
	}
	if (addr_word(entry.key.remote))
		lease_keep(&entry.key, l->protocol, 1);
	bpf_map_push_elem(&lease_queue, &entry, 0); /* has room: it was taken from there */
	return 1;
}

#endif
