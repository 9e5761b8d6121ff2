/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The life of a packet under `natkit accel`. The kernel's NAT decides and goes on
 * seeing; the packets in between take a shortcut past the stack, with the translation
 * that connection tracking holds. START HERE: learn_process at the ingress of every
 * accelerated interface, learn_leaving at its egress.
 *
 *   1) a packet without a shortcut asks connection tracking and the routes, unless it
 *      is among the first of its direction, or one of few a second; if both know what
 *      becomes of it, shortcuts of both directions are made, and wait
 *   2) a packet of the direction goes up to the stack and is seen leaving by it, to the
 *      next hop and by the link that the routes say: what netfilter, IPsec, policy routing
 *      by mark or a foreign program would do otherwise shows here
 *   3) then, if connection tracking has said the same since LEARN_GRACE before, the
 *      direction is trusted until LEARN_TRUST after that
 *   4) after that connection tracking and the routes are asked again, and the next packet
 *      goes up (2). Those after it still take the shortcut for LEARN_GRACE, in which it
 *      must have been seen leaving
 *
 * So whatever changes in the kernel ends a shortcut within a second, with no process
 * running; and as every direction in use shows the stack a packet a second, the
 * kernel's own time-outs go on as they would (TCP's need help: leaving.h).
 *
 * The routes are asked with the TOS of the packet that goes up: one of another TOS takes
 * the same way, even where policy routing has others for it.
 */
#ifndef NATKIT_LEARN_H
#define NATKIT_LEARN_H

#include "accel/conntrack.h"
#include "lib/rewrite.h"
#include "lib/route.h"

enum learn_limit {
	/* Ticks. How long a direction is trusted after one of its packets was seen leaving; the
	 * next packet may come LEARN_GRACE after that, and waits as long to be seen: a second
	 * in all, in which a change may go unnoticed. */
	LEARN_TRUST = 750,
	LEARN_GRACE = 100,
	LEARN_PATIENCE = 50,        /* how long XDP waits for a small packet to send up */
	LEARN_SMALL = 100,          /* bytes: an acknowledgement, which may be overtaken */
	LEARN_YOUNG = 8,            /* packets of a direction in a window before it is looked at */
	LEARN_WINDOW = 10,          /* bits: 1024 ticks */
	LEARN_WINDOW_MASK = 0xfff0, /* in learn_glance.young */
	LEARN_WORTH = 4, /* packets by the shortcut while trusted, or it is young again */
	LEARN_GLANCES = 65536,
	LEARN_FRONT_BITS = 16,
	LEARN_REFUSED = 900,    /* until a refused flow is asked about again */
	LEARN_UNANSWERED = 100, /* one that may be answered at any moment */
	LEARN_BUSY = 30000,     /* since it was trusted: what it carried tells what it will */
	LEARN_HEARD = 5000,     /* since the other end was heard: no round trip takes longer */
	LEARN_OWN = 0x6e61746b, /* in skb->cb, from our ingress to our egress: not the stack's */
	LEARN_SILENT = -2,      /* the other hook's packet, which counts it */
	LEARN_ANEW = -3,        /* the kernel says something else than the shortcut */
};

/* Packets write. Full: the least recently used is forgotten. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct nat_flow_key); /* side is 0 */
	__type(value, struct nat_shortcut);
	__uint(max_entries, 65536);
} shortcuts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_accel_stats);
	__uint(max_entries, 1);
} accel_stats SEC(".maps");

/* What is known of directions without looking for their shortcuts, by a hash of their
 * keys. Packets write. */
struct learn_glance {
	/* How many packets of one that takes no shortcut came in a window: from below, the count,
	 * in which LEARN_YOUNG has room; a bit: the window before was full; the window; 16 bits of
	 * the hash. The first of a window is counted; others here wait until it has filled it or
	 * the next begins, so that each that is busy has its turn. */
	__u32 young;
	/* When a shortcut of one of them last was made, asked about or trusted anew. */
	__u32 attended;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct learn_glance);
	__uint(max_entries, LEARN_GLANCES);
} glances SEC(".maps");

/*
 * Shortcuts that are trusted, where a hash of their keys says: 64 bytes, of which the table
 * touches three times as many, in more pages. Written and read by words; what is read while
 * another CPU writes shows in the sum. Of two here the later waits until the earlier ends.
 * Packets write.
 */
