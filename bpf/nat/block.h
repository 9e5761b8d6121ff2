/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Port blocks of an external address: which of its granules, 64 ports of all classes, are
 * whose. A block is 1 to 64 granules in one word of nat_blocks.free, so that whoever
 * clears their bits, by one compare-and-exchange, has the block, and no other lock is needed.
 *
 * A block lives as long as a port in it is in use or in hold-down: its first granule counts
 * them, and is GONE before the bits are given back (see mapping.h for such references). Blocks
 * of another size than today's stay as they are until then: granules know what they are in.
 *
 * Ports that were given before the address had blocks have their bits in free_ports. When
 * all of a granule's are there again, it moves: block_adopt.
 */
#ifndef NATKIT_BLOCK_H
#define NATKIT_BLOCK_H

#include "nat/count.h"
#include "nat/refs.h"
#include "nat/port.h"
#include "nat/log.h"

enum block_limit {
	BLOCK_WORDS = NAT_GRANULES / 64,
	BLOCK_PASSES = 4, /* over the words of an address */
	BLOCK_NONE = -1,
};

static __always_inline __u32 block_id(__u32 address, __u32 granule, __u32 order)
{
	return address << NAT_BLOCK_ADDRESS_SHIFT | granule << NAT_BLOCK_GRANULE_SHIFT |
	       (order + 1);
}

static __always_inline __u32 block_address(__u32 id)
{
	return id >> NAT_BLOCK_ADDRESS_SHIFT;
}

static __always_inline __u32 block_granule(__u32 id)
{
	return id >> NAT_BLOCK_GRANULE_SHIFT & (NAT_GRANULES - 1);
}

static __always_inline __u32 block_order(__u32 id)
{
	return (id & NAT_BLOCK_ORDER) - 1;
}

/* An id without its address: a number that is more than 0. */
static __always_inline int block_place(__u32 id)
{
	return id & ((1 << NAT_BLOCK_ADDRESS_SHIFT) - 1);
}

/* The ports of a block, for port_take. */
static __always_inline __u32 block_range(__u32 id)
{
	__u32 first = block_granule(id) * 64;

	return first << 16 | (first + (64 << (block_order(id) & 7)) - 1);
}

static __always_inline struct nat_granule *granule_at(struct nat_blocks *b, __u32 n)
{
	OPAQUE(n);
	return &b->granules[n & (NAT_GRANULES - 1)];
}

static __always_inline __u64 *granule_word(struct nat_blocks *b, __u32 n)
{
	OPAQUE(n);
	return &b->free[n / 64 & (BLOCK_WORDS - 1)];
}

static __always_inline __u64 *granules_kept(struct nat_blocks *b, __u32 n)
{
	OPAQUE(n);
	return &b->kept[n / 64 & (BLOCK_WORDS - 1)];
}

/* Of a word of free granules those that others than computed blocks may have. */
static __always_inline __u64 granules_left(struct nat_blocks *b, __u32 n, __u64 free)
{
	return free & ~*(volatile __u64 *)granules_kept(b, n);
}

/* The bits of a block in its word. */
static __always_inline __u64 block_bits(__u32 granule, __u32 order)
{
	__u64 ones = order >= 6 ? ~0ULL : (1ULL << (1 << order)) - 1;

	return ones << (granule & 63);
}

/* Of a word of free granules the bits at which a block of that order may begin: it takes two of
 * the order below, the first at an even place. Without branches, of which the verifier would
 * follow all. */
static __always_inline __u64 block_starts(__u64 free, __u32 order)
{
	__u64 starts = free, aligned = ~0ULL;

#define BLOCK_DOUBLE(n, mask)                                                                      \
	starts &= starts >> (((n) - order) >> 31 << (n));                                          \
	aligned &= (mask) | ((__u64)(((n) - order) >> 31) - 1)

	BLOCK_DOUBLE(0U, 0x5555555555555555ULL);
	BLOCK_DOUBLE(1U, 0x1111111111111111ULL);
	BLOCK_DOUBLE(2U, 0x0101010101010101ULL);
	BLOCK_DOUBLE(3U, 0x0001000100010001ULL);
	BLOCK_DOUBLE(4U, 0x0000000100000001ULL);
	BLOCK_DOUBLE(5U, 1ULL);
#undef BLOCK_DOUBLE
	return starts & aligned;
}

/* Of these starts those of which no block of the larger order has both: small blocks are to leave
 * large ones whole. */
static __always_inline __u64 block_scraps(__u64 free, __u32 order, __u32 larger)
{
	__u64 starts = block_starts(free, order), whole = block_starts(free, larger);

	if (larger >= 6 && whole)
		return 0;
	if (larger < 6)
		whole *= (1ULL << (1 << larger)) - 1; /* all granules of each */
	return starts & ~whole;
}

