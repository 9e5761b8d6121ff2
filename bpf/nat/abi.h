/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract of the NAT engine: limits, enums, keys and values of its maps,
 * configuration. What user space or a pinned map of another version sees is here
 * and begins with nat_; a change of any of it raises NAT_ABI. No code.
 *
 * Addresses and ports in shared structs are in network order, addresses as
 * struct nat_addr, so that Go sees octets and not an integer of unknown order.
 * Time is counted in ticks of 2^20 ns (1.05 ms) of CLOCK_MONOTONIC, 32 bits wide:
 * differences are right for 26 days, and every stored tick is looked at sooner.
 */
#ifndef NATKIT_NAT_H
#define NATKIT_NAT_H

#include <linux/types.h>

enum nat_limit {
	NAT_ABI = 13, /* number of this contract */
	NAT_TICK_SHIFT = 20,
	NAT_MAX_LINKS = 255,       /* interfaces that packets come in or leave by */
	NAT_MAX_ADDRESSES = 65536, /* indices of external addresses, struct nat_address */
	NAT_MAX_POOLS = 254,       /* pools and masquerading links, from 1 */
	NAT_MAX_RULES = 1 << 20,
	NAT_GENERATIONS = 2, /* one in use, one being filled */
	NAT_PORTS = 65536,
	NAT_WORDS = NAT_PORTS / 64,
	NAT_SUMMARY = NAT_WORDS / 64,
	NAT_MAX_CLASSES = 256,     /* of subscribers */
	NAT_GRANULES = NAT_WORDS,  /* of an address: port blocks consist of 64 ports each */
	NAT_SUBSCRIBER_BLOCKS = 8, /* that a subscriber may have: the first, and extra ones */
	NAT_MAX_FRAGMENTS = 16384,
	NAT_FLOW_POOL_SHIFT = 21,
	NAT_MAX_LEASES = 65536, /* explicit mappings */
	NAT_LEASE_FILTERS = 8,  /* of one */
	NAT_DEAD_TICKS = 2000,  /* between the end of a session and the reuse of its memory */
};

/* The side a packet comes from. Part of every flow key: a packet from outside with a spoofed
 * internal source never meets the flow of the real host. BOTH is for links only, of one-armed
 * gateways: there the side follows from each packet's source (flow_side). */
enum nat_side { NAT_INSIDE, NAT_OUTSIDE, NAT_BOTH };

/* What shares a space of port numbers. UDP-Lite lives in UDP's, ICMP queries use
 * their identifier, everything else has no ports and is translated by address. */
enum nat_class { NAT_TCP, NAT_UDP, NAT_ICMP, NAT_PORT_CLASSES, NAT_OTHER = NAT_PORT_CLASSES };

/* RFC 4787 section 4.1 and 5. */
enum nat_mapping_mode { NAT_ENDPOINT_INDEPENDENT, NAT_ADDRESS_AND_PORT_DEPENDENT };
enum nat_filtering_mode {
	NAT_FILTER_ENDPOINT_INDEPENDENT,
	NAT_FILTER_ADDRESS,
	NAT_FILTER_ADDRESS_AND_PORT,
};

/* Which time-out a flow is under: an index into nat_config.timeouts. */
enum nat_timeout {
	NAT_TIMEOUT_UDP,
	NAT_TIMEOUT_TCP_OPENING,     /* SYN of one side only */
	NAT_TIMEOUT_TCP_ESTABLISHED, /* SYN of both sides */
	NAT_TIMEOUT_TCP_CLOSING,     /* FIN of both sides */
	NAT_TIMEOUT_TCP_RESET,       /* RST seen: RFC 7857 section 2.2 */
	NAT_TIMEOUT_ICMP,
	NAT_TIMEOUT_OTHER,
	NAT_TIMEOUT_FRAGMENT,
	NAT_TIMEOUT_PORT_HOLD_DOWN, /* RFC 6888 REQ-8: how long a freed port is in hold-down */
	NAT_TIMEOUTS,
};

/*
 * What the engine did with a packet it did not simply translate; the index of its
 * counter in nat_stats. A drop is counted once, where its verdict is given.
 */
