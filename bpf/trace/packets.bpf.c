// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Follows packets of chosen connections through the stack: where each was received, what it
 * looked like between the functions of a netfilter hook, where it was queued, sent or dropped.
 * What the steps mean is decided in user space, in package trace; here they are only reported.
 *
 * Every packet of the machine passes here, so the steady state must cost little:
 *
 *   received, or made here ──► filter and followed connections ──► the packet is followed
 *   anywhere else          ──► is this packet followed? one comparison of its address
 *
 * A connection is followed by its tuples, both directions: those of the packet that the filter
 * matched, those of its conntrack entry, and those that a program at tc gave a packet that is
 * followed. So it is found again behind each translation, in whichever namespace. What XDP
 * translates is another packet of the stack behind it, and found by what NAT leaves alone.
 */
#include "kernel.h"
#include <bpf/bpf_endian.h>

enum {
	PACKET_BYTES = 160,      /* kept of each step, from the network header on */
	PACKET_SLOTS = 1024,     /* packets that are followed at once; a power of two */
	PACKET_TUPLES = 16384,   /* of followed connections; those not seen for longest go first */
	PACKET_SENT_ONES = 1024, /* packets that were sent last */
	WIRE_NS = 200000000,     /* how long a packet may be on its way to another namespace */
	IDENTITY_WORDS = 4,
};

enum packet_point {
	PACKET_RECEIVED = 1, /* by a device, before tc and netfilter, after XDP */
	PACKET_MADE,         /* by this host: the first function of its output hook */
	PACKET_HOOK,         /* between two functions of a hook */
	PACKET_QUEUED,       /* to the qdisc of a device */
	PACKET_SENT,         /* to its driver */
	PACKET_DROPPED,
};

/* Where a packet is. */
struct packet_place {
	__u64 location; /* dropped: in the kernel's text */
	__u32 netns;    /* inode number */
	__u32 ifindex;  /* in a hook the one it goes out by, then the one it came by */
	__u32 reason;
	enum packet_point point;
	__u8 family, hook; /* NFPROTO_*, enum nf_inet_hooks */
	__u8 zero[6];
};

struct packet_step {
	struct packet_place at;
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 skb;
	__u64 ct;        /* struct nf_conn *, 0: none */
	__u64 ct_status; /* enum ip_conntrack_status */
	__u64 route;     /* the function that its route leads to: ip_forward, ip_local_deliver */
	__u32 in;
	__u32 out; /* that its route leads out by; 0: not routed yet */
	__u32 mark;
	__u32 length; /* from the network header on */
	__u32 cpu;
	__u8 ctinfo;    /* enum ip_conntrack_info */
	__u8 gw_family; /* AF_*; 0: on the link, or not routed */
	__u8 gateway[16];
	/* The entry's original and reply direction. */
	__u8 orig_src[16], orig_dst[16], reply_src[16], reply_dst[16];
	__be16 orig_sport, orig_dport, reply_sport, reply_dport;
	__be16 ethertype;
	__u8 protocol; /* of the entry */
	__u8 zero[5];
	__u32 captured; /* bytes of packet */
	__u8 packet[PACKET_BYTES];
};

/* One direction of a connection, or a packet's ends. IPv4 addresses are the first 4 bytes. */
struct packet_tuple {
	__u8 src[16], dst[16];
	__be16 sport, dport; /* 0 without ports */
	__u8 family, protocol;
	__u16 zero;
};

/* What is the same in a packet before and behind a translation, and in hardly any other. */
struct packet_identity {
	__u8 protocol, type; /* of ICMP */
	__be16 id, length;   /* of IPv4 */
	__be16 sequence;     /* of ICMP */
	__u32 words[IDENTITY_WORDS];
};

/* A followed packet that was sent. */
struct packet_sent_one {
	__u64 time_ns;
	struct packet_tuple tuple;
};

