/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * On a miss: finds what a packet is to become and makes the session, two flows; and
 * revives a session that had died.
 *
 *   1) exclusions                     nothing more
 *   2) destination                    a rule, or who has the external endpoint; else it stays
 *   3) the route to that
 *   4) source                         a rule for that route; a port or an address from it
 *   5) filtering                      of the mapping found in 2
 *   6) both flows, the peer's first
 *
 * Sources are checked against the routes only here: the flow of an internal host remembers
 * the link that its packets must come from.
 */
#ifndef NATKIT_SESSION_H
#define NATKIT_SESSION_H

#include "nat/verdict.h"
#include "nat/lease.h"
#include "nat/state.h"
#include "nat/zone.h"

enum session_limit { SESSION_PORT_TRIES = 64 };

/* The packet at hand, and what is known of the session that it opens. */
struct new_session {
	struct packet packet;   /* without inner */
	__u32 lookups, config;  /* of nat_config: lookups, flags */
	__u32 generation, slot; /* of the rules and of their maps */
	struct verdict verdict;
	struct reservation source; /* the packet's sender */
	struct reservation target; /* its receiver, if it has the mapping that was addressed */
	__u32 flags;               /* enum nat_flow_state, of the owner */
	__u32 rule;                /* nat_rule.id */
	__u8 by_mapping;           /* the destination is translated by the mapping that has it */
	__u8 refused; /* enum nat_reason: its port is a session's, which others can't use */
	struct nat_flow owner;
	struct nat_flow_key other; /* of the replies */
};

/* It doesn't fit on the stack beside the rest, which is 512 bytes for the whole chain
 * of calls; and functions that the verifier checks by themselves find here what they
 * work on. A CPU has one packet at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct new_session);
	__uint(max_entries, 1);
} new_sessions SEC(".maps");

/* --- 2) destination ----------------------------------------------------------- */

/* Whether a packet without session may open one; its sender's side decides. */
static __always_inline int session_opens(const struct packet *p)
{
	if (p->class == NAT_ICMP)
		return p->flags & PACKET_QUERY ? GO_ON : NAT_DROP_NO_SESSION;
	if (p->class != NAT_TCP)
		return GO_ON;
	if (p->tcp_flags & (TCP_RST | TCP_FIN))
		return NAT_DROP_NO_SESSION;
	switch (p->tcp_flags & (TCP_SYN | TCP_ACK)) {
	case TCP_SYN:
		return GO_ON;
	case TCP_ACK: /* takes up one that was there before the engine */
		return p->key.side == NAT_INSIDE ? GO_ON : NAT_DROP_NO_SESSION;
	default:
		return NAT_DROP_NO_SESSION;
	}
}

static __always_inline void session_rule(const struct packet *p, struct new_session *new,
					 const struct nat_rule *rule)
{
	new->rule = rule->id;
	if (rule->kind != NAT_RULE_STATELESS)
		new->verdict.sessions = 1;
	if (rule->flags & NAT_RULE_CLAMP_MSS && p->class == NAT_TCP)
		new->flags |= NAT_FLOW_CLAMP;
}

/* The external endpoint that was addressed belongs to an internal one, whose mapping is
 * referenced. A port of a session alone is not, and only from inside it matters whose it is:
 * session_hairpin. The key's class: the packet's is ICMP where the key is of what an error quotes.
 */
static __always_inline int session_to_mapping(const struct packet *p, struct nat_flow *out,
					      struct new_session *new)
{
	int query = p->flags & PACKET_QUERY, reason;
	struct nat_mapping_key *internal = &new->target.internal;

	reason = mapping_by_external(addr_word(p->key.dst), query ? p->key.sport : p->key.dport,
				     protocol_class(p->key.protocol), &new->target);
	if (reason == NAT_PASS_NO_RULE)
		return GO_ON; /* not one of ours */
	if (reason != GO_ON)
		return reason;
	reason = session_opens(p);
	if (reason != GO_ON)
		return reason;
	reason = mapping_addressed(&new->target, p->now);
	if (reason == NAT_DROP_FILTERED && p->key.side == NAT_INSIDE)
		new->refused = reason;
	else if (reason != GO_ON)
		return reason;
	new->by_mapping = 1;
	new->verdict.sessions = 1;
	new->verdict.zone = internal->zone;
	out->dst = internal->addr;
	if (query && internal->class != NAT_OTHER)
		out->sport = internal->port;
	else if (internal->class != NAT_OTHER)
		out->dport = internal->port;
	return GO_ON;
}

SUBPROGRAM int session_destination(const struct packet *p, struct nat_flow *out,
				   struct new_session *new)
{
	int index = rule_destination(&p->key, new->verdict.in, new->lookups, new->slot);
	const struct nat_rule *rule;

	if (index == RULE_NONE)
		return session_to_mapping(p, out, new);
	rule = rule_get(new->slot, index);
	if (!rule)
		return NAT_DROP_BYPASS;
	new->verdict.by_rule = 1;
	session_rule(p, new, rule);
	if (rule->kind == NAT_RULE_FORWARD)
		return rule_forward(rule, new->slot, p->key.src, &out->dst, &out->dport,
				    &new->verdict.zone);
	new->verdict.zone = rule->zone;
	out->dst = rule_map_address(rule, p->key.dst);
	return GO_ON;
}

/* --- 3) the route -------------------------------------------------------------- */

static __always_inline int session_to_many(struct nat_addr addr)
{
	return addr.octet[0] >> 4 == 14 || addr_word(addr) == 0xffffffff;
}

/* No address of a host on a network. */
static __always_inline int session_nobody(struct nat_addr addr)
{
	return !addr_word(addr) || addr.octet[0] == 127 || session_to_many(addr);
}

