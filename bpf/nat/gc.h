/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Garbage collection: removes sessions that have expired, ports after their hold-down, leases and
 * fragments. Called by a timer, a slice of work at a time: the packets of this CPU wait for it.
 *
 * Flows are looked at in the order of their numbers, round and round. The two queues
 * have one reader, this one, so what is looked at (peek) is what is taken out next (pop);
 * they are in order of time, so the head shows whether there is anything to do.
 */
#ifndef NATKIT_GC_H
#define NATKIT_GC_H

#include "nat/lease.h"
#include "nat/state.h"

enum gc_limit {
	GC_SLICE_NS = 10000,   /* work at a time, as long as sessions are left to look at */
	GC_HASTE_NS = 40000,   /* until the next slice then, if this one ended any */
	GC_BUSY_NS = 400000,   /* if not */
	GC_IDLE_NS = 10000000, /* and if none are left */
	GC_ROUND_TICKS = 953,  /* a second: no session is looked at more often */
	GC_LOOK_AT_CLOCK = 4,  /* flows, or ports, between two looks at the clock */
	GC_FLOWS = 1024,       /* at most in a slice, with words of flow_bits */
	GC_QUEUED = 64,        /* ports, and fragments, at most in a slice */
};

/* The timer, and where it is on its round. */
struct gc {
	struct bpf_timer timer;
	__u32 next;    /* number of the flow to look at, or of none */
	__u32 began;   /* ticks: the round */
	__u32 resumes; /* ticks: not before, the last round was short */
	__u32 paused;  /* the round is over, wait for resumes */
};

/* One slice. */
struct slice {
	struct gc *gc;
	__u32 numbers; /* of flows, that were in use once */
	const struct nat_config *config;
	__u64 began_ns;
	__u32 now;
	__u32 looked;
	__u32 more;  /* time was over before the sessions were, the ports or the fragments */
	__u32 ended; /* sessions that died or were removed, ports that are free again */
};

/* Whether the slice has taken that long, after n of a kind. */
static __always_inline int gc_over(struct slice *s, __u32 n, __u64 ns)
{
	if (n % GC_LOOK_AT_CLOCK != GC_LOOK_AT_CLOCK - 1 || bpf_ktime_get_ns() - s->began_ns <= ns)
		return 0;
	s->more = 1;
	return 1;
}

/* --- sessions --------------------------------------------------------------------- */

/* The reservation of the sender of the packets with that key, by its flow's word. */
static __always_inline void gc_reservation(const struct nat_flow_key *key, __u32 state,
					   struct reservation *r)
{
	r->internal.addr = key->src;
	r->internal.zone = key->zone;
	r->internal.pool = (state & NAT_FLOW_POOL) >> NAT_FLOW_POOL_SHIFT;
	r->internal.class = NAT_OTHER;
	r->internal.port = 0;
	r->flags = state & (NAT_FLOW_MAPPED | NAT_FLOW_PORT | NAT_FLOW_SOURCE | NAT_FLOW_FILTER);
	if (state & NAT_FLOW_WHOLE)
		return;
	r->internal.class = protocol_class(key->protocol);
	/* An ICMP identifier is in dport of the replies. */
	r->internal.port = r->internal.class == NAT_ICMP ? key->sport | key->dport : key->sport;
}

/* Somebody reads the events: the end of one. */
SUBPROGRAM void gc_event(const struct nat_flow *owner, const struct nat_flow *peer)
{
	const struct nat_flow_rest *first = flow_rest(peer->other),
				   *second = flow_rest(owner->other);
	struct event_totals totals;

	if (!first || !second)
		return;
	totals.packets[0] = flow_packets(owner, second->created);
	totals.packets[1] = flow_packets(peer, second->created >> FLOW_CARRIED_SHIFT);
	totals.bytes[0] = owner->bytes;
	totals.bytes[1] = peer->bytes;
	event_session(NAT_EVENT_DELETE, owner, first->rule, &totals);
}

/*
 * Removes a session that this CPU has made GONE. Its reservations are released after its
 * keys: until then the mapping and its port are in use. Its numbers come last.
 */
SUBPROGRAM void gc_remove(struct slice *s, struct nat_flow *owner, struct nat_flow *peer)
{
	__u32 number = peer->other, other = owner->other, created;
	const struct nat_flow_rest *first = flow_rest(number), *second = flow_rest(other);
	struct reservation source = {}, target = {};
	__u64 *bits = flow_bits_at(number);

	gc_reservation(&owner->key, state_read(owner), &source);
	source.port = owner->sport;
	source.address = second ? second->rule : 0;
	created = first ? first->created : s->now;
	gc_reservation(&peer->key, state_read(peer), &target);
	if (s->config->flags & NAT_CONFIG_EVENTS)
		gc_event(owner, peer);
	if (log_wants(NAT_LOG_SESSIONS))
		log_session(NAT_LOG_ENDED, &owner->key, owner, s->now - created);
	flow_remove(&peer->key, other);
	flow_remove(&owner->key, number);
	reservation_drop(&source, addr_word(owner->key.dst), s->now);
	reservation_drop(&target, addr_word(owner->key.dst), s->now);
	count_add(NAT_EXPIRED);
	s->ended++;
	if (bits)
		__sync_fetch_and_and(bits, ~flow_bits_of(number));
	flow_give(number);
}

