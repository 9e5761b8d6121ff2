/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Mappings: inside endpoint -> outside endpoint (RFC 4787 section 4.1), the hosts
 * they belong to (paired pooling, limits) and whom they let in (section 5).
 *
 * A mapping is the slot of its outside port: that names the inside endpoint and counts
 * references. mapping_table leads there from the inside endpoint; its entries are *places*
 * of slots: index of the address, class and port in one number.
 *
 * All three are counted by reference, and live as long as a session holds one. A
 * reference is taken by compare-and-exchange, so never from what is being removed;
 * since the memory may be another one's by then, its identity is compared after that,
 * and a wrong one is put back.
 *
 * Removal is one CPU's: hosts and contacts by whoever changes 0 to GONE, mappings only
 * by the sweep, because their port rests first. What is removed stays where it is found,
 * marked GONE, until it is taken out there, and nobody can insert the same key before: so
 * that can't meet another one's.
 */
#ifndef NATKIT_MAPPING_H
#define NATKIT_MAPPING_H

#include "nat/count.h"
#include "nat/port.h"
#include "lib/table.h"

enum mapping_limit {
	REFS_TRIES = 16,    /* lost compare-and-exchanges before the packet is given up */
	POOL_COMPARED = 32, /* addresses of a pool that are compared for a new host */
	POOL_TRIES = 512,   /* that are looked at while none of those has room */
	MAPPING_TRIES = 2,  /* the second after another CPU made the same mapping */
};

/* What the inside endpoint at one end of a session holds. */
struct hold {
	struct nat_mapping_key inside;
	__u16 address;   /* outside: index */
	__be16 port;     /* outside */
	__u32 flags;     /* NAT_FLOW_MAPPED, NAT_FLOW_PORT, NAT_FLOW_SOURCE, NAT_FLOW_CONTACT */
	__u32 filtering; /* of the mapping */
};

static __always_inline __u32 refs_read(const __u32 *refs)
{
	return *(const volatile __u32 *)refs;
}

static __always_inline int refs_take(__u32 *refs, __u32 limit)
{
	__u32 try, old, new;

	for (try = 0; try < REFS_TRIES; try++) {
		old = refs_read(refs);
		if (old & NAT_REFS_GONE)
			return NAT_DROP_RACE;
		if ((old & NAT_REFS_COUNT) >= limit)
			return NAT_DROP_SOURCE_LIMIT;
		new = old + 1;
		if (!(old & NAT_REFS_COUNT) && old & NAT_REFS_QUEUED)
			new |= NAT_REFS_AGAIN;
		if (__sync_val_compare_and_swap(refs, old, new) == old)
			return GO_ON;
	}
	return NAT_DROP_RACE;
}

/* Puts a reference back. True for the one who thereby must see to the end: nobody
 * held it any more, and mark was set. When the exchange fails somebody has taken one
 * since, and putting that back comes here again. */
static __always_inline int refs_put(__u32 *refs, __u32 mark)
{
	__u32 left = __sync_fetch_and_add(refs, -1) - 1;

	return !(left & (NAT_REFS_COUNT | mark)) &&
	       __sync_val_compare_and_swap(refs, left, left | mark) == left;
}

/* --- mappings ---------------------------------------------------------------- */

static __always_inline __u64 mapping_place(__u32 address, __u32 class, __be16 port)
{
	return (__u64)address << NAT_MAPPING_ADDRESS_SHIFT | class << NAT_MAPPING_CLASS_SHIFT |
	       bpf_ntohs(port);
}

static __always_inline __u32 place_address(__u64 place)
{
	return place >> NAT_MAPPING_ADDRESS_SHIFT;
}

static __always_inline __u32 place_class(__u64 place)
{
	return place >> NAT_MAPPING_CLASS_SHIFT & 3;
}

static __always_inline __be16 place_port(__u64 place)
{
	return bpf_htons(place);
}

static __always_inline struct nat_slot *place_slot(__u64 place)
{
	__u32 index = place_address(place);
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	return address ? port_slot(index, address, place_class(place), place & 0xffff) : NULL;
}

