// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the packets that the kernel drops, by place, reason, namespace,
 * interface and what conntrack knew of them. What a drop means for NAT is
 * decided in user space, in package observe; here it is only counted.
 *
 * The kernel tells of a drop once (tracepoint kfree_skb), whoever drops it, and
 * a flood of drops must not cost the packets that are forwarded beside it: the
 * steady state is one comparison and one increment, nothing leaves the kernel.
 */
#include "kernel.h"

enum {
	DROP_KEYS = 4096, /* different keys in one window; more are counted in losses */
	DROP_SLOTS = 64,  /* keys that a CPU counts without a look-up; a power of two */
	DROP_SAMPLES = 4, /* the first packets of a key that are kept, for each CPU and window */
	DROP_SAMPLE_BYTES = 64, /* from the network header on: IPv6 and TCP without options */
	DROP_STACKS = 8192,
	DROP_STACK_DEPTH = 32,
};

/* What the packet says about where in the NAT path it was: bits of drop_key.class. */
enum drop_class {
	DROP_TRACKED = 1,   /* has a conntrack entry */
	DROP_UNTRACKED = 2, /* a rule said notrack */
	DROP_CONFIRMED = 4, /* its entry is in the table */
	DROP_SNAT_DONE = 8, /* its source translation is decided: only confirmation is left */
	DROP_ROUTED = 16,   /* past the routing decision */
	DROP_LOCAL = 32,    /* made here and not received from a device, loopback included */
	DROP_SENT = 64,     /* received and on its way out: its device is another one already */
	DROP_OPAQUE = 128,  /* its entry can't be read: conntrack was loaded after this program */
	DROP_TCP_END = 256, /* if it is TCP: FIN or RST. Looked at only without a reason */
	/* TCP from port 20, which nobody wants here or a rule refuses: a file by FTP. One tells
	 * that a helper is missing, so it is not to be lost among samples of others. */
	DROP_FTP_DATA = 512,
};

struct drop_key {
	__u64 location;
	__u32 reason;
	__u32 netns;   /* inode number; 0: could not be told */
	__u32 ifindex; /* in that namespace; 0: none */
	enum drop_class class;
	__u32 stack; /* 1 + id in stacks; 0: none */
	__u32 zero;  /* no hole in a key */
};

struct drop_sample {
	struct drop_key key;
	__u64 ct_status; /* enum ip_conntrack_status; 0 without an entry */
	__u32 mark;
	__u32 in;     /* interface that it came in by; 0: made here */
	__u32 out;    /* that its route leads out by; 0: not routed yet */
	__u32 ctinfo; /* enum ip_conntrack_info */
	/* The tuple of the entry's original direction: the packet before its translation. */
	__u8 src[16], dst[16];
	__be16 sport, dport;
	__u8 protocol;
	__u8 captured; /* bytes of packet */
	__be16 ethertype;
	__u64 second; /* of the window: see struct drop_front */
	__u8 packet[DROP_SAMPLE_BYTES];
};

/*
 * What is counted goes into a window, of which there are two: user space makes one
 * the current and, once no program can hold the other any more, reads and empties
 * that. So no drop is counted in two windows or in none.
 *
 * A window has two parts. In front each CPU has a few slots of its own, in which
 * the first key that hashes there stays until the window ends: a flood has few
 * keys, and finds its slot in some 10 ns. All other keys go to a hash table. Full:
 * the drop is counted in losses. Written by count_drop only, emptied by user space only.
 */
struct drop_slot {
	struct drop_key key;
	__u64 count; /* 0: the slot is free */
};

struct drop_front {
	__u64 second; /* set by user space: the table of this window is counts_b, not counts_a */
	struct drop_slot slots[DROP_SLOTS];
};

struct drop_fronts {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct drop_front);
} front_a SEC(".maps"), front_b SEC(".maps");

struct drop_counts {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, DROP_KEYS);
	__type(key, struct drop_key);
	__type(value, __u64);
} counts_a SEC(".maps"), counts_b SEC(".maps");

/* The current window. Written by user space; the kernel waits there for running programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct drop_fronts);
} windows SEC(".maps") = {.values = {&front_a}};

/* Drops that found no room in the window's table, since the program was loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} losses SEC(".maps");

/* Samples to user space. Full: the packet is counted all the same, only not shown. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
	__type(value, struct drop_sample);
} samples SEC(".maps");

/* Written with stacks only; user space makes it small otherwise. Full, or a hash
 * collision: the drop is counted without its stack. */
struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, DROP_STACKS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, DROP_STACK_DEPTH * sizeof(__u64));
} stacks SEC(".maps");

