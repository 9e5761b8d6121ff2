// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/pcp"
	"natkit/internal/nat/rulefile"
)

// portControl answers internal hosts that ask for explicit mappings, on the interfaces that the
// rule file names. Mappings are the engine's: they last without it.
type portControl struct {
	ns *netns.Handle

	mu        sync.Mutex // guards what follows: requests are answered one at a time
	file      *rulefile.File
	engine    *datapath.Engine // nil: none is up
	server    *pcp.Server
	sockets   map[string]*portSocket
	outside   []int // interfaces, as the file names them
	in        int   // interface of the request at hand
	external  netip.Addr
	epoch     time.Time // when no mapping was lost since
	announced int       // how often the last loss or change was
	next      *time.Timer
	counts    map[portRequest]int
}

// portRequest is what requests are counted by: all words are the program's.
type portRequest struct{ protocol, opcode, result string }

// portSocket is a socket on one interface.
type portSocket struct {
	conn    *net.UDPConn
	ifindex int
	done    chan struct{} // closed when nobody reads it any more
}

func newPortControl(ns *netns.Handle) *portControl {
	return &portControl{ns: ns, sockets: map[string]*portSocket{}, counts: map[portRequest]int{}, announced: pcp.AnnounceTimes}
}

// use takes up the rules in use and the engine that has them.
func (c *portControl) use(file *rulefile.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.drop()
	c.file = file
	if file.PCP.IsZero() {
		return errors.Join(err, c.keep(nil))
	}
	return errors.Join(err, c.start())
}

// start opens the engine. The lock is held.
func (c *portControl) start() (err error) {
	if c.engine, err = Open(c.ns); err != nil {
		return err
	}
	if err := c.engine.ReadyForLeases(); err != nil {
		return errors.Join(err, c.drop())
	}
	server := pcp.New(c, pcp.Config{MinLifetime: c.file.PCP.MinLifetime, MaxLifetime: c.file.PCP.MaxLifetime, Rate: pcp.DefaultRate})
	server.Count = func(protocol, opcode, result string) { c.counts[portRequest{protocol, opcode, result}]++ }
	c.server = server
	return c.look()
}

// follow looks what has changed: interfaces that were made again, mappings that were lost, the
// external address.
func (c *portControl) follow() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.engine != nil:
		return c.look()
	case c.file != nil && !c.file.PCP.IsZero(): // it could not be opened
		return c.start()
	}
	return nil
}

func (c *portControl) look() error {
	c.outside = c.outside[:0]
	there := map[string]int{}
	err := c.ns.Do(func() error {
		for _, name := range c.file.Outside {
			if l, err := netlink.LinkByName(name); err == nil {
				c.outside = append(c.outside, l.Attrs().Index)
			}
		}
		for _, name := range c.file.PCP.On {
			if l, err := netlink.LinkByName(name); err == nil {
				there[name] = l.Attrs().Index
			}
		}
		return c.keep(there)
	})
	external := c.externalOfAll()
	age, lost, epochErr := c.engine.Epoch()
	c.epoch = time.Now().Add(-age)
	if lost || external != c.external {
		c.external = external
		c.announced = 0
		c.announce()
	}
	return errors.Join(err, epochErr)
}

// keep closes sockets on interfaces that are not these, and opens those that are missing.
func (c *portControl) keep(there map[string]int) error {
	var errs []error
	for name, s := range c.sockets {
		if there[name] != s.ifindex {
			errs = append(errs, s.conn.Close())
			delete(c.sockets, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(there)) {
		if c.sockets[name] != nil {
			continue
		}
		s, err := c.open(name, there[name])
		if err != nil {
			errs = append(errs, fmt.Errorf("pcp on %s: %w", name, err))
			continue
		}
		c.sockets[name] = s
	}
	return errors.Join(errs...)
}

// open opens the socket of an interface. The calling thread is in the namespace.
func (c *portControl) open(name string, ifindex int) (*portSocket, error) {
	listen := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		set := func(fd uintptr) {
			err = cmp.Or(unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, name),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1))
		}
		if raised := raw.Control(set); raised != nil {
			return raised
		}
		return err
	}}
	conn, err := listen.ListenPacket(context.Background(), "udp4", fmt.Sprintf(":%d", pcp.Port))
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("another program has UDP port %d: `ss -lunp sport = %d` names it", pcp.Port, pcp.Port)
	}
	if err != nil {
		return nil, err
	}
	s := &portSocket{conn: conn.(*net.UDPConn), ifindex: ifindex, done: make(chan struct{})}
	go c.serve(s)
	return s, nil
}

