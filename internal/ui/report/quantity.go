// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A unit is how the values of a metric are written: divided by Scale, followed by
// Name. It is the same for all values that stand together.
type unit struct {
	Name  string
	Scale float64
}

// dimension is what the end of a metric's name says about its values.
type dimension struct {
	suffix string
	units  []unit // from small to large
	better int    // than less: +1 more is better, -1 less is better, 0 neither
}

var (
	times    = []unit{{"ns", 1}, {"µs", 1e3}, {"ms", 1e6}, {"s", 1e9}}
	percents = []unit{{"%", 0.01}}
)

// dimensions are tried in this order.
var dimensions = []dimension{
	{"_ns_per_packet", times[:1], -1},
	{"_ns", times, -1},
	{"_us", scaled(times, 1e3), -1},
	{"_ms", scaled(times, 1e6), -1},
	{"_cpu_seconds_per_gbit", []unit{{"CPU s/Gbit", 1}}, -1},
	{"_seconds_per_gbit", []unit{{"s/Gbit", 1}}, -1},
	{"_seconds", scaled(times, 1e9), -1},
	{"_loss_ratio", percents, -1},
	{"_ratio", percents, 0},
	{"_share", percents, 0},
	{"_percent", []unit{{"%", 1}}, 0},
	{"_pps", decimal("pps"), 1},
	{"_cps", decimal("connections/s"), 1},
	{"_requests_per_second", decimal("requests/s"), 1},
	{"_connections_per_second", decimal("connections/s"), 1},
	{"_bits_per_second", decimal("bit/s"), 1},
	{"_bps", decimal("bit/s"), 1},
	{"_mbps", scaled(decimal("bit/s"), 1e6), 1},
	{"_mbit_s", scaled(decimal("bit/s"), 1e6), 1},
	{"_gbps", scaled(decimal("bit/s"), 1e9), 1},
	{"_gbit_s", scaled(decimal("bit/s"), 1e9), 1},
	{"_bytes_per_second", decimal("B/s"), 1},
	{"_kbytes_per_second", scaled(decimal("B/s"), 1e3), 1},
	{"_kb_s", []unit{{"kB/s", 1}}, 1},
	{"_per_second", decimal("/s"), 1},
	{"_bytes", []unit{{"B", 1}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}}, -1},
	{"_sessions", []unit{{"", 1}}, 1},
	{"_total", []unit{{"", 1}}, 0},
}

// decimal writes a unit with the prefixes of thousands.
func decimal(name string) []unit {
	if len(name) > 0 && (strings.HasPrefix(name, "connections") || strings.HasPrefix(name, "requests") || name == "/s") {
		return []unit{{name, 1}, {"million " + name, 1e6}}
	}
	return []unit{{name, 1}, {"k" + name, 1e3}, {"M" + name, 1e6}, {"G" + name, 1e9}}
}

// scaled is the same units for values that are n times as large.
func scaled(units []unit, n float64) []unit {
	out := make([]unit, len(units))
	for i, u := range units {
		out[i] = unit{u.Name, u.Scale / n}
	}
	return out
}