const volatile __u32 only_netns; /* 0: all namespaces */
const volatile __u8 with_stacks;
const volatile __u32 not_specified = ~0U; /* SKB_DROP_REASON_NOT_SPECIFIED in this kernel */
const volatile __u32 no_socket = ~0U, netfilter_drop = ~0U; /* likewise */

/* enum ip_conntrack_info, ip_conntrack_status: part of the kernel's user API. */
enum {
	CTINFO_MASK = 7,
	IP_CT_UNTRACKED = 7,
	IPS_CONFIRMED = 1 << 3,
	IPS_SRC_NAT_DONE = 1 << 7,
};

static __always_inline struct nf_conn *packet_ct(struct sk_buff *skb)
{
	if (!bpf_core_field_exists(skb->_nfct))
		return 0;
	return (struct nf_conn *)(skb->_nfct & ~(unsigned long)CTINFO_MASK);
}

static __always_inline __u64 ct_status(struct nf_conn *ct)
{
	__u64 status = 0;

	/* In a kernel with conntrack as a module the type is in the module's BTF. */
	if (ct && bpf_core_field_exists(ct->status))
		bpf_core_read(&status, sizeof(status), &ct->status);
	return status;
}

/*
 * Namespace and interface. skb->dev shares its memory with the links of socket
 * queues and with UDP's scratch space, so it may point anywhere: it is a device if
 * its namespace's loopback device agrees. Reading through a wild pointer gives 0.
 */
static __always_inline void locate(struct sk_buff *skb, struct drop_key *key)
{
	struct net_device *dev = skb->dev;
	struct net *net = dev->nd_net.net;
	struct dst_entry *dst;
	struct sock *sk;

	if (net && net->loopback_dev->nd_net.net == net) {
		key->netns = net->ns.inum;
		key->ifindex = dev->ifindex;
		return;
	}
	/* Sent by this host and not yet given to a device: the route knows. */
	dst = (struct dst_entry *)(skb->_skb_refdst & ~1UL);
	if (dst) {
		key->netns = BPF_CORE_READ(dst, dev, nd_net.net, ns.inum);
		key->ifindex = BPF_CORE_READ(dst, dev, ifindex);
	}
	sk = skb->sk;
	if (!key->netns && sk) {
		key->netns = sk->__sk_common.skc_net.net->ns.inum;
		key->ifindex = skb->skb_iif;
	}
}

static __always_inline enum drop_class classify(struct sk_buff *skb, __u32 ifindex)
{
	struct nf_conn *ct = packet_ct(skb);
	enum drop_class class = 0;

	if (ct) {
		__u64 status = ct_status(ct);

		class |= DROP_TRACKED;
		if (!bpf_core_field_exists(ct->status))
			class |= DROP_OPAQUE;
		if (status & IPS_CONFIRMED)
			class |= DROP_CONFIRMED;
		if (status & IPS_SRC_NAT_DONE)
			class |= DROP_SNAT_DONE;
	} else if (bpf_core_field_exists(skb->_nfct) && skb->_nfct == IP_CT_UNTRACKED) {
		class |= DROP_UNTRACKED;
	}
	if (skb->_skb_refdst & ~1UL)
		class |= DROP_ROUTED;
	if (!skb->skb_iif)
		class |= DROP_LOCAL;
	else if (ifindex != (__u32)skb->skb_iif)
		class |= DROP_SENT;
	return class;
}

/*
 * The last FIN of a connection that is in TIME_WAIT is freed as a drop without a
 * reason, at the place where a full accept queue shows, on older kernels, too.
 */
static __always_inline int ends_tcp(struct sk_buff *skb)
{
	const __u8 fin_rst = 1 | 4;
	__u8 flags = 0;

	bpf_probe_read_kernel(&flags, sizeof(flags), skb->head + skb->transport_header + 13);
	return flags & fin_rst;
}

static __always_inline int is_ftp_data(struct sk_buff *skb)
{
	const __be16 ftp_data = 20 << 8, ipv4 = 0x0008; /* 20 and ETH_P_IP in network order */
	const __u32 ipv4_protocol = 9, ipv6_next = 6;
	const __u8 tcp = 6;
	__be16 port = 0;
	__u8 protocol = 0;

	bpf_probe_read_kernel(&port, sizeof(port), skb->head + skb->transport_header);
	if (port != ftp_data)
		return 0;
	bpf_probe_read_kernel(&protocol, sizeof(protocol),
			      skb->head + skb->network_header +
				      (skb->protocol == ipv4 ? ipv4_protocol : ipv6_next));
	return protocol == tcp;
}

/*
 * The first packets of a key, then each with a chance that shrinks as they grow in number:
 * so what is kept stands for all of the window, and a flood costs a few hundred samples.
 */
static __always_inline int chosen(__u64 count)
{
	return count <= DROP_SAMPLES || bpf_get_prandom_u32() % (__u32)count < DROP_SAMPLES;
}

