/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the kernel's look-ups of hosts and neighbours found in the last half second or second, so
 * that not every packet repeats them.
 */
#ifndef NATKIT_HOME_H
#define NATKIT_HOME_H

#include "lib/route.h"

enum home_limit {
	ROUTE_HOME_TICKS = ROUTE_CHECK_TICKS / 2, /* the other half is verdict.h's */
	ROUTE_PROBED = 4096,                      /* entries of the map */
	ROUTE_HOMES =
		65536, /* likewise; addr_hash is one-to-one: its upper half identifies the host */
};

/* Internal hosts that were found to be where their packets come from, in the last half second, by
 * hash of the address: its upper half, 16 bits of the link (plus 1), 32 of the time. Read
 * and written whole. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, ROUTE_HOMES);
} homes SEC(".maps");

/* Whether the source of a packet that came in by that link routes back to it: for any
 * receiver of the last half second, where routes back depend on that. */
static __always_inline int route_home(struct ctx *ctx, const struct packet *packet, __u16 in)
{
	__u32 hash = addr_hash(packet->key.src), key = hash % ROUTE_HOMES;
	__u32 here = hash / ROUTE_HOMES << 16 | in;
	__u64 *home = bpf_map_lookup_elem(&homes, &key);
	__u64 known = home ? *(volatile __u64 *)home : 0;
	struct route back;

	if (known >> 32 == here && packet->now - (__u32)known < ROUTE_HOME_TICKS)
		return GO_ON;
	if (route_find(ctx, packet, packet->key.dst, packet->key.src, packet->key.zone, &back) !=
		    GO_ON ||
	    back.link != in)
		return NAT_DROP_SPOOFED;
	if (home)
		*(volatile __u64 *)home = (__u64)here << 32 | packet->now;
	return GO_ON;
}

/* Per neighbour (hash of MAC and link): when a packet last went through the stack's
 * neighbour table, which keeps the entry confirmed. A collision only delays. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 4096);
} probed SEC(".maps");

/* Whether a packet should go through the neighbour table, because none has for a
 * second: that is what makes the kernel confirm an entry, and notice a new MAC. */
static __always_inline __u32 *route_probed(__u64 hop)
{
	__u32 key = (hop ^ hop >> 24 ^ hop >> 44) % ROUTE_PROBED;

	return bpf_map_lookup_elem(&probed, &key);
}

#endif
