// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Makes, extends and ends explicit mappings (lease.h), with the functions by which packets get
// theirs. Run by BPF_PROG_TEST_RUN; the packet is a struct nat_lease_request, after the 14 bytes
// that a frame must have, and comes back with the answer.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "lib/links.h"
#include "lib/parse.h"
#include "nat/rule.h"
#include "nat/lease.h"

enum lease_place { LEASE_FRAME = 14 };

/* The request, and what is known of it. */
struct leasing {
	struct nat_lease_request request;
	struct reservation r;
	struct nat_rule rule;
	__u32 now, generation, config; /* of nat_config: flags */
	__u32 flags;                   /* enum nat_lease_flag */
	struct nat_lease lease;        /* a new one */
};

/* Written by one run at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct leasing);
	__uint(max_entries, 1);
} leasing SEC(".maps");

static __always_inline struct leasing *leasing_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&leasing, &zero);
}

/* Protocol 0 asks for an external address only: such a lease holds the subscriber that has it. */
static __always_inline __u8 lease_class(__u8 protocol)
{
	if (!protocol)
		return NAT_OTHER;
	return protocol == TCP ? NAT_TCP : NAT_UDP;
}

/* The rule for what the host sends by that interface: enum nat_lease_result, and l->rule. */
static __always_inline int lease_rule(struct leasing *l)
{
	__u16 in = link_find(l->request.in), out = link_find(l->request.out);
	__u32 slot = l->generation % NAT_GENERATIONS;
	const struct nat_config *c = bpf_map_lookup_elem(&config, &slot);
	const struct nat_rule *rule;
	struct nat_link *link;
	int index;

	if (!c)
		return NAT_DROP_BYPASS;
	l->config = c->flags;
	link = link_get(in);
	if (link && link->flags & NAT_LINK_ZONE)
		l->request.key.internal.zone = l->r.internal.zone = in;
	index = rule_source(addr_word(l->request.key.internal.addr), in, out, c->lookups,
			    l->generation);
	rule = index == RULE_NONE ? NULL : rule_get(slot, index);
	if (!rule)
		return NAT_LEASE_UNTRANSLATED;
	l->rule = *rule;
	if (rule->kind == NAT_RULE_MAP || rule->kind == NAT_RULE_STATELESS) {
		l->request.external = rule_map_address(rule, l->request.key.internal.addr);
		l->request.external_port = l->request.key.internal.port;
		return NAT_LEASE_STATIC;
	}
	l->r.internal.pool = rule->pool;
	l->r.address = rule->pool_first;
	if (!(rule->flags & NAT_RULE_MASQUERADE))
		return NAT_LEASE_DONE;
	link = link_get(out);
	if (!link || !link->address)
		return NAT_DROP_NO_ADDRESS;
	l->r.internal.pool = link->pool;
	l->r.address = link->address - 1;
	return NAT_LEASE_DONE;
}

/* Whether another external endpoint than the wanted one has been found. */
static __always_inline int lease_differs(const struct leasing *l)
{
	__u32 index = l->r.address;
	struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);
	struct nat_addr wanted = l->request.external;

	if (addr_word(wanted) && (!address || !addr_equal(address->addr, wanted)))
		return 1;
	return l->request.external_port && l->request.external_port != l->r.port;
}

/* The ports to take one of, where one in a block of that range is held: those of the subscriber's
 * block that has the wanted port, if that has a port left. */
GLOBAL __s64 lease_block(__u64 range)
{
	struct leasing *l = leasing_get();
	struct nat_source_key host;
	struct nat_source *s;
	__u32 n, id, want;

	if (!l)
		return range;
	host = source_key(&l->r.internal);
	s = bpf_map_lookup_elem(&sources, &host);
	want = bpf_ntohs(l->request.external_port) / 64;
	for (n = 0; s && want && n < NAT_SUBSCRIBER_BLOCKS; n++) {
		id = *(volatile __u32 *)&s->blocks[n];
		if (!id || want < block_granule(id) ||
		    want >= block_granule(id) + (1U << (block_order(id) & 7)))
			continue;
		if (!block_hold(id, l->r.address, l->r.internal.class, s))
			break;
		block_drop(l->r.address, (__u32)range >> 16 >> 6);
		return RANGE_OF_BLOCK | block_range(block_place(id));
	}
	return range;
}

