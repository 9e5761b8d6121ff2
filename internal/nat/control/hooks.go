// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"fmt"

	"natkit/internal/kernel/ethtool"
	"natkit/internal/words/choice"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attach says where the engine meets packets.
type Attach string

// Every interface has tc in any case: it finishes what XDP can't.
const (
	AttachAuto Attach = "auto" // XDP on physical interfaces whose driver has it, tc elsewhere
	AttachXDP  Attach = "xdp"
	AttachTC   Attach = "tc"
)

// ParseAttach reads the value of a flag.
func ParseAttach(s string) (Attach, error) {
	switch a := Attach(s); a {
	case AttachAuto, AttachXDP, AttachTC:
		return a, nil
	}
	return "", choice.Error(s, string(AttachAuto), string(AttachXDP), string(AttachTC))
}

// Placement is where the engine meets the packets of one interface, and why there.
type Placement struct {
	Interface string `json:"interface"`
	XDP       bool   `json:"xdp"`
	Transmit  bool   `json:"xdp_transmit"` // XDP may send here, too
	Reason    string `json:"reason"`

	kind string // of the device
}

// Features of a driver, Linux include/uapi/linux/netdev.h (6.3).
const (
	xdpBasic    = 1 << 0
	xdpRedirect = 1 << 1
	xdpTransmit = 1 << 2
)

// softwareKinds are devices whose packets are already (or still) the stack's own:
// segmentation offload is lost and partial checksums break when XDP takes them.
var softwareKinds = map[string]string{
	"veth":   "veth loses segmentation offload under XDP, and packets made at its other end have no checksum yet",
	"bridge": "a bridge has no XDP of its own", "tuntap": "a tunnel or tap device hands over unfinished packets",
	"dummy": "no packet comes in here", "vlan": "a VLAN device has no XDP of its own", "macvlan": "macvlan has no XDP of its own",
	"ipvlan": "ipvlan has no XDP of its own", "bond": "XDP on a bond depends on all its ports",
	"vxlan": "a tunnel's packets come through another device", "geneve": "a tunnel's packets come through another device",
	"team": "XDP on a team depends on all its ports",
}

// softwareCaution is what XDP on such a device, which was asked for, takes.
func softwareCaution(p Placement) string {
	return p.Interface + ": what XDP sends to a " + p.kind + " is lost unless its other end runs XDP or has GRO on, and programs at the other end need `ethtool -K DEVICE tx off` there: else their packets have no checksum yet"
}

// noXDP are kinds of devices whose driver has none (Linux 6.18): for kernels that do not say.
var noXDP = map[string]bool{"bridge": true, "dummy": true, "vlan": true, "macvlan": true, "ipvlan": true, "vxlan": true, "geneve": true, "gretap": true, "team": true}

// place decides for one interface. The calling thread is in its namespace.
func place(l netlink.Link, attach Attach) Placement {
	p := Placement{Interface: l.Attrs().Name, kind: l.Type()}
	features, known := xdpFeatures(l.Attrs().Index)
	if !known && noXDP[l.Type()] {
		known = true
	}
	p.Transmit = !known || features&xdpTransmit != 0
	software := softwareKinds[l.Type()]
	switch {
	case attach == AttachTC:
		p.Reason = "tc was asked for"
	case !hasFrames(l):
		p.Reason = "tc: no Ethernet frames"
	case attach == AttachXDP && known && features&xdpBasic == 0:
		p.Reason = "tc: the driver has no native XDP, which was asked for"
	case attach == AttachXDP:
		p.XDP, p.Reason = true, "XDP was asked for"
		// A veth sends for XDP when its other end polls, which the kernel's flags say
		// only while that is so; to try costs nothing.
		p.Transmit = p.Transmit || l.Type() == "veth"
	case software != "":
		p.Reason = "tc: " + software
	case known && features&xdpBasic == 0:
		p.Reason = "tc: the driver has no native XDP"
	case !known:
		p.Reason = "tc: this kernel does not say what its drivers can (Linux 6.3 does); --attach xdp tries"
	case features&xdpRedirect == 0:
		p.Reason = "tc: the driver's XDP does not redirect"
	default:
		p.XDP, p.Reason = true, "XDP: the driver has it natively"
	}
	if p.XDP {
		links, _ := netlink.LinkList()
		if vlan := vlanOn(l, links); vlan != "" && stripsVLAN(p.Interface) {
			p.XDP, p.Reason = false, fmt.Sprintf("tc: %s is on it, and the device takes VLAN tags off before XDP; `ethtool -K %s rxvlan off` leaves them", vlan, p.Interface)
		}
	}
	return p
}

