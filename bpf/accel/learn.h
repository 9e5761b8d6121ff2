/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The life of a packet under `natkit accel`. The kernel's NAT decides, and sees a packet
 * of each direction every second; those in between bypass the stack, with the translation
 * that connection tracking has. START HERE: learn_process at the ingress of every
 * accelerated interface, learn_leaving at its egress.
 *
 *   1) a packet without a fast-path entry looks up connection tracking and the FIB, unless its
 *      direction is below the threshold; if both know what becomes of it, entries of both
 *      directions are made, and wait
 *   2) a packet of the direction is passed to the stack and is seen leaving by it, to the next
 *      hop and by the link that the FIB names: this shows what netfilter, IPsec, policy routing
 *      by mark or another program does differently
 *   3) then, if connection tracking has given the same translation since LEARN_GRACE before,
 *      the entry is valid until LEARN_VALID after that
 *   4) after that it is revalidated: connection tracking and the FIB are looked up again, and
 *      the next packet is passed to the stack (2). Those after it still use the entry for
 *      LEARN_GRACE, in which the probe must have been seen leaving
 *
 * So whatever changes in the kernel ends an entry within a second, with no process
 * running; and as the stack sees a packet a second of every direction in use, the
 * kernel's timeouts continue as usual (TCP's need help: leaving.h).
 *
 * The FIB is looked up with the TOS of the probe: a packet with another TOS takes the same
 * path, even where policy routing has another for it.
 */
#ifndef NATKIT_LEARN_H
#define NATKIT_LEARN_H

#include "accel/conntrack.h"
#include "lib/rewrite.h"
#include "lib/route.h"

enum learn_limit {
	/* Ticks. How long an entry is valid after a packet of its direction was seen leaving; the
	 * next packet may come LEARN_GRACE after that, and has as long to be seen: a second in all,
	 * in which a change may go unnoticed. */
	LEARN_VALID = 750,
	LEARN_GRACE = 100,
	LEARN_PATIENCE = 50,        /* how long XDP waits for a small packet to probe with */
	LEARN_SMALL = 100,          /* bytes: an acknowledgement, which may be overtaken */
	LEARN_THRESHOLD = 8,        /* packets of a direction in a window that make it eligible */
	LEARN_WINDOW = 10,          /* bits: 1024 ticks */
	LEARN_WINDOW_MASK = 0xfff0, /* in learn_admission.count */
	LEARN_MIN_PACKETS = 4, /* that used the entry while valid, or it must be eligible again */
	LEARN_ADMISSIONS = 65536,
	LEARN_CACHE_BITS = 16,
	LEARN_REFUSED = 900,    /* until a refused flow is looked up again */
	LEARN_UNREPLIED = 100,  /* one that may get a reply at any moment */
	LEARN_BUSY = 30000,     /* since it was valid: a flow that was busy then will be again */
	LEARN_HEARD = 5000,     /* since the other end was heard: no round trip takes longer */
	LEARN_OWN = 0x6e61746b, /* in skb->cb, from our ingress to our egress: not the stack's */
	LEARN_SILENT = -2,      /* the other hook's packet, which counts it */
	LEARN_CHANGED = -3,     /* the kernel has another translation than the entry */
};

/* Packets write. Full: the least recently used entry is evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct nat_flow_key); /* side is 0 */
	__type(value, struct nat_accel_entry);
	__uint(max_entries, 65536);
} accel_entries SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_accel_stats);
	__uint(max_entries, 1);
} accel_stats SEC(".maps");

/* What is known of directions without a look-up of their entries, by a hash of their
 * keys. Packets write. */
struct learn_admission {
	/* How many packets of a direction that uses no entry came in a window. From the lowest
	 * bits: the count, which has room for LEARN_THRESHOLD; a bit: the window before was full;
	 * the window; 16 bits of the hash. The first direction of a window is counted. Others that
	 * share the counter wait until it has filled the window, or the next begins, so that each
	 * busy one has its turn. */
	__u32 count;
	/* When an entry of one of them was last made or revalidated. */
	__u32 revalidated;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct learn_admission);
	__uint(max_entries, LEARN_ADMISSIONS);
} admissions SEC(".maps");

