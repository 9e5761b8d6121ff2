/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments, on tc. The first one has the ports, is translated like any packet, and
 * leaves a note for those that come after it. Those that come before it are kept and
 * sent when it has gone: as many as the largest datagram has, in room that is the same for all.
 *
 * A packet that is too big for the egress interface and may be fragmented is cut here, because
 * nothing behind a redirect does it (RFC 4787 REQ-13).
 */
#ifndef NATKIT_FRAGMENT_H
#define NATKIT_FRAGMENT_H

#include "lib/rewrite.h"
#include "nat/session.h"
#include "nat/zone.h"

static __always_inline void fragment_key(const struct packet *packet, struct nat_fragment_key *key)
{
	key->src = packet->key.src;
	key->dst = packet->key.dst;
	key->id = packet->id;
	key->protocol = packet->key.protocol;
	key->side = packet->key.side;
	key->zone = packet->key.zone;
	__builtin_memset(key->zero, 0, sizeof(key->zero));
}

/* Whether that was longer ago than the time-out; the tick may be another CPU's, and ahead. */
static __always_inline int fragment_old(const struct packet *packet, __u32 seen, __u32 timeout)
{
	return (__s32)(packet->now - seen) > (__s32)timeout;
}

/* --- identification ---------------------------------------------------------------- */

enum fragment_id_limit { FRAGMENT_COUNTERS = 4096 };

/* Of datagrams that have left in fragments, by a hash of source, receiver and protocol. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, FRAGMENT_COUNTERS);
} fragment_ids SEC(".maps");

/*
 * Identification of a datagram that leaves in fragments: RFC 6864 section 5.3.1. Hosts behind one
 * external address choose theirs without knowing of each other, and a receiver would put
 * fragments of two datagrams together. With a counter no datagram has that of another until
 * 65535 later ones; addresses whose hash is the same share one. The seed hides how many there
 * were. 0: it stays as it is, since src is the external address of a map, which one host has.
 */
GLOBAL __u32 fragment_identification(__be32 src, __be32 dst, __u32 protocol)
{
	struct nat_control *c = control_get();
	__u64 hash = c ? table_hash(c, (__u64)src << 32 | dst, protocol) : 0;
	__u32 index = hash % FRAGMENT_COUNTERS, *counter, id, slot = 0;
	const struct nat_config *config = config_get(&slot);

	if (config && rule_owns(addr_of(src), config->lookups, slot))
		return 0;
	counter = bpf_map_lookup_elem(&fragment_ids, &index);
	if (!counter)
		return 0;
	id = (__sync_fetch_and_add(counter, 1) + (__u32)(hash >> 32)) & 0xffff;
	if (!id)
		id = (__sync_fetch_and_add(counter, 1) + (__u32)(hash >> 32)) & 0xffff;
	return id;
}

/* Writes the identification into a frame that has been translated. */
static __always_inline int fragment_identify(struct ctx *ctx, const struct packet *packet,
					     __be16 id)
{
	struct ipv4 ip;

	if (ctx_load(ctx, packet->l3, &ip, sizeof(ip)))
		return NAT_DROP_REWRITE;
	ip.check = checksum_add(ip.check, delta_word(ip.id, id));
	ip.id = id;
	return ctx_store(ctx, packet->l3, &ip, sizeof(ip)) ? NAT_DROP_REWRITE : GO_ON;
}

/* --- the first and the later ones ----------------------------------------------------- */

/* Makes room for one datagram more: the oldest gives way, whose fragments have mostly come by now.
 * So who fills the table, with first fragments alone, keeps no other datagram from passing. GC may
 * take the entry out at the same time, and another one then goes in its place. */
GLOBAL int fragment_evict(void)
{
	struct nat_fragment_key key = {};

	if (!bpf_map_pop_elem(&fragment_queue, &key))
		bpf_map_delete_elem(&fragments, &key);
	return 0;
}

/* Notes what a datagram's fragments become. An entry that is there is overwritten:
 * identifiers are used again. But a first fragment may come twice, and has to stay one. */
