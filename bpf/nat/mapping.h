/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Mappings: internal endpoint -> external endpoint (RFC 4787 section 4.1), and whom they let
 * in (section 5). The subscribers that they belong to are in subscriber.h.
 *
 * A mapping is the slot of its external port: that names the internal endpoint and counts
 * references. mapping_table leads there from the internal endpoint; its entries are ids of
 * slots: index of the address, class and port in one number.
 *
 * Both are counted by reference (refs.h), and live as long as a session holds one.
 *
 * Removal is one CPU's: by whoever changes 0 to GONE. Of mappings that is GC, after the hold-down
 * of their port, but for those that the queue has no room for. What is removed stays where it is
 * found, marked GONE, until it is taken out there, and nobody can insert the same key before: so
 * that can't meet another one's.
 */
#ifndef NATKIT_MAPPING_H
#define NATKIT_MAPPING_H

#include "nat/subscriber.h"
#include "lib/table.h"

enum mapping_limit {
	MAPPING_TRIES = 2,            /* the second after another CPU made the same mapping */
	MAPPING_FILTERING_SHIFT = 24, /* of NAT_REFS_FILTERING */
};

/* --- mappings ---------------------------------------------------------------- */

/* Whether the slot of that id is the mapping of internal. */
static __always_inline int mapping_is(const struct nat_slot *slot, __u64 id,
				      const struct nat_mapping_key *internal)
{
	struct nat_slot value = slot_read(slot);

	return value.used == NAT_SLOT_MAPPING && slot_id_class(id) == internal->class &&
	       addr_equal(value.addr, internal->addr) && value.port == internal->port &&
	       value.pool == internal->pool && *(volatile __u8 *)&slot->zone == internal->zone;
}

/* table.h: whether the mapping in that slot is of the internal endpoint. */
static __always_inline int mapping_at(const void *internal, __u64 id)
{
	struct nat_slot *slot = slot_at(id);

	return slot && mapping_is(slot, id, internal);
}

GLOBAL __u64 mapping_within(const struct nat_bucket *bucket, __u64 hash,
			    const struct nat_mapping_key *internal)
{
	return bucket && internal ? table_within(bucket, hash, mapping_at, internal) : 0;
}

static __always_inline __u64 mapping_in(const struct nat_bucket *bucket, __u64 hash,
					const void *internal)
{
	return mapping_within(bucket, hash, internal);
}

/* The pool has no part in it: a packet's bucket is known before its rule is. */
static __always_inline __u64 mapping_hash(const struct nat_control *c,
					  const struct nat_mapping_key *internal)
{
	return table_hash(c, addr_word(internal->addr),
			  (__u32)internal->zone << 24 | (__u32)internal->class << 16 |
				  internal->port);
}

/*
 * Asks early for the bucket in which a packet from that endpoint will look for its mapping.
 * It is in no cache, as the flow's was not, and who waits for both at once waits half as
 * long. What is read decides nothing.
 */
static __always_inline void mapping_touch(const struct nat_mapping_key *internal)
{
	struct nat_control *c = control_get();
	struct nat_bucket *home;

	if (!c)
		return;
	home = table_bucket(&mapping_table, c->mapping_mask, mapping_hash(c, internal), 0);
	if (home)
		table_read(&home->entries[0]);
}

/* The slot id of the mapping of an internal endpoint; 0 is none. */
GLOBAL __u64 mapping_lookup(const struct nat_mapping_key *internal)
{
	struct nat_control *c = control_get();

	if (!c || !internal)
		return 0;
	return table_value(table_find(&mapping_table, c->mapping_mask, mapping_hash(c, internal),
				      mapping_in, internal));
}

/* Makes the slot of that id, which is named already, the mapping of internal: 0, or the
 * error of table_insert. */
GLOBAL int mapping_enter(const struct nat_mapping_key *internal, __u64 id)
{
	struct nat_control *c = control_get();

	if (!c || !internal)
		return E_TOO_BIG;
	return table_insert(&mapping_table, c->mapping_mask, mapping_hash(c, internal), id,
			    mapping_in, internal);
}

GLOBAL int mapping_leave(const struct nat_mapping_key *internal, __u64 id)
{
	struct nat_control *c = control_get();

	if (c && internal)
		table_remove(&mapping_table, c->mapping_mask, mapping_hash(c, internal), id);
	return 0;
}