/* Which connections to follow: one end of the first, other end of the second, either way. */
struct packet_filter {
	__u8 a[16], a_mask[16], b[16], b_mask[16];
	__be16 a_port, b_port; /* 0: any */
	__be16 port;           /* of either end; 0: any */
	__u8 family;           /* 2 or 10, as NFPROTO_*; 0: any */
	__u8 protocol;         /* 0: any */
	__u32 netns, ifindex;  /* where it is first seen; 0: anywhere */
	__u32 rate;            /* packets in a second that are followed at most */
	__u32 zero;
};

const volatile struct packet_filter filter;

/* Followed packets by a hash of their address. Written by follow() and forget(). A packet that
 * ends unseen (delivered to a socket) leaves its entry, which goes when its memory is received or
 * made as another packet. Full: the packet that was there is not followed further. */
__u64 followed[PACKET_SLOTS];

/* Counts that user space reads, and the second that the rate is counted in. */
struct {
	__u64 packets; /* followed */
	__u64 capped;  /* matched, but beyond the rate */
	__u64 lost;    /* steps that found no room in the ring */
	__u64 second;  /* since boot */
	__u64 in_second;
	__u64 tuples; /* entered into the table below: 0 means that it is empty */
} counts;

/* Set by user space once every namespace is attached to: of a packet that came before, only a part
 * of the path would be seen. */
__u32 begun;

/* Set by user space where a program of natkit's may forward at XDP what a namespace sends. */
__u32 crosses;

/* When a packet was last put into the table below. */
__u64 sent_ns;

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PACKET_SENT_ONES);
	__type(key, struct packet_identity);
	__type(value, struct packet_sent_one);
} sent_ones SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PACKET_TUPLES);
	__type(key, struct packet_tuple);
	__type(value, __u8);
} tuples SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 * 1024 * 1024);
	__type(value, struct packet_step);
} steps SEC(".maps");

enum {
	CTINFO_MASK = 7,
	CTINFO_NEW = 2,
	IPS_CONFIRMED = 1 << 3,
	AF_INET = 2,
	AF_INET6 = 10,
	NF_ACCEPT = 1,
	LOCAL_OUT = 3,
	POST_ROUTING = 4,
	TCP = 6,
	ICMP = 1,
	ICMP6 = 58,
	IP6_HOP_BY_HOP = 0,
	IP6_ROUTING = 43,
	IP6_FRAGMENT = 44,
	IP6_AUTHENTICATION = 51,
	IP6_DESTINATION = 60,
	IP6_EXTENSIONS = 8, /* that are walked at most */
};

static __always_inline __u64 *slot_of(const void *skb, __u32 next)
{
	/* An skb is at least 192 bytes long; the odd multiplier spreads its address. */
	__u32 hash = (__u32)((__u64)skb >> 6) * 0x9e3779b9;

	return &followed[((hash >> 16) + next) & (PACKET_SLOTS - 1)];
}

static __always_inline int is_followed(const void *skb)
{
	return *slot_of(skb, 0) == (__u64)skb || *slot_of(skb, 1) == (__u64)skb;
}

static __always_inline void forget(const void *skb)
{
	if (*slot_of(skb, 0) == (__u64)skb)
		*slot_of(skb, 0) = 0;
	if (*slot_of(skb, 1) == (__u64)skb)
		*slot_of(skb, 1) = 0;
}

static __always_inline void follow(const void *skb)
{
	if (is_followed(skb))
		return;
	if (*slot_of(skb, 0) && !*slot_of(skb, 1))
		*slot_of(skb, 1) = (__u64)skb;
	else
		*slot_of(skb, 0) = (__u64)skb;
}

static __always_inline int has_ports(__u8 protocol)
{
	return protocol == TCP || protocol == 17 || protocol == 132 || protocol == 33 ||
	       protocol == 136;
}

struct ip4 {
	__u8 version_ihl, tos;
	__be16 length, id, offset;
	__u8 ttl, protocol;
	__be16 check;
	__u8 src[4], dst[4];
};

