/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Zones: where subscribers are told apart by their interface and their address, each inside
 * interface is one, and hosts of several may have the same address. The number of a zone is that
 * of its link, plus 1; 0 is outside, and everywhere in an engine without zones. It is a part of
 * every key that has an internal address.
 *
 *   from inside    the ingress interface is the packet's zone (pipeline.h)
 *   from outside   a flow, a slot or a rule says what zone the packet goes to
 *   a route there  is one that leaves by the zone's interface (lib/route.h)
 */
#ifndef NATKIT_ZONE_H
#define NATKIT_ZONE_H

#include "nat/abi.h"

/* The zone that a flow's packets go to. */
static __always_inline __u8 zone_to(const struct nat_flow *flow)
{
	return flow->key.side == NAT_OUTSIDE || flow->key.zone ? flow->key.link : 0;
}

#endif
