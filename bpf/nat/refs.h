/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts of references: what is counted lives as long as somebody holds it. A reference is
 * taken by compare-and-exchange, so never from what is being removed; since the memory may be
 * another one's by then, whoever takes one compares its identity after that.
 */
#ifndef NATKIT_REFS_H
#define NATKIT_REFS_H

#include "nat/abi.h"

enum refs_limit {
	REFS_TRIES = 16, /* lost compare-and-exchanges before the packet is given up */
};

static __always_inline __u32 refs_read(const __u32 *refs)
{
	return *(const volatile __u32 *)refs;
}

static __always_inline int refs_take(__u32 *refs)
{
	__u32 try, old, new;

	for (try = 0; try < REFS_TRIES; try++) {
		old = refs_read(refs);
		if (old & NAT_REFS_GONE || (old & NAT_REFS_COUNT) == NAT_REFS_COUNT)
			return NAT_DROP_RACE;
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

#endif