struct learn_front {
	__u64 key[2]; /* as in nat_flow_key; side is 0, zero the hook */
	__u64 addresses, ports;
	__u64 hop;
	__u64 way; /* until, mtu, in_link */
	__u64 sum;
	__u64 packets;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE); /* begins with a page, so every entry is a cache line */
	__type(key, __u32);
	__type(value, struct learn_front);
	__uint(max_entries, 1 << LEARN_FRONT_BITS);
} front SEC(".maps");

/*
 * When a shortcut of the directions of a hash was last attended to, coarsely and for many of
 * them together: so few bytes that they stay in the processor's cache. Packets of short
 * connections, and what leaves of them, look at nothing else here, where little else is
 * accelerated. Packets write. Ever again an old one looks new for a while: slower, never wrong.
 */
struct learn_marks {
	__u16 when[4096]; /* ticks >> LEARN_MARK_TICKS */
};

enum learn_marking {
	LEARN_MARKS = sizeof(struct learn_marks) / sizeof(__u16),
	LEARN_MARK_TICKS = 8,
	/* So many units after it was attended to a direction may be trusted, or wait for a packet
	 * to leave; and the front tell what it carried. One of them is for a mark that another
	 * CPU's packet wrote which had looked at the clock before. */
	LEARN_MARK_LIVES = (LEARN_REFUSED >> LEARN_MARK_TICKS) + 2,
	LEARN_MARK_FRONT = ((LEARN_REFUSED + LEARN_BUSY) >> LEARN_MARK_TICKS) + 2,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct learn_marks);
	__uint(max_entries, 1);
} marks SEC(".maps");

/* Time-out of an established TCP connection. 0: TCP is not accelerated, because
 * connection tracking takes packets for invalid that follow some it has not seen. */
const volatile __u32 learn_tcp_milliseconds = 0;

