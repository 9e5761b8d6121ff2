/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What every file uses: the verdict of a step, words of addresses, checksums, the clock,
 * the hash that balances.
 */
#ifndef NATKIT_BASE_H
#define NATKIT_BASE_H

#include "nat/abi.h"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

/* A function that stays one: the program is smaller, and its stack is freed between
 * two calls. Not every object that includes a header calls all that is in it. The verifier
 * follows its paths again at every call on every path. */
#define SUBPROGRAM static __noinline __attribute__((unused))

/* The same, and checked by the verifier once by itself instead of at every call, for
 * any arguments: what has loops or is called on many paths must be one (TestVerifierWork).
 * Its pointers may be null; to Linux 6.1 they are no key or value of a map, and all that they
 * point at must be written. It must use all its arguments: clang passes anything for others. */
#define GLOBAL __noinline __attribute__((unused))

/* Makes the compiler forget what it knows of a number. clang leaves out a mask that
 * can't matter after a byte swap, of whose result the verifier knows nothing (Linux
 * 6.18: "invalid access to map value"). */
#define OPAQUE(number) asm volatile("" : "+r"(number))

/* What bpf_map_update_elem and table.h return; the kernel's headers for it are not for BPF. */
enum { E_TOO_BIG = -7, E_BUSY = -16, E_EXIST = -17 };

/* A step that doesn't end the packet; what ends it is an enum nat_reason. */
#define GO_ON (-1)

#define unlikely(condition) __builtin_expect(!!(condition), 0)

/* RFC 1624, equation 3: the checksum after a change that adds delta to its complement.
 * delta may be a sum of several. */
static __always_inline __u16 checksum_add(__u16 check, __u32 delta)
{
	__u32 sum = (__u16)~check + delta;

	sum = (sum & 0xffff) + (sum >> 16);
	return ~(sum + (sum >> 16));
}

/* The sum of the pseudo-header of TCP or UDP over IPv4, folded. Words as they lie in memory. */
static __always_inline __u16 checksum_pseudo(__u32 src, __u32 dst, __u8 protocol, __u32 bytes)
{
	__u32 sum = (src & 0xffff) + (src >> 16) + (dst & 0xffff) + (dst >> 16) +
		    bpf_htons(protocol) + bpf_htons(bytes);

	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/*
 * Length of a jiffy, and what to add to the jiffies since boot to get CLOCK_MONOTONIC, in
 * nanoseconds. Package datapath measures both before it loads a program (clock.go). With 0 the
 * clock is read by a helper, which takes a sixth of the time that a packet may.
 */
const volatile __u64 clock_jiffy_ns = 0;
const volatile __u64 clock_offset_ns = 0;

/* Ticks, see abi.h. */
static __always_inline __u32 clock_now(void)
{
	if (clock_jiffy_ns)
		return (bpf_jiffies64() * clock_jiffy_ns + clock_offset_ns) >> NAT_TICK_SHIFT;
	return bpf_ktime_get_coarse_ns() >> NAT_TICK_SHIFT;
}

static __always_inline __be32 addr_word(struct nat_addr addr)
{
	__be32 word;

	__builtin_memcpy(&word, &addr, sizeof(word));
	return word;
}

static __always_inline struct nat_addr addr_of(__be32 word)
{
	struct nat_addr addr;

	__builtin_memcpy(&addr, &word, sizeof(addr));
	return addr;
}

static __always_inline int addr_equal(struct nat_addr a, struct nat_addr b)
{
	return addr_word(a) == addr_word(b);
}

/* What changing one 16-bit word adds to the complement of a checksum over it, all as
 * they lie in memory (RFC 1624). */
static __always_inline __u32 delta_word(__u16 old, __u16 new)
{
	return (__u16)~old + (__u32) new;
}

static __always_inline __u32 delta_address(struct nat_addr old, struct nat_addr new)
{
	__u32 a = addr_word(old), b = addr_word(new);

	return delta_word(a, b) + delta_word(a >> 16, b >> 16);
}

/* Of the two zeros of one's complement the one that changes nothing. */
static __always_inline __u16 delta_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff ? 0 : sum;
}

/* delta_fold of a sum of 32-bit words. */
static __always_inline __u16 delta_fold_words(__u64 sum)
{
	return delta_fold((sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32));
}

/* Spreads addresses over the entries of a table. Package datapath has it too: the
 * finaliser of MurmurHash3 over the address as a number. */
static __always_inline __u32 addr_hash(struct nat_addr addr)
{
	__u32 h = bpf_ntohl(addr_word(addr));

	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ h >> 16;
}

#endif
