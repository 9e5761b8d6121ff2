/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's connection tracking as accel sees it: which entry a packet belongs to,
 * whether it can be accelerated, and what it makes of the packet. Nothing else knows
 * the kernel's types. Fields are found by their names in the running kernel's BTF
 * (CO-RE), or in that of the module nf_conntrack.
 *
 * The look-up by kfunc is of Linux 6.1 for XDP and tc alike, for TCP and UDP, in the
 * namespace of the device, in the default zone, and finds nothing that has timed out.
 */
#ifndef NATKIT_CONNTRACK_H
#define NATKIT_CONNTRACK_H

#include <bpf/bpf_core_read.h>
#include "accel/entry.h"
#include "lib/parse.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct nf_conntrack_tuple {
	struct {
		struct {
			__be32 ip;
		} u3;
		struct {
			__be16 all;
		} u;
	} src, dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_ct_ext {
	__u8 offset[1];
};

struct nf_ct_timeout {
	char data[1]; /* by state, in jiffies */
};

struct nf_conn_timeout {
	struct nf_ct_timeout *timeout;
};

struct ip_ct_tcp_state {
	__u8 flags;
};

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

struct sk_buff {
	unsigned long _nfct; /* the entry's address, and what the packet is to it */
};

struct nf_conn {
	__u32 timeout; /* the jiffy of its end */
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
	struct nf_ct_ext *ext;
	union nf_conntrack_proto proto;
};

#pragma clang attribute pop

enum nf_ct_ext_id { NF_CT_EXT_HELPER, NF_CT_EXT_SEQADJ, NF_CT_EXT_TIMEOUT, NF_CT_EXT_SYNPROXY };

/* Linux include/uapi/linux/netfilter/nf_conntrack_common.h and _tcp.h: never renumbered. */
enum conntrack_status {
	IPS_EXPECTED = 1 << 0,
	IPS_SEEN_REPLY = 1 << 1,
	IPS_CONFIRMED = 1 << 3,
	IPS_SEQ_ADJUST = 1 << 6,
	IPS_DYING = 1 << 9,
	IPS_TEMPLATE = 1 << 11,
	IPS_HELPER = 1 << 13,
	IPS_OFFLOAD = 1 << 14,
};

enum conntrack_limit {
	NFCT_INFO_MASK = 7, /* in sk_buff._nfct */
	TCP_CONNTRACK_ESTABLISHED = 3,
	IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED = 0x10,
	CONNTRACK_THIS_NAMESPACE = -1,
	CONNTRACK_UNACKNOWLEDGED_MS =
		300000,        /* nf_conntrack_tcp_timeout_unacknowledged's default */
	CONNTRACK_SECONDS = 3, /* that an entry must have to live: it is refreshed once a second */
};

/* What is known of a TCP connection when a packet of it leaves. */
enum conntrack_doubt {
	CONNTRACK_ALIVE,          /* both ends were heard lately */
	CONNTRACK_ACKNOWLEDGED,   /* the packet has no data */
	CONNTRACK_UNACKNOWLEDGED, /* it has, and the other end was not heard lately */
};

