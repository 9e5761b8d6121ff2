// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// The engine at the XDP hook: one program for each side, and one for links of both.
#include "nat/abi.h"
#include "nat/maps.h"
#include "lib/ctx_xdp.h"
#include "nat/pipeline.h"

NAT_PROGRAM("xdp", xdp_inside, NAT_INSIDE, NAT_ETHERNET)
NAT_PROGRAM("xdp", xdp_outside, NAT_OUTSIDE, NAT_ETHERNET)
NAT_PROGRAM("xdp", xdp_both, NAT_BOTH, NAT_ETHERNET)

char _license[] SEC("license") = "Dual BSD/GPL";