/* Whether the slot of that place is the mapping of inside. */
static __always_inline int mapping_is(const struct nat_slot *slot, __u64 place,
				      const struct nat_mapping_key *inside)
{
	struct nat_slot value = slot_read(slot);

	return value.used == NAT_SLOT_MAPPING && place_class(place) == inside->class &&
	       addr_equal(value.addr, inside->addr) && value.port == inside->port &&
	       value.realm == inside->realm;
}

/* table.h: whether the mapping at that place is of the inside endpoint. */
static __always_inline int mapping_at(const void *inside, __u64 place)
{
	struct nat_slot *slot = place_slot(place);

	return slot && mapping_is(slot, place, inside);
}

GLOBAL __u64 mapping_within(const struct nat_bucket *bucket, __u64 hash,
			    const struct nat_mapping_key *inside)
{
	return bucket && inside ? table_within(bucket, hash, mapping_at, inside) : 0;
}

static __always_inline __u64 mapping_in(const struct nat_bucket *bucket, __u64 hash,
					const void *inside)
{
	return mapping_within(bucket, hash, inside);
}

/* The realm has no part in it: a packet's bucket is known before its rule is. */
static __always_inline __u64 mapping_hash(const struct nat_control *c,
					  const struct nat_mapping_key *inside)
{
	return table_hash(c, addr_word(inside->addr), (__u32)inside->class << 16 | inside->port);
}

/*
 * Asks early for the bucket in which a packet from that endpoint will look for its mapping.
 * It is in no cache, as the flow's was not, and who waits for both at once waits half as
 * long. What is read decides nothing.
 */
static __always_inline void mapping_touch(const struct nat_mapping_key *inside)
{
	struct nat_control *c = control_get();
	struct nat_bucket *home;

	if (!c)
		return;
	home = table_bucket(&mapping_table, c->mapping_mask, mapping_hash(c, inside), 0);
	if (home)
		table_read(&home->entries[0]);
}

/* The place of the mapping of an inside endpoint; 0 is none. */
GLOBAL __u64 mapping_lookup(const struct nat_mapping_key *inside)
{
	struct nat_control *c = control_get();

	if (!c || !inside)
		return 0;
	return table_value(table_find(&mapping_table, c->mapping_mask, mapping_hash(c, inside),
				      mapping_in, inside));
}

/* Makes the slot at that place, which is named already, the mapping of inside: 0, or the
 * error of table_insert. */
GLOBAL int mapping_enter(const struct nat_mapping_key *inside, __u64 place)
{
	struct nat_control *c = control_get();

	if (!c || !inside)
		return E_TOO_BIG;
	return table_insert(&mapping_table, c->mapping_mask, mapping_hash(c, inside), place,
			    mapping_in, inside);
}

