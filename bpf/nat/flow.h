/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fast path: one look-up of the packet's flow, rewrite, out. Whatever needs more
 * (no flow, a flow that is dying, TCP flags that move its state, a second gone by
 * since its route was looked up) goes through a subprogram first and then comes back.
 */
#ifndef NATKIT_FLOW_H
#define NATKIT_FLOW_H

#include "nat/fragment.h"
#include "nat/mss.h"
#include "lib/route.h"
#include "nat/session.h"
#include "nat/zone.h"

enum flow_limit {
	/* Time-out classes in which a packet without SYN, FIN or RST changes nothing. */
	FLOW_STEADY = 1 << NAT_TIMEOUT_UDP | 1 << NAT_TIMEOUT_TCP_ESTABLISHED |
		      1 << NAT_TIMEOUT_ICMP | 1 << NAT_TIMEOUT_OTHER,
	/* Packets that are fragments, or that are sent as such. */
	FLOW_PIECES = PACKET_CUT | PACKET_FRAGMENT_FIRST | PACKET_FRAGMENT_LATER,
};

/* A packet of the flow is about to leave. Counters are plain additions: two CPUs at
 * once with packets of one direction may lose a count. */
static __always_inline void flow_seen(const struct packet *packet, struct nat_flow *flow)
{
	flow->seen = packet->now;
	flow->packets += packet->segments;
	flow->bytes += packet->bytes;
}

static __always_inline int flow_translated(const struct packet *packet)
{
	return packet->key.side == NAT_INSIDE ? NAT_TRANSLATED_OUT : NAT_TRANSLATED_IN;
}

/* A packet that came without Ethernet gets it before it leaves: the kernel's redirects are
 * made for frames, and take it off again where the egress interface has none. */
static __always_inline int flow_frame(struct ctx *ctx, struct packet *packet)
{
	if (!CTX_TC || packet->l3)
		return GO_ON;
	if (ctx_frame(ctx))
		return NAT_DROP_REWRITE;
	packet->l3 = 14;
	packet->l4 += 14;
	return GO_ON;
}

/*
 * On tc: the egress interface for a packet whose next hop's MAC isn't known, or should be
 * confirmed: the stack's neighbour output, which sends an ARP request and queues the packet. One
 * that is to be fragmented goes whole, and is lost: its only use was the request.
 */
GLOBAL int flow_neighbour(struct ctx *ctx, struct packet *packet, struct nat_flow *flow)
{
	struct route route;
	int reason;

	if (!packet || !flow)
		return NAT_DROP_BYPASS;
	reason = route_to(ctx, packet, flow->dst, zone_to(flow), &route);
	if (reason == GO_ON && !route.link)
		reason = NAT_DROP_NO_ROUTE;
	if (reason == GO_ON)
		reason = route_carries(packet, flow->dst, route.mtu);
	if (reason == GO_ON)
		reason = flow_frame(ctx, packet);
	if (reason != GO_ON)
		return reason;
	flow_seen(packet, flow);
	reason = rewrite(ctx, packet, flow, 0, NULL);
	if (reason == GO_ON && packet->flags & (PACKET_FRAGMENT_FIRST | PACKET_FRAGMENT_LATER))
		reason = fragment_name(ctx, packet, flow);
	if (reason != GO_ON)
		return reason;
	packet->action = ctx_transmit_neighbour(ctx, route.ifindex, route.gateway);
	return flow_translated(packet);
}

/* Rewrites and sends. Everything that can end the packet is checked before the first byte is
 * written. */
static __always_inline int flow_forward(struct ctx *ctx, struct packet *packet,
					struct nat_flow *flow)
{
	__u64 hop = *(volatile __u64 *)&flow->hop;
	__u32 index = (hop >> ROUTE_LINK_SHIFT) - 1;
	struct nat_link *link;
	int reason;