// metricTitles says known metrics in words; others are read from their name.
var metricTitles = map[string]string{
	"cost_ns":                           "Cost of a packet",
	"loss_ratio":                        "Packets lost",
	"ndr_pps":                           "Zero-loss rate (NDR)",
	"pdr_pps":                           "Partial-drop rate (PDR)",
	"mrr_pps":                           "Rate received under overload",
	"cpu_share":                         "CPU time of the router",
	"connect_mean_ms":                   "Time to connect, mean of completed requests",
	"time_per_request_mean_ms":          "Time for a request, mean",
	"requests_per_second":               "Requests answered",
	"completed_total":                   "Requests completed",
	"first_packet_ns":                   "First packet of a connection",
	"load_seconds":                      "Time to load the rules",
	"memory_bytes":                      "Kernel memory of the rules",
	"throughput_bits_per_second":        "Throughput",
	"cpu_seconds_per_gbit":              "CPU time for a Gbit",
	"iperf3_throughput_bits_per_second": "Throughput by iperf3",
	"iperf3_cpu_seconds_per_gbit":       "CPU time for a Gbit by iperf3",
	"iperf3_retransmits_total":          "Segments retransmitted by iperf3",
	"syn_retransmits_total":             "SYNs retransmitted",
	"retransmits_total":                 "Segments retransmitted",
	"failed_total":                      "Requests failed",
	"timeouts_total":                    "Requests timed out",
	"cpu_per_request_us":                "CPU time for a request, client and server included",
	"session_bytes":                     "Kernel memory of a session",
	"latency_median_ns":                 "Latency, median",
	"latency_p99_ns":                    "Latency, 99th percentile",
	"established_pps":                   "Packets of open connections",
	"new_connections_per_second":        "New connections",
	"connections_per_second":            "New connections",
	"latency_min_ns":                    "Latency, least",
	"latency_max_ns":                    "Latency, longest",
	"transfer_kb_s":                     "Transfer",
	"transfer_seconds":                  "Time of a transfer",
	"received_pps":                      "Packets forwarded",
	"sent_pps":                          "Rate sent",
	"new_flow_cost_ns":                  "Cost of a connection's first packet",
	"connection_cost_ns":                "Cost of a connection, opened and closed",
	"establishment_cps":                 "New connections",
	"establishment_ndr_cps":             "New connections without loss (NDR)",
	"establishment_pdr_cps":             "New connections with little loss (PDR)",
	"capacity_sessions":                 "Connections in the table",
	"new_flow_ns":                       "A new flow's first packet",
	"refused_cost_ns":                   "Cost of a packet without a port",
	"mixed_pps":                         "Packets processed, most of them without a port",
	"forwarded_share":                   "Forwarded of these",
	"latency_p9999_ns":                  "Latency, 99.99th percentile",
	"expired_sessions":                  "Sessions that expired during the trial",
	"new_sessions_ratio":                "New sessions, compared round by round with the first router",
	"packets_ratio":                     "Packets of open sessions, compared round by round with the first router",
	"hosts_served_share":                "Hosts that got a session for each that they opened",
	"hosts_without_share":               "Hosts that got no session",
	"hosts_pps":                         "Packets of the hosts, forwarded or refused",
	"flood_sessions_total":              "Sessions of the host that floods",
}

// measure is how a metric is presented.
type measure struct {
	Title  string
	units  []unit
	better int
}

// measureOf reads a metric's name.
func measureOf(metric string) measure {
	m := measure{Title: metricTitles[metric], units: []unit{{"", 1}}}
	rest := metric
	for _, d := range dimensions {
		if strings.HasSuffix("_"+metric, d.suffix) {
			m.units, m.better = d.units, d.better
			rest = strings.TrimSuffix(strings.TrimSuffix("_"+metric, d.suffix), "_")
			break
		}
	}
	for _, bad := range []string{"loss", "lost", "drop", "skipped", "error", "failed", "retransmit", "timeouts"} {
		if strings.Contains(metric, bad) {
			m.better = -1
		}
	}
	if m.Title == "" {
		rest = strings.TrimSpace(strings.ReplaceAll(rest, "_", " "))
		if rest == "" {
			rest = strings.ReplaceAll(metric, "_", " ")
		}
		if rest == "" {
			rest = "(no name)"
		}
		first, n := utf8.DecodeRuneInString(rest)
		m.Title = string(unicode.ToUpper(first)) + rest[n:]
	}
	return m
}

// Better says which way is better, "" where that depends.
func (m measure) Better() string {
	switch m.better {
	case 1:
		return "more is better"
	case -1:
		return "less is better"
	}
	return ""
}

// unit is the largest in which the largest of the values is at least 1.
func (m measure) unit(largest float64) unit {
	u := m.units[0]
	for _, larger := range m.units[1:] {
		if math.Abs(largest) >= larger.Scale {
			u = larger
		}
	}
	return u
}

// number writes a value in the unit with four significant digits, without the
// unit's name.
func (u unit) number(v float64) string { return significant(v / u.Scale) }

// with is number with the unit's name.
func (u unit) with(v float64) string {
	if u.Name == "" {
		return u.number(v)
	}
	return u.number(v) + " " + u.Name
}

// significant writes four significant digits, and all digits before the point.
func significant(x float64) string {
	switch a := math.Abs(x); {
	case a == 0:
		return "0"
	case a >= 1e9 || a < 1e-4:
		return strconv.FormatFloat(x, 'e', 2, 64)
	default:
		decimals := 3 - int(math.Floor(math.Log10(a)))
		s := strconv.FormatFloat(x, 'f', max(decimals, 0), 64)
		if a < 1 { // 0.1200 is not more exact than 0.12 looks
			s = strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
		}
		if decimals > 0 && x == math.Trunc(x) {
			s = strconv.FormatFloat(x, 'f', 0, 64)
		}
		return s
	}
}
