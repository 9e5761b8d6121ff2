/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * START HERE. The life of a packet: nat_process is called at the ingress of every
 * interface of the rule file, and its verdict is the hook's.
 *
 *   1) parse.h       headers -> struct packet
 *   2) flow.h        the flow that this packet belongs to; on a miss
 *   3)   session.h   rules (rule.h), mapping (mapping.h), port (port.h), both flows
 *   4)   route.h     where it goes
 *   5) rewrite.h     addresses, ports, checksums, MACs
 *   6) ctx_*.h       out
 *
 * ICMP errors leave this at 2 for icmp.h, fragments without ports for fragment.h; XDP
 * leaves both to tc.
 *
 * Every step returns GO_ON or the reason that ends the packet: enum nat_reason.
 */
#ifndef NATKIT_PIPELINE_H
#define NATKIT_PIPELINE_H

#include "nat/count.h"
#include "nat/flow.h"
#include "nat/icmp.h"

enum nat_process {
	NAT_ETHERNET = 14, /* where IPv4 begins in a frame */
	NAT_RAW = 0,       /* on links without Ethernet: tunnels, PPP */
};

/* Counts a packet that was translated, once. */
static __always_inline void nat_translated(const struct packet *packet, int reason)
{
	struct nat_stats *s = count_stats();

	if (!s)
		return;
	if (reason == NAT_TRANSLATED_OUT)
		s->bytes_out += packet->bytes;
	else if (reason == NAT_TRANSLATED_IN)
		s->bytes_in += packet->bytes;
	if ((__u32)reason < NAT_REASONS)
		s->packets[reason]++;
}

/* What XDP leaves to the stack meets tc first, which finds the same, and counts it. */
static __always_inline int nat_pass(int reason)
{
	count_add(CTX_TC ? reason : NAT_PASS_TO_TC);
	return CTX_PASS;
}

/* A drop may cause an ICMP error: by tc, to which XDP leaves as many packets as errors may be
 * sent for. */
static __noinline int nat_drop(struct ctx *ctx, struct packet *packet, int reason)
{
	__u32 error = icmp_error_for(packet, reason);

	if (!CTX_TC && error && icmp_allowed(packet, 0))
		return nat_pass(NAT_PASS_TO_TC);
	count_add(reason);
	if (packet->refused)
		session_refusal(reason);
	return CTX_TC && error && icmp_send(ctx, packet, error) == GO_ON ? packet->action
									 : CTX_DROP;
}

/* A packet from a zone: its key has the link's number. That is not known for a moment while natkit
 * attaches the program. */
static __always_inline int nat_zone(struct packet *packet)
{
	__u16 link = link_find(packet->ifindex);

	packet_protocol(packet, packet->key.protocol, NAT_INSIDE, link);
	return link ? GO_ON : NAT_DROP_RACE;
}

/* side and zone are constants: what depends on them is settled when this is compiled. */
static __always_inline int nat_process(struct ctx *ctx, enum nat_side side, int zone, __u32 l3)
{
	struct packet packet;
	int reason;

	reason = parse(ctx, side == NAT_BOTH ? NAT_OUTSIDE : side, l3, &packet);
	if (unlikely(reason == NAT_DROP_MALFORMED)) {
		count_add(reason);
		return CTX_DROP;
	}
	if (unlikely(reason != GO_ON))
		return nat_pass(reason);
	if (side == NAT_BOTH)
		flow_side(&packet);
	if (zone && nat_zone(&packet) != GO_ON) {
		count_add(NAT_DROP_RACE);
		return CTX_DROP;
	}
	if (!CTX_TC && unlikely(packet.flags & PACKET_FOR_TC))
		reason = NAT_PASS_TO_TC;
	else if (CTX_TC && unlikely(packet.flags & PACKET_FRAGMENT_LATER))
		reason = flow_fragment(ctx, &packet);
	else if (CTX_TC && unlikely(packet.flags & PACKET_ICMP_ERROR))
		reason = icmp_error(ctx, &packet);
	else
		reason = flow_translate(ctx, &packet, side != NAT_OUTSIDE && !zone);

	if (unlikely(reason >= NAT_DROP_MALFORMED))
		return nat_drop(ctx, &packet, reason);
	if (unlikely(reason < NAT_TRANSLATED_IN)) {
		if (CTX_TC && packet.flags & PACKET_FRAGMENT_FIRST &&
		    (side == NAT_BOTH ? packet.key.side : side) == NAT_INSIDE &&
		    (reason == NAT_PASS_EXCLUDED ||
		     (reason == NAT_PASS_NO_RULE && flow_fragment_answers(&packet))) &&
		    fragment_exclude(ctx, &packet)) {
			count_add(reason);
			return CTX_DROP;
		}
		return nat_pass(reason);
	}
	nat_translated(&packet, reason);
	return packet.action;
}

/* The program of a hook for links of one side, or of both; zone: for links that are zones. */
#define NAT_PROGRAM(section, name, side, zone, l3)                                                 \
	SEC(section) int name(struct ctx *ctx)                                                     \
	{                                                                                          \
		return nat_process(ctx, side, zone, l3);                                           \
	}

#endif