	reason = route_carries(packet, flow->dst, flow->mtu);
	if (unlikely(reason != GO_ON))
		return reason;
	if (CTX_TC && unlikely(packet->flags & PACKET_FRAGMENT_FIRST)) {
		reason = fragment_first(packet, flow);
		if (reason != GO_ON)
			return reason;
	}
	link = bpf_map_lookup_elem(&links, &index);
	if (unlikely(!link || (packet->flags & (PACKET_PROBE | PACKET_CUT |
						PACKET_FRAGMENT_FIRST)) == PACKET_PROBE)) {
		if (CTX_TC && packet->flags & PACKET_FRAGMENT_FIRST &&
		    fragment_again(ctx, packet)) {
			packet->action = CTX_DROP;
			return NAT_FRAGMENT_HELD;
		}
		return CTX_TC ? flow_neighbour(ctx, packet, flow) : NAT_PASS_TO_TC;
	}
	if (unlikely(!ctx_can_transmit(link)))
		return NAT_PASS_TO_TC;
	if (unlikely(!packet->l3)) {
		reason = flow_frame(ctx, packet);
		if (reason != GO_ON)
			return reason;
	}
	flow_seen(packet, flow);
	reason = rewrite(ctx, packet, flow, hop, link);
	if (unlikely(reason != GO_ON))
		return reason;
	if (CTX_TC && unlikely(packet->flags & FLOW_PIECES)) {
		reason = fragment_name(ctx, packet, flow);
		if (reason == GO_ON && packet->flags & PACKET_CUT)
			reason = fragment_cut(ctx, packet, packet->mtu, link->ifindex);
		if (reason != GO_ON)
			return reason;
		if ((packet->flags & (PACKET_FRAGMENT_FIRST | PACKET_CUT)) ==
			    PACKET_FRAGMENT_FIRST &&
		    fragment_release(ctx, packet, flow, link->ifindex)) {
			packet->action = CTX_DROP;
			return flow_translated(packet);
		}
	}
	packet->action = ctx_transmit(ctx, index, link);
	return flow_translated(packet);
}

/* Whether the address that it masquerades behind is no longer the gateway's. */
static __always_inline int flow_stranded(const struct nat_flow *flow)
{
	struct nat_addr src = flow->src;

	return flow_state(flow) & NAT_FLOW_MASQUERADE &&
	       !bpf_map_lookup_elem(&address_indices, &src);
}

/* Whether the next hop is to be looked up again. */
static __always_inline int flow_stale(const struct packet *packet, const struct nat_flow *flow)
{
	return (__u16)(packet->now - flow->hop_checked) >= ROUTE_CHECK_TICKS ||
	       packet->now - flow->seen >= ROUTE_CHECK_TICKS;
}

/*
 * Looks up the FIB again, once a second or as long as there is no next hop. From XDP, a
 * neighbour that no packet has gone through the neighbour table for in that time is
 * left to tc, whose packet does.
 */
static __always_inline int flow_reroute(struct ctx *ctx, struct packet *packet,
					struct nat_flow *flow)
{
	struct route route;
	__u32 *probed = route_probed(flow->hop);
	int reason;

	if (flow_stranded(flow)) {
		session_kill(packet);
		return NAT_DROP_RACE; /* the next packet opens another */
	}
	if (!CTX_TC && (!probed || packet->now - *probed >= ROUTE_CHECK_TICKS))
		return NAT_PASS_TO_TC;
	reason = route_to(ctx, packet, flow->dst, zone_to(flow), &route);
	if (reason == GO_ON && !route.link)
		reason = NAT_DROP_NO_ROUTE;
	if (reason != GO_ON) {
		flow->hop = 0; /* the next packet looks up again */
		return reason;
	}
	flow->mtu = route.mtu;
	*(volatile __u64 *)&flow->hop = route.hop;
	flow->hop_checked = packet->now;
	probed = route_probed(route.hop);
	if (CTX_TC && probed && packet->now - *probed >= ROUTE_CHECK_TICKS) {
		*probed = packet->now;
		packet->flags |= PACKET_PROBE;
	}
	return GO_ON;
}