struct ip6 {
	__u8 version[4];
	__be16 length;
	__u8 protocol, hops;
	__u8 src[16], dst[16];
};

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == IP6_HOP_BY_HOP || protocol == IP6_ROUTING || protocol == IP6_FRAGMENT ||
	       protocol == IP6_AUTHENTICATION || protocol == IP6_DESTINATION;
}

/* Walks the extension headers of IPv6 from p on: how many bytes they have. The protocol is that
 * behind them. later: it is a fragment that has no ports. */
static __noinline int walk_extensions(const unsigned char *p, __u8 *protocol, int *later)
{
	struct {
		__u8 next, length;
		__be16 offset;
	} header;
	int bytes = 0;

	if (!protocol || !later)
		return 0;
	for (int n = 0; n < IP6_EXTENSIONS && is_extension(*protocol); n++) {
		if (bpf_probe_read_kernel(&header, sizeof(header), p + bytes))
			break;
		if (*protocol == IP6_FRAGMENT) {
			bytes += 8;
			*later |= !!(header.offset & bpf_htons(0xfff8));
		} else if (*protocol == IP6_AUTHENTICATION) {
			bytes += (header.length + 2) * 4;
		} else {
			bytes += (header.length + 1) * 8;
		}
		*protocol = header.next;
		if (*later) /* behind it is the middle of something */
			break;
	}
	return bytes;
}

/* The ends of the packet at p; of an ICMP error those of the packet that it is about, turned
 * round, as then it belongs to that connection. Returns 0 if it is not IP. */
static __always_inline int read_header(const unsigned char *p, struct packet_tuple *t,
				       const unsigned char **rest)
{
	union {
		struct ip4 four;
		struct ip6 six;
	} ip;
	int later = 0;

	__builtin_memset(t, 0, sizeof(*t));
	if (bpf_probe_read_kernel(&ip, sizeof(ip.four), p))
		return 0;
	if (ip.four.version_ihl >> 4 == 4) {
		t->family = AF_INET;
		t->protocol = ip.four.protocol;
		__builtin_memcpy(t->src, ip.four.src, 4);
		__builtin_memcpy(t->dst, ip.four.dst, 4);
		*rest = p + (ip.four.version_ihl & 15) * 4;
		/* A later fragment has no ports. */
		return ip.four.offset & bpf_htons(0x1fff) ? 2 : 1;
	}
	if (ip.four.version_ihl >> 4 != 6 || bpf_probe_read_kernel(&ip, sizeof(ip.six), p))
		return 0;
	t->family = AF_INET6;
	t->protocol = ip.six.protocol;
	__builtin_memcpy(t->src, ip.six.src, 16);
	__builtin_memcpy(t->dst, ip.six.dst, 16);
	*rest = p + sizeof(ip.six);
	if (is_extension(t->protocol))
		*rest += walk_extensions(*rest, &t->protocol, &later);
	return later ? 2 : 1;
}

static __always_inline void turn(struct packet_tuple *t)
{
	struct packet_tuple was = *t;

	__builtin_memcpy(t->src, was.dst, 16);
	__builtin_memcpy(t->dst, was.src, 16);
	t->sport = was.dport;
	t->dport = was.sport;
}

static __always_inline int is_error(const struct packet_tuple *t, __u8 type)
{
	if (t->protocol == ICMP)
		return type == 3 || type == 5 || type == 11 || type == 12;
	return t->protocol == ICMP6 && type >= 1 && type <= 4;
}

static __always_inline void read_ports(const unsigned char *p, struct packet_tuple *t)
{
	__be16 ports[2] = {};

	bpf_probe_read_kernel(ports, sizeof(ports), p);
	t->sport = ports[0];
	t->dport = ports[1];
}

static __noinline int read_error(const unsigned char *p, struct packet_tuple *t)
{
	const unsigned char *rest = 0;
	__u8 type = 0;

	if (!t)
		return 0;
	bpf_probe_read_kernel(&type, sizeof(type), p);
	if (!is_error(t, type))
		return 1;
	if (read_header(p + 8, t, &rest) != 1)
		return 0;
	if (has_ports(t->protocol))
		read_ports(rest, t);
	turn(t);
	return 1;
}

