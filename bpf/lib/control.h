/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The version of the maps, and what is fixed for their life. natkit writes; packets and GC
 * write the fields that nat_control marks as theirs.
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
