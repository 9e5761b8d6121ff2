/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Removes what has expired: sessions, ports that have rested, fragments. Called by a
 * timer, a slice of work at a time: the packets of this CPU wait meanwhile.
 *
 * Sessions are looked at in the order of their numbers, round and round. The two queues
 * have one reader, this one, so what is looked at (peek) is what is taken out next (pop);
 * they are in order of time, so the head says whether there is anything to do.
 */
#ifndef NATKIT_SWEEP_H
#define NATKIT_SWEEP_H

#include "nat/mapping.h"
#include "nat/state.h"

enum sweep_limit {
	SWEEP_SLICE_NS = 10000,   /* work at a time, as long as sessions are left to look at */
	SWEEP_HASTE_NS = 40000,   /* until the next slice then, if this one ended any */
	SWEEP_BUSY_NS = 400000,   /* if not */
	SWEEP_IDLE_NS = 10000000, /* and if none are left */
	SWEEP_ROUND_TICKS = 953,  /* a second: no session is looked at more often */
	SWEEP_LOOK_AT_CLOCK = 4,  /* sessions, or ports, between two looks at the clock */
	SWEEP_SESSIONS = 1024,    /* at most in a slice, with words of session_bits */
	SWEEP_QUEUED = 64,        /* ports, and fragments, at most in a slice */
};

/* The timer, and where it is on its round. */
struct sweep {
	struct bpf_timer timer;
	__u32 next;    /* number of the session to look at, or of none */
	__u32 began;   /* ticks: the round */
	__u32 resumes; /* ticks: not before, the last round was short */
	__u32 paused;  /* the round is over, wait for resumes */
};

/* One slice. */
struct slice {
	struct sweep *sweep;
	__u32 numbers; /* of sessions, that were in use once */
	const struct nat_config *config;
	__u64 began_ns;
	__u32 now;
	__u32 looked;
	__u32 more;  /* time was over before the sessions were, the ports or the fragments */
	__u32 ended; /* sessions that died or were removed, ports that are free again */
};

/* Whether the slice has taken that long, after n of a kind. */
static __always_inline int sweep_over(struct slice *s, __u32 n, __u64 ns)
{
	if (n % SWEEP_LOOK_AT_CLOCK != SWEEP_LOOK_AT_CLOCK - 1 ||
	    bpf_ktime_get_ns() - s->began_ns <= ns)
		return 0;
	s->more = 1;
	return 1;
}

/* --- sessions --------------------------------------------------------------------- */

static __always_inline __u8 sweep_class(__u8 protocol)
{
	switch (protocol) {
	case TCP:
		return NAT_TCP;
	case UDP:
	case UDPLITE:
		return NAT_UDP;
	case ICMP:
		return NAT_ICMP;
	default:
		return NAT_OTHER;
	}
}

/* What the sender of the packets with that key held, by its flow's word. */
static __always_inline void sweep_hold(const struct nat_flow_key *key, __u32 state, struct hold *h)
{
	h->inside.addr = key->src;
	h->inside.realm = (state & NAT_FLOW_REALM) >> NAT_FLOW_REALM_SHIFT;
	h->inside.class = NAT_OTHER;
	h->inside.port = 0;
	h->flags = state & (NAT_FLOW_MAPPED | NAT_FLOW_PORT | NAT_FLOW_SOURCE | NAT_FLOW_CONTACT);
	if (state & NAT_FLOW_WHOLE)
		return;
	h->inside.class = sweep_class(key->protocol);
	/* An ICMP identifier is in dport of the replies. */
	h->inside.port = h->inside.class == NAT_ICMP ? key->sport | key->dport : key->sport;
}

/*
 * Removes a session that this CPU has made GONE. What it held comes after its keys: until
 * then the mapping and its port are spoken for. Its number comes last.
 */
