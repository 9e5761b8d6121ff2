// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// kafka is a broker of Kafka, with its controller (KRaft) in the same process.
type kafka struct {
	t                     *testing.T
	jars, dir             string
	plain, secure, signed string // addresses: without TLS, with it, with it and a password
	ca                    string // file
	cmd                   *exec.Cmd
	ended                 chan struct{}
}

const kafkaPassword = "in the dark"

func newKafka(t *testing.T) *kafka {
	k := &kafka{t: t, jars: ktest.Collectors(t), dir: t.TempDir()}
	controller := freeAddress(t)
	k.plain, k.secure, k.signed = freeAddress(t), freeAddress(t), freeAddress(t)
	var keyed string
	k.ca, keyed = selfSigned(t, k.dir)
	const module = "required username=natkit password=\"" + kafkaPassword + "\""
	properties := "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@" + controller +
		"\nlisteners=PLAINTEXT://" + k.plain + ",SSL://" + k.secure + ",SASL_SSL://" + k.signed + ",CONTROLLER://" + controller +
		"\nlistener.security.protocol.map=PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT" +
		"\ncontroller.listener.names=CONTROLLER\ninter.broker.listener.name=PLAINTEXT\nlog.dirs=" + filepath.Join(k.dir, "data") +
		"\nauto.create.topics.enable=false\noffsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\ngroup.initial.rebalance.delay.ms=0" +
		"\nssl.keystore.type=PEM\nssl.keystore.location=" + keyed +
		"\nsasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512" +
		"\nlistener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_natkit=\"" + kafkaPassword + "\";" +
		"\nlistener.name.sasl_ssl.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule " + module + ";" +
		"\nlistener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule " + module + ";\n"
	if err := os.WriteFile(filepath.Join(k.dir, "broker.properties"), []byte(properties), 0o600); err != nil {
		t.Fatal(err)
	}
	k.run("kafka.tools.StorageTool", "format", "-t", "bmF0a2l0LXRlc3QtYnJva2", "-c", filepath.Join(k.dir, "broker.properties"),
		"--add-scram", "SCRAM-SHA-256=[name=natkit,password=\""+kafkaPassword+"\"]", "--add-scram", "SCRAM-SHA-512=[name=natkit,password=\""+kafkaPassword+"\"]")
	k.start()
	t.Cleanup(k.kill)
	return k
}

// selfSigned makes a certificate for 127.0.0.1, which is its own authority: files of it, and of its key
// with it.
func selfSigned(t *testing.T, dir string) (ca, keyed string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "collector"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
	ca, keyed = filepath.Join(dir, "ca.pem"), filepath.Join(dir, "keyed.pem")
	for path, text := range map[string][]byte{ca: public, keyed: append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), public...)} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return ca, keyed
}

func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// program is a class of Kafka's as a command.
func (k *kafka) program(class string, args ...string) *exec.Cmd {
	k.t.Helper()
	return exec.Command(ktest.Tool(k.t, "java"), append([]string{"-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", k.jars + "/*", class}, args...)...)
}

func (k *kafka) run(class string, args ...string) []byte {
	k.t.Helper()
	cmd := k.program(class, args...)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		k.t.Fatalf("%s: %v\n%s%s", class, err, out.Bytes(), problem.Bytes())
	}
	return out.Bytes()
}