/* What no NAT may translate: RFC 1122 section 3.2.1.3. What else is reserved there, of
 * 0.0.0.0/8 and 240.0.0.0/4, is like any other address, because the stack forwards it; but
 * see session_pretends. */
static __always_inline int session_martian(const struct nat_flow_key *key)
{
	if (addr_equal(key->src, key->dst))
		return NAT_DROP_SPOOFED; /* a land attack */
	if (session_to_many(key->dst))
		return NAT_PASS_MULTICAST;
	if (session_nobody(key->src))
		return NAT_DROP_SPOOFED;
	return session_nobody(key->dst) ? NAT_PASS_NO_RULE : GO_ON;
}

/* Whether an address is given to internal hosts: it is not only that of forwards. */
static __always_inline int session_gives(__u32 *index)
{
	struct nat_address *address = index ? bpf_map_lookup_elem(&addresses, index) : NULL;

	return address && !(address->flags & NAT_ADDRESS_STATIC);
}

/*
 * Whether a packet from inside has a source that no internal host has: an external address of
 * any rule, or a reserved one, unless it is routed to where the packet came from (a host may
 * be mapped to its own address, and some networks use 240.0.0.0/4). Asked of packets that
 * no rule is about as well: the stack would let them out as they are. By a link of both sides
 * everything is routed to where it came from; there nobody has what rules translate to.
 */
SUBPROGRAM int session_pretends(struct ctx *ctx, const struct packet *p, __u16 in, __u32 lookups,
				__u32 slot)
{
	struct nat_addr src = p->key.src;
	__u32 *index;
	int owned;

	if (p->key.side != NAT_INSIDE && !link_is_both(link_get(in)))
		return 0;
	index = bpf_map_lookup_elem(&address_indices, &src);
	owned = rule_owns(src, lookups, slot);
	if (src.octet[0] && src.octet[0] < 240 && !index && !owned)
		return 0;
	if (p->key.side != NAT_INSIDE && (owned || session_gives(index)))
		return 1;
	return route_home(ctx, p, in) != GO_ON;
}

/* Whether the packet is to go elsewhere than it was sent: an identity map leaves it. */
static __always_inline int session_moves(const struct packet *p, const struct nat_flow *out)
{
	return !addr_equal(out->dst, p->key.dst) || out->dport != p->key.dport;
}

/* The side of a host that is behind the link. */
static __always_inline __u8 session_side(const struct nat_link *link, struct nat_addr addr,
					 __u32 slot)
{
	if (link_is_both(link))
		return rule_side(addr, slot);
	return link->flags & NAT_LINK_INSIDE ? NAT_INSIDE : NAT_OUTSIDE;
}

/* Whether an internal host sends to another one by a link of both sides, under its own address:
 * rules for what leaves by that link are not about it. */
static __always_inline int session_among(const struct packet *p, const struct nat_flow *out,
					 const struct verdict *d)
{
	return p->key.side == NAT_INSIDE && d->side == NAT_INSIDE &&
	       link_is_both(link_get(d->link)) && !session_moves(p, out);
}

SUBPROGRAM int session_route(struct ctx *ctx, const struct packet *p, const struct nat_flow *out,
			     struct new_session *new)
{
	int translated = session_moves(p, out);
	struct route route;
	struct nat_link *link;
	int reason;

	reason = route_to(ctx, p, out->dst, new->verdict.zone, &route);
	if (reason == NAT_PASS_LOCAL && translated)
		return NAT_DROP_UNSUPPORTED; /* to the gateway: can't be handed up translated */
	if (reason != GO_ON)
		return reason;
	link = link_get(route.link);
	if (!link) /* replies would not pass here */
		return translated ? NAT_DROP_NO_ROUTE : NAT_PASS_NO_RULE;
	new->verdict.link = route.link;
	new->verdict.mtu = route.mtu;
	new->verdict.found = route.found;
	new->verdict.hop = route.hop;
	new->verdict.side = session_side(link, out->dst, new->slot);
	new->verdict.zone = link->flags &NAT_LINK_ZONE ? route.link : 0;
	if (translated && p->key.side == NAT_INSIDE && new->verdict.side == NAT_INSIDE)
		new->flags |= NAT_FLOW_HAIRPIN;
	return GO_ON;
}

/*
 * Whether the packet can be from where it came. An internal source must route back to that
 * link. One from outside must not be the gateway's or an internal host's: its session would
 * translate packets between internal hosts.
 */
SUBPROGRAM int session_spoofed(struct ctx *ctx, const struct packet *p,
			       const struct new_session *new)
{
	struct route back;
	struct nat_link *link;
	int reason;

	if (p->key.side == NAT_INSIDE)
		return route_home(ctx, p, new->verdict.in);
	reason = route_find(ctx, p, p->key.dst, p->key.src, 0, &back);
	link = reason == GO_ON ? link_get(back.link) : NULL;
	if (reason == NAT_PASS_LOCAL ||
	    (link && session_side(link, p->key.src, new->slot) == NAT_INSIDE))
		return NAT_DROP_SPOOFED;
	return GO_ON;
}

/* --- 4) source ----------------------------------------------------------------- */

/*
 * The link whose source rules a packet meets: the egress interface, or for hairpin the link
 * that it would have left by, had its receiver not been inside: the one that the
 * addressed external address is on, or the route to that.
 */
