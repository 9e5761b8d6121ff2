/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Subscribers: which external address one has (paired pooling), what it may have, what
 * it has (sessions; ports, in hold-down too; port blocks), and an external port for it.
 *
 * A subscriber is there for as long as it has a session or a port: nat_source.use counts
 * both in one word, of which 0 becomes GONE by whoever removes it (refs.h). So whoever has
 * one of either finds the subscriber by its key, and the right one. Its blocks have ports in
 * them, so none is left when it goes.
 *
 * Packets of established sessions do not come here.
 */
#ifndef NATKIT_SUBSCRIBER_H
#define NATKIT_SUBSCRIBER_H

#include "nat/block.h"

enum subscriber_limit {
	SOURCE_TRIES = 3,   /* it is not there, was made at the same time, is there */
	POOL_COMPARED = 32, /* addresses of a pool that are compared for a new host */
	POOL_TRIES = 512,   /* that are looked at while none of those has room */
	POOL_HINTS = 8,     /* addresses of a pool with blocks, likewise */
	BLOCK_TRIES = 4,    /* for a block more, while other CPUs are faster */
	SOURCE_RATE_SLACK_NS = 1000000000,
};

#define USE_SESSION 1ULL
#define USE_PORT (1ULL << NAT_USE_PORT_SHIFT)

/* An address that no host is sent to. */
#define ADDRESS_CLOSED (NAT_ADDRESS_LEAVING | NAT_ADDRESS_DRAINING)

/* Beside the ports of endpoint_count. */
#define RANGE_OF_BLOCK (1ULL << 32)
#define NEEDS_BLOCK (1ULL << 33)

/* What was made for this packet: nothing has left by it yet. */
enum reservation_fresh { FRESH_MAPPING = 1, FRESH_PORT = 2 };

/* What a session has reserved for the internal endpoint at one end of it. */
struct reservation {
	struct nat_mapping_key internal;
	__u16 address;  /* outside: index */
	__be16 port;    /* outside */
	__u32 flags;    /* NAT_FLOW_MAPPED, NAT_FLOW_PORT, NAT_FLOW_SOURCE, NAT_FLOW_FILTER */
	__u32 refs;     /* of the mapping, as this reservation was made */
	__u8 filtering; /* of the mapping: enum nat_filtering_mode */
	__u8 refused;   /* what the subscriber was refused: enum nat_refusal, plus 1 */
	__u8 fresh;     /* enum reservation_fresh */
	__u8 zero;
};

static __always_inline __u64 slot_id(__u32 address, __u32 class, __be16 port)
{
	return (__u64)address << NAT_MAPPING_ADDRESS_SHIFT | class << NAT_MAPPING_CLASS_SHIFT |
	       bpf_ntohs(port);
}

static __always_inline __u32 slot_id_address(__u64 id)
{
	return id >> NAT_MAPPING_ADDRESS_SHIFT;
}

static __always_inline __u32 slot_id_class(__u64 id)
{
	return id >> NAT_MAPPING_CLASS_SHIFT & 3;
}

static __always_inline __be16 slot_id_port(__u64 id)
{
	return bpf_htons(id);
}

static __always_inline struct nat_slot *slot_at(__u64 id)
{
	__u32 index = slot_id_address(id);
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	return address ? port_slot(index, address, slot_id_class(id), id & 0xffff) : NULL;
}

/* --- what a subscriber has ------------------------------------------------------- */

static __always_inline struct nat_source_key source_key(const struct nat_mapping_key *of)
{
	struct nat_control *c = control_get();
	struct nat_source_key key = {.addr = of->addr, .pool = of->pool, .zone = of->zone};

	if (c)
		key.addr = addr_of(addr_word(of->addr) & ~c->subscriber_hosts);
	return key;
}

/* Counts one more, if there are fewer than limit (0: none); E_TOO_BIG if not. */
static __always_inline int use_take(__u64 *use, __u64 one, __u32 limit)
{
	__u32 try, shift = one == USE_PORT ? NAT_USE_PORT_SHIFT : 0;
	__u64 old;

	if (!limit)
		limit = NAT_USE_COUNT;
	for (try = 0; try < REFS_TRIES; try++) {
		old = *(volatile __u64 *)use;
		if (old & NAT_USE_GONE)
			return NAT_DROP_RACE;
		if ((old >> shift & NAT_USE_COUNT) >= limit)
			return E_TOO_BIG;
		if (__sync_val_compare_and_swap(use, old, old + one) == old)
			return GO_ON;
	}
	return NAT_DROP_RACE;
}

