// SPDX-License-Identifier: Apache-2.0

package natlog

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/internal/words/choice"
)

// Form is how a sink writes records.
type Form string

// Forms.
const (
	IPFIX    Form = "ipfix"
	NetFlow9 Form = "netflow9"
	Syslog   Form = "syslog"
	JSON     Form = "json"
	Kafka    Form = "kafka" // JSON, as messages of a topic
)

// Transport is how a sink is reached.
type Transport string

// Transports.
const (
	UDP    Transport = "udp"
	TCP    Transport = "tcp"
	TLS    Transport = "tls"
	File   Transport = "file"
	Broker Transport = "broker"
)

// Interim is which records are sent that only repeat, at the start of each hour, what is
// alive.
type Interim string

// Interims.
const (
	InterimNone   Interim = "none"
	InterimBlocks Interim = "blocks"
	InterimAll    Interim = "all"
)

// Sink is where records are sent on to, as its URL says.
type Sink struct {
	URL       string // as it was written
	Form      Form
	Transport Transport
	Addresses []string // HOST:PORT; several of Kafka
	Path      string   // of a file; of Kafka the topic

	Interim  Interim
	Domain   uint32        // of IPFIX and NetFlow: the observation domain, the source ID
	Size     int           // bytes of a message of IPFIX and NetFlow, at most
	Refresh  time.Duration // of templates over UDP
	Rate     int           // datagrams a second, at most
	Facility uint8         // of syslog

	// Of TLS. Without CA the system's certificates count, without Cert none is shown.
	Secure          bool
	CA, Cert, Key   string // files
	ServerName      string // in the certificate, where it is not the host's
	User, SASL      string // of Kafka
	PasswordFile    string
	defaultPort     int
	needsPort, many bool
}

// scheme is what the first word of a URL stands for.
type scheme struct {
	Sink
	options []string
}

var tlsOptions = []string{"ca", "cert", "key", "name"}

// schemes by name.
var schemes = map[string]scheme{
	"ipfix+udp":    {Sink{Form: IPFIX, Transport: UDP, Size: 1400, defaultPort: 4739}, []string{"domain", "size", "refresh", "rate"}},
	"ipfix+tcp":    {Sink{Form: IPFIX, Transport: TCP, Size: 8192, defaultPort: 4739}, []string{"domain", "size"}},
	"netflow9+udp": {Sink{Form: NetFlow9, Transport: UDP, Size: 1400, defaultPort: 2055}, []string{"domain", "size", "refresh", "rate"}},
	"syslog+udp":   {Sink{Form: Syslog, Transport: UDP, defaultPort: 514}, []string{"facility", "rate"}},
	"syslog+tcp":   {Sink{Form: Syslog, Transport: TCP, needsPort: true}, []string{"facility"}},
	"syslog+tls":   {Sink{Form: Syslog, Transport: TLS, Secure: true, defaultPort: 6514}, append([]string{"facility"}, tlsOptions...)},
	"json":         {Sink{Form: JSON, Transport: File}, nil},
	"json+tcp":     {Sink{Form: JSON, Transport: TCP, needsPort: true}, nil},
	"kafka":        {Sink{Form: Kafka, Transport: Broker, defaultPort: 9092, many: true}, append([]string{"tls", "user", "password-file", "sasl"}, tlsOptions...)},
}

// Facilities of syslog, by their numbers.
var facilities = []string{"kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp",
	"ntp", "audit", "alert", "clock", "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7"}

// Limits of options.
const (
	leastSize, mostUDPSize, mostSize = 768, 9000, 65535
	leastRefresh, mostRefresh        = time.Second, 10 * time.Minute
	leastRate, mostRate              = 100, 1_000_000
	syslogDaemon                     = 3
)