GLOBAL int mapping_leave(const struct nat_mapping_key *inside, __u64 place)
{
	struct nat_control *c = control_get();

	if (c && inside)
		table_remove(&mapping_table, c->mapping_mask, mapping_hash(c, inside), place);
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

/* The port of a mapping, or of a session without one, rests from now on, if the queue has
 * room, which is for every mapping. If not a mapping stays until it is used and left again,
 * and the caller frees a session's port at once. */
static __always_inline int port_rest(__u64 place, __u32 now)
{
	struct nat_resting resting = {.address = place_address(place),
				      .port = place_port(place),
				      .since = (now & ~3) | place_class(place)};

	return bpf_map_push_elem(&mapping_queue, &resting, 0);
}

/*
 * A mapping without sessions goes into the queue once; QUEUED says that it is there.
 * Who takes it out of rest leaves AGAIN, so that the sweep, when it meets the entry,
 * knows that the rest began later than the entry says.
 */
SUBPROGRAM void mapping_put(struct nat_slot *slot, __u64 place, __u32 now)
{
	if (refs_put(&slot->refs, NAT_REFS_QUEUED) && port_rest(place, now))
		__sync_fetch_and_and(&slot->refs, ~NAT_REFS_QUEUED);
}

/* Whether two places are of one slot: an address whose pool has grown has two indices. */
SUBPROGRAM int place_same(__u64 a, __u64 b)
{
	return place_slot(a) == place_slot(b);
}

/* Holds the mapping of h->inside, if there is one and its slot is that of only, or only is 0;
 * NAT_DROP_NO_MAPPING if not. */
GLOBAL int mapping_hold(struct hold *h, __u32 now, __u64 only)
{
	struct nat_slot *slot;
	__u64 place;

	if (!h)
		return NAT_DROP_BYPASS;
	place = mapping_lookup(&h->inside);
	if (!place)
		return NAT_DROP_NO_MAPPING;
	if (only && place != only && !place_same(place, only))
		return NAT_DROP_NO_MAPPING;
	slot = place_slot(place);
	if (!slot || refs_take(&slot->refs, NAT_REFS_COUNT) != GO_ON)
		return NAT_DROP_RACE;
	if (!mapping_is(slot, place, &h->inside)) {
		mapping_put(slot, place, now);
		return NAT_DROP_RACE;
	}
	h->address = place_address(place);
	h->port = place_port(place);
	h->filtering = refs_read(&slot->refs) & NAT_REFS_FILTERING;
	h->flags |= NAT_FLOW_MAPPED;
	return GO_ON;
}

/* Gives back the mapping that h holds, and nothing else. */
static __always_inline void mapping_drop(const struct hold *h, __u32 now)
{
	__u64 place = mapping_place(h->address, h->inside.class, h->port);
	struct nat_slot *slot = h->flags & NAT_FLOW_MAPPED ? place_slot(place) : NULL;

	if (slot)
		mapping_put(slot, place, now);
}

static __always_inline int mapping_find(struct hold *h, __u32 now)
{
	return mapping_hold(h, now, 0);
}

/* Says whose the outside endpoint of h is. */
static __always_inline void slot_name(struct nat_slot *slot, const struct hold *h, __u8 use)
{
	struct nat_slot value = {.addr = h->inside.addr,
				 .port = h->inside.port,
				 .realm = h->inside.realm,
				 .used = use};

	slot_write(slot, value);
}

/* The same for a session that has the port without a mapping. */
static __always_inline void port_name(const struct hold *h)
{
	struct nat_slot *slot = place_slot(mapping_place(h->address, h->inside.class, h->port));

	if (slot)
		slot_name(slot, h, NAT_SLOT_SESSION);
}

/*
 * Makes the mapping of h->inside with the outside endpoint h->address, h->port, which
 * the caller took; E_EXIST if another CPU was faster. The slot is named before its place
 * is in the table: whoever finds that looks at the name. Packets to the port find no
 * mapping meanwhile, and are refused. Until refs are set nobody can take one, and who tries
 * gives up.
 */
static __always_inline int mapping_insert(struct hold *h)
{
	__u64 place = mapping_place(h->address, h->inside.class, h->port);
	struct nat_slot *slot = place_slot(place);
	struct nat_mapping_key inside = h->inside;
	int error;

	if (!slot || !mapping_count(1))
		return E_TOO_BIG;
	*(volatile __u32 *)&slot->refs = NAT_REFS_GONE;
	slot_name(slot, h, NAT_SLOT_MAPPING);
	error = mapping_enter(&inside, place);
	if (error) {
		mapping_count(-1);
		return error;
	}
	*(volatile __u32 *)&slot->refs = 1 | h->filtering;
	h->flags |= NAT_FLOW_MAPPED;
	count_add(NAT_MAPPED);
	return 0;
}

/*
 * Endpoint-independent: makes the mapping of h->inside with the port of h->address that
 * the caller took. Two CPUs may do it at once: both took a port, one inserts; the
 * other gives its port back and holds the winner's mapping.
 */
GLOBAL int mapping_make(struct hold *h, __u32 now)
{
	int error;

	if (!h)
		return NAT_DROP_BYPASS;
	error = mapping_insert(h);
	if (!error)
		return GO_ON;
	port_give(h->address, h->inside.class, bpf_ntohs(h->port));
	if (error == E_TOO_BIG)
		return NAT_DROP_MAPPINGS_FULL;
	return mapping_find(h, now) == GO_ON ? GO_ON : NAT_DROP_RACE;
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
	bit_give(ports, index);
}

/* For a pool without ports, whose addresses are first and the next: the mapping of the
 * host, or a new one with an address of its own. */
GLOBAL int mapping_take_address(struct hold *h, __u32 first, __u32 count, __u32 now)
{
	__u32 zero = 0, try;
	struct nat_ports *ports = bpf_map_lookup_elem(&free_addresses, &zero);
	int index, reason, error;

	if (!h || !ports)
		return NAT_DROP_BYPASS;
	for (try = 0; try < MAPPING_TRIES; try++) {
		reason = mapping_find(h, now);
		if (reason != NAT_DROP_NO_MAPPING)
			return reason;
		index = bits_take(ports, first, first + count - 1, ~0ULL);
		if (index == PORT_NONE)
			return NAT_DROP_NO_ADDRESS;
		h->address = index;
		h->port = 0;
		error = mapping_insert(h);
		if (!error)
			return GO_ON;
		address_give(index);
		if (error == E_TOO_BIG)
			return NAT_DROP_MAPPINGS_FULL;
	}
	return NAT_DROP_RACE;
}

/*
 * Who has an outside endpoint: GO_ON, and h is that endpoint and the inside one, not yet
 * held; NAT_PASS_NO_RULE if the address is none of ours, and if nobody has it NAT_PASS_LOCAL
 * where the gateway itself does, NAT_DROP_NO_MAPPING where it doesn't.
 */
GLOBAL int mapping_by_outside(__be32 outside_addr, __be16 port, __u8 class, struct hold *h)
{
	struct nat_addr key = addr_of(outside_addr);
	__u32 *index = bpf_map_lookup_elem(&outside, &key);
	struct nat_address *address;
	struct nat_slot *slot, value;
	__u32 i;

	if (!index || !h)
		return NAT_PASS_NO_RULE;
	i = *index;
	address = bpf_map_lookup_elem(&addresses, &i);
	if (!address)
		return NAT_PASS_NO_RULE;
	slot = port_slot(i, address, class, bpf_ntohs(port));
	if (slot) {
		value = slot_read(slot);
		if (value.used) {
			h->inside.addr = value.addr;
			h->inside.port = value.port;
			h->inside.class = address->port_count ? class : NAT_OTHER;
			h->inside.realm = value.realm;
			h->address = i;
			h->port = address->port_count ? port : 0;
			return GO_ON;
		}
	}
	return address->flags & NAT_ADDRESS_OWNED ? NAT_PASS_LOCAL : NAT_DROP_NO_MAPPING;
}

/* Holds the mapping of the outside endpoint that mapping_by_outside found. NAT_DROP_FILTERED:
 * the port is a session's, which others can't use; its host's mapping, if any, is another's. */
static __always_inline int mapping_addressed(struct hold *h, __u32 now)
{
	int reason = mapping_hold(h, now, mapping_place(h->address, h->inside.class, h->port));

	return reason == NAT_DROP_NO_MAPPING ? NAT_DROP_FILTERED : reason;
}

/* --- contacts ---------------------------------------------------------------- */

static __always_inline int contact_equal(const struct nat_contact_key *a,
					 const struct nat_contact_key *b)
{
	return addr_equal(a->remote, b->remote) && a->address == b->address && a->port == b->port &&
	       a->class == b->class;
}

static __always_inline struct nat_contact_key contact_key(const struct hold *h,
							  struct nat_addr remote)
{
	struct nat_contact_key key = {
		.remote = remote, .address = h->address, .port = h->port, .class = h->inside.class};

	return key;
}

static __always_inline void contact_put(struct nat_contact *c)
{
	struct nat_contact_key key = c->key;

	if (refs_put(&c->refs, NAT_REFS_GONE))
		bpf_map_delete_elem(&contacts, &key);
}

/* The inside endpoint sends to that address: from now on it may answer from any port. */
GLOBAL int contact_take(struct hold *h, __be32 remote)
{
	struct nat_contact new = {.refs = 1}, *c;
	struct nat_contact_key key;
	int try, error;

	if (!h)
		return NAT_DROP_BYPASS;
	key = contact_key(h, addr_of(remote));
	new.key = key;
	for (try = 0; try < MAPPING_TRIES; try++) {
		c = bpf_map_lookup_elem(&contacts, &key);
		if (c) {
			if (refs_take(&c->refs, NAT_REFS_COUNT) != GO_ON)
				return NAT_DROP_RACE;
			h->flags |= NAT_FLOW_CONTACT;
			if (contact_equal(&c->key, &key))
				return GO_ON;
			h->flags &= ~NAT_FLOW_CONTACT;
			contact_put(c);
			return NAT_DROP_RACE;
		}
		error = bpf_map_update_elem(&contacts, &key, &new, BPF_NOEXIST);
		if (!error) {
			h->flags |= NAT_FLOW_CONTACT;
			return GO_ON;
		}
		if (error == E_TOO_BIG)
			return NAT_DROP_MAPPINGS_FULL;
	}
	return NAT_DROP_RACE;
}

/* Whether the mapping that h holds lets a stranger in: a packet that no session
 * expects, from that address. */
GLOBAL int mapping_admits(const struct hold *h, __be32 remote)
{
	struct nat_contact_key key;
	struct nat_contact *c;

	if (!h)
		return NAT_DROP_BYPASS;
	key = contact_key(h, addr_of(remote));
	if (h->filtering == NAT_FILTER_ENDPOINT_INDEPENDENT << 24)
		return GO_ON;
	if (h->filtering != NAT_FILTER_ADDRESS << 24)
		return NAT_DROP_FILTERED;
	c = bpf_map_lookup_elem(&contacts, &key);
	return c && refs_read(&c->refs) & NAT_REFS_COUNT ? GO_ON : NAT_DROP_FILTERED;
}

/* --- inside hosts ------------------------------------------------------------- */

static __always_inline void source_put(struct nat_source *s)
{
	struct nat_source_key key = {.addr = s->addr, .realm = s->realm};

	if (refs_put(&s->refs, NAT_REFS_GONE))
		bpf_map_delete_elem(&sources, &key);
}

/* How many ports an address has for a new host: of TCP or UDP, of which there are fewer, for
 * a host will want both. 0: none of the class, or the address is leaving. */
SUBPROGRAM __u64 pool_room(__u32 index, __u32 class)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_ports *wanted, *tcp, *udp;
	__u64 room;

	if (!address || address->flags & NAT_ADDRESS_LEAVING)
		return 0;
	if (class >= NAT_PORT_CLASSES)
		return 1;
	wanted = port_bits(index, class);
	tcp = port_bits(index, NAT_TCP);
	udp = port_bits(index, NAT_UDP);
	if (!wanted || !tcp || !udp || !*(volatile __u64 *)&wanted->free)
		return 0;
	room = *(volatile __u64 *)&tcp->free;
	if (room > *(volatile __u64 *)&udp->free)
		room = *(volatile __u64 *)&udp->free;
	return room + 1;
}