SUBPROGRAM __u32 session_egress(struct ctx *ctx, const struct packet *p,
				const struct new_session *new)
{
	struct nat_addr key = p->key.dst;
	struct nat_address *address;
	struct route route;
	__u32 *index;

	if (!(new->flags &NAT_FLOW_HAIRPIN))
		return new->verdict.link;
	index = bpf_map_lookup_elem(&address_indices, &key);
	address = index ? bpf_map_lookup_elem(&addresses, index) : NULL;
	if (address && address->link)
		return address->link;
	return route_find(ctx, p, p->key.src, p->key.dst, 0, &route) == GO_ON ? route.link : 0;
}

/* The pool of the rule, or the one address of the link for masquerade. */
static __always_inline int session_pool(struct new_session *new, const struct nat_rule *rule,
					__u32 out)
{
	struct reservation *r = &new->source;
	struct nat_link *link;

	if (!(rule->flags & NAT_RULE_MASQUERADE)) {
		r->internal.pool = rule->pool;
		r->address = rule->pool_first;
		return GO_ON;
	}
	link = link_get(out);
	if (!link || !link->address)
		return NAT_DROP_NO_ADDRESS;
	r->internal.pool = link->pool;
	r->address = link->address - 1;
	new->flags |= NAT_FLOW_MASQUERADE;
	return GO_ON;
}

/* One mapping serves all protocols of a host with an address of its own: the strictest
 * of the rule's modes is its. */
static __always_inline __u32 rule_strictest(const struct nat_rule *rule)
{
	__u32 i, mode = 0;

	for (i = 0; i < NAT_PORT_CLASSES; i++)
		if (rule->filtering[i] > mode)
			mode = rule->filtering[i];
	return mode;
}

/*
 * Prefetches memory that is written soon: the port's slot and the replies' bucket of
 * flow_table. Neither is in a cache, and waiting for both at once takes half as long: behind
 * the locks in between, one would be waited for after the other.
 */
SUBPROGRAM void session_touch(const struct packet *p, const struct reservation *r)
{
	__u32 index = r->address;
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_flow_key reply = {.src = p->key.dst,
				     .sport = p->key.dport,
				     .dport = r->port,
				     .protocol = p->key.protocol,
				     .side = NAT_OUTSIDE};
	struct nat_control *c = control_get();
	struct nat_bucket *bucket;
	struct flow_words words;
	struct nat_slot *slot;

	if (!address || !c)
		return;
	reply.dst = address->addr;
	slot = port_slot(index, address, r->internal.class, bpf_ntohs(r->port));
	if (slot)
		slot_read(slot);
	words = flow_words(&reply);
	bucket = table_bucket(&flow_table, c->flow_mask, table_hash(c, words.addresses, words.rest),
			      0);
	if (bucket)
		table_read(&bucket->entries[0]);
}

/* Takes an external endpoint for the packet's sender. */
static __always_inline int session_take(struct ctx *ctx, const struct packet *p,
					struct new_session *new, const struct nat_rule *rule)
{
	__u32 count = 0, class = p->class;
	struct reservation *r = &new->source;
	int reason, independent;

	if (rule->kind == NAT_RULE_NAPT && rule->pool_count > 1)
		count = rule->pool_count;
	reason = source_take(r, new->generation, 1);
	if (reason == GO_ON && count)
		reason = source_place(r, rule->pool_first, count);
	if (reason != GO_ON)
		return reason;
	if (rule->kind == NAT_RULE_ONE_TO_ONE) {
		r->internal.class = NAT_OTHER;
		r->filtering = rule_strictest(rule);
		reason = mapping_take_address(r, rule->pool_first, rule->pool_count, p->now);
	} else if (class >= NAT_PORT_CLASSES) {
		/* By address: the flows are only let in if no other host talks so with
		 * that receiver. ICMP that is neither query nor error has no owner. */
		return p->key.protocol == ICMP ? NAT_DROP_UNSUPPORTED : GO_ON;
	} else {
		r->internal.port = p->key.sport;
		/* Linux 6.1 forgets what class was compared with ("max value is outside"). */
		OPAQUE(class);
		class &= 3;
		r->filtering = rule->filtering[class];
		independent = rule->mapping[class] == NAT_ENDPOINT_INDEPENDENT;
		/* A lease makes a mapping whatever the rule's mode is. */
		reason = independent || new->config &NAT_CONFIG_LEASES ? mapping_find(r, p->now)
								       : NAT_DROP_NO_MAPPING;
		if (reason == NAT_DROP_NO_MAPPING) {
			reason = endpoint_take(ctx, &p->key, r, new->config, new->generation);
			/* The last port of a block may have become another CPU's just now. */
			if (reason == NAT_DROP_RACE)
				reason = endpoint_take(ctx, &p->key, r, new->config,
						       new->generation);
			if (reason != GO_ON)
				return reason;
			if (!independent) {
				r->flags |= NAT_FLOW_PORT;
				port_name(r);
				return GO_ON;
			}
			session_touch(p, r);
			reason = mapping_make(r, p->now);
		}
	}
	if (reason == GO_ON && r->filtering == NAT_FILTER_ADDRESS)
		reason = filter_take(r, addr_word(p->key.dst));
	return reason;
}

static __always_inline int session_source(struct ctx *ctx, const struct packet *p,
					  struct nat_flow *out, struct new_session *new,
					  const struct nat_rule *rule)
{
	struct nat_address *address;
	struct reservation *r = &new->source;
	__u32 index;
	int reason;

	reason = session_take(ctx, p, new, rule);
	if (reason != GO_ON)
		return reason;
	index = r->address;
	address = bpf_map_lookup_elem(&addresses, &index);
	if (!address)
		return NAT_DROP_BYPASS;
	if (address->flags & NAT_ADDRESS_LEAVING ||
	    (address->flags & NAT_ADDRESS_DRAINING && !(r->flags & NAT_FLOW_MAPPED)))
		return NAT_DROP_NO_ADDRESS;
	out->src = address->addr;
	if (r->internal.class < NAT_PORT_CLASSES)
		out->sport = r->port;
	return GO_ON;
}

