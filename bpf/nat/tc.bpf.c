// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the tc hook: one program for each side, one for links of both, one for zones, and
// all for links with and without Ethernet.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_skb.h"
#include "nat/pipeline.h"

NAT_PROGRAM("tc", tc_inside, NAT_INSIDE, 0, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_outside, NAT_OUTSIDE, 0, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_both, NAT_BOTH, 0, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_zone, NAT_INSIDE, 1, NAT_ETHERNET)
NAT_PROGRAM("tc", tc_inside_raw, NAT_INSIDE, 0, NAT_RAW)
NAT_PROGRAM("tc", tc_outside_raw, NAT_OUTSIDE, 0, NAT_RAW)
NAT_PROGRAM("tc", tc_both_raw, NAT_BOTH, 0, NAT_RAW)
NAT_PROGRAM("tc", tc_zone_raw, NAT_INSIDE, 1, NAT_RAW)

char _license[] SEC("license") = "Dual BSD/GPL";
