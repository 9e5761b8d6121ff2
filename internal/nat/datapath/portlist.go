// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PortList is a set of ports, in order. As text, and so in JSON, it is what the kernel's
// own lists of ports are: "8080,9000-9010".
type PortList []uint16

// ParsePortList reads a list of ports and ranges.
func ParsePortList(text string) (PortList, error) {
	var l PortList
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		first, last, ok := strings.Cut(part, "-")
		if !ok {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || to < from {
			return nil, fmt.Errorf("list of ports %q: %q is no port or range", text, part)
		}
		for p := from; p <= to; p++ {
			l = append(l, uint16(p))
		}
	}
	return l.sorted(), nil
}

// With is l and more ports. It leaves l as it is.
func (l PortList) With(ports ...uint16) PortList { return slices.Concat(l, ports).sorted() }

// Without is l less some ports. It leaves l as it is.
func (l PortList) Without(ports ...uint16) PortList {
	less := PortList(ports).With()
	return slices.DeleteFunc(slices.Clone(l), func(p uint16) bool { _, found := slices.BinarySearch(less, p); return found })
}

func (l PortList) sorted() PortList {
	slices.Sort(l)
	return slices.Compact(l)
}

func (l PortList) String() string {
	var parts []string
	for i := 0; i < len(l); {
		j := i
		for j+1 < len(l) && l[j+1] == l[j]+1 {
			j++
		}
		if i == j {
			parts = append(parts, strconv.Itoa(int(l[i])))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", l[i], l[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ",")
}

func (l PortList) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalJSON reads what MarshalText writes, and the array of numbers that there was in
// its place before NAT_ABI 4.
func (l *PortList) UnmarshalJSON(data []byte) (err error) {
	var text string
	if json.Unmarshal(data, &text) == nil {
		*l, err = ParsePortList(text)
		return err
	}
	return json.Unmarshal(data, (*[]uint16)(l))
}
