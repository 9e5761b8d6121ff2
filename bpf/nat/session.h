/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * On a miss: finds what a packet is to become and makes the session, two flows; and
 * brings a session back that had died.
 *
 *   1) exclusions                     nothing more
 *   2) destination                    a rule, or who has the outside endpoint; else it stays
 *   3) the way to that
 *   4) source                         a rule for that way; a port or an address from it
 *   5) filtering                      of the mapping found in 2
 *   6) both flows, the peer's first
 *
 * Sources are checked against the routes only here: the flow of an inside host remembers
 * the link that its packets must come from.
 */
#ifndef NATKIT_SESSION_H
#define NATKIT_SESSION_H

#include "nat/decision.h"
#include "nat/mapping.h"
#include "nat/state.h"

enum session_limit { SESSION_PORT_TRIES = 64 };

/* The packet at hand, and what is known of the session that it opens. */
struct opening {
	struct packet packet;         /* without inner */
	__u32 lookups, config, limit; /* of nat_config: lookups, flags, sessions_per_source */
	__u32 generation, slot;       /* of the rules and of their maps */
	struct decided decided;
	struct hold source; /* the packet's sender */
	struct hold target; /* its receiver, if it has the mapping that was addressed */
	__u32 flags;        /* enum nat_flow_state, of the owner */
	__u8 by_mapping;    /* the destination is translated by the mapping that has it */
	__u8 refused;       /* enum nat_reason: its port is a session's, which others can't use */
	struct nat_flow owner;
	struct nat_flow_key other; /* of the answers */
};

/* It doesn't fit on the stack beside the rest, which is 512 bytes for the whole chain
 * of calls; and functions that the verifier checks by themselves find here what they
 * work on. A CPU has one packet at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct opening);
	__uint(max_entries, 1);
} openings SEC(".maps");

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

static __always_inline void session_rule(const struct packet *p, struct nat_flow *out,
					 struct opening *o, const struct nat_rule *rule)
{
	out->rule = rule->id;
	if (rule->kind != NAT_RULE_STATELESS)
		o->decided.sessions = 1;
	if (rule->flags & NAT_RULE_CLAMP_MSS && p->class == NAT_TCP)
		o->flags |= NAT_FLOW_CLAMP;
}

/* The outside endpoint that was addressed belongs to an inside one, which is held. A session's
 * own is not, and only from inside it matters whose it is: session_hairpin. */
static __always_inline int session_to_mapping(const struct packet *p, struct nat_flow *out,
					      struct opening *o)
{
	int query = p->flags & PACKET_QUERY, reason;
	struct nat_mapping_key *inside = &o->target.inside;

	reason = mapping_by_outside(addr_word(p->key.dst), query ? p->key.sport : p->key.dport,
				    p->class, &o->target);
	if (reason == NAT_PASS_NO_RULE)
		return GO_ON; /* not one of ours */
	if (reason != GO_ON)
		return reason;
	reason = session_opens(p);
	if (reason != GO_ON)
		return reason;
	reason = mapping_addressed(&o->target, p->now);
	if (reason == NAT_DROP_FILTERED && p->key.side == NAT_INSIDE)
		o->refused = reason;
	else if (reason != GO_ON)
		return reason;
	o->by_mapping = 1;
	o->decided.sessions = 1;
	out->dst = inside->addr;
	if (query && inside->class != NAT_OTHER)
		out->sport = inside->port;
	else if (inside->class != NAT_OTHER)
		out->dport = inside->port;
	return GO_ON;
}

SUBPROGRAM int session_destination(const struct packet *p, struct nat_flow *out, struct opening *o)
{
	int index = rule_destination(&p->key, o->decided.in, o->lookups, o->slot);
	const struct nat_rule *rule;

	if (index == RULE_NONE)
		return session_to_mapping(p, out, o);
	rule = rule_get(o->slot, index);
	if (!rule)
		return NAT_DROP_BYPASS;
	o->decided.by_rule = 1;
	session_rule(p, out, o, rule);
	if (rule->kind == NAT_RULE_FORWARD)
		return rule_forward(rule, o->slot, p->key.src, &out->dst, &out->dport);
	out->dst = rule_map_address(rule, p->key.dst);
	return GO_ON;
}

/* --- 3) the way ---------------------------------------------------------------- */

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

/* Whether an address is given to inside hosts: it is not only that of forwards. */
static __always_inline int session_gives(__u32 *index)
{
	struct nat_address *address = index ? bpf_map_lookup_elem(&addresses, index) : NULL;

	return address && !(address->flags & NAT_ADDRESS_STATIC);
}

