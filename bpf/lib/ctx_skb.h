/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the core may do to a packet on tc: the names of ctx_xdp.h for an skb. Direct
 * writes are right for whatever keeps the sum over the packet (an address or a TTL
 * together with the IPv4 checksum); all else goes through the helpers, which know
 * whether the skb's checksum is full, partial (the device adds it) or complete (the
 * device has summed the whole packet).
 */
#ifndef NATKIT_CTX_H
#define NATKIT_CTX_H

#include <linux/bpf.h>
#include "lib/base.h"

/* Renames the parameter as well as the type: struct ctx *ctx is the hook's context. */
#define ctx __sk_buff

enum ctx_hook {
	CTX_TC = 1,
	CTX_PASS = -1, /* TC_ACT_UNSPEC, TCX_NEXT: what else is attached here, then the stack */
	CTX_DROP = 2,  /* TC_ACT_SHOT */
};

static __always_inline void *ctx_data(struct ctx *ctx)
{
	return (void *)(long)ctx->data;
}

static __always_inline void *ctx_data_end(struct ctx *ctx)
{
	return (void *)(long)ctx->data_end;
}

static __always_inline __u32 ctx_length(struct ctx *ctx)
{
	return ctx->len;
}

static __always_inline __u32 ctx_ifindex(struct ctx *ctx)
{
	return ctx->ifindex;
}

/* An IPv4 packet for this machine: pkt_type 0 is PACKET_HOST. A tagged frame is its
 * VLAN device's, whose own ingress meets it; tag 0 is only a priority. */
static __always_inline int ctx_is_ours(struct ctx *ctx, __u32 l3)
{
	return ctx->protocol == bpf_htons(0x0800) && ctx->pkt_type == 0 &&
	       !(ctx->vlan_present && ctx->vlan_tci & 0xfff);
}

/* ctx_is_ours has seen to it. */
static __always_inline int ctx_is_addressed(struct ctx *ctx, const struct nat_link *link)
{
	return 1;
}

/* Whether the first bytes of the packet, or all there are, are readable in one piece. */
static __always_inline int ctx_is_linear(struct ctx *ctx, __u32 bytes)
{
	__u32 linear = ctx->data_end - ctx->data;

	return linear >= bytes || linear >= ctx->len;
}

/* Makes them so. Packet pointers from before are void. */
static __always_inline int ctx_pull(struct ctx *ctx, __u32 bytes)
{
	return bpf_skb_pull_data(ctx, bytes < ctx->len ? bytes : ctx->len);
}

static __always_inline __u32 ctx_gso_size(struct ctx *ctx)
{
	return ctx->gso_size;
}

static __always_inline __u32 ctx_segments(struct ctx *ctx)
{
	return ctx->gso_segs ? ctx->gso_segs : 1;
}

/*
 * Adds to the complement of a transport checksum, which lies at check and at offset:
 * l3_delta is for the addresses in the pseudo-header, the only part that concerns a
 * partial checksum, l4_delta for the ports. udp: zero means that there is no checksum, and
 * none may become zero. partial: it may be one; the helpers know, and take half the time
 * that a packet takes without them. Packet pointers from before are void.
 */
static __always_inline int ctx_checksum(struct ctx *ctx, __u16 *check, __u32 offset, __u16 l3_delta,
					__u16 l4_delta, int udp, int partial)
{
	__u64 flags = udp ? BPF_F_MARK_MANGLED_0 : 0;
	__u16 sum;

	if (udp && !*check) {
		bpf_csum_update(ctx, l4_delta); /* the ports, in the sum of the device */
		return GO_ON;
	}
	if (!partial) {
		sum = checksum_add(*check, l3_delta + l4_delta);
		*check = udp && !sum ? 0xffff : sum;
		bpf_csum_update(ctx, (__u16)~l3_delta); /* likewise what is in check only */
		return GO_ON;
	}
	if (l3_delta && bpf_l4_csum_replace(ctx, offset, 0, l3_delta, flags | BPF_F_PSEUDO_HDR) < 0)
		return NAT_DROP_REWRITE;
	if (l4_delta && bpf_l4_csum_replace(ctx, offset, 0, l4_delta, flags) < 0)
		return NAT_DROP_REWRITE;
	return GO_ON;
}

static __always_inline long ctx_fib_lookup(struct ctx *ctx, struct bpf_fib_lookup *fib, __u32 flags)
{
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), flags);
}

/*
 * Out by that link; the frame has its MACs. A priority tag ends here.
 *
 * Of a frame that came by no known queue (veth), the kernel would dissect the headers and
 * hash them for which queue to send it by: a tenth of the cost of the whole path. Each CPU
 * has one instead. That field is the queue plus 1, and counted round where there are fewer.
 */