// ParseSink reads the URL of a sink.
func ParseSink(text string) (Sink, error) {
	name, rest, ok := strings.Cut(text, "://")
	if !ok {
		return Sink{}, fmt.Errorf("%q: want a URL such as syslog+tls://log.example.net:6514 (%s)", text, choice.List(SinkSchemes()))
	}
	kind, ok := schemes[strings.ToLower(name)]
	if !ok {
		known := SinkSchemes()
		if several := slices.DeleteFunc(slices.Clone(known), func(k string) bool { return !strings.HasPrefix(k, name+"+") }); len(several) > 0 {
			known = several
		}
		return Sink{}, choice.Error(name, known...)
	}
	s := kind.Sink
	s.URL, s.Interim, s.Refresh, s.Rate, s.Facility, s.Domain = text, InterimBlocks, 30*time.Second, 20_000, syslogDaemon, 1
	rest, query, _ := strings.Cut(rest, "?")
	if strings.ContainsAny(rest, "#@ \t") {
		return Sink{}, fmt.Errorf("%q: want %s; no space, # or @ (a user is an option of kafka: ?user=NAME)", text, s.example(name))
	}
	host, tail, hasPath := strings.Cut(rest, "/")
	if err := s.place(host, tail, hasPath, name); err != nil {
		return Sink{}, fmt.Errorf("%q: %w", text, err)
	}
	if err := s.options(query, append([]string{"interim"}, kind.options...)); err != nil {
		return Sink{}, fmt.Errorf("%q: %w", text, err)
	}
	return s, nil
}

// SinkSchemes are the first words of URLs of sinks.
func SinkSchemes() []string { return slices.Sorted(maps.Keys(schemes)) }

func (s *Sink) example(scheme string) string {
	switch {
	case s.Transport == File:
		return scheme + ":///var/log/nat.json"
	case s.Form == Kafka:
		return scheme + "://broker.example.net:9092/TOPIC"
	case s.needsPort:
		return scheme + "://log.example.net:5140"
	}
	return fmt.Sprintf("%s://log.example.net:%d", scheme, s.defaultPort)
}

// place reads host and path.
func (s *Sink) place(host, file string, hasPath bool, scheme string) error {
	if s.Transport == File {
		if host != "" || file == "" || strings.HasSuffix(file, "/") {
			return fmt.Errorf("want the path of a file, such as %s", s.example(scheme))
		}
		s.Path = path.Clean("/" + file)
		return nil
	}
	if s.Form == Kafka {
		if s.Path = file; !topicName(file) {
			return fmt.Errorf("want a topic behind the broker, such as %s: letters, digits, dots, _ and -", s.example(scheme))
		}
	} else if hasPath && file != "" {
		return fmt.Errorf("nothing can follow the port: /%s", file)
	}
	hosts := []string{host}
	if s.many {
		hosts = strings.Split(host, ",")
	}
	for _, h := range hosts {
		address, err := s.address(h, scheme)
		if err != nil {
			return err
		}
		s.Addresses = append(s.Addresses, address)
	}
	return nil
}