static __always_inline int read_tuple(const unsigned char *p, struct packet_tuple *t)
{
	const unsigned char *rest = 0;
	int kind = read_header(p, t, &rest);

	if (!kind)
		return 0;
	if (kind == 1 && has_ports(t->protocol))
		read_ports(rest, t);
	else if (kind == 1 && (t->protocol == ICMP || t->protocol == ICMP6))
		return read_error(rest, t);
	return 1;
}

static __always_inline int in(const __u8 *address, const volatile __u8 *of,
			      const volatile __u8 *mask)
{
	const __u32 *a = (const __u32 *)address;
	const volatile __u32 *b = (const volatile __u32 *)of, *m = (const volatile __u32 *)mask;

	return (a[0] & m[0]) == b[0] && (a[1] & m[1]) == b[1] && (a[2] & m[2]) == b[2] &&
	       (a[3] & m[3]) == b[3];
}

static __always_inline int chosen(const struct packet_tuple *t)
{
	if (filter.family && t->family != filter.family)
		return 0;
	if (filter.protocol && t->protocol != filter.protocol)
		return 0;
	if (filter.port && t->sport != filter.port && t->dport != filter.port)
		return 0;
	return (in(t->src, filter.a, filter.a_mask) && in(t->dst, filter.b, filter.b_mask) &&
		(!filter.a_port || t->sport == filter.a_port) &&
		(!filter.b_port || t->dport == filter.b_port)) ||
	       (in(t->dst, filter.a, filter.a_mask) && in(t->src, filter.b, filter.b_mask) &&
		(!filter.a_port || t->dport == filter.a_port) &&
		(!filter.b_port || t->sport == filter.b_port));
}

static __always_inline void remember_one(const struct packet_tuple *t)
{
	const __u8 one = 1;

	if (!bpf_map_lookup_elem(&tuples, t) && !bpf_map_update_elem(&tuples, t, &one, BPF_ANY))
		__sync_fetch_and_add(&counts.tuples, 1);
}

/* Both directions of what these ends are. */
static __always_inline void remember(struct packet_tuple *t)
{
	remember_one(t);
	turn(t);
	remember_one(t);
	turn(t);
}

/* The packet at p is of a followed connection, whatever its ends are now. */
static __noinline int follow_ends(const unsigned char *p)
{
	struct packet_tuple t;

	if (read_tuple(p, &t))
		remember(&t);
	return 0;
}

static __always_inline struct nf_conn *packet_ct(struct sk_buff *skb)
{
	if (!bpf_core_field_exists(skb->_nfct))
		return 0;
	return (struct nf_conn *)(BPF_CORE_READ(skb, _nfct) & ~(unsigned long)CTINFO_MASK);
}

static __always_inline void read_end(struct nf_conntrack_tuple *of, __u8 *src, __u8 *dst,
				     __be16 *sport, __be16 *dport)
{
	bpf_core_read(src, 16, &of->src.u3);
	bpf_core_read(dst, 16, &of->dst.u3);
	*sport = BPF_CORE_READ(of, src.u.all);
	*dport = BPF_CORE_READ(of, dst.u.all);
}

static __always_inline void follow_entry(const struct packet_step *s)
{
	struct packet_tuple t = {.protocol = s->protocol};

	if (!s->ct || !s->protocol)
		return;
	t.family = s->ethertype == bpf_htons(0x86dd) ? AF_INET6 : AF_INET;
	__builtin_memcpy(t.src, s->orig_src, 16);
	__builtin_memcpy(t.dst, s->orig_dst, 16);
	if (has_ports(t.protocol)) {
		t.sport = s->orig_sport;
		t.dport = s->orig_dport;
	}
	remember(&t);
	__builtin_memcpy(t.src, s->reply_src, 16);
	__builtin_memcpy(t.dst, s->reply_dst, 16);
	if (has_ports(t.protocol)) {
		t.sport = s->reply_sport;
		t.dport = s->reply_dport;
	}
	remember(&t);
}