/*
 * The flow cache: valid entries, indexed by a hash of their keys. One takes 64 bytes; the table
 * touches three times as many, in more pages. Written and read by words: the sum shows what
 * was read while another CPU wrote. Two keys share a pair of lines, a third waits until one
 * of them ends. Packets write.
 */
struct learn_cached {
	__u64 key[2]; /* as in nat_flow_key; side is 0, zero the hook */
	__u64 addresses, ports;
	__u64 hop;
	__u64 route; /* until, mtu, in_link */
	__u64 sum;
	__u64 packets;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE); /* begins with a page, so every entry is a cache line */
	__type(key, __u32);
	__type(value, struct learn_cached);
	__uint(max_entries, 1 << LEARN_CACHE_BITS);
} flow_cache SEC(".maps");

/*
 * The recency filter: when an entry of the directions of a hash was last revalidated, coarsely
 * and for many of them together, in so few bytes that they stay in the CPU's cache. Where
 * little else is accelerated, packets of short connections, and what leaves of them, read
 * nothing else of accel. Packets write. An old slot looks recent again from time to time:
 * slower, never wrong.
 */
struct learn_recency {
	__u16 when[4096]; /* ticks >> LEARN_RECENCY_SHIFT */
};

enum learn_recency_limit {
	LEARN_RECENCY_SLOTS = sizeof(struct learn_recency) / sizeof(__u16),
	LEARN_RECENCY_SHIFT = 8,
	/* For so many units after it was revalidated an entry may be valid, or wait for a packet to
	 * leave; and the flow cache may have its count of packets. One of them is for a slot that
	 * another CPU wrote whose packet had read the clock later. */
	LEARN_RECENCY_VALID = (LEARN_REFUSED >> LEARN_RECENCY_SHIFT) + 2,
	LEARN_RECENCY_CACHED = ((LEARN_REFUSED + LEARN_BUSY) >> LEARN_RECENCY_SHIFT) + 2,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct learn_recency);
	__uint(max_entries, 1);
} recency_filter SEC(".maps");

/* Timeout of an established TCP connection. 0: TCP is not accelerated, because connection
 * tracking would mark packets invalid that follow some it has not seen. */
const volatile __u32 learn_tcp_milliseconds = 0;

static __always_inline int learn_valid(__u32 until, __u32 now)
{
	/* One comparison. The clock cannot date an entry of 52 days ago: at worst it is valid
	 * for as long as the longest of these. */
	return until - now - 1 < LEARN_REFUSED;
}

/* The words of a key, and of two fields of 32 bits. Not read as such: what was written by
 * narrower ones has to reach the cache first. */
static __always_inline __u64 learn_words(__u32 low, __u32 high)
{
	return (__u64)high << 32 | low;
}

static __always_inline __u64 learn_key_addresses(const struct nat_flow_key *key)
{
	return learn_words(addr_word(key->src), addr_word(key->dst));
}

static __always_inline __u64 learn_key_ports(const struct nat_flow_key *key)
{
	return learn_words((__u32)key->dport << 16 | key->sport, key->protocol);
}

static __always_inline __u64 learn_mix(__u64 addresses, __u64 ports)
{
	return addresses * 0x9e3779b97f4a7c15 + ports * 0xc2b2ae3d27d4eb4f;
}

static __always_inline __u32 cache_slot(__u64 addresses, __u64 ports)
{
	return learn_mix(addresses, ports) >> (64 - LEARN_CACHE_BITS);
}

static __always_inline struct learn_cached *cache_at(__u32 slot)
{
	return bpf_map_lookup_elem(&flow_cache, &slot);
}

static __always_inline __u16 *learn_recency_at(__u64 addresses, __u64 ports)
{
	__u32 zero = 0;
	struct learn_recency *m = bpf_map_lookup_elem(&recency_filter, &zero);

	return m ? &m->when[(learn_mix(addresses, ports) >> 48) % LEARN_RECENCY_SLOTS] : NULL;
}

static __always_inline __u16 learn_recency_time(__u32 now)
{
	return now >> LEARN_RECENCY_SHIFT;
}

/* Whether a slot is no older than that. It may be newer than the packet's look at the clock. */
static __always_inline int learn_recent(const __u16 *recency, __u32 now, __u16 units)
{
	return recency && (__u16)(learn_recency_time(now) - *recency + 1) <= units + 1;
}

