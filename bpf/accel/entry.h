/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract of `natkit accel`: what is remembered of a flow that the kernel's own
 * NAT translates, and what is counted. Like abi.h, and under its NAT_ABI. No code.
 *
 * A fast-path entry is one direction of a flow, by what its packets look like when they
 * arrive. It is a cache of the kernel's connection tracking and routes. Packets without a
 * valid entry take the stack. So the table is an LRU hash, needs no garbage collection, and
 * a full one is slower, never wrong.
 *
 *   waiting    packets are passed to the stack, until one is seen leaving by it
 *   valid      until `until`: packets bypass the stack
 *   probing    one packet was passed to the stack; those after it still use the entry for
 *              a moment, in which it must be seen leaving. Else: waiting
 *   refused    until `until`: the kernel's entry can't be accelerated; `reason` is why
 */
#ifndef NATKIT_ENTRY_H
#define NATKIT_ENTRY_H

#include "nat/abi.h"

/* What became of a packet. All but the first went to the stack, untouched. */
enum nat_accel_reason {
	NAT_ACCEL_FORWARDED,
	NAT_ACCEL_NOT_IPV4,   /* for this machine: ARP, IPv6, tagged and broadcast frames */
	NAT_ACCEL_PROTOCOL,   /* neither TCP nor UDP */
	NAT_ACCEL_SPECIAL,    /* fragments, IP options, lengths that contradict each other */
	NAT_ACCEL_TTL,        /* ends here */
	NAT_ACCEL_TOO_BIG,    /* for the egress interface */
	NAT_ACCEL_TCP_STRICT, /* connection tracking checks TCP windows */
	NAT_ACCEL_TCP_FLAGS,  /* SYN, FIN, RST */
	NAT_ACCEL_PROBE,      /* one packet a second, to see whether the stack forwards the flow */
	NAT_ACCEL_WAITING,    /* none of its direction was seen leaving yet */
	NAT_ACCEL_OTHER_LINK, /* came in where the flow's packets do not */
	NAT_ACCEL_BELOW_THRESHOLD, /* too few packets in its direction, or among the first */
	NAT_ACCEL_UNKNOWN,         /* to connection tracking: the first of a flow, or untracked */
	NAT_ACCEL_UNREPLIED,       /* no reply was seen */
	NAT_ACCEL_UNSTEADY,        /* TCP that opens or closes */
	NAT_ACCEL_HELPER,          /* of connection tracking, or numbers that it shifts */
	NAT_ACCEL_OFFLOADED,       /* a flowtable has the flow */
	NAT_ACCEL_TIMEOUT,         /* of less than three seconds */
	NAT_ACCEL_LOCAL,           /* for the machine itself */
	NAT_ACCEL_NO_ROUTE,        /* no route, no neighbour, or by an interface not accelerated */
	NAT_ACCEL_OTHER_ROUTE,     /* the stack forwards it by another path than the FIB names */
	NAT_ACCEL_NO_ROOM,         /* the table had no slot, or gave it to another flow */
	NAT_ACCEL_REASONS,
};

/* The program that forwards the packets of an entry. */
enum nat_accel_hook { NAT_ACCEL_ANY, NAT_ACCEL_TC, NAT_ACCEL_XDP };

/*
 * 64 bytes. Times are ticks, hops as in nat_flow. Packets write the entry of their
 * own direction; what leaves through the stack, and what ends a flow, the other
 * direction's.
 */
struct nat_accel_entry {
	struct nat_addr src, dst; /* what the packet becomes */
	__be16 sport, dport;
	__u16 l3_delta, l4_delta; /* of rewrite.h */
	__u64 hop;
	__u64 left_hop;     /* where the last packet of the OTHER direction left to, */
	__u32 left;         /* when, */
	__u32 left_ifindex; /* and by which interface it had come in */
	__u32 until;
	__u32 probed;  /* when a packet was passed to the stack as a probe; 0 none */
	__u64 packets; /* that used the entry */
	__u16 mtu;
	__u16 in_link; /* as nat_flow_key.link */
	__u8 reason;   /* enum nat_accel_reason; not 0: refused */
	__u8 hook;     /* enum nat_accel_hook */
	__u8 carried;  /* packets of the flow have bypassed the stack, in either direction */
	__u8 recent; /* packets that took the fast-path entry since one was passed to the stack; no
		      * more than matters
		      */
};

struct nat_accel_stats {
	__u64 packets[NAT_ACCEL_REASONS];
	__u64 bytes; /* of IPv4, forwarded */
};

/* A new reason, at whatever place, raises NAT_ABI. */
NAT_ASSERT(sizeof(struct nat_accel_entry) == 64);
NAT_ASSERT(NAT_ACCEL_REASONS == 22 && NAT_ABI == 13);

#endif