/*
 * Whether a packet from inside has a source that no inside host has: an outside address of
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
	index = bpf_map_lookup_elem(&outside, &src);
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

/* Whether an inside host sends to another one by a link of both sides, under its own address:
 * rules for what leaves by that link are not about it. */
static __always_inline int session_among(const struct packet *p, const struct nat_flow *out,
					 const struct decided *d)
{
	return p->key.side == NAT_INSIDE && d->side == NAT_INSIDE &&
	       link_is_both(link_get(d->link)) && !session_moves(p, out);
}

SUBPROGRAM int session_route(struct ctx *ctx, const struct packet *p, const struct nat_flow *out,
			     struct opening *o)
{
	int translated = session_moves(p, out);
	struct route route;
	struct nat_link *link;
	int reason;

	reason = route_to(ctx, p, out->dst, &route);
	if (reason == NAT_PASS_LOCAL && translated)
		return NAT_DROP_UNSUPPORTED; /* to the gateway: can't be handed up translated */
	if (reason != GO_ON)
		return reason;
	link = link_get(route.link);
	if (!link) /* answers would not meet us */
		return translated ? NAT_DROP_NO_ROUTE : NAT_PASS_NO_RULE;
	o->decided.link = route.link;
	o->decided.mtu = route.mtu;
	o->decided.found = route.found;
	o->decided.hop = route.hop;
	o->decided.side = session_side(link, out->dst, o->slot);
	if (translated && p->key.side == NAT_INSIDE && o->decided.side == NAT_INSIDE)
		o->flags |= NAT_FLOW_HAIRPIN;
	return GO_ON;
}

/*
 * Whether the packet can be from where it came. An inside source must route back to that
 * link. One from outside must not be the gateway's or an inside host's: a session of
 * it would translate what inside hosts say to each other.
 */
SUBPROGRAM int session_spoofed(struct ctx *ctx, const struct packet *p, const struct opening *o)
{
	struct route back;
	struct nat_link *link;
	int reason;

	if (p->key.side == NAT_INSIDE)
		return route_home(ctx, p, o->decided.in);
	reason = route_find(ctx, p, p->key.dst, p->key.src, &back);
	link = reason == GO_ON ? link_get(back.link) : NULL;
	if (reason == NAT_PASS_LOCAL ||
	    (link && session_side(link, p->key.src, o->slot) == NAT_INSIDE))
		return NAT_DROP_SPOOFED;
	return GO_ON;
}

/* --- 4) source ----------------------------------------------------------------- */

/*
 * The link whose source rules a packet meets: the way out, or for hairpin the link
 * that it would have left by, had its receiver not been inside: the one that the
 * addressed outside address is on, or the way to that.
 */
SUBPROGRAM __u32 session_way_out(struct ctx *ctx, const struct packet *p, const struct opening *o)
{
	struct nat_addr key = p->key.dst;
	struct nat_address *address;
	struct route route;
	__u32 *index;

	if (!(o->flags & NAT_FLOW_HAIRPIN))
		return o->decided.link;
	index = bpf_map_lookup_elem(&outside, &key);
	address = index ? bpf_map_lookup_elem(&addresses, index) : NULL;
	if (address && address->link)
		return address->link;
	return route_find(ctx, p, p->key.src, p->key.dst, &route) == GO_ON ? route.link : 0;
}

