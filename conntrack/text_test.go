// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"context"
	"fmt"
	"testing"
)

func BenchmarkReadText(b *testing.B) {
	var buf bytes.Buffer
	for i := range 100000 {
		fmt.Fprintf(&buf, "ipv4     2 tcp      6 %d TIME_WAIT src=192.168.%d.%d dst=192.168.0.96 sport=%d dport=8080 src=172.17.0.2 dst=192.168.0.2 sport=8080 dport=%d [ASSURED] mark=0 use=1\n",
			i%120, i>>8&255, i&255, 1024+i%60000, 1024+i%60000)
	}
	b.SetBytes(int64(buf.Len()))
	b.ReportAllocs()
	for b.Loop() {
		res, err := ReadText(context.Background(), bytes.NewReader(buf.Bytes()), Filter{}, func(*Flow) error { return nil }, func(e *LineError) { b.Fatal(e) })
		if err != nil || res.Entries != 100000 {
			b.Fatal(res, err)
		}
	}
	b.ReportMetric(100000*float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}