/* Whether a packet may be more than one of many: checked in one place, on every packet. state is
 * flow_find's. */
static __always_inline int flow_needs_slow_path(const struct packet *packet,
						const struct nat_flow *flow, __u32 state)
{
	return !flow_lives(state) || state & NAT_FLOW_RETURNS ||
	       packet->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST) ||
	       !(FLOW_STEADY >> (state & NAT_FLOW_TIMEOUT) & 1) || flow_stale(packet, flow);
}

/* A SYN: lowers its MSS to what fits the links on both sides, so that it also holds for replies. */
static __always_inline int flow_clamp(struct ctx *ctx, const struct packet *packet, __u16 mtu)
{
	struct nat_link *in = link_get(link_find(packet->ifindex));

	if (in && in->mtu && (!mtu || in->mtu < mtu))
		mtu = in->mtu;
	return mtu ? rewrite_mss(ctx, packet->l4, mtu - sizeof(struct ipv4) - sizeof(struct tcp))
		   : GO_ON;
}

/* Whether the flow has been silent for longer than its time-out. The session lives on
 * if the other direction has not. */
static __always_inline int flow_silent(const struct packet *packet, const struct nat_flow *flow,
				       __u32 state)
{
	__u32 slot, timeout = state & NAT_FLOW_TIMEOUT;
	const struct nat_config *c = config_get(&slot);

	return c && timeout < NAT_TIMEOUTS && packet->now - flow->seen > c->timeouts[timeout];
}

/* Whether the session is alive, or the packet may revive it. */
static __always_inline int flow_wake(const struct packet *packet, const struct nat_flow *flow)
{
	__u32 state = flow_state(flow);

	if (state & (NAT_FLOW_DEAD | NAT_FLOW_GONE) || flow_silent(packet, flow, state))
		return session_revive(packet, flow);
	return GO_ON;
}

static __always_inline int flow_step(const struct packet *packet, const struct nat_flow *flow)
{
	if (packet->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST) ||
	    !(FLOW_STEADY >> (flow_state(flow) & NAT_FLOW_TIMEOUT) & 1))
		return state_packet(packet);
	return GO_ON;
}

/* What a packet does to the life of its session. */
static __always_inline int flow_live(const struct packet *packet, const struct nat_flow *flow)
{
	int reason = flow_wake(packet, flow);

	return reason == GO_ON ? flow_step(packet, flow) : reason;
}

/*
 * What a packet of an existing flow may need besides the rewriting. A packet that is not
 * forwarded changes no state, and one that changes it is seen first: it can shorten the
 * time-out, and if XDP leaves the packet to tc, the connection must not be over there.
 */
GLOBAL int flow_update(struct ctx *ctx, struct packet *packet, struct nat_flow *flow)
{
	__u32 state;
	int reason;

	if (!packet || !flow)
		return NAT_DROP_BYPASS;
	state = flow_state(flow);
	reason = flow_wake(packet, flow);
	if (reason == GO_ON && (flow_stale(packet, flow) || !flow->hop))
		reason = flow_reroute(ctx, packet, flow);
	if (reason == GO_ON)
		reason = route_carries(packet, flow->dst, flow->mtu);
	if (reason != GO_ON)
		return reason;
	flow->seen = packet->now;
	reason = flow_step(packet, flow);
	if (reason == GO_ON && packet->tcp_flags & TCP_SYN && state & NAT_FLOW_CLAMP)
		reason = flow_clamp(ctx, packet, flow->mtu);
	return reason;
}

/* flow_forward for packets that are few. */
GLOBAL int flow_send(struct ctx *ctx, struct packet *packet, struct nat_flow *flow)
{
	return packet && flow ? flow_forward(ctx, packet, flow) : NAT_DROP_BYPASS;
}

/* A packet that needs more than the fast path. */
static __always_inline int flow_slow_path(struct ctx *ctx, struct packet *packet,
					  struct nat_flow *flow)
{
	int reason = flow_update(ctx, packet, flow);

