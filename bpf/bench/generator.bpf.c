// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The packet generator: run by BPF_PROG_RUN with live frames, once a frame, it
// turns the frame into the next packet of the load and sends it, or lets it go
// (XDP_DROP) while the next packet is not due. Pacing is here and not in user
// space, where a call for each burst would make bursts and holes.
//
// A frame that the kernel uses again is as the last receiver left it, so every
// byte of the headers is written each time.
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "frame.h"
#include "tcp.h"

// frame_kind is one length of frame, with the parts of its headers that depend
// on the length: sums are one's complement sums of 16-bit words as they lie in
// memory, not folded, without source, target, ports and stamp. Loads of TCP use the
// length alone.
struct frame_kind {
	__u32 length;
	__u32 ip_sum;
	__u32 udp_sum;
	__be16 ip_length;
	__be16 udp_length;
};

// load is written by user space before a run and not touched during it.
struct load {
	__u64 start_ns;
	__u64 end_ns;
	__u64 interval;    // between two frames of one CPU in 2^-16 ns; 0: as fast as it goes
	__u32 catch_up;    // frames that may follow at once after a delay; more are skipped
	__u32 stamp_every; // one frame in so many carries its time; 0: none
	__u32 source;      // first source address, host order
	__u32 target;      // first target address, host order
	__u32 longest;     // length that each frame comes with: the greatest of kinds[]
	__u32 pattern;     // frames of kinds[] before they repeat
	__u32 both_ways;   // 1: every other frame goes from a target back to its source
	__u32 once;        // 1: a CPU ends when it has sent each of its flows
	__u32 segment;     // what is sent of TCP: enum bench_segment
	__u32 salt;        // of the cookies
	__u32 targets;     // of datagrams: which bits of a flow's target count; 0: all have one
	__be16 target_port;
	__u16 unused;
	__u8 macs[2][12]; // destination and source, of frames forth and back
	struct frame_kind kinds[BENCH_PATTERN];
};

// sender is the state of one CPU, read by user space after a run. It sends the
// flows from first up to first + flows, each once before one comes again.
struct sender {
	__u64 due; // when the next frame is after start_ns, in 2^-16 ns: enough for 78 hours
	__u64 sent;
	__u64 sent_bytes;
	__u32 first;
	__u32 flows;
	__u32 stride; // from flow to flow, below flows and coprime to it
	__u32 at;     // the next flow, from first
	__u32 sequence;
	__u32 in_pattern; // which frame of the mix is next
	__u64 last_ns;    // when the last frame was sent
	__u32 way;        // 0: what both_ways says; 1 forth only, 2 back only
	__u32 one_host; // 1: all datagrams are of the first source, a port for each flow; not back
	__u64 first_ns; // when the first frame was sent
	__u64 done_ns;  // once: when its turn came again after the last
	__u64 unused2[6]; // cache lines of its own
};

// The devices to send by, forth and back. They may be in two namespaces, which a
// device's number would not tell.
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} ends SEC(".maps");

// Where frames back must go, by flow: written by the sink at the right end while
// it learns. User space sets the number of entries.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translation);
} translations SEC(".maps");

struct load load;
// No value of these is used: they bring names into the object, for Go.
const volatile enum bench_limit limits;
const volatile enum bench_segment segments;
struct sender senders[BENCH_CPUS] __attribute__((aligned(64)));

// is_due moves the clock of s on by one frame if that is due at now.
static __always_inline int is_due(struct sender *s, __u64 now)
{
	__u64 interval = load.interval, behind;

	if (now < load.start_ns || now >= load.end_ns)
		return 0;
	if (!interval)
		return 1;
	now = (now - load.start_ns) << 16;
	if (now < s->due)
		return 0;
	behind = now - s->due;
	if (behind > interval * load.catch_up) // slots passed while the CPU was away
		s->due += (behind / interval - load.catch_up) * interval;
	s->due += interval;
	return 1;
}

// The headers as they are written, 2 bytes aligned.
struct headers {
	__u8 macs[12];
	__be16 ether_type;
	__u8 version, tos;
	__be16 ip_length;
	__u32 id_and_fragment;
	__u8 ttl, protocol;
	__u16 ip_check;
	__be32 source, target;
	__be16 source_port, target_port;
	__be16 udp_length;
	__u16 udp_check;
	struct stamp stamp;
} __attribute__((packed, aligned(2)));

