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
// known: its fields are omitzero, and it has no JSON of its own.
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

// MarshalJSON writes address and port.
func (e Endpoint) MarshalJSON() ([]byte, error) {
	if e.IsZero() {
		return nil, errors.New("an unknown endpoint in a list")
	}
	b := e.Addr().AppendTo([]byte(`{"address":"`))
	return append(strconv.AppendUint(append(b, `","port":`...), uint64(e.Port()), 10), '}'), nil
}

// UnmarshalJSON reads what MarshalJSON writes, and null, as older files have it.
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