	return reason == GO_ON ? flow_send(ctx, packet, flow) : reason;
}

/* To keep a key aside would take stack that Linux 6.1 doesn't have. */
static __always_inline void flow_swap(struct nat_flow_key *a, struct nat_flow_key *b)
{
	struct nat_flow_key c = *a;

	*a = *b;
	*b = c;
}

/* Gives a key the ends that a flow has, with the key's in their place. */
static __always_inline void flow_exchange(struct nat_flow_key *key, struct nat_flow *flow)
{
	struct nat_flow_key c = *key;

	key->src = flow->src;
	key->dst = flow->dst;
	key->sport = flow->sport;
	key->dport = flow->dport;
	flow->src = c.src;
	flow->dst = c.dst;
	flow->sport = c.sport;
	flow->dport = c.dport;
}

/* The flow that packets belong to which have left by *out, which has their zone, and come back; or
 * NULL. For so long the key is theirs. */
static __always_inline struct nat_flow *flow_receiver(struct nat_flow_key *key,
						      struct nat_flow *out)
{
	flow_exchange(key, out);
	key->side = NAT_OUTSIDE;
	key->zone = 0;
	return flow_look(key);
}

static __always_inline void flow_received(struct nat_flow_key *key, struct nat_flow *out)
{
	flow_exchange(key, out);
	key->side = NAT_INSIDE;
	key->zone = out->key.zone;
}

/*
 * A packet between two internal hosts that has left, as *out has it, and comes back: the
 * receiver's session for it, alive, and GO_ON. Else *reason ends it; GO_ON and no session: the
 * receiver's filter would let a new one in.
 */
static __noinline struct nat_flow *flow_enter(struct packet *packet, struct nat_flow *out,
					      int *reason)
{
	struct nat_flow *to = flow_receiver(&packet->key, out);

	if (to)
		*reason = flow_live(packet, to);
	else
		*reason = session_begin(packet) ? session_enters() : NAT_DROP_BYPASS;
	flow_received(&packet->key, out);
	return to;
}

/* What both sessions make of it, in *out. */
GLOBAL int flow_join(struct ctx *ctx, struct packet *packet, struct nat_flow *out,
		     struct nat_flow *to)
{
	int reason = GO_ON;
	__u32 clamp;

	if (!packet || !out || !to)
		return NAT_DROP_BYPASS;
	clamp = (out->state | to->state) & NAT_FLOW_CLAMP;
	if (flow_stale(packet, to) || !to->hop)
		reason = flow_reroute(ctx, packet, to);
	if (reason == GO_ON && packet->tcp_flags & TCP_SYN && clamp)
		reason = flow_clamp(ctx, packet, to->mtu);
	if (reason != GO_ON)
		return reason;
	to->seen = packet->now;
	*out = *to;
	return GO_ON;
}

/* Sends it to the receiver. */
static __always_inline int flow_return(struct ctx *ctx, struct packet *packet, struct nat_flow *out,
				       struct nat_flow *to)
{
	int reason = flow_join(ctx, packet, out, to);

	if (reason != GO_ON)
		return reason;
	reason = flow_send(ctx, packet, out);
	if (CTX_TC || reason != NAT_PASS_TO_TC) {
		to->packets += packet->segments;
		to->bytes += packet->bytes;
	}
	return reason;
}

/* A packet of a flow whose packets come back. Nobody outside sends such: its source is one of
 * natkit's own. GO_ON: the session is over, and the packet opens another. */