/* The pool of the rule, or the one address of the link for masquerade. */
static __always_inline int session_pool(struct opening *o, const struct nat_rule *rule, __u32 out)
{
	struct hold *h = &o->source;
	struct nat_link *link;

	if (!(rule->flags & NAT_RULE_MASQUERADE)) {
		h->inside.realm = rule->realm;
		h->address = rule->pool_first;
		return GO_ON;
	}
	link = link_get(out);
	if (!link || !link->address)
		return NAT_DROP_NO_ADDRESS;
	h->inside.realm = link->realm;
	h->address = link->address - 1;
	o->flags |= NAT_FLOW_MASQUERADE;
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
 * Asks early for memory that is written soon: the port's slot and the answers' bucket of
 * flow_table. Neither is in a cache, and who waits for both at once waits half as
 * long: behind the locks in between, one would be waited for after the other.
 */
SUBPROGRAM void session_touch(const struct packet *p, const struct hold *h)
{
	__u32 index = h->address;
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_flow_key answer = {.src = p->key.dst,
				      .sport = p->key.dport,
				      .dport = h->port,
				      .protocol = p->key.protocol,
				      .side = NAT_OUTSIDE};
	struct nat_control *c = control_get();
	struct nat_bucket *bucket;
	struct flow_words words;
	struct nat_slot *slot;

	if (!address || !c)
		return;
	answer.dst = address->addr;
	slot = port_slot(index, address, h->inside.class, bpf_ntohs(h->port));
	if (slot)
		slot_read(slot);
	words = flow_words(&answer);
	bucket = table_bucket(&flow_table, c->flow_mask, table_hash(c, words.addresses, words.rest),
			      0);
	if (bucket)
		table_read(&bucket->entries[0]);
}

/* Takes an outside endpoint for the packet's sender. */
static __always_inline int session_take(struct ctx *ctx, const struct packet *p, struct opening *o,
					const struct nat_rule *rule)
{
	__u32 count = 0, class = p->class;
	struct hold *h = &o->source;
	int reason, port, independent;

	if (rule->kind == NAT_RULE_NAPT && rule->pool_count > 1)
		count = rule->pool_count;
	reason = source_take(h, rule->pool_first, count, o->limit);
	if (reason != GO_ON)
		return reason;
	if (rule->kind == NAT_RULE_ONE_TO_ONE) {
		h->inside.class = NAT_OTHER;
		h->filtering = rule_strictest(rule) << 24;
		reason = mapping_take_address(h, rule->pool_first, rule->pool_count, p->now);
	} else if (class >= NAT_PORT_CLASSES) {
		/* By address: the flows are only let in if no other host talks so with
		 * that receiver. ICMP that is neither query nor error has no owner. */
		return p->key.protocol == ICMP ? NAT_DROP_UNSUPPORTED : GO_ON;
	} else {
		h->inside.port = p->key.sport;
		/* Linux 6.1 forgets what class was compared with ("max value is outside"). */
		OPAQUE(class);
		class &= 3;
		h->filtering = (__u32)rule->filtering[class] << 24;
		independent = rule->mapping[class] == NAT_ENDPOINT_INDEPENDENT;
		reason = independent ? mapping_find(h, p->now) : NAT_DROP_NO_MAPPING;
		if (reason == NAT_DROP_NO_MAPPING) {
			port = port_take(ctx, &p->key, class, h->address,
					 o->config & NAT_CONFIG_PARITY);
			if (port == PORT_NONE)
				return NAT_DROP_NO_PORT;
			h->port = bpf_htons(port);
			if (!independent) {
				h->flags |= NAT_FLOW_PORT;
				port_name(h);
				return GO_ON;
			}
			session_touch(p, h);
			reason = mapping_make(h, p->now);
		}
	}
	if (reason == GO_ON && h->filtering == NAT_FILTER_ADDRESS << 24)
		reason = contact_take(h, addr_word(p->key.dst));
	return reason;
}

static __always_inline int session_source(struct ctx *ctx, const struct packet *p,
					  struct nat_flow *out, struct opening *o,
					  const struct nat_rule *rule)
{
	struct nat_address *address;
	struct hold *h = &o->source;
	__u32 index;
	int reason;

	reason = session_take(ctx, p, o, rule);
	if (reason != GO_ON)
		return reason;
	index = h->address;
	address = bpf_map_lookup_elem(&addresses, &index);
	if (!address)
		return NAT_DROP_BYPASS;
	if (address->flags & NAT_ADDRESS_LEAVING)
		return NAT_DROP_NO_ADDRESS;
	out->src = address->addr;
	if (h->inside.class < NAT_PORT_CLASSES)
		out->sport = h->port;
	return GO_ON;
}

/* --- 6) both flows -------------------------------------------------------------- */

/* The deltas of a packet with that key, for rewrite.h: l3_delta for the IPv4 header and
 * the pseudo-header, l4_delta for ports or the identifier. */
static __always_inline void session_deltas(const struct nat_flow_key *key, struct nat_flow *flow)
{
	flow->l3_delta =
		delta_fold(delta_address(key->src, flow->src) + delta_address(key->dst, flow->dst));
	flow->l4_delta = delta_fold(delta_word(key->sport, flow->sport) +
				    delta_word(key->dport, flow->dport));
}

static __always_inline __u32 session_held(const struct hold *h)
{
	__u32 whole =
		h->flags & NAT_FLOW_MAPPED && h->inside.class == NAT_OTHER ? NAT_FLOW_WHOLE : 0;

	return h->flags | whole | (__u32)h->inside.realm << NAT_FLOW_REALM_SHIFT;
}

/* The flow of the answers: everything the other way round. Its next hop is found by
 * its first packet. */
static __always_inline void session_peer(const struct packet *p, struct nat_flow *peer,
					 const struct opening *o)
{
	peer->src = p->key.dst;
	peer->dst = p->key.src;
	peer->sport = p->key.dport;
	peer->dport = p->key.sport;
	session_deltas(&o->other, peer);
	peer->hop = 0;
	peer->hop_checked = 0;
	peer->seen = p->now;
	peer->packets = 0;
	peer->bytes = 0;
	peer->rule = o->owner.rule;
	peer->created = o->source.address;
	peer->mtu = 0;
	peer->in_link = 0;
	peer->state = (state_open(p) & NAT_FLOW_TIMEOUT) |
		      (o->flags & (NAT_FLOW_HAIRPIN | NAT_FLOW_CLAMP | NAT_FLOW_RETURNS)) |
		      session_held(&o->target) |
		      (p->key.side == NAT_OUTSIDE ? NAT_FLOW_PEER_OUTSIDE : 0) |
		      (o->decided.side == NAT_INSIDE ? NAT_FLOW_OUTBOUND : 0);
}

static __always_inline void session_owner(const struct packet *p, struct nat_flow *owner,
					  const struct opening *o)
{
	session_deltas(&p->key, owner);
	owner->hop = o->decided.hop;
	owner->mtu = o->decided.mtu;
	owner->hop_checked = o->decided.found;
	owner->seen = p->now;
	owner->created = p->now;
	owner->packets = p->segments;
	owner->bytes = p->bytes;
	owner->state = state_open(p) | NAT_FLOW_OWNER | o->flags | session_held(&o->source);
	if (p->key.side == NAT_INSIDE) {
		owner->in_link = o->decided.in;
		owner->state |= NAT_FLOW_OUTBOUND;
	}
	if (o->decided.side == NAT_OUTSIDE)
		owner->state |= NAT_FLOW_PEER_OUTSIDE;
}

/*
 * A key of this session is another one's already. E_EXIST: another CPU has made the
 * session, a moment ago, and *out is its flow. If that is not there yet, or dying, the
 * sender's next packet will know more. NAT_DROP_NO_PORT: the answers' key is another
 * session's.
 */
static __always_inline int session_adopt(const struct packet *p, struct nat_flow *out,
					 struct opening *o)
{
	__u32 direction = 0;
	struct nat_session *s = flow_look(&p->key, &direction);
	struct nat_flow *flow;

	if (s) {
		flow = flow_at(s, direction);
		if (state_read(flow) & (NAT_FLOW_DEAD | NAT_FLOW_GONE))
			return NAT_DROP_RACE;
		*out = *flow;
		return E_EXIST;
	}
	s = flow_look(&o->other, &direction);
	flow = s ? flow_at(s, direction) : NULL;
	if (flow && (!addr_equal(flow->src, p->key.dst) || !addr_equal(flow->dst, p->key.src) ||
		     flow->sport != p->key.dport || flow->dport != p->key.sport))
		return NAT_DROP_NO_PORT;
	return NAT_DROP_RACE;
}

static __always_inline int session_refused(const struct packet *p, struct nat_flow *out,
					   struct opening *o, int error)
{
	if (error == E_EXIST)
		return session_adopt(p, out, o);
	return error == E_TOO_BIG ? NAT_DROP_SESSIONS_FULL : NAT_DROP_RACE;
}

/*
 * Writes the session and makes both keys lead to it: the peer's first, so that when the
 * owner's does the answers find their way. Of two CPUs that open the same session one
 * inserts each key; who fails takes back what it inserted, and adopts. The peer's key can
 * also belong to another session: session_other_port.
 *
 * What is taken back was in the table for some nanoseconds, not for NAT_DEAD_TICKS: an
 * answer that came in between could meet memory that is used again. But nobody was
 * sent anything that it could be an answer to.
 *
 * E_EXIST: *out is another CPU's flow.
 */
GLOBAL int session_insert(struct opening *o)
{
	const struct packet *p;
	struct nat_session *s;
	struct nat_flow *out;
	__u32 number;
	__u64 *bits;
	__s64 taken;
	int error;

	if (!o)
		return NAT_DROP_BYPASS;
	p = &o->packet;
	out = &o->owner;
	taken = flow_take();
	if (taken < 0)
		return NAT_DROP_SESSIONS_FULL;
	number = taken;
	s = flow_session(number);
	bits = flow_bits(number);
	if (!s || !bits)
		return NAT_DROP_BYPASS; /* cannot happen: there is room for every number */
	session_owner(p, out, o);
	state_other_key(&p->key, out, &o->other);
	s->keys[NAT_OWNER] = p->key;
	s->keys[NAT_PEER] = o->other;
	s->flows[NAT_OWNER] = *out;
	session_peer(p, &s->flows[NAT_PEER], o);
	error = flow_insert(&o->other, number, NAT_PEER);
	if (!error) {
		error = flow_insert(&p->key, number, NAT_OWNER);
		if (error)
			flow_remove(&o->other, number, NAT_PEER);
	}
	if (!error) {
		__sync_fetch_and_or(bits, 1ULL << number % 64);
		return GO_ON;
	}
	flow_give(number);
	return session_refused(p, out, o, error);
}

/* Any source port from the range of the packet's own by which no session of the receiver's
 * answers is known. */
GLOBAL int session_draw_port(struct opening *o)
{
	__u32 first = 1024, count = NAT_PORTS - 1024, wanted, try;

	if (!o)
		return NAT_DROP_BYPASS;
	wanted = bpf_ntohs(o->packet.key.sport);
	if (o->packet.class == NAT_ICMP) {
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
		o->other.dport = bpf_htons(first + bpf_get_prandom_u32() % count);
		if (!flow_entry(&o->other)) {
			o->owner.sport = o->other.dport;
			return GO_ON;
		}
	}
	return NAT_DROP_NO_PORT;
}

/*
 * Another source port for a session whose answers another one knows as its own: the same client
 * has come to the same receiver by another outside endpoint. Netfilter does so for any such pair
 * (nf_nat_l4proto_unique_tuple). Where natkit gives ports the session takes one for itself, as
 * with address-and-port-dependent mapping; what has an address to itself, or is not translated,
 * gets any. NAT_DROP_NO_PORT: there is none, or the protocol has no ports.
 */
static __always_inline int session_other_port(struct ctx *ctx, struct opening *o)
{
	struct hold *h = &o->source;
	int port;

	if (o->packet.class >= NAT_PORT_CLASSES || h->flags & NAT_FLOW_PORT)
		return NAT_DROP_NO_PORT;
	if (!(h->flags & NAT_FLOW_MAPPED) || h->inside.class >= NAT_PORT_CLASSES)
		return session_draw_port(o);
	port = port_take(ctx, &o->packet.key, h->inside.class, h->address,
			 o->config & NAT_CONFIG_PARITY);
	if (port == PORT_NONE)
		return NAT_DROP_NO_PORT;
	h->port = bpf_htons(port);
	h->flags |= NAT_FLOW_PORT;
	port_name(h);
	o->owner.sport = h->port;
	return GO_ON;
}

/* session_insert, by another source port if need be; another CPU may take that at once. */
static __always_inline int session_place(struct ctx *ctx, struct opening *o)
{
	int reason = session_insert(o), try;

	for (try = 0; try < MAPPING_TRIES && reason == NAT_DROP_NO_PORT; try++) {
		if (session_other_port(ctx, o) != GO_ON)
			break;
		reason = session_insert(o);
	}
	return reason;
}

/* --- a packet without session --------------------------------------------------- */

/* Steps 1 to 4, but for what a source rule takes. */
static __always_inline int session_decide(struct ctx *ctx, const struct packet *p,
					  struct nat_flow *out, struct opening *o)
{
	struct decided *d = &o->decided;
	const struct nat_rule *rule;
	int reason;

	d->source = RULE_NONE;
	if (session_pretends(ctx, p, d->in, o->lookups, o->slot))
		return NAT_DROP_SPOOFED;
	if (o->lookups & NAT_LOOKUP_EXCLUDE && rule_excluded(&p->key, o->lookups, o->slot))
		return NAT_PASS_EXCLUDED;
	reason = session_destination(p, out, o);
	if (reason != GO_ON)
		return reason;
	if (p->key.side == NAT_OUTSIDE && !d->by_rule && !o->by_mapping)
		return NAT_PASS_NO_RULE;
	reason = session_route(ctx, p, out, o);
	if (reason != GO_ON)
		return reason;

	/* A stranger who uses a mapping keeps his address. */
	if ((p->key.side == NAT_INSIDE && !session_among(p, out, d)) ||
	    (d->by_rule && session_moves(p, out))) {
		d->way_out = session_way_out(ctx, p, o);
		d->source = rule_source(addr_word(p->key.src), d->in, d->way_out, o->lookups,
					o->generation);
		if (d->source != RULE_NONE) {
			rule = rule_get(o->slot, d->source);
			if (!rule)
				return NAT_DROP_BYPASS;
			session_rule(p, out, o, rule);
		}
	}
	if (d->source == RULE_NONE && !d->by_rule && !o->by_mapping)
		return NAT_PASS_NO_RULE;
	d->to = out->dst;
	d->to_port = out->dport;
	d->rule = out->rule;
	d->flags = o->flags;
	return session_spoofed(ctx, p, o);
}

/* session_decide, or what it said of a packet like this one. */
SUBPROGRAM int session_decided(struct ctx *ctx, const struct packet *p, struct nat_flow *out,
			       struct opening *o)
{
	struct decision_key key = decision_key(p, o->generation);
	struct decision *d = decision_get(&key, p->now);
	int known = d && decision_holds(d, &key, p->now), reason;

	if (known)
		o->decided = d->decided;
	else
		o->decided.in = link_find(p->ifindex);
	if (!ctx_is_addressed(ctx, link_get(o->decided.in)))
		return NAT_PASS_NOT_IPV4;
	if (known) {
		out->dst = o->decided.to;
		out->dport = o->decided.to_port;
		out->rule = o->decided.rule;
		o->flags = o->decided.flags;
		return GO_ON;
	}
	reason = session_decide(ctx, p, out, o);
	if (reason == GO_ON && d && !o->by_mapping && o->decided.hop) {
		d->key = key;
		d->decided = o->decided;
	}
	return reason;
}

/* Whether the mapping that was addressed lets the packet's sender in, known by that address. What
 * strangers open is the host's as well: they fill its share, not the table. */
static __always_inline int session_admitted(struct opening *o, struct nat_addr sender)
{
	int reason = o->refused ? o->refused : mapping_admits(&o->target, addr_word(sender));

	if (reason != GO_ON || !o->limit)
		return reason;
	return source_take(&o->target, 0, 0, o->limit);
}

/*
 * A packet from inside to an outside endpoint of another inside host, its source translated:
 * RFC 4787 REQ-9 has it be as if it had left and come back. Mostly one session stands for both
 * ways through the NAT. But if its receiver's filter refuses it, it has left all the same, so
 * the sender's now knows whom it has sent to; and if the receiver has sent to it before, or
 * is itself, that session's key is taken. Then the session is of the packet that leaves, as to
 * anybody outside, and what comes back is looked up by itself, each time: flow_hairpin.
 */
SUBPROGRAM int session_hairpin(const struct packet *p, struct nat_flow *out, struct opening *o)
{
	struct nat_flow_key back = {.src = out->src,
				    .dst = p->key.dst,
				    .sport = out->sport,
				    .dport = p->key.dport,
				    .protocol = p->key.protocol,
				    .side = NAT_OUTSIDE};
	int reason = GO_ON, self = addr_equal(back.src, back.dst) && back.sport == back.dport;

	if (!self && !flow_entry(&back)) {
		if (o->by_mapping)
			reason = session_admitted(o, out->src);
		if (reason != NAT_DROP_FILTERED)
			return reason;
	}
	o->refused = reason == GO_ON ? 0 : reason;
	if (o->target.flags)
		hold_drop(&o->target, addr_word(p->key.dst), p->now);
	o->target.flags = 0;
	o->flags = (o->flags & ~NAT_FLOW_HAIRPIN) | NAT_FLOW_RETURNS;
	o->decided.side = NAT_OUTSIDE;
	out->dst = p->key.dst;
	out->dport = p->key.dport;
	return GO_ON;
}

/* Steps 1 to 5 for a packet: what it becomes, and what its session holds. */
static __always_inline int session_find(struct ctx *ctx, struct packet *p, struct nat_flow *out,
					struct opening *o)
{
	const struct nat_rule *rule = NULL;
	int reason, takes = 0;

	reason = session_martian(&p->key);
	if (reason == GO_ON)
		reason = session_decided(ctx, p, out, o);
	if (reason != GO_ON)
		return reason;
	if (o->decided.source != RULE_NONE) {
		rule = rule_get(o->slot, o->decided.source);
		if (!rule)
			return NAT_DROP_BYPASS;
	}
	if (o->decided.sessions) {
		reason = session_opens(p);
		if (reason != GO_ON)
			return reason;
	}
	if (rule && (rule->kind == NAT_RULE_MAP || rule->kind == NAT_RULE_STATELESS))
		out->src = rule_map_address(rule, p->key.src);
	else if (rule)
		takes = 1;
	/* Before anything is taken. A host that is itself translated leaves first. */
	if (o->by_mapping && !rule) {
		reason = session_admitted(o, out->src);
		if (reason != GO_ON)
			return reason;
	}
	if (o->decided.sessions) {
		reason = route_carries(p, out->dst, o->decided.mtu);
		if (reason != GO_ON)
			return reason;
	}
	if (takes) {
		o->source.inside.addr = p->key.src;
		o->source.inside.class = p->class;
		reason = session_pool(o, rule, o->decided.way_out);
		if (reason == GO_ON)
			reason = session_source(ctx, p, out, o, rule);
		if (reason != GO_ON)
			return reason;
	}
	if (rule && o->decided.sessions && o->flags & NAT_FLOW_HAIRPIN)
		return session_hairpin(p, out, o);
	return rule && o->by_mapping ? session_admitted(o, out->src) : GO_ON;
}

/* The remote of the contact that the session's owner made. */
static __always_inline void session_drop(const struct packet *p, const struct opening *o)
{
	if (o->source.flags)
		hold_drop(&o->source, addr_word(p->key.dst), p->now);
	if (o->target.flags)
		hold_drop(&o->target, addr_word(p->key.dst), p->now);
}

/* Puts the packet where the functions below find it. */
static __always_inline struct opening *session_begin(const struct packet *p)
{
	__u32 zero = 0;
	struct opening *o = bpf_map_lookup_elem(&openings, &zero);

	if (!o)
		return NULL;
	__builtin_memset(o, 0, sizeof(*o));
	o->packet.key = p->key;
	o->packet.now = p->now;
	o->packet.ifindex = p->ifindex;
	o->packet.bytes = p->bytes;
	o->packet.segments = p->segments;
	o->packet.length = p->length;
	o->packet.class = p->class;
	o->packet.ttl = p->ttl;
	o->packet.tos = p->tos;
	o->packet.tcp_flags = p->tcp_flags;
	o->packet.flags = p->flags;
	return o;
}

GLOBAL int session_make(struct ctx *ctx)
{
	__u32 zero = 0;
	struct opening *o = bpf_map_lookup_elem(&openings, &zero);
	struct nat_control *control = control_get();
	const struct nat_config *c;
	struct nat_flow *out;
	struct packet *p;
	int reason;

	if (!o || !control)
		return NAT_DROP_BYPASS;
	p = &o->packet;
	out = &o->owner;
	o->generation = *(volatile __u32 *)&control->generation;
	o->slot = o->generation % NAT_GENERATIONS;
	c = bpf_map_lookup_elem(&config, &o->slot);
	if (!c)
		return NAT_DROP_BYPASS;
	o->lookups = c->lookups;
	o->config = c->flags;
	o->limit = c->sessions_per_source;
	out->src = p->key.src;
	out->dst = p->key.dst;
	out->sport = p->key.sport;
	out->dport = p->key.dport;

	reason = session_find(ctx, p, out, o);
	if (reason == GO_ON && !o->decided.sessions) {
		session_owner(p, out, o);
		return GO_ON;
	}
	if (reason == GO_ON) {
		reason = session_place(ctx, o);
		if (reason == GO_ON) {
			count_add(NAT_CREATED);
			if (o->flags & (NAT_FLOW_HAIRPIN | NAT_FLOW_RETURNS))
				count_add(NAT_HAIRPINNED);
			if (o->config & NAT_CONFIG_EVENTS)
				event_session(NAT_EVENT_CREATE, &p->key, out, NULL);
			if (!o->refused)
				return GO_ON;
			if (o->config & NAT_CONFIG_EVENTS)
				event_refused(&p->key, o->refused);
			return o->refused;
		}
	}
	session_drop(p, o);
	if (reason == E_EXIST)
		return GO_ON;
	if (reason >= NAT_DROP_MALFORMED && o->config & NAT_CONFIG_EVENTS)
		event_refused(&p->key, reason);
	return reason;
}

/*
 * A packet that no flow knows. GO_ON: *out is what it becomes and where it goes, the
 * session is made (or none is needed) and has counted the packet.
 */
static __always_inline int session_open(struct ctx *ctx, struct packet *p, struct nat_flow *out)
{
	struct nat_mapping_key inside = {
		.addr = p->key.src, .port = p->key.sport, .class = p->class};
	struct opening *o;
	int reason;

	if (p->key.side == NAT_INSIDE)
		mapping_touch(&inside);
	o = session_begin(p);
	if (!o)
		return NAT_DROP_BYPASS;
	reason = session_make(ctx);
	p->mtu = o->packet.mtu; /* if it is too big */
	*out = o->owner;
	return reason;
}

/* --- a packet of a session that has died ------------------------------------------ */

/* Whether a new packet from outside would be let in: a rule forwards it, or the mapping
 * admits its sender. */
static __always_inline int session_admits(struct opening *o, const struct nat_config *config,
					  __u32 slot)
{
	const struct packet *p = &o->packet;
	struct hold *h = &o->target;
	int query = p->flags & PACKET_QUERY, reason;

	reason = session_opens(p);
	if (reason != GO_ON)
		return reason;
	if (rule_destination(&p->key, link_find(p->ifindex), config->lookups, slot) != RULE_NONE)
		return GO_ON;
	reason = mapping_by_outside(addr_word(p->key.dst), query ? p->key.sport : p->key.dport,
				    p->class, h);
	if (reason != GO_ON)
		return reason == NAT_PASS_NO_RULE ? NAT_DROP_NO_MAPPING : reason;
	reason = mapping_addressed(h, p->now);
	if (reason == GO_ON)
		reason = mapping_admits(h, addr_word(p->key.src));
	mapping_drop(h, p->now);
	return reason;
}

/* Whether the packet that session_begin was given would be let in, had it come from outside. */
GLOBAL int session_enters(void)
{
	__u32 zero = 0, slot;
	struct opening *o = bpf_map_lookup_elem(&openings, &zero);
	const struct nat_config *config = config_get(&slot);

	return o && config ? session_admits(o, config, slot) : NAT_DROP_BYPASS;
}

GLOBAL int session_wake(void)
{
	__u32 zero = 0, slot, old, state, direction = 0;
	struct opening *o = bpf_map_lookup_elem(&openings, &zero);
	const struct nat_config *config = config_get(&slot);
	struct nat_flow *owner, *peer;
	const struct packet *p;
	struct nat_session *s;
	struct nat_addr src;
	int reason;

	if (!o || !config)
		return NAT_DROP_BYPASS;
	p = &o->packet;
	s = flow_look(&p->key, &direction);
	if (!s)
		return NAT_DROP_RACE;
	owner = &s->flows[NAT_OWNER];
	peer = &s->flows[NAT_PEER];
	old = state_read(owner);
	if (old & NAT_FLOW_GONE)
		return NAT_DROP_RACE;
	if (old & NAT_FLOW_DEAD || state_expired(owner, peer, config, p->now)) {
		src = owner->src;
		if (old & NAT_FLOW_MASQUERADE && !bpf_map_lookup_elem(&outside, &src))
			return NAT_DROP_RACE; /* the address moved: anew, when this is removed */
		state = direction == NAT_OWNER ? old : state_read(peer);
		reason = state & NAT_FLOW_OUTBOUND ? session_opens(p)
						   : session_admits(o, config, slot);
		if (reason != GO_ON)
			return reason;
		owner->seen = p->now;
		peer->seen = p->now;
		state = state_open(p);
		if (direction != NAT_OWNER && p->class == NAT_TCP)
			state = state_tcp(0, p->tcp_flags, 0, 1);
		state |= old & ~(STATE_TCP | NAT_FLOW_TIMEOUT | NAT_FLOW_DEAD);
		/* If it is not as it was, another packet has revived it; or it was removed, and the
		 * number may be another session's by now. */
		if (!state_replace(owner, old, state) &&
		    (state_read(owner) & (NAT_FLOW_DEAD | NAT_FLOW_GONE) ||
		     !flow_is_at(s, direction, &p->key)))
			return NAT_DROP_RACE;
		state_copy_timeout(owner, peer);
	}
	__sync_fetch_and_and(&peer->state, ~NAT_FLOW_DEAD);
	return GO_ON;
}

/*
 * A packet whose flow is DEAD, or has been silent for longer than its time-out. GO_ON:
 * the session lives, with everything it holds; its time begins anew. A packet from
 * outside must be one that could open it. Who finds GONE came too late: the sweep is
 * removing the session, and the sender's next packet makes another.
 */
static __always_inline int session_revive(const struct packet *p, const struct nat_flow *flow)
{
	int reason = session_begin(p) ? session_wake() : NAT_DROP_BYPASS;
	__u32 direction = 0;
	struct nat_session *s;

	if (reason != GO_ON)
		return reason;
	/* The flow's number may have become another session's, and another number the key's. */
	s = flow_look(&p->key, &direction);
	return s && flow_at(s, direction) == flow ? GO_ON : NAT_DROP_RACE;
}

/* Ends the session of a flow whose outside address is no longer the gateway's. Its keys lead
 * to it no more, so that the next packet opens another; the sweep does the rest. */
SUBPROGRAM void session_kill(const struct packet *p)
{
	__u64 entry = flow_entry(&p->key);
	__u32 number = flow_number(table_value(entry));
	struct nat_session *s = flow_session(number);

	if (!entry || !s)
		return;
	state_kill(s, p->now);
	flow_remove(&s->keys[NAT_OWNER], number, NAT_OWNER);
	flow_remove(&s->keys[NAT_PEER], number, NAT_PEER);
}

#endif
