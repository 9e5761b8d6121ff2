/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract of `natkit accel`: what is remembered of a flow that the kernel's own
 * NAT translates, and what is counted. Like abi.h, and under its NAT_ABI. No code.
 *
 * A shortcut is one direction of a flow, by what its packets look like when they
 * arrive. It is a cache: the kernel's connection tracking and routes are the truth, and
 * what is not in the table, or not trusted, goes through the stack. So the table is an
 * LRU one, needs no sweep, and full means slower, never wrong.
 *
 *   waiting    packets go up to the stack, until one is seen leaving by it
 *   trusted    until `until`: packets take the shortcut
 *   probing    one packet went up; those after it still take the shortcut for a moment,
 *              in which it must be seen leaving. Else: waiting
 *   refused    until `until`: the kernel's entry can't be accelerated; `reason` says why
 */
#ifndef NATKIT_SHORTCUT_H
#define NATKIT_SHORTCUT_H

#include "nat/abi.h"

/* What became of a packet. All but the first went to the stack, untouched. */
enum nat_accel_reason {
	NAT_ACCEL_FORWARDED,
	NAT_ACCEL_NOT_IPV4,   /* for this machine: ARP, IPv6, tagged and broadcast frames */
	NAT_ACCEL_PROTOCOL,   /* neither TCP nor UDP */
	NAT_ACCEL_SPECIAL,    /* fragments, IP options, lengths that contradict each other */
	NAT_ACCEL_TTL,        /* ends here */
	NAT_ACCEL_TOO_BIG,    /* for the way out */
	NAT_ACCEL_TCP_STRICT, /* connection tracking checks TCP windows */
	NAT_ACCEL_TCP_FLAGS,  /* SYN, FIN, RST */
	NAT_ACCEL_PROBE,      /* the one a second by which the stack is asked */
	NAT_ACCEL_WAITING,    /* none of its direction was seen leaving yet */
	NAT_ACCEL_OTHER_LINK, /* came in where the flow's packets do not */
	NAT_ACCEL_YOUNG,      /* among the first of its direction, or one of few */
	NAT_ACCEL_UNKNOWN,    /* to connection tracking: the first of a flow, or untracked */
	NAT_ACCEL_UNANSWERED, /* the other end has not sent yet */
	NAT_ACCEL_UNSTEADY,   /* TCP that opens or closes */
	NAT_ACCEL_HELPER,     /* of connection tracking, or numbers that it shifts */
	NAT_ACCEL_OFFLOADED,  /* a flowtable has the flow */
	NAT_ACCEL_TIMEOUT,    /* of less than three seconds */
	NAT_ACCEL_LOCAL,      /* for the machine itself */
	NAT_ACCEL_NO_WAY,     /* no route, no neighbour, or by an interface not accelerated */
	NAT_ACCEL_OTHER_WAY,  /* the stack sends it another way than the routes say */
	NAT_ACCEL_NO_ROOM,    /* the table gave no place, or gave it away meanwhile */
	NAT_ACCEL_REASONS,
};

/* Which program the packets of a shortcut are for. */
enum nat_accel_hook { NAT_ACCEL_ANY, NAT_ACCEL_TC, NAT_ACCEL_XDP };

/*
 * 64 bytes. Times are ticks, hops as in nat_flow. Packets write the shortcut of their
 * own direction; what leaves through the stack, and what ends a flow, the other
 * direction's.
 */
struct nat_shortcut {
	struct nat_addr src, dst; /* what the packet becomes */
	__be16 sport, dport;
	__u16 l3_delta, l4_delta; /* as in nat_flow */
	__u64 hop;
	__u64 left_hop;     /* where the last packet of the OTHER direction left to, */
	__u32 left;         /* when, */
	__u32 left_ifindex; /* and by which interface it had come in */
	__u32 until;
	__u32 probed;  /* when a packet was sent up to be seen leaving; 0 none */
	__u64 packets; /* that took the shortcut */
	__u16 mtu;
	__u16 in_link; /* as in nat_flow */
	__u8 reason;   /* enum nat_accel_reason; not 0: refused */
	__u8 hook;     /* enum nat_accel_hook */
	__u8 carried;  /* packets of the flow have taken the shortcut, in either direction */
	__u8 lately;   /* packets that took the shortcut since one was sent up; no more than matters
			*/
};

struct nat_accel_stats {
	__u64 packets[NAT_ACCEL_REASONS];
	__u64 bytes; /* of IPv4, forwarded */
};

/* As NAT_ABI says it: a reason more, wherever it is, raises that. */
NAT_ASSERT(sizeof(struct nat_shortcut) == 64);
NAT_ASSERT(NAT_ACCEL_REASONS == 22 && NAT_ABI == 8);

#endif
