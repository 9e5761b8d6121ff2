// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Lists the functions that hang on the netfilter hooks of the namespace of the
 * thread that runs it, in the order in which packets meet them. Not every kernel
 * can tell by netlink (CONFIG_NETFILTER_NETLINK_HOOK), but all have the lists.
 *
 * They are read without a lock: a list that changes while it is read may show a function
 * that has just gone.
 */
#include "kernel.h"

enum {
	HOOKS_MAX = 1024,      /* on one hook, the kernel's own limit */
	HOOK_DEVICES = 100000, /* looked at in one namespace */
	HOOK_NAME_BYTES = 128, /* of a table or chain; longer ones are cut */
};

/* What to look for behind the private pointer of a hook function: user space knows
 * the functions by name and fills kinds with their addresses. */
enum hook_kind {
	HOOK_PLAIN,
	HOOK_XT,  /* iptables' : its table */
	HOOK_NAT, /* the NAT core's: chains of its own, met by the first packet of a flow */
};

struct hook_entry {
	__u64 function;
	__u64 via; /* hook function that calls this one; 0: the hook itself does */
	__s32 priority;
	__u32 ifindex; /* of the netdev family */
	__u8 family;   /* NFPROTO_* */
	__u8 hook;     /* number within the family; netdev: 0 ingress, 1 egress */
	__u8 type;     /* enum nf_hook_ops_type */
	__u8 kind;     /* enum hook_kind */
	__u8 device[16];
	__u8 table[HOOK_NAME_BYTES];
	__u8 chain[HOOK_NAME_BYTES];
};

/* Written by user space before the program runs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u64); /* address of a hook function */
	__type(value, enum hook_kind);
} kinds SEC(".maps");

/* To user space. Full: the program counts what it left out, and returns that. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
	__type(value, struct hook_entry);
} entries SEC(".maps");

enum {
	NFPROTO_IPV4 = 2,
	NFPROTO_ARP = 3,
	NFPROTO_NETDEV = 5,
	NFPROTO_BRIDGE = 7,
	NFPROTO_IPV6 = 10
};

/* One list, and how far the walk along it has come. */
struct walk {
	struct nf_hook_entries *list;
	__u32 length;
	__u8 family, hook;
	struct net_device *dev; /* netdev */
	__u64 via;
	__u32 left_out;
};

static __always_inline void begin_walk(struct walk *w, struct nf_hook_entries *list)
{
	w->list = list;
	w->length = list ? BPF_CORE_READ(list, num_hook_entries) : 0;
}

/* Entry i of a list, and the registration that made it. */
static __always_inline struct nf_hook_entry *entry_at(struct walk *w, __u32 i)
{
	void *first = (void *)w->list + bpf_core_field_offset(struct nf_hook_entries, hooks);

	return first + i * sizeof(struct nf_hook_entry);
}

static __always_inline struct nf_hook_ops *ops_at(struct walk *w, __u32 i)
{
	struct nf_hook_ops *ops = 0, **all = (void *)entry_at(w, w->length);

	bpf_probe_read_kernel(&ops, sizeof(ops), &all[i]);
	return ops;
}

