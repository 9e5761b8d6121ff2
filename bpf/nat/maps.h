/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that files of the engine share, or natkit reads: key, who writes, who reads, what
 * full means. A map that one file alone uses is in that file: count.h, flows.h, fragment.h, home.h,
 * icmp.h, lease.h, log.h, rule.h, session.h, subscriber.h, verdict.h, nat/gc.bpf.c and
 * nat/lease.bpf.c; control.h and links.h have those that accel also has, whose own are in learn.h.
 * "Packets" are the programs at the hooks, "GC" the timer of nat/gc.bpf.c, "natkit" user space.
 * max_entries given here are for tests of the C code; package datapath puts in those of the rule
 * file's limits before it loads.
 *
 * Sessions and mappings lie in arrays, and tables of cache lines lead to them (table.h);
 * other state is in the kernel's preallocated hashes. None is LRU (but for fragments that
 * wait for their first one, fragment.h): a live session or mapping is not thrown away for
 * a new one (RFC 6888 REQ-11). Memory of what was removed is used again by any other key,
 * so:
 *  - a session is removed only by GC, NAT_DEAD_TICKS after it was marked
 *    NAT_FLOW_DEAD, and a packet that finds it dead does not use it (it may revive it);
 *  - a reference on a mapping, source or filter entry is taken by compare-and-exchange
 *    and its identity checked after that.
 */
#ifndef NATKIT_MAPS_H
#define NATKIT_MAPS_H

#include "lib/control.h"

/* --- state ------------------------------------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_counts);
	__uint(max_entries, 1);
} counts SEC(".maps");

/* Internal endpoint -> slot of its external endpoint, enum nat_mapping_value (table.h). Packets
 * create; GC removes when no session has used it for the
 * hold-down of its port. No room near its home bucket, or nat_control.mappings_max reached:
 * NAT_DROP_MAPPINGS_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_bucket);
	__uint(max_entries, 16384);
} mapping_table SEC(".maps");

/* Mappings whose last session ended, oldest first; and the ports
 * of ended sessions without a mapping (APDM: the port's slot is NAT_SLOT_SESSION). */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__type(value, struct nat_hold_down);
	__uint(max_entries, 65536);
} mapping_queue SEC(".maps");

/* Subscribers. Packets create, GC removes those without sessions and ports. Full:
 * NAT_DROP_SOURCES_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct nat_source_key);
	__type(value, struct nat_source);
	__uint(max_entries, 65536);
} sources SEC(".maps");

/* For rules that filter by address only. Packets create, GC removes those
 * without sessions. Full: NAT_DROP_MAPPINGS_FULL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct nat_filter_key);
	__type(value, struct nat_filter_entry);
	__uint(max_entries, 65536);
} filter_entries SEC(".maps");

/* Packets write on tc, GC removes. Full: the oldest gives way. Only packets of a session make
 * entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct nat_fragment_key);
	__type(value, struct nat_fragment);
	__uint(max_entries, NAT_MAX_FRAGMENTS);
} fragments SEC(".maps");

/* Keys of fragments, oldest first. Who makes an entry of fragments puts its key here; GC takes it
 * out, or the packet that needs its room. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__type(value, struct nat_fragment_key);
	__uint(max_entries, NAT_MAX_FRAGMENTS);
} fragment_queue SEC(".maps");

/* --- external addresses ------------------------------------------------------- */

/* By index. natkit writes; packets move a masquerade address on Linux 6.7 and later. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_address);
	__uint(max_entries, NAT_MAX_ADDRESSES);
} addresses SEC(".maps");

/* Address -> index, of every address that natkit translates to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct nat_addr);
	__type(value, __u32);
	__uint(max_entries, NAT_MAX_ADDRESSES);
} address_indices SEC(".maps");

/* By index of the address: who has which port. Three spaces, one a class. Read in place by
 * natkit. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, NAT_MAX_ADDRESSES);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__uint(map_flags, BPF_F_INNER_MAP | BPF_F_MMAPABLE);
			__type(key, __u32);
			__type(value, struct nat_slot);
			__uint(max_entries, 1);
		});
} slots SEC(".maps");

/* By index of the address, for pools without ports: who has it. Not a map for each, which would
 * take two pages. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_slot);
	__uint(max_entries, NAT_MAX_ADDRESSES);
} whole_slots SEC(".maps");

/* By index of the address: which ports are free. Key of the inner map: enum nat_class. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, NAT_MAX_ADDRESSES);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__type(key, __u32);
			__type(value, struct nat_ports);
			__uint(max_entries, NAT_PORT_CLASSES);
		});
} free_ports SEC(".maps");

/* By index of the address, of pools that give ports in blocks: who has which block. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, NAT_MAX_ADDRESSES);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__uint(map_flags, BPF_F_MMAPABLE);
			__type(key, __u32);
			__type(value, struct nat_blocks);
			__uint(max_entries, 1);
		});
} blocks SEC(".maps");

/* For pools without ports: key 0, bit = index of the address. For pools with blocks: the address
 * may have a block for a new subscriber. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_ports);
	__uint(max_entries, 1);
} free_addresses SEC(".maps");

/* --- rules and configuration -------------------------------------------------- */