/* One less; who takes the last removes the subscriber. */
static __always_inline void source_put(struct nat_source *s, __u64 one)
{
	struct nat_source_key key = {.addr = s->addr, .pool = s->pool, .zone = s->zone};
	__u64 left = __sync_fetch_and_add(&s->use, -one) - one;

	if (!left && !__sync_val_compare_and_swap(&s->use, 0, NAT_USE_GONE))
		bpf_map_delete_elem(&sources, &key);
}

/* Notes what the subscriber of r is refused. It is counted when that is final: XDP leaves most
 * refusals to tc, which finds the same, or not any more. */
static __always_inline void source_refuse(struct reservation *r, enum nat_refusal what)
{
	r->refused = what + 1;
}

/* Counts what was noted. */
GLOBAL int source_refused(const struct reservation *r)
{
	struct nat_source_key key;
	struct nat_source *s;
	__u32 what, times;

	if (!r || !r->refused)
		return 0;
	what = r->refused - 1;
	key = source_key(&r->internal);
	s = bpf_map_lookup_elem(&sources, &key);
	OPAQUE(what); /* compared here, or Linux 6.1 has forgotten it by then */
	if (!s || what >= NAT_REFUSALS)
		return 0;
	times = __sync_fetch_and_add(&s->refused[what], 1) + 1;
	if (what != NAT_REFUSED_BLOCK && !(times & (times - 1)))
		log_quota(addr_word(s->addr), s->pool, s->zone, what, times);
	return 0;
}

/* What the subscriber may have. Its class is looked up once in a generation of the rules. */
static __always_inline const struct nat_limits *source_limits(const struct nat_source *s,
							      const struct nat_config *c,
							      __u32 generation, __u32 *class)
{
	__u32 slot = generation % NAT_GENERATIONS, *found;
	struct nat_prefix_key key = {.prefixlen = 32, .addr = s->addr};
	const struct nat_limits *limits;
	void *inner;

	*class = 0;
	if (!(c->lookups & NAT_LOOKUP_CLASS))
		return &c->limits;
	if (s->generation == generation + 1) {
		*class = s->class;
	} else {
		inner = bpf_map_lookup_elem(&sub_prefixes, &slot);
		found = inner ? bpf_map_lookup_elem(inner, &key) : NULL;
		*class = found ? *found : 0;
	}
	inner = *class ? bpf_map_lookup_elem(&sub_classes, &slot) : NULL;
	limits = inner ? bpf_map_lookup_elem(inner, class) : NULL;
	return limits ? limits : &c->limits;
}

/* Takes a token of the bucket: it is full again at rate_ns, each token an interval sooner. If that
 * is later than of an empty one, and not by another CPU's clock, it is what other limits left. For
 * sessions that strangers open half of the bucket is there: the rest is the subscriber's own. */
static __always_inline int source_rate(struct nat_source *s, const struct nat_limits *limits,
				       int own)
{
	__u64 now_ns, old, begin, most;
	__u32 try;

	if (!limits->interval_ns)
		return GO_ON;
	most = limits->burst_ns >> !own;
	now_ns = bpf_ktime_get_ns();
	for (try = 0; try < REFS_TRIES; try++) {
		old = *(volatile __u64 *)&s->rate_ns;
		begin = old > now_ns ? old : now_ns;
		if (begin - now_ns > limits->burst_ns + limits->interval_ns + SOURCE_RATE_SLACK_NS)
			begin = now_ns + limits->burst_ns;
		if (begin - now_ns > most)
			return NAT_DROP_RATE_LIMIT;
		if (__sync_val_compare_and_swap(&s->rate_ns, old, begin + limits->interval_ns) ==
		    old)
			return GO_ON;
	}
	return NAT_DROP_RATE_LIMIT;
}

