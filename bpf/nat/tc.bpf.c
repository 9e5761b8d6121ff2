// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the tc hook: one program for each side, one for links of both, and all for
// links with and without Ethernet.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/pipeline.h"

NAT_PROGRAM("tc", tc_inside, NAT_INSIDE, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_outside, NAT_OUTSIDE, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_both, NAT_BOTH, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_inside_raw, NAT_INSIDE, NAT_RAW)
NAT_PROGRAM("tc", tc_outside_raw, NAT_OUTSIDE, NAT_RAW)
NAT_PROGRAM("tc", tc_both_raw, NAT_BOTH, NAT_RAW)

char _license[] SEC("license") = "Dual BSD/GPL";