GLOBAL int fragment_note(const struct packet *packet, __be32 src, __be32 dst, __u32 zone,
			 __u32 excluded)
{
	struct nat_fragment value = {
		.src = addr_of(src), .dst = addr_of(dst), .excluded = excluded, .zone = zone};
	const struct nat_config *c;
	struct nat_fragment_key key;
	struct nat_fragment *old;
	__u32 slot;
	int error; /* before Linux 6.4 only 32 bits of it are the error */

	c = config_get(&slot);
	if (!packet || !c)
		return NAT_DROP_BYPASS;
	value.seen = packet->now;
	fragment_key(packet, &key);
	if (!excluded && packet->key.side == NAT_INSIDE) {
		old = bpf_map_lookup_elem(&fragments, &key);
		if (old && addr_word(old->src) == src && addr_word(old->dst) == dst &&
		    !fragment_old(packet, old->seen, c->timeouts[NAT_TIMEOUT_FRAGMENT]))
			value.id = old->id;
		else
			value.id = bpf_htons(fragment_identification(src, dst, key.protocol));
	}
	error = bpf_map_update_elem(&fragments, &key, &value, BPF_NOEXIST);
	if (error == E_TOO_BIG) {
		fragment_evict();
		error = bpf_map_update_elem(&fragments, &key, &value, BPF_NOEXIST);
	}
	if (error == E_EXIST) {
		value.again = 1;
		return bpf_map_update_elem(&fragments, &key, &value, BPF_EXIST)
			       ? NAT_DROP_FRAGMENTS_FULL
			       : GO_ON;
	}
	if (error)
		return NAT_DROP_FRAGMENTS_FULL;
	if (bpf_map_push_elem(&fragment_queue, &key, 0)) {
		bpf_map_delete_elem(&fragments, &key);
		return NAT_DROP_FRAGMENTS_FULL;
	}
	return GO_ON;
}

/* Before the first fragment goes: what it becomes is what the others become. */
static __always_inline int fragment_first(const struct packet *packet, const struct nat_flow *flow)
{
	return fragment_note(packet, addr_word(flow->src), addr_word(flow->dst), zone_to(flow), 0);
}

/* Whether the first one is known, or was a while ago. */
static __always_inline int fragment_known(const struct packet *packet)
{
	struct nat_fragment_key key;

	fragment_key(packet, &key);
	return bpf_map_lookup_elem(&fragments, &key) != NULL;
}

/* What a later fragment becomes: addresses, and the zone that it goes to (zone_to). */
static __always_inline int fragment_later(const struct packet *packet, struct nat_flow *out)
{
	struct nat_fragment_key key;
	struct nat_fragment *first;
	const struct nat_config *c;
	__u32 slot;

	fragment_key(packet, &key);
	first = bpf_map_lookup_elem(&fragments, &key);
	c = config_get(&slot);
	if (!first || !c || fragment_old(packet, first->seen, c->timeouts[NAT_TIMEOUT_FRAGMENT]))
		return NAT_DROP_FRAGMENT;
	if (first->excluded)
		return NAT_PASS_EXCLUDED;
	__builtin_memset(out, 0, sizeof(*out));
	out->src = first->src;
	out->dst = first->dst;
	out->key.side = NAT_OUTSIDE;
	out->key.link = first->zone;
	return GO_ON;
}

/* The identification of a packet's fragments, here or behind the egress interface, which is
 * translated; 0: as it is. An answer's is its sender's own, and no other host shares that address.
 */
static __always_inline __u32 fragment_id(const struct packet *packet, __be32 src, __be32 dst)
{
	struct nat_fragment_key key;
	struct nat_fragment *first;

	if (packet->key.side != NAT_INSIDE)
		return 0;
	if (!(packet->flags & (PACKET_FRAGMENT_FIRST | PACKET_FRAGMENT_LATER)))
		return bpf_htons(fragment_identification(src, dst, packet->key.protocol));
	fragment_key(packet, &key);
	first = bpf_map_lookup_elem(&fragments, &key);
	return first ? first->id : 0;
}

/* Gives a packet that is in fragments, or is to be, its identification. */
GLOBAL int fragment_name(struct ctx *ctx, const struct packet *packet, const struct nat_flow *flow)
{
	__u32 id;

	if (!packet || !flow)
		return NAT_DROP_BYPASS;
	id = fragment_id(packet, addr_word(flow->src), addr_word(flow->dst));
	return id ? fragment_identify(ctx, packet, id) : GO_ON;
}

/* --- keeping ---------------------------------------------------------------------- */

enum held_limit {
	HELD_SLOTS =
		128, /* of one datagram: 64 KiB have 119 fragments at an MTU of 576, 45 at 1500 */
	HELD_PACKET = 1788, /* longest that is kept, whole */
	HELD_ALL = 2048, /* of all datagrams: 4 MB, as much as the stack's own reassembly takes */
};