/* Counts one mapping more, or takes that back. False: there are as many as may be. */
static __always_inline int mapping_count(int one)
{
	struct nat_control *c = control_get();
	__u32 zero = 0;
	struct nat_counts *n = bpf_map_lookup_elem(&counts, &zero);

	if (!c || !n)
		return 0;
	if (__sync_fetch_and_add(&n->mappings, one) < c->mappings_max || one < 0)
		return 1;
	__sync_fetch_and_add(&n->mappings, -1);
	return 0;
}

/* The port of a mapping, or of a session without one, is in hold-down from now on, if the
 * queue has room. If not, it is free at once: the caller's to do. */
static __always_inline int port_hold_down(__u64 id, __u32 now)
{
	struct nat_hold_down resting = {.address = slot_id_address(id),
					.port = slot_id_port(id),
					.since = (now & ~3) | slot_id_class(id)};

	return bpf_map_push_elem(&mapping_queue, &resting, 0);
}

/* The caller's whole address is free again: port_give for pools without ports. */
static __always_inline void address_give(__u32 index)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_slot *slot = address ? port_slot(index, address, NAT_OTHER, 0) : NULL;
	struct nat_slot nobody = {};
	struct nat_ports *ports;
	__u32 zero = 0;

	ports = bpf_map_lookup_elem(&free_addresses, &zero);
	if (!slot || !ports)
		return;
	slot_write(slot, nobody);
	if (!(address->flags & NAT_ADDRESS_DRAINING))
		bit_give(ports, index);
}

/* The hold-down of that slot is over: what has it is a session's port, or the mapping of
 * internal, which is GONE. */
static __always_inline void mapping_remove(__u64 id, const struct nat_mapping_key *internal)
{
	__u32 class = slot_id_class(id);

	log_mapping(NAT_LOG_ENDED, slot_id_address(id), class, id & 0xffff);
	if (internal) {
		mapping_leave(internal, id);
		mapping_count(-1);
		count_add(NAT_UNMAPPED);
	}
	if (class < NAT_PORT_CLASSES)
		endpoint_give(slot_id_address(id), class, id & 0xffff);
	else
		address_give(slot_id_address(id));
}

/*
 * A mapping without sessions goes into the queue once; QUEUED means that it is there.
 * Who uses it during hold-down leaves AGAIN, so that GC, when it gets to the entry, knows that
 * the hold-down started later. True: the queue has no room for it, or it needs none, because it
 * is fresh: then it is to end at once.
 */
SUBPROGRAM int mapping_put(struct nat_slot *slot, __u64 id, __u32 now, int fresh)
{
	if (!refs_put(&slot->refs, NAT_REFS_QUEUED) || (!fresh && !port_hold_down(id, now)))
		return 0;
	__sync_fetch_and_and(&slot->refs, ~NAT_REFS_QUEUED);
	return 1;
}

/* Whether two ids are of one slot: an address whose pool has grown has two indices. */
SUBPROGRAM int slot_same(__u64 a, __u64 b)
{
	return slot_at(a) == slot_at(b);
}

/* Takes a reference on the mapping of r->internal, if there is one and its slot is that of only,
 * or only is 0;
 * NAT_DROP_NO_MAPPING if not. */
GLOBAL int mapping_reserve(struct reservation *r, __u32 now, __u64 only)
{
	struct nat_slot *slot;
	__u64 id;

	if (!r)
		return NAT_DROP_BYPASS;
	id = mapping_lookup(&r->internal);
	if (!id)
		return NAT_DROP_NO_MAPPING;
	if (only && id != only && !slot_same(id, only))
		return NAT_DROP_NO_MAPPING;
	slot = slot_at(id);
	if (!slot || refs_take(&slot->refs) != GO_ON)
		return NAT_DROP_RACE;
	if (!mapping_is(slot, id, &r->internal)) {
		mapping_put(slot, id, now, 0);
		return NAT_DROP_RACE;
	}
	r->address = slot_id_address(id);
	r->port = slot_id_port(id);
	r->refs = refs_read(&slot->refs);
	r->filtering = (r->refs & NAT_REFS_FILTERING) >> MAPPING_FILTERING_SHIFT;
	r->flags |= NAT_FLOW_MAPPED;
	return GO_ON;
}