func (k *kafka) start() {
	k.t.Helper()
	k.cmd, k.ended = k.program("kafka.Kafka", filepath.Join(k.dir, "broker.properties")), make(chan struct{})
	var out bytes.Buffer
	k.cmd.Stdout, k.cmd.Stderr = &out, &out
	if err := k.cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(k.cmd, k.ended)
	ktest.Wait(k.t, 2*time.Minute, "the broker to listen", func() bool {
		select {
		case <-k.ended:
			k.t.Fatalf("the broker has ended:\n%s", out.Bytes())
		default:
		}
		conn, err := net.Dial("tcp", k.plain)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// kill ends the broker as a crash does.
func (k *kafka) kill() {
	_ = k.cmd.Process.Kill()
	<-k.ended
}

func (k *kafka) create(topic string) {
	k.t.Helper()
	k.run("org.apache.kafka.tools.TopicCommand", "--bootstrap-server", k.plain, "--create", "--topic", topic, "--partitions", "3")
}

// message is one as the console consumer prints it.
type message struct {
	at             time.Time
	partition, key string
	value          map[string]any
}

// read reads a topic by Kafka's console consumer, until nothing more comes.
func (k *kafka) read(topic string) (list []message) {
	k.t.Helper()
	args := []string{"--bootstrap-server", k.plain, "--topic", topic, "--from-beginning", "--timeout-ms", "8000"}
	for _, what := range []string{"timestamp", "partition", "key"} {
		args = append(args, "--property", "print."+what+"=true")
	}
	for line := range strings.Lines(string(k.run("org.apache.kafka.tools.consumer.ConsoleConsumer", args...))) {
		part := strings.SplitN(line, "\t", 4)
		if len(part) != 4 {
			continue // the tool's own words
		}
		at, err := strconv.ParseInt(strings.TrimPrefix(part[0], "CreateTime:"), 10, 64)
		if err != nil {
			k.t.Fatalf("%v in %s", err, line)
		}
		m := message{at: time.UnixMilli(at).UTC(), partition: part[1], key: part[2]}
		if err := json.Unmarshal([]byte(part[3]), &m.value); err != nil {
			k.t.Fatalf("%v in %s", err, line)
		}
		list = append(list, m)
	}
	return list
}

// checkTopic compares a topic with all records: each is there with all its fields, one external
// address is in one partition and in order of time, except for repeats.
func (g *gateway) checkTopic(k *kafka, topic string) {
	g.t.Helper()
	seen := make([]int, g.next)
	again := 0
	partitions := map[string]string{}
	last := map[string]int{}
	for _, m := range k.read(topic) {
		n, err := strconv.Atoi(fmt.Sprint(m.value["note"]))
		if err != nil || n >= g.next {
			if m.value["event"] != "gap" {
				g.t.Errorf("not of these: %v", m.value)
			}
			continue
		}
		r := &g.all[n]
		const form = "2006-01-02T15:04:05.999999Z"
		want := map[string]any{"schema": "natkit/log-record/1", "time": r.Time.Time().Format(form), "since": r.Since.Time().Format(form), "event": "created",
			"kind": "mapping", "translator": "kernel", "node": "gw1", "protocol": "tcp", "note": strconv.Itoa(n),
			"internal": r.Internal.String(), "external": r.External.String()}
		for name, w := range want {
			got := m.value[name]
			if e, ok := got.(map[string]any); ok {
				got = fmt.Sprintf("%v:%v", e["address"], e["port"])
			}
			if got != w {
				g.t.Fatalf("record %d: %s is %v, want %v", n, name, got, w)
			}
		}
		if len(m.value) != len(want) || m.key != r.External.Addr().String() || !m.at.Equal(r.Time.Time().Truncate(time.Millisecond)) {
			g.t.Fatalf("record %d: key %s at %v: %v", n, m.key, m.at, m.value)
		}
		if p := partitions[m.key]; p != "" && p != m.partition {
			g.t.Fatalf("%s is in %s and %s", m.key, p, m.partition)
		}
		partitions[m.key] = m.partition
		if seen[n]++; seen[n] > 1 {
			again++
		} else if last[m.key] > n {
			g.t.Fatalf("%s: record %d comes after %d", m.key, n, last[m.key])
		} else {
			last[m.key] = n
		}
	}
	missing := 0
	for _, times := range seen {
		if times == 0 {
			missing++
		}
	}
	used := map[string]bool{}
	for _, p := range partitions {
		used[p] = true
	}
	if missing > 0 || len(used) != 3 {
		g.t.Errorf("%d of %d records are missing, %d partitions are used", missing, g.next, len(used))
	}
	g.t.Logf("%s: %d records, %d sent more than once, %d addresses in %d partitions", topic, g.next, again, len(partitions), len(used))
}

// A broker that is killed and started again has all records: those in flight, those that the
// sink reads from the log because its queue was full, and those of the time in which natkit was
// started again too. A topic that is made late has all since the sink was.
func TestKafkaBroker(t *testing.T) {
	k := newKafka(t)
	url := "kafka://" + k.plain + "/nat"
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(url)
	g.append(100)
	ktest.Wait(t, time.Minute, "the missing topic to be an error", func() bool { return strings.Contains(g.state(url).LastError, "UNKNOWN_TOPIC_OR_PARTITION") })
	k.create("nat")
	acknowledged := func() bool { return g.state(url).Waiting == 0 }
	ktest.Wait(t, 2*time.Minute, "the topic to have the first", acknowledged)
	for round := range 2 {
		for range 10 {
			g.append(1000)
		}
		k.kill() // with records on their way
		for range 6 {
			g.append(queueRecords / 2)
		}
		if s := g.state(url); s.Waiting < 3*queueRecords {
			t.Errorf("while the broker is down: %+v", s)
		}
		if round == 1 {
			g.close()
			g.open(url)
			g.append(1000)
		}
		k.start()
		ktest.Wait(t, 3*time.Minute, "the broker to have caught up", acknowledged)
	}
	s := g.state(url)
	if s.Lost != 0 || !s.Connected {
		t.Errorf("%+v", s)
	}
	g.close()
	g.checkTopic(k, "nat")
}

// TLS and each way of showing a password; what is refused is an error in words.
func TestKafkaBrokerSecure(t *testing.T) {
	k := newKafka(t)
	secret, wrong := filepath.Join(k.dir, "secret"), filepath.Join(k.dir, "wrong")
	for path, text := range map[string]string{secret: kafkaPassword + "\n", wrong: "guessed\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	trusted := "tls=yes&ca=" + k.ca
	urls := map[string]string{"tls": "kafka://" + k.secure + "/tls?" + trusted}
	for _, mechanism := range []string{"plain", "scram-sha-256", "scram-sha-512"} {
		urls[mechanism] = "kafka://" + k.signed + "/" + mechanism + "?" + trusted + "&user=natkit&sasl=" + mechanism + "&password-file=" + secret
	}
	g := &gateway{t: t, dir: t.TempDir()}
	var list []string
	for topic, url := range urls {
		k.create(topic)
		list = append(list, url)
	}
	g.open(list...)
	g.append(2000)
	for topic, url := range urls {
		ktest.Wait(t, 2*time.Minute, topic+" to be acknowledged", func() bool { return g.state(url).Waiting == 0 })
	}
	g.close()
	for topic := range urls {
		g.checkTopic(k, topic)
	}
	for _, tt := range []struct{ url, says string }{
		{"kafka://" + k.secure + "/tls?tls=yes", "its certificate: x509: certificate signed by unknown authority"},
		{"kafka://" + k.secure + "/tls?" + trusted + "&name=broker.example.net", "its certificate: x509: certificate is not valid for any names, but wanted to match broker.example.net"},
		{"kafka://" + k.secure + "/tls", "the broker speaks TLS there (tls=yes)"},
		{"kafka://" + k.plain + "/tls?" + trusted, "it may speak no TLS there (tls=no), or want a password"},
		{"kafka://" + k.signed + "/plain?" + trusted, "or want a password (user=, password-file=)"},
		{"kafka://" + k.signed + "/plain?" + trusted + "&user=natkit&password-file=" + wrong, "SASL_AUTHENTICATION_FAILED"},
		{"kafka://" + k.signed + "/plain?" + trusted + "&user=natkit&sasl=scram-sha-512&password-file=" + wrong, "SASL_AUTHENTICATION_FAILED"},
	} {
		s, err := natlog.ParseSink(tt.url)
		if err != nil {
			t.Fatal(err)
		}
		out, err := dial(s, "gw1")
		if err == nil {
			out.close()
		}
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.url, err, tt.says)
		}
	}
}