struct held_key {
	struct nat_fragment_key datagram;
	__u32 slot;
};

struct held {
	__u32 seen; /* ticks */
	__u32 bytes;
	__u8 packet[HELD_PACKET]; /* from the IPv4 header on */
};

/* Fragments without their first one. Nobody removes those whose first one never comes: this and the
 * next are the maps of the engine that evict their oldest entries, so a flood costs other such
 * fragments their slot, and nothing else. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct held_key);
	__type(value, struct held);
	__uint(max_entries, HELD_ALL);
} held_fragments SEC(".maps");

struct held_count {
	__u32 seen; /* ticks, when the first slot was given */
	__u32 slots;
};

/* How many slots a datagram has got, so that its next fragment and its first one need not look for
 * them: a flood of fragments that are one datagram costs no more a packet than any. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct nat_fragment_key);
	__type(value, struct held_count);
	__uint(max_entries, HELD_ALL);
} held_datagrams SEC(".maps");

/* Room to put one together. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct held);
	__uint(max_entries, 1);
} held_rooms SEC(".maps");

/* The next slot of a datagram: HELD_SLOTS or more is none. */
static __always_inline __u32 held_slot(const struct packet *packet,
				       const struct nat_fragment_key *datagram, __u32 timeout)
{
	struct held_count *count, first = {.seen = packet->now, .slots = 1};

	count = bpf_map_lookup_elem(&held_datagrams, datagram);
	if (!count && !bpf_map_update_elem(&held_datagrams, datagram, &first, BPF_NOEXIST))
		return 0;
	if (!count) /* another CPU was first */
		count = bpf_map_lookup_elem(&held_datagrams, datagram);
	if (!count)
		return HELD_SLOTS;
	if (fragment_old(packet, count->seen, timeout)) { /* the identifier is used again */
		count->seen = packet->now;
		count->slots = 0;
	}
	if (*(volatile __u32 *)&count->slots >= HELD_SLOTS)
		return HELD_SLOTS;
	return __sync_fetch_and_add(&count->slots, 1);
}

/* Keeps a copy of a fragment, if there is a slot. GO_ON: its first one has come in that time, on
 * another CPU, and has not sent it. */