/* --- which address it has ---------------------------------------------------------- */

static __always_inline __u64 block_room(__u32 index)
{
	struct nat_blocks *b = blocks_of(index);

	return b ? *(volatile __u64 *)&b->count + 1 : 0;
}

/* How many ports an address has for a new host: of TCP or UDP, of which there are fewer, for
 * a host will want both. 0: none of the class, or the address is leaving. */
static __always_inline __u64 pool_room(__u32 index, __u32 class)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_ports *wanted, *tcp, *udp;
	__u64 room;

	if (!address || address->flags & ADDRESS_CLOSED)
		return 0;
	if (class >= NAT_PORT_CLASSES)
		return 1;
	if (address->block)
		return block_fits(index, address->block - 1) ? block_room(index) : 0;
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

/* One of the addresses first..last that may have a block for a new subscriber, or PORT_NONE: the
 * next in a word of free_addresses that is drawn by chance. */
GLOBAL int pool_hinted(__u32 first, __u32 last)
{
	__u32 zero = 0;
	struct nat_ports *hints = bpf_map_lookup_elem(&free_addresses, &zero);
	__u64 bits;
	int word;

	if (!hints || first > last || last >= NAT_MAX_ADDRESSES)
		return PORT_NONE;
	word = word_find(hints, first / 64 + bpf_get_prandom_u32() % (last / 64 - first / 64 + 1),
			 last / 64);
	if (word < 0)
		word = word_find(hints, first / 64, last / 64);
	if (word < 0)
		return PORT_NONE;
	bits = *(volatile __u64 *)bit_word(hints, word * 64);
	if (word == (int)(first / 64))
		bits &= ~0ULL << (first & 63);
	if (word == (int)(last / 64))
		bits &= ~0ULL >> (63 - (last & 63));
	return bits ? word * 64 + (int)bit_lowest(bits) : PORT_NONE;
}

/* Whether an address of a pool with blocks has one for a new subscriber. */
static __always_inline int pool_fits(__u32 index, __u32 order)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	return address && !(address->flags & ADDRESS_CLOSED) && block_fits(index, order);
}

GLOBAL int pool_fits_once(__u32 index, __u32 order)
{
	return pool_fits(index, order);
}

/* The address has no block for a new subscriber, though free_addresses says so. */
GLOBAL int pool_unhint(__u32 index, __u32 order)
{
	__u32 zero = 0;
	struct nat_ports *hints = bpf_map_lookup_elem(&free_addresses, &zero);

	if (hints && bit_take(hints, index) && pool_fits(index, order))
		bit_give(hints, index); /* one was freed since */
	return 0;
}

/* An address of the pool with a block for a new subscriber; PORT_NONE if none was found. */
GLOBAL int pool_hint(__u32 first, __u32 count, __u32 order)
{
	__u32 try;
	int n;

	for (try = 0; try < POOL_HINTS; try++) {
		n = pool_hinted(first, first + count - 1);
		if (n >= 0 && pool_fits_once(n, order))
			return n;
		if (n >= 0)
			pool_unhint(n, order);
	}
	return PORT_NONE;
}

/* An address of the pool for a host that has none: with most room of those looked at, which
 * begin by the host's own address. */
GLOBAL int pool_choose(__be32 host, __u32 first, __u32 count, __u32 class)
{
	struct pool_walk walk = {.first = first, .count = count, .class = class};
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &first);
	__u32 tries = POOL_TRIES;
	int hint;

	if (!count || !address)
		return first;
	if (address->block)
		tries = POOL_COMPARED;
	walk.start = addr_hash(addr_of(host)) % count;
	walk.best = first + walk.start;
	bpf_loop(count < tries ? count : tries, pool_next, &walk, 0);
	if (address->block && !walk.room && count > tries) {
		hint = pool_hint(first, count, address->block - 1);
		if (hint != PORT_NONE)
			return hint;
	}
	return walk.best;
}

/* The index under which a host that has that address goes on with it, or PORT_NONE: its pool may
 * have lost it. In a pool that has grown it has another index, which outside leads to. */