/* Out of line: taken for chosen packets only. */
static __noinline void sample(struct sk_buff *skb, struct drop_key *key, __u64 second)
{
	struct drop_sample *s = bpf_ringbuf_reserve(&samples, sizeof(*s), 0);
	struct nf_conn *ct = packet_ct(skb);
	struct dst_entry *dst;
	__u32 captured = 0;

	if (!s)
		return;
	__builtin_memset(s, 0, sizeof(*s));
	s->key = *key;
	s->second = second;
	s->ethertype = skb->protocol;
	s->ct_status = ct_status(ct);
	s->mark = skb->mark;
	s->in = skb->skb_iif;
	if (bpf_core_field_exists(skb->_nfct))
		s->ctinfo = skb->_nfct & CTINFO_MASK;
	dst = (struct dst_entry *)(skb->_skb_refdst & ~1UL);
	if (dst)
		s->out = BPF_CORE_READ(dst, dev, ifindex);
	if (ct && bpf_core_field_exists(ct->tuplehash)) {
		struct nf_conntrack_tuple *tuple = &ct->tuplehash[0].tuple;

		bpf_core_read(s->src, sizeof(s->src), &tuple->src.u3);
		bpf_core_read(s->dst, sizeof(s->dst), &tuple->dst.u3);
		s->sport = BPF_CORE_READ(tuple, src.u.all);
		s->dport = BPF_CORE_READ(tuple, dst.u.all);
		s->protocol = BPF_CORE_READ(tuple, dst.protonum);
	}
	if (skb->tail > skb->network_header)
		captured = skb->tail - skb->network_header;
	if (captured > DROP_SAMPLE_BYTES)
		captured = DROP_SAMPLE_BYTES;
	if (captured &&
	    !bpf_probe_read_kernel(s->packet, captured, skb->head + skb->network_header))
		s->captured = captured;
	/* User space looks when its window ends; nobody is to be woken for a drop. */
	bpf_ringbuf_submit(s, BPF_RB_NO_WAKEUP);
}

/* Field by field: clang 19 compares structures of this size byte by byte. */
static __always_inline int same(const struct drop_key *a, const struct drop_key *b)
{
	return a->location == b->location && a->reason == b->reason && a->netns == b->netns &&
	       a->ifindex == b->ifindex && a->class == b->class && a->stack == b->stack;
}

static __always_inline struct drop_slot *slot_of(struct drop_front *front, struct drop_key *key)
{
	const __u32 golden = 0x9e3779b9; /* Fibonacci hashing: the high bits are the hash */
	__u32 hash = (__u32)key->location ^ key->reason << 24 ^ key->netns << 8;

	hash = (hash * golden ^ key->ifindex ^ key->class << 16 ^ key->stack << 8) * golden;
	return &front->slots[hash / (0x100000000ULL / DROP_SLOTS)];
}

/* The key's count on this CPU in a table of the second part, made if need be. */
static __always_inline __u64 *count_in(void *counts, struct drop_key *key)
{
	__u64 *count = bpf_map_lookup_elem(counts, key), none = 0;

	if (count)
		return count;
	/* Fails if another CPU was first, which is as good, or if it is full. */
	bpf_map_update_elem(counts, key, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(counts, key);
}

SEC("tp_btf/kfree_skb")
int BPF_PROG(count_drop, struct sk_buff *skb, void *location, __u32 reason)
{
	struct drop_key key = {.location = (__u64)location, .reason = reason};
	struct drop_front *front;
	struct drop_slot *slot;
	__u32 zero = 0;
	void *window;
	__u64 *count;

	locate(skb, &key);
	if (only_netns && key.netns != only_netns)
		return 0;
	key.class = classify(skb, key.ifindex);
	if (reason == not_specified && ends_tcp(skb))
		key.class |= DROP_TCP_END;
	if ((reason == no_socket || reason == netfilter_drop) && is_ftp_data(skb))
		key.class |= DROP_FTP_DATA;
	if (with_stacks) {
		long id = bpf_get_stackid(ctx, &stacks, 0);

		if (id >= 0)
			key.stack = id + 1;
	}

	window = bpf_map_lookup_elem(&windows, &zero);
	if (!window)
		return 0;
	front = bpf_map_lookup_elem(window, &zero);
	if (!front)
		return 0;
	slot = slot_of(front, &key);
	if (!slot->count)
		slot->key = key;
	if (same(&slot->key, &key))
		count = &slot->count;
	else if (front->second)
		count = count_in(&counts_b, &key);
	else
		count = count_in(&counts_a, &key);

	if (!count) {
		count = bpf_map_lookup_elem(&losses, &zero);
		if (count)
			*count += 1;
		return 0;
	}
	*count += 1;
	if (chosen(*count))
		sample(skb, &key, front->second);
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
