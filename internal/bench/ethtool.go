// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// withEthtool runs fn with a handle on the devices of the calling thread's
// namespace.
func withEthtool(fn func(*ethtool.Ethtool) error) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return fmt.Errorf("open ethtool: %w", err)
	}
	defer e.Close()
	return fn(e)
}

// receiveByNAPI makes a veth device of the calling thread's namespace take frames
// by NAPI, which is what lets an XDP program at the other end send to it: either
// a program of its own or GRO brings that about, veth_napi_enable.
func receiveByNAPI(device string) error {
	return withEthtool(func(e *ethtool.Ethtool) error {
		if err := e.Change(device, map[string]bool{"rx-gro": true}); err != nil {
			return fmt.Errorf("turn on GRO of %s: %w", device, err)
		}
		return nil
	})
}
