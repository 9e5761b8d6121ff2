// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"hash/fnv"
	"strconv"
)

// RuleID is the number by which sessions say which rule made them: a hash of its text, so
// that a rule keeps it from one file to the next. It has one form everywhere, in text, JSON
// and flags: eight hexadecimal digits.
type RuleID uint32

func (id RuleID) String() string { return fmt.Sprintf("%08x", uint32(id)) }

// MarshalText gives the eight digits.
func (id RuleID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads what MarshalText gives.
func (id *RuleID) UnmarshalText(text []byte) (err error) {
	*id, err = ParseRuleID(string(text))
	return err
}

// ParseRuleID reads a rule's id. Zeros in front may be left out.
func ParseRuleID(s string) (RuleID, error) {
	n, err := strconv.ParseUint(s, 16, 32)
	if err != nil || len(s) > 8 {
		return 0, fmt.Errorf("%q is not a rule's id: want its hexadecimal digits, as `natkit rules` lists them (1f3a9c02)", s)
	}
	return RuleID(n), nil
}

// RuleIDs are those of the file's rules, by index. Of rules whose texts have the same hash
// the later one takes the next number that is free.
func (f *File) RuleIDs() []RuleID {
	ids := make([]RuleID, len(f.Rules))
	taken := make(map[RuleID]bool, len(f.Rules))
	for i := range f.Rules {
		h := fnv.New32a()
		h.Write([]byte(f.Rules[i].String()))
		id := RuleID(h.Sum32())
		for taken[id] {
			id++
		}
		taken[id], ids[i] = true, id
	}
	return ids
}