/* One session a step further, by its owner; see state.h. */
static __always_inline void gc_session(struct slice *s, struct nat_flow *owner)
{
	struct nat_flow *peer = flow_other(owner);
	__u32 state = state_read(owner);

	if (!peer)
		return;
	if (!(state & NAT_FLOW_DEAD)) {
		if (state_expired(owner, peer, s->config, s->now)) {
			state_kill(owner, peer, s->now);
			s->ended++;
		}
		return;
	}
	if (!(state_read(peer) & NAT_FLOW_DEAD)) {
		/* A revival and a death crossed: packets may have used the peer until now. */
		state_kill(owner, peer, s->now);
		return;
	}
	if (!state_long_dead(owner, s->now) || !state_replace(owner, state, state | NAT_FLOW_GONE))
		return;
	__sync_fetch_and_or(&peer->state, NAT_FLOW_GONE);
	gc_remove(s, owner, peer);
}

static __always_inline void gc_flow(struct slice *s, __u32 number)
{
	struct nat_flow *flow = flow_at(number);
	__u32 state = flow ? state_read(flow) : 0;

	if (!(state & NAT_FLOW_MADE))
		return; /* not yet */
	flow_carry(flow);
	if (!(state & NAT_FLOW_OWNER))
		return;
	s->looked++;
	gc_session(s, flow);
}

/* The next flow of the round, or a word of flow_bits without any; 1 ends the slice. */
static long gc_next(__u32 n, struct slice *s)
{
	struct gc *gc = s->gc;
	__u32 number = gc->next;
	__u64 *word, left;

	if (gc_over(s, n, GC_SLICE_NS))
		return 1;
	word = number < s->numbers ? flow_bits_at(number) : NULL;
	if (!word) {
		gc->next = 0;
		gc->paused = 1;
		gc->resumes = gc->began + GC_ROUND_TICKS;
		return 1;
	}
	left = *(volatile __u64 *)word >> number % 64;
	if (!left) {
		gc->next = (number | 63) + 1;
		return 0;
	}
	number += bit_lowest(left);
	gc->next = number + 1;
	gc_flow(s, number);
	return 0;
}

static __always_inline void gc_sessions(struct slice *s)
{
	struct gc *gc = s->gc;
	__u32 zero = 0;
	struct nat_counts *n = bpf_map_lookup_elem(&counts, &zero);

	if (gc->paused && (__s32)(s->now - gc->resumes) < 0)
		return;
	if (gc->paused || !gc->next)
		gc->began = s->now;
	gc->paused = 0;
	s->numbers = n ? 2 * *(volatile __u32 *)&n->sessions : 0;
	if (bpf_loop(GC_FLOWS, gc_next, s, 0) == GC_FLOWS)
		s->more = 1;
}

/* --- ports in hold-down ------------------------------------------------------------- */

enum gc_hold_down { HOLD_DOWN_OVER, HOLD_DOWN_AGAIN, HOLD_DOWN_ENDED };

/*
 * What becomes of a mapping whose entry comes out of the queue. In use: it will be
 * queued again when it is left. Used since it was queued, and left: its hold-down has
 * started later, it goes to the end. Neither: it is over, and nobody can take it any more.
 */
static __always_inline enum gc_hold_down gc_mapping(struct nat_slot *slot)
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
			return HOLD_DOWN_ENDED;
		return old & NAT_REFS_AGAIN ? HOLD_DOWN_AGAIN : HOLD_DOWN_OVER;
	}
	return HOLD_DOWN_AGAIN; /* fought over, so in use */
}