GLOBAL int flow_hairpin(struct ctx *ctx, struct packet *packet, struct nat_flow *flow)
{
	struct nat_flow out, *to;
	int reason;

	if (!packet || !flow)
		return NAT_DROP_BYPASS;
	if (packet->key.side == NAT_OUTSIDE)
		return NAT_DROP_SPOOFED;
	if (flow_stranded(flow)) {
		session_kill(packet);
		return GO_ON;
	}
	reason = flow_live(packet, flow);
	if (reason != GO_ON)
		return reason;
	flow->seen = packet->now;
	out = *flow;
	to = flow_enter(packet, &out, &reason);
	if (to && reason == GO_ON)
		reason = flow_return(ctx, packet, &out, to);
	if (reason == GO_ON)
		session_kill(packet);
	else if (CTX_TC || reason != NAT_PASS_TO_TC)
		flow_seen(packet, flow);
	return reason;
}

/* The session has counted the packet that opened it, and tc will again. */
static __always_inline void flow_uncount(const struct packet *packet)
{
	struct nat_flow *flow = flow_look(&packet->key);

	if (flow && flow->packets) {
		flow->packets -= packet->segments;
		flow->bytes -= packet->bytes;
	}
}

/* The packet of a new session whose packets come back. */
static __always_inline int flow_opened(struct ctx *ctx, struct packet *packet, struct nat_flow *out)
{
	int reason;
	struct nat_flow *to = flow_enter(packet, out, &reason);

	if (to && reason == GO_ON)
		reason = flow_return(ctx, packet, out, to);
	if (!CTX_TC && reason == NAT_PASS_TO_TC)
		flow_uncount(packet);
	return reason == GO_ON ? NAT_DROP_RACE : reason; /* the receiver's session has just ended */
}

GLOBAL int flow_open(struct ctx *ctx, struct packet *packet)
{
	struct nat_flow flow;
	int reason;

	if (!packet)
		return NAT_DROP_BYPASS;
	reason = session_open(ctx, packet, &flow);
	if (reason != GO_ON)
		return reason;
	if (flow.state & NAT_FLOW_RETURNS)
		return flow_opened(ctx, packet, &flow);
	if (packet->tcp_flags & TCP_SYN && flow.state & NAT_FLOW_CLAMP) {
		reason = flow_clamp(ctx, packet, flow.mtu);
		if (reason != GO_ON)
			return reason;
	}
	reason = flow_send(ctx, packet, &flow);
	if (!CTX_TC && reason == NAT_PASS_TO_TC)
		flow_uncount(packet);
	return reason;
}

/*
 * What becomes of a packet that belongs to no session and can't open one. GO_ON: *out is
 * what a stateless rule makes of it. NAT_DROP_NO_SESSION: a rule would want a session.
 * Else it is none of ours, or dropped for another reason.
 */
static __always_inline int flow_stateless(struct ctx *ctx, struct packet *packet,
					  struct nat_flow_key *key, struct nat_flow *out)
{
	__u8 class = packet->class;
	int reason;

	flow_swap(&packet->key, key);
	packet->class = NAT_ICMP; /* without PACKET_QUERY it opens none */
	reason = session_open(ctx, packet, out);
	packet->class = class;
	flow_swap(&packet->key, key);
	return reason;
}

/* What a later fragment becomes and where it goes, if its first one is known. */
static __noinline int flow_fragment_known(struct ctx *ctx, struct packet *packet,
					  struct nat_flow *out)
{
	struct route route;
	int reason = fragment_later(packet, out);

	if (reason == GO_ON)
		reason = route_to(ctx, packet, out->dst, zone_to(out), &route);
	if (reason != GO_ON)
		return reason;
	out->hop = route.hop;
	out->mtu = route.mtu;
	return GO_ON;
}

/* Whether a fragment from inside that no rule is for may belong to a session that was opened from
 * outside: only the ports of its datagram's first fragment show that. */
GLOBAL int flow_fragment_answers(const struct packet *packet)
{
	__u32 slot = 0;
	const struct nat_config *c = config_get(&slot);

	return packet && c && packet->key.side == NAT_INSIDE &&
	       rule_forwards_to(packet->key.src, c->lookups, slot);
}

/*
 * A later fragment: as its first one, whose session is not kept alive by it. If there was
 * none, it may be ours by a rule, a session or an external address, whatever its ports are:
 * then it is kept; and for an address of the gateway's own, where the stack also gets it.
 */
