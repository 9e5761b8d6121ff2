// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the XDP hook: one program for each side, one for links of both, one for
// zones.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_xdp.h"
#include "nat/pipeline.h"

NAT_PROGRAM("xdp", xdp_inside, NAT_INSIDE, 0, NAT_ETHERNET)
NAT_PROGRAM("xdp", xdp_outside, NAT_OUTSIDE, 0, NAT_ETHERNET)
NAT_PROGRAM("xdp", xdp_both, NAT_BOTH, 0, NAT_ETHERNET)
NAT_PROGRAM("xdp", xdp_zone, NAT_INSIDE, 1, NAT_ETHERNET)

char _license[] SEC("license") = "Dual BSD/GPL";