/* The head of the queue, if its hold-down is over; 1 ends. Half of the slice is left. */
static long gc_held_down(__u32 n, struct slice *s)
{
	__u32 rest = s->config->timeouts[NAT_TIMEOUT_PORT_HOLD_DOWN], class;
	struct nat_mapping_key internal = {};
	struct nat_hold_down r = {};
	struct nat_slot *slot, value;
	enum gc_hold_down end;
	__u64 id;

	if (gc_over(s, n, GC_SLICE_NS / 2))
		return 1;
	if (rest < NAT_DEAD_TICKS)
		rest = NAT_DEAD_TICKS;
	rest += 3; /* what since may be too early */
	if (bpf_map_peek_elem(&mapping_queue, &r) || (__s32)(s->now - r.since) <= (__s32)rest)
		return 1;
	bpf_map_pop_elem(&mapping_queue, &r);
	class = r.since & 3;
	id = slot_id(r.address, class, r.port);
	slot = slot_at(id);
	if (!slot)
		return 0; /* cannot happen: indices are for life */
	value = slot_read(slot);
	if (value.used != NAT_SLOT_MAPPING) {
		mapping_remove(id, NULL);
		s->ended++;
		return 0;
	}
	internal.addr = value.addr;
	internal.port = value.port;
	internal.class = class;
	internal.pool = value.pool;
	internal.zone = slot->zone;
	end = gc_mapping(slot);
	if (end == HOLD_DOWN_AGAIN && port_hold_down(id, s->now)) {
		__sync_fetch_and_and(&slot->refs, ~NAT_REFS_QUEUED);
		mapping_end(&internal);
	}
	if (end != HOLD_DOWN_OVER)
		return 0;
	mapping_remove(id, &internal);
	s->ended++;
	return 0;
}

/* --- leases -------------------------------------------------------------------------- */

static long gc_lease(__u32 n, struct slice *s)
{
	int looked;

	if (gc_over(s, n, GC_SLICE_NS / 4 * 3))
		return 1;
	looked = lease_look(s->now);
	OPAQUE(looked); /* clang would return it, less one: not 0 or 1 to the verifier */
	return looked ? 0 : 1;
}

/* As many that all are looked at once a second, as far as the slice allows it. */
static __always_inline void gc_leases(struct slice *s)
{
	struct nat_lease_state *state = lease_state_get();
	__u32 count = state ? *(volatile __u32 *)&state->leases : 0;

	count = (count + LEASE_ROUNDS - 1) / LEASE_ROUNDS;
	bpf_loop(count < LEASES_PER_SLICE ? count : LEASES_PER_SLICE, gc_lease, s, 0);
}

/* --- fragments ---------------------------------------------------------------------- */

/* The oldest datagram, if it is too old; 1 ends. A quarter of the slice is left. Packets
 * don't use an entry older than the time-out; it stays for as long again, so none still
 * does when it is deleted. One that was noted again goes to the end: others are behind it. */
static long gc_fragment(__u32 n, struct slice *s)
{
	__u32 limit = 2 * s->config->timeouts[NAT_TIMEOUT_FRAGMENT];
	struct nat_fragment_key key = {};
	struct nat_fragment *f;
	int young;

	if (gc_over(s, n, GC_SLICE_NS / 4 * 3) || bpf_map_peek_elem(&fragment_queue, &key))
		return 1;
	f = bpf_map_lookup_elem(&fragments, &key);
	young = f && (__s32)(s->now - f->seen) <= (__s32)limit;
	if (young && !f->again)
		return 1;
	bpf_map_pop_elem(&fragment_queue, &key);
	if (young) {
		*(volatile __u8 *)&f->again = 0;
		if (!bpf_map_push_elem(&fragment_queue, &key, 0))
			return 0;
	}
	bpf_map_delete_elem(&fragments, &key);
	return 0;
}

/* --- the timer ---------------------------------------------------------------------- */

/*
 * Until the next slice. Examining live sessions takes a fortieth of a CPU at most.
 * While sessions end it is a fifth, in more slices, not in longer ones: no packet waits
 * longer.
 */
static __always_inline __u64 gc_pause(const struct slice *s)
{
	if (!s->more)
		return GC_IDLE_NS;
	return s->ended ? GC_HASTE_NS : GC_BUSY_NS;
}

static int gc_tick(void *map, __u32 *index, struct gc *gc)
{
	__u64 began_ns = bpf_ktime_get_ns();
	struct slice s = {.gc = gc, .began_ns = began_ns, .now = began_ns >> NAT_TICK_SHIFT};
	struct nat_control *c;
	struct nat_stats *st = count_stats();
	__u32 slot = 0, zero = 0;

	s.config = config_get(&slot);
	c = bpf_map_lookup_elem(&control, &zero);
	if (s.config && c) {
		if (bpf_loop(GC_QUEUED, gc_held_down, &s, 0) == GC_QUEUED)
			s.more = 1;
		bpf_loop(GC_QUEUED, gc_fragment, &s, 0);
		gc_leases(&s);
		gc_sessions(&s);
		c->gc_ran = s.now;
	}
	if (st) {
		st->gc_ns += bpf_ktime_get_ns() - began_ns;
		st->gc_examined += s.looked;
	}
	bpf_timer_start(&gc->timer, gc_pause(&s), 0);
	return 0;
}

#endif
