// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"natkit/internal/natlog"
	"natkit/internal/natlog/wire"
	"natkit/internal/testutil/ktest"
)

// A topic has every record once, with its external address as the key.
func TestKafka(t *testing.T) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, "nat"))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	url := "kafka://" + cluster.ListenAddrs()[0] + "/nat"
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(url)
	for range 5 {
		g.append(500)
	}
	ktest.Wait(t, time.Minute, "all to be acknowledged", func() bool { return g.state(url).Waiting == 0 })
	g.close()
	reader, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics("nat"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	seen := map[string]int{}
	ktest.Wait(t, time.Minute, "the topic to have them", func() bool {
		reader.PollFetches(t.Context()).EachRecord(func(r *kgo.Record) {
			var l wire.Line
			if err := json.Unmarshal(r.Value, &l); err != nil {
				t.Fatal(err)
			}
			if string(r.Key) != l.External.Addr().String() || r.Timestamp.UnixMilli() != l.Time.UnixMilli() {
				t.Errorf("key %s, time %v of %s", r.Key, r.Timestamp, r.Value)
			}
			seen[l.Note]++
		})
		return len(seen) >= g.next
	})
	for note, n := range seen {
		if n != 1 {
			t.Errorf("record %s is there %d times", note, n)
		}
	}
	if len(seen) != g.next {
		t.Errorf("%d records, want %d", len(seen), g.next)
	}
}

// A topic that is not there, and a broker that is not: an error in words.
func TestKafkaRefuses(t *testing.T) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	// A port of TLS has an alert for what is none, one without closes.
	tlsPort, plainPort := repliesTo(t, []byte{21, 3, 3, 0, 2, 2, 80}), repliesTo(t, nil)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for url, says := range map[string]string{
		"kafka://" + cluster.ListenAddrs()[0] + "/none":                     "UNKNOWN_TOPIC_OR_PARTITION",
		"kafka://127.0.0.1:1/nat":                                           "connection refused",
		"kafka://" + tlsPort + "/nat":                                       "the broker speaks TLS there (tls=yes)",
		"kafka://" + plainPort + "/nat":                                     "it may want TLS (tls=yes), or want a password (user=, password-file=)",
		"kafka://" + plainPort + "/nat?tls=yes":                             "it may speak no TLS there (tls=no), or want a password (user=, password-file=)",
		"kafka://" + plainPort + "/nat?user=natkit&password-file=" + secret: "it may want TLS (tls=yes), or know no such mechanism (sasl=)",
	} {
		s, err := natlog.ParseSink(url)
		if err != nil {
			t.Fatal(err)
		}
		out, err := dial(s, "gw1")
		if err == nil {
			_, err = out.send(t.Context(), sentRecords)
			out.close()
		}
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", url, err, says)
		}
	}
}

// repliesTo is the address of a server that reads once, replies, and closes.
func repliesTo(t *testing.T, reply []byte) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 4096))
			_, _ = conn.Write(reply)
			conn.Close()
		}
	}()
	return ln.Addr().String()
}
