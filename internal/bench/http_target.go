// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"natkit/internal/kernel/netns"
)

// httpTarget is where requests go, and the request itself: every one of a run
// is the same bytes.
type httpTarget struct {
	host    string // name or address, without port
	port    uint16
	path    string         // with the query
	addr    netip.AddrPort // after resolve
	request []byte
}

// parseTarget takes a URL apart and writes the request for it. The request is
// HTTP/1.0, as ab(1) sends it: the answer is the same body without chunks, and
// the server closes the connection unless asked to keep it.
func parseTarget(raw string, keepAlive bool, headers []string) (*httpTarget, error) {
	full := raw
	if !strings.Contains(raw, "://") {
		full = "http://" + raw
	}
	u, err := url.Parse(full)
	switch {
	case err != nil:
		return nil, refuse("URL", "%q: not a URL: %v", raw, err)
	case u.Scheme == "https":
		return nil, refuse("URL", "%q: https is not supported: NAT treats both alike, measure with http", raw)
	case u.Scheme != "http":
		return nil, refuse("URL", "%q: want http://HOST[:PORT]/PATH", raw)
	case u.Hostname() == "":
		return nil, refuse("URL", "%q: no host", raw)
	case strings.Contains(u.Hostname(), "%"):
		return nil, refuse("URL", "%q: a link-local address, to which no router forwards", raw)
	case u.User != nil:
		return nil, refuse("URL", "%q: user and password are not sent; give them as {Headers} 'Authorization: ...'", raw)
	}
	t := &httpTarget{host: u.Hostname(), port: 80, path: u.RequestURI()}
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return nil, refuse("URL", "%q: port %q: want 1 to 65535", raw, p)
		}
		t.port = uint16(n)
	}

	connection := "close"
	if keepAlive {
		connection = "Keep-Alive"
	}
	own := [][2]string{{"Host", u.Host}, {"User-Agent", "natkit"}, {"Accept", "*/*"}, {"Connection", connection}}
	given := map[string]bool{}
	for _, h := range headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok || name == "" || strings.ContainsAny(name, " \t\r\n") || strings.ContainsAny(value, "\r\n") {
			return nil, refuse("Headers", "%q: want \"Name: value\"", h)
		}
		given[strings.ToLower(name)] = true
	}
	var b strings.Builder
	fmt.Fprintf(&b, "GET %s HTTP/1.0\r\n", t.path)
	for _, h := range own {
		if !given[strings.ToLower(h[0])] {
			fmt.Fprintf(&b, "%s: %s\r\n", h[0], h[1])
		}
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		fmt.Fprintf(&b, "%s: %s\r\n", name, strings.TrimSpace(value))
	}
	b.WriteString("\r\n")
	t.request = []byte(b.String())
	return t, nil
}

// resolve returns the address of a host as the namespace's own resolver sees
// it, IPv4 if there is one. It asks once: no request waits for a name server.
func resolve(ctx context.Context, ns *netns.Handle, host string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Unmap(), nil
	}
	r := net.Resolver{
		PreferGo: true, // the one that lets its sockets be made in a namespace
		Dial: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			err = ns.Do(func() error {
				var d net.Dialer
				conn, err = d.DialContext(ctx, network, address)
				return err
			})
			return conn, err
		},
	}
	addrs, err := r.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("resolve %q: %w", host, err)
	}
	for _, a := range addrs {
		if a.Unmap().Is4() {
			return a.Unmap(), nil
		}
	}
	return addrs[0], nil
}