GLOBAL int fragment_hold(struct ctx *ctx, const struct packet *packet)
{
	__u32 zero = 0, bytes;
	struct held *room = bpf_map_lookup_elem(&held_rooms, &zero);
	const struct nat_config *c = config_get(&zero);
	struct nat_fragment *known;
	struct held_key key;

	if (!packet || !room || !c)
		return NAT_DROP_FRAGMENT;
	bytes = packet->bytes;
	OPAQUE(bytes);
	if (bytes > HELD_PACKET)
		return NAT_DROP_FRAGMENT;
	OPAQUE(bytes);
	if (bytes < sizeof(struct ipv4) || ctx_load(ctx, packet->l3, room->packet, bytes))
		return NAT_DROP_FRAGMENT;
	room->seen = packet->now;
	room->bytes = bytes;
	fragment_key(packet, &key.datagram);
	key.slot = held_slot(packet, &key.datagram, c->timeouts[NAT_TIMEOUT_FRAGMENT]);
	if (key.slot >= HELD_SLOTS || bpf_map_update_elem(&held_fragments, &key, room, BPF_ANY))
		return NAT_DROP_FRAGMENT;
	known = bpf_map_lookup_elem(&fragments, &key.datagram);
	if (known && !fragment_old(packet, known->seen, c->timeouts[NAT_TIMEOUT_FRAGMENT]) &&
	    !bpf_map_delete_elem(&held_fragments, &key))
		return GO_ON;
	return NAT_FRAGMENT_HELD;
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
	__u32 ifindex;    /* egress interface */
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
GLOBAL int fragment_cut(struct ctx *ctx, const struct packet *packet, __u32 mtu, __u32 ifindex)
{
	struct fragment_room *room = fragment_room();
	struct cut cut = {.ctx = ctx, .ifindex = ifindex};
	struct ipv4 *ip = (void *)room;
	__u32 header, total;
	int reason = GO_ON;

	if (!room || !packet)
		return NAT_DROP_TOO_BIG;
	header = packet->l4 - packet->l3;
	total = packet->bytes;
	cut.l3 = packet->l3;
	cut.header = header;
	cut.end = total - header;
	cut.size = (mtu - header) & ~7U;
	OPAQUE(total);
	if (total > FRAGMENT_PACKET - 4 || mtu < header + 8)
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

/* --- sending what was kept ----------------------------------------------------------- */

struct release {
	struct ctx *ctx;
	const struct nat_flow *flow; /* NULL: to the stack, as they came */
	struct held_key key;
	__u32 now;
	__s32 limit; /* time-out */
	__u32 l3, mtu, ifindex, l3_delta;
	__u32 id; /* in network order, 0 as they are */
};

/* Makes the frame the fragment in that slot, translated, and sends a copy of it. */
static long fragment_release_next(__u32 slot, struct release *r)
{
	struct held *held;
	struct ipv4 ip;
	__u32 bytes;

	r->key.slot = slot;
	held = bpf_map_lookup_elem(&held_fragments, &r->key);
	if (!held)
		return 0;
	bytes = held->bytes;
	OPAQUE(bytes);
	if (bytes < sizeof(ip))
		return 0;
	OPAQUE(bytes);
	if (bytes > HELD_PACKET || (__s32)(r->now - held->seen) > r->limit ||
	    (r->mtu && bytes > r->mtu))
		return 0;
	__builtin_memcpy(&ip, held->packet, sizeof(ip));
	if ((r->flow && ip.ttl <= 1) || ctx_resize(r->ctx, r->l3 + bytes) ||
	    ctx_store(r->ctx, r->l3, held->packet, bytes))
		return 0;
	if (r->flow) {
		ip.src = r->flow->src;
		ip.dst = r->flow->dst;
		rewrite_ttl(&ip, r->l3_delta);
		if (r->id) {
			ip.check = checksum_add(ip.check, delta_word(ip.id, r->id));
			ip.id = r->id;
		}
		if (ctx_store(r->ctx, r->l3, &ip, sizeof(ip)))
			return 0;
	}
	/* Not sent if another datagram has got the slot, and perhaps its bytes are here. */
	if (bpf_map_lookup_elem(&held_fragments, &r->key) != held)
		return 0;
	bpf_map_delete_elem(&held_fragments, &r->key);
	if (r->flow)
		ctx_copy(r->ctx, r->ifindex);
	else
		ctx_copy_up(r->ctx, r->ifindex);
	return 0;
}

/* Sends a first fragment, which has been translated and has its MACs, and after it those
 * that wait for it; without a flow to the stack, from that interface. True: the frame itself is of
 * no more use. */
GLOBAL int fragment_release(struct ctx *ctx, const struct packet *packet,
			    const struct nat_flow *flow, __u32 ifindex)
{
	struct release r = {.ctx = ctx, .flow = flow, .ifindex = ifindex};
	const struct nat_config *c;
	struct held_count *count;
	__u32 slots;

	c = config_get(&slots);
	if (!c || !packet)
		return 0;
	r.now = packet->now;
	r.l3 = packet->l3;
	r.mtu = flow ? flow->mtu : 0;
	r.l3_delta = flow ? rewrite_l3_delta(&packet->key, flow) : 0;
	fragment_key(packet, &r.key.datagram);
	count = bpf_map_lookup_elem(&held_datagrams, &r.key.datagram);
	if (!count)
		return 0;
	slots = count->slots;
	bpf_map_delete_elem(&held_datagrams, &r.key.datagram);
	r.limit = c->timeouts[NAT_TIMEOUT_FRAGMENT];
	if (flow)
		r.id = fragment_id(packet, addr_word(flow->src), addr_word(flow->dst));
	if (flow)
		ctx_copy(ctx, ifindex);
	else
		ctx_copy_up(ctx, ifindex);
	bpf_loop(slots < HELD_SLOTS ? slots : HELD_SLOTS, fragment_release_next, &r, 0);
	return 1;
}

/* A first fragment, noted and not translated yet, whose next hop's MAC isn't known: copies can't
 * go by the neighbour output, so it comes in once more, and behind it those that waited. True: the
 * frame itself is of no more use. */
static __always_inline int fragment_again(struct ctx *ctx, const struct packet *packet)
{
	return fragment_release(ctx, packet, NULL, packet->ifindex);
}

/* A first fragment from inside that is excluded, perhaps by its port, which the others don't have:
 * they are passed to the stack as it is. True: it is of no more use. (It comes in once more, with
 * nobody waiting for it any more.) */
static __noinline int fragment_exclude(struct ctx *ctx, const struct packet *packet)
{
	fragment_note(packet, 0, 0, 0, 1);
	return fragment_release(ctx, packet, NULL, packet->ifindex);
}

#endif