SUBPROGRAM void sweep_remove(struct slice *s, __u32 number, struct nat_session *session)
{
	const struct nat_flow_key *key = &session->keys[NAT_OWNER];
	struct nat_flow *owner = &session->flows[NAT_OWNER], *peer = &session->flows[NAT_PEER];
	struct hold source = {}, target = {};
	__u64 *bits = flow_bits(number);

	sweep_hold(key, state_read(owner), &source);
	source.port = owner->sport;
	source.address = peer->created;
	sweep_hold(&session->keys[NAT_PEER], state_read(peer), &target);
	if (s->config->flags & NAT_CONFIG_EVENTS)
		event_session(NAT_EVENT_DELETE, key, owner, peer);
	flow_remove(&session->keys[NAT_PEER], number, NAT_PEER);
	flow_remove(key, number, NAT_OWNER);
	hold_drop(&source, addr_word(key->dst), s->now);
	hold_drop(&target, addr_word(key->dst), s->now);
	count_add(NAT_EXPIRED);
	s->ended++;
	if (bits)
		__sync_fetch_and_and(bits, ~(1ULL << number % 64));
	flow_give(number);
}

/* One session a step further; see state.h. */
static __always_inline void sweep_session(struct slice *s, __u32 number)
{
	struct nat_session *session = flow_session(number);
	struct nat_flow *owner, *peer;
	__u32 state;

	if (!session)
		return;
	owner = &session->flows[NAT_OWNER];
	peer = &session->flows[NAT_PEER];
	state = state_read(owner);
	if (!(state & NAT_FLOW_DEAD)) {
		if (state_expired(owner, peer, s->config, s->now)) {
			state_kill(session, s->now);
			s->ended++;
		}
		return;
	}
	if (!(state_read(peer) & NAT_FLOW_DEAD)) {
		/* A revival and a death crossed: packets may have used the peer until now. */
		state_kill(session, s->now);
		return;
	}
	if ((__s32)(s->now - owner->hop_checked) <= NAT_DEAD_TICKS ||
	    !state_replace(owner, state, state | NAT_FLOW_GONE))
		return;
	__sync_fetch_and_or(&peer->state, NAT_FLOW_GONE);
	sweep_remove(s, number, session);
}

/* The next session of the round, or a word of session_bits without any; 1 ends the slice. */
static long sweep_next(__u32 n, struct slice *s)
{
	struct sweep *sweep = s->sweep;
	__u32 number = sweep->next;
	__u64 *word, left;

	if (sweep_over(s, n, SWEEP_SLICE_NS))
		return 1;
	word = number < s->numbers ? flow_bits(number) : NULL;
	if (!word) {
		sweep->next = 0;
		sweep->paused = 1;
		sweep->resumes = sweep->began + SWEEP_ROUND_TICKS;
		return 1;
	}
	left = *(volatile __u64 *)word >> number % 64;
	if (!left) {
		sweep->next = (number | 63) + 1;
		return 0;
	}
	number += bit_lowest(left);
	sweep->next = number + 1;
	s->looked++;
	sweep_session(s, number);
	return 0;
}

static __always_inline void sweep_sessions(struct slice *s)
{
	struct sweep *sweep = s->sweep;
	__u32 zero = 0;
	struct nat_counts *n = bpf_map_lookup_elem(&counts, &zero);

	if (sweep->paused && (__s32)(s->now - sweep->resumes) < 0)
		return;
	if (sweep->paused || !sweep->next)
		sweep->began = s->now;
	sweep->paused = 0;
	s->numbers = n ? *(volatile __u32 *)&n->sessions : 0;
	if (bpf_loop(SWEEP_SESSIONS, sweep_next, s, 0) == SWEEP_SESSIONS)
		s->more = 1;
}

/* --- ports that rest ---------------------------------------------------------------- */

enum sweep_rest { REST_OVER, REST_AGAIN, REST_ENDED };

/*
 * What becomes of a mapping whose entry comes out of the queue. In use: it will be
 * queued anew when it is left. Used since it was queued, and left: its rest has begun
 * later, it goes to the end. Neither: it is over, and nobody can take it any more.
 */
static __always_inline enum sweep_rest sweep_mapping(struct nat_slot *slot)
{
	__u32 try, old, new;

	for (try = 0; try < REFS_TRIES; try++) {
		old = refs_read(&slot->refs);
		new = old & ~NAT_REFS_AGAIN;
		if (old & NAT_REFS_COUNT)
			new &= ~NAT_REFS_QUEUED;
		else if (!(old & NAT_REFS_AGAIN))
			new |= NAT_REFS_GONE;
		if (__sync_val_compare_and_swap(&slot->refs, old, new) != old)
			continue;
		if (old & NAT_REFS_COUNT)
			return REST_ENDED;
		return old & NAT_REFS_AGAIN ? REST_AGAIN : REST_OVER;
	}
	return REST_AGAIN; /* fought over, so in use */
}