static __always_inline void read_route(struct sk_buff *skb, struct packet_step *s)
{
	struct dst_entry *dst = (struct dst_entry *)(BPF_CORE_READ(skb, _skb_refdst) & ~1UL);
	struct rtable *route = (struct rtable *)dst;

	if (!dst)
		return;
	s->out = BPF_CORE_READ(dst, dev, ifindex);
	s->route = (__u64)BPF_CORE_READ(dst, input);
	if (s->ethertype != bpf_htons(0x0800) || !bpf_core_field_exists(route->rt_gw_family))
		return;
	s->gw_family = BPF_CORE_READ(route, rt_gw_family);
	if (s->gw_family == AF_INET)
		bpf_core_read(s->gateway, 4, &route->rt_gw4);
	else if (s->gw_family)
		bpf_core_read(s->gateway, 16, &route->rt_gw6);
}

/* A place that a followed packet has come to. Out of line: taken for these only. */
static __noinline int report(struct sk_buff *skb, struct packet_place *place,
			     const unsigned char *p)
{
	struct packet_step *s;
	struct nf_conn *ct;
	__u64 captured; /* 64 bits: Linux 6.1 loses the bound of a half register */

	if (!place)
		return 0;
	s = bpf_ringbuf_reserve(&steps, sizeof(*s), 0);
	if (!s) {
		__sync_fetch_and_add(&counts.lost, 1);
		return 0;
	}
	__builtin_memset(s, 0, sizeof(*s));
	s->at = *place;
	s->time_ns = bpf_ktime_get_ns();
	s->cpu = bpf_get_smp_processor_id();
	s->skb = (__u64)skb;
	s->ethertype = BPF_CORE_READ(skb, protocol);
	s->mark = BPF_CORE_READ(skb, mark);
	s->in = BPF_CORE_READ(skb, skb_iif);
	if (s->at.point != PACKET_RECEIVED)
		read_route(skb, s);
	ct = packet_ct(skb);
	if (ct && bpf_core_field_exists(ct->tuplehash)) {
		s->ct = (__u64)ct;
		s->ctinfo = BPF_CORE_READ(skb, _nfct) & CTINFO_MASK;
		bpf_core_read(&s->ct_status, sizeof(s->ct_status), &ct->status);
		read_end(&ct->tuplehash[0].tuple, s->orig_src, s->orig_dst, &s->orig_sport,
			 &s->orig_dport);
		read_end(&ct->tuplehash[1].tuple, s->reply_src, s->reply_dst, &s->reply_sport,
			 &s->reply_dport);
		s->protocol = BPF_CORE_READ(ct, tuplehash[0].tuple.dst.protonum);
		follow_entry(s);
	}
	/* To the end of the linear part: payload may lie elsewhere. */
	s->length = BPF_CORE_READ(skb, len) - (__u32)(p - BPF_CORE_READ(skb, data));
	captured = BPF_CORE_READ(skb, tail) - (__u32)(p - BPF_CORE_READ(skb, head));
	/* Else clang compares the lower half of what it passes, and the verifier loses the bound.
	 */
	asm volatile("" : "+r"(captured));
	if (captured > PACKET_BYTES)
		captured = PACKET_BYTES;
	if (captured && !bpf_probe_read_kernel(s->packet, captured, p))
		s->captured = captured;
	bpf_ringbuf_submit(s, 0);
	return 0;
}

static __always_inline const unsigned char *network_header(struct sk_buff *skb)
{
	return BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
}

/* Whether one more packet may be followed in this second. */
static __always_inline int within_rate(void)
{
	__u64 second = bpf_ktime_get_ns() / 1000000000;

	if (counts.second != second) {
		counts.second = second;
		counts.in_second = 0;
	}
	if (__sync_fetch_and_add(&counts.in_second, 1) >= filter.rate) {
		__sync_fetch_and_add(&counts.capped, 1);
		return 0;
	}
	__sync_fetch_and_add(&counts.packets, 1);
	return 1;
}

