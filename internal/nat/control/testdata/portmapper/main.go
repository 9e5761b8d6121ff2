// SPDX-License-Identifier: Apache-2.0

// portmapper asks a gateway for a mapping of a UDP port as a Tailscale node does, by its own code, by
// PCP, NAT-PMP or the one that it chooses. It prints what the gateway has ("PCP=true PMP=true") and the external endpoint, holds the
// mapping until its input ends, and gives it back. scripts/test-collectors.sh builds it.
//
//	portmapper pcp|pmp|pcp,pmp GATEWAY ADDRESS PORT
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"tailscale.com/net/netmon"
	"tailscale.com/net/portmapper"
	"tailscale.com/util/eventbus"
)

func main() {
	gateway, self := netip.MustParseAddr(os.Args[2]), netip.MustParseAddr(os.Args[3])
	port, err := strconv.ParseUint(os.Args[4], 10, 16)
	if err != nil {
		log.Fatal(err)
	}
	services := strings.Split(os.Args[1], ",")
	c := portmapper.NewClient(portmapper.Config{
		EventBus: eventbus.New(), Logf: log.Printf, NetMon: netmon.NewStatic(),
		DebugKnobs: &portmapper.DebugKnobs{
			VerboseLogs:     true,
			DisableUPnPFunc: func() bool { return true },
			DisablePCPFunc:  func() bool { return !slices.Contains(services, "pcp") },
			DisablePMPFunc:  func() bool { return !slices.Contains(services, "pmp") },
		},
	})
	c.SetGatewayLookupFunc(func() (netip.Addr, netip.Addr, bool) { return gateway, self, true })
	c.SetLocalPort(uint16(port))
	has, err := c.Probe(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("PCP=%t PMP=%t\n", has.PCP, has.PMP)
	for begin := time.Now(); time.Since(begin) < 10*time.Second; time.Sleep(50 * time.Millisecond) { // it calls nobody when it has one
		if external, ok := c.GetCachedMappingOrStartCreatingOne(); ok {
			fmt.Println(external)
			_, _ = io.Copy(io.Discard, os.Stdin)
			if err := c.Close(); err != nil {
				log.Fatal(err)
			}
			return
		}
	}
	log.Fatal("no mapping")
}
