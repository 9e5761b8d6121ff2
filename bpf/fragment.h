/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments, on tc. The first one has the ports, is translated like any packet, and
 * leaves a note for those that come after it. One that comes before it is dropped: to
 * keep it would let strangers fill memory.
 *
 * A packet that is too big for the way out and may be fragmented is cut here, because
 * nothing behind a redirect does it (RFC 4787 REQ-13).
 */
#ifndef NATKIT_FRAGMENT_H
#define NATKIT_FRAGMENT_H

#include "rewrite.h"
#include "session.h"

static __always_inline void fragment_key(const struct packet *packet, struct nat_fragment_key *key)
{
	key->src = packet->key.src;
	key->dst = packet->key.dst;
	key->id = packet->id;
	key->protocol = packet->key.protocol;
	key->side = packet->key.side;
}

/* Before the first fragment goes: what it becomes is what the others become. An entry
 * that is there is overwritten: identifiers are used again. */
static __noinline int fragment_first(const struct packet *packet, const struct nat_flow *flow)
{
	struct nat_fragment value = {
		.src = flow->src, .dst = flow->dst, .seen = packet->now, .flags = flow->state};
	struct nat_fragment_key key;
	long error;

	fragment_key(packet, &key);
	error = bpf_map_update_elem(&fragments, &key, &value, BPF_NOEXIST);
	if (error == E_EXIST)
		return bpf_map_update_elem(&fragments, &key, &value, BPF_EXIST)
			       ? NAT_DROP_FRAGMENTS_FULL
			       : GO_ON;
	if (error)
		return NAT_DROP_FRAGMENTS_FULL;
	if (bpf_map_push_elem(&fragment_queue, &key, 0)) {
		bpf_map_delete_elem(&fragments, &key);
		return NAT_DROP_FRAGMENTS_FULL;
	}
	return GO_ON;
}

/* What a later fragment becomes: addresses only. */
static __always_inline int fragment_later(const struct packet *packet, struct nat_flow *out)
{
	struct nat_fragment_key key;
	struct nat_fragment *first;
	const struct nat_config *c;
	__u32 slot;

	fragment_key(packet, &key);
	first = bpf_map_lookup_elem(&fragments, &key);
	c = config_get(&slot);
	if (!first || !c || packet->now - first->seen > c->timeouts[NAT_TIMEOUT_FRAGMENT])
		return NAT_DROP_FRAGMENT;
	__builtin_memset(out, 0, sizeof(*out));
	out->src = first->src;
	out->dst = first->dst;
	session_deltas(&packet->key, out);
	return GO_ON;
}

/* --- cutting ---------------------------------------------------------------------- */

enum fragment_limit {
	FRAGMENT_PACKET = 16384, /* longest packet that is cut */
	FRAGMENT_MOST = 8192,    /* payload of one fragment */
	FRAGMENT_PIECES = 256,   /* of the longest packet, for an MTU of 84 */
	FRAGMENT_CHUNK = 512,    /* bpf_csum_diff: not more at once */
};

/* A packet from its IPv4 header on, and room to read past its end. A per-CPU value has
 * at most 32 KiB. */
struct fragment_room {
	__u8 bytes[FRAGMENT_PACKET + FRAGMENT_MOST];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct fragment_room);
	__uint(max_entries, 1);
} fragment_rooms SEC(".maps");

static __always_inline struct fragment_room *fragment_room(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fragment_rooms, &zero);
}

struct cut {
	struct ctx *ctx;
	__u32 l3, header; /* where IPv4 begins, how long its header is */
	__u32 at, end;    /* of the payload: what is next, and all */
	__u32 size;       /* payload of a fragment */
	__u32 fragment;   /* the packet's own word: it may be a fragment itself */
	__u32 ifindex;    /* way out */
	int reason;
};

/* Makes the frame the next fragment, and sends a copy of it unless it is the last one. */
static long fragment_next(__u32 n, struct cut *cut)
{
	__u32 left = cut->end - cut->at, bytes = left > cut->size ? cut->size : left;
	__u32 header = cut->header, from = header + cut->at, word;
	struct fragment_room *room = fragment_room();
	__be16 length, fragment;
	struct ipv4 *ip;

	cut->reason = NAT_DROP_REWRITE;
	OPAQUE(header);
	OPAQUE(from);
	bytes--; /* Linux 6.1 does not see from "not 0" that a number is at least 1 */
	OPAQUE(bytes);
	if (!room || header < sizeof(*ip) || from > FRAGMENT_PACKET || bytes >= FRAGMENT_MOST)
		return 1;
	OPAQUE(header); /* nor that one comparison may stand for two */
	if (header > 60)
		return 1;
	bytes++;
	OPAQUE(bytes);
	word = cut->fragment + cut->at / 8;
	if (bytes < left)
		word |= IPV4_MF;
	length = bpf_htons(header + bytes);
	fragment = bpf_htons(word);
	ip = (void *)room->bytes;
	ip->check = checksum_add(ip->check, delta_word(ip->length, length) +
						    delta_word(ip->fragment, fragment));
	ip->length = length;
	ip->fragment = fragment;
	if (ctx_resize(cut->ctx, cut->l3 + header + bytes) ||
	    ctx_store(cut->ctx, cut->l3, room->bytes, header) ||
	    ctx_store(cut->ctx, cut->l3 + header, room->bytes + from, bytes))
		return 1;
	cut->reason = GO_ON;
	cut->at += bytes;
	if (bytes == left)
		return 1;
	ctx_copy(cut->ctx, cut->ifindex);
	return 0;
}