// serve answers what comes until the socket is closed, from the address that was asked.
func (c *portControl) serve(s *portSocket) {
	defer close(s.done)
	data, control := make([]byte, 2*pcp.MaxMessage), make([]byte, 256)
	for {
		n, oob, _, from, err := s.conn.ReadMsgUDPAddrPort(data, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // an ICMP error about an answer
			continue
		}
		asked, ok := askedAddress(control[:oob], s.ifindex)
		if !ok {
			continue
		}
		if answer := c.answer(s.ifindex, from, data[:n]); answer != nil {
			// A client that can't be reached asks again.
			_, _, _ = s.conn.WriteMsgUDPAddrPort(answer, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: asked.As4()}), from)
		}
	}
}

// askedAddress is the address that a datagram was sent to, if it is one of the gateway's and not
// of many hosts, and came in by that interface.
func askedAddress(control []byte, ifindex int) (netip.Addr, bool) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, false
	}
	for i := range messages {
		if messages[i].Header.Level != unix.IPPROTO_IP || messages[i].Header.Type != unix.IP_PKTINFO || len(messages[i].Data) < unix.SizeofInet4Pktinfo {
			continue
		}
		// struct in_pktinfo: interface, local address, destination of the header
		d := messages[i].Data
		local, header := netip.AddrFrom4([4]byte(d[4:8])), netip.AddrFrom4([4]byte(d[8:12]))
		in := int(int32(uint32(d[0]) | uint32(d[1])<<8 | uint32(d[2])<<16 | uint32(d[3])<<24))
		return local, in == ifindex && local == header
	}
	return netip.Addr{}, false
}

// answer gives the answer to a datagram, nil if it gets none.
func (c *portControl) answer(ifindex int, from netip.AddrPort, data []byte) (answer []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.engine == nil {
		return nil
	}
	c.in = ifindex
	// Where a port is the gateway's own socket's is a matter of the thread's namespace.
	if err := c.ns.Do(func() error { answer = c.server.Answer(time.Now(), ifindex, from.Addr(), data); return nil }); err != nil {
		return nil
	}
	return answer
}

// announce tells all hosts, several times, that mappings were lost, or that the external address
// is another. The lock is held.
func (c *portControl) announce() {
	if c.next != nil {
		c.next.Stop()
	}
	if c.announced >= pcp.AnnounceTimes || c.engine == nil {
		return
	}
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{224, 0, 0, 1}), pcp.ClientPort)
	for _, s := range c.sockets {
		for _, b := range pcp.Announcements(c.Epoch(), c.external) {
			_, _, _ = s.conn.WriteMsgUDPAddrPort(b, nil, to) // some of ten get through
		}
	}
	c.announced++
	c.next = time.AfterFunc(pcp.AnnouncePause(c.announced), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.announce()
	})
}

// externalOfAll is the external address, if all hosts have the same.
func (c *portControl) externalOfAll() netip.Addr {
	rec, err := recordOf(c.ns)
	if err != nil {
		return netip.Addr{}
	}
	var one netip.Addr
	for _, a := range rec.Addresses {
		switch {
		case a.Leaving || a.Ports[0] == 0 && !a.OneToOne:
		case a.OneToOne || one.IsValid():
			return netip.Addr{}
		default:
			one = a.Addr
		}
	}
	return one
}

// drop lets the engine go.
func (c *portControl) drop() error {
	if c.engine == nil {
		return nil
	}
	err := c.engine.Close()
	c.engine, c.server = nil, nil
	return err
}

// Close ends it. Mappings stay.
func (c *portControl) Close() error {
	c.mu.Lock()
	if c.next != nil {
		c.next.Stop()
	}
	sockets := slices.Collect(maps.Values(c.sockets))
	err := errors.Join(c.drop(), c.keep(nil))
	c.mu.Unlock()
	for _, s := range sockets {
		<-s.done
	}
	return err
}

// requests are the counters.
func (c *portControl) requests() map[portRequest]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.counts)
}

// --- pcp.Engine: the lock is held, the calling thread is in the namespace -------------

// leaseTries is how often a request is made that lost a race against a packet or garbage
// collection.
const leaseTries = 5

// anywhere stands for a receiver that is not known: RFC 7600's dummy address, of nobody.
var anywhere = net.IPv4(192, 0, 0, 8)

// Map makes or extends a mapping.
func (c *portControl) Map(m *pcp.Mapping) (outside netip.AddrPort, static bool, _ pcp.Result) {
	q := c.lease(m)
	q.Filters = make([]datapath.LeaseFilter, len(m.Filters))
	for i, f := range m.Filters {
		q.Filters[i] = datapath.LeaseFilter(f)
	}
	result, err := c.byEgress(q, func() (r datapath.LeaseResult, err error) {
		outside, r, err = c.engine.Lease(q)
		return r, err
	})
	if err != nil {
		return outside, false, pcp.NetworkFailure
	}
	m.Lifetime = q.Lifetime
	return outside, result == datapath.LeaseStatic, resultOf(result)
}