/* --- 6) both flows -------------------------------------------------------------- */

static __always_inline __u32 session_reserved(const struct reservation *r)
{
	__u32 whole =
		r->flags & NAT_FLOW_MAPPED && r->internal.class == NAT_OTHER ? NAT_FLOW_WHOLE : 0;

	return r->flags | whole | (__u32)r->internal.pool << NAT_FLOW_POOL_SHIFT;
}

/* The flow of the replies: everything reversed. Its next hop is found by
 * its first packet. */
static __always_inline void session_peer(const struct packet *p, struct nat_flow *peer,
					 const struct new_session *new)
{
	peer->key = new->other;
	peer->key.link = p->key.zone;
	peer->src = p->key.dst;
	peer->dst = p->key.src;
	peer->sport = p->key.dport;
	peer->dport = p->key.sport;
	peer->hop = 0;
	state_stale(peer, p->now);
	peer->seen = p->now;
	peer->packets = 0;
	peer->bytes = 0;
	peer->mtu = 0;
}

static __always_inline __u32 session_peer_state(const struct packet *p,
						const struct new_session *new)
{
	return NAT_FLOW_MADE | (state_open(p) & NAT_FLOW_TIMEOUT) |
	       (new->flags &(NAT_FLOW_HAIRPIN | NAT_FLOW_CLAMP | NAT_FLOW_RETURNS)) |
	       session_reserved(&new->target) |
	       (p->key.side == NAT_OUTSIDE ? NAT_FLOW_PEER_OUTSIDE : 0) |
	       (new->verdict.side == NAT_INSIDE ? NAT_FLOW_OUTBOUND : 0);
}

static __always_inline void session_owner(const struct packet *p, struct nat_flow *owner,
					  const struct new_session *new)
{
	owner->key = p->key;
	owner->hop = new->verdict.hop;
	owner->mtu = new->verdict.mtu;
	owner->hop_checked = new->verdict.found;
	owner->seen = p->now;
	owner->packets = p->segments;
	owner->bytes = p->bytes;
	owner->state = NAT_FLOW_MADE | state_open(p) | NAT_FLOW_OWNER | new->flags |
		       session_reserved(&new->source);
	owner->key.link = new->verdict.zone;
	if (p->key.side == NAT_INSIDE) {
		if (!p->key.zone)
			owner->key.link = new->verdict.in;
		owner->state |= NAT_FLOW_OUTBOUND;
	}
	if (new->verdict.side == NAT_OUTSIDE)
		owner->state |= NAT_FLOW_PEER_OUTSIDE;
}

/*
 * A key of this session is another one's already. E_EXIST: another CPU has made the
 * session, a moment ago, and *out is its flow. If that is not there yet, or dying, the
 * sender's next packet will know more. NAT_DROP_NO_PORT: the replies' key is another
 * session's.
 */
static __always_inline int session_adopt(const struct packet *p, struct nat_flow *out,
					 struct new_session *new)
{
	struct nat_flow *flow = flow_look(&p->key);

	if (flow) {
		if (!flow_lives(state_read(flow)))
			return NAT_DROP_RACE;
		*out = *flow;
		return E_EXIST;
	}
	flow = flow_look(&new->other);
	if (flow && (!addr_equal(flow->src, p->key.dst) || !addr_equal(flow->dst, p->key.src) ||
		     flow->sport != p->key.dport || flow->dport != p->key.sport ||
		     zone_to(flow) != p->key.zone))
		return NAT_DROP_NO_PORT;
	return NAT_DROP_RACE;
}

static __always_inline int session_refused(const struct packet *p, struct nat_flow *out,
					   struct new_session *new, int error)
{
	if (error == E_EXIST)
		return session_adopt(p, out, new);
	return error == E_TOO_BIG ? NAT_DROP_SESSIONS_FULL : NAT_DROP_RACE;
}

/* Writes the flow of the session's owner: all but its state. */
static __always_inline void session_write(const struct nat_flow *from, struct nat_flow *owner,
					  __u32 other)
{
	owner->key = from->key;
	owner->src = from->src;
	owner->dst = from->dst;
	owner->sport = from->sport;
	owner->dport = from->dport;
	owner->hop = from->hop;
	owner->bytes = from->bytes;
	owner->packets = from->packets;
	owner->seen = from->seen;
	owner->other = other;
	owner->mtu = from->mtu;
	owner->hop_checked = from->hop_checked;
}

/* Makes both keys lead to the session's flows: the peer's first, so that when the owner's does the
 * replies are known. Then packets may use them. */
static __always_inline int session_enter(const struct new_session *new, __u32 number,
					 struct nat_flow *owner, struct nat_flow *peer)
{
	int error = flow_insert(&new->other, number + 1);

	if (error)
		return error;
	error = flow_insert(&new->packet.key, number);
	if (error) {
		flow_remove(&new->other, number + 1);
		return error;
	}
	__sync_lock_test_and_set(&peer->state, session_peer_state(&new->packet, new));
	__sync_lock_test_and_set(&owner->state, new->owner.state);
	return 0;
}

/*
 * Makes the session. Of two CPUs that open the same one one inserts each key; who fails takes back
 * what it inserted, and adopts. The peer's key can also belong to another session:
 * session_other_port. Whoever finds one of the keys before both lead to it finds the flow GONE: not
 * there, and no memory to use.
 *
 * E_EXIST: *out is another CPU's flow.
 */