// topicName tells whether Kafka has such names.
func topicName(s string) bool {
	return s != "" && len(s) <= 249 && s != "." && s != ".." && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// address makes HOST:PORT of a host, which may have a port.
func (s *Sink) address(text, scheme string) (string, error) {
	host, port := text, ""
	if inner, ok := strings.CutPrefix(text, "["); ok {
		addr, rest, ok := strings.Cut(inner, "]")
		if a, err := netip.ParseAddr(addr); !ok || err != nil || !a.Is6() || rest != "" && rest[0] != ':' {
			return "", fmt.Errorf("%q: want an IPv6 address in brackets, such as [2001:db8::1]:%d", text, max(s.defaultPort, 5140))
		}
		host, port = "["+addr+"]", strings.TrimPrefix(rest, ":")
		if rest == ":" {
			return "", errors.New("the port behind : is missing")
		}
	} else if before, after, ok := strings.Cut(text, ":"); ok {
		if strings.Contains(after, ":") {
			return "", fmt.Errorf("%q: an IPv6 address is written in brackets, such as [2001:db8::1]", text)
		}
		if host, port = before, after; port == "" {
			return "", errors.New("the port behind : is missing")
		}
	}
	if host == "" {
		return "", fmt.Errorf("want a host, such as %s", s.example(scheme))
	}
	if port == "" {
		if s.needsPort {
			return "", fmt.Errorf("want a port, such as %s", s.example(scheme))
		}
		port = strconv.Itoa(s.defaultPort)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("port %q: want a number from 1 to 65535", port)
	}
	return host + ":" + port, nil
}

func (s *Sink) options(query string, known []string) error {
	if query == "" {
		return nil
	}
	seen := map[string]bool{}
	for pair := range strings.SplitSeq(query, "&") {
		name, value, ok := strings.Cut(pair, "=")
		switch {
		case !slices.Contains(known, name):
			return fmt.Errorf("option %w", choice.Error(name, known...))
		case !ok || value == "":
			return fmt.Errorf("option %s: want %s=VALUE", name, name)
		case seen[name]:
			return fmt.Errorf("option %s is given twice", name)
		}
		seen[name] = true
		if err := s.option(name, value); err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
	}
	switch {
	case (s.Cert == "") != (s.Key == ""):
		return errors.New("options cert and key: want both, or none")
	case s.Form == Kafka && !s.Secure && (s.CA != "" || s.Cert != "" || s.ServerName != ""):
		return errors.New("options ca, cert and name need tls=yes")
	case (s.User == "") != (s.PasswordFile == ""):
		return errors.New("options user and password-file: want both, or none")
	case s.SASL != "" && s.User == "":
		return errors.New("option sasl needs user and password-file")
	}
	return nil
}

func (s *Sink) option(name, value string) (err error) {
	switch name {
	case "interim":
		s.Interim, err = oneOf(value, InterimNone, InterimBlocks, InterimAll)
	case "domain":
		var n int
		n, err = number(value, 0, 1<<32-1)
		s.Domain = uint32(n)
	case "size":
		most := mostSize
		if s.Transport == UDP {
			most = mostUDPSize
		}
		s.Size, err = number(value, leastSize, most)
	case "rate":
		s.Rate, err = number(value, leastRate, mostRate)
	case "refresh":
		d, wrong := time.ParseDuration(value)
		if s.Refresh = d; wrong != nil || d < leastRefresh || d > mostRefresh {
			err = fmt.Errorf("%q: want a time from 1s to 10m", value)
		}
	case "facility":
		if s.Facility = uint8(max(0, slices.Index(facilities, value))); facilities[s.Facility] != value {
			err = choice.Error(value, facilities...)
		}
	case "tls":
		if s.Secure = value == "yes"; !s.Secure && value != "no" {
			err = choice.Error(value, "yes", "no")
		}
	case "sasl":
		s.SASL, err = oneOf(value, "plain", "scram-sha-256", "scram-sha-512")
	case "ca":
		s.CA, err = file(value)
	case "cert":
		s.Cert, err = file(value)
	case "key":
		s.Key, err = file(value)
	case "password-file":
		s.PasswordFile, err = file(value)
	case "name":
		s.ServerName = value
	case "user":
		s.User = value
	}
	return err
}

// oneOf reads one of a few words.
func oneOf[T ~string](value string, known ...T) (T, error) {
	if slices.Contains(known, T(value)) {
		return T(value), nil
	}
	var words []string
	for _, k := range known {
		words = append(words, string(k))
	}
	return "", choice.Error(value, words...)
}

func number(value string, least, most int) (int, error) {
	n, err := strconv.ParseUint(value, 10, 63)
	if err != nil || int(n) < least || int(n) > most {
		return 0, fmt.Errorf("%q: want a number from %d to %d", value, least, most)
	}
	return int(n), nil
}

func file(value string) (string, error) {
	if !strings.HasPrefix(value, "/") {
		return "", fmt.Errorf("%q: want the path of a file that begins with /", value)
	}
	return path.Clean(value), nil
}