/* As it was when the kfuncs were new (12 bytes), which every later kernel takes. */
struct bpf_ct_opts___short {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

/* bpf_xdp_ct_lookup or bpf_skb_ct_lookup: the object defines which, before it includes this. */
extern struct nf_conn *CONNTRACK_LOOKUP(struct ctx *ctx, struct bpf_sock_tuple *tuple,
					__u32 tuple_bytes, struct bpf_ct_opts___short *opts,
					__u32 opts_bytes) __ksym;
extern int bpf_ct_change_timeout(struct nf_conn *ct, __u32 milliseconds) __ksym;
extern void bpf_ct_release(struct nf_conn *ct) __ksym;
extern void *bpf_cast_to_kern_ctx(void *context) __ksym __weak; /* Linux 6.2 */

/* The entry of packets with that key; to be released. *reply: in its reply direction. */
static __always_inline struct nf_conn *conntrack_find(struct ctx *ctx,
						      const struct nat_flow_key *key, __u8 *reply)
{
	struct bpf_ct_opts___short opts = {
		.netns_id = CONNTRACK_THIS_NAMESPACE,
		.l4proto = key->protocol,
	};
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *ct;

	tuple.ipv4.saddr = addr_word(key->src);
	tuple.ipv4.daddr = addr_word(key->dst);
	tuple.ipv4.sport = key->sport;
	tuple.ipv4.dport = key->dport;
	ct = CONNTRACK_LOOKUP(ctx, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	*reply = opts.dir;
	return ct;
}

/* What is read of an entry. All of it at once: each path that leads to a read costs the verifier a
 * search of the kernel's types. */
struct conntrack_entry {
	__u64 status;
	__u32 timeout, extensions; /* some extension that is one of those below: not 0 */
	__u8 tcp_state;
};

#define CONNTRACK_EXTENSION(ext, name)                                                             \
	(bpf_core_enum_value_exists(enum nf_ct_ext_id, name)                                       \
		 ? *((ext)->offset + bpf_core_enum_value(enum nf_ct_ext_id, name))                 \
		 : 0)

static __always_inline void conntrack_read(const struct nf_conn *ct, struct conntrack_entry *e)
{
	const struct nf_ct_ext *ext;

	e->status = ct->status;
	e->timeout = ct->timeout;
	e->tcp_state = ct->proto.tcp.state;
	e->extensions = 0;
	ext = ct->ext;
	if (ext)
		e->extensions = CONNTRACK_EXTENSION(ext, NF_CT_EXT_HELPER) |
				CONNTRACK_EXTENSION(ext, NF_CT_EXT_SEQADJ) |
				CONNTRACK_EXTENSION(ext, NF_CT_EXT_SYNPROXY);
}

/* Whether the stack may be left out for packets of the entry: 0, or why not. */
static __always_inline int conntrack_unfit(const struct conntrack_entry *e, __u8 protocol)
{
	if (e->status & (IPS_DYING | IPS_TEMPLATE) || !(e->status & IPS_CONFIRMED))
		return NAT_ACCEL_UNKNOWN;
	if (!(e->status & IPS_SEEN_REPLY))
		return NAT_ACCEL_UNREPLIED;
	if (protocol == TCP && e->tcp_state != TCP_CONNTRACK_ESTABLISHED)
		return NAT_ACCEL_UNSTEADY;
	if (e->status & (IPS_EXPECTED | IPS_SEQ_ADJUST | IPS_HELPER) || e->extensions)
		return NAT_ACCEL_HELPER;
	if (e->status & IPS_OFFLOAD)
		return NAT_ACCEL_OFFLOADED;
	if ((__s32)(e->timeout - (__u32)bpf_jiffies64()) * (__s64)clock_jiffy_ns <
	    CONNTRACK_SECONDS * 1000000000LL)
		return NAT_ACCEL_TIMEOUT;
	return 0;
}

/* What the entry makes of packets that arrive in one direction: the other tuple, reversed. */
static __always_inline void conntrack_translate(const struct nf_conntrack_tuple *other,
						struct nat_accel_entry *to)
{
	to->src = addr_of(other->dst.u3.ip);
	to->dst = addr_of(other->src.u3.ip);
	to->sport = other->dst.u.all;
	to->dport = other->src.u.all;
}

/* What becomes of the packet, by connection tracking: 0 and the addresses and ports of
 * *to, or why it is the stack's alone. */
GLOBAL int conntrack_ask(struct ctx *ctx, const struct packet *packet, struct nat_accel_entry *to)
{
	struct conntrack_entry entry;
	struct nf_conn *ct;
	__u8 reply;

	if (!packet || !to)
		return NAT_ACCEL_UNKNOWN;
	ct = conntrack_find(ctx, &packet->key, &reply);
	if (!ct)
		return NAT_ACCEL_UNKNOWN;
	conntrack_read(ct, &entry);
	/* Not tuplehash[!reply]: the verifier wants constant offsets. */
	if (reply)
		conntrack_translate(&ct->tuplehash[0].tuple, to);
	else
		conntrack_translate(&ct->tuplehash[1].tuple, to);
	bpf_ct_release(ct);
	return conntrack_unfit(&entry, packet->key.protocol);
}

/*
 * Time-out of an established connection by the entry's own policy, in milliseconds; 0: it
 * has none. Read by helper: where the extension lies is known at run time only.
 */
static __noinline __u32 conntrack_policy(const struct nf_conn *ct)
{
	struct nf_ct_timeout *policy = NULL;
	__u32 extension, jiffies = 0;
	void *ext = NULL;
	__u8 offset = 0;

	if (!bpf_core_enum_value_exists(enum nf_ct_ext_id, NF_CT_EXT_TIMEOUT))
		return 0;
	extension = bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_TIMEOUT);
	bpf_probe_read_kernel(&ext, sizeof(ext), &ct->ext);
	if (!ext)
		return 0;
	bpf_probe_read_kernel(&offset, sizeof(offset), ext + extension);
	if (!offset)
		return 0;
	bpf_core_read(&policy, sizeof(policy),
		      &((struct nf_conn_timeout *)(ext + offset))->timeout);
	if (!policy)
		return 0;
	bpf_probe_read_kernel(&jiffies, sizeof(jiffies),
			      (void *)policy + bpf_core_field_offset(struct nf_ct_timeout, data) +
				      TCP_CONNTRACK_ESTABLISHED * sizeof(jiffies));
	return jiffies * clock_jiffy_ns / 1000000;
}

/*
 * Whether the entry of a TCP packet that the stack has seen believes that data is
 * unacknowledged; unknown: what Linux before 6.2 answers. The packet has a pointer to it: a look-up
 * costs three times what all else at the egress does.
 */
static __always_inline int conntrack_unacknowledged(struct ctx *ctx, int unknown)
{
	/* One read from the one direction's flags to the other's: what it costs is the call. */
	__u32 at = bpf_core_field_offset(struct nf_conn, proto.tcp.seen[0].flags);
	__u32 apart = bpf_core_field_offset(struct nf_conn, proto.tcp.seen[1].flags) - at;
	const void *ct;
	__u8 flags[64];

	if (!bpf_cast_to_kern_ctx || apart >= sizeof(flags))
		return unknown;
	ct = (void *)(((const struct sk_buff *)bpf_cast_to_kern_ctx(ctx))->_nfct & ~NFCT_INFO_MASK);
	if (!ct || bpf_probe_read_kernel(flags, apart + 1, ct + at))
		return 0;
	return (flags[0] | flags[apart]) & IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED;
}

/*
 * Gives a TCP entry the life that it had if connection tracking saw all of it: that of an
 * idle connection, or five minutes while data waits to be acknowledged. Of a flow of which
 * it has missed packets it believes forever what it did last, and looks at no more.
 */
static __noinline int conntrack_keep(struct ctx *ctx, const struct nat_flow_key *key,
				     __u32 milliseconds, enum conntrack_doubt doubt)
{
	__u8 reply, flags;
	struct nf_conn *ct = conntrack_find(ctx, key, &reply);

	if (!ct)
		return 0;
	flags = ct->proto.tcp.seen[0].flags | ct->proto.tcp.seen[1].flags;
	if (ct->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED &&
	    (doubt != CONNTRACK_ACKNOWLEDGED || flags & IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED)) {
		milliseconds = conntrack_policy(ct) ?: milliseconds;
		if (doubt == CONNTRACK_UNACKNOWLEDGED && milliseconds > CONNTRACK_UNACKNOWLEDGED_MS)
			milliseconds = CONNTRACK_UNACKNOWLEDGED_MS;
		bpf_ct_change_timeout(ct, milliseconds);
	}
	bpf_ct_release(ct);
	return 0;
}

#endif