/* Whether the addresses of a packet are those of the filter, either way, by one read: what decides
 * for most packets while no connection is followed. */
static __always_inline int addresses_match(const unsigned char *p)
{
	__u32 four[5], six[10];
	const volatile __u32 *a = (const volatile __u32 *)filter.a,
			     *b = (const volatile __u32 *)filter.b;
	const volatile __u32 *am = (const volatile __u32 *)filter.a_mask,
			     *bm = (const volatile __u32 *)filter.b_mask;

	if (filter.family == AF_INET) {
		if (bpf_probe_read_kernel(four, sizeof(four), p))
			return 0;
		return ((four[3] & am[0]) == a[0] && (four[4] & bm[0]) == b[0]) ||
		       ((four[4] & am[0]) == a[0] && (four[3] & bm[0]) == b[0]) ||
		       ((__u8 *)four)[9] == ICMP; /* an error may be about the connection */
	}
	if (filter.family == AF_INET6) {
		if (bpf_probe_read_kernel(six, sizeof(six), p))
			return 0;
		return (in((__u8 *)&six[2], filter.a, filter.a_mask) &&
			in((__u8 *)&six[6], filter.b, filter.b_mask)) ||
		       (in((__u8 *)&six[6], filter.a, filter.a_mask) &&
			in((__u8 *)&six[2], filter.b, filter.b_mask)) ||
		       ((__u8 *)six)[6] == ICMP6 || is_extension(((__u8 *)six)[6]);
	}
	return 1;
}

/* The identity of the IPv4 packet at p. Returns 0 for others, and for fragments. */
static __always_inline int read_identity(const unsigned char *p, struct packet_identity *i)
{
	struct ip4 ip;
	__u8 head[8 + 4 * IDENTITY_WORDS];
	__u32 header, bytes;

	__builtin_memset(i, 0, sizeof(*i));
	if (bpf_probe_read_kernel(&ip, sizeof(ip), p) || ip.version_ihl >> 4 != 4 ||
	    ip.offset & bpf_htons(0x3fff))
		return 0;
	header = (ip.version_ihl & 15) * 4;
	bytes = bpf_ntohs(ip.length) - header;
	i->protocol = ip.protocol;
	i->id = ip.id;
	i->length = ip.length;
	/* What lies behind the packet's end is not used: each word is, that is all of the packet.
	 */
	if (bpf_probe_read_kernel(head, sizeof(head), p + header))
		return 0;
	if (ip.protocol == ICMP) {
		i->type = head[0];
		__builtin_memcpy(&i->sequence, head + 6, sizeof(i->sequence));
	}
	if (ip.protocol == TCP) { /* from the sequence number to the window */
		__builtin_memcpy(i->words, head + 4, 12);
		return 1;
	}
	for (__u32 n = 0; n < IDENTITY_WORDS; n++)
		if (8 + 4 * (n + 1) <= bytes)
			__builtin_memcpy(&i->words[n], head + 8 + 4 * n, 4);
	return 1;
}

static __always_inline int same_end(const __u8 *a, __be16 a_port, const __u8 *b, __be16 b_port)
{
	return a_port == b_port && !__builtin_memcmp(a, b, 4);
}

/* Notes a followed packet that leaves its namespace. */
static __noinline int note_sent(const unsigned char *p)
{
	struct packet_sent_one one = {.time_ns = bpf_ktime_get_ns()};
	struct packet_identity i;

	if (!read_identity(p, &i) || !read_tuple(p, &one.tuple))
		return 0;
	bpf_map_update_elem(&sent_ones, &i, &one, BPF_ANY);
	sent_ns = one.time_ns;
	return 0;
}

/* Whether a packet with these ends is a followed one that was sent shortly before and had other
 * ends. */