/* Gives back the mapping of r, and nothing else. */
static __always_inline void mapping_drop(const struct reservation *r, __u32 now)
{
	__u64 id = slot_id(r->address, r->internal.class, r->port);
	struct nat_slot *slot = r->flags & NAT_FLOW_MAPPED ? slot_at(id) : NULL;

	if (slot)
		mapping_put(slot, id, now, 0);
}

static __always_inline int mapping_find(struct reservation *r, __u32 now)
{
	return mapping_reserve(r, now, 0);
}

/* Writes whose the external endpoint of r is: the zone before it becomes that. */
static __always_inline void slot_name(struct nat_slot *slot, const struct reservation *r, __u8 use)
{
	struct nat_slot value = {.addr = r->internal.addr,
				 .port = r->internal.port,
				 .pool = r->internal.pool,
				 .used = use};

	*(volatile __u8 *)&slot->zone = r->internal.zone;
	slot_write(slot, value);
}

/* The same for a session that has the port without a mapping. */
static __always_inline void port_name(struct reservation *r)
{
	struct nat_slot *slot = slot_at(slot_id(r->address, r->internal.class, r->port));

	r->fresh |= FRESH_PORT;
	if (!slot)
		return;
	slot_name(slot, r, NAT_SLOT_SESSION);
	log_mapping(NAT_LOG_CREATED, r->address, r->internal.class, bpf_ntohs(r->port));
}

/*
 * Makes the mapping of r->internal with the external endpoint r->address, r->port, which
 * the caller took; E_EXIST if another CPU was faster. The slot is named before its id is in
 * the table: whoever finds that looks at the name. Until then packets to the port find no
 * mapping, and are refused. Before refs are set nobody can take one, and who tries gives up.
 */
static __always_inline int mapping_insert(struct reservation *r)
{
	__u64 id = slot_id(r->address, r->internal.class, r->port);
	struct nat_slot *slot = slot_at(id);
	struct nat_mapping_key internal = r->internal;
	int error;

	if (!slot || !mapping_count(1))
		return E_TOO_BIG;
	*(volatile __u32 *)&slot->refs = NAT_REFS_GONE;
	slot_name(slot, r, NAT_SLOT_MAPPING);
	error = mapping_enter(&internal, id);
	if (error) {
		mapping_count(-1);
		return error;
	}
	*(volatile __u32 *)&slot->refs = 1 | (__u32)r->filtering << MAPPING_FILTERING_SHIFT;
	r->flags |= NAT_FLOW_MAPPED;
	count_add(NAT_MAPPED);
	log_mapping(NAT_LOG_CREATED, r->address, r->internal.class, bpf_ntohs(r->port));
	return 0;
}

/*
 * Endpoint-independent: makes the mapping of r->internal with the port of r->address that
 * the caller took. Two CPUs may do it at once: both took a port, one inserts; the other gives its
 * port back and uses the winner's mapping.
 */
GLOBAL int mapping_make(struct reservation *r, __u32 now)
{
	int error;

	if (!r)
		return NAT_DROP_BYPASS;
	error = mapping_insert(r);
	if (!error) {
		r->fresh |= FRESH_MAPPING;
		return GO_ON;
	}
	endpoint_give(r->address, r->internal.class, bpf_ntohs(r->port));
	if (error == E_TOO_BIG)
		return NAT_DROP_MAPPINGS_FULL;
	return mapping_find(r, now) == GO_ON ? GO_ON : NAT_DROP_RACE;
}

/* For a pool without ports, whose addresses are first and the next: the mapping of the
 * host, or a new one with an address of its own. */
GLOBAL int mapping_take_address(struct reservation *r, __u32 first, __u32 count, __u32 now)
{
	__u32 zero = 0, try;
	struct nat_ports *ports = bpf_map_lookup_elem(&free_addresses, &zero);
	int index, reason, error;

	if (!r || !ports)
		return NAT_DROP_BYPASS;
	for (try = 0; try < MAPPING_TRIES; try++) {
		reason = mapping_find(r, now);
		if (reason != NAT_DROP_NO_MAPPING)
			return reason;
		index = bits_take(ports, first, first + count - 1, ~0ULL);
		if (index == PORT_NONE) {
			log_exhausted(r->internal.pool, first, NAT_DROP_NO_ADDRESS);
			return NAT_DROP_NO_ADDRESS;
		}
		r->address = index;
		r->port = 0;
		error = mapping_insert(r);
		if (!error) {
			r->fresh |= FRESH_MAPPING;
			return GO_ON;
		}
		address_give(index);
		if (error == E_TOO_BIG)
			return NAT_DROP_MAPPINGS_FULL;
	}
	return NAT_DROP_RACE;
}