GLOBAL int session_insert(struct new_session *new)
{
	struct nat_flow_rest *first, *second;
	struct nat_flow *out, *owner, *peer;
	const struct packet *p;
	__u32 number;
	__u64 *bits;
	__s64 taken;
	int error;

	if (!new)
		return NAT_DROP_BYPASS;
	p = &new->packet;
	out = &new->owner;
	taken = flow_take();
	if (taken < 0)
		return NAT_DROP_SESSIONS_FULL;
	number = taken;
	owner = flow_at(number);
	peer = flow_at(number + 1);
	first = flow_rest(number);
	second = flow_rest(number + 1);
	bits = flow_bits_at(number);
	if (!owner || !peer || !first || !second || !bits)
		return NAT_DROP_BYPASS; /* cannot happen: there is room for every number */
	session_owner(p, out, new);
	state_other_key(&p->key, out, &new->other);
	new->other.zone = new->verdict.zone;
	*(volatile __u32 *)&owner->state = NAT_FLOW_GONE;
	*(volatile __u32 *)&peer->state = NAT_FLOW_GONE;
	session_write(out, owner, number + 1);
	session_peer(p, peer, new);
	peer->other = number;
	first->rule = new->rule;
	first->created = p->now;
	second->rule = new->source.address;
	second->created = 0;
	error = session_enter(new, number, owner, peer);
	if (!error) {
		__sync_fetch_and_or(bits, flow_bits_of(number));
		return GO_ON;
	}
	flow_give(number);
	return session_refused(p, out, new, error);
}

/* Any source port from the range of the packet's own that no session's replies from the receiver
 * use. */
GLOBAL int session_draw_port(struct new_session *new)
{
	__u32 first = 1024, count = NAT_PORTS - 1024, wanted, try;

	if (!new)
		return NAT_DROP_BYPASS;
	wanted = bpf_ntohs(new->packet.key.sport);
	if (new->packet.class == NAT_ICMP) {
		first = 0;
		count = NAT_PORTS;
	} else if (wanted < 512) {
		first = 1;
		count = 511;
	} else if (wanted < PORT_SYSTEM) {
		first = 600;
		count = PORT_SYSTEM - 600;
	}
	for (try = 0; try < SESSION_PORT_TRIES; try++) {
		new->other.dport = bpf_htons(first + bpf_get_prandom_u32() % count);
		if (!flow_entry(&new->other)) {
			new->owner.sport = new->other.dport;
			return GO_ON;
		}
	}
	return NAT_DROP_NO_PORT;
}

/*
 * Another source port for a session whose replies would be another session's: the same client
 * has come to the same receiver by another external endpoint. Netfilter does so for any such pair
 * (nf_nat_l4proto_unique_tuple). Where natkit gives ports the session takes one for itself, as
 * with address-and-port-dependent mapping; what has an address to itself, or is not translated,
 * gets any. NAT_DROP_NO_PORT: there is none, or the protocol has no ports.
 */
static __always_inline int session_other_port(struct ctx *ctx, struct new_session *new)
{
	struct reservation *r = &new->source;
	int reason;

	if (new->packet.class >= NAT_PORT_CLASSES || r->flags & NAT_FLOW_PORT)
		return NAT_DROP_NO_PORT;
	if (!(r->flags & NAT_FLOW_MAPPED) || r->internal.class >= NAT_PORT_CLASSES)
		return session_draw_port(new);
	reason = endpoint_take(ctx, &new->packet.key, r, new->config, new->generation);
	if (reason != GO_ON)
		return reason;
	r->flags |= NAT_FLOW_PORT;
	port_name(r);
	new->owner.sport = r->port;
	return GO_ON;
}

/* session_insert, by another source port if need be; another CPU may take that at once. */
static __always_inline int session_insert_retry(struct ctx *ctx, struct new_session *new)
{
	int reason = session_insert(new), try;

	for (try = 0; try < MAPPING_TRIES && reason == NAT_DROP_NO_PORT; try++) {
		if (session_other_port(ctx, new) != GO_ON)
			break;
		reason = session_insert(new);
	}
	return reason;
}

/* --- a packet without session --------------------------------------------------- */

/* Steps 1 to 4, but for what a source rule takes. */
static __always_inline int session_evaluate(struct ctx *ctx, const struct packet *p,
					    struct nat_flow *out, struct new_session *new)
{
	struct verdict *d = &new->verdict;
	const struct nat_rule *rule;
	int reason;

	d->source = RULE_NONE;
	if (session_pretends(ctx, p, d->in, new->lookups, new->slot))
		return NAT_DROP_SPOOFED;
	if (new->lookups & NAT_LOOKUP_EXCLUDE &&rule_excluded(&p->key, new->lookups, new->slot))
		return NAT_PASS_EXCLUDED;
	reason = session_destination(p, out, new);
	if (reason != GO_ON)
		return reason;
	if (p->key.side == NAT_OUTSIDE && !d->by_rule && !new->by_mapping)
		return NAT_PASS_NO_RULE;
	reason = session_route(ctx, p, out, new);
	if (reason != GO_ON)
		return reason;

	/* An external host that uses a mapping keeps its address. */
	if ((p->key.side == NAT_INSIDE && !session_among(p, out, d)) ||
	    (d->by_rule && session_moves(p, out))) {
		d->egress = session_egress(ctx, p, new);
		d->source = rule_source(addr_word(p->key.src), d->in, d->egress, new->lookups,
					new->generation);
		if (d->source != RULE_NONE) {
			rule = rule_get(new->slot, d->source);
			if (!rule)
				return NAT_DROP_BYPASS;
			session_rule(p, new, rule);
		}
	}
	if (d->source == RULE_NONE && !d->by_rule && !new->by_mapping)
		return NAT_PASS_NO_RULE;
	d->to = out->dst;
	d->to_port = out->dport;
	d->rule = new->rule;
	d->flags = new->flags;
	return session_spoofed(ctx, p, new);
}