static __always_inline __u64 cache_sum(const struct learn_cached *f)
{
	return f->key[0] * 0x2545f491 + f->key[1] * 0x41c64e6d + f->addresses * 0x5851f42d +
	       f->ports * 0x14057b7f + f->hop * 0x369dea0f + f->route * 0x31358cc5 + 1;
}

/* The hook that the program is at. */
#define LEARN_HOOK ((__u64)(CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP) << 48)

/* Another CPU that fills a line at the same time is overwritten, or sees that the entry is
 * not valid. */
static __always_inline void cache_forget(const struct nat_flow_key *key)
{
	__u64 addresses = learn_key_addresses(key), ports = learn_key_ports(key);
	__u32 slot = cache_slot(addresses, ports);
	struct learn_cached *f = cache_at(slot), *g = cache_at(slot ^ 1);

	if (f)
		__sync_lock_test_and_set(&f->sum, 0);
	if (g)
		__sync_lock_test_and_set(&g->sum, 0);
}

static __always_inline __u32 learn_hash_words(__u64 addresses, __u64 ports)
{
	__u32 hash = learn_mix(addresses, ports) >> 32;

	return hash ^ hash >> 15;
}

static __always_inline __u32 learn_hash(const struct nat_flow_key *key)
{
	return learn_hash_words(learn_key_addresses(key), learn_key_ports(key));
}

static __always_inline struct learn_admission *learn_admission(__u32 hash)
{
	__u32 slot = hash % LEARN_ADMISSIONS;

	return bpf_map_lookup_elem(&admissions, &slot);
}

static __always_inline void learn_revalidated(const struct nat_flow_key *key, __u32 now)
{
	__u16 *recency = learn_recency_at(learn_key_addresses(key), learn_key_ports(key));
	struct learn_admission *admission = learn_admission(learn_hash(key));

	if (admission)
		admission->revalidated = now;
	if (recency && *recency != learn_recency_time(now))
		*recency = learn_recency_time(now);
}

/* Whether a direction may have an entry that is valid, or that waits for a probe: no look-up in
 * a large table for connections that end, or begin. Another CPU may have revalidated it since
 * this packet looked at the clock. */
static __always_inline int learn_lives(__u64 addresses, __u64 ports, __u32 now)
{
	struct learn_admission *admission;

	if (!learn_recent(learn_recency_at(addresses, ports), now, LEARN_RECENCY_VALID))
		return 0;
	admission = learn_admission(learn_hash_words(addresses, ports));
	return admission && (__s32)(now - admission->revalidated) <= LEARN_REFUSED;
}

/*
 * The TCP header of a frame that opens or closes a connection, if its headers are as most
 * are; else parse finds it. Nothing more of it is looked at: short connections are mostly
 * such frames, and should cost as little as without us.
 */
static __always_inline struct tcp *learn_turn(struct ctx *ctx)
{
	struct ipv4 *ip = ctx_data(ctx) + 14;
	struct tcp *tcp = (struct tcp *)(ip + 1);

	if ((void *)(tcp + 1) > ctx_data_end(ctx) || !ctx_is_ours(ctx, 14) || ip->version != 0x45 ||
	    ip->protocol != TCP || ip->fragment & bpf_htons(IPV4_MF | IPV4_OFFSET) ||
	    !(tcp->flags & (TCP_SYN | TCP_FIN | TCP_RST)))
		return NULL;
	return tcp;
}

/* The packets of a connection that begins are counted from the first on, though another had
 * the same ends a moment ago. */
static __always_inline void learn_begin(__u32 hash)
{
	struct learn_admission *admission = learn_admission(hash);

	if (admission && admission->count % (2 * LEARN_THRESHOLD) &&
	    !((admission->count ^ hash) >> 16))
		admission->count = 0;
}

/* Whether it is of a direction that has no entry in use, so that none of ours ends. */
static __always_inline int learn_turns(struct ctx *ctx)
{
	struct tcp *tcp = learn_turn(ctx);
	__u64 addresses, ports;
	struct ipv4 *ip;

	if (!tcp)
		return 0;
	ip = (struct ipv4 *)tcp - 1;
	addresses = learn_words(addr_word(ip->src), addr_word(ip->dst));
	ports = learn_words((__u32)tcp->dport << 16 | tcp->sport, TCP);
	if (learn_lives(addresses, ports, clock_now()))
		return 0;
	if (tcp->flags & TCP_SYN)
		learn_begin(learn_hash_words(addresses, ports));
	return 1;
}