static __always_inline int pool_now(__u32 index, __u32 first, __u32 count)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_addr key;
	__u32 *now;

	if (address && index - first >= count) {
		key = address->addr;
		now = bpf_map_lookup_elem(&address_indices, &key);
		index = now ? *now : index;
		address = bpf_map_lookup_elem(&addresses, &index);
	}
	return index - first < count && address && !(address->flags & ADDRESS_CLOSED) ? (int)index
										      : PORT_NONE;
}

/* The id of a computed block of the subscriber that is free, or 0. */
GLOBAL __u32 computed_free(__u32 host, __u32 pool)
{
	struct nat_computed_key key = {
		.prefixlen = 64, .pool = bpf_htonl(pool), .addr = addr_of(host)};
	const struct nat_config *config;
	const struct nat_computed *c;
	__u32 slot, n, index, at, order;
	struct nat_address *address;
	struct nat_blocks *b;
	void *inner;

	config = config_get(&slot);
	if (!config || !(config->lookups & NAT_LOOKUP_COMPUTED))
		return 0;
	inner = bpf_map_lookup_elem(&computed, &slot);
	c = inner ? bpf_map_lookup_elem(inner, &key) : NULL;
	if (!c || !c->count)
		return 0;
	n = c->number + (bpf_ntohl(host) >> (c->hosts & 31));
	index = c->first + n % c->count;
	address = bpf_map_lookup_elem(&addresses, &index);
	if (!address || address->flags & ADDRESS_CLOSED)
		return 0;
	b = blocks_of(index);
	at = n / c->count;
	order = c->order & 7;
	for (n = 0; b && n < NAT_SUBSCRIBER_BLOCKS && n < c->blocks; n++, at += c->rows)
		if (block_is_free(b, c->granule + (at << order), order))
			return block_id(index, (c->granule + (at << order)) & (NAT_GRANULES - 1),
					order);
	return 0;
}

/* Whether the subscriber has no block, and its address none for it. */
GLOBAL int source_homeless(const struct nat_source *s, __u32 index)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	__u32 n, id;

	if (!s || !address || !address->block)
		return 0;
	for (n = 0; n < NAT_SUBSCRIBER_BLOCKS; n++)
		if (*(volatile __u32 *)&s->blocks[n])
			return 0;
	if (block_fits(index, address->block - 1))
		return 0;
	id = computed_free(addr_word(s->addr), s->pool);
	return !id || block_address(id) != index;
}

/* What source_make writes, which is too large for the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_source);
	__uint(max_entries, 1);
} fresh_sources SEC(".maps");

/* Makes the subscriber of r with one session: 0, or the error of the map. */
static __always_inline int source_make(const struct nat_source_key *key,
				       const struct reservation *r)
{
	__u32 zero = 0;
	struct nat_source *new = bpf_map_lookup_elem(&fresh_sources, &zero);

	if (!new)
		return E_TOO_BIG;
	__builtin_memset(new, 0, sizeof(*new));
	new->addr = key->addr;
	new->pool = key->pool;
	new->zone = key->zone;
	new->address = r->address;
	new->use = USE_SESSION;
	new->since_ns = bpf_ktime_get_ns();
	return bpf_map_update_elem(&sources, key, new, BPF_NOEXIST);
}

/* Counts a session, if the subscriber may have one more: GO_ON, and what it may have. */
static __always_inline int source_session(struct nat_source *s, const struct nat_source_key *key,
					  __u32 generation, int made, int own)
{
	__u32 slot = generation % NAT_GENERATIONS, class = 0;
	const struct nat_config *c = bpf_map_lookup_elem(&config, &slot);
	const struct nat_limits *limits;
	int reason = GO_ON;

	if (!c)
		return NAT_DROP_BYPASS;
	limits = source_limits(s, c, generation, &class);
	if (!made)
		reason = use_take(&s->use, USE_SESSION, limits->sessions);
	if (reason == E_TOO_BIG)
		return NAT_DROP_SOURCE_LIMIT;
	if (reason != GO_ON)
		return reason;
	if (!addr_equal(s->addr, key->addr) || s->pool != key->pool || s->zone != key->zone) {
		source_put(s, USE_SESSION);
		return NAT_DROP_RACE;
	}
	if (c->lookups & NAT_LOOKUP_CLASS && s->generation != generation + 1)
		*(volatile __u64 *)&s->generation =
			(__u64)s->zone << 48 | (__u64) class << 32 | (generation + 1);
	reason = source_rate(s, limits, own);
	if (reason != GO_ON)
		source_put(s, USE_SESSION);
	return reason;
}