enum nat_reason {
	/* not ours: to the stack, untouched */
	NAT_PASS_NOT_IPV4,
	NAT_PASS_NO_RULE,
	NAT_PASS_EXCLUDED,
	NAT_PASS_LOCAL,     /* for the gateway itself */
	NAT_PASS_TTL,       /* outbound: the stack sends the ICMP error */
	NAT_PASS_TOO_BIG,   /* outbound with DF, likewise */
	NAT_PASS_NO_ROUTE,  /* outbound, likewise */
	NAT_PASS_MULTICAST, /* and broadcast */
	NAT_PASS_TO_TC,     /* XDP can't finish it, tc will */
	/* translated */
	NAT_TRANSLATED_IN,
	NAT_TRANSLATED_OUT,
	NAT_CREATED, /* sessions */
	NAT_EXPIRED,
	NAT_MAPPED, /* mappings made */
	NAT_UNMAPPED,
	NAT_HAIRPINNED,
	NAT_MSS_CLAMPED,
	NAT_ICMP_TRANSLATED, /* errors, with the packet inside */
	NAT_ICMP_SENT,       /* errors made by the engine */
	NAT_FRAGMENT_HELD,   /* fragments kept until their first one comes */
	/* drops */
	NAT_DROP_MALFORMED,    /* lengths that contradict each other, a truncated header */
	NAT_DROP_BAD_CHECKSUM, /* of an ICMP error or the IPv4 header inside it */
	NAT_DROP_SPOOFED,      /* a source that is not where the packet came from, land */
	NAT_DROP_FILTERED,     /* mapping exists, this sender may not use it */
	NAT_DROP_NO_MAPPING,   /* to a pool address that nothing maps */
	NAT_DROP_NO_SESSION,   /* an ICMP error about a packet we did not translate; TCP that opens
				  nothing */
	NAT_DROP_NO_PORT,      /* every port of the address is in use or in hold-down */
	NAT_DROP_NO_ADDRESS,   /* every address of a pool without ports is in use */
	NAT_DROP_SESSIONS_FULL,
	NAT_DROP_MAPPINGS_FULL,
	NAT_DROP_SOURCE_LIMIT, /* the subscriber has as many sessions as it may have */
	NAT_DROP_PORT_LIMIT,   /* likewise ports, or port blocks */
	NAT_DROP_RATE_LIMIT,   /* likewise new sessions in a time */
	NAT_DROP_NO_BLOCK,     /* the subscriber's address has no port block left */
	NAT_DROP_SOURCES_FULL,
	NAT_DROP_TTL,     /* inbound: the engine sends the ICMP error */
	NAT_DROP_TOO_BIG, /* inbound with DF: likewise. Without it tc fragments */
	NAT_DROP_NO_ROUTE,
	NAT_DROP_UNSUPPORTED, /* a protocol or ICMP type that can't be translated by this rule */
	NAT_DROP_FRAGMENT,    /* of a datagram whose first fragment is unknown */
	NAT_DROP_FRAGMENTS_FULL,
	NAT_DROP_RACE,    /* lost a race against another CPU or GC; the sender retransmits */
	NAT_DROP_REWRITE, /* a helper refused to write; cannot happen */
	NAT_DROP_BYPASS,  /* cannot happen: a rule of the program's own tables is missing */
	NAT_REASONS,
};

struct nat_addr {
	__u8 octet[4];
} __attribute__((aligned(4)));

/*
 * A flow is one direction of a session; a session is two flows. The key is what
 * the packet looks like when it arrives. ICMP queries have their identifier in
 * sport and 0 in dport, the replies the other way round; protocols without ports
 * have zeros.
 *
 * Where subscribers are told apart by their interface as well, each inside interface is a zone,
 * with the number of its link plus 1; outside, and for other rules, the zone is 0.
 */
struct nat_flow_key {
	struct nat_addr src, dst;
	__be16 sport, dport;
	__u8 protocol;
	__u8 side; /* enum nat_side */
	__u8 zone; /* that the packet comes from */
	__u8 link; /* of a packet 0; of nat_flow the link that its packets must come from, plus 1,
		      0 any of the side; but from outside, or from a zone, the zone that they go
		      to (zone_to) */
};

/*
 * Bits of nat_flow.state. The *owner* is the flow of the packet that opened the
 * session; only its word decides over life, and TCP bits are gathered there.
 * MAPPED, PORT, SOURCE, FILTER and POOL are the reservation of the internal endpoint that
 * this direction comes from: an outbound session's are in the owner's word, an
 * inbound one's in its peer's, hairpin has both. Changed by compare-and-exchange only.
 */
enum nat_flow_state {
	NAT_FLOW_TIMEOUT = 0x0000000f, /* enum nat_timeout */
	NAT_FLOW_OWNER = 0x00000010,
	NAT_FLOW_PEER_OUTSIDE = 0x00000020, /* side of the other flow's key */
	NAT_FLOW_MAPPED =
		0x00000040,         /* holds a reference on a mapping (EIM, NAPT or dynamic 1:1) */
	NAT_FLOW_PORT = 0x00000080, /* owns an external port without a mapping (APDM) */
	NAT_FLOW_SOURCE = 0x00000100, /* counted in nat_source */
	NAT_FLOW_FILTER =
		0x00000200, /* holds a reference on a filter entry (address-dependent filtering) */
	NAT_FLOW_OUTBOUND = 0x00000400, /* this direction leaves an internal host: it refreshes (RFC
					   4787 REQ-6) */
	NAT_FLOW_HAIRPIN = 0x00000800,
	NAT_FLOW_CLAMP = 0x00001000, /* clamp MSS of SYNs */
	NAT_FLOW_WHOLE = 0x00004000, /* the mapping is of a whole address (dynamic 1:1) */
	NAT_FLOW_RETURNS =
		0x00008000, /* its packets come back in after translation: see flow_hairpin */
	NAT_FLOW_MASQUERADE = 0x00002000, /* external address may change: see hop_checked */
	NAT_FLOW_TCP_SYN_OWNER = 0x00010000,
	NAT_FLOW_LEASED = 0x00010000, /* in the peer's word: a lease keeps the session */
	NAT_FLOW_TCP_SYN_PEER = 0x00020000,
	NAT_FLOW_TCP_FIN_OWNER = 0x00040000,
	NAT_FLOW_TCP_FIN_PEER = 0x00080000,
	NAT_FLOW_TCP_RST = 0x00100000,
	NAT_FLOW_POOL = 0x1fe00000, /* of what it holds; NAT_FLOW_POOL_SHIFT */
	NAT_FLOW_MADE = 0x20000000, /* all of it is written, and both keys lead to the session */
	NAT_FLOW_DEAD = 0x40000000, /* expired; may be revived until GONE */
	NAT_FLOW_GONE = 0x80000000, /* being removed: as if not there */
};