/* endpoint_take, with the wanted port's block. */
static __always_inline int lease_take(struct ctx *ctx, struct leasing *l,
				      const struct nat_flow_key *key)
{
	__s64 range = 0;

	if (l->config & NAT_CONFIG_COUNT_PORTS) {
		range = endpoint_count(&l->r, l->generation);
		if (range == (__s64)NEEDS_BLOCK)
			range = endpoint_extend(&l->r);
		if (range <= 0)
			return -range;
		if (range & RANGE_OF_BLOCK)
			range = lease_block(range);
	}
	return endpoint_port(ctx, key, &l->r, l->config, range);
}

/* The external port of a new mapping, as near to what is wanted as there is one. */
GLOBAL int lease_port(struct ctx *ctx)
{
	struct leasing *l = leasing_get();
	struct nat_flow_key key = {};
	int reason;

	if (!l)
		return NAT_DROP_BYPASS;
	key.src = l->request.key.internal.addr;
	key.dst = l->request.key.remote;
	key.dport = l->request.key.remote_port;
	key.sport =
		l->request.external_port ? l->request.external_port : l->request.key.internal.port;
	key.protocol = l->request.protocol;
	key.side = NAT_INSIDE;
	reason = lease_take(ctx, l, &key);
	if (reason != GO_ON)
		return reason;
	if (l->request.flags & NAT_LEASE_STRICT && lease_differs(l)) {
		endpoint_give(l->r.address, l->r.internal.class, bpf_ntohs(l->r.port));
		return NAT_LEASE_EXTERNAL;
	}
	return mapping_make(&l->r, l->now);
}

/* Holds the mapping, and the subscriber that it belongs to: what session_take does for a packet. */
static __always_inline int lease_map(struct ctx *ctx)
{
	struct leasing *l = leasing_get();
	struct reservation *r;
	__u32 class, count = 0, i, mode = 0;
	int reason;

	if (!l)
		return NAT_DROP_BYPASS;
	r = &l->r;
	class = lease_class(l->request.protocol);
	if (class == NAT_OTHER && l->rule.kind == NAT_RULE_NAPT)
		l->flags |= NAT_LEASE_SESSION;
	if (l->rule.kind == NAT_RULE_NAPT && l->rule.pool_count > 1)
		count = l->rule.pool_count;
	reason = source_take(r, l->generation, 1);
	if (reason == GO_ON && count)
		reason = source_place(r, l->rule.pool_first, count);
	if (reason != GO_ON || l->flags & NAT_LEASE_SESSION)
		return reason;
	if (l->rule.kind == NAT_RULE_ONE_TO_ONE) {
		for (i = 0; i < NAT_PORT_CLASSES; i++)
			if (l->rule.filtering[i] > mode)
				mode = l->rule.filtering[i];
		l->flags |= NAT_LEASE_WHOLE;
		r->internal.class = NAT_OTHER;
		r->internal.port = 0;
		r->filtering = mode;
		reason = mapping_take_address(r, l->rule.pool_first, l->rule.pool_count, l->now);
		if (reason == GO_ON)
			r->port = l->request.key.internal.port; /* ports stay */
		return reason;
	}
	r->filtering = l->rule.filtering[class & 1];
	reason = mapping_find(r, l->now);
	return reason == NAT_DROP_NO_MAPPING ? lease_port(ctx) : reason;
}

/* PEER: the session that there is, which may have a port of its own. */
GLOBAL int lease_session(void)
{
	struct leasing *l = leasing_get();
	struct nat_flow_key key = {};
	const struct nat_flow_rest *rest;
	struct nat_flow *flow;
	__u32 state, other;

	if (!l)
		return 0;
	key.src = l->request.key.internal.addr;
	key.dst = l->request.key.remote;
	key.sport = l->request.key.internal.port;
	key.dport = l->request.key.remote_port;
	key.protocol = l->request.protocol;
	key.side = NAT_INSIDE;
	key.zone = l->request.key.internal.zone;
	flow = flow_look(&key);
	if (!flow)
		return 0;
	state = *(volatile __u32 *)&flow->state;
	other = flow->other;
	rest = bpf_map_lookup_elem(&flow_details, &other);
	if (!rest || !(state & NAT_FLOW_OWNER) || !(state & NAT_FLOW_PORT) ||
	    state & (NAT_FLOW_GONE | NAT_FLOW_DEAD))
		return 0;
	l->flags |= NAT_LEASE_SESSION;
	l->r.address = rest->rule;
	l->r.port = flow->sport;
	return 1;
}