/* Counts a session for the subscriber of r, if it may have it; own: it opens that itself, and no
 * stranger through its mapping. */
GLOBAL int source_take(struct reservation *r, __u32 generation, __u32 own)
{
	struct nat_source_key key;
	int try, reason, error, made = 0;
	struct nat_source *s;

	if (!r)
		return NAT_DROP_BYPASS;
	key = source_key(&r->internal);
	for (try = 0; try < SOURCE_TRIES; try++) {
		s = bpf_map_lookup_elem(&sources, &key);
		if (!s) {
			error = source_make(&key, r);
			if (error == E_TOO_BIG)
				return NAT_DROP_SOURCES_FULL;
			made = !error;
			continue;
		}
		reason = source_session(s, &key, generation, made, own);
		if (reason == GO_ON)
			r->flags |= NAT_FLOW_SOURCE;
		else if (reason == NAT_DROP_SOURCE_LIMIT)
			source_refuse(r, NAT_REFUSED_SESSIONS);
		else if (reason == NAT_DROP_RATE_LIMIT)
			source_refuse(r, NAT_REFUSED_RATE);
		return reason;
	}
	return NAT_DROP_RACE;
}

/*
 * The address of the pool that the subscriber of r has, which its session holds: r->address. It
 * has it for as long as it has sessions or ports (RFC 4787 REQ-2) and the pool has it. Of two
 * CPUs that choose one at once the first decides.
 */
GLOBAL int source_place(struct reservation *r, __u32 first, __u32 count)
{
	struct nat_source_key key;
	struct nat_source *s;
	__u32 old, id;
	int address;

	if (!r)
		return NAT_DROP_BYPASS;
	key = source_key(&r->internal);
	s = bpf_map_lookup_elem(&sources, &key);
	if (!s)
		return NAT_DROP_RACE;
	old = *(volatile __u32 *)&s->pool;
	address = s->placed ? pool_now(old >> 16, first, count) : PORT_NONE;
	if (address < 0 || source_homeless(s, address)) {
		id = computed_free(addr_word(key.addr), key.pool);
		address = id ? (int)block_address(id)
			     : pool_choose(addr_word(key.addr), first, count, r->internal.class);
		__sync_val_compare_and_swap((__u32 *)&s->pool, old,
					    (old & 0xff) | 1 << 8 | (__u32)address << 16);
		address = *(volatile __u32 *)&s->pool >> 16;
	}
	r->address = address;
	return GO_ON;
}

/* --- an external port for it --------------------------------------------------------- */

/* Whether two indices are of one address: one whose pool has grown has two. */
static __always_inline int address_same(__u32 a, __u32 b)
{
	struct nat_address *one, *other;

	if (a == b)
		return 1;
	one = bpf_map_lookup_elem(&addresses, &a);
	other = bpf_map_lookup_elem(&addresses, &b);
	return one && other && addr_equal(one->addr, other->addr);
}

/* A port of the block is not held any more, or was never taken. 1: it was the last, and the caller
 * must end the block: block_drop. */
GLOBAL int block_put(__u32 address, __u32 first)
{
	struct nat_blocks *b = blocks_of(address);
	struct nat_source_key key = {};
	struct nat_granule *g;
	struct nat_source *s;
	__u32 n, id, order;

	if (!b)
		return 0;
	g = granule_at(b, first);
	key.addr = g->addr;
	key.pool = g->pool;
	key.zone = g->zone;
	order = g->order & 7;
	if (!refs_put(&g->refs, NAT_REFS_GONE))
		return 0;
	s = bpf_map_lookup_elem(&sources, &key);
	for (n = 0; s && n < NAT_SUBSCRIBER_BLOCKS; n++) {
		id = *(volatile __u32 *)&s->blocks[n];
		if (id && block_granule(id) == first && block_order(id) == order &&
		    address_same(block_address(id), address))
			__sync_val_compare_and_swap(&s->blocks[n], id, 0);
	}
	return 1;
}