/* Sends entry i of a list; returns its kind. */
static __always_inline enum hook_kind emit(struct walk *w, __u32 i)
{
	struct nf_hook_entry *entry = entry_at(w, i);
	struct nf_hook_ops *ops = ops_at(w, i);
	__u64 function = (__u64)BPF_CORE_READ(entry, hook);
	void *priv = BPF_CORE_READ(entry, priv);
	enum hook_kind *known, kind = HOOK_PLAIN;
	struct net_device *dev = w->dev;
	struct hook_entry *e;

	known = bpf_map_lookup_elem(&kinds, &function);
	if (known)
		kind = *known;

	e = bpf_ringbuf_reserve(&entries, sizeof(*e), 0);
	if (!e) {
		w->left_out++;
		return kind;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->function = function;
	e->via = w->via;
	e->family = w->family;
	e->hook = w->hook;
	e->kind = kind;
	e->priority = BPF_CORE_READ(ops, priority);
	if (bpf_core_field_exists(ops->hook_ops_type))
		e->type = BPF_CORE_READ_BITFIELD_PROBED(ops, hook_ops_type);
	if (dev) {
		e->ifindex = BPF_CORE_READ(dev, ifindex);
		bpf_core_read_str(e->device, sizeof(e->device), &dev->name);
	}
	if (e->type == NF_HOOK_OP_NF_TABLES && bpf_core_type_exists(struct nft_chain)) {
		struct nft_chain *chain = priv;

		bpf_probe_read_kernel_str(e->table, sizeof(e->table),
					  BPF_CORE_READ(chain, table, name));
		bpf_probe_read_kernel_str(e->chain, sizeof(e->chain), BPF_CORE_READ(chain, name));
	} else if (kind == HOOK_XT && bpf_core_type_exists(struct xt_table)) {
		struct xt_table *table = priv;

		bpf_core_read_str(e->table, sizeof(table->name), &table->name);
	}
	bpf_ringbuf_submit(e, 0);
	return kind;
}

static long emit_nat_chain(__u32 i, struct walk *w)
{
	if (i >= w->length)
		return 1;
	emit(w, i);
	return 0;
}

static long emit_function(__u32 i, struct walk *w)
{
	struct walk chains = {.family = w->family, .hook = w->hook, .dev = w->dev};
	struct nf_nat_lookup_hook_priv *nat;

	if (i >= w->length)
		return 1;
	if (emit(w, i) != HOOK_NAT || !bpf_core_type_exists(struct nf_nat_lookup_hook_priv))
		return 0;
	nat = BPF_CORE_READ(entry_at(w, i), priv);
	chains.via = (__u64)BPF_CORE_READ(entry_at(w, i), hook);
	begin_walk(&chains, BPF_CORE_READ(nat, entries));
	bpf_loop(HOOKS_MAX, emit_nat_chain, &chains, 0);
	w->left_out += chains.left_out;
	return 0;
}

static __always_inline __u32 walk_list(struct nf_hook_entries *list, __u8 family, __u8 hook,
				       struct net_device *dev)
{
	struct walk w = {.family = family, .hook = hook, .dev = dev};

	begin_walk(&w, list);
	bpf_loop(HOOKS_MAX, emit_function, &w, 0);
	return w.left_out;
}

/* A namespace, and how far the walk along its devices has come. */
struct namespace
{
	struct net *net;
	struct list_head *device;
	__u32 left_out;
};

/* Where in struct net a family has its lists; 0 if this kernel is built without it. */
#define LISTS(net, field)                                                                          \
	(bpf_core_field_exists(net->nf.field) ? bpf_core_field_offset(struct net, nf.field) : 0)

enum { ALL_LISTS = 3 * NF_INET_HOOKS + NF_ARP_HOOKS };

/* Every list in turn by one call each: Linux 6.1's verifier walks through all that
 * is called once for each place that calls it, and gives up after a million steps. */
static long emit_list(__u32 i, struct namespace *ns)
{
	struct nf_hook_entries **lists, *list = 0;
	struct net *net = ns->net;
	__u32 offset;
	__u8 family;

	if (i < NF_INET_HOOKS) {
		family = NFPROTO_IPV4;
		offset = LISTS(net, hooks_ipv4);
	} else if (i < 2 * NF_INET_HOOKS) {
		family = NFPROTO_IPV6;
		offset = LISTS(net, hooks_ipv6);
		i -= NF_INET_HOOKS;
	} else if (i < 3 * NF_INET_HOOKS) {
		family = NFPROTO_BRIDGE;
		offset = LISTS(net, hooks_bridge);
		i -= 2 * NF_INET_HOOKS;
	} else {
		family = NFPROTO_ARP;
		offset = LISTS(net, hooks_arp);
		i -= 3 * NF_INET_HOOKS;
	}
	if (!offset)
		return 0;
	lists = (void *)net + offset;
	bpf_probe_read_kernel(&list, sizeof(list), &lists[i]);
	ns->left_out += walk_list(list, family, i, 0);
	return 0;
}

/* Twice for each device: ingress, egress. */
static long emit_device(__u32 i, struct namespace *ns)
{
	struct list_head *at = ns->device; /* BPF_CORE_READ(ns->device, ..) would relocate ns too */
	struct nf_hook_entries *list = 0;
	struct net *net = ns->net;
	struct net_device *dev;

	if (!at || at == (void *)net + bpf_core_field_offset(struct net, dev_base_head))
		return 1;
	dev = (void *)at - bpf_core_field_offset(struct net_device, dev_list);
	if (i % 2) {
		if (bpf_core_field_exists(dev->nf_hooks_egress))
			list = BPF_CORE_READ(dev, nf_hooks_egress);
		ns->device = BPF_CORE_READ(at, next);
	} else if (bpf_core_field_exists(dev->nf_hooks_ingress)) {
		list = BPF_CORE_READ(dev, nf_hooks_ingress);
	}
	ns->left_out += walk_list(list, NFPROTO_NETDEV, i % 2, dev);
	return 0;
}

/* Returns how many entries were left out for want of room. */
SEC("syscall")
int list_hooks(void *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct net *net = BPF_CORE_READ(task, nsproxy, net_ns);
	struct namespace ns = {.net = net, .device = BPF_CORE_READ(net, dev_base_head.next)};

	bpf_loop(ALL_LISTS, emit_list, &ns, 0);
	bpf_loop(2 * HOOK_DEVICES, emit_device, &ns, 0);
	return ns.left_out;
}

char _license[] SEC("license") = "Dual BSD/GPL";