/* The head of the queue, if it has rested; 1 ends. Half of the slice is left. */
static long sweep_rested(__u32 n, struct slice *s)
{
	__u32 rest = s->config->timeouts[NAT_TIMEOUT_PORT_REST], class;
	struct nat_mapping_key inside = {};
	struct nat_resting r = {};
	struct nat_slot *slot, value;
	enum sweep_rest end;
	__u64 place;

	if (sweep_over(s, n, SWEEP_SLICE_NS / 2))
		return 1;
	if (rest < NAT_DEAD_TICKS)
		rest = NAT_DEAD_TICKS;
	rest += 3; /* what since may be too early */
	if (bpf_map_peek_elem(&mapping_queue, &r) || (__s32)(s->now - r.since) <= (__s32)rest)
		return 1;
	bpf_map_pop_elem(&mapping_queue, &r);
	class = r.since & 3;
	place = mapping_place(r.address, class, r.port);
	slot = place_slot(place);
	if (!slot)
		return 0; /* cannot happen: indices are for life */
	value = slot_read(slot);
	if (value.used == NAT_SLOT_MAPPING) {
		end = sweep_mapping(slot);
		if (end == REST_AGAIN)
			port_rest(place, s->now);
		if (end != REST_OVER)
			return 0;
		inside.addr = value.addr;
		inside.port = value.port;
		inside.class = class;
		inside.realm = value.realm;
		mapping_leave(&inside, place);
		mapping_count(-1);
		count_add(NAT_UNMAPPED);
	}
	if (class < NAT_PORT_CLASSES)
		port_give(r.address, class, bpf_ntohs(r.port));
	else
		address_give(r.address);
	s->ended++;
	return 0;
}

/* --- fragments ---------------------------------------------------------------------- */

/* The oldest datagram, if it is too old; 1 ends. A quarter of the slice is left. Packets
 * don't use an entry older than the time-out; it stays for as long again, so none still
 * does when it is deleted. */
static long sweep_fragment(__u32 n, struct slice *s)
{
	__u32 limit = 2 * s->config->timeouts[NAT_TIMEOUT_FRAGMENT];
	struct nat_fragment_key key = {};
	struct nat_fragment *f;

	if (sweep_over(s, n, SWEEP_SLICE_NS / 4 * 3) || bpf_map_peek_elem(&fragment_queue, &key))
		return 1;
	f = bpf_map_lookup_elem(&fragments, &key);
	if (f && (__s32)(s->now - f->seen) <= (__s32)limit)
		return 1;
	bpf_map_pop_elem(&fragment_queue, &key);
	bpf_map_delete_elem(&fragments, &key);
	return 0;
}

/* --- the timer ---------------------------------------------------------------------- */

/*
 * Until the next slice. To look at sessions that live takes a fortieth of a CPU at most.
 * While sessions end it is a fifth, in more slices, not in longer ones: no packet waits
 * longer.
 */
static __always_inline __u64 sweep_pause(const struct slice *s)
{
	if (!s->more)
		return SWEEP_IDLE_NS;
	return s->ended ? SWEEP_HASTE_NS : SWEEP_BUSY_NS;
}

static int sweep_tick(void *map, __u32 *index, struct sweep *sweep)
{
	__u64 began_ns = bpf_ktime_get_ns();
	struct slice s = {.sweep = sweep, .began_ns = began_ns, .now = began_ns >> NAT_TICK_SHIFT};
	struct nat_control *c;
	struct nat_stats *st = count_stats();
	__u32 slot = 0, zero = 0;

	s.config = config_get(&slot);
	c = bpf_map_lookup_elem(&control, &zero);
	if (s.config && c) {
		if (bpf_loop(SWEEP_QUEUED, sweep_rested, &s, 0) == SWEEP_QUEUED)
			s.more = 1;
		bpf_loop(SWEEP_QUEUED, sweep_fragment, &s, 0);
		sweep_sessions(&s);
		c->swept = s.now;
	}
	if (st) {
		st->sweep_ns += bpf_ktime_get_ns() - began_ns;
		st->sweep_looked += s.looked;
	}
	bpf_timer_start(&sweep->timer, sweep_pause(&s), 0);
	return 0;
}

#endif