/* block_put, and with the last port the block goes. Two functions, because the stack of a chain of
 * calls has no room for one within the other. */
static __always_inline void block_drop(__u32 address, __u32 first)
{
	if (block_put(address, first))
		block_end(address, first);
}

/* Holds the subscriber's block of that id for a port of the class, if it has one free and is one
 * of that address. */
GLOBAL int block_hold(__u32 id, __u32 index, __u32 class, const struct nat_source *s)
{
	struct nat_blocks *b = blocks_of(block_address(id));
	__u32 first = block_granule(id), order = block_order(id) & 7;
	struct nat_granule *g;

	if (!s || !b || class >= NAT_PORT_CLASSES || !address_same(block_address(id), index))
		return 0;
	if (word_find(block_ports(b, class), first, first + (1U << order) - 1) < 0)
		return 0;
	g = granule_at(b, first);
	if (refs_take(&g->refs) != GO_ON)
		return 0;
	if (g->used && g->order == order && addr_equal(g->addr, s->addr) && g->pool == s->pool &&
	    g->zone == s->zone)
		return 1;
	block_drop(block_address(id), first);
	return 0;
}

/* Gives the subscriber a block more of that order, or this very one if its id is not 0: as the
 * n-th of its blocks, if nobody else has made that since. Its one reference is the caller's. The
 * id, or 0 if the address has none left, or 1 if another CPU was faster. */
static __always_inline __u32 block_make(struct nat_source *s, __u32 n, __u32 address, __u32 order,
					__u32 larger, __u32 this)
{
	struct nat_blocks *b = blocks_of(address);
	int granule;
	__u32 id;

	if (!s || !b || n >= NAT_SUBSCRIBER_BLOCKS)
		return 0;
	granule = this ? block_take_this(this) : block_take(address, order, larger);
	if (granule < 0 || granule >= NAT_GRANULES)
		return !!this;
	id = block_id(address, granule, order);
	block_name(id, addr_word(s->addr), s->pool, s->zone, !!this);
	if (!__sync_val_compare_and_swap(&s->blocks[n], 0, id)) {
		log_block(NAT_LOG_CREATED, address, granule, granule_at(b, granule));
		return id;
	}
	*(volatile __u32 *)&granule_at(b, granule)->refs = NAT_REFS_GONE;
	block_return(b, address, granule, order);
	return 1;
}

/* Holds a block of the subscriber at that address which has a port of the class free: its id
 * without the address, or 0. The subscriber is held by its session. */
GLOBAL int source_block(const struct nat_source *s, __u32 index, __u32 class)
{
	__u32 id, n;

	for (n = 0; s && n < NAT_SUBSCRIBER_BLOCKS; n++) {
		id = *(volatile __u32 *)&s->blocks[n];
		if (id && block_hold(id, index, class, s))
			return block_place(id);
	}
	return 0;
}

/* Whether the block is of that address. */
GLOBAL int block_is_at(__u32 id, __u32 index)
{
	return address_same(block_address(id), index);
}

/* How many blocks the subscriber has at that address, and above that the first place for
 * another one, NAT_SUBSCRIBER_BLOCKS if there is none: it may have blocks at an address that its
 * pool drains or has lost. */
GLOBAL __u32 source_blocks(const struct nat_source *s, __u32 index)
{
	__u32 n, id, have = 0, empty = NAT_SUBSCRIBER_BLOCKS;

	for (n = 0; s && n < NAT_SUBSCRIBER_BLOCKS; n++) {
		id = *(volatile __u32 *)&s->blocks[n];
		if (id && block_is_at(id, index))
			have++;
		else if (!id && empty == NAT_SUBSCRIBER_BLOCKS)
			empty = n;
		OPAQUE(have); /* or the verifier follows every combination */
		OPAQUE(empty);
	}
	return empty << 16 | have;
}

/* Gives the subscriber another block, of which the one reference is the caller's: its id without
 * the address. Less than 0: none, for the reason that this is the negative of. */