static __always_inline int learn_trusted(__u32 until, __u32 now)
{
	/* One comparison. Of an entry forgotten for 52 days the clock says nothing: at worst it
	 * is trusted for as long as the longest of these. */
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

static __always_inline __u32 front_slot(__u64 addresses, __u64 ports)
{
	return learn_mix(addresses, ports) >> (64 - LEARN_FRONT_BITS);
}

static __always_inline struct learn_front *front_at(__u32 slot)
{
	return bpf_map_lookup_elem(&front, &slot);
}

static __always_inline __u16 *learn_mark(__u64 addresses, __u64 ports)
{
	__u32 zero = 0;
	struct learn_marks *m = bpf_map_lookup_elem(&marks, &zero);

	return m ? &m->when[(learn_mix(addresses, ports) >> 48) % LEARN_MARKS] : NULL;
}

static __always_inline __u16 learn_mark_time(__u32 now)
{
	return now >> LEARN_MARK_TICKS;
}

/* Whether a mark is no older than that. It may be newer than the packet's look at the clock. */
static __always_inline int learn_marked(const __u16 *mark, __u32 now, __u16 units)
{
	return mark && (__u16)(learn_mark_time(now) - *mark + 1) <= units + 1;
}

static __always_inline __u64 front_sum(const struct learn_front *f)
{
	return f->key[0] * 0x2545f491 + f->key[1] * 0x41c64e6d + f->addresses * 0x5851f42d +
	       f->ports * 0x14057b7f + f->hop * 0x369dea0f + f->way * 0x31358cc5 + 1;
}

/* The hook that the program is at. */
#define LEARN_HOOK ((__u64)(CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP) << 48)

/* What is written there by another CPU at the same time is written no more, or sees that
 * the shortcut is not trusted. */
static __always_inline void front_forget(const struct nat_flow_key *key)
{
	__u64 addresses = learn_key_addresses(key), ports = learn_key_ports(key);
	__u32 slot = front_slot(addresses, ports);
	struct learn_front *f = front_at(slot), *g = front_at(slot ^ 1);

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

static __always_inline struct learn_glance *learn_glance(__u32 hash)
{
	__u32 slot = hash % LEARN_GLANCES;

	return bpf_map_lookup_elem(&glances, &slot);
}

static __always_inline void learn_attended(const struct nat_flow_key *key, __u32 now)
{
	__u16 *mark = learn_mark(learn_key_addresses(key), learn_key_ports(key));
	struct learn_glance *glance = learn_glance(learn_hash(key));

	if (glance)
		glance->attended = now;
	if (mark && *mark != learn_mark_time(now))
		*mark = learn_mark_time(now);
}

/* Whether a direction may have a shortcut that is trusted, or waits for a packet that was
 * just sent up: no look-up in a large table for those that end, or begin. Another CPU may
 * have attended to it since this packet looked at the clock. */
static __always_inline int learn_lives(__u64 addresses, __u64 ports, __u32 now)
{
	struct learn_glance *glance;

	if (!learn_marked(learn_mark(addresses, ports), now, LEARN_MARK_LIVES))
		return 0;
	glance = learn_glance(learn_hash_words(addresses, ports));
	return glance && (__s32)(now - glance->attended) <= LEARN_REFUSED;
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
	struct learn_glance *glance = learn_glance(hash);

	if (glance && glance->young % (2 * LEARN_YOUNG) && !((glance->young ^ hash) >> 16))
		glance->young = 0;
}

/* Whether it is of a direction that has no shortcut in use, so that none of ours ends. */
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
							   const struct nat_shortcut *s)
{
	struct nat_flow_key key = {
		.src = s->dst,
		.dst = s->src,
		.sport = s->dport,
		.dport = s->sport,
		.protocol = packet->key.protocol,
	};

	return key;
}

static __always_inline struct nat_shortcut *learn_other(const struct packet *packet,
							const struct nat_shortcut *s)
{
	struct nat_flow_key key = learn_other_key(packet, s);

	return bpf_map_lookup_elem(&shortcuts, &key);
}

/* The shortcuts of a flow are attended to. */
static __noinline void learn_note(const struct packet *packet, const struct nat_shortcut *s)
{
	struct nat_flow_key key = learn_other_key(packet, s);

	learn_attended(&packet->key, packet->now);
	learn_attended(&key, packet->now);
}

static __always_inline int learn_same(const struct nat_shortcut *a, const struct nat_shortcut *b)
{
	return addr_equal(a->src, b->src) && addr_equal(a->dst, b->dst) && a->sport == b->sport &&
	       a->dport == b->dport;
}

static __always_inline void learn_deltas(const struct nat_flow_key *key, struct nat_shortcut *s)
{
	s->l3_delta = delta_fold(delta_address(key->src, s->src) + delta_address(key->dst, s->dst));
	s->l4_delta =
		delta_fold(delta_word(key->sport, s->sport) + delta_word(key->dport, s->dport));
}

/* Trusted no more: packets go up, and one of them must be seen leaving after this. */
static __always_inline void learn_wait(struct nat_shortcut *s, __u32 now)
{
	s->until = now;
	s->probed = now ? now : 1;
}

/* What the kernel says now becomes of the packet, into *to: connection tracking, then the
 * routes. 0, or why it is the stack's. */
static __noinline int learn_ask(struct ctx *ctx, const struct packet *packet,
				struct nat_shortcut *to)
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
	reason = route_find(ctx, packet, packet->key.src, to->dst, &route);
	if (reason != GO_ON)
		return reason == NAT_PASS_LOCAL ? NAT_ACCEL_LOCAL : NAT_ACCEL_NO_WAY;
	out = link_get(route.link);
	if (!out || !route.hop)
		return NAT_ACCEL_NO_WAY;
	to->hop = route.hop;
	to->mtu = route.mtu;
	to->hook = in->flags & NAT_LINK_XDP && out->flags & NAT_LINK_XDP ? NAT_ACCEL_XDP
									 : NAT_ACCEL_TC;
	return 0;
}

static __always_inline int learn_refuse(const struct packet *packet, struct nat_shortcut *s,
					int reason)
{
	s->reason = reason;
	s->until =
		packet->now + (reason == NAT_ACCEL_UNANSWERED ? LEARN_UNANSWERED : LEARN_REFUSED);
	return reason;
}

/* Makes, or makes anew, the shortcuts of both directions. They wait. */
static __noinline int learn_make(struct ctx *ctx, struct packet *packet)
{
	struct nat_shortcut made = {.left = packet->now - 1}, *other;
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
	if (bpf_map_update_elem(&shortcuts, &key, &made, BPF_ANY))
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
	other = bpf_map_lookup_elem(&shortcuts, &key);
	if (!(other && !other->reason && learn_same(other, &made))) {
		if (bpf_map_update_elem(&shortcuts, &key, &made, BPF_ANY))
			return NAT_ACCEL_NO_ROOM;
		front_forget(&key);
	}
	return silent ? LEARN_SILENT : NAT_ACCEL_WAITING;
}