struct pool_walk {
	__u32 first, count, start, class;
	__u32 best;
	__u64 room; /* of best */
};

static long pool_next(__u32 n, struct pool_walk *walk)
{
	__u32 index = walk->first + (walk->start + n) % walk->count;
	__u64 room;

	if (n >= POOL_COMPARED && walk->room)
		return 1;
	room = pool_room(index, walk->class);
	if (room > walk->room) {
		walk->room = room;
		walk->best = index;
	}
	return 0;
}

/* An address of the pool for a host that has none: with most room of those looked at, which
 * begin by the host's own address. */
GLOBAL int pool_choose(__be32 host, __u32 first, __u32 count, __u32 class)
{
	struct pool_walk walk = {.first = first, .count = count, .class = class};

	if (!count)
		return first;
	walk.start = addr_hash(addr_of(host)) % count;
	walk.best = first + walk.start;
	bpf_loop(count < POOL_TRIES ? count : POOL_TRIES, pool_next, &walk, 0);
	return walk.best;
}

/* Whether a host that has that address can go on with it: its pool may have lost it. In a
 * pool that has grown it has another index, which outside leads to. */
static __always_inline int pool_has(__u32 index, __u32 first, __u32 count)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_addr key;
	__u32 *now;

	if (address && index - first >= count) {
		key = address->addr;
		now = bpf_map_lookup_elem(&outside, &key);
		index = now ? *now : index;
		address = bpf_map_lookup_elem(&addresses, &index);
	}
	return index - first < count && address && !(address->flags & NAT_ADDRESS_LEAVING);
}