/* session_evaluate, or its cached verdict on a packet like this one. */
SUBPROGRAM int session_verdict(struct ctx *ctx, const struct packet *p, struct nat_flow *out,
			       struct new_session *new)
{
	struct verdict_key key = verdict_key(p, new->generation);
	struct verdict_entry *d = verdict_get(&key, p->now);
	int known = d && verdict_holds(d, &key, p->now), reason;

	if (known)
		new->verdict = d->verdict;
	else
		new->verdict.in = link_find(p->ifindex);
	if (!ctx_is_addressed(ctx, link_get(new->verdict.in)))
		return NAT_PASS_NOT_IPV4;
	if (known) {
		out->dst = new->verdict.to;
		out->dport = new->verdict.to_port;
		new->rule = new->verdict.rule;
		new->flags = new->verdict.flags;
		return GO_ON;
	}
	reason = session_evaluate(ctx, p, out, new);
	if (reason == GO_ON && d && !new->by_mapping &&new->verdict.hop) {
		d->key = key;
		d->verdict = new->verdict;
	}
	return reason;
}

/* What a lease says of a packet from that remote endpoint to the mapping that was addressed.
 * NAT_DROP_NO_MAPPING: nothing. */
GLOBAL int session_leased(__be32 remote, __u32 remote_port)
{
	__u32 zero = 0;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);
	struct nat_lease_key key = {.remote = addr_of(remote), .remote_port = remote_port};
	int reason;

	if (!new)
		return NAT_DROP_BYPASS;
	key.internal = new->target.internal;
	if (key.internal.class == NAT_OTHER)
		key.internal.port = new->packet.key.dport;
	key.internal.class = new->packet.class;
	reason = lease_admits(&key, new->packet.now);
	/* Only this packet holds it: a lease has ended, and with it what it opened. */
	if (reason == NAT_DROP_NO_MAPPING && (new->target.refs &NAT_REFS_COUNT) == 1)
		return NAT_DROP_FILTERED;
	return reason;
}

/* Whether the mapping that was addressed lets in a packet from that remote endpoint. */
static __always_inline int session_lets_in(const struct new_session *new, struct nat_addr remote,
					   __be16 remote_port)
{
	int reason = NAT_DROP_NO_MAPPING;

	if (new->target.refs & NAT_REFS_LEASED)
		reason = session_leased(addr_word(remote), remote_port);
	return reason == NAT_DROP_NO_MAPPING ? mapping_admits(&new->target, addr_word(remote))
					     : reason;
}

/* Whether the mapping that was addressed lets the packet's sender in, known by those.
 * Sessions that external hosts open count as the host's: they fill its share, not the table. */
static __always_inline int session_admitted(struct new_session *new, struct nat_addr sender,
					    __be16 port)
{
	int reason = new->refused ? new->refused : session_lets_in(new, sender, port);

	if (reason != GO_ON || !(new->config &NAT_CONFIG_COUNT_SESSIONS))
		return reason;
	return source_take(&new->target, new->generation, 0);
}

/* Counts a session for an internal host that no pool's subscriber answers for: whose address a map
 * gives, or to whom a rule sends it. Such hosts have a share of their own for each, so that what
 * strangers open keeps nobody from what is its own. */
static __always_inline int session_counts(struct new_session *new, struct reservation *r,
					  struct nat_addr host, __u32 zone, __u32 pool)
{
	if (!(new->config &NAT_CONFIG_COUNT_SESSIONS) || !new->verdict.sessions)
		return GO_ON;
	r->internal.addr = host;
	r->internal.zone = zone;
	r->internal.pool = pool;
	r->internal.class = NAT_OTHER;
	return source_take(r, new->generation, 1);
}

/* Whether the host that the packet goes to may have one session more, be it by a mapping or by a
 * rule. */
static __always_inline int session_reaches(struct new_session *new, const struct nat_flow *out)
{
	if (new->by_mapping)
		return session_admitted(new, out->src, out->sport);
	if (new->verdict.by_rule &&new->verdict.side == NAT_INSIDE)
		return session_counts(new, &new->target, out->dst, new->verdict.zone,
				      NAT_POOL_PUBLISHED);
	return GO_ON;
}

/*
 * A packet from inside to an external endpoint of another internal host, its source translated:
 * RFC 4787 REQ-9 has it be as if it had left and come back. Mostly one session stands for both
 * ways through the NAT. But if its receiver's filter refuses it, it has left all the same, so
 * the sender's now knows whom it has sent to; and if the receiver has sent to it before, or
 * is itself, that session's key is taken. Then the session is of the packet that leaves, as to
 * anybody outside, and what comes back is looked up by itself, each time: flow_hairpin.
 */
SUBPROGRAM int session_hairpin(const struct packet *p, struct nat_flow *out,
			       struct new_session *new)
{
	struct nat_flow_key back = {.src = out->src,
				    .dst = p->key.dst,
				    .sport = out->sport,
				    .dport = p->key.dport,
				    .protocol = p->key.protocol,
				    .side = NAT_OUTSIDE};
	int reason = GO_ON, self = addr_equal(back.src, back.dst) && back.sport == back.dport;

	if (!self && !flow_entry(&back)) {
		reason = session_reaches(new, out);
		if (reason != NAT_DROP_FILTERED)
			return reason;
	}
	new->refused = reason == GO_ON ? 0 : reason;
	if (new->target.flags)
		reservation_drop(&new->target, addr_word(p->key.dst), p->now);
	new->target.flags = 0;
	new->flags = (new->flags & ~NAT_FLOW_HAIRPIN) | NAT_FLOW_RETURNS;
	new->verdict.side = NAT_OUTSIDE;
	new->verdict.zone = 0;
	out->dst = p->key.dst;
	out->dport = p->key.dport;
	return GO_ON;
}