/*
 * 64 bytes, one cache line: all that a packet reads of a session, and writes, is its own
 * direction's.
 *
 * hop holds the next hop in one word, so that it is read and replaced whole: the
 * low 48 bits are the neighbour's MAC as it lies in memory, the high 16 the index
 * of the link it is behind plus 1; 0 is none yet. After a second (hop_checked) a packet of the flow
 * looks up the FIB again and, for a masquerading flow, whether the address is still ours.
 * hop_checked comes round after 68 s: it counts only while no second has gone by without a packet
 * (flow_stale).
 */
struct nat_flow {
	struct nat_flow_key key;
	struct nat_addr src, dst; /* what the packet becomes */
	__be16 sport, dport;
	__u32 state; /* enum nat_flow_state */
	__u64 hop;
	__u64 bytes;       /* of IPv4 */
	__u32 packets;     /* the low 32 bits: nat_flow_rest */
	__u32 seen;        /* ticks: last packet of this direction */
	__u32 other;       /* number of the session's other flow */
	__u16 mtu;         /* of the egress interface, 0 unknown */
	__u16 hop_checked; /* ticks */
};

/* What packets do not need of a flow, by its number. */
struct nat_flow_rest {
	__u32 rule;    /* owner: nat_rule.id that made the session. Peer: index of the external
			  address of the owner's source */
	__u32 created; /* owner: ticks. Peer: how often bit 31 of the peer's packets (high half) and
			  of the owner's (low half) has changed: GC looks more often than it can */
};

enum nat_bucket_limit { NAT_BUCKET_ENTRIES = 7 };

/* A cache line of a hash table, see table.h. */
struct nat_bucket {
	__u32 lock;
	__u32 reach; /* how many buckets further an entry of this one may be */
	__u64 entries[NAT_BUCKET_ENTRIES];
};

/* RFC 4787 REQ-1: an internal endpoint, which has one external endpoint for as long as its
 * mapping lives. */
struct nat_mapping_key {
	struct nat_addr addr;
	__be16 port;
	__u8 class; /* enum nat_class; NAT_OTHER: the whole address (dynamic one-to-one) */
	__u8 pool;
	__u8 zone;
	__u8 zero[3];
};

enum nat_refs {
	NAT_REFS_COUNT = 0x00ffffff,
	NAT_REFS_FILTERING = 0x03000000, /* enum nat_filtering_mode << 24 */
	NAT_REFS_LEASED = 0x04000000, /* has been held by a lease: `leases` has whom it lets in */
	NAT_REFS_AGAIN =
		0x10000000, /* in use again since it was queued: its hold-down starts again */
	NAT_REFS_QUEUED =
		0x40000000,         /* is in mapping_queue: its port is in hold-down, or will be */
	NAT_REFS_GONE = 0x80000000, /* being removed: as if not there */
};

/*
 * One external port of one class, or a whole address: which internal endpoint has it. Index: class
 * * (ports of the address) + port - port_first. The first eight bytes are written whole, by whoever
 * holds the port's bit.
 *
 * refs counts the sessions of a mapping. Without NAT_REFS_GONE it is in mapping_table, and
 * only then: so a reference that could be taken is on a mapping, though perhaps on
 * another one than the slot had a moment before. Who takes one looks at the endpoint again.
 */
struct nat_slot {
	struct nat_addr addr;
	__be16 port;
	__u8 pool;
	__u8 used;  /* 0 free, enum nat_slot_use */
	__u32 refs; /* enum nat_refs */
	__u8 held;  /* enum nat_slot_held; written by who takes the port, before others know of it
		     */
	__u8 zone;  /* likewise: of addr */
	__u16 zero;
};

/* What a port that is taken or in hold-down counts against, until it is free again. */
enum nat_slot_held {
	NAT_HELD_COUNTED = 1,  /* nat_source.use of the subscriber of addr */
	NAT_HELD_IN_BLOCK = 2, /* nat_granule.refs of its block; nat_blocks.ports has its bit */
	NAT_HELD_DOWN = 4,     /* the session that had it without a mapping has ended */
};

/* An entry of mapping_table is the id of a slot: index of the address, class and port. */
enum nat_mapping_value {
	NAT_MAPPING_CLASS_SHIFT = 16,
	NAT_MAPPING_ADDRESS_SHIFT = 18,
};

enum nat_slot_use { NAT_SLOT_FREE, NAT_SLOT_MAPPING, NAT_SLOT_SESSION };

/* Free external ports of one address and class: bit set = free. summary has a bit
 * for each word that may have one. Ports outside the pool's range, reserved by port
 * forwards or bound by sockets at start are never set. */
