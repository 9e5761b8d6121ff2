// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"strings"
	"testing"
)

// Whatever the numbers are, no finding shows a part that is more than its whole without a word.
func TestPartsOfWholes(t *testing.T) {
	explained := 0
	for code, change := range examples {
		for _, device := range []uint64{0, 1, 7, 1 << 40} {
			s := gateway()
			change(s)
			for i := range s.Interfaces {
				s.Interfaces[i].RxPackets = min(s.Interfaces[i].RxPackets, device)
			}
			if n, ok := s.Counters["Ip.ForwDatagrams"]; ok {
				s.Counters["Ip.ForwDatagrams"] = min(n, device)
			}
			for _, f := range Judge(s) {
				for _, whole := range f.Evidence {
					for _, part := range f.Evidence {
						n, ok1 := leading(part.Value)
						of, ok2 := leading(whole.Value)
						if !ok1 || !ok2 || !isPart(part.What) || !isWhole(whole.What) || n <= of {
							continue
						}
						if explained++; !strings.HasSuffix(whole.Value, apart) {
							t.Errorf("%s, %s: %s %s, and %s %s", code, f.Code, part.What, part.Value, whole.What, whole.Value)
						}
					}
				}
			}
		}
	}
	if explained == 0 {
		t.Error("no example has a part and its whole")
	}
}
