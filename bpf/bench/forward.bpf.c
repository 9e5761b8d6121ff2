// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The yardstick: forwarding in XDP without NAT. One FIB look-up, the MACs and the
// TTL, redirect. What it can't do goes to the stack.
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

struct ethernet {
	__u8 destination[6], source[6];
	__be16 type;
} __attribute__((packed));

struct ipv4 {
	__u8 version, tos;
	__be16 length;
	__be16 id, fragment;
	__u8 ttl, protocol;
	__u16 check;
	__be32 source, target;
} __attribute__((packed));

SEC("xdp")
int forward(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethernet *eth = data;
	struct ipv4 *ip = (void *)(eth + 1);
	struct bpf_fib_lookup fib = {};
	__u32 check;

	if ((void *)(ip + 1) > end || eth->type != bpf_htons(0x0800) || ip->version != 0x45 ||
	    ip->ttl <= 1)
		return XDP_PASS;
	fib.family = 2; // AF_INET
	fib.tos = ip->tos;
	fib.l4_protocol = ip->protocol;
	fib.tot_len = bpf_ntohs(ip->length);
	fib.ipv4_src = ip->source;
	fib.ipv4_dst = ip->target;
	fib.ifindex = ctx->ingress_ifindex;
	if (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return XDP_PASS;

	check = ip->check + bpf_htons(0x0100); // RFC 1624: the TTL is the high byte of its word
	ip->check = check + (check >= 0xffff);
	ip->ttl--;
	__builtin_memcpy(eth->destination, fib.dmac, 6);
	__builtin_memcpy(eth->source, fib.smac, 6);
	return bpf_redirect(fib.ifindex, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