/* Notes that the mapping has a lease: then packets that nobody expects ask for it. */
GLOBAL int lease_mark(void)
{
	struct leasing *l = leasing_get();
	struct nat_slot *slot;
	__be16 port;

	if (!l)
		return 0;
	port = l->flags & NAT_LEASE_WHOLE ? 0 : l->r.port;
	slot = slot_at(slot_id(l->r.address, l->r.internal.class, port));
	if (slot && !(l->flags & NAT_LEASE_SESSION))
		__sync_fetch_and_or(&slot->refs, NAT_REFS_LEASED);
	return 0;
}

static __always_inline void lease_filters(struct nat_lease *lease,
					  const struct nat_lease_request *q)
{
	__u32 n;

	for (n = 0; n < NAT_LEASE_FILTERS; n++)
		lease->filters[n] = q->filter[n];
	if (q->filters)
		__sync_fetch_and_or(&lease->flags, NAT_LEASE_FILTERED);
	else
		__sync_fetch_and_and(&lease->flags, ~NAT_LEASE_FILTERED);
}

/* Writes the lease of what l->r holds, and its entry in the queue. */
GLOBAL int lease_write(void)
{
	struct leasing *l = leasing_get();
	struct nat_lease_state *state = lease_state_get();
	struct nat_lease_entry entry = {};
	struct nat_lease_key key;
	struct nat_lease *lease;
	__u32 expires;

	if (!l || !state)
		return NAT_DROP_BYPASS;
	key = l->request.key;
	lease = &l->lease;
	__builtin_memset(lease, 0, sizeof(*lease));
	expires = l->now + l->request.ticks;
	lease->expires = expires ? expires : 1;
	lease->flags = l->flags;
	__builtin_memcpy(lease->nonce, l->request.nonce, sizeof(lease->nonce));
	lease->external = l->request.external;
	lease->external_port = l->request.external_port;
	lease->address = l->r.address;
	lease->serial = ++state->serial;
	lease->protocol = l->request.protocol;
	lease_filters(lease, &l->request);
	if (bpf_map_update_elem(&leases, &key, lease, BPF_NOEXIST))
		return NAT_DROP_MAPPINGS_FULL;
	entry.key = key;
	entry.serial = lease->serial;
	if (bpf_map_push_elem(&lease_queue, &entry, 0)) {
		bpf_map_delete_elem(&leases, &key);
		return NAT_DROP_MAPPINGS_FULL;
	}
	lease_count(&key, 1);
	return NAT_LEASE_DONE;
}

/* A new lease. */
GLOBAL int lease_make(struct ctx *ctx)
{
	struct leasing *l = leasing_get();
	struct nat_address *address;
	struct nat_source_key host;
	__u32 *have, index;
	int result;

	if (!l)
		return NAT_DROP_BYPASS;
	host = source_key(&l->r.internal);
	have = bpf_map_lookup_elem(&lease_counts, &host);
	if (l->request.protocol && l->request.limit && have && *have >= l->request.limit)
		return NAT_LEASE_QUOTA;
	if (addr_word(l->request.key.remote))
		lease_session();
	result = lease_map(ctx);
	source_refused(&l->r);
	index = l->r.address;
	address = bpf_map_lookup_elem(&addresses, &index);
	if (result == GO_ON && (!address || address->flags & ADDRESS_CLOSED))
		result = NAT_DROP_NO_ADDRESS;
	if (result == GO_ON && l->request.flags & NAT_LEASE_STRICT && lease_differs(l))
		result = NAT_LEASE_EXTERNAL;
	if (result == GO_ON && address) {
		l->request.external = address->addr;
		l->request.external_port = l->r.port;
		result = lease_write();
	}
	if (result != NAT_LEASE_DONE) {
		if (l->r.flags)
			reservation_drop(&l->r, 0, l->now);
		return result;
	}
	lease_mark();
	if (addr_word(l->request.key.remote))
		lease_keep(&l->request.key, l->request.protocol, 1);
	return NAT_LEASE_DONE;
}

/* Whether the lease is on an address that nothing new is given from. */
static __always_inline int lease_drains(const struct nat_lease *lease)
{
	__u32 index = lease->address;
	const struct nat_address *address = bpf_map_lookup_elem(&addresses, &index);

	return address && address->flags & NAT_ADDRESS_DRAINING;
}