struct block_search {
	struct nat_blocks *b;
	__u32 from, order, larger;
	int found; /* first granule */
};

/* Takes the granules of a block of the n-th word, if it has one free; 1 ends. */
static long block_in_word(__u32 n, struct block_search *search)
{
	__u32 word = (search->from + n) % BLOCK_WORDS, order = search->order & 7, at;
	__u32 random = bpf_get_prandom_u32() & 63, larger = search->larger & 7;
	__u64 *free, old, left, starts, turned;

	if (n < BLOCK_WORDS && larger <= order)
		return 0;
	free = granule_word(search->b, word * 64);
	old = *(volatile __u64 *)free;
	left = granules_left(search->b, word * 64, old);
	starts = n < BLOCK_WORDS ? block_scraps(left, order, larger) : block_starts(left, order);
	if (!starts)
		return 0;
	turned = starts >> random | starts << (-random & 63);
	at = (bit_lowest(turned) + random) & 63;
	if (__sync_val_compare_and_swap(free, old, old & ~block_bits(at, order)) != old)
		return 0;
	__sync_fetch_and_add(&search->b->count, -(1ULL << order));
	search->found = word * 64 + at;
	return 1;
}

/* Takes the granules of a block of that order: the first granule, or BLOCK_NONE. First of what
 * can't be a block of the larger order, then of anything, and again for what was lost to another
 * CPU: a few times sixteen words, however full the address is. */
GLOBAL int block_take(__u32 address, __u32 order, __u32 larger)
{
	struct block_search search = {.b = blocks_of(address),
				      .from = bpf_get_prandom_u32(),
				      .order = order,
				      .larger = larger,
				      .found = BLOCK_NONE};

	if (!search.b || order >= NAT_BLOCK_ORDERS || larger >= NAT_BLOCK_ORDERS)
		return BLOCK_NONE;
	bpf_loop(BLOCK_PASSES * BLOCK_WORDS, block_in_word, &search, 0);
	return search.found;
}

/* Whether the address has a free block of that order. */
GLOBAL int block_fits(__u32 address, __u32 order)
{
	struct nat_blocks *b = blocks_of(address);
	__u32 n;

	if (!b || order >= NAT_BLOCK_ORDERS)
		return 0;
	for (n = 0; n < BLOCK_WORDS; n++)
		if (block_starts(
			    granules_left(b, n * 64, *(volatile __u64 *)granule_word(b, n * 64)),
			    order))
			return 1;
	return 0;
}

/* Whether all granules of a block are free. */
static __always_inline int block_is_free(struct nat_blocks *b, __u32 granule, __u32 order)
{
	__u64 bits = block_bits(granule, order);

	return (*(volatile __u64 *)granule_word(b, granule) & bits) == bits;
}

/* Takes the granules of this very block: its first one, or BLOCK_NONE. */
GLOBAL int block_take_this(__u32 id)
{
	struct nat_blocks *b = blocks_of(block_address(id));
	__u32 granule = block_granule(id), order = block_order(id) & 7, try;
	__u64 bits = block_bits(granule, order), *free, old;

	if (!b)
		return BLOCK_NONE;
	free = granule_word(b, granule);
	for (try = 0; try < BLOCK_PASSES; try++) {
		old = *(volatile __u64 *)free;
		if ((old & bits) != bits)
			return BLOCK_NONE;
		if (__sync_val_compare_and_swap(free, old, old & ~bits) == old) {
			__sync_fetch_and_add(&b->count, -(1ULL << order));
			return granule;
		}
	}
	return BLOCK_NONE;
}

/* The granules are in no block any more, or for the first time. */
static __always_inline void block_free(struct nat_blocks *b, __u32 address, __u32 granule,
				       __u32 order)
{
	__u32 zero = 0;
	struct nat_ports *hints = bpf_map_lookup_elem(&free_addresses, &zero);

	__sync_fetch_and_or(granule_word(b, granule), block_bits(granule, order));
	__sync_fetch_and_add(&b->count, 1ULL << order);
	if (hints && address < NAT_MAX_ADDRESSES)
		bit_give(hints, address);
}

/* Writes whose the block is that the caller has taken, in its first granule, and holds it once. */
GLOBAL int block_name(__u32 id, __u32 host, __u32 pool, __u32 zone, __u32 computed)
{
	struct nat_blocks *b = blocks_of(block_address(id));
	struct nat_granule *g;

	if (!b)
		return 0;
	g = granule_at(b, block_granule(id));
	g->addr = addr_of(host);
	g->since_ns = bpf_ktime_get_ns();
	g->pool = pool;
	g->zone = zone;
	g->order = block_order(id) & 7;
	g->computed = computed;
	*(volatile __u8 *)&g->used = 1;
	*(volatile __u32 *)&g->refs = 1;
	return 1;
}