/* How packets of the other direction arrive. */
static __always_inline struct nat_flow_key learn_other_key(const struct packet *packet,
							   const struct nat_accel_entry *e)
{
	struct nat_flow_key key = {
		.src = e->dst,
		.dst = e->src,
		.sport = e->dport,
		.dport = e->sport,
		.protocol = packet->key.protocol,
	};

	return key;
}

static __always_inline struct nat_accel_entry *learn_other(const struct packet *packet,
							   const struct nat_accel_entry *e)
{
	struct nat_flow_key key = learn_other_key(packet, e);

	return bpf_map_lookup_elem(&accel_entries, &key);
}

/* The entries of a flow are made or revalidated. */
static __noinline void learn_note(const struct packet *packet, const struct nat_accel_entry *e)
{
	struct nat_flow_key key = learn_other_key(packet, e);

	learn_revalidated(&packet->key, packet->now);
	learn_revalidated(&key, packet->now);
}

static __always_inline int learn_same(const struct nat_accel_entry *a,
				      const struct nat_accel_entry *b)
{
	return addr_equal(a->src, b->src) && addr_equal(a->dst, b->dst) && a->sport == b->sport &&
	       a->dport == b->dport;
}

static __always_inline void learn_deltas(const struct nat_flow_key *key, struct nat_accel_entry *e)
{
	e->l3_delta = delta_fold(delta_address(key->src, e->src) + delta_address(key->dst, e->dst));
	e->l4_delta =
		delta_fold(delta_word(key->sport, e->sport) + delta_word(key->dport, e->dport));
}

/* No longer valid: packets are passed to the stack, and one of them must be seen leaving after
 * this. */
static __always_inline void learn_wait(struct nat_accel_entry *e, __u32 now)
{
	e->until = now;
	e->probed = now ? now : 1;
}

/* What becomes of the packet, into *to: by connection tracking, then by the FIB. 0, or why it is
 * the stack's. */
static __noinline int learn_ask(struct ctx *ctx, const struct packet *packet,
				struct nat_accel_entry *to)
{
	struct nat_link *in, *out;
	struct route route;
	int reason;

	to->in_link = link_find(packet->ifindex);
	in = link_get(to->in_link);
	if (!in || !ctx_is_addressed(ctx, in))
		return NAT_ACCEL_NOT_IPV4;
	reason = conntrack_ask(ctx, packet, to);
	if (reason)
		return reason;
	learn_deltas(&packet->key, to);
	reason = route_find(ctx, packet, packet->key.src, to->dst, 0, &route);
	if (reason != GO_ON)
		return reason == NAT_PASS_LOCAL ? NAT_ACCEL_LOCAL : NAT_ACCEL_NO_ROUTE;
	out = link_get(route.link);
	if (!out || !route.hop)
		return NAT_ACCEL_NO_ROUTE;
	to->hop = route.hop;
	to->mtu = route.mtu;
	to->hook = in->flags & NAT_LINK_XDP && out->flags & NAT_LINK_XDP ? NAT_ACCEL_XDP
									 : NAT_ACCEL_TC;
	return 0;
}

static __always_inline int learn_refuse(const struct packet *packet, struct nat_accel_entry *e,
					int reason)
{
	e->reason = reason;
	e->until = packet->now + (reason == NAT_ACCEL_UNREPLIED ? LEARN_UNREPLIED : LEARN_REFUSED);
	return reason;
}

/* Makes, or replaces, the entries of both directions. They wait. */
static __noinline int learn_make(struct ctx *ctx, struct packet *packet)
{
	struct nat_accel_entry made = {.left = packet->now - 1}, *other;
	struct nat_flow_key key = packet->key;
	int reason = learn_ask(ctx, packet, &made), silent;

	if (reason == NAT_ACCEL_UNKNOWN || reason == NAT_ACCEL_NOT_IPV4)
		return reason; /* a flood of new flows must not push out those in use */
	if (reason) {
		if (!CTX_TC)
			made.hook = NAT_ACCEL_XDP;
		learn_refuse(packet, &made, reason);
	} else {
		learn_wait(&made, packet->now);
	}
	if (bpf_map_update_elem(&accel_entries, &key, &made, BPF_ANY))
		return NAT_ACCEL_NO_ROOM;
	if (reason)
		return reason;
	learn_note(packet, &made);
	silent = !CTX_TC && made.hook == NAT_ACCEL_TC;
	key = learn_other_key(packet, &made);
	made.src = packet->key.dst;
	made.dst = packet->key.src;
	made.sport = packet->key.dport;
	made.dport = packet->key.sport;
	learn_deltas(&key, &made);
	made.hook = NAT_ACCEL_ANY;
	other = bpf_map_lookup_elem(&accel_entries, &key);
	if (!(other && !other->reason && learn_same(other, &made))) {
		if (bpf_map_update_elem(&accel_entries, &key, &made, BPF_ANY))
			return NAT_ACCEL_NO_ROOM;
		cache_forget(&key);
	}
	return silent ? LEARN_SILENT : NAT_ACCEL_WAITING;
}