/* What the request wants of the lease that there is; GO_ON if there is none any more. */
GLOBAL int lease_change(void)
{
	struct leasing *l = leasing_get();
	struct nat_lease *lease;
	struct nat_lease_key key;
	__u32 old, expires, n, differs = 0;

	if (!l)
		return NAT_DROP_BYPASS;
	key = l->request.key;
	lease = bpf_map_lookup_elem(&leases, &key);
	if (!lease)
		return GO_ON;
	old = *(volatile __u32 *)&lease->expires;
	if (lease_over(lease, l->now)) {
		lease_end(&key, old, l->now);
		return GO_ON;
	}
	for (n = 0; n < sizeof(lease->nonce); n++) {
		differs |= lease->nonce[n] ^ l->request.nonce[n];
		OPAQUE(differs); /* or clang makes a branch of each */
	}
	if (!(lease->flags & NAT_LEASE_OPEN) && (differs || l->request.flags & NAT_LEASE_NO_NONCE))
		return NAT_LEASE_NONCE;
	if (l->request.op == NAT_LEASE_END)
		return lease_end(&key, old, l->now) ? NAT_LEASE_DONE : GO_ON;
	if (l->request.op == NAT_LEASE_MAKE && lease_homeless(lease)) {
		lease_end(&key, old, l->now);
		return GO_ON;
	}
	if (l->request.flags & NAT_LEASE_STRICT &&
	    ((addr_word(l->request.external) &&
	      !addr_equal(l->request.external, lease->external)) ||
	     (l->request.external_port && l->request.external_port != lease->external_port)))
		return NAT_LEASE_EXTERNAL;
	if (lease_drains(lease) && l->request.ticks > old - l->now)
		l->request.ticks = old - l->now; /* or the address never becomes empty */
	expires = l->now + l->request.ticks;
	if (__sync_val_compare_and_swap(&lease->expires, old, expires ? expires : 1) != old)
		return NAT_DROP_RACE;
	if (lease->flags & NAT_LEASE_OPEN && !(l->request.flags & NAT_LEASE_NO_NONCE)) {
		__builtin_memcpy(lease->nonce, l->request.nonce, sizeof(lease->nonce));
		__sync_fetch_and_and(&lease->flags, ~NAT_LEASE_OPEN);
	}
	if (l->request.flags & NAT_LEASE_RESTATE)
		lease_filters(lease, &l->request);
	l->request.external = lease->external;
	l->request.external_port = lease->external_port;
	return NAT_LEASE_DONE;
}

/* Does what the request says: enum nat_lease_result. */
static __always_inline int lease_do(struct ctx *ctx)
{
	struct leasing *l = leasing_get();
	struct nat_control *c = control_get();
	int result;

	if (!l || !c)
		return NAT_DROP_BYPASS;
	__builtin_memset(&l->r, 0, sizeof(l->r));
	l->flags = l->request.flags & NAT_LEASE_NO_NONCE ? NAT_LEASE_OPEN : 0;
	l->now = clock_now();
	l->generation = *(volatile __u32 *)&c->generation;
	if (l->request.protocol && l->request.protocol != TCP && l->request.protocol != UDP)
		return NAT_LEASE_UNSUPPORTED;
	l->request.key.internal.class = lease_class(l->request.protocol);
	l->r.internal = l->request.key.internal;
	result = lease_rule(l);
	if (result != NAT_LEASE_DONE)
		return result;
	l->request.key.internal.pool = l->r.internal.pool;
	result = lease_change();
	if (result != GO_ON)
		return result;
	return l->request.op == NAT_LEASE_MAKE ? lease_make(ctx) : NAT_LEASE_NONE;
}

/* enum nat_lease_result; the request has the rest of the answer. */
SEC("tc")
int lease_ask(struct ctx *ctx)
{
	struct leasing *l = leasing_get();
	int result;

	if (!l || bpf_skb_load_bytes(ctx, LEASE_FRAME, &l->request, sizeof(l->request)))
		return NAT_DROP_BYPASS;
	result = lease_do(ctx);
	l->request.result = result;
	if (bpf_skb_store_bytes(ctx, LEASE_FRAME, &l->request, sizeof(l->request), 0))
		return NAT_DROP_BYPASS;
	return result;
}

char _license[] SEC("license") = "Dual BSD/GPL";
