// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// xfrm counts the policies of IPsec that packets on their way out meet.
func xfrm() source {
	return source{
		name:  snapshot.CanXfrm,
		costs: "the cost of IPsec policies for other packets is unknown",
		live:  true,
		end: func(v *view, s *snapshot.Snapshot) error {
			s.Xfrm = &snapshot.Xfrm{}
			if !v.loaded("xfrm_user") {
				return nil // and asking would load it
			}
			list, err := listWhole(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(netlink.FAMILY_ALL) })
			switch {
			case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.ENOENT): // no IPsec in this kernel
				list = nil
			case err != nil:
				s.Xfrm = nil
				return fmt.Errorf("list IPsec policies: %w", err)
			}
			for _, p := range list {
				if p.Dir != netlink.XFRM_DIR_OUT && p.Dir != netlink.XFRM_DIR_FWD || p.Ifid != 0 {
					continue // the policies of an xfrm interface are met on that interface alone
				}
				s.Xfrm.Policies++
				src, okSrc := prefixOf(p.Src)
				dst, okDst := prefixOf(p.Dst)
				if !okSrc || !okDst || !src.IsSingleIP() || !dst.IsSingleIP() {
					s.Xfrm.Prefixes++
				}
			}
			return nil
		},
	}
}
