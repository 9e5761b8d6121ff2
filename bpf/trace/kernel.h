/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's structures as far as the observers read them, and no further.
 *
 * Offsets are relocated at load time (CO-RE), so a declaration says only that a
 * field of this name and type exists. What not every kernel from Linux 6.1 on has
 * is guarded by bpf_core_field_exists() where it is read.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct list_head {
	struct list_head *next;
};

struct ns_common {
	unsigned int inum; /* the inode number of /proc/PID/ns/net */
};

struct nf_hook_entries;

enum { NF_INET_HOOKS = 5, NF_ARP_HOOKS = 3 };

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[NF_INET_HOOKS];
	struct nf_hook_entries *hooks_ipv6[NF_INET_HOOKS];
	struct nf_hook_entries *hooks_arp[NF_ARP_HOOKS];
	struct nf_hook_entries *hooks_bridge[NF_INET_HOOKS];
};

struct net {
	struct ns_common ns;
	struct net_device *loopback_dev;
	struct list_head dev_base_head;
	struct netns_nf nf;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
	struct list_head dev_list;
	char name[16];
	struct nf_hook_entries *nf_hooks_ingress;
	struct nf_hook_entries *nf_hooks_egress;
};

struct sock_common {
	possible_net_t skc_net;
};

struct sock {
	struct sock_common __sk_common;
};

struct dst_entry {
	struct net_device *dev;
	void *input; /* int (*)(struct sk_buff *) */
};

struct gateway6 { /* struct in6_addr */
	__u8 all[16];
};

struct rtable {
	__u8 rt_gw_family; /* 0: the destination itself is the next hop */
	__be32 rt_gw4;
	struct gateway6 rt_gw6;
};

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned long _skb_refdst; /* struct dst_entry *, lowest bit: not counted */
	unsigned long _nfct;       /* struct nf_conn *, lowest three bits: enum ip_conntrack_info */
	int skb_iif;
	__u32 mark;
	__be16 protocol;
	__u16 transport_header;
	__u16 network_header;
	unsigned int len;
	unsigned int tail;
	unsigned char *head;
	unsigned char *data;
};

union nf_inet_addr {
	__u8 all[16];
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union {
		__be16 all;
	} u;
	__u16 l3num;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
		__u8 protonum;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
};

struct nsproxy {
	struct net *net_ns;
};

struct task_struct {
	struct nsproxy *nsproxy;
};

struct nf_hook_entry {
	void *hook;
	void *priv;
};

/* After hooks[num_hook_entries] follows an array of as many struct nf_hook_ops *. */
struct nf_hook_entries {
	__u16 num_hook_entries;
	struct nf_hook_entry hooks[];
};

enum nf_hook_ops_type {
	NF_HOOK_OP_UNDEFINED,
	NF_HOOK_OP_NF_TABLES,
	NF_HOOK_OP_BPF,
	NF_HOOK_OP_NFT_FT,
};

struct nf_hook_ops {
	enum nf_hook_ops_type hook_ops_type : 8;
	int priority;
};

struct nf_nat_lookup_hook_priv {
	struct nf_hook_entries *entries;
};

struct nft_table {
	char *name;
};

struct nft_chain {
	struct nft_table *table;
	char *name;
};

struct nf_hook_state {
	__u8 hook;
	__u8 pf;
	struct net_device *in;
	struct net_device *out;
	struct net *net;
};

struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
};

struct xt_table {
	const char name[32];
};

#pragma clang attribute pop
