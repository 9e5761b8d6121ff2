// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The sink: takes the generator's frames off the device, counts them, and
// measures how long those with a time on them have been under way. Every other
// frame goes on to the stack.
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "frame.h"

// receiver is what one CPU saw.
struct receiver {
	__u64 frames;
	__u64 bytes;
	__u64 shortest_ns; // of the times under way; 0: none was measured
	__u64 longest_ns;
	__u64 unused[4]; // a cache line of its own
};

// The source of each flow as it comes in, while learn is set. User space sets the
// number of entries.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translation);
} translations SEC(".maps");

// No value of it is used: it brings the limits' names into the object, for Go.
const volatile enum bench_limit limits;
__u32 learn;
struct receiver receivers[BENCH_CPUS] __attribute__((aligned(64)));
__u32 latencies[BENCH_CPUS][BENCH_BUCKETS];

// bucket_of numbers the times: exact below 32 ns, then 16 buckets for each power of two.
static __always_inline __u32 bucket_of(__u64 ns)
{
	__u32 shift = 0;

	if (ns >> 32)
		return BENCH_BUCKETS - 1;
	if (ns >> 16 >> shift)
		shift += 16;
	if (ns >> 8 >> shift)
		shift += 8;
	if (ns >> 4 >> shift)
		shift += 4;
	if (ns >> 2 >> shift)
		shift += 2;
	if (ns >> 1 >> shift)
		shift += 1;
	if (shift < 5)
		return ns;
	return (shift - 3) * 16 + ((ns >> (shift - 4)) & 15);
}

SEC("xdp")
int sink(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 cpu = bpf_get_smp_processor_id();
	struct receiver *r;
	struct stamp *t;

	if (cpu >= BENCH_CPUS)
		return XDP_ABORTED;
	r = &receivers[cpu];
	t = data + BENCH_HEADER;
	if ((void *)(t + 1) > end || t->magic != BENCH_MAGIC)
		return XDP_PASS;
	r->frames++;
	r->bytes += end - data;
	if (learn) {
		__u32 flow = t->flow;
		struct translation *seen = bpf_map_lookup_elem(&translations, &flow);

		if (seen) {
			__builtin_memcpy(&seen->address, data + 26, 4); // of the IPv4 header
			__builtin_memcpy(&seen->port, data + 34, 2);    // of the UDP header
			seen->known = 1;
		}
	}
	if (t->sent_ns) {
		__u64 ns = bpf_ktime_get_ns() - t->sent_ns;
		__u32 bucket = bucket_of(ns);

		if (ns > r->longest_ns)
			r->longest_ns = ns;
		if (ns < r->shortest_ns || !r->shortest_ns)
			r->shortest_ns = ns;
		if (bucket < BENCH_BUCKETS)
			latencies[cpu][bucket]++;
	}
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
