/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Life of a session: which time-out it is under, TCP's state (RFC 6146 section 3.5.2,
 * RFC 7857 section 2), when it has expired, how it dies and is revived.
 *
 *   bits of the owner's word           time-out         next
 *   one side's SYN, or none (see       OPENING          the other side's SYN: both
 *   below)                                              (simultaneous open is the same)
 *   SYN of both                        ESTABLISHED      one FIN: stays (half-close)
 *   FIN of both                        CLOSING          SYN of an internal host: begins again
 *   RST                                RESET            any packet without RST: as it was before
 *
 * A connection that natkit did not see begin is taken up from inside only; it has no
 * SYN bit until the other side has replied.
 *
 *   alive --(both directions silent, or killed)--> DEAD --(a packet)--> alive
 *                                                   |
 *                                                   +--(NAT_DEAD_TICKS, GC)--> GONE, removed
 *
 * The owner's word decides: alive -> DEAD, DEAD -> alive and DEAD -> GONE are compare-
 * and-exchange on it, so exactly one wins. The peer's word has a copy of time-out and
 * DEAD, so that its packets see them without a second look-up; a copy that is wrongly DEAD costs
 * its next packet a look at the owner, and one that wrongly does not is put right by GC, which lets
 * NAT_DEAD_TICKS begin again then. So when a session is removed, no packet has used it for that
 * long.
 */
#ifndef NATKIT_STATE_H
#define NATKIT_STATE_H

#include "nat/count.h"
#include "nat/flows.h"
#include "lib/route.h"

enum state_limit {
	STATE_DEAD_MOST = 60000, /* ticks, of 65536 that hop_checked can tell apart */
	STATE_TRIES = 16,        /* lost compare-and-exchanges before the packet is given up */
	STATE_TCP = NAT_FLOW_TCP_SYN_OWNER | NAT_FLOW_TCP_SYN_PEER | NAT_FLOW_TCP_FIN_OWNER |
		    NAT_FLOW_TCP_FIN_PEER | NAT_FLOW_TCP_RST,
	STATE_TCP_SYN = NAT_FLOW_TCP_SYN_OWNER | NAT_FLOW_TCP_SYN_PEER,
	STATE_TCP_FIN = NAT_FLOW_TCP_FIN_OWNER | NAT_FLOW_TCP_FIN_PEER,
};

static __always_inline __u32 state_read(const struct nat_flow *flow)
{
	return flow_state(flow);
}

static __always_inline int state_is_owner(const struct nat_flow *flow)
{
	return !!(state_read(flow) & NAT_FLOW_OWNER);
}

static __always_inline int state_replace(struct nat_flow *flow, __u32 old, __u32 new)
{
	return __sync_val_compare_and_swap(&flow->state, old, new) == old;
}

/* The key of the other direction. */
static __always_inline void state_other_key(const struct nat_flow_key *key,
					    const struct nat_flow *flow, struct nat_flow_key *other)
{
	other->src = flow->dst;
	other->dst = flow->src;
	other->sport = flow->dport;
	other->dport = flow->sport;
	other->protocol = key->protocol;
	other->side = state_read(flow) & NAT_FLOW_PEER_OUTSIDE ? NAT_OUTSIDE : NAT_INSIDE;
	other->link = 0;
}

static __always_inline __u32 state_timeout(__u32 tcp)
{
	if (tcp & NAT_FLOW_TCP_RST)
		return NAT_TIMEOUT_TCP_RESET;
	if ((tcp & STATE_TCP_FIN) == STATE_TCP_FIN)
		return NAT_TIMEOUT_TCP_CLOSING;
	if ((tcp & STATE_TCP_SYN) == STATE_TCP_SYN)
		return NAT_TIMEOUT_TCP_ESTABLISHED;
	return NAT_TIMEOUT_TCP_OPENING;
}

/* The word of a session that the packet opens, as far as this file decides it. */
static __always_inline __u32 state_open(const struct packet *p)
{
	switch (p->class) {
	case NAT_TCP:
		return p->tcp_flags & TCP_SYN ? NAT_FLOW_TCP_SYN_OWNER | NAT_TIMEOUT_TCP_OPENING
					      : NAT_TIMEOUT_TCP_OPENING;
	case NAT_UDP:
		return NAT_TIMEOUT_UDP;
	case NAT_ICMP:
		return NAT_TIMEOUT_ICMP;
	default:
		return NAT_TIMEOUT_OTHER;
	}
}

/* No TCP sends these together: such a segment is forwarded, and changes no state. */
static __always_inline int state_impossible(__u32 flags)
{
	return flags & TCP_SYN && flags & (TCP_FIN | TCP_RST);
}

