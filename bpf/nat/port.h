/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Chooses an external port, in a time that does not depend on how many are taken,
 * and takes it back. A free port is a bit in two levels: words of 64 ports, and a
 * summary with a bit for each word that may have one (struct nat_ports).
 *
 * Who clears a port's bit owns the port; nothing else is locked. The summary is a
 * guide that may be wrong for as long as one CPU is between two instructions:
 *
 *   take:  1) clear the port's bit            give:  1) set the port's bit
 *          2) was it the word's last?                2) set the word's summary bit
 *             clear the word's summary bit
 *          3) has the word a bit again?
 *             set the summary bit
 *
 * If a give falls between 1) and 2) of a take, its step 2 may come before the take's
 * and be lost: then the take's step 3 sees the bit and puts it right. (All of these
 * are atomic operations that return a value, which order memory on every CPU.) So
 * with nobody at work, a word with a free port always has its summary bit: the whole
 * range can be used, to the last port.
 */
#ifndef NATKIT_PORT_H
#define NATKIT_PORT_H

#include "nat/maps.h"

enum port_limit {
	PORT_TRIES = 8, /* words looked into; each is lost only to another CPU or to parity */
	PORT_DRAWS = 8, /* words drawn at random, before the next that has one is taken */
	PORT_SOCKET_TRIES = 4, /* ports with sockets passed over */
	PORT_SYSTEM = 1024,    /* ports below are kept among themselves: RFC 4787 REQ-3a */
};

#define PORT_NONE (-1)
#define PORT_EVEN 0x5555555555555555ULL

/* Index of the lowest bit that is set: the number of ones below it. BPF has no
 * instruction for it, and branches would cost the verifier a path each. */