// End ends a mapping.
func (c *portControl) End(m *pcp.Mapping) pcp.Result {
	q := c.lease(m)
	result, err := c.byEgress(q, func() (datapath.LeaseResult, error) { return c.engine.EndLease(q) })
	switch {
	case err != nil:
		return pcp.NetworkFailure
	case result == datapath.LeaseNone:
		return pcp.Success
	case result == datapath.LeaseStatic: // it is a rule's
		return pcp.NotAuthorized
	}
	return resultOf(result)
}

// Of gives the mappings of a host.
func (c *portControl) Of(host netip.Addr) (out []pcp.Mapping) {
	zone, err := c.engine.Zone(c.in)
	if err != nil {
		return nil
	}
	leases, err := c.engine.LeasesOf(host, zone)
	if err != nil {
		return nil // they are not ended, and expire
	}
	for _, l := range leases {
		out = append(out, mappingOf(l))
	}
	return out
}

// Find gives the mapping that a request is about.
func (c *portControl) Find(m *pcp.Mapping) (have pcp.Mapping, ok bool) {
	zone, err := c.engine.Zone(c.in)
	if err != nil {
		return have, false
	}
	l, err := c.engine.FindLease(m.Inside, m.Remote, m.Protocol, zone)
	if err != nil || l == nil {
		return have, false
	}
	return mappingOf(l), true
}

func mappingOf(l *datapath.Lease) pcp.Mapping {
	m := pcp.Mapping{Inside: l.Inside, Remote: l.Remote, Protocol: l.Protocol, Nonce: l.Nonce, Open: l.Open, Outside: l.Outside, Lifetime: l.Left}
	for _, f := range l.Filters {
		m.Filters = append(m.Filters, pcp.Filter(f))
	}
	return m
}

// Epoch is since when no mapping was lost.
func (c *portControl) Epoch() time.Duration { return time.Since(c.epoch) }

// MaxFilters is how many filters a mapping may have.
func (c *portControl) MaxFilters() int { return datapath.LeaseFilters }

func (c *portControl) lease(m *pcp.Mapping) *datapath.LeaseRequest {
	return &datapath.LeaseRequest{
		Inside: m.Inside, Remote: m.Remote, Protocol: m.Protocol, Nonce: m.Nonce, Open: m.Open, In: c.in, Lifetime: m.Lifetime,
		Limit: c.file.PCP.PerSubscriber, Outside: m.Outside, Strict: m.Strict, Restate: m.Restate,
	}
}

// byEgress asks with the interface that packets of the host would leave by, which decides what
// rule is about them: that of the route to the remote endpoint; without one that of the route to
// anywhere, then the others.
func (c *portControl) byEgress(q *datapath.LeaseRequest, ask func() (datapath.LeaseResult, error)) (r datapath.LeaseResult, err error) {
	var links []int
	to := anywhere
	if q.Remote.IsValid() {
		to = q.Remote.Addr().AsSlice()
	}
	routes, unreachable := netlink.RouteGet(to)
	if unreachable == nil && len(routes) > 0 && slices.Contains(c.outside, routes[0].LinkIndex) {
		links = append(links, routes[0].LinkIndex)
	}
	if !q.Remote.IsValid() {
		for _, l := range c.outside {
			if !slices.Contains(links, l) {
				links = append(links, l)
			}
		}
	}
	r = datapath.LeaseUntranslated
	for _, link := range links {
		q.Out = link
		for range leaseTries {
			if r, err = ask(); err != nil {
				return r, err
			}
			if reason, is := r.Reason(); !is || reason.String() != "race" {
				break
			}
		}
		if r != datapath.LeaseUntranslated && r != datapath.LeaseNone {
			break
		}
	}
	if away := len(c.outside) < len(c.file.Outside) || q.Remote.IsValid() && unreachable != nil; away && r == datapath.LeaseUntranslated {
		return r, errAway
	}
	return r, nil
}

// errAway is that no rule is about a host, and an outside interface is not there, or the route: with it
// one may be. A client that is refused asks again much later.
var errAway = errors.New("the network is away")

// resultOf is what a client is told.
func resultOf(r datapath.LeaseResult) pcp.Result {
	switch r {
	case datapath.LeaseDone, datapath.LeaseStatic:
		return pcp.Success
	case datapath.LeaseNonce, datapath.LeaseUntranslated:
		return pcp.NotAuthorized
	case datapath.LeaseExternal:
		return pcp.CannotProvideExternal
	case datapath.LeaseQuota:
		return pcp.UserExQuota
	case datapath.LeaseUnsupported:
		return pcp.UnsuppProtocol
	}
	reason, _ := r.Reason()
	switch reason.String() {
	case "source-limit", "port-limit", "rate-limit":
		return pcp.UserExQuota
	case "no-port", "no-address", "no-block", "mappings-full", "sources-full", "sessions-full", "race":
		return pcp.NoResources
	}
	return pcp.NetworkFailure
}