/*
 * Who has an external endpoint: GO_ON, and r is that endpoint and the internal one, not yet
 * referenced; NAT_PASS_NO_RULE if the address is none of ours, and if nobody has it NAT_PASS_LOCAL
 * where the gateway itself does, NAT_DROP_NO_MAPPING where it doesn't.
 */
GLOBAL int mapping_by_external(__be32 external, __be16 port, __u8 class, struct reservation *r)
{
	struct nat_addr key = addr_of(external);
	__u32 *index = bpf_map_lookup_elem(&address_indices, &key);
	struct nat_address *address;
	struct nat_slot *slot, value;
	__u32 i;

	if (!index || !r)
		return NAT_PASS_NO_RULE;
	i = *index;
	address = bpf_map_lookup_elem(&addresses, &i);
	if (!address)
		return NAT_PASS_NO_RULE;
	slot = port_slot(i, address, class, bpf_ntohs(port));
	if (slot) {
		value = slot_read(slot);
		if (value.used) {
			r->internal.addr = value.addr;
			r->internal.port = value.port;
			r->internal.class = address->port_count ? class : NAT_OTHER;
			r->internal.pool = value.pool;
			r->internal.zone = *(volatile __u8 *)&slot->zone;
			r->address = i;
			r->port = address->port_count ? port : 0;
			return GO_ON;
		}
	}
	return address->flags & NAT_ADDRESS_OWNED ? NAT_PASS_LOCAL : NAT_DROP_NO_MAPPING;
}

/* Holds the mapping of the external endpoint that mapping_by_external found. NAT_DROP_FILTERED:
 * the port is a session's, which others can't use; its host's mapping, if any, is another's. */
static __always_inline int mapping_addressed(struct reservation *r, __u32 now)
{
	int reason = mapping_reserve(r, now, slot_id(r->address, r->internal.class, r->port));

	return reason == NAT_DROP_NO_MAPPING ? NAT_DROP_FILTERED : reason;
}

/* --- filter entries ---------------------------------------------------------------- */

static __always_inline int filter_equal(const struct nat_filter_key *a,
					const struct nat_filter_key *b)
{
	return addr_equal(a->remote, b->remote) && a->address == b->address && a->port == b->port &&
	       a->class == b->class;
}

static __always_inline struct nat_filter_key filter_key(const struct reservation *r,
							struct nat_addr remote)
{
	struct nat_filter_key key = {.remote = remote,
				     .address = r->address,
				     .port = r->port,
				     .class = r->internal.class};

	return key;
}

static __always_inline void filter_put(struct nat_filter_entry *c)
{
	struct nat_filter_key key = c->key;

	if (refs_put(&c->refs, NAT_REFS_GONE))
		bpf_map_delete_elem(&filter_entries, &key);
}

/* The internal endpoint sends to that address: from now on it may send from any port. */
GLOBAL int filter_take(struct reservation *r, __be32 remote)
{
	struct nat_filter_entry new = {.refs = 1}, *c;
	struct nat_filter_key key;
	int try, error;

	if (!r)
		return NAT_DROP_BYPASS;
	key = filter_key(r, addr_of(remote));
	new.key = key;
	for (try = 0; try < MAPPING_TRIES; try++) {
		c = bpf_map_lookup_elem(&filter_entries, &key);
		if (c) {
			if (refs_take(&c->refs) != GO_ON)
				return NAT_DROP_RACE;
			r->flags |= NAT_FLOW_FILTER;
			if (filter_equal(&c->key, &key))
				return GO_ON;
			r->flags &= ~NAT_FLOW_FILTER;
			filter_put(c);
			return NAT_DROP_RACE;
		}
		error = bpf_map_update_elem(&filter_entries, &key, &new, BPF_NOEXIST);
		if (!error) {
			r->flags |= NAT_FLOW_FILTER;
			return GO_ON;
		}
		if (error == E_TOO_BIG)
			return NAT_DROP_MAPPINGS_FULL;
	}
	return NAT_DROP_RACE;
}

