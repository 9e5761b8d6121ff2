// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Lets user space change free ports while packets take theirs: from there a map's value can
// only be replaced whole, and what packets take at the same time would be lost. Run by
// BPF_PROG_TEST_RUN; the packet is a list of struct change, after the 14 bytes that a frame
// must have.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/block.h"

enum ports_limit { PORTS_CHANGES = 128 };

struct change {
	__u32 index; /* of the address */
	__u32 class; /* NAT_PORT_CLASSES: the address itself, in free_addresses */
	__u32 port;
	__u32 give; /* 1: free; 0: not to be given */
};

/* Whether a host has the whole address. */
static __always_inline int address_used(__u32 index)
{
	struct nat_slot *slot = bpf_map_lookup_elem(&whole_slots, &index);

	return slot && slot_read(slot).used;
}

/* The n-th change. 1: made; 0: not, since a port that is in use can't be taken, nor a
 * free one given; negative: there are no more. */
GLOBAL int port_change(struct ctx *ctx, __u32 n)
{
	struct nat_ports *ports;
	struct change c;
	__u32 zero = 0;

	if (bpf_skb_load_bytes(ctx, 14 + n * sizeof(c), &c, sizeof(c)))
		return -1;
	if (c.class < NAT_PORT_CLASSES)
		ports = port_bits(c.index, c.class);
	else
		ports = bpf_map_lookup_elem(&free_addresses, &zero);
	if (!ports || c.port >= NAT_PORTS)
		return 0;
	if (!c.give)
		return bit_take(ports, c.port);
	if (c.class >= NAT_PORT_CLASSES && address_used(c.port))
		return 0;
	if (*(volatile __u64 *)bit_word(ports, c.port) & 1ULL << (c.port & 63))
		return 0;
	bit_give(ports, c.port);
	return 1;
}

/* How many were changed. */
SEC("tc")
int ports_change(struct ctx *ctx)
{
	int n, change, done = 0;

	for (n = 0; n < PORTS_CHANGES; n++) {
		change = port_change(ctx, n);
		if (change < 0)
			break;
		done += change;
	}
	return done;
}

struct adopt {
	__u32 index;    /* of the address */
	__u32 granules; /* the first ones, that many */
	__u32 done;
};

static long adopt_one(__u32 granule, struct adopt *a)
{
	a->done += block_adopt(a->index, granule);
	return 0;
}

/* Ports of an address that were given one by one are for blocks from now on, by granules of which
 * nobody has a port. How many. */
SEC("tc")
int blocks_adopt(struct ctx *ctx)
{
	struct adopt a = {};

	if (bpf_skb_load_bytes(ctx, 14, &a, 2 * sizeof(__u32)) || a.granules > NAT_GRANULES)
		return -1;
	bpf_loop(a.granules, adopt_one, &a, 0);
	return a.done;
}

struct keep {
	__u32 index; /* of the address */
	__u32 first; /* granule */
	__u32 granules;
};

/* Of the 64 granules from `at` on those below n. Without branches, of which the verifier would
 * follow all. */
static __always_inline __u64 granules_below(__u32 n, __u32 at)
{
	__s64 many = (__s64)n - at;
	__u64 some = ~(many >> 63), all = ~((many - 64) >> 63);

	return (((1ULL << (many & 63)) - 1) & some) | all;
}

/* Writes which granules of an address are of computed blocks: those of the n-th element. */
GLOBAL int keep_granules(struct ctx *ctx, __u32 n)
{
	struct nat_blocks *b;
	__u32 word, at;
	struct keep k;
	__u64 bits;

	if (bpf_skb_load_bytes(ctx, 14 + n * sizeof(k), &k, sizeof(k)))
		return -1;
	b = blocks_of(k.index);
	if (!b)
		return 0;
	for (word = 0; word < BLOCK_WORDS; word++) {
		at = word * 64;
		OPAQUE(at);
		bits = granules_below(k.first + k.granules, at) & ~granules_below(k.first, at);
		*(volatile __u64 *)granules_kept(b, at) = bits;
	}
	return 1;
}

/* The packet is a list of struct keep: how many there were. */
SEC("tc")
int blocks_keep(struct ctx *ctx)
{
	int n;

	for (n = 0; n < PORTS_CHANGES; n++)
		if (keep_granules(ctx, n) < 0)
			break;
	return n;
}

char _license[] SEC("license") = "Dual BSD/GPL";