struct nat_ports {
	__u64 summary[NAT_SUMMARY];
	__u64 words[NAT_WORDS];
	__u64 free; /* how many, kept by atomic addition; for status and the choice of an address */
};

/* An external address. Index is for life: mappings hold it. */
enum nat_address_flag {
	NAT_ADDRESS_OWNED = 1,      /* the gateway's own: what nothing maps is the stack's */
	NAT_ADDRESS_MASQUERADE = 2, /* follows the address of link */
	NAT_ADDRESS_STATIC = 4,     /* belongs to static rules only: no ports to give */
	NAT_ADDRESS_LEAVING = 8,    /* removed from the rules: nothing new */
	NAT_ADDRESS_DRAINING = 16,  /* no port is given any more; mappings that there are go on */
};

struct nat_address {
	struct nat_addr addr;
	__u16 flags;
	__u16 link;                   /* index plus 1 of the link it is on, 0 none */
	__u16 port_first, port_count; /* host order; count 0 = no ports; 65536 does not occur: port
					 0 is never given */
	__u8 pool;
	/* Ports are given in blocks: the order of the first of a subscriber plus 1 (0: no blocks)
	 * and of extra ones (enum nat_block_id), and how many extra ones it may have. */
	__u8 block, block_extra, block_more;
};

/* A port block, as a subscriber has it: index of the address, first granule, order plus 1. Of
 * order n it is 1 << n granules, aligned to its size, so it lies in one word of nat_blocks.free. */
enum nat_block_id {
	NAT_BLOCK_ORDER = 0x000f,
	NAT_BLOCK_GRANULE_SHIFT = 4,
	NAT_BLOCK_ADDRESS_SHIFT = 16,
	NAT_BLOCK_ORDERS = 7, /* 64 to 4096 ports */
};

/* 64 ports of an external address, of all classes. The first one of a block says whose that is, and
 * refs counts the block's ports that are in use or in hold-down. */
struct nat_granule {
	struct nat_addr addr; /* of the subscriber */
	__u32 refs;           /* enum nat_refs */
	__u64 since_ns;       /* CLOCK_MONOTONIC */
	__u8 pool;
	__u8 order;    /* of the block */
	__u8 used;     /* 1: is the first of a block */
	__u8 computed; /* 1: that block is its owner's by nat_computed */
	__u8 zone;     /* of the subscriber */
	__u8 zero[3];
};

/* The port blocks of an external address. A port's bit is here or in free_ports: in that of an
 * address that had no blocks before, until all of its granule's are free. */
struct nat_blocks {
	__u64 free[NAT_GRANULES / 64]; /* granules in no block */
	__u64 kept[NAT_GRANULES / 64]; /* those of computed blocks: others get none of them */
	__u64 count; /* how many are free; for status and the choice of an address */
	struct nat_ports ports[NAT_PORT_CLASSES];
	__u64 given[NAT_PORT_CLASSES][NAT_WORDS]; /* ports that there are for blocks */
	struct nat_granule granules[NAT_GRANULES];
};

/* A subscriber in a pool: an internal host, or all of a prefix (nat_control.subscriber_hosts). It
 * has one external address (RFC 4787 REQ-2, paired pooling), and is there for as long as
 * it has sessions or ports. */
struct nat_source_key {
	struct nat_addr addr;
	__u8 pool;
	__u8 zone;
	__u16 zero;
};

/* In place of a pool: the host's sessions by rules that send them to it, and those that it opens
 * where a map gives its address. Only their sessions count. */
enum nat_pool {
	NAT_POOL_PUBLISHED = 0,
	NAT_POOL_MAP = 255,
};

enum nat_use {
	NAT_USE_PORT_SHIFT = 28,
	NAT_USE_COUNT = 0x0fffffff, /* sessions, and ports above them, those in hold-down too */
};

#define NAT_USE_GONE (1ULL << 63) /* being removed: as if not there */

/* What a subscriber was refused for. */
enum nat_refusal {
	NAT_REFUSED_SESSIONS,
	NAT_REFUSED_PORTS,
	NAT_REFUSED_RATE,
	NAT_REFUSED_BLOCK,
	NAT_REFUSALS,
};

struct nat_source {
	struct nat_addr addr; /* repeated, to be compared by who takes a reference */
	__u8 pool;
	__u8 placed;      /* 1: address is chosen */
	__u16 address;    /* index; of no meaning for masquerade */
	__u64 use;        /* enum nat_use; changed by compare-and-exchange */
	__u64 rate_ns;    /* when its bucket is full again: nat_limits */
	__u64 since_ns;   /* CLOCK_MONOTONIC: when it was made */
	__u32 generation; /* that class is of, plus 1: 0 is none */
	__u16 class;      /* of sub_classes, 0 nat_config.limits */
	__u8 zone;        /* repeated, like addr */
	__u8 zero;
	__u32 refused[NAT_REFUSALS];         /* packets */
	__u32 blocks[NAT_SUBSCRIBER_BLOCKS]; /* enum nat_block_id, 0 none */
};

/* What a subscriber of a class may have; 0 is no limit. New sessions that it opens
 * itself: one in interval_ns, and as many at once as burst_ns has room for. */
