/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hash tables that lead from a key to the number of the element that has it: of flows to
 * their session (flows.h), of internal endpoints to their slot (mapping.h). A table is an
 * array of struct nat_bucket, each a cache line; the elements lie elsewhere, with their
 * keys.
 *
 * A key's entry is in its home bucket or, if that was full, in one of the next fifteen of a
 * sequence that leaps about, because neighbours of full buckets would soon be full as well.
 * The home has how far to look, so what is not there is mostly found out by reading one
 * line. An entry has how far it is from home, so that an insert finds out when that has
 * become less.
 *
 *   look-up   takes no lock. An entry that it finds may be out of date a moment later, so
 *             the element decides whether it has the key (the caller's table_is).
 *   insert    holds the home bucket's lock: of equal keys the second is refused. An empty
 *             entry may be wanted from several homes, so it is taken by compare-and-exchange.
 *             Only here entries of that home appear, and only here its reach changes.
 *   remove    is of whoever inserted, or GC. It takes no lock: nobody else writes an
 *             entry that is in use.
 *
 * A lock's holder is not interrupted by another user on its CPU: all programs run with
 * softirqs off. Who doesn't get it after TABLE_TRIES gives up.
 */
#ifndef NATKIT_TABLE_H
#define NATKIT_TABLE_H

#include "lib/control.h"

enum table_limit {
	TABLE_REACH = 16, /* buckets, home included, that may have an entry */
	TABLE_TRIES = 256,
	TABLE_VALUE_BITS = 40,
	TABLE_DISTANCE_BITS = 4,
};

/*
 * An entry is 0, or a value, above it how many buckets it is from home, and above that a
 * tag: bits of the hash that don't select the bucket. The lowest of the tag is always 1, so no
 * entry in use is 0. Entries outlive the programs that made them, so a change of this, or of
 * table_hash or table_bucket, raises NAT_ABI.
 */
#define TABLE_VALUE ((1ULL << TABLE_VALUE_BITS) - 1)
#define TABLE_TAG (1ULL << (TABLE_VALUE_BITS + TABLE_DISTANCE_BITS))

/* Whether the element of that value has the key. */
typedef int table_is(const void *key, __u64 value);

/* The entry of the bucket that has the hash's tag and the key, or 0: table_within, in a function
 * of its own, so that the verifier follows the loop once and not for each bucket. */
typedef __u64 table_in(const struct nat_bucket *bucket, __u64 hash, const void *key);

/* Of a key of two words. Without knowing the seed nobody can choose keys that meet in one
 * bucket. Multiplication carries what differs up, the shifts bring it down again. */
static __always_inline __u64 table_hash(const struct nat_control *c, __u64 a, __u64 b)
{
	a = (a ^ c->seed[0]) * 0x9e3779b97f4a7c15ULL;
	b = (b ^ c->seed[1]) * 0xd6e8feb86659fd93ULL;
	a ^= a >> 32;
	b ^= b >> 29;
	a = (a + b) * 0xff51afd7ed558ccdULL;
	return a ^ a >> 32;
}

static __always_inline __u64 table_entry(__u64 hash, __u32 distance, __u64 value)
{
	return (hash & -TABLE_TAG) | TABLE_TAG | (__u64)distance << TABLE_VALUE_BITS | value;
}

static __always_inline __u64 table_value(__u64 entry)
{
	return entry & TABLE_VALUE;
}

static __always_inline int table_tagged(__u64 entry, __u64 hash)
{
	return (entry ^ table_entry(hash, 0, 0)) < TABLE_TAG;
}

static __always_inline __u32 table_distance(__u64 entry)
{
	return entry >> TABLE_VALUE_BITS & (TABLE_REACH - 1);
}

static __always_inline __u64 table_read(const __u64 *entry)
{
	return *(const volatile __u64 *)entry;
}

/* The bucket that is that far from the hash's home. The first one beside it shares its pair
 * of cache lines, which processors read together. No two homes have the same bucket at the
 * same distance. */
static __always_inline struct nat_bucket *table_bucket(void *table, __u32 mask, __u64 hash,
						       __u32 distance)
{
	__u32 index = ((__u32)hash ^ distance ^ (distance >> 1) * 0x9e3779b1) & mask;

	return bpf_map_lookup_elem(table, &index);
}

/*
 * The first entry of the home bucket that has the hash's tag, for who can't wait: nearly
 * always it is the key's. 0: none. table_find looks at all.
 */
static __always_inline __u64 table_first(const struct nat_bucket *home, __u64 hash)
{
	__u64 entry;
	__u32 i;

#pragma unroll
	for (i = 0; i < NAT_BUCKET_ENTRIES; i++) {
		entry = table_read(&home->entries[i]);
		if (table_tagged(entry, hash))
			return entry;
	}
	return 0;
}

static __always_inline __u64 table_within(const struct nat_bucket *bucket, __u64 hash, table_is *is,
					  const void *key)
{
	__u64 entry;
	__u32 i;

	for (i = 0; i < NAT_BUCKET_ENTRIES; i++) {
		entry = table_read(&bucket->entries[i]);
		if (table_tagged(entry, hash) && is(key, table_value(entry)))
			return entry;
	}
	return 0;
}

/* The key's entry, or 0. In a function of its own: it has a loop. */
static __always_inline __u64 table_find(void *table, __u32 mask, __u64 hash, table_in *in,
					const void *key)
{
	struct nat_bucket *bucket = table_bucket(table, mask, hash, 0);
	__u32 reach = bucket ? *(volatile __u32 *)&bucket->reach : 0, distance;
	__u64 entry;

	for (distance = 0; distance < TABLE_REACH && distance <= reach; distance++) {
		bucket = table_bucket(table, mask, hash, distance);
		entry = bucket ? in(bucket, hash, key) : 0;
		if (entry)
			return entry;
	}
	return 0;
}

GLOBAL int table_lock(struct nat_bucket *home)
{
	__u32 try;

	if (!home)
		return 0;
	for (try = 0; try < TABLE_TRIES; try++)
		if (!__sync_val_compare_and_swap(&home->lock, 0, 1))
			return 1;
	return 0;
}

/* An exchange, because it orders what was written before; a plain store doesn't on arm64. */
static __always_inline void table_unlock(struct nat_bucket *home)
{
	__u32 was = __sync_lock_test_and_set(&home->lock, 0);

	OPAQUE(was);
}

/* Whether the bucket has an entry that is that far from its home. */
GLOBAL int table_has(const struct nat_bucket *bucket, __u32 distance)
{
	__u64 entry;
	__u32 i;

	if (!bucket)
		return 0;
	for (i = 0; i < NAT_BUCKET_ENTRIES; i++) {
		entry = table_read(&bucket->entries[i]);
		if (entry && table_distance(entry) == distance)
			return 1;
	}
	return 0;
}

/* Lets look-ups look less far if the home's farthest entries are gone. The caller has its lock. */
static __always_inline void table_shorten(void *table, __u32 mask, __u64 hash,
					  struct nat_bucket *home)
{
	struct nat_bucket *bucket;
	__u32 reach;

	for (reach = TABLE_REACH - 1; reach > 0; reach--) {
		if (home->reach != reach)
			continue;
		bucket = table_bucket(table, mask, hash, reach);
		if (!bucket || table_has(bucket, reach))
			return;
		*(volatile __u32 *)&home->reach = reach - 1;
	}
}

/* Takes the first empty entry of a bucket that is that far from the home. How far to look is
 * written first: who doesn't look that far must not miss what is there. */
GLOBAL int table_put(struct nat_bucket *bucket, struct nat_bucket *home, __u64 hash, __u32 distance,
		     __u64 value)
{
	__u32 i;

	if (!bucket || !home)
		return E_TOO_BIG;
	for (i = 0; i < NAT_BUCKET_ENTRIES; i++) {
		if (table_read(&bucket->entries[i]))
			continue;
		if (home->reach < distance)
			*(volatile __u32 *)&home->reach = distance;
		if (!__sync_val_compare_and_swap(&bucket->entries[i], 0,
						 table_entry(hash, distance, value)))
			return 0;
	}
	return E_TOO_BIG;
}

/* Takes the first empty entry within reach of the home, whose lock the caller has. */
static __always_inline int table_add(void *table, __u32 mask, __u64 hash, struct nat_bucket *home,
				     __u64 value)
{
	struct nat_bucket *bucket;
	__u32 distance;

	for (distance = 0; distance < TABLE_REACH; distance++) {
		bucket = table_bucket(table, mask, hash, distance);
		if (!bucket)
			return E_TOO_BIG;
		if (!table_put(bucket, home, hash, distance, value))
			return 0;
	}
	return E_TOO_BIG;
}

/*
 * Makes the key lead to value, whose element must be complete: it is found from now on.
 * E_EXIST: the key leads somewhere already. E_TOO_BIG: no room within reach. E_BUSY: the
 * lock was not to be had. In a function of its own, like table_find.
 */
static __always_inline int table_insert(void *table, __u32 mask, __u64 hash, __u64 value,
					table_in *in, const void *key)
{
	struct nat_bucket *home = table_bucket(table, mask, hash, 0);
	int error = E_EXIST;

	if (!home)
		return E_TOO_BIG;
	if (!table_lock(home))
		return E_BUSY;
	if (!table_find(table, mask, hash, in, key)) {
		table_shorten(table, mask, hash, home);
		error = table_add(table, mask, hash, home, value);
	}
	table_unlock(home);
	return error;
}

/* Makes the hash's key lead to value no more. The element may be used for another key when
 * no look-up can be at it any more, which is the caller's to know. */
static __always_inline void table_remove(void *table, __u32 mask, __u64 hash, __u64 value)
{
	struct nat_bucket *bucket;
	__u32 distance, i;
	__u64 entry;

	for (distance = 0; distance < TABLE_REACH; distance++) {
		bucket = table_bucket(table, mask, hash, distance);
		if (!bucket)
			return;
		entry = table_entry(hash, distance, value);
		for (i = 0; i < NAT_BUCKET_ENTRIES; i++)
			if (table_read(&bucket->entries[i]) == entry) {
				__sync_val_compare_and_swap(&bucket->entries[i], entry, 0);
				return;
			}
	}
}

#endif