/*
 * Whether a direction has too few packets to be eligible: to revalidate it, once a second, costs
 * more than the stack does for a few of them. One that fills a window is eligible to the end of
 * the next. add: the packet is counted.
 */
static __always_inline int learn_below_threshold(struct learn_admission *admission, __u32 hash,
						 __u32 now, int add)
{
	__u32 window = (hash & 0xffff0000) | (now >> LEARN_WINDOW << 4 & LEARN_WINDOW_MASK), count,
	      full;

	if (!admission)
		return 0;
	count = admission->count;
	full = count % LEARN_THRESHOLD == LEARN_THRESHOLD - 1;
	if ((count ^ window) >> 4) {
		if (!((count ^ window) & LEARN_WINDOW_MASK) && !full)
			return 1;
		if (full && !(((count + 16) ^ window) >> 4)) /* a window ago */
			window |= LEARN_THRESHOLD;
		count = window;
	} else if (full) {
		return 0;
	}
	if (add)
		admission->count = count + 1;
	return !(count & LEARN_THRESHOLD);
}

/* The flow changes, or has changed: both directions wait, and are looked up again. */
static __always_inline void learn_stop(const struct packet *packet, struct nat_accel_entry *e)
{
	struct nat_flow_key key = learn_other_key(packet, e);
	struct nat_accel_entry *other = bpf_map_lookup_elem(&accel_entries, &key);

	learn_wait(e, packet->now);
	e->hook = NAT_ACCEL_ANY;
	cache_forget(&packet->key);
	if (other && !other->reason) {
		learn_wait(other, packet->now);
		other->hook = NAT_ACCEL_ANY;
		cache_forget(&key);
	}
}

/* Whether the kernel still has the entry's translation; its path is set to what the FIB names.
 * 0, or why the packet is passed to the stack, or LEARN_CHANGED. */
GLOBAL int learn_again(struct ctx *ctx, const struct packet *packet, struct nat_accel_entry *e)
{
	struct nat_accel_entry now = {};
	int reason;

	if (!packet || !e)
		return LEARN_CHANGED;
	reason = learn_ask(ctx, packet, &now);
	if (!reason && !learn_same(&now, e))
		return LEARN_CHANGED;
	if (reason) {
		learn_stop(packet, e);
		return reason == NAT_ACCEL_NOT_IPV4 ? reason : learn_refuse(packet, e, reason);
	}
	if (e->hop != now.hop) /* none was seen leaving by that: the stack may forbid it */
		learn_wait(e, packet->now);
	e->hop = now.hop;
	e->mtu = now.mtu;
	e->in_link = now.in_link;
	e->hook = now.hook;
	return 0;
}

/* Passes the packet to the stack, to be seen leaving. */
static __always_inline int learn_probe(const struct packet *packet, struct nat_accel_entry *e)
{
	e->recent = 0;
	e->probed = packet->now ? packet->now : 1;
	return NAT_ACCEL_PROBE;
}

/*
 * A packet whose entry is not valid. 0: it is from now on. The kernel is looked up before a
 * probe goes, so that packets after it do not keep a translation that the probe no longer
 * has; and again after that, unless it was just looked up.
 */
