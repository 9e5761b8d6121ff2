// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

// tcpdump reads the capture: times, interfaces and packets are where it expects them.
func TestPcapng(t *testing.T) {
	ktest.Tool(t, "tcpdump")
	head := []byte{0x45, 0, 0, 40, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x0f, 0xa0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0}
	var out bytes.Buffer
	p, err := NewPcapng(&out, 1_700_000_000_000_000_000)
	if err != nil {
		t.Fatal(err)
	}
	packet := Packet{StartNS: 5_000, Steps: []Step{
		{Namespace: "client", Interface: "eth0", What: Sent, TimeNS: 5_000, Head: head, Length: 40},
		{Namespace: "gateway", Interface: "eth1", What: Routed},
		{Namespace: "gateway", Interface: "eth1", What: Received, TimeNS: 7_000, Head: head, Length: 1500},
	}}
	comment := func(s *Step) string { return "step: " + string(s.What) }
	if err := p.Packet(packet, comment, "end: dropped"); err != nil {
		t.Fatal(err)
	}
	if len(p.interfaces) != 2 || !bytes.Contains(out.Bytes(), []byte("step: received")) {
		t.Errorf("interfaces %v", p.interfaces)
	}
	if before, behind, _ := bytes.Cut(out.Bytes(), []byte("step: received")); bytes.Contains(before, []byte("end: dropped")) || !bytes.Contains(behind, []byte("end: dropped")) {
		t.Errorf("the last frame, and no other, has the end: %q", out.Bytes())
	}
	file := filepath.Join(t.TempDir(), "trace.pcapng")
	if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := exec.Command("tcpdump", "-nn", "-tt", "-r", file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	if n := strings.Count(string(text), "10.0.0.1.4000 > 10.0.0.2.80: Flags [S]"); n != 2 || !strings.Contains(string(text), "1700000000.000007") {
		t.Errorf("tcpdump sees %d packets: %s", n, text)
	}
}