struct nat_limits {
	__u32 sessions, ports;
	__u64 interval_ns;
	__u64 burst_ns;
};

/*
 * Port blocks that follow from the rule file alone (RFC 7422). A subscriber of a pool has a
 * number n, `number` more than what its address is without the bits of its hosts. Its blocks are of
 * the address n % count of the pool, and there in the places n / count, n / count + rows and so on.
 */
struct nat_computed_key {
	__u32 prefixlen; /* 32 pool, in network order, 32 address */
	__be32 pool;
	struct nat_addr addr;
};

struct nat_computed {
	__u32 number;
	__u32 first, count; /* index of the pool's first address, and how many it has */
	__u16 granule;      /* of the first place */
	__u16 rows;
	__u8 hosts;  /* bits of an address that tell one subscriber's hosts apart */
	__u8 order;  /* of the blocks */
	__u8 blocks; /* of a subscriber that are computed */
	__u8 zero;
};

/* A filter entry, of address-dependent filtering: this external endpoint has sent to that
 * address. */
struct nat_filter_key {
	struct nat_addr remote;
	__u16 address; /* index */
	__be16 port;
	__u32 class;
};

struct nat_filter_entry {
	struct nat_filter_key key; /* repeated, as in nat_source */
	__u32 refs;                /* enum nat_refs */
};

/*
 * A lease is an explicit mapping: an internal endpoint keeps its mapping until a time, without
 * packets. remote: only that remote endpoint is let in by it, and the session with it is kept too
 * (PCP's PEER); 0 is none (MAP).
 */
struct nat_lease_key {
	struct nat_mapping_key internal;
	struct nat_addr remote;
	__be16 remote_port;
	__u16 zero;
};

/* Who is let in: an address and a port, each but for the bits that its mask lacks. */
struct nat_lease_filter {
	struct nat_addr addr, mask;
	__be16 port, port_mask;
	__u32 used; /* 0 or 1 */
};

enum nat_lease_flag {
	NAT_LEASE_FILTERED = 1, /* filters say who is let in */
	NAT_LEASE_WHOLE = 2,    /* the mapping is of a whole address */
	NAT_LEASE_SESSION = 4,  /* it holds no mapping: of a session with a port of its own, or of
				 * an address */
	NAT_LEASE_OPEN = 8,     /* made without a nonce (NAT-PMP) */
};

struct nat_lease {
	__u32 expires; /* ticks, never 0; 0: being removed. Changed by compare-and-exchange */
	__u32 flags;   /* enum nat_lease_flag */
	__u8 nonce[12];
	struct nat_addr external;
	__be16 external_port;
	__u16 address; /* index */
	__u32 serial;
	__u8 protocol;
	__u8 zero[7];
	struct nat_lease_filter filters[NAT_LEASE_FILTERS];
};

/* An entry of lease_queue. */
struct nat_lease_entry {
	struct nat_lease_key key;
	__u32 serial;
};

/* Written where leases are made and ended. */
struct nat_lease_state {
	__u32 leases; /* that there are */
	__u32 serial; /* the last one's */
	__u32 lost;   /* leases that ended before their time */
	__u32 zero;
};

/* Since when no lease was lost: natkit writes it, and compares lost. */
struct nat_lease_epoch {
	__u64 since_ns; /* CLOCK_BOOTTIME; 0: nobody has asked yet */
	__u32 lost;     /* of nat_lease_state, then */
	__u32 zero;
};

enum nat_lease_op { NAT_LEASE_MAKE = 1, NAT_LEASE_END };

enum nat_lease_request_flag {
	NAT_LEASE_STRICT = 1,  /* that external endpoint or none */
	NAT_LEASE_RESTATE = 2, /* filters replace those that there are */
	NAT_LEASE_NO_NONCE = 4,
};

/* What became of a request, beside the enum nat_reason for which a packet would have been
 * dropped. */
enum nat_lease_result {
	NAT_LEASE_DONE,
	NAT_LEASE_NONE = 128,   /* there is no such lease */
	NAT_LEASE_NONCE,        /* it is another client's */
	NAT_LEASE_EXTERNAL,     /* that external endpoint can't be given */
	NAT_LEASE_QUOTA,        /* the subscriber has as many as it may have */
	NAT_LEASE_STATIC,       /* a rule maps the host; external is by what */
	NAT_LEASE_UNTRANSLATED, /* no rule translates the host */
	NAT_LEASE_UNSUPPORTED,  /* protocol */
};

/* What natkit asks nat/lease.bpf.c for, and its answer. */
struct nat_lease_request {
	struct nat_lease_key key; /* without pool */
	__u8 nonce[12];
	__u32 in, out;            /* interfaces: ingress, and by which packets would leave */
	__u32 ticks;              /* until it expires */
	__u32 limit;              /* leases of a subscriber */
	struct nat_addr external; /* wanted, 0 any; then the one that it has */
	__be16 external_port;     /* likewise */
	__u8 protocol;
	__u8 op;       /* enum nat_lease_op */
	__u32 flags;   /* enum nat_lease_request_flag */
	__u32 result;  /* enum nat_lease_result */
	__u32 filters; /* how many */
	struct nat_lease_filter filter[NAT_LEASE_FILTERS];
};

