// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"testing"

	"natkit/internal/diagnose/kconfig"
)

func TestKconfigText(t *testing.T) {
	var out bytes.Buffer
	for _, r := range []*kconfig.Report{
		{Kernel: "6.18.44", Source: "/proc/config.gz", Well: make([]kconfig.Line, 40)},
		{Source: "file", Lacks: []kconfig.Line{
			{Name: "NF_NAT", Kind: kconfig.Need, Set: "m", Reason: "address translation"},
			{Name: "NF_FLOW_TABLE", Kind: kconfig.Want, Value: "n", Set: "m", Reason: "packets of established flows go past the hooks and the routing, from device to device"},
		}, Spare: []kconfig.Line{
			{Name: "KASAN", Kind: kconfig.Debug, Value: "y", Set: "n", Reason: "each access to memory is checked"},
			{Name: "NF_CONNTRACK_FTP", Kind: kconfig.Spare, Value: "y", Set: "m", Reason: "a helper"},
			{Name: "INIT_ON_ALLOC_DEFAULT_ON", Kind: kconfig.Spare, Value: "y", Reason: "protection that costs"},
		}},
	} {
		if err := KconfigText(&out, r); err != nil {
			t.Fatal(err)
		}
		out.WriteString("--\n")
	}
	printed(t, "kconfig.txt", out.Bytes())
}