/* Steps 1 to 5 for a packet: what it becomes, and what its session reserves. */
static __always_inline int session_find(struct ctx *ctx, struct packet *p, struct nat_flow *out,
					struct new_session *new)
{
	const struct nat_rule *rule = NULL;
	int reason, takes = 0;

	reason = session_martian(&p->key);
	if (reason == GO_ON)
		reason = session_verdict(ctx, p, out, new);
	if (reason != GO_ON)
		return reason;
	if (new->verdict.source != RULE_NONE) {
		rule = rule_get(new->slot, new->verdict.source);
		if (!rule)
			return NAT_DROP_BYPASS;
	}
	if (new->verdict.sessions) {
		reason = session_opens(p);
		if (reason != GO_ON)
			return reason;
	}
	if (rule && (rule->kind == NAT_RULE_MAP || rule->kind == NAT_RULE_STATELESS))
		out->src = rule_map_address(rule, p->key.src);
	else if (rule)
		takes = 1;
	/* Before anything is taken. A host that is itself translated leaves first. */
	if (!rule) {
		reason = session_reaches(new, out);
		if (reason != GO_ON)
			return reason;
	}
	if (new->verdict.sessions) {
		reason = route_carries(p, out->dst, new->verdict.mtu);
		if (reason != GO_ON)
			return reason;
	}
	if (rule && !takes && p->key.side == NAT_INSIDE) {
		reason = session_counts(new, &new->source, p->key.src, p->key.zone, NAT_POOL_MAP);
		if (reason != GO_ON)
			return reason;
	}
	if (takes) {
		new->source.internal.addr = p->key.src;
		new->source.internal.class = p->class;
		new->source.internal.zone = p->key.zone;
		reason = session_pool(new, rule, new->verdict.egress);
		if (reason == GO_ON)
			reason = session_source(ctx, p, out, new, rule);
		if (reason != GO_ON)
			return reason;
	}
	if (rule && new->verdict.sessions &&new->flags & NAT_FLOW_HAIRPIN)
		return session_hairpin(p, out, new);
	return rule ? session_reaches(new, out) : GO_ON;
}

/* The remote of the filter entry that the session's owner made. */
static __always_inline void session_drop(const struct packet *p, const struct new_session *new)
{
	if (new->source.flags)
		reservation_drop(&new->source, addr_word(p->key.dst), p->now);
	if (new->target.flags)
		reservation_drop(&new->target, addr_word(p->key.dst), p->now);
}

/* Puts the packet where the functions below find it. */
static __always_inline struct new_session *session_begin(const struct packet *p)
{
	__u32 zero = 0;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);

	if (!new)
		return NULL;
	__builtin_memset(new, 0, sizeof(*new));
	new->packet.key = p->key;
	new->packet.now = p->now;
	new->packet.ifindex = p->ifindex;
	new->packet.bytes = p->bytes;
	new->packet.segments = p->segments;
	new->packet.length = p->length;
	new->packet.class = p->class;
	new->packet.ttl = p->ttl;
	new->packet.tos = p->tos;
	new->packet.tcp_flags = p->tcp_flags;
	new->packet.flags = p->flags;
	return new;
}

GLOBAL int session_make(struct ctx *ctx)
{
	__u32 zero = 0;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);
	struct nat_control *control = control_get();
	const struct nat_config *c;
	struct nat_flow *out;
	struct packet *p;
	int reason;

	if (!new || !control)
		return NAT_DROP_BYPASS;
	p = &new->packet;
	out = &new->owner;
	new->generation = *(volatile __u32 *)&control->generation;
	new->slot = new->generation % NAT_GENERATIONS;
	c = bpf_map_lookup_elem(&config, &new->slot);
	if (!c)
		return NAT_DROP_BYPASS;
	new->lookups = c->lookups;
	new->config = c->flags;
	out->src = p->key.src;
	out->dst = p->key.dst;
	out->sport = p->key.sport;
	out->dport = p->key.dport;

	reason = session_find(ctx, p, out, new);
	if (reason == GO_ON && !new->verdict.sessions) {
		session_owner(p, out, new);
		return GO_ON;
	}
	if (reason == GO_ON) {
		reason = session_insert_retry(ctx, new);
		if (reason == GO_ON) {
			count_add(NAT_CREATED);
			if (new->flags &(NAT_FLOW_HAIRPIN | NAT_FLOW_RETURNS))
				count_add(NAT_HAIRPINNED);
			if (new->config & NAT_CONFIG_EVENTS)
				event_session(NAT_EVENT_CREATE, out, new->rule, NULL);
			if (log_wants(NAT_LOG_SESSIONS))
				log_session(NAT_LOG_CREATED, &p->key, out, 0);
			return new->refused ? new->refused : GO_ON;
		}
	}
	session_drop(p, new);
	return reason == E_EXIST ? GO_ON : reason;
}

/* A packet that session_make refused is dropped for that reason, and not left to tc. */
GLOBAL int session_refusal(__u32 reason)
{
	__u32 zero = 0;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);

	if (!new)
		return NAT_DROP_BYPASS;
	source_refused(&new->source);
	source_refused(&new->target);
	if (new->config & NAT_CONFIG_EVENTS)
		event_refused(&new->packet.key, reason);
	return GO_ON;
}

/*
 * A packet that no flow knows. GO_ON: *out is what it becomes and where it goes, the
 * session is made (or none is needed) and has counted the packet.
 */