/* Whether the mapping of r lets a stranger in: a packet that no session
 * expects, from that address. */
GLOBAL int mapping_admits(const struct reservation *r, __be32 remote)
{
	struct nat_filter_key key;
	struct nat_filter_entry *c;

	if (!r)
		return NAT_DROP_BYPASS;
	key = filter_key(r, addr_of(remote));
	if (r->filtering == NAT_FILTER_ENDPOINT_INDEPENDENT)
		return GO_ON;
	if (r->filtering != NAT_FILTER_ADDRESS)
		return NAT_DROP_FILTERED;
	c = bpf_map_lookup_elem(&filter_entries, &key);
	return c && refs_read(&c->refs) & NAT_REFS_COUNT ? GO_ON : NAT_DROP_FILTERED;
}

/* --- both ends ---------------------------------------------------------------- */

/* The session has ended that had the port without a mapping. If there is no room for its
 * hold-down it is free at once, not lost for ever; and if no session has come of it, too. */
static __always_inline void port_leave(const struct reservation *r, __u32 now)
{
	__u64 id = slot_id(r->address, r->internal.class, r->port);
	struct nat_slot *slot = slot_at(id);

	if (slot)
		*(volatile __u8 *)&slot->held |= NAT_HELD_DOWN;
	if (r->fresh & FRESH_PORT || port_hold_down(id, now)) {
		log_mapping(NAT_LOG_ENDED, r->address, r->internal.class, bpf_ntohs(r->port));
		endpoint_give(r->address, r->internal.class, bpf_ntohs(r->port));
	}
}

/*
 * The mapping of that endpoint, which is in no queue for its hold-down, goes now if nobody holds
 * it: nobody would look at it any more. A function of its own beside reservation_leave, because
 * what they call takes all of the stack that is left.
 */
GLOBAL int mapping_end(const struct nat_mapping_key *of)
{
	struct nat_mapping_key internal;
	struct nat_slot *slot;
	__u32 old;
	__u64 id;

	if (!of)
		return NAT_DROP_BYPASS;
	internal = *of;
	id = mapping_lookup(&internal);
	slot = id ? slot_at(id) : NULL;
	if (!slot)
		return GO_ON;
	old = refs_read(&slot->refs);
	if (!(old & (NAT_REFS_COUNT | NAT_REFS_QUEUED | NAT_REFS_GONE)) &&
	    mapping_is(slot, id, &internal) &&
	    __sync_val_compare_and_swap(&slot->refs, old, old | NAT_REFS_GONE) == old)
		mapping_remove(id, &internal);
	return GO_ON;
}

/*
 * Releases the reservation r; remote is whom a filter entry was made with. Everything is
 * found by its key again: while there is a reference the element is there and the right one.
 * True: the mapping is to end at once (mapping_end).
 */
GLOBAL int reservation_leave(const struct reservation *r, __be32 remote, __u32 now)
{
	struct nat_filter_key filter;
	struct nat_slot *slot = NULL;
	struct nat_filter_entry *c;
	struct nat_source *s;
	int full = 0;
	__u64 id;

	if (!r)
		return 0;
	filter = filter_key(r, addr_of(remote));
	if (r->flags & NAT_FLOW_MAPPED) {
		id = mapping_lookup(&r->internal);
		if (id) {
			slot = slot_at(id);
			filter.address = slot_id_address(id);
			filter.port = slot_id_port(id);
		}
		if (r->flags & NAT_FLOW_FILTER) {
			c = bpf_map_lookup_elem(&filter_entries, &filter);
			if (c)
				filter_put(c);
		}
		if (slot)
			full = mapping_put(slot, id, now, r->fresh & FRESH_MAPPING);
	}
	if (r->flags & NAT_FLOW_PORT)
		port_leave(r, now);
	if (r->flags & NAT_FLOW_SOURCE) {
		struct nat_source_key host = source_key(&r->internal);

		s = bpf_map_lookup_elem(&sources, &host);
		if (s)
			source_put(s, USE_SESSION);
	}
	return full;
}

static __always_inline void reservation_drop(const struct reservation *r, __be32 remote, __u32 now)
{
	if (reservation_leave(r, remote, now))
		mapping_end(&r->internal);
}

#endif