static __always_inline int ctx_transmit(struct ctx *ctx, __u32 index, const struct nat_link *link)
{
	if (ctx->vlan_present)
		bpf_skb_vlan_pop(ctx);
	if (!ctx->queue_mapping)
		ctx->queue_mapping = bpf_get_smp_processor_id() + 1;
	return bpf_redirect(link->ifindex, 0);
}

/* Out by the stack's neighbour output, which writes the frame's header. gateway 0: it
 * looks the next hop up itself. */
static __always_inline int ctx_transmit_neighbour(struct ctx *ctx, __u32 ifindex, __be32 gateway)
{
	struct bpf_redir_neigh hop = {.nh_family = 2 /* AF_INET */, .ipv4_nh = gateway};

	if (ctx->vlan_present)
		bpf_skb_vlan_pop(ctx);
	/* Two calls: Linux 6.1 does not see that pointer and size go together. */
	if (!gateway)
		return bpf_redirect_neigh(ifindex, NULL, 0, 0);
	OPAQUE(ifindex);
	return bpf_redirect_neigh(ifindex, &hop, sizeof(hop), 0);
}

/* A word that goes with the packet to the egress of the device it is sent to, and that
 * the stack clears where it takes a packet in. */
static __always_inline void ctx_tag(struct ctx *ctx, __u32 tag)
{
	ctx->cb[0] = tag;
}

static __always_inline __u32 ctx_tagged(struct ctx *ctx)
{
	return ctx->cb[0];
}

static __always_inline int ctx_can_transmit(const struct nat_link *link)
{
	return 1;
}

/* Puts Ethernet before a packet that came without; the MACs are zero. Packet pointers
 * from before are void. */
static __always_inline long ctx_frame(struct ctx *ctx)
{
	__be16 type = bpf_htons(0x0800);

	return bpf_skb_change_head(ctx, 14, 0)
		       ?: bpf_skb_store_bytes(ctx, 12, &type, sizeof(type), 0);
}

/* Bytes of the frame, wherever they lie. */
static __always_inline long ctx_load(struct ctx *ctx, __u32 offset, void *to, __u32 bytes)
{
	return bpf_skb_load_bytes(ctx, offset, to, bytes);
}

static __always_inline long ctx_store(struct ctx *ctx, __u32 offset, const void *from, __u32 bytes)
{
	return bpf_skb_store_bytes(ctx, offset, from, bytes, BPF_F_RECOMPUTE_CSUM);
}

/* Makes the kernel forget that a checksum of the IPv4 packet at l3 is partial, which a device would
 * finish: it does where a frame is shrunk by more than its headers. What is in the packet is lost.
 */
static __always_inline long ctx_forget(struct ctx *ctx, __u32 l3)
{
	__s32 all = 128, header = 20;

	return bpf_skb_change_tail(ctx, l3 + all, 0)
		       ?: bpf_skb_adjust_room(ctx, header - all, BPF_ADJ_ROOM_MAC, 0);
}

/* Cuts the IPv4 packet at l3 to that many bytes and makes room for a header before it. */
static __always_inline long ctx_reply(struct ctx *ctx, __u32 l3, __u32 quoted, __u32 header)
{
	return bpf_skb_change_tail(ctx, l3 + quoted, 0)
		       ?: bpf_skb_adjust_room(ctx, header, BPF_ADJ_ROOM_MAC, 0);
}

/* Back to the sender of the frame, by the interface it came in by. */
static __always_inline int ctx_return(struct ctx *ctx, __u32 l3)
{
	__u8 macs[12], turned[12];

	if (l3) {
		if (bpf_skb_load_bytes(ctx, 0, macs, sizeof(macs)))
			return CTX_DROP;
		__builtin_memcpy(turned, macs + 6, 6);
		__builtin_memcpy(turned + 6, macs, 6);
		bpf_skb_store_bytes(ctx, 0, turned, sizeof(turned), 0);
	}
	return bpf_redirect(ctx->ifindex, 0);
}

/* Makes the frame that long, at its end. */
static __always_inline long ctx_resize(struct ctx *ctx, __u32 bytes)
{
	return bpf_skb_change_tail(ctx, bytes, 0);
}

/* Takes away bytes between the Ethernet header and what follows. */
static __always_inline long ctx_shrink(struct ctx *ctx, __u32 bytes)
{
	return bpf_skb_adjust_room(ctx, -(__s32)bytes, BPF_ADJ_ROOM_MAC, 0);
}

/* Sends a copy of the frame. */
static __always_inline long ctx_copy(struct ctx *ctx, __u32 ifindex)
{
	return bpf_clone_redirect(ctx, ifindex, 0);
}

/* The same, as if it had come in there. */
static __always_inline long ctx_copy_up(struct ctx *ctx, __u32 ifindex)
{
	return bpf_clone_redirect(ctx, ifindex, BPF_F_INGRESS);
}

#endif
