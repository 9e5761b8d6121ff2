// SPDX-License-Identifier: Apache-2.0

package report

import (
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
)

// A port that may not be given again yet is in hold-down, as in all other outputs.
func TestMappingInHoldDown(t *testing.T) {
	var b strings.Builder
	m := &rulefile.Mapping{HoldDown: true}
	m.Inside.AddrPort, m.Outside.AddrPort = netip.MustParseAddrPort("10.0.0.2:4000"), netip.MustParseAddrPort("203.0.113.1:4000")
	if err := NATMappingText(&b, m); err != nil || !strings.Contains(b.String(), ", in hold-down\n") {
		t.Errorf("%v, %q", err, b.String())
	}
}