/*
 * Whether a direction has too few packets to be worth a look: to ask about it, once a second,
 * costs more than the stack does for a few of them. One that fills a window is looked at to
 * the end of the next. count: the packet is counted.
 */
static __always_inline int learn_young(struct learn_glance *glance, __u32 hash, __u32 now,
				       int count)
{
	__u32 window = (hash & 0xffff0000) | (now >> LEARN_WINDOW << 4 & LEARN_WINDOW_MASK), young,
	      full;

	if (!glance)
		return 0;
	young = glance->young;
	full = young % LEARN_YOUNG == LEARN_YOUNG - 1;
	if ((young ^ window) >> 4) {
		if (!((young ^ window) & LEARN_WINDOW_MASK) && !full)
			return 1;
		if (full && !(((young + 16) ^ window) >> 4)) /* a window ago */
			window |= LEARN_YOUNG;
		young = window;
	} else if (full) {
		return 0;
	}
	if (count)
		glance->young = young + 1;
	return !(young & LEARN_YOUNG);
}

/* The flow changes, or has changed: both directions wait, and the kernel is asked anew. */
static __always_inline void learn_stop(const struct packet *packet, struct nat_shortcut *s)
{
	struct nat_flow_key key = learn_other_key(packet, s);
	struct nat_shortcut *other = bpf_map_lookup_elem(&shortcuts, &key);

	learn_wait(s, packet->now);
	s->hook = NAT_ACCEL_ANY;
	front_forget(&packet->key);
	if (other && !other->reason) {
		learn_wait(other, packet->now);
		other->hook = NAT_ACCEL_ANY;
		front_forget(&key);
	}
}

/* Whether the kernel still says what the shortcut does; its way is set to what the
 * kernel says. 0, or why the packet goes up, or LEARN_ANEW. */
static __noinline int learn_again(struct ctx *ctx, const struct packet *packet,
				  struct nat_shortcut *s)
{
	struct nat_shortcut now = {};
	int reason = learn_ask(ctx, packet, &now);

	if (!reason && !learn_same(&now, s))
		return LEARN_ANEW;
	if (reason) {
		learn_stop(packet, s);
		return reason == NAT_ACCEL_NOT_IPV4 ? reason : learn_refuse(packet, s, reason);
	}
	if (s->hop != now.hop) /* none was seen leaving by that: the stack may forbid it */
		learn_wait(s, packet->now);
	s->hop = now.hop;
	s->mtu = now.mtu;
	s->in_link = now.in_link;
	s->hook = now.hook;
	return 0;
}

/* Sends the packet up, to be seen leaving. */
static __always_inline int learn_probe(const struct packet *packet, struct nat_shortcut *s)
{
	s->lately = 0;
	s->probed = packet->now ? packet->now : 1;
	return NAT_ACCEL_PROBE;
}

/*
 * A packet whose shortcut is not trusted. 0: it is from now on. What the kernel says is
 * asked before a packet goes up, so that those that follow it have no translation which
 * it alone has no more; and again after that, unless it was asked just now.
 */