/*
 * Counts a session for the inside host of h, if it has fewer than limit (0: no limit).
 * A pool's address is the host's for as long as it has sessions (RFC 4787 REQ-2) and the
 * pool has it; count 0: h has it.
 */
GLOBAL int source_take(struct hold *h, __u32 first, __u32 count, __u32 limit)
{
	struct nat_source new = {.refs = 1}, *s;
	struct nat_source_key key = {};
	int try, reason, error;

	if (!h)
		return NAT_DROP_BYPASS;
	key.addr = new.addr = h->inside.addr;
	key.realm = new.realm = h->inside.realm;
	for (try = 0; try < MAPPING_TRIES; try++) {
		s = bpf_map_lookup_elem(&sources, &key);
		if (s) {
			reason = refs_take(&s->refs, limit ? limit : NAT_REFS_COUNT);
			if (reason != GO_ON)
				return reason;
			if (!addr_equal(s->addr, key.addr) || s->realm != key.realm) {
				source_put(s);
				return NAT_DROP_RACE;
			}
			h->flags |= NAT_FLOW_SOURCE;
			if (count && !pool_has(s->address, first, count))
				s->address = pool_choose(addr_word(key.addr), first, count,
							 h->inside.class);
			if (count)
				h->address = s->address;
			return GO_ON;
		}
		new.address = h->address;
		if (count)
			new.address =
				pool_choose(addr_word(key.addr), first, count, h->inside.class);
		error = bpf_map_update_elem(&sources, &key, &new, BPF_NOEXIST);
		if (!error) {
			h->flags |= NAT_FLOW_SOURCE;
			if (count)
				h->address = new.address;
			return GO_ON;
		}
		if (error == E_TOO_BIG)
			return NAT_DROP_SOURCES_FULL;
	}
	return NAT_DROP_RACE;
}