GLOBAL int learn_revalidate(struct ctx *ctx, struct packet *packet, struct nat_accel_entry *e)
{
	struct nat_accel_entry *other;
	__u32 now, silent;
	int reason;

	if (!packet || !e || e->reason)
		return LEARN_CHANGED;
	now = packet->now;
	silent = now - e->until;
	learn_note(packet, e);
	if (!e->probed) {
		if (!CTX_TC && packet->class == NAT_TCP && packet->length > LEARN_SMALL &&
		    silent < LEARN_PATIENCE)
			return 0;
		reason = learn_again(ctx, packet, e);
		if (!reason && !e->probed && silent < LEARN_GRACE)
			e->until = now + LEARN_GRACE;
		return reason ?: learn_probe(packet, e);
	}
	other = learn_other(packet, e);
	if (!other)
		return LEARN_CHANGED;
	/* Another's packet, with this flow's addresses from elsewhere, proves nothing. */
	if ((__s32)(other->left - e->probed) < 0 || other->left_ifindex != packet->ifindex)
		return NAT_ACCEL_WAITING;
	if (e->hook == NAT_ACCEL_ANY || now - e->probed >= LEARN_GRACE) {
		reason = learn_again(ctx, packet, e);
		if (reason)
			return reason;
	}
	if (now - other->left >= LEARN_VALID)
		return learn_probe(packet, e);
	if (other->left_hop != e->hop)
		return learn_refuse(packet, e, NAT_ACCEL_OTHER_ROUTE);
	if (packet->class == NAT_TCP && !e->carried)
		conntrack_keep(ctx, &packet->key, learn_tcp_milliseconds, CONNTRACK_ALIVE);
	e->probed = 0;
	e->until = other->left + LEARN_VALID;
	e->carried = 1;
	other->carried = 1;
	return 0;
}

/* Whether a sum of 16-bit words is a zero of one's complement, a multiple of 65535: by the
 * inverse of that modulo 2^64, which costs less than to divide. */
static __always_inline int learn_zero(__u64 sum)
{
	return sum * 0xfffefffefffeffff <= 0x0001000100010001;
}

/* Whether a translation is the one of packets with that key: what it adds to checksums is
 * what it changes. */
static __always_inline int learn_fits(const struct nat_flow_key *key,
				      const struct nat_accel_entry *e)
{
	__u64 l3 = (__u64)addr_word(e->src) + addr_word(e->dst) + (__u32)~addr_word(key->src) +
		   (__u32)~addr_word(key->dst) + (__u16)~e->l3_delta;
	__u64 l4 =
		e->sport + e->dport + (__u16)~key->sport + (__u16)~key->dport + (__u16)~e->l4_delta;

	return learn_zero(l3) && learn_zero(l4);
}

/* The path of the packet into *to, if the line is its own. If that is no longer valid,
 * to->packets is how many packets used it when it last was. */
static __always_inline int cache_read(struct learn_cached *f, const struct packet *packet,
				      __u64 addresses, __u64 ports, struct learn_cached *to)
{
	const volatile __u64 *word = (const volatile __u64 *)f;

	if (!f || word[0] != addresses || word[1] != (ports | LEARN_HOOK))
		return 0;
	to->key[0] = addresses;
	to->key[1] = ports | LEARN_HOOK;
	to->addresses = word[2];
	to->ports = word[3];
	to->hop = word[4];
	to->route = word[5];
	if (!learn_valid(to->route, packet->now) || cache_sum(to) != word[6]) {
		to->packets = packet->now - (__u32)to->route < LEARN_BUSY ? word[7] : 0;
		return 0;
	}
	f->packets += packet->segments;
	return 1;
}

/* The path of the packet into *to, if it is in the flow cache. */
static __always_inline int cache_find(const struct packet *packet, struct learn_cached *to)
{
	__u64 addresses = learn_key_addresses(&packet->key);
	__u64 ports = learn_key_ports(&packet->key);
	__u32 slot = cache_slot(addresses, ports);

	return learn_recent(learn_recency_at(addresses, ports), packet->now,
			    LEARN_RECENCY_CACHED) &&
	       (cache_read(cache_at(slot), packet, addresses, ports, to) ||
		cache_read(cache_at(slot ^ 1), packet, addresses, ports, to));
}

/* The flow ends, or begins again, and the table has evicted it. */
static __always_inline void cache_stop(const struct packet *packet, const struct learn_cached *to)
{
	struct nat_flow_key key = {
		.src = addr_of(to->addresses >> 32),
		.dst = addr_of(to->addresses),
		.sport = to->ports >> 16,
		.dport = to->ports,
		.protocol = packet->key.protocol,
	};

	cache_forget(&packet->key);
	cache_forget(&key);
}

