// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// What the generator and the sink agree on: the frame that travels. Ethernet,
// IPv4 without options, UDP, and a stamp; zeros up to the frame's length. Frames of
// TCP are in tcp.h.
#ifndef BENCH_FRAME_H
#define BENCH_FRAME_H

#include <linux/types.h>

enum bench_limit {
	BENCH_CPUS = 64, // rows of state for a CPU each
	BENCH_HEADER = 42,
	BENCH_LEAST = 60,  // bytes of the shortest frame, 64 on the wire with its checksum
	BENCH_MOST = 1514, // bytes of the longest
	BENCH_PORTS = 63,  // flows of one source address, as in CSIT's grid
	BENCH_FLOWS_PER_TARGET =
		32768, // a router with one outside address has 64512 ports towards a target
	BENCH_FIRST_PORT = 1024,
	BENCH_PATTERN = 12, // frames of a mix before it repeats
	BENCH_MAGIC = 0x6e6b,
	BENCH_COOKIE_BITS = 10, // of a TCP sequence number, beside the 22 of the flow
	BENCH_BUCKETS = 465, // of the latency: 16 for each power of two of nanoseconds, up to 2^32
};

// translation is what a router made of a flow's source, as the wire has it.
struct translation {
	__u32 address;
	__u16 port;
	__u16 known; // 0: nobody has seen a packet of the flow
};

// stamp follows the UDP header.
struct stamp {
	__u16 magic;
	__u32 flow;
	__u32 sequence; // counts up for each CPU that sends
	__u64 sent_ns;  // bpf_ktime_get_ns(); 0 in frames whose latency nobody asks for
} __attribute__((packed));

#endif