GLOBAL int source_extend(struct nat_source *s, __u32 index)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	__u32 id, this, have, empty, order, larger;

	if (!s || !address || !address->block || !address->block_extra)
		return -NAT_DROP_BYPASS;
	have = source_blocks(s, index);
	empty = have >> 16;
	have &= 0xffff;
	if (have > address->block_more || empty >= NAT_SUBSCRIBER_BLOCKS)
		return -NAT_DROP_PORT_LIMIT;
	order = (have ? address->block_extra : address->block) - 1;
	larger = (have ? address->block : address->block_extra) - 1;
	this = computed_free(addr_word(s->addr), s->pool);
	if (block_address(this) != index)
		this = 0;
	if (this)
		order = block_order(this);
	id = block_make(s, empty, index, order, larger > order ? larger : order, this);
	if (!id)
		return -NAT_DROP_NO_BLOCK;
	return id == 1 ? -NAT_DROP_RACE : block_place(id);
}

/* Notes what the port that was taken counts against, and whose it is, for endpoint_give. */
static __always_inline void endpoint_hold(const struct reservation *r, __u32 held)
{
	struct nat_slot *slot = slot_at(slot_id(r->address, r->internal.class, r->port));
	struct nat_slot value = {.addr = r->internal.addr, .pool = r->internal.pool};

	if (!slot)
		return;
	*(volatile __u8 *)&slot->zone = r->internal.zone;
	slot_write(slot, value);
	*(volatile __u8 *)&slot->held = held;
}

/* Counts a port for the subscriber of r, and where ports are given in blocks, holds one of its
 * blocks: the ports to take one of, as for port_take, or NEEDS_BLOCK. 0 and less: none, for the
 * reason that this is the negative of. */
GLOBAL __s64 endpoint_count(struct reservation *r, __u32 generation)
{
	__u32 index, slot = generation % NAT_GENERATIONS, class;
	const struct nat_config *c = bpf_map_lookup_elem(&config, &slot);
	struct nat_address *address;
	struct nat_source_key host;
	struct nat_source *s;
	int reason, block;

	if (!r || !c)
		return -NAT_DROP_BYPASS;
	index = r->address;
	host = source_key(&r->internal);
	address = bpf_map_lookup_elem(&addresses, &index);
	s = bpf_map_lookup_elem(&sources, &host);
	if (!address || !s)
		return -NAT_DROP_RACE;
	if (address->flags & NAT_ADDRESS_DRAINING)
		return -NAT_DROP_NO_ADDRESS;
	reason = use_take(&s->use, USE_PORT, source_limits(s, c, generation, &class)->ports);
	if (reason == E_TOO_BIG) {
		source_refuse(r, NAT_REFUSED_PORTS);
		return -NAT_DROP_PORT_LIMIT;
	}
	if (reason != GO_ON)
		return -reason;
	if (!address->block)
		return port_range(address);
	block = source_block(s, index, r->internal.class);
	return block ? RANGE_OF_BLOCK | block_range(block) : NEEDS_BLOCK;
}

/* The same after NEEDS_BLOCK: the ports of another block. Another CPU with a packet of the
 * subscriber may make one at the same time: then of that, and if its ports are taken too, once
 * more. */
GLOBAL __s64 endpoint_extend(struct reservation *r)
{
	struct nat_source_key host;
	int block = -NAT_DROP_RACE;
	struct nat_source *s;
	__u32 try;

	if (!r)
		return -NAT_DROP_BYPASS;
	host = source_key(&r->internal);
	s = bpf_map_lookup_elem(&sources, &host);
	if (!s)
		return -NAT_DROP_RACE;
	for (try = 0; try < BLOCK_TRIES && block == -NAT_DROP_RACE; try++) {
		block = source_extend(s, r->address);
		if (block != -NAT_DROP_RACE)
			break;
		block = source_block(s, r->address, r->internal.class);
		if (!block)
			block = -NAT_DROP_RACE;
	}
	if (block > 0)
		return RANGE_OF_BLOCK | block_range(block);
	if (block == -NAT_DROP_PORT_LIMIT)
		source_refuse(r, NAT_REFUSED_PORTS);
	else if (block == -NAT_DROP_NO_BLOCK) {
		source_refuse(r, NAT_REFUSED_BLOCK);
		log_exhausted(r->internal.pool, r->address, NAT_DROP_NO_BLOCK);
	}
	source_put(s, USE_PORT);
	return block;
}

