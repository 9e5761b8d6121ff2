// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A burst that overflows a queue once costs some clients a second, and is no
	// fault. Enough for a warning are this many in the window and this share of all
	// connections that were to be accepted.
	overflowFew   = 5
	overflowShare = 0.01
	overflowMany  = 0.10 // critical
)

var listenOverflow = Cause{
	Code:     "listen-overflow",
	Title:    "A server does not accept connections as fast as they arrive",
	Headline: "Connections take 1, 3 or 7 seconds: SYNs to LISTEN sockets dropped",
	Search: []string{
		"times the listen queue of a socket overflowed",
		"SYNs to LISTEN sockets dropped",
		"nstat TcpExtListenOverflows",
		"nstat TcpExtListenDrops",
		"net.core.somaxconn",
		"reason: TCP_LISTEN_OVERFLOW",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(overflowFew, "connections refused because of a full queue"), portion(overflowShare, "of those accepted")},
	Needs:         []string{snapshot.CanCounters, snapshot.CanListeners, snapshot.CanDrops, snapshot.CanSysctls, snapshot.CanProcessNames},
	Symptom:       "Clients wait 1, 3 or 7 seconds for a connection. It looks like packet loss in NAT but is not.",
	Proof:         fmt.Sprintf("Connections were refused because a listening socket's queue was full (TcpExt.ListenOverflows, or the socket's own count): from %d and %s of all connections during the window a warning, from %s critical.", overflowFew, percent.Whole(overflowShare), percent.Whole(overflowMany)),
	FalsePositive: "A single overflow in a burst, and a queue that is full at the moment but loses nothing.",
	Cure:          "Use a longer queue: the program's backlog, and net.core.somaxconn, which limits it. If the queue is long and stays full, the server is too slow or stopped.",
	judge:         judgeListen,
}

func judgeListen(f facts) *verdict {
	counted, _ := f.counter("TcpExt.ListenOverflows")
	traced, rows, _ := f.dropped(snapshot.CauseListenOverflow)
	worst, refused, found := f.fullestListener()
	// A socket also drops for other reasons; only overflows count, where they are counted.
	lost := max(counted, traced)
	if _, known := f.counter("TcpExt.ListenOverflows"); !known && traced == 0 {
		lost = refused
	}
	if lost == 0 {
		return nil
	}
	accepted, acceptedKnown := f.counter("Tcp.PassiveOpens")
	part := share(lost, saturate(lost, accepted))
	v := &verdict{impact: float64(lost)}
	switch {
	case lost < f.few(overflowFew) || acceptedKnown && part < f.part(overflowShare):
		if lost < f.few(overflowFew) {
			return nil
		}
		v.Severity = Advice
	case acceptedKnown && part >= overflowMany:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}

	v.Title = fmt.Sprintf("%s refused by a full accept queue %s", number(lost, "connection"), f.window())
	if found {
		v.Title = fmt.Sprintf("%s refused by the full accept queue of %s %s", number(lost, "connection"), listenerName(worst), f.window())
	}
	if counted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"connections refused because the queue was full", strconv.FormatUint(counted, 10), fromNetstat + ": TcpExt ListenOverflows"})
	}
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped because of it", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	if found {
		v.Evidence = append(v.Evidence, Evidence{"queue of " + listenerName(worst), fmt.Sprintf("%d waiting, %d allowed, %d refused", worst.Queue, worst.Backlog, worst.Drops), fromSockets})
	}
	if acceptedKnown {
		v.Evidence = append(v.Evidence, Evidence{"connections taken", strconv.FormatUint(accepted, 10), fromSnmp + ": Tcp PassiveOpens"})
	}
	somaxconn, somaxconnKnown := f.sysctl("net.core.somaxconn")
	if somaxconnKnown {
		v.Evidence = append(v.Evidence, Evidence{"net.core.somaxconn", strconv.FormatInt(somaxconn, 10), fromSettings})
	}
	v.Why = "The kernel completes handshakes for the server and queues the connections until the program accepts them. While the queue is full, the last packet of a handshake is dropped, " +
		"and the client retransmits after 1 s, 3 s, 7 s. NAT is not the cause, although it looks like it."
	v.Remedy, v.Settings = f.longerQueue(worst, found, somaxconn, somaxconnKnown)
	v.Verify = f.look(f.run("ss -ltn"), f.run("nstat -az TcpExtListenOverflows"))
	return v
}

// fullestListener is the socket that dropped most, or whose queue is fullest, and how many all dropped.
func (f facts) fullestListener() (worst snapshot.Listener, refused uint64, found bool) {
	for _, l := range f.Listeners {
		if l.Drops >= implausible {
			continue
		}
		refused = saturate(refused, l.Drops)
		full, worstFull := l.Queue > l.Backlog, worst.Queue > worst.Backlog
		if l.Drops > worst.Drops || l.Drops == worst.Drops && (full && !worstFull || full == worstFull && l.Queue > worst.Queue) {
			worst, found = l, true
		}
	}
	return worst, refused, found && (worst.Drops > 0 || worst.Queue > worst.Backlog)
}

// wantedBacklog is a queue for the burst that thousands of clients make when
// they begin at once; an entry that is not used costs nothing.
const wantedBacklog = 16384

func (f facts) longerQueue(worst snapshot.Listener, found bool, somaxconn int64, known bool) (remedy []string, settings []snapshot.Setting) {
	if !known || somaxconn < wantedBacklog {
		s := f.local("net.core.somaxconn", wantedBacklog)
		settings = append(settings, s)
		remedy = append(remedy, "# the longest queue that a program can have; it applies from the program's next listen():", f.set(s))
	}
	program := "the program"
	if found && worst.Process != "" {
		program = worst.Process
	}
	switch {
	case found && known && int64(worst.Backlog) < somaxconn:
		remedy = append(remedy, fmt.Sprintf("# %s asks for a queue of only %d: raise its own backlog too (nginx: listen 80 backlog=%d) and restart it", program, worst.Backlog, wantedBacklog))
	default:
		remedy = append(remedy, fmt.Sprintf("# then raise the backlog of %s to the same (nginx: listen 80 backlog=%d) and restart it", program, wantedBacklog))
	}
	show := "ss -ltnp"
	if found {
		show += " " + quote("sport = :"+strconv.Itoa(int(worst.Addr.Port())))
	}
	return append(remedy, "# if the queue (Recv-Q) is always full, the program is too slow or has stopped, and no queue is long enough:", f.run(show)), settings
}

// listenerName is how a listener is spoken of.
func listenerName(l snapshot.Listener) string {
	name := l.Addr.String()
	if l.Process != "" {
		name += " (" + l.Process + ")"
	}
	return name
}
