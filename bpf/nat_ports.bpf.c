// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Lets user space change free ports while packets take theirs: a map's value can only
// be replaced whole from there, and packets would lose what they took meanwhile. Run
// by BPF_PROG_TEST_RUN; the packet is a list of struct change, after the 14 bytes that
// a frame must have.
#include "nat.h"
#include "maps.h"
#include "ctx_skb.h"
#include "port.h"

enum ports_limit { PORTS_CHANGES = 128 };

struct change {
	__u32 index; /* of the address */
	__u32 class; /* NAT_PORT_CLASSES: the address itself, in free_addresses */
	__u32 port;
	__u32 give; /* 1: free; 0: not to be given */
};

/* How many were changed: a port that is in use can't be taken, nor a free one given. */
SEC("tc")
int ports_change(struct ctx *ctx)
{
	__u32 n, zero = 0, done = 0;
	struct nat_ports *ports;
	struct change c;

	for (n = 0; n < PORTS_CHANGES; n++) {
		if (bpf_skb_load_bytes(ctx, 14 + n * sizeof(c), &c, sizeof(c)))
			break;
		if (c.class < NAT_PORT_CLASSES)
			ports = port_bits(c.index, c.class);
		else
			ports = bpf_map_lookup_elem(&free_addresses, &zero);
		if (!ports || c.port >= NAT_PORTS)
			continue;
		if (!c.give) {
			done += bit_take(ports, c.port);
		} else if (!(*(volatile __u64 *)bit_word(ports, c.port) & 1ULL << (c.port & 63))) {
			bit_give(ports, c.port);
			done++;
		}
	}
	return done;
}

char _license[] SEC("license") = "Dual BSD/GPL";