/* An interface. Index is for life of the instance; ifindex 0: gone. */
enum nat_link_flag {
	NAT_LINK_INSIDE = 1,
	NAT_LINK_OUTSIDE = 2, /* with INSIDE: both sides */
	NAT_LINK_XDP = 4,     /* XDP may transmit here */
	NAT_LINK_NO_ETHERNET = 8,
	NAT_LINK_ZONE = 16, /* INSIDE, and a zone */
};

struct nat_link {
	__u32 ifindex;
	__u16 flags;
	__u16 mtu;
	__u8 mac[6];
	__u16 pool;    /* masquerading behind this link */
	__u16 address; /* index of the address it masquerades behind, plus 1; 0 none */
	__u16 zero;
};

/*
 * Rules. The compiler (package datapath) turns the rule file into look-ups whose
 * cost does not depend on how many there are:
 *
 *   excluded      class of the source and of the destination prefix (two LPM),
 *                 then the pair in a hash
 *   destination   exact (protocol, address, port) in a hash, then port ranges, then
 *                 prefixes, both in one LPM; at each step first bound to the ingress interface
 *   source        LPM of the address under (ingress, egress), (any, egress),
 *                 (ingress, any), (any, any)
 *
 * nat_config.lookups has the ones that this rule set needs at all.
 */
enum nat_rule_kind {
	NAT_RULE_NAPT = 1,   /* source: pool or masquerade, with ports */
	NAT_RULE_ONE_TO_ONE, /* source: pool without ports */
	NAT_RULE_MAP,        /* source or destination: prefix to prefix, with sessions */
	NAT_RULE_STATELESS,  /* likewise without */
	NAT_RULE_FORWARD,    /* destination: to targets */
};

enum nat_rule_flag {
	NAT_RULE_MASQUERADE = 1, /* address of the egress interface */
	NAT_RULE_CLAMP_MSS = 2,
	NAT_RULE_KEEP_PORT =
		4, /* FORWARD: the port of the packet stays; else to_port + (port - from_port) */
};

struct nat_rule {
	__u32 id; /* the same for the same rule in the next generation */
	__u8 kind, flags;
	__u8 mapping[NAT_PORT_CLASSES];   /* enum nat_mapping_mode */
	__u8 filtering[NAT_PORT_CLASSES]; /* enum nat_filtering_mode */
	__u8 prefix;                      /* MAP, STATELESS: length */
	__u8 pool;                        /* NAPT, ONE_TO_ONE */
	__u16 from_port;                  /* FORWARD: first of the range, host order */
	struct nat_addr to;               /* MAP, STATELESS: the other prefix */
	__u32 pool_first;                 /* index of the pool's first address */
	__u32 pool_count;
	__u32 targets;      /* FORWARD: first of target_count entries of nat_target */
	__u32 target_count; /* 1, or a prime for the balanced table (consistent hash) */
	__u8 zone;          /* MAP, STATELESS as a destination: of the hosts */
	__u8 zero[3];
};

struct nat_target {
	struct nat_addr addr;
	__be16 port; /* of from_port; 0 with KEEP_PORT */
	__u8 zone;
	__u8 zero;
};

struct nat_exact_key {
	struct nat_addr addr;
	__be16 port;
	__u8 protocol;
	__u8 zero;
	__u32 link; /* ingress interface, plus 1; 0 any */
};

enum nat_destination_kind {
	NAT_BY_RANGE = 1,
	NAT_BY_PREFIX,
	NAT_OWNED,
	NAT_INTERNAL_HOSTS,
	NAT_TARGETS,
};

/* bits: 16 link (plus 1, network order), 8 kind, 8 protocol (0 any), 32 address, 16 port.
 * NAT_BY_RANGE has the full address and a prefix of the port, NAT_BY_PREFIX a prefix of the
 * address. The others are no rules: NAT_OWNED is the outside prefix of a map, NAT_INTERNAL_HOSTS
 * the sources of a rule, where a link is on both sides, and NAT_TARGETS a target of a forward,
 * whatever they are bound to. */
struct nat_destination_key {
	__u32 prefixlen;
	__be16 link;
	__u8 kind, protocol;
	struct nat_addr addr;
	__be16 port;
	__u16 zero;
};

/* bits: 16 ingress interface, 16 egress interface (plus 1, 0 any, network order), 32 address */
struct nat_origin_key {
	__u32 prefixlen;
	__be16 in, out;
	struct nat_addr addr;
};

struct nat_prefix_key {
	__u32 prefixlen;
	struct nat_addr addr;
};

struct nat_exclude_key {
	__u32 src, dst; /* classes */
	__be16 port;    /* destination's; 0 any */
	__u8 protocol;  /* 0 any */
	__u8 zero;
};

