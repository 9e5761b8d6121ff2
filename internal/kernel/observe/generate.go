// SPDX-License-Identifier: Apache-2.0

package observe

import _ "natkit/internal/kernel/littleendian" // as the objects below are

// The eBPF objects and their Go types are committed; a test compares them with
// their source.
//go:generate ../../../bpf/generate.sh -type drop_class -type drop_slot drops ../../../bpf/trace/drops.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types -type profile_count profile ../../../bpf/trace/profile.bpf.c
//go:generate ../../../bpf/generate.sh hooks ../../../bpf/trace/hooks.bpf.c
//go:generate ../../../bpf/generate.sh -type packet_point packets ../../../bpf/trace/packets.bpf.c