static __always_inline int session_open(struct ctx *ctx, struct packet *p, struct nat_flow *out)
{
	struct nat_mapping_key internal = {
		.addr = p->key.src, .port = p->key.sport, .class = p->class, .zone = p->key.zone};
	struct new_session *new;
	int reason;

	if (p->key.side == NAT_INSIDE)
		mapping_touch(&internal);
	new = session_begin(p);
	if (!new)
		return NAT_DROP_BYPASS;
	reason = session_make(ctx);
	p->mtu = new->packet.mtu; /* if it is too big */
	p->refused = reason >= NAT_DROP_MALFORMED;
	*out = new->owner;
	return reason;
}

/* --- a packet of a session that has died ------------------------------------------ */

/* Whether a new packet from outside would be let in: a rule forwards it, or the mapping
 * admits its sender. */
static __always_inline int session_admits(struct new_session *new, const struct nat_config *config,
					  __u32 slot)
{
	const struct packet *p = &new->packet;
	struct reservation *r = &new->target;
	int query = p->flags & PACKET_QUERY, reason;

	reason = session_opens(p);
	if (reason != GO_ON)
		return reason;
	if (rule_destination(&p->key, link_find(p->ifindex), config->lookups, slot) != RULE_NONE)
		return GO_ON;
	reason = mapping_by_external(addr_word(p->key.dst), query ? p->key.sport : p->key.dport,
				     p->class, r);
	if (reason != GO_ON)
		return reason == NAT_PASS_NO_RULE ? NAT_DROP_NO_MAPPING : reason;
	reason = mapping_addressed(r, p->now);
	if (reason == GO_ON)
		reason = session_lets_in(new, p->key.src, p->key.sport);
	mapping_drop(r, p->now);
	return reason;
}

/* Whether the packet that session_begin was given would be let in, had it come from outside. */
GLOBAL int session_enters(void)
{
	__u32 zero = 0, slot;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);
	const struct nat_config *config = config_get(&slot);

	return new && config ? session_admits(new, config, slot) : NAT_DROP_BYPASS;
}

GLOBAL int session_wake(void)
{
	__u32 zero = 0, slot, old, state;
	struct new_session *new = bpf_map_lookup_elem(&new_sessions, &zero);
	const struct nat_config *config = config_get(&slot);
	struct nat_flow *flow, *other, *owner, *peer;
	const struct packet *p;
	struct nat_addr src;
	int reason;

	if (!new || !config)
		return NAT_DROP_BYPASS;
	p = &new->packet;
	flow = flow_look(&p->key);
	other = flow ? flow_other(flow) : NULL;
	if (!other)
		return NAT_DROP_RACE;
	owner = state_is_owner(flow) ? flow : other;
	peer = owner == flow ? other : flow;
	old = state_read(owner);
	if (!(old & NAT_FLOW_MADE) || old & NAT_FLOW_GONE)
		return NAT_DROP_RACE;
	if (old & NAT_FLOW_DEAD || state_expired(owner, peer, config, p->now)) {
		src = owner->src;
		if (old & NAT_FLOW_MASQUERADE && !bpf_map_lookup_elem(&address_indices, &src))
			return NAT_DROP_RACE; /* the address moved: another is opened when this is
						 removed */
		state = owner == flow ? old : state_read(peer);
		reason = state & NAT_FLOW_OUTBOUND ? session_opens(p)
						   : session_admits(new, config, slot);
		if (reason != GO_ON)
			return reason;
		owner->seen = p->now;
		peer->seen = p->now;
		state_stale(owner, p->now);
		state_stale(peer, p->now);
		state = state_open(p);
		if (owner != flow && p->class == NAT_TCP)
			state = state_tcp(0, p->tcp_flags, 0, 1);
		state |= old & ~(STATE_TCP | NAT_FLOW_TIMEOUT | NAT_FLOW_DEAD);
		/* If it is not as it was, another packet has revived it; or it was removed, and the
		 * number may be another session's by now. */
		if (!state_replace(owner, old, state) &&
		    (state_read(owner) & (NAT_FLOW_DEAD | NAT_FLOW_GONE) ||
		     !flow_key_is(&flow->key, flow_words(&p->key))))
			return NAT_DROP_RACE;
		state_copy_timeout(owner, peer);
	}
	__sync_fetch_and_and(&peer->state, ~NAT_FLOW_DEAD);
	return GO_ON;
}

/*
 * A packet whose flow is DEAD, or has been silent for longer than its time-out. GO_ON:
 * the session lives, with all its reservations; its time starts again. A packet from
 * outside must be one that could open it. Who finds GONE came too late: GC is
 * removing the session, and the sender's next packet makes another.
 */
static __always_inline int session_revive(const struct packet *p, const struct nat_flow *flow)
{
	int reason = session_begin(p) ? session_wake() : NAT_DROP_BYPASS;

	if (reason != GO_ON)
		return reason;
	/* The flow's number may have become another one's, and another number the key's. */
	return flow_look(&p->key) == flow ? GO_ON : NAT_DROP_RACE;
}

/* Ends the session of a flow whose external address is no longer the gateway's. Its keys lead
 * to it no more, so that the next packet opens another; GC does the rest. */
SUBPROGRAM void session_kill(const struct packet *p)
{
	struct nat_flow *flow = flow_look(&p->key);
	struct nat_flow *other = flow ? flow_other(flow) : NULL;

	if (!other)
		return;
	if (state_is_owner(flow))
		state_kill(flow, other, p->now);
	else
		state_kill(other, flow, p->now);
	flow_remove(&flow->key, other->other);
	flow_remove(&other->key, flow->other);
}

#endif