enum nat_lookup {
	NAT_LOOKUP_EXCLUDE = 1,
	NAT_LOOKUP_EXCLUDE_PORT = 2,
	NAT_LOOKUP_EXACT = 4,
	NAT_LOOKUP_EXACT_LINK = 8,
	NAT_LOOKUP_RANGE = 16,
	NAT_LOOKUP_RANGE_LINK = 32,
	NAT_LOOKUP_PREFIX = 64, /* any protocol */
	NAT_LOOKUP_PREFIX_LINK = 128,
	NAT_LOOKUP_PREFIX_PROTOCOL = 256, /* bound to a protocol */
	NAT_LOOKUP_PREFIX_PROTOCOL_LINK = 512,
	NAT_LOOKUP_SOURCE = 1024,
	NAT_LOOKUP_SOURCE_IN = 2048,
	NAT_LOOKUP_SOURCE_OUT = 4096,
	NAT_LOOKUP_SOURCE_IN_OUT = 8192,
	NAT_LOOKUP_OWNED = 16384,    /* outside prefixes of maps */
	NAT_LOOKUP_CLASS = 32768,    /* classes of subscribers */
	NAT_LOOKUP_COMPUTED = 65536, /* blocks of subscribers */
	NAT_LOOKUP_TARGETS = 131072, /* of forwards */
};

enum nat_config_flag {
	NAT_CONFIG_INBOUND_REFRESH =
		1,             /* RFC 4787 REQ-6: packets from outside keep a session alive too */
	NAT_CONFIG_EVENTS = 2, /* somebody reads the events */
	NAT_CONFIG_PARITY = 4, /* RFC 4787 REQ-4 */
	NAT_CONFIG_COUNT_SESSIONS = 8, /* some class limits sessions: those from outside count */
	NAT_CONFIG_COUNT_PORTS = 16,   /* there are subscribers: their ports count */
	NAT_CONFIG_LEASES = 32,        /* explicit mappings may be made */
};

/* One generation's configuration, in a slot of the map config. */
struct nat_config {
	__u32 timeouts[NAT_TIMEOUTS]; /* ticks, by enum nat_timeout */
	__u32 lookups;                /* enum nat_lookup */
	__u32 flags;                  /* enum nat_config_flag */
	__u32 icmp_per_second;        /* errors the engine may send, of all CPUs together */
	struct nat_limits limits;     /* of subscribers in no class */
};

/* The one word that apply flips, what upgrade looks at, and what holds for the life of the
 * maps. What packets and GC write is in a cache line of its own. */
struct nat_control {
	__u32 abi;               /* NAT_ABI of who made the maps */
	__u32 generation;        /* config and rules in use: slot generation % NAT_GENERATIONS */
	__u64 seed[2];           /* of the hashes of table.h */
	__u32 flow_mask;         /* buckets of flow_table, less 1 */
	__u32 mapping_mask;      /* buckets of mapping_table, less 1 */
	__u32 sessions_max;      /* that there may be */
	__u32 mappings_max;      /* likewise */
	__be32 subscriber_hosts; /* bits of an internal address that tell one subscriber's hosts
				    apart */
	__u32 zones;             /* 1: inside interfaces are zones. natkit alone reads it */
	__u32 zero[4];
	__u32 gc_ran;               /* ticks: last run of GC */
	__u32 icmp_tick, icmp_sent; /* rate limit of errors: the second, and how many in it */
	__u32 zeros[13];
};

/* How much is in use. A line each: packets of all CPUs write. */
struct nat_counts {
	__u32 sessions; /* whose numbers were in use once; the others come from free_flows */
	__u32 zero[15];
	__u32 mappings; /* that there are */
	__u32 zeros[15];
};

struct nat_stats {
	__u64 packets[NAT_REASONS];
	__u64 bytes_in, bytes_out; /* translated, IPv4 bytes */
	__u64 gc_ns, gc_examined;  /* time GC took, sessions it looked at */
	__u64 events_lost;         /* no room in the ring buffer */
};

/* An entry of mapping_queue: a port in hold-down, of a mapping without sessions (which its slot
 * leads to) or of a session that had it without one. */
struct nat_hold_down {
	__u16 address;
	__be16 port;
	__u32 since; /* ticks, with enum nat_class in the low two bits */
};

/* A fragmented datagram whose first fragment was translated, or is excluded by its port. */
struct nat_fragment_key {
	struct nat_addr src, dst;
	__be16 id;
	__u8 protocol;
	__u8 side;
	__u8 zone;
	__u8 zero[3];
};

struct nat_fragment {
	struct nat_addr src, dst; /* what its later fragments become */
	__u32 seen;
	__be16 id;     /* what they are identified by then; 0: as they were */
	__u8 excluded; /* 1: its later fragments are passed to the stack as they came */
	__u8 again;    /* 1: noted again since it was queued */
	__u8 zone;     /* that they go to */
	__u8 zero[3];
};

enum nat_event_kind { NAT_EVENT_CREATE = 1, NAT_EVENT_DELETE, NAT_EVENT_REFUSED };

/* What natkit events shows. For a refusal only key and reason are set. */
struct nat_event {
	__u64 time_ns;            /* CLOCK_MONOTONIC */
	struct nat_flow_key key;  /* as the owner's packet arrived */
	struct nat_addr src, dst; /* as it left */
	__be16 sport, dport;
	__u32 rule;
	__u8 kind;   /* enum nat_event_kind */
	__u8 reason; /* enum nat_reason of a refusal */
	__u8 zone;   /* that it goes to */
	__u8 zero[5];
	__u64 packets[2], bytes[2]; /* of a deletion: owner's direction, the other */
};