/*
 * Makes a partial checksum whole, because no device can do that for a fragment: one that
 * is the sum of the pseudo-header alone, while the sum over everything is wrong. offset is
 * the checksum's, in the room.
 */
GLOBAL int fragment_checksum(__u32 header, __u32 total, __u32 offset)
{
	struct fragment_room *room = fragment_room();
	struct ipv4 *ip = (void *)room;
	__u32 at, bytes, pseudo, whole;
	__s64 sum = 0;
	__u16 *check;

	OPAQUE(header);
	OPAQUE(offset);
	if (!room || header > 60 || total > FRAGMENT_PACKET || offset > 60 + sizeof(struct tcp))
		return NAT_DROP_REWRITE;
	for (at = 0; at < FRAGMENT_PACKET; at += FRAGMENT_CHUNK) {
		OPAQUE(total); /* or clang leaves the loop's own end out */
		if (header + at >= total)
			break;
		bytes = (total - header - at + 3) & ~3U;
		if (bytes > FRAGMENT_CHUNK)
			bytes = FRAGMENT_CHUNK;
		OPAQUE(bytes);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)(room->bytes + header + at), bytes & 1023,
				    sum);
	}
	pseudo = checksum_pseudo(addr_word(ip->src), addr_word(ip->dst), ip->protocol,
				 total - header);
	check = (__u16 *)(room->bytes + offset);
	whole = checksum_add(0xffff, (sum & 0xffff) + (sum >> 16 & 0xffff)); /* complement */
	if (*check == pseudo && checksum_add(whole, pseudo))
		*check = ip->protocol == TCP || whole ? whole : 0xffff;
	return GO_ON;
}

/*
 * Sends a packet in pieces that fit mtu; it has been translated and has its MACs. Shrinking
 * the frame by more than its headers is what makes the kernel forget that a checksum is
 * partial; what is lost then is written again from the room.
 */
static __noinline int fragment_cut(struct ctx *ctx, struct packet *packet, __u32 mtu, __u32 ifindex)
{
	struct fragment_room *room = fragment_room();
	__u32 header = packet->l4 - packet->l3, total = packet->bytes;
	struct ipv4 *ip = (void *)room;
	struct cut cut = {
		.ctx = ctx,
		.l3 = packet->l3,
		.header = header,
		.end = total - header,
		.size = (mtu - header) & ~7U,
		.ifindex = ifindex,
	};
	int reason = GO_ON;

	OPAQUE(total);
	if (!room || total > FRAGMENT_PACKET - 4 || mtu < header + 8)
		return NAT_DROP_TOO_BIG;
	OPAQUE(total);
	if (total <= 128)
		return NAT_DROP_TOO_BIG;
	if (cut.size > FRAGMENT_MOST)
		cut.size = FRAGMENT_MOST;
	*(__u32 *)(room->bytes + (total & ~3U)) = 0; /* an odd end is summed with zeros */
	if (ctx_load(ctx, packet->l3, room->bytes, total))
		return NAT_DROP_REWRITE;
	cut.fragment = bpf_ntohs(ip->fragment);
	if (!(cut.fragment & (IPV4_MF | IPV4_OFFSET)) && packet->class == NAT_TCP)
		reason = fragment_checksum(header, total,
					   header + __builtin_offsetof(struct tcp, check));
	else if (!(cut.fragment & (IPV4_MF | IPV4_OFFSET)) && packet->class == NAT_UDP)
		reason = fragment_checksum(header, total,
					   header + __builtin_offsetof(struct udp, check));
	if (reason != GO_ON)
		return reason;
	if (ctx_shrink(ctx, 128 - sizeof(*ip)))
		return NAT_DROP_REWRITE;
	bpf_loop(FRAGMENT_PIECES, fragment_next, &cut, 0);
	return cut.reason;
}

#endif