/* The table above. begins: from this direction a SYN begins a connection again. */
static __always_inline __u32 state_tcp(__u32 state, __u32 flags, int owner, int begins)
{
	__u32 tcp = state & STATE_TCP;

	if (flags & TCP_RST) {
		tcp |= NAT_FLOW_TCP_RST;
	} else {
		if (begins && (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN &&
		    (tcp & NAT_FLOW_TCP_RST || (tcp & STATE_TCP_FIN) == STATE_TCP_FIN))
			tcp = 0;
		tcp &= ~NAT_FLOW_TCP_RST;
		if (!owner && (flags & (TCP_SYN | TCP_ACK)) == TCP_ACK && !(tcp & STATE_TCP_SYN))
			tcp |= STATE_TCP_SYN; /* taken up, and replied to */
		if (flags & TCP_SYN)
			tcp |= owner ? NAT_FLOW_TCP_SYN_OWNER : NAT_FLOW_TCP_SYN_PEER;
		if (flags & TCP_FIN)
			tcp |= owner ? NAT_FLOW_TCP_FIN_OWNER : NAT_FLOW_TCP_FIN_PEER;
	}
	return (state & ~(STATE_TCP | NAT_FLOW_TIMEOUT)) | tcp | state_timeout(tcp);
}

/* Copies the owner's time-out into the peer's word. Two CPUs may do so at once for two
 * changes: who finds the owner changed after writing does it again. */
GLOBAL int state_copy_timeout(struct nat_flow *owner, struct nat_flow *peer)
{
	__u32 try, timeout, old;

	if (!owner || !peer)
		return NAT_DROP_RACE;
	for (try = 0; try < STATE_TRIES; try++) {
		timeout = state_read(owner) & NAT_FLOW_TIMEOUT;
		old = state_read(peer);
		if ((old & NAT_FLOW_TIMEOUT) == timeout)
			break;
		state_replace(peer, old, (old & ~NAT_FLOW_TIMEOUT) | timeout);
	}
	return GO_ON;
}

/* One step of the table, for a packet of the owner's direction or the other; E_BUSY if
 * another CPU changed the word at the same time. */
GLOBAL int state_step(struct nat_flow *owner, struct nat_flow *peer, __u32 flags, __u32 is_owner,
		      __u32 begins)
{
	__u32 old, new;

	if (!owner || !peer)
		return NAT_DROP_RACE;
	old = state_read(owner);
	if (old & NAT_FLOW_GONE)
		return NAT_DROP_RACE;
	new = state_tcp(old, flags, is_owner, begins);
	if (new == old)
		return GO_ON;
	return state_replace(owner, old, new) ? state_copy_timeout(owner, peer) : E_BUSY;
}

/*
 * A packet of a session that may change its state: for TCP's SYN, FIN and RST, and every
 * packet while the session is not established.
 */
static __always_inline int state_packet(const struct packet *p)
{
	struct nat_flow *flow, *other, *owner, *peer;
	__u32 begins, try;
	int reason;

	if (p->class != NAT_TCP || state_impossible(p->tcp_flags))
		return GO_ON;
	flow = flow_look(&p->key);
	other = flow ? flow_other(flow) : NULL;
	if (!other)
		return NAT_DROP_RACE;
	owner = state_is_owner(flow) ? flow : other;
	peer = state_is_owner(flow) ? other : flow;
	begins = owner == flow || state_read(peer) & NAT_FLOW_OUTBOUND;
	for (try = 0; try < STATE_TRIES; try++) {
		reason = state_step(owner, peer, p->tcp_flags, owner == flow, begins);
		if (reason != E_BUSY)
			return reason;
	}
	return NAT_DROP_RACE;
}

/*
 * Whether the session has been silent for longer than its time-out. What an inside
 * host sends keeps it alive; what comes from outside only if so configured (RFC 4787
 * REQ-6), or if no internal host is in it at all. One that a lease keeps waits for its end.
 */
static __always_inline int state_expired(const struct nat_flow *owner, const struct nat_flow *peer,
					 const struct nat_config *config, __u32 now)
{
	__u32 state = state_read(owner), other, timeout = state & NAT_FLOW_TIMEOUT;
	int all = config->flags & NAT_CONFIG_INBOUND_REFRESH;
	__s32 limit;

	if (timeout >= NAT_TIMEOUTS)
		return 1; /* cannot happen */
	limit = config->timeouts[timeout];
	if ((all || state & NAT_FLOW_OUTBOUND) && (__s32)(now - owner->seen) <= limit)
		return 0; /* mostly, without waiting for the peer's memory */
	other = state_read(peer);
	if (other & NAT_FLOW_LEASED &&
	    (timeout == NAT_TIMEOUT_UDP || timeout == NAT_TIMEOUT_TCP_ESTABLISHED))
		return 0;
	all = all || !((state | other) & NAT_FLOW_OUTBOUND);
	if (all && (__s32)(now - owner->seen) <= limit)
		return 0;
	if ((all || other & NAT_FLOW_OUTBOUND) && (__s32)(now - peer->seen) <= limit)
		return 0;
	return 1;
}

/* Ends the session. hop_checked of the owner becomes the time of its death: it has no
 * other use while DEAD. */
static __always_inline void state_kill(struct nat_flow *owner, struct nat_flow *peer, __u32 now)
{
	owner->hop_checked = now;
	__sync_fetch_and_or(&owner->state, NAT_FLOW_DEAD);
	__sync_fetch_and_or(&peer->state, NAT_FLOW_DEAD);
}

/* Whether that was NAT_DEAD_TICKS ago. Of two clocks one may be a little behind; who comes late
 * by a minute may have to come again. */
static __always_inline int state_long_dead(const struct nat_flow *owner, __u32 now)
{
	__u16 since = now - owner->hop_checked;

	return since > NAT_DEAD_TICKS && since < STATE_DEAD_MOST;
}

/* Makes a flow's next hop one that must be looked up. */
static __always_inline void state_stale(struct nat_flow *flow, __u32 now)
{
	flow->hop_checked = now - ROUTE_CHECK_TICKS;
}

#endif