/* Whether a direction may be written there: its own line, or one that nobody needs. */
static __always_inline int cache_free(struct learn_cached *f, const struct learn_cached *of,
				      __u32 now)
{
	const volatile __u64 *word = (const volatile __u64 *)f;

	return f && ((word[0] == of->key[0] && word[1] == of->key[1]) || !word[6] ||
		     !learn_valid(word[5], now));
}

/* So many packets used the entry. */
static __always_inline void learn_carried(struct nat_accel_entry *e, __u64 packets)
{
	__u64 recent = e->recent + packets;

	e->packets += packets;
	e->recent = recent < LEARN_MIN_PACKETS ? recent : LEARN_MIN_PACKETS;
}

/*
 * The path of the packet into *to, from its entry, and into the flow cache if that is valid and
 * there is room. An LRU map reuses the slot of an evicted entry at once, for another flow, while
 * packets on other CPUs still read it: so all is read once, and must fit together.
 */
static __always_inline int cache_fill(const struct packet *packet, struct nat_accel_entry *e,
				      struct learn_cached *to)
{
	struct nat_accel_entry copy = *e;
	struct learn_cached *f;
	volatile __u64 *word;
	__u32 slot;

	asm volatile("" ::: "memory");
	if (unlikely(!learn_fits(&packet->key, &copy)))
		return NAT_ACCEL_NO_ROOM;
	to->key[0] = learn_key_addresses(&packet->key);
	to->key[1] = learn_key_ports(&packet->key);
	to->addresses = learn_words(addr_word(copy.src), addr_word(copy.dst));
	to->ports = learn_words((__u32)copy.dport << 16 | copy.sport,
				(__u32)copy.l4_delta << 16 | copy.l3_delta);
	to->hop = copy.hop;
	to->route = learn_words(copy.until, (__u32)copy.in_link << 16 | copy.mtu);
	slot = cache_slot(to->key[0], to->key[1]);
	to->key[1] |= LEARN_HOOK;
	learn_carried(e, packet->segments);
	if (!learn_valid(copy.until, packet->now))
		return 0;
	f = cache_at(slot);
	if (!cache_free(f, to, packet->now)) {
		f = cache_at(slot ^ 1);
		if (!cache_free(f, to, packet->now))
			return 0;
	}
	word = (volatile __u64 *)f;
	if (word[0] == to->key[0] && word[1] == to->key[1])
		learn_carried(e, f->packets);
	word[6] = 0;
	word[0] = to->key[0];
	word[1] = to->key[1];
	word[2] = to->addresses;
	word[3] = to->ports;
	word[4] = to->hop;
	word[5] = to->route;
	word[7] = 0;
	__sync_lock_test_and_set(&f->sum, cache_sum(to));
	if (*(volatile __u32 *)&e->until != copy.until)
		word[6] = 0;
	return 0;
}

/* Rewrites and sends. */
static __always_inline int learn_forward(struct ctx *ctx, struct packet *packet,
					 const struct learn_cached *to)
{
	struct nat_flow flow = {
		.src = addr_of(to->addresses),
		.dst = addr_of(to->addresses >> 32),
		.sport = to->ports,
		.dport = to->ports >> 16,
	};
	__u16 l3_delta = to->ports >> 32, l4_delta = to->ports >> 48;
	__u32 index = (to->hop >> ROUTE_LINK_SHIFT) - 1;
	struct nat_link *in, *out;

	in = link_get(to->route >> 48);
	out = bpf_map_lookup_elem(&links, &index);
	if (unlikely(!in || in->ifindex != packet->ifindex || !ctx_is_addressed(ctx, in)))
		return NAT_ACCEL_OTHER_LINK;
	if (unlikely(packet->ttl <= 1))
		return NAT_ACCEL_TTL;
	if (unlikely(packet->length > (__u16)(to->route >> 32)))
		return NAT_ACCEL_TOO_BIG;
	if (unlikely(!out ||
		     rewrite_by(ctx, packet, &flow, l3_delta, l4_delta, to->hop, out) != GO_ON))
		return NAT_ACCEL_NO_ROUTE;
	ctx_tag(ctx, LEARN_OWN);
	packet->action = ctx_transmit(ctx, index, out);
	return NAT_ACCEL_FORWARDED;
}