static __noinline int crossed(const unsigned char *p, const struct packet_tuple *t)
{
	struct packet_sent_one *one;
	struct packet_identity i;
	__u64 now = bpf_ktime_get_ns();

	if (!t || now - sent_ns > WIRE_NS || !read_identity(p, &i))
		return 0;
	one = bpf_map_lookup_elem(&sent_ones, &i);
	if (!one || now - one->time_ns > WIRE_NS)
		return 0;
	/* Short datagrams are alike. */
	if (i.protocol != TCP && !i.id && !i.words[0] &&
	    !same_end(t->src, t->sport, one->tuple.src, one->tuple.sport) &&
	    !same_end(t->dst, t->dport, one->tuple.dst, one->tuple.dport))
		return 0;
	bpf_map_delete_elem(&sent_ones, &i);
	return 1;
}

/* Begins to follow a packet that the filter matches, or that is of a followed connection. */
static __always_inline int enter(struct sk_buff *skb, const unsigned char *p,
				 struct net_device *dev, int received)
{
	struct packet_tuple t;

	if (!begun || (!counts.tuples && !addresses_match(p)) || !read_tuple(p, &t))
		return 0;
	if (chosen(&t) &&
	    (!filter.netns || BPF_CORE_READ(dev, nd_net.net, ns.inum) == filter.netns) &&
	    (!filter.ifindex || (__u32)BPF_CORE_READ(dev, ifindex) == filter.ifindex)) {
		remember(&t);
	} else if (!counts.tuples) {
		return 0;
	} else if (!bpf_map_lookup_elem(&tuples, &t)) {
		if (!received || !crosses || !crossed(p, &t))
			return 0;
		remember(&t);
	}
	if (!is_followed(skb) && !within_rate())
		return 0;
	follow(skb);
	return 1;
}

static __always_inline void at_device(struct packet_place *place, const struct net_device *dev)
{
	place->netns = BPF_CORE_READ(dev, nd_net.net, ns.inum);
	place->ifindex = BPF_CORE_READ(dev, ifindex);
}

SEC("tp_btf/netif_receive_skb")
int BPF_PROG(packet_received, struct sk_buff *skb)
{
	const unsigned char *p = skb->data; /* the network header is set behind here */
	__be16 ethertype = skb->protocol;

	if (ethertype == bpf_htons(0x8100))
		p += 4;
	else if (ethertype != bpf_htons(0x0800) && ethertype != bpf_htons(0x86dd))
		return 0;
	if (!enter(skb, p, skb->dev, 1)) {
		forget(skb); /* a packet whose memory this was ended unseen */
		return 0;
	}
	struct packet_place place = {.point = PACKET_RECEIVED};
	at_device(&place, skb->dev);
	return report(skb, &place, p);
}

SEC("tp_btf/net_dev_queue")
int BPF_PROG(packet_queued, struct sk_buff *skb)
{
	/* What was made here and met no netfilter hook of ours begins here, and what has become a
	 * packet of the filter by a translation: with its entry the connection is known from its
	 * other side. */
	const unsigned char *p = skb->head + skb->network_header;

	if (skb->skb_iif && is_followed(skb)) {
		if (!packet_ct(skb)) /* a program may have translated it; entries know their ends */
			follow_ends(p);
	} else if (!enter(skb, p, skb->dev, 0)) {
		forget(skb);
		return 0;
	}
	struct packet_place place = {.point = PACKET_QUEUED};
	at_device(&place, skb->dev);
	return report(skb, &place, p);
}

SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(packet_sent, struct sk_buff *skb, struct net_device *dev)
{
	if (!is_followed(skb))
		return 0;
	struct packet_place place = {.point = PACKET_SENT};
	at_device(&place, dev);
	report(skb, &place, network_header(skb));
	if (crosses)
		note_sent(network_header(skb));
	/* The driver frees it unseen, or it is received again. */
	forget(skb);
	return 0;
}

static __always_inline int is_ip(const struct sk_buff *skb)
{
	return skb->protocol == bpf_htons(0x0800) || skb->protocol == bpf_htons(0x86dd);
}