// vlanOn names a VLAN among links that is on the interface. Without its tag XDP would take the
// VLAN's packet for one of the interface's own, and drop it as spoofed.
func vlanOn(l netlink.Link, links []netlink.Link) string {
	for _, above := range links {
		if above.Type() == "vlan" && above.Attrs().ParentIndex == l.Attrs().Index {
			return above.Attrs().Name
		}
	}
	return ""
}

func stripsVLAN(name string) bool {
	c, err := ethtool.Open()
	if err != nil {
		return false
	}
	defer c.Close()
	strips, err := c.StripsVLAN(name)
	return err == nil && strips
}

// xdpFeatures asks the kernel what a device's driver can do; false below Linux 6.3.
func xdpFeatures(ifindex int) (features uint64, known bool) {
	const (
		getDevice    = 1 // NETDEV_CMD_DEV_GET
		attrIfindex  = 1 // NETDEV_A_DEV_IFINDEX
		attrFeatures = 3 // NETDEV_A_DEV_XDP_FEATURES
	)
	id := askGeneric(nl.GENL_ID_CTRL, nl.GENL_CTRL_CMD_GETFAMILY, nl.GENL_CTRL_VERSION,
		nl.NewRtAttr(nl.GENL_CTRL_ATTR_FAMILY_NAME, nl.ZeroTerminated("netdev")), nl.GENL_CTRL_ATTR_FAMILY_ID)
	if len(id) != 2 {
		return 0, false
	}
	value := askGeneric(int(binary.NativeEndian.Uint16(id)), getDevice, 1,
		nl.NewRtAttr(attrIfindex, nl.Uint32Attr(uint32(ifindex))), attrFeatures)
	if len(value) != 8 {
		return 0, false
	}
	return binary.NativeEndian.Uint64(value), true
}

// genericHeader begins a message of generic netlink. The library's (netlink v1.3.1) has
// two of the four bytes, and sends what lies behind them in memory as the others, which
// the kernel wants to be 0.
type genericHeader [nl.SizeofGenlmsg]byte

func (h *genericHeader) Len() int          { return len(h) }
func (h *genericHeader) Serialize() []byte { return h[:] }

// askGeneric gives one attribute of the answer, nil if there is none.
func askGeneric(family int, command, version byte, about *nl.RtAttr, wanted uint16) []byte {
	request := nl.NewNetlinkRequest(family, 0)
	request.AddData(&genericHeader{command, version})
	request.AddData(about)
	messages, err := request.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		if len(m) < nl.SizeofGenlmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[nl.SizeofGenlmsg:])
		if err != nil {
			continue
		}
		for _, a := range attrs {
			if a.Attr.Type == wanted {
				return a.Value
			}
		}
	}
	return nil
}

// rawKinds are devices without Ethernet whose packets begin with IPv4 where tc meets
// them. Those of GRE begin with what is around them, and others have headers of their own.
var rawKinds = map[string]bool{"tuntap": true, "ppp": true, "wireguard": true, "ipip": true}

// errFrames refuses what has neither.
var errFrames = errors.New("the engine needs Ethernet frames, or packets without any header of the link")

// hasFrames reports whether a device's packets come in Ethernet frames.
func hasFrames(l netlink.Link) bool { return len(l.Attrs().HardwareAddr) == 6 }