/* What the log records; nat_log.record. */
enum nat_log_what {
	NAT_LOG_BLOCKS = 1,
	NAT_LOG_LOOSE = 2,    /* mappings of ports that are in no block */
	NAT_LOG_MAPPINGS = 4, /* all of them */
	NAT_LOG_SESSIONS = 8,
	NAT_LOG_DESTINATIONS = 16, /* of sessions */
	NAT_LOG_LIMITS = 32,       /* pools without a port left, subscribers that were refused */
	NAT_LOG_ASKED = 64,        /* by a natkit that reads it, not by the rule file */
};

enum nat_log_kind {
	NAT_LOG_KIND_NONE,
	NAT_LOG_KIND_MAPPING,
	NAT_LOG_KIND_SESSION,
	NAT_LOG_KIND_BLOCK,
};

enum nat_log_event { NAT_LOG_CREATED = 1, NAT_LOG_ENDED, NAT_LOG_EXHAUSTED, NAT_LOG_QUOTA };

enum nat_log_limit { NAT_LOG_POOLS = 256, NAT_LOG_EVENT_SHIFT = 4 };

/* A record of the log. */
struct nat_log_record {
	__u64 time_ns;  /* CLOCK_MONOTONIC */
	__u32 sequence; /* one more than that of the record before, by any CPU */
	__u8 what;      /* enum nat_log_kind, above it enum nat_log_event */
	__u8 zone;      /* of internal */
	__u8 protocol;  /* IP, 0 all; of a refusal enum nat_refusal or enum nat_reason */
	__u8 pool;
	struct nat_addr internal; /* of a block: the subscriber */
	struct nat_addr external;
	__be16 internal_port, external_port;
	__be16 last_port;        /* of a block */
	__be16 destination_port; /* of a session, if recorded */
	struct nat_addr destination;
	__u32 age; /* ticks since it began, 0 not known; of NAT_LOG_QUOTA how many refusals */
};

/* The state of the log. sequence and what follows is written by packets, in other lines. */
struct nat_log {
	__u32 record; /* enum nat_log_what */
	__u32 zero[15];
	__u32 sequence;     /* of the next record */
	__u32 quota_second; /* rate limit: which, and how many records of NAT_LOG_QUOTA in it */
	__u32 quota_records;
	__u32 zeros;
	__u64 lost;          /* records: the ring was full */
	__u64 lost_first_ns; /* when, CLOCK_MONOTONIC; natkit makes it 0 when it has recorded it */
	__u64 lost_last_ns;
	__u64 zeroes[3];
	__u32 exhausted[NAT_LOG_POOLS]; /* ticks: the last record of each pool */
};

#define NAT_ASSERT(condition) _Static_assert(condition, #condition)
NAT_ASSERT(sizeof(struct nat_flow_key) == 16);
NAT_ASSERT(sizeof(struct nat_flow) == 64);
NAT_ASSERT(sizeof(struct nat_flow_rest) == 8);
NAT_ASSERT(sizeof(struct nat_bucket) == 64);
NAT_ASSERT(sizeof(struct nat_control) == 128);
NAT_ASSERT(sizeof(struct nat_mapping_key) == 12);
NAT_ASSERT(sizeof(struct nat_slot) == 16);
NAT_ASSERT(sizeof(struct nat_source) == 88);
NAT_ASSERT(sizeof(struct nat_limits) == 24);
NAT_ASSERT(sizeof(struct nat_granule) == 24);
NAT_ASSERT(sizeof(struct nat_computed_key) == 12);
NAT_ASSERT(sizeof(struct nat_computed) == 20);
NAT_ASSERT(64 << (NAT_BLOCK_ORDERS - 1) == 4096);
NAT_ASSERT(NAT_GRANULES << NAT_BLOCK_GRANULE_SHIFT <= 1 << NAT_BLOCK_ADDRESS_SHIFT);
NAT_ASSERT(sizeof(struct nat_filter_key) == 12);
NAT_ASSERT(sizeof(struct nat_filter_entry) == 16);
NAT_ASSERT(sizeof(struct nat_address) == 16);
NAT_ASSERT(sizeof(struct nat_lease_key) == 20);
NAT_ASSERT(sizeof(struct nat_lease) == 168);
NAT_ASSERT(sizeof(struct nat_lease_request) == 196);
NAT_ASSERT(sizeof(struct nat_link) == 20);
NAT_ASSERT(sizeof(struct nat_rule) == 40);
NAT_ASSERT(sizeof(struct nat_destination_key) == 16);
NAT_ASSERT(sizeof(struct nat_origin_key) == 12);
NAT_ASSERT(sizeof(struct nat_fragment_key) == 16);
NAT_ASSERT(sizeof(struct nat_fragment) == 20);
NAT_ASSERT(NAT_MAX_LINKS <= 255); /* nat_flow_key.zone, link */
NAT_ASSERT(sizeof(struct nat_hold_down) == 8);
NAT_ASSERT(sizeof(struct nat_log_record) == 40);
NAT_ASSERT(sizeof(struct nat_log) == 128 + 4 * NAT_LOG_POOLS);
NAT_ASSERT(NAT_OTHER < 4);
NAT_ASSERT(NAT_TIMEOUTS <= NAT_FLOW_TIMEOUT + 1);

#endif