GLOBAL int flow_fragment(struct ctx *ctx, struct packet *packet)
{
	struct nat_flow flow;
	struct nat_addr dst;
	int reason, held;

	if (!packet)
		return NAT_DROP_BYPASS;
	reason = flow_fragment_known(ctx, packet, &flow);
	if (reason == NAT_DROP_FRAGMENT) {
		reason = flow_stateless(ctx, packet, &packet->key, &flow);
		if (reason == NAT_DROP_NO_SESSION || reason == NAT_DROP_NO_MAPPING ||
		    (reason == NAT_PASS_NO_RULE && flow_fragment_answers(packet))) {
			packet->action = CTX_DROP; /* if only kept */
			reason = fragment_hold(ctx, packet);
			if (reason == GO_ON)
				reason = flow_fragment_known(ctx, packet, &flow);
			return reason == GO_ON ? flow_send(ctx, packet, &flow) : reason;
		}
		dst = packet->key.dst; /* Linux 6.1 takes no key from elsewhere than the stack */
		if (reason < NAT_TRANSLATED_IN && reason != GO_ON &&
		    bpf_map_lookup_elem(&address_indices, &dst)) {
			held = fragment_hold(ctx, packet);
			if (held == NAT_FRAGMENT_HELD)
				count_add(NAT_FRAGMENT_HELD);
			else if (held == GO_ON)
				reason = flow_fragment_known(ctx, packet, &flow);
		}
	}
	return reason == GO_ON ? flow_send(ctx, packet, &flow) : reason;
}

/*
 * A packet from inside that comes by another link than its session: its host has moved, if
 * the route back to it has, too. Else its source is spoofed.
 */
static __noinline int flow_moved(struct ctx *ctx, struct packet *packet, struct nat_flow *flow)
{
	__u16 in = link_find(packet->ifindex);
	struct route back;

	if (route_find(ctx, packet, packet->key.dst, packet->key.src, 0, &back) != GO_ON ||
	    back.link != in)
		return NAT_DROP_SPOOFED;
	flow->key.link = in;
	return GO_ON;
}

static __always_inline int flow_known(const struct packet *packet)
{
	if (packet->flags & PACKET_FRAGMENT_LATER)
		return fragment_known(packet);
	return flow_entry(&packet->key) != 0;
}

/*
 * A packet that came in by a link of both sides: it is from the side of its flow, which may be
 * older than the rules; if it has none, from inside if its source is one of the rules'.
 */
GLOBAL int flow_side(struct packet *packet)
{
	__u32 slot = 0;

	if (!packet)
		return NAT_DROP_BYPASS;
	packet->key.side = NAT_INSIDE;
	if (flow_known(packet))
		return GO_ON;
	packet->key.side = NAT_OUTSIDE;
	if (!flow_known(packet) && config_get(&slot))
		packet->key.side = rule_side(packet->key.src, slot);
	return GO_ON;
}

/* linked: where the packet came in, a flow may be bound to a link. */
static __always_inline int flow_translate(struct ctx *ctx, struct packet *packet, int linked)
{
	__u32 state = 0;
	struct nat_flow *flow = flow_find(&packet->key, &state);
	struct nat_link *in;
	int reason;

	if (unlikely(!flow))
		return flow_open(ctx, packet);
	if (linked && flow->key.link) {
		in = link_get(flow->key.link);
		if (unlikely(!in || in->ifindex != packet->ifindex)) {
			reason = flow_moved(ctx, packet, flow);
			if (reason != GO_ON)
				return reason;
		}
	}
	if (unlikely(flow_needs_slow_path(packet, flow, state))) {
		if (!(state & NAT_FLOW_RETURNS))
			return flow_slow_path(ctx, packet, flow);
		reason = flow_hairpin(ctx, packet, flow);
		return reason == GO_ON ? flow_open(ctx, packet) : reason;
	}
	return flow_forward(ctx, packet, flow);
}

#endif
