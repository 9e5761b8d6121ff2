// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// Answered connections that a client has not confirmed for a second are counted, and nothing else.
func TestCountUnconfirmed(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		if err := os.WriteFile(sysctlDir+"nf_conntrack_tcp_timeout_syn_recv", []byte("60"), 0); err != nil {
			t.Fatal(err)
		}
		insert := func(timeout int, entry string) {
			if err := conntrackRun(t, append([]string{"-I", "-t", fmt.Sprint(timeout)}, strings.Fields(entry)...)...); err != nil {
				t.Fatalf("%s: %v", entry, err)
			}
		}
		const tcp, udp = "-p tcp -s 10.0.0.%d -d 10.0.1.1 --sport %d --dport 80 --state %s", "-p udp -s 10.0.0.%d -d 10.0.1.1 --sport %d --dport 53"
		for port := range 3 {
			insert(40, fmt.Sprintf(tcp+" -u SEEN_REPLY", 1, 1000+port, "SYN_RECV"))
		}
		insert(40, fmt.Sprintf(tcp+" -u SEEN_REPLY", 2, 1000, "SYN_RECV"))
		// Answered this moment; confirmed; not answered; of UDP, IPv6 and a zone.
		insert(60, fmt.Sprintf(tcp+" -u SEEN_REPLY", 1, 1010, "SYN_RECV"))
		insert(40, fmt.Sprintf(tcp+" -u SEEN_REPLY,ASSURED", 1, 1011, "ESTABLISHED"))
		insert(40, fmt.Sprintf(tcp, 1, 1012, "SYN_SENT"))
		insert(40, fmt.Sprintf(udp+" -u SEEN_REPLY", 1, 1013))
		insert(40, "-p tcp -s 2001:db8::1 -d 2001:db8::2 --sport 1000 --dport 80 --state SYN_RECV -u SEEN_REPLY")
		insert(40, fmt.Sprintf(tcp+" -u SEEN_REPLY --orig-zone 3", 1, 1014, "SYN_RECV"))
		got, err := CountUnconfirmed(t.Context())
		if want := (Unconfirmed{Entries: 4, Most: 3}); err != nil || got != want {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		// The kernel itself chooses them: Linux 6.1 does.
		s, err := openSocket(t.Context(), 0)
		if err != nil {
			return err
		}
		defer s.close()
		s.seq++
		if err := s.send(unconfirmedRequest(s.seq)); err != nil {
			return err
		}
		var res DumpResult
		if err := s.readDump(t.Context(), Filter{}, &res, func(*Flow) error { return nil }); err != nil || res.Entries != 6 {
			t.Errorf("the kernel sent %d entries, %v, want 6", res.Entries, err)
		}
		return nil
	})
}
