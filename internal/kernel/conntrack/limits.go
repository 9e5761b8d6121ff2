// SPDX-License-Identifier: Apache-2.0

package conntrack

// The table's limits and what it takes of memory.

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Limits is how full the table is and how full it may get.
type Limits struct {
	Count   uint64 // entries of this namespace
	Max     uint64 // nf_conntrack_max: one number for the host, each namespace counts for itself
	Buckets uint64 // of the one hash of all namespaces
}

const sysctlDir = "/proc/sys/net/netfilter/"

// ReadLimits reads the limits in the calling thread's namespace.
func ReadLimits() (Limits, error) {
	var l Limits
	for _, v := range []struct {
		name string
		to   *uint64
	}{{"nf_conntrack_count", &l.Count}, {"nf_conntrack_max", &l.Max}, {"nf_conntrack_buckets", &l.Buckets}} {
		n, err := readNumber(sysctlDir + v.name)
		if errors.Is(err, os.ErrNotExist) && !loaded("/") {
			return Limits{}, fmt.Errorf("read conntrack limits: %w", errNotLoaded)
		}
		if err != nil {
			return Limits{}, fmt.Errorf("read conntrack limits: %w", err)
		}
		*v.to = n
	}
	return l, nil
}

func readNumber(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}