static __noinline int learn_attend(struct ctx *ctx, struct packet *packet, struct nat_shortcut *s)
{
	__u32 now = packet->now, silent = now - s->until;
	struct nat_shortcut *other;
	int reason;

	if (s->reason)
		return LEARN_ANEW;
	learn_note(packet, s);
	if (!s->probed) {
		if (!CTX_TC && packet->class == NAT_TCP && packet->length > LEARN_SMALL &&
		    silent < LEARN_PATIENCE)
			return 0;
		reason = learn_again(ctx, packet, s);
		if (!reason && !s->probed && silent < LEARN_GRACE)
			s->until = now + LEARN_GRACE;
		return reason ?: learn_probe(packet, s);
	}
	other = learn_other(packet, s);
	if (!other)
		return LEARN_ANEW;
	/* Another's packet, with this flow's addresses from elsewhere, proves nothing. */
	if ((__s32)(other->left - s->probed) < 0 || other->left_ifindex != packet->ifindex)
		return NAT_ACCEL_WAITING;
	if (s->hook == NAT_ACCEL_ANY || now - s->probed >= LEARN_GRACE) {
		reason = learn_again(ctx, packet, s);
		if (reason)
			return reason;
	}
	if (now - other->left >= LEARN_TRUST)
		return learn_probe(packet, s);
	if (other->left_hop != s->hop)
		return learn_refuse(packet, s, NAT_ACCEL_OTHER_WAY);
	if (packet->class == NAT_TCP && !s->carried)
		conntrack_keep(ctx, &packet->key, learn_tcp_milliseconds, CONNTRACK_ALIVE);
	s->probed = 0;
	s->until = other->left + LEARN_TRUST;
	s->carried = 1;
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
static __always_inline int learn_fits(const struct nat_flow_key *key, const struct nat_shortcut *s)
{
	__u64 l3 = (__u64)addr_word(s->src) + addr_word(s->dst) + (__u32)~addr_word(key->src) +
		   (__u32)~addr_word(key->dst) + (__u16)~s->l3_delta;
	__u64 l4 =
		s->sport + s->dport + (__u16)~key->sport + (__u16)~key->dport + (__u16)~s->l4_delta;

	return learn_zero(l3) && learn_zero(l4);
}

/* The way of the packet into *to, if it is that entry's. Also if it is not trusted any more,
 * to->packets: how many took it when it lately was. */
static __always_inline int front_read(struct learn_front *f, const struct packet *packet,
				      __u64 addresses, __u64 ports, struct learn_front *to)
{
	const volatile __u64 *word = (const volatile __u64 *)f;

	if (!f || word[0] != addresses || word[1] != (ports | LEARN_HOOK))
		return 0;
	to->key[0] = addresses;
	to->key[1] = ports | LEARN_HOOK;
	to->addresses = word[2];
	to->ports = word[3];
	to->hop = word[4];
	to->way = word[5];
	if (!learn_trusted(to->way, packet->now) || front_sum(to) != word[6]) {
		to->packets = packet->now - (__u32)to->way < LEARN_BUSY ? word[7] : 0;
		return 0;
	}
	f->packets += packet->segments;
	return 1;
}

/* The way of the packet into *to, if it is at the front. */
static __always_inline int front_find(const struct packet *packet, struct learn_front *to)
{
	__u64 addresses = learn_key_addresses(&packet->key);
	__u64 ports = learn_key_ports(&packet->key);
	__u32 slot = front_slot(addresses, ports);

	return learn_marked(learn_mark(addresses, ports), packet->now, LEARN_MARK_FRONT) &&
	       (front_read(front_at(slot), packet, addresses, ports, to) ||
		front_read(front_at(slot ^ 1), packet, addresses, ports, to));
}

/* The flow ends, or begins anew, and the table has forgotten it. */
static __always_inline void front_stop(const struct packet *packet, const struct learn_front *to)
{
	struct nat_flow_key key = {
		.src = addr_of(to->addresses >> 32),
		.dst = addr_of(to->addresses),
		.sport = to->ports >> 16,
		.dport = to->ports,
		.protocol = packet->key.protocol,
	};

	front_forget(&packet->key);
	front_forget(&key);
}

/* Whether a direction may be written there: its own place, or one that nobody needs. */
static __always_inline int front_free(struct learn_front *f, const struct learn_front *of,
				      __u32 now)
{
	const volatile __u64 *word = (const volatile __u64 *)f;

	return f && ((word[0] == of->key[0] && word[1] == of->key[1]) || !word[6] ||
		     !learn_trusted(word[5], now));
}

/* So many packets took the shortcut. */
static __always_inline void learn_carried(struct nat_shortcut *s, __u64 packets)
{
	__u64 lately = s->lately + packets;

	s->packets += packets;
	s->lately = lately < LEARN_WORTH ? lately : LEARN_WORTH;
}

/*
 * The way of the packet into *to, from its shortcut, and to the front if it is trusted and
 * there is room. An LRU map gives a place away at once, to another flow, while packets on
 * other CPUs still look at it: so all is read once, and must fit together.
 */
static __always_inline int front_fill(const struct packet *packet, struct nat_shortcut *s,
				      struct learn_front *to)
{
	struct nat_shortcut copy = *s;
	struct learn_front *f;
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
	to->way = learn_words(copy.until, (__u32)copy.in_link << 16 | copy.mtu);
	slot = front_slot(to->key[0], to->key[1]);
	to->key[1] |= LEARN_HOOK;
	learn_carried(s, packet->segments);
	if (!learn_trusted(copy.until, packet->now))
		return 0;
	f = front_at(slot);
	if (!front_free(f, to, packet->now)) {
		f = front_at(slot ^ 1);
		if (!front_free(f, to, packet->now))
			return 0;
	}
	word = (volatile __u64 *)f;
	if (word[0] == to->key[0] && word[1] == to->key[1])
		learn_carried(s, f->packets);
	word[6] = 0;
	word[0] = to->key[0];
	word[1] = to->key[1];
	word[2] = to->addresses;
	word[3] = to->ports;
	word[4] = to->hop;
	word[5] = to->way;
	word[7] = 0;
	__sync_lock_test_and_set(&f->sum, front_sum(to));
	if (*(volatile __u32 *)&s->until != copy.until)
		word[6] = 0;
	return 0;
}

/* Rewrites and sends. */
static __always_inline int learn_forward(struct ctx *ctx, struct packet *packet,
					 const struct learn_front *to)
{
	struct nat_flow flow = {
		.src = addr_of(to->addresses),
		.dst = addr_of(to->addresses >> 32),
		.sport = to->ports,
		.dport = to->ports >> 16,
		.l3_delta = to->ports >> 32,
		.l4_delta = to->ports >> 48,
	};
	__u32 index = (to->hop >> ROUTE_LINK_SHIFT) - 1;
	struct nat_link *in, *out;

	in = link_get(to->way >> 48);
	out = bpf_map_lookup_elem(&links, &index);
	if (unlikely(!in || in->ifindex != packet->ifindex || !ctx_is_addressed(ctx, in)))
		return NAT_ACCEL_OTHER_LINK;
	if (unlikely(packet->ttl <= 1))
		return NAT_ACCEL_TTL;
	if (unlikely(packet->length > (__u16)(to->way >> 32)))
		return NAT_ACCEL_TOO_BIG;
	if (unlikely(!out || rewrite(ctx, packet, &flow, to->hop, out) != GO_ON))
		return NAT_ACCEL_NO_WAY;
	ctx_tag(ctx, LEARN_OWN);
	packet->action = ctx_transmit(ctx, index, out);
	return NAT_ACCEL_FORWARDED;
}

static __always_inline int learn_packet(struct ctx *ctx, struct packet *packet, int after_xdp)
{
	struct learn_glance *glance;
	struct nat_shortcut *s;
	struct learn_front to;
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
	if (!turns && front_find(packet, &to))
		return learn_forward(ctx, packet, &to);
	hash = learn_hash(&packet->key);
	glance = learn_glance(hash);
	lives = learn_lives(learn_key_addresses(&packet->key), learn_key_ports(&packet->key),
			    packet->now);
	if (!lives) {
		if (turns)
			return after_xdp ? LEARN_SILENT : NAT_ACCEL_TCP_FLAGS;
		/* One that was busy before the silence is asked about at once. */
		if (to.packets < LEARN_YOUNG && learn_young(glance, hash, packet->now, !after_xdp))
			return after_xdp ? LEARN_SILENT : NAT_ACCEL_YOUNG;
	}
	s = bpf_map_lookup_elem(&shortcuts, &packet->key);
	if (unlikely(s && s->hook && s->hook != (CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP)))
		return LEARN_SILENT;
	if (after_xdp && unlikely(!s || !s->hook))
		return LEARN_SILENT;
	if (unlikely(turns)) {
		if (s && !s->reason)
			learn_stop(packet, s);
		else if (!s && front_find(packet, &to))
			front_stop(packet, &to);
		return NAT_ACCEL_TCP_FLAGS;
	}
	if (unlikely(!s))
		return lives && learn_young(glance, hash, packet->now, 1) ? NAT_ACCEL_YOUNG
									  : learn_make(ctx, packet);
	if (unlikely(!learn_trusted(s->until, packet->now))) {
		if (lives && !s->probed && !s->reason && s->lately + to.packets < LEARN_WORTH &&
		    learn_young(glance, hash, packet->now, 1))
			return NAT_ACCEL_YOUNG;
		reason = learn_attend(ctx, packet, s);
		if (reason == LEARN_ANEW)
			reason = learn_make(ctx, packet);
		if (reason)
			return reason;
		if (s->hook != (CTX_TC ? NAT_ACCEL_TC : NAT_ACCEL_XDP))
			return LEARN_SILENT;
	} else if (unlikely(s->reason)) {
		return s->reason;
	}
	reason = front_fill(packet, s, &to);
	return reason ?: learn_forward(ctx, packet, &to);
}

/* after_xdp: XDP has met the packet here before, and passed it up on purpose, but for
 * those whose way out is none of XDP's. */
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
