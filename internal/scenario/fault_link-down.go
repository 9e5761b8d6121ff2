// SPDX-License-Identifier: Apache-2.0

package scenario

var linkDownFault = Fault{
	Code:    "link-down",
	Healthy: "web traffic through the gateway",
	Broken:  "the gateway's interface to the clients is set down",
	Cured:   "it is set up",

	topology: "routed",
	healthy:  browse,
	broken:   shell("ip link set dev eth1 down"),
	cure:     follow("ip link set"),
}
