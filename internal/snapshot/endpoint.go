// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strconv"
	"time"
)

// Endpoint is an address with a port, which JSON has as two fields. The zero Endpoint is not
// known, and null in JSON where it is not left out.
type Endpoint struct{ netip.AddrPort }

// EndpointOf is an address and port as an Endpoint.
func EndpointOf(a netip.AddrPort) Endpoint { return Endpoint{a} }

// EndpointFrom is the Endpoint of an address and a port.
func EndpointFrom(a netip.Addr, port uint16) Endpoint { return Endpoint{netip.AddrPortFrom(a, port)} }

// endpointJSON is an Endpoint in JSON.
type endpointJSON struct {
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
}

// IsZero says whether it is not known.
func (e Endpoint) IsZero() bool { return !e.IsValid() }

// Compare orders endpoints by address, then port.
func (e Endpoint) Compare(o Endpoint) int { return e.AddrPort.Compare(o.AddrPort) }

// AppendJSON appends what MarshalJSON returns.
func (e Endpoint) AppendJSON(b []byte) []byte {
	if e.IsZero() {
		return append(b, "null"...)
	}
	b = e.Addr().AppendTo(append(b, `{"address":"`...))
	return append(strconv.AppendUint(append(b, `","port":`...), uint64(e.Port()), 10), '}')
}

// MarshalJSON writes address and port.
func (e Endpoint) MarshalJSON() ([]byte, error) { return e.AppendJSON(nil), nil }

// UnmarshalJSON reads what MarshalJSON writes.
func (e *Endpoint) UnmarshalJSON(b []byte) error {
	var fields *endpointJSON
	if err := json.Unmarshal(b, &fields); err != nil {
		return err
	}
	*e = Endpoint{}
	if fields == nil {
		return nil
	}
	if !fields.Address.IsValid() {
		return errors.New("an endpoint without an address")
	}
	*e = EndpointFrom(fields.Address, fields.Port)
	return nil
}

// Seconds is a duration that JSON has as a number of seconds.
type Seconds time.Duration

// String is that of the duration.
func (s Seconds) String() string { return time.Duration(s).String() }

// Seconds is the number of them.
func (s Seconds) Seconds() float64 { return time.Duration(s).Seconds() }

// MarshalJSON writes seconds.
func (s Seconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(s).Seconds(), 'f', -1, 64), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	var n float64
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*s = Seconds(n * float64(time.Second))
	return nil
}