/* By generation % NAT_GENERATIONS, like all that follow. natkit fills the slot that
 * is not in use, then flips control.generation: all or nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_config);
	__uint(max_entries, NAT_GENERATIONS);
} config SEC(".maps");

#define NAT_GENERATION_MAP(name, inner_type, inner_flags, key_type, value_type)                    \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                                          \
		__type(key, __u32);                                                                \
		__uint(max_entries, NAT_GENERATIONS);                                              \
		__array(                                                                           \
			values, struct {                                                           \
				__uint(type, inner_type);                                          \
				__uint(map_flags, inner_flags);                                    \
				__type(key, key_type);                                             \
				__type(value, value_type);                                         \
				__uint(max_entries, 1);                                            \
			});                                                                        \
	} name SEC(".maps")

NAT_GENERATION_MAP(rules, BPF_MAP_TYPE_ARRAY, BPF_F_INNER_MAP, __u32, struct nat_rule);
NAT_GENERATION_MAP(targets, BPF_MAP_TYPE_ARRAY, BPF_F_INNER_MAP, __u32, struct nat_target);
NAT_GENERATION_MAP(exact, BPF_MAP_TYPE_HASH, 0, struct nat_exact_key, __u32);
NAT_GENERATION_MAP(destinations, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC,
		   struct nat_destination_key, __u32);
NAT_GENERATION_MAP(origins, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct nat_origin_key, __u32);
NAT_GENERATION_MAP(exclude_src, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct nat_prefix_key,
		   __u32);
NAT_GENERATION_MAP(exclude_dst, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct nat_prefix_key,
		   __u32);
/* What subscribers of a class may have, and who is in which. */
NAT_GENERATION_MAP(sub_classes, BPF_MAP_TYPE_ARRAY, BPF_F_INNER_MAP, __u32, struct nat_limits);
NAT_GENERATION_MAP(sub_prefixes, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct nat_prefix_key,
		   __u32);
/* Whose port blocks follow from the rules. */
NAT_GENERATION_MAP(computed, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct nat_computed_key,
		   struct nat_computed);
NAT_GENERATION_MAP(excludes, BPF_MAP_TYPE_HASH, 0, struct nat_exclude_key, __u32);

/* The configuration of the generation in use, and which slot of the rule maps goes
 * with it. Only one of the two slots is ever written, and not the one in use. */
static __always_inline const struct nat_config *config_get(__u32 *slot)
{
	struct nat_control *c = control_get();

	if (!c)
		return NULL;
	*slot = *(volatile __u32 *)&c->generation % NAT_GENERATIONS;
	return bpf_map_lookup_elem(&config, slot);
}

/* clang 19 leaves a type that only inner maps name as a forward declaration, and loaders
 * need its size ("type is unsized"). A parameter's type is written down whole. Never
 * called, so never loaded. */
struct map_types {
	struct nat_slot slot;
	struct nat_ports ports;
	struct nat_rule rule;
	struct nat_target target;
	struct nat_exact_key exact;
	struct nat_destination_key destination;
	struct nat_origin_key origin;
	struct nat_prefix_key prefix;
	struct nat_exclude_key exclude;
	struct nat_blocks blocks;
	struct nat_limits limits;
	struct nat_computed_key computed_key;
	struct nat_computed computed;
};
__attribute__((used)) static void map_types(struct map_types *types)
{
}

#endif
