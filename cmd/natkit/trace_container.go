// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/words/choice"
)

// container is a namespace by what its processes are part of: "docker web1", "pod shop/cart-5d8f".
type container struct {
	name  string
	place netns.Place
}

// is says whether people would call it so: by all of its name, or the last part of it.
func (c container) is(name string) bool {
	_, short, _ := strings.Cut(c.name, " ")
	_, pod, _ := strings.Cut(short, "/")
	return name != "" && (name == c.name || name == short || name == pod)
}

// containers are those with a network namespace of their own.
func containers() (out []container) {
	places, err := netns.All()
	if err != nil {
		return nil
	}
	for _, p := range places {
		if p.Ref == "" {
			continue
		}
		if owner := probe.OwnerOf(p.Processes); owner.Name != "" {
			out = append(out, container{owner.Name, p})
		}
	}
	return out
}

func containerNames() (names []string) {
	for _, c := range containers() {
		_, short, _ := strings.Cut(c.name, " ")
		names = append(names, short)
	}
	return names
}

// containerAddress is the address of a container, by its name: one of the family of the flow's other end.
func containerAddress(name string, other netip.Prefix) (netip.Prefix, error) {
	all := containers()
	var found []container
	for _, c := range all {
		if c.is(name) {
			found = append(found, c)
		}
	}
	switch {
	case len(found) > 1:
		var names []string
		for _, c := range found {
			names = append(names, fmt.Sprintf("%q", c.name))
		}
		return netip.Prefix{}, usagef("--container %s: it may be %s: give the whole name", name, strings.Join(names, " or "))
	case len(found) == 0:
		hint := "; `natkit doctor --all-netns` lists them"
		if near := choice.Nearest(name, containerNames()); near != "" {
			hint = "; did you mean " + near + "?"
		}
		return netip.Prefix{}, usagef("--container %s: no container with a network namespace of its own has that name%s", name, hint)
	}
	addresses, err := addressesAt(found[0].place.Ref)
	if err != nil {
		return netip.Prefix{}, err
	}
	return oneAddress(name, addresses, other)
}

// oneAddress is the first one of a container's addresses that may talk to the other end.
func oneAddress(name string, addresses []netip.Addr, other netip.Prefix) (netip.Prefix, error) {
	kind := "address"
	if other.IsValid() {
		kind = map[bool]string{true: "IPv4 address", false: "IPv6 address"}[other.Addr().Is4()]
		addresses = slices.DeleteFunc(addresses, func(a netip.Addr) bool { return a.Is4() != other.Addr().Is4() })
	}
	switch {
	case len(addresses) == 0:
		return netip.Prefix{}, fmt.Errorf("--container %s: it has no %s", name, kind)
	case len(addresses) > 1 && addresses[1].Is4() == addresses[0].Is4():
		var words []string
		for _, a := range addresses {
			words = append(words, a.String())
		}
		return netip.Prefix{}, usagef("--container %s: it has several addresses: choose one with --host: %s", name, strings.Join(words, ", "))
	}
	return netip.PrefixFrom(addresses[0], addresses[0].BitLen()), nil
}

// addressesAt are the addresses of a namespace that others can reach, IPv4 first.
func addressesAt(ref string) (out []netip.Addr, err error) {
	h, err := netns.Open(ref)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	err = h.Do(func() error {
		all, err := net.InterfaceAddrs()
		for _, a := range all {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
				out = append(out, p.Addr())
			}
		}
		return err
	})
	slices.SortStableFunc(out, func(a, b netip.Addr) int {
		if a.Is4() == b.Is4() {
			return 0
		}
		return map[bool]int{true: -1, false: 1}[a.Is4()]
	})
	return out, err
}
