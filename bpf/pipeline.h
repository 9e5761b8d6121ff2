/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * START HERE. The life of a packet: nat_process is called at the ingress of every
 * interface of the rule file, and its verdict is the hook's.
 *
 *   1) parse.h     headers -> struct packet
 *   2) flow.h      the flow that this packet belongs to; on a miss
 *   3) session.h     rules (rule.h), mapping (mapping.h), port (port.h), both flows
 *   4) route.h       where it goes
 *   5) rewrite.h   addresses, ports, checksums, MACs
 *   6) ctx_*.h     out
 *
 * Every step returns GO_ON or the reason that ends the packet: enum nat_reason.
 */
#ifndef NATKIT_PIPELINE_H
#define NATKIT_PIPELINE_H

#include "count.h"
#include "flow.h"

/* Counts the packet once and turns its end into the hook's verdict. */
static __always_inline int nat_verdict(struct packet *packet, int reason)
{
	count_add(reason);
	if (reason < NAT_TRANSLATED_IN)
		return CTX_PASS;
	if (reason >= NAT_DROP_MALFORMED)
		return CTX_DROP;
	return packet->action;
}

/* l3 is where IPv4 begins in a frame: 14, or 0 on links without Ethernet. */
static __always_inline int nat_process(struct ctx *ctx, enum nat_side side, __u32 l3)
{
	struct packet packet;
	int reason;

	reason = parse(ctx, side, l3, &packet);
	if (reason == GO_ON)
		reason = flow_translate(ctx, &packet);
	return nat_verdict(&packet, reason);
}

#endif