/* The device that a dropped packet was at. See locate() of drops.bpf.c: that memory of a packet is
 * used for other things, too. */
static __always_inline struct net_device *device_of_drop(struct sk_buff *skb)
{
	struct net_device *dev = skb->dev;
	struct dst_entry *dst;

	if (dev->nd_net.net && dev->nd_net.net->loopback_dev->nd_net.net == dev->nd_net.net)
		return dev;
	dst = (struct dst_entry *)(skb->_skb_refdst & ~1UL);
	return dst ? BPF_CORE_READ(dst, dev) : 0;
}

static __always_inline int drop(struct sk_buff *skb, struct net_device *dev, void *location,
				__u32 reason)
{
	struct packet_place place = {
		.point = PACKET_DROPPED, .location = (__u64)location, .reason = reason};

	if (dev)
		at_device(&place, dev);
	report(skb, &place, network_header(skb));
	forget(skb);
	return 0;
}

SEC("tp_btf/kfree_skb")
int BPF_PROG(packet_dropped, struct sk_buff *skb, void *location, __u32 reason)
{
	if (!is_followed(skb))
		return 0;
	if (!is_ip(skb)) {
		forget(skb);
		return 0;
	}
	return drop(skb, device_of_drop(skb), location, reason);
}

/* What is attached alone while natkit waits for a packet of the filter: no packet passes here that
 * is forwarded and belongs to a connection that is there already. */

SEC("tp_btf/kfree_skb")
int BPF_PROG(packet_lost, struct sk_buff *skb, void *location, __u32 reason)
{
	struct net_device *dev;

	if (!is_ip(skb))
		return 0;
	dev = device_of_drop(skb);
	if (!enter(skb, network_header(skb), dev, 0))
		return 0;
	return drop(skb, dev, location, reason);
}

static __always_inline void at_hook(struct packet_place *place, struct bpf_nf_ctx *ctx)
{
	place->netns = ctx->state->net->ns.inum;
	place->family = ctx->state->pf;
	place->hook = ctx->state->hook;
	place->ifindex = ctx->state->out  ? ctx->state->out->ifindex
			 : ctx->state->in ? ctx->state->in->ifindex
					  : 0;
}

/* The first function of the output hooks. */
SEC("netfilter")
int packet_made(struct bpf_nf_ctx *ctx)
{
	struct sk_buff *skb = ctx->skb;

	if (!enter(skb, skb->head + skb->network_header, ctx->state->out, 0)) {
		forget(skb);
		return NF_ACCEPT;
	}
	struct packet_place place = {.point = PACKET_MADE};
	at_hook(&place, ctx);
	report(skb, &place, network_header(skb));
	return NF_ACCEPT;
}

SEC("netfilter")
int packet_hook(struct bpf_nf_ctx *ctx)
{
	struct sk_buff *skb = ctx->skb;

	if (!is_followed(skb))
		return NF_ACCEPT;
	struct packet_place place = {.point = PACKET_HOOK};
	at_hook(&place, ctx);
	report(skb, &place, network_header(skb));
	return NF_ACCEPT;
}

/* Behind connection tracking, in namespaces without NAT, while natkit waits: as packet_lost. One
 * word of the packet decides about those of established connections. */
SEC("netfilter")
int packet_new(struct bpf_nf_ctx *ctx)
{
	struct sk_buff *skb = ctx->skb;

	if ((skb->_nfct & CTINFO_MASK) != CTINFO_NEW)
		return NF_ACCEPT;
	if (!enter(skb, skb->head + skb->network_header,
		   ctx->state->in && ctx->state->hook != POST_ROUTING ? ctx->state->in
								      : ctx->state->out,
		   0))
		return NF_ACCEPT;
	struct packet_place place = {.point = PACKET_HOOK};
	at_hook(&place, ctx);
	report(skb, &place, network_header(skb));
	forget(skb);
	return NF_ACCEPT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
