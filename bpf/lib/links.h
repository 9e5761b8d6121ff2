/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The interfaces that packets come in or leave by, by a number that is theirs for the life of
 * the instance. natkit writes, nobody else.
 */
#ifndef NATKIT_LINKS_H
#define NATKIT_LINKS_H

#include "lib/base.h"

/* By index. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_link);
	__uint(max_entries, NAT_MAX_LINKS);
} links SEC(".maps");

/* ifindex -> index in links. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, NAT_MAX_LINKS);
} link_indices SEC(".maps");

/* By index in links: where XDP transmits. natkit fills it from inside the devices'
 * namespace. A link without NAT_LINK_XDP has none. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, NAT_MAX_LINKS);
} transmit SEC(".maps");

/* Index of an interface plus 1; 0 if it is none of the rule file's. */
static __always_inline __u16 link_find(__u32 ifindex)
{
	__u32 *index = bpf_map_lookup_elem(&link_indices, &ifindex);

	return index ? *index + 1 : 0;
}

static __always_inline struct nat_link *link_get(__u16 link)
{
	__u32 index = link - 1;

	return bpf_map_lookup_elem(&links, &index);
}

/* Whether a link is inside and outside: a one-armed gateway's. */
static __always_inline int link_is_both(const struct nat_link *link)
{
	__u32 both = NAT_LINK_INSIDE | NAT_LINK_OUTSIDE;

	return link && (link->flags & both) == both;
}

#endif