/* Gives back the granules of a block that nobody holds. */
static __always_inline void block_return(struct nat_blocks *b, __u32 address, __u32 first,
					 __u32 order)
{
	*(volatile __u8 *)&granule_at(b, first)->used = 0;
	block_free(b, address, first, order & 7);
}

/* The block of which nobody holds a port, and which its subscriber does not have any more, ends. */
GLOBAL int block_end(__u32 address, __u32 first)
{
	struct nat_blocks *b = blocks_of(address);

	if (!b)
		return 0;
	log_block(NAT_LOG_ENDED, address, first, granule_at(b, first));
	block_return(b, address, first, granule_at(b, first)->order);
	return 1;
}

/* The first granule of the block that a granule is in, which somebody holds. Only of one order
 * there is a block that begins where it would. */
GLOBAL __u32 block_first(__u32 address, __u32 granule)
{
	struct nat_blocks *b = blocks_of(address);
	struct nat_granule *g;
	__u32 order, first;

	for (order = 0; b && order < NAT_BLOCK_ORDERS; order++) {
		first = granule & -(1U << order);
		g = granule_at(b, first);
		if (g->used && g->order == order)
			return first;
	}
	return granule;
}

/* --- granules of an address that had no blocks ----------------------------------------- */

static __always_inline __u64 bit_count(__u64 word)
{
	word -= word >> 1 & 0x5555555555555555ULL;
	word = (word & 0x3333333333333333ULL) + (word >> 2 & 0x3333333333333333ULL);
	word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return word * 0x0101010101010101ULL >> 56;
}

/* Takes all free bits of a granule: bit_take for a word. */
static __always_inline __u64 bits_remove(struct nat_ports *ports, __u32 granule)
{
	__u64 *word = bit_word(ports, granule * 64), *summary = bit_summary(ports, granule * 64);
	__u64 word_bit = 1ULL << (granule & 63), had = __sync_fetch_and_and(word, 0);

	if (!had)
		return 0;
	if (__sync_fetch_and_and(summary, ~word_bit) & word_bit && *(volatile __u64 *)word)
		__sync_fetch_and_or(summary, word_bit);
	__sync_fetch_and_add(&ports->free, -bit_count(had));
	return had;
}

static __always_inline void bits_add(struct nat_ports *ports, __u32 granule, __u64 bits)
{
	if (!bits)
		return;
	__sync_fetch_and_or(bit_word(ports, granule * 64), bits);
	__sync_fetch_and_or(bit_summary(ports, granule * 64), 1ULL << (granule & 63));
	__sync_fetch_and_add(&ports->free, bit_count(bits));
}

/* Moves the free ports of a class, if all of them are free. */
GLOBAL int bits_move(__u32 address, __u32 class, __u32 granule)
{
	struct nat_blocks *b = blocks_of(address);
	struct nat_ports *from = port_bits(address, class);
	__u64 have, want;

	if (!b || !from || class >= NAT_PORT_CLASSES)
		return 0;
	granule &= NAT_GRANULES - 1;
	OPAQUE(granule);
	want = b->given[class & 3][granule & (NAT_WORDS - 1)];
	have = bits_remove(from, granule);
	if (have != want) {
		bits_add(from, granule, have);
		return 0;
	}
	bits_add(block_ports(b, class), granule, have);
	return 1;
}

/* Puts back what bits_move has moved. */
GLOBAL int bits_return(__u32 address, __u32 class, __u32 granule)
{
	struct nat_blocks *b = blocks_of(address);
	struct nat_ports *to = port_bits(address, class);

	if (b && to && class < NAT_PORT_CLASSES)
		bits_add(to, granule, bits_remove(block_ports(b, class), granule));
	return 0;
}

/*
 * A granule of ports that were given one by one is for blocks, if nobody has any of its ports. Of
 * two that try it at once only one gets the first class; so neither fails because of the other.
 */
GLOBAL int block_adopt(__u32 address, __u32 granule)
{
	struct nat_blocks *b = blocks_of(address);
	__u32 class;

	granule &= NAT_GRANULES - 1;
	if (!b)
		return 0;
	OPAQUE(granule);
	if (!b->given[NAT_TCP][granule & (NAT_WORDS - 1)] ||
	    !b->given[NAT_UDP][granule & (NAT_WORDS - 1)])
		return 0;
	for (class = 0; class < NAT_PORT_CLASSES; class ++) {
		if (bits_move(address, class, granule))
			continue;
		if (class > 0)
			bits_return(address, 0, granule);
		if (class > 1)
			bits_return(address, 1, granule);
		return 0;
	}
	block_free(b, address, granule, 0);
	return 1;
}

#endif
