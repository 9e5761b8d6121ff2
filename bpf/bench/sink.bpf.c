// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The sink: takes the generator's frames off the device, counts them, and
// measures how long those with a time on them have been under way. For TCP there
// is one at each end, a client and a server, which answer as tcp.h says. Every
// other frame goes on to the stack.
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "frame.h"
#include "tcp.h"

// receiver is what one CPU saw.
struct receiver {
	__u64 frames; // at the client: complete connections
	__u64 bytes;
	__u64 shortest_ns; // of the times under way; 0: none was measured
	__u64 longest_ns;
	__u64 strays;    // segments that are of no connection
	__u64 unused[3]; // a cache line of its own
};

// The source of each flow as it comes in, while learn is set. User space sets the
// number of entries.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translation);
} translations SEC(".maps");

__u32 learn;

// setup is what client and server know of all of them; it is written by user
// space before a load.
struct setup {
	__u32 source; // first source address, host order
	__u32 target; // first target address, host order
	__u32 salt;   // of the cookies
	__u32 close;  // 1: the server closes each as soon as it is open
	__be16 target_port;
	__u16 unused;
};

struct setup connections;
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

// segment_of returns the headers of a frame from port source or to port target, 0
// being any, and 0 where it is something else.
static __always_inline struct segment *segment_of(struct xdp_md *ctx, __be16 source, __be16 target)
{
	struct segment *s = (void *)(long)ctx->data;

	if ((void *)(s + 1) > (void *)(long)ctx->data_end || s->ether_type != bpf_htons(0x0800) ||
	    s->version != 0x45 || s->protocol != 6 || s->fragment & bpf_htons(0x3fff) ||
	    (source && s->source_port != source) || (target && s->target_port != target))
		return 0;
	return s;
}

// flow_of returns the flow that a client's cookie names, or -1 for no cookie.
static __always_inline long flow_of(__u32 cookie)
{
	__u32 flow = cookie >> BENCH_COOKIE_BITS;

	return client_cookie(flow, connections.salt) == cookie ? flow : -1;
}

static __always_inline __be32 target_of(__u32 flow)
{
	return bpf_htonl(connections.target + flow / BENCH_FLOWS_PER_TARGET);
}

// send_back sends a frame by the device that it came from. That is no XDP_TX: veth
// devices wake a receiver after it that has an XDP program itself, and none that
// receives by NAPI without one (veth_xdp_flush, Linux 6.18).
static __always_inline int send_back(struct xdp_md *ctx)
{
	return bpf_redirect(ctx->ingress_ifindex, 0);
}

SEC("xdp")
int server(struct xdp_md *ctx)
{
	struct segment *s = segment_of(ctx, 0, connections.target_port);
	__u32 cpu = bpf_get_smp_processor_id(), number, acknowledged, own;
	struct receiver *r;
	long flow = -1;

	if (cpu >= BENCH_CPUS)
		return XDP_ABORTED;
	r = &receivers[cpu];
	if (!s)
		return XDP_PASS;
	number = bpf_ntohl(s->number);
	acknowledged = bpf_ntohl(s->acknowledged);
	own = server_cookie(s->source, s->source_port, s->target, connections.salt);

	// 1) Which connection it belongs to, by both cookies.
	if (is_sound(s))
		flow = flow_of(s->flags & TCP_SYN ? number : number - 1);
	if (flow < 0 || s->target != target_of(flow))
		goto stray;
	// 2) What answers it.
	switch (s->flags & TCP_FLAGS) {
	case TCP_SYN:
		answer(s, TCP_SYN | TCP_ACK, own, number + 1);
		return send_back(ctx);
	case TCP_ACK:
		if (acknowledged != own + 1)
			goto stray;
		if (connections.close) {
			answer(s, TCP_FIN | TCP_ACK, own + 1, number);
			return send_back(ctx);
		}
		if (learn) {
			__u32 key = flow;
			struct translation *seen = bpf_map_lookup_elem(&translations, &key);

			if (seen) {
				seen->address = s->source;
				seen->port = s->source_port;
				seen->known = 1;
			}
		}
		r->frames++;
		r->bytes += ctx->data_end - ctx->data;
		return XDP_DROP;
	case TCP_FIN | TCP_ACK:
		if (acknowledged != own + 2)
			goto stray;
		answer(s, TCP_ACK, own + 2, number + 1);
		return send_back(ctx);
	}
stray:
	r->strays++;
	return XDP_DROP;
}

SEC("xdp")
int client(struct xdp_md *ctx)
{
	struct segment *s = segment_of(ctx, connections.target_port, 0);
	__u32 cpu = bpf_get_smp_processor_id(), flags, number, acknowledged, host;
	struct receiver *r;
	long flow = -1;

	if (cpu >= BENCH_CPUS)
		return XDP_ABORTED;
	r = &receivers[cpu];
	if (!s)
		return XDP_PASS;
	flags = s->flags & TCP_FLAGS;
	number = bpf_ntohl(s->number);
	acknowledged = bpf_ntohl(s->acknowledged);

	// 1) Which connection it belongs to, and whether the router gave it back that one's
	//    addresses.
	if (is_sound(s))
		flow = flow_of(acknowledged - (flags == TCP_ACK ? 2 : 1));
	if (flow < 0)
		goto stray;
	host = flow / BENCH_PORTS;
	if (s->source != target_of(flow) || s->target != bpf_htonl(connections.source + host) ||
	    s->target_port != bpf_htons(BENCH_FIRST_PORT + flow - host * BENCH_PORTS))
		goto stray;
	// 2) What answers it.
	switch (flags) {
	case TCP_SYN | TCP_ACK:
		answer(s, TCP_ACK, acknowledged, number + 1);
		return send_back(ctx);
	case TCP_FIN | TCP_ACK:
		answer(s, TCP_FIN | TCP_ACK, acknowledged, number + 1);
		return send_back(ctx);
	case TCP_ACK:
		r->frames++;
		r->bytes += ctx->data_end - ctx->data;
		return XDP_DROP;
	}
stray:
	r->strays++;
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
