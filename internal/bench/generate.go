// SPDX-License-Identifier: Apache-2.0

package bench

import _ "natkit/internal/kernel/littleendian" // as the objects below are

// The eBPF objects and their Go types are committed; a test compares them with
// their source.
//go:generate ../../bpf/generate.sh generator ../../bpf/bench/generator.bpf.c
//go:generate ../../bpf/generate.sh -no-global-types -type setup -type receiver sink ../../bpf/bench/sink.bpf.c
//go:generate ../../bpf/generate.sh forward ../../bpf/bench/forward.bpf.c