/* --- both ends ---------------------------------------------------------------- */

/*
 * Gives back what h holds; remote is whom a contact was made with. Everything is found
 * by its key again: while the reference is held the element is there and the right one.
 */
GLOBAL int hold_drop(const struct hold *h, __be32 remote, __u32 now)
{
	struct nat_source_key host = {};
	struct nat_contact_key contact;
	struct nat_mapping_key inside;
	struct nat_slot *slot = NULL;
	struct nat_contact *c;
	struct nat_source *s;
	__u64 place;

	if (!h)
		return NAT_DROP_BYPASS;
	inside = h->inside;
	host.addr = inside.addr;
	host.realm = inside.realm;
	contact = contact_key(h, addr_of(remote));
	if (h->flags & NAT_FLOW_MAPPED) {
		place = mapping_lookup(&inside);
		if (place) {
			slot = place_slot(place);
			contact.address = place_address(place);
			contact.port = place_port(place);
		}
		if (h->flags & NAT_FLOW_CONTACT) {
			c = bpf_map_lookup_elem(&contacts, &contact);
			if (c)
				contact_put(c);
		}
		if (slot)
			mapping_put(slot, place, now);
	}
	/* No room for it to rest: it is free at once, not lost for ever. */
	if (h->flags & NAT_FLOW_PORT &&
	    port_rest(mapping_place(h->address, inside.class, h->port), now))
		port_give(h->address, inside.class, bpf_ntohs(h->port));
	if (h->flags & NAT_FLOW_SOURCE) {
		s = bpf_map_lookup_elem(&sources, &host);
		if (s)
			source_put(s);
	}
	return GO_ON;
}

#endif
