// SPDX-License-Identifier: Apache-2.0

package plural

import "testing"

func TestCount(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{Count(1, "rule"), "1 rule"}, {Count(0, "rule"), "0 rules"}, {Count(uint64(2), "rule"), "2 rules"},
		{Count(1, "entry"), "1 entry"}, {Count(2, "entry"), "2 entries"},
		{Count(2, "way"), "2 ways"}, {Count(2, "address"), "2 addresses"}, {Count(2, "switch"), "2 switches"},
		{Count(3, "set of rules", "sets of rules"), "3 sets of rules"},
		{Noun(-1, "packet"), "packets"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}