/* Takes that back. */
GLOBAL int endpoint_forget(const struct reservation *r, __u64 range)
{
	struct nat_source_key host;
	struct nat_source *s;

	if (!r)
		return 0;
	host = source_key(&r->internal);
	s = bpf_map_lookup_elem(&sources, &host);
	if (range & RANGE_OF_BLOCK)
		block_drop(r->address, (__u32)range >> 16 >> 6);
	if (s)
		source_put(s, USE_PORT);
	return 0;
}

/* Takes a port of that range; what was counted for it is taken back if there is none. */
GLOBAL int endpoint_port(struct ctx *ctx, const struct nat_flow_key *key, struct reservation *r,
			 __u32 flags, __u64 range)
{
	struct nat_address *address;
	__u32 index, want;
	int port;

	if (!key || !r)
		return NAT_DROP_BYPASS;
	index = r->address;
	address = bpf_map_lookup_elem(&addresses, &index);
	if (!address)
		return NAT_DROP_BYPASS;
	if (!range && address->flags & NAT_ADDRESS_DRAINING)
		return NAT_DROP_NO_ADDRESS;
	want = (r->internal.class & PORT_CLASS) | (flags & NAT_CONFIG_PARITY ? PORT_PARITY : 0) |
	       (range & RANGE_OF_BLOCK ? PORT_OF_BLOCK : 0);
	if (!range)
		port = port_take(ctx, key, want, index, port_range(address));
	else
		port = port_take(ctx, key, want, index, (__u32)range);
	if (port == PORT_NONE && range)
		endpoint_forget(r, range);
	if (port == PORT_NONE && want & PORT_OF_BLOCK)
		return NAT_DROP_RACE;
	if (port == PORT_NONE) {
		log_exhausted(r->internal.pool, index, NAT_DROP_NO_PORT);
		return NAT_DROP_NO_PORT;
	}
	r->port = bpf_htons(port);
	if (range)
		endpoint_hold(r, want & PORT_OF_BLOCK ? NAT_HELD_COUNTED | NAT_HELD_IN_BLOCK
						      : NAT_HELD_COUNTED);
	return GO_ON;
}

/* Takes an external port of r->address for the internal endpoint of r, whose subscriber its
 * session holds: r->port. flags is of nat_config. */
static __always_inline int endpoint_take(struct ctx *ctx, const struct nat_flow_key *key,
					 struct reservation *r, __u32 flags, __u32 generation)
{
	__s64 range = 0;

	if (flags & NAT_CONFIG_COUNT_PORTS) {
		range = endpoint_count(r, generation);
		if (range == (__s64)NEEDS_BLOCK)
			range = endpoint_extend(r);
		if (range <= 0)
			return -range;
	}
	return endpoint_port(ctx, key, r, flags, range);
}

/* The port is nobody's any more. */
GLOBAL int endpoint_give(__u32 index, __u32 class, __u32 port)
{
	struct nat_slot *slot = slot_at(slot_id(index, class, bpf_htons(port))), value;
	struct nat_mapping_key of = {};
	struct nat_source_key host;
	struct nat_blocks *b;
	struct nat_source *s;
	__u32 held, granule = port / 64;

	if (!slot)
		return 0;
	held = *(volatile __u8 *)&slot->held;
	value = slot_read(slot);
	of.addr = value.addr;
	of.pool = value.pool;
	of.zone = slot->zone;
	port_give(index, class, port, held & NAT_HELD_IN_BLOCK ? PORT_OF_BLOCK : 0);
	b = blocks_of(index);
	if (held & NAT_HELD_IN_BLOCK && b)
		block_drop(index, block_first(index, granule));
	else if (b)
		block_adopt(index, granule);
	if (held & NAT_HELD_COUNTED) {
		host = source_key(&of);
		s = bpf_map_lookup_elem(&sources, &host);
		if (s)
			source_put(s, USE_PORT);
	}
	return 0;
}

#endif
