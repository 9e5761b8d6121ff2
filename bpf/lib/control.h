/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The one word that says whose the maps are, and what holds for their life. natkit writes;
 * packets and the sweep write what nat_control says.
 */
#ifndef NATKIT_CONTROL_H
#define NATKIT_CONTROL_H

#include "lib/base.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nat_control);
	__uint(max_entries, 1);
} control SEC(".maps");

static __always_inline struct nat_control *control_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

#endif