static __always_inline __u32 bit_lowest(__u64 word)
{
	__u64 ones = (word & -word) - 1;

	ones -= ones >> 1 & 0x5555555555555555ULL;
	ones = (ones & 0x3333333333333333ULL) + (ones >> 2 & 0x3333333333333333ULL);
	ones = (ones + (ones >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return ones * 0x0101010101010101ULL >> 56;
}

static __always_inline __u64 *bit_word(struct nat_ports *ports, __u32 n)
{
	OPAQUE(n);
	return &ports->words[n / 64 & (NAT_WORDS - 1)];
}

static __always_inline __u64 *bit_summary(struct nat_ports *ports, __u32 n)
{
	OPAQUE(n);
	return &ports->summary[n / 4096 & (NAT_SUMMARY - 1)];
}

/* Takes that bit if it is free: steps 1 to 3 of take above. */
static __always_inline int bit_take(struct nat_ports *ports, __u32 n)
{
	__u64 bit = 1ULL << (n & 63), word_bit = 1ULL << (n / 64 & 63), left;
	__u64 *word = bit_word(ports, n), *summary = bit_summary(ports, n);

	left = __sync_fetch_and_and(word, ~bit);
	if (!(left & bit))
		return 0;
	if (left == bit && __sync_fetch_and_and(summary, ~word_bit) & word_bit &&
	    *(volatile __u64 *)word)
		__sync_fetch_and_or(summary, word_bit);
	__sync_fetch_and_add(&ports->free, -1);
	return 1;
}

/* Steps 1 and 2 of give. */
static __always_inline void bit_give(struct nat_ports *ports, __u32 n)
{
	__u64 bit = 1ULL << (n & 63), word_bit = 1ULL << (n / 64 & 63);

	if (__sync_fetch_and_or(bit_word(ports, n), bit) & bit)
		return; /* cannot happen: it was free */
	__sync_fetch_and_or(bit_summary(ports, n), word_bit);
	__sync_fetch_and_add(&ports->free, 1);
}

/* The first of the words from..to that may have a free bit. */
GLOBAL int word_find(const struct nat_ports *ports, __u32 from, __u32 to)
{
	__u32 n, i;
	__u64 found;

	if (!ports)
		return PORT_NONE;
	for (n = 0; n < NAT_SUMMARY; n++) {
		i = from / 64 + n;
		OPAQUE(i);
		if (i > to / 64 || i >= NAT_SUMMARY)
			return PORT_NONE;
		found = ports->summary[i];
		if (!n)
			found &= ~0ULL << (from & 63);
		if (i == to / 64)
			found &= ~0ULL >> (63 - (to & 63));
		if (found)
			return i * 64 + bit_lowest(found);
	}
	return PORT_NONE;
}

/* A random one of lo..hi, in a word that has a free bit if a few draws find one. A function
 * of its own because the stack of bits_take is all that Linux 6.1 has. */
GLOBAL int word_draw(const struct nat_ports *ports, __u32 lo, __u32 hi)
{
	__u32 random = bpf_get_prandom_u32(), n = lo, word, try;

	if (!ports)
		return lo;
	for (try = 0; try < PORT_DRAWS; try++) {
		n = lo + (__u32)((__u64)random * (hi - lo + 1) >> 32);
		word = n / 64;
		OPAQUE(word);
		if (ports->summary[word / 64 & (NAT_SUMMARY - 1)] >> (word & 63) & 1)
			break;
		random = random * 1664525 + 1013904223;
	}
	return n;
}

/*
 * Takes a free bit of lo..hi, of those that mask allows in each word: in a random word that
 * has any, or if a few draws find none, the first after a random one, round the range.
 * (The first at once would be easy to guess behind ports that are never given, as those
 * of the gateway's own connections.) Every step but the last looks at a word that
 * had what was wanted and lost it to another CPU, has it only in bits that mask or
 * range exclude (two words of a range at most), or has been made stale; a caller that masks tries
 * once more without.
 */
GLOBAL int bits_take(struct nat_ports *ports, __u32 lo, __u32 hi, __u64 mask)
{
	__u32 random, from, n, try;
	__u64 free, turned;
	int word;

	if (!ports || hi >= NAT_PORTS || lo > hi)
		return PORT_NONE;
	random = word_draw(ports, lo, hi);
	from = random / 64;
	random &= 63;
	for (try = 0; try < PORT_TRIES; try++) {
		word = word_find(ports, from, hi / 64);
		if (word < 0)
			word = word_find(ports, lo / 64, hi / 64);
		if (word < 0)
			return PORT_NONE;
		free = *(volatile __u64 *)bit_word(ports, word * 64) & mask;
		if (word == lo / 64)
			free &= ~0ULL << (lo & 63);
		if (word == hi / 64)
			free &= ~0ULL >> (63 - (hi & 63));
		if (free) {
			turned = free >> random | free << (-random & 63);
			n = word * 64 + ((bit_lowest(turned) + random) & 63);
			if (bit_take(ports, n))
				return n;
		}
		from = word < (int)(hi / 64) ? word + 1 : lo / 64;
	}
	return PORT_NONE;
}

static __always_inline struct nat_ports *port_bits(__u32 address, __u32 class)
{
	void *inner = bpf_map_lookup_elem(&free_ports, &address);

	return inner ? bpf_map_lookup_elem(inner, &class) : NULL;
}

/* Who has that port of the address; NULL if it is none of natkit's. An address
 * without ports has one slot, for the host that has all of it. index is the address's. */
static __always_inline struct nat_slot *port_slot(__u32 index, const struct nat_address *address,
						  __u32 class, __u32 port)
{
	void *inner;
	__u32 key;

	if (!address->port_count)
		return bpf_map_lookup_elem(&whole_slots, &index);
	if (class >= NAT_PORT_CLASSES || port - address->port_first >= address->port_count)
		return NULL;
	key = class * address->port_count + port - address->port_first;
	inner = bpf_map_lookup_elem(&slots, &index);
	return inner ? bpf_map_lookup_elem(inner, &key) : NULL;
}

/* Whose a slot is, is read and written whole; refs are left alone. */
static __always_inline void slot_write(struct nat_slot *slot, struct nat_slot value)
{
	__u64 word;

	__builtin_memcpy(&word, &value, sizeof(word));
	*(volatile __u64 *)slot = word;
}

static __always_inline struct nat_slot slot_read(const struct nat_slot *slot)
{
	__u64 word = *(volatile __u64 *)slot;
	struct nat_slot value = {};

	__builtin_memcpy(&value, &word, sizeof(word));
	return value;
}

/* Whether a socket of the gateway listens on the port or talks from it to the
 * packet's destination. */
GLOBAL int port_has_socket(struct ctx *ctx, const struct nat_flow_key *key, __u32 class,
			   __be32 address, __be16 port)
{
	struct bpf_sock_tuple tuple = {};
	void *socket;

	if (!key)
		return 0;
	tuple.ipv4.saddr = addr_word(key->dst);
	tuple.ipv4.sport = key->dport;
	tuple.ipv4.daddr = address;
	tuple.ipv4.dport = port;
	if (class == NAT_TCP) {
		socket =
			bpf_skc_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
		if (socket)
			bpf_sk_release(socket);
		return socket != NULL;
	}
	if (class == NAT_UDP) {
		socket = bpf_sk_lookup_udp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
		if (socket)
			bpf_sk_release(socket);
		return socket != NULL;
	}
	return 0;
}

/* A port for a packet that cannot keep its own: of its own range and parity if there is one, any
 * other if not. */
static __always_inline int port_search(struct nat_ports *ports, __u32 first, __u32 last,
				       __u32 class, __u32 wanted, __u32 parity)
{
	__u32 lo = first, hi = last;
	int port;

	if (class != NAT_ICMP) {
		if (wanted < PORT_SYSTEM && first < PORT_SYSTEM && last >= PORT_SYSTEM)
			hi = PORT_SYSTEM - 1;
		if (wanted >= PORT_SYSTEM && first < PORT_SYSTEM && last >= PORT_SYSTEM)
			lo = PORT_SYSTEM;
		if (parity) {
			port = bits_take(ports, lo, hi, wanted & 1 ? ~PORT_EVEN : PORT_EVEN);
			if (port != PORT_NONE)
				return port;
		}
	}
	port = bits_take(ports, lo, hi, ~0ULL);
	if (port == PORT_NONE && (lo != first || hi != last))
		port = bits_take(ports, first, last, ~0ULL);
	return port;
}

/* What port_take is to look for. */
enum port_want {
	PORT_CLASS = 0x00000003, /* enum nat_class */
	PORT_PARITY = 0x00000004,
	PORT_OF_BLOCK = 0x00000008, /* a bit of nat_blocks, not of free_ports */
};

static __always_inline struct nat_blocks *blocks_of(__u32 address)
{
	void *inner = bpf_map_lookup_elem(&blocks, &address);
	__u32 zero = 0;

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

/* The verifier forgets that a class was compared, if it was not just before. */
static __always_inline struct nat_ports *block_ports(struct nat_blocks *b, __u32 class)
{
	OPAQUE(class);
	if (class >= NAT_PORT_CLASSES)
		class = NAT_PORT_CLASSES - 1;
	OPAQUE(class);
	return &b->ports[class];
}

/* The bits that a port of that kind is one of. */
static __always_inline struct nat_ports *port_space(__u32 index, __u32 class, __u32 want)
{
	struct nat_blocks *b;

	if (!(want & PORT_OF_BLOCK))
		return port_bits(index, class);
	b = blocks_of(index);
	return b ? block_ports(b, class) : NULL;
}

/*
 * Takes a port of the address, from..to (16 bits each, the first above), for the source of the
 * packet, which is the caller's until it is given back: the packet's own if that is free, another
 * otherwise. The result is in host order; PORT_NONE if all are taken. want is enum port_want.
 */
GLOBAL int port_take(struct ctx *ctx, const struct nat_flow_key *key, __u32 want, __u32 index,
		     __u32 range)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_ports *ports = port_space(index, want & PORT_CLASS, want);
	__u32 wanted, try;
	int port = PORT_NONE, passed = PORT_NONE;

	if (!key || !address || !ports || !address->port_count)
		return PORT_NONE;
	if (!*(volatile __u64 *)&ports->free) /* a refusal is cheap, there may be many */
		return PORT_NONE;
	wanted = bpf_ntohs(key->sport);
	if (wanted >= range >> 16 && wanted <= (range & 0xffff) && bit_take(ports, wanted))
		port = wanted;
	for (try = 0; try < PORT_SOCKET_TRIES; try++) {
		OPAQUE(range); /* taken apart here, not kept on the stack */
		OPAQUE(want);
		if (port == PORT_NONE)
			port = port_search(ports, range >> 16, range & 0xffff, want & PORT_CLASS,
					   bpf_ntohs(key->sport), want & PORT_PARITY);
		/* Only now, so that the same one is not found again at once. */
		if (passed != PORT_NONE)
			bit_give(ports, passed);
		if (port == PORT_NONE || !(address->flags & NAT_ADDRESS_OWNED) ||
		    !port_has_socket(ctx, key, want & PORT_CLASS, addr_word(address->addr),
				     bpf_htons(port)))
			return port;
		passed = port;
		port = PORT_NONE;
	}
	if (passed != PORT_NONE)
		bit_give(ports, passed);
	return PORT_NONE;
}

/* All ports of an address, for port_take. */
static __always_inline __u32 port_range(const struct nat_address *address)
{
	return (__u32)address->port_first << 16 |
	       (__u16)(address->port_first + address->port_count - 1);
}

/* The caller's port is free again. */
static __always_inline void port_give(__u32 index, __u32 class, __u32 port, __u32 want)
{
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_ports *ports = port_space(index, class, want);
	struct nat_slot *slot = address ? port_slot(index, address, class, port) : NULL;
	struct nat_slot nobody = {};

	if (!ports || !slot)
		return;
	*(volatile __u8 *)&slot->held = 0;
	slot_write(slot, nobody); /* before the bit: then it is the next one's */
	bit_give(ports, port);
}

#endif