// write_segment makes a frame the SYN of a flow, or data on the connection that
// came of it. Data is numbered as if it were sent again and again, so that no state
// is needed; its window varies, or connection tracking would take it for that and
// give the connection five minutes at most (nf_conntrack_tcp_timeout_max_retrans).
static __always_inline int write_segment(struct xdp_md *ctx, __u32 flow, __u32 number, __u32 length)
{
	struct segment *s = (void *)(long)ctx->data;
	__u32 host = flow / BENCH_PORTS, cookie = client_cookie(flow, load.salt);
	__u32 payload = 0;

	if ((void *)s + BENCH_LEAST > (void *)(long)ctx->data_end)
		return 0;
	__builtin_memcpy(s->macs, load.macs[0], sizeof(s->macs));
	s->source = bpf_htonl(load.source + host);
	s->target = bpf_htonl(load.target + flow / BENCH_FLOWS_PER_TARGET);
	s->source_port = bpf_htons(BENCH_FIRST_PORT + flow - host * BENCH_PORTS);
	s->target_port = load.target_port;
	__builtin_memset(s + 1, 0, BENCH_LEAST - sizeof(*s));
	if (load.segment == BENCH_DATA) {
		struct translation *t = bpf_map_lookup_elem(&translations, &flow);
		__u32 server;

		if (!t)
			return 0;
		server = server_cookie(t->address, t->port, s->target, load.salt);
		payload = length - sizeof(*s);
		s->number = bpf_htonl(cookie + 1);
		s->acknowledged = bpf_htonl(server + 1);
		s->flags = TCP_ACK;
		s->window = bpf_htons(0x8000 | (number & 0x7fff));
	} else {
		s->number = bpf_htonl(cookie);
		s->acknowledged = 0;
		s->flags = TCP_SYN;
		s->window = bpf_htons(0xffff);
	}
	seal(s, payload);
	return 1;
}

SEC("xdp")
int generate(struct xdp_md *ctx)
{
	__u32 cpu = bpf_get_smp_processor_id(), back, flow, host, number, varying;
	const struct frame_kind *kind;
	struct headers *h;
	struct sender *s;
	__u64 now, sum;

	if (cpu >= BENCH_CPUS)
		return XDP_ABORTED;
	s = &senders[cpu];
	if (load.once && s->sent >= s->flows) {
		if (!s->done_ns)
			s->done_ns = bpf_ktime_get_ns();
		return XDP_DROP;
	}
	now = bpf_ktime_get_ns();
	if (!is_due(s, now))
		return XDP_DROP;

	number = s->sequence++;
	kind = &load.kinds[0];
	if (load.pattern > 1) {
		__u32 at = s->in_pattern;

		s->in_pattern = at + 1 < load.pattern ? at + 1 : 0;
		if (at >= BENCH_PATTERN)
			return XDP_ABORTED;
		kind = &load.kinds[at];
		if (bpf_xdp_adjust_tail(ctx, (int)kind->length - (int)load.longest))
			return XDP_ABORTED;
	}
	h = (void *)(long)ctx->data;
	if ((void *)(h + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;

	// A flow's frame back follows its frame forth, or another CPU sends it.
	back = s->way ? s->way - 1 : load.both_ways & number;
	flow = s->first + s->at;
	if (s->way || back == load.both_ways) {
		s->at += s->stride;
		if (s->at >= s->flows)
			s->at -= s->flows;
	}
	if (load.segment) {
		if (!write_segment(ctx, flow, number, kind->length))
			return XDP_ABORTED;
		goto send;
	}
	host = flow / BENCH_PORTS;

	__builtin_memcpy(h->macs, load.macs[back & 1], sizeof(h->macs));
	h->ether_type = bpf_htons(0x0800);
	h->version = 0x45;
	h->tos = 0;
	h->ip_length = kind->ip_length;
	h->id_and_fragment = 0;
	h->ttl = 64;
	h->protocol = 17;
	h->udp_length = kind->udp_length;
	{
		__be32 source = bpf_htonl(load.source + host);
		__be32 target =
			bpf_htonl(load.target + (flow / BENCH_FLOWS_PER_TARGET & load.targets));
		__be16 port = bpf_htons(BENCH_FIRST_PORT + flow - host * BENCH_PORTS);

		if (s->one_host) {
			source = bpf_htonl(load.source);
			port = bpf_htons(flow);
		}
		if (back) {
			struct translation *t = bpf_map_lookup_elem(&translations, &flow);

			if (t && t->known) {
				source = t->address;
				port = t->port;
			}
			h->source = target;
			h->target = source;
			h->source_port = load.target_port;
			h->target_port = port;
		} else {
			h->source = source;
			h->target = target;
			h->source_port = port;
			h->target_port = load.target_port;
		}
		varying = halves(source) + halves(target);
		h->ip_check = ~fold((__u64)kind->ip_sum + varying);
		varying += port;
	}
	h->stamp.magic = BENCH_MAGIC;
	h->stamp.flow = flow;
	h->stamp.sequence = number;
	h->stamp.sent_ns = load.stamp_every && number % load.stamp_every == 0 ? now : 0;
	sum = (__u64)kind->udp_sum + varying + BENCH_MAGIC + halves(flow) + halves(number) +
	      halves((__u32)h->stamp.sent_ns) + halves(h->stamp.sent_ns >> 32);
	h->udp_check = ~fold(sum);
	if (!h->udp_check)
		h->udp_check = 0xffff;

send:
	if (!s->sent)
		s->first_ns = now;
	s->last_ns = now;
	s->sent++;
	s->sent_bytes += kind->length;
	return bpf_redirect_map(&ends, back & 1, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
