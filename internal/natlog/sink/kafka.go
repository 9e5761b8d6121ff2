// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"natkit/internal/natlog"
	"natkit/internal/natlog/wire"
)

// brokers is a topic of Kafka. A message is a record as JSON; its key is the external
// address, so what happens with one is in one partition, in order.
type brokers struct {
	client *kgo.Client
	node   string
	to     natlog.Sink
}

const kafkaWithin = 30 * time.Second

func dialKafka(s natlog.Sink, node string) (output, error) {
	options := []kgo.Opt{
		kgo.SeedBrokers(s.Addresses...), kgo.DefaultProduceTopic(s.Path), kgo.ClientID("natkit"),
		kgo.DialTimeout(dialWithin), kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.UnknownTopicRetries(2), kgo.RecordDeliveryTimeout(kafkaWithin),
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)),
	}
	if s.Secure {
		config, err := tlsConfig(s)
		if err != nil {
			return nil, err
		}
		options = append(options, kgo.DialTLSConfig(config))
	}
	if s.User != "" {
		pass, err := password(s.PasswordFile)
		if err != nil {
			return nil, err
		}
		var mechanism sasl.Mechanism
		switch s.SASL {
		case "scram-sha-256":
			mechanism = scram.Auth{User: s.User, Pass: pass}.AsSha256Mechanism()
		case "scram-sha-512":
			mechanism = scram.Auth{User: s.User, Pass: pass}.AsSha512Mechanism()
		default:
			mechanism = saslPlain(s.User, pass)
		}
		options = append(options, kgo.SASL(mechanism))
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return nil, fmt.Errorf("connect to Kafka: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialWithin)
	defer cancel()
	if err := client.Ping(ctx); err != nil {
		client.Close()
		return nil, kafkaError(s, err)
	}
	return &brokers{client, node, s}, nil
}

func saslPlain(user, pass string) sasl.Mechanism {
	return plain.Auth{User: user, Pass: pass}.AsMechanism()
}

// send returns when all brokers in sync have the records.
func (b *brokers) send(ctx context.Context, records []natlog.Record) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, kafkaWithin)
	defer cancel()
	list := make([]*kgo.Record, 0, len(records))
	for i := range records {
		value, err := wire.JSON(&records[i], b.node)
		if err != nil {
			return 0, err
		}
		r := &kgo.Record{Value: value, Timestamp: records[i].Time.Time()}
		if a := records[i].External.Addr(); a.IsValid() {
			r.Key = []byte(a.String())
		}
		list = append(list, r)
	}
	if err := b.client.ProduceSync(ctx, list...).FirstErr(); err != nil {
		return 0, kafkaError(b.to, err)
	}
	return len(list), nil
}

func (b *brokers) confirmed() (time.Duration, int, error) { return 0, allSends, nil }

func (b *brokers) close() { b.client.Close() }

// kafkaError is an error of the client in fewer words.
func kafkaError(s natlog.Sink, err error) error {
	var of *kerr.Error
	if errors.As(err, &of) {
		return fmt.Errorf("the broker answered %s: %s", of.Message, of.Description)
	}
	if strings.Contains(err.Error(), "tls alert record") { // of a length that is none; it has no type
		return errors.New("the broker speaks TLS there (tls=yes)")
	}
	var dial *kgo.ErrFirstReadEOF
	if errors.As(err, &dial) {
		secure, password := "want TLS (tls=yes)", "want a password (user=, password-file=)"
		if s.Secure {
			secure = "speak no TLS there (tls=no)"
		}
		if s.User != "" {
			password = "know no such mechanism (sasl=)"
		}
		return fmt.Errorf("the broker closed the connection: it may %s, or %s", secure, password)
	}
	if errors.Is(err, kgo.ErrRecordTimeout) || errors.Is(err, kgo.ErrRecordRetries) {
		return errors.New("no broker took the records in time")
	}
	return plainly(err)
}