static __always_inline int learn_packet(struct ctx *ctx, struct packet *packet, int after_xdp)
{
	struct learn_admission *admission;
	struct nat_accel_entry *e;
	struct learn_cached to;
	int reason, turns, lives;
	__u32 hash;

	if (learn_tcp_milliseconds && learn_turns(ctx))
		return after_xdp ? LEARN_SILENT : NAT_ACCEL_TCP_FLAGS;
	reason = parse(ctx, 0, 14, packet);
	if (unlikely(reason == NAT_PASS_NOT_IPV4))
		return NAT_ACCEL_NOT_IPV4;
	if (unlikely(reason != GO_ON))
		return NAT_ACCEL_SPECIAL;
	if (unlikely(packet->key.protocol != TCP && packet->key.protocol != UDP))
		return NAT_ACCEL_PROTOCOL;
	if (unlikely(packet->flags & (PACKET_FRAGMENT_FIRST | PACKET_FRAGMENT_LATER) ||
		     packet->l4 - packet->l3 != sizeof(struct ipv4)))
		return NAT_ACCEL_SPECIAL;
	if (packet->class == NAT_TCP && !learn_tcp_milliseconds)
		return NAT_ACCEL_TCP_STRICT;
	turns = packet->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST);
	to.packets = 0;
	if (!turns && cache_find(packet, &to))
		return learn_forward(ctx, packet, &to);
	hash = learn_hash(&packet->key);
	admission = learn_admission(hash);
	lives = learn_lives(learn_key_addresses(&packet->key), learn_key_ports(&packet->key),
			    packet->now);
	if (!lives) {
		if (turns)
			return after_xdp ? LEARN_SILENT : NAT_ACCEL_TCP_FLAGS;
		/* One that was busy before the silence is eligible at once. */
		if (to.packets < LEARN_THRESHOLD &&
		    learn_below_threshold(admission, hash, packet->now, !after_xdp))
			return after_xdp ? LEARN_SILENT : NAT_ACCEL_BELOW_THRESHOLD;
	}
	e = bpf_map_lookup_elem(&accel_entries, &packet->key);
	if (unlikely(e && e->hook && e->hook != (CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP)))
		return LEARN_SILENT;
	if (after_xdp && unlikely(!e || !e->hook))
		return LEARN_SILENT;
	if (unlikely(turns)) {
		if (e && !e->reason)
			learn_stop(packet, e);
		else if (!e && cache_find(packet, &to))
			cache_stop(packet, &to);
		return NAT_ACCEL_TCP_FLAGS;
	}
	if (unlikely(!e))
		return lives && learn_below_threshold(admission, hash, packet->now, 1)
			       ? NAT_ACCEL_BELOW_THRESHOLD
			       : learn_make(ctx, packet);
	if (unlikely(!learn_valid(e->until, packet->now))) {
		if (lives && !e->probed && !e->reason &&
		    e->recent + to.packets < LEARN_MIN_PACKETS &&
		    learn_below_threshold(admission, hash, packet->now, 1))
			return NAT_ACCEL_BELOW_THRESHOLD;
		reason = learn_revalidate(ctx, packet, e);
		if (reason == LEARN_CHANGED)
			reason = learn_make(ctx, packet);
		if (reason)
			return reason;
		if (e->hook != (CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP))
			return LEARN_SILENT;
	} else if (unlikely(e->reason)) {
		return e->reason;
	}
	reason = cache_fill(packet, e, &to);
	return reason ?: learn_forward(ctx, packet, &to);
}

/* after_xdp: XDP has seen the packet here before, and passed it to the stack on purpose, except
 * for those whose egress interface is none of XDP's. */
static __always_inline int learn_process(struct ctx *ctx, int after_xdp)
{
	__u32 zero = 0;
	struct nat_accel_stats *stats;
	struct packet packet;
	int reason = learn_packet(ctx, &packet, after_xdp);

	stats = bpf_map_lookup_elem(&accel_stats, &zero);
	if (stats && (__u32)reason < NAT_ACCEL_REASONS) {
		stats->packets[reason]++;
		if (reason == NAT_ACCEL_FORWARDED)
			stats->bytes += packet.bytes;
	}
	return reason == NAT_ACCEL_FORWARDED ? packet.action : CTX_PASS;
}

#endif
