// SPDX-License-Identifier: Apache-2.0

// Package ethtool asks the drivers of network devices and tells them what they may
// be told, by ioctl: what ethtool(8) does. It knows the few requests that natkit
// makes, and lets others be made.
package ethtool

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Conn is a socket by which drivers are asked, in the namespace of the thread that
// opened it.
type Conn struct{ fd int }

// Open makes one. Close must be called.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("ask drivers: %w", err)
	}
	return &Conn{fd}, nil
}

// Close ends it.
func (c *Conn) Close() { unix.Close(c.fd) }

// Request makes one request of a driver. data begins with the command, as the
// kernel's ethtool.h has it, and gets the answer. Errors are the kernel's: ENODEV
// without such a device, EOPNOTSUPP where its driver does not know the request.
func (c *Conn) Request(name string, data unsafe.Pointer) error {
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq is longer
	}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	request.data = data
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	runtime.KeepAlive(&request)
	if errno != 0 {
		return errno
	}
	return nil
}

// Driver is the name of a device's driver.
func (c *Conn) Driver(name string) (string, error) {
	info, err := unix.IoctlGetEthtoolDrvinfo(c.fd, name)
	if err != nil {
		return "", err
	}
	return unix.ByteSliceToString(info.Driver[:]), nil
}

type ring struct{ cmd, rxMax, miniMax, jumboMax, txMax, rx, mini, jumbo, tx uint32 }

// RxRing is the length of the receive ring, and the longest there can be.
func (c *Conn) RxRing(name string) (length, longest uint32, err error) {
	r := ring{cmd: unix.ETHTOOL_GRINGPARAM}
	err = c.Request(name, unsafe.Pointer(&r))
	return r.rx, r.rxMax, err
}

// SetRxRing sets it, and leaves the other rings.
func (c *Conn) SetRxRing(name string, length uint32) error {
	r := ring{cmd: unix.ETHTOOL_GRINGPARAM}
	if err := c.Request(name, unsafe.Pointer(&r)); err != nil {
		return err
	}
	r.cmd, r.rx = unix.ETHTOOL_SRINGPARAM, length
	return c.Request(name, unsafe.Pointer(&r))
}

// Channels is how many queues a device has, and could have; combined ones receive
// and send.
type Channels struct {
	RxMax, TxMax, OtherMax, CombinedMax uint32
	Rx, Tx, Other, Combined             uint32
}

type channels struct {
	cmd uint32
	Channels
}

// Channels asks for them.
func (c *Conn) Channels(name string) (Channels, error) {
	ch := channels{cmd: unix.ETHTOOL_GCHANNELS}
	err := c.Request(name, unsafe.Pointer(&ch))
	return ch.Channels, err
}

// SetChannels sets how many there are; the largest numbers are not looked at.
func (c *Conn) SetChannels(name string, want Channels) error {
	ch := channels{cmd: unix.ETHTOOL_SCHANNELS, Channels: want}
	return c.Request(name, unsafe.Pointer(&ch))
}

type value struct{ cmd, data uint32 }

// RxChecksum says whether the device judges the checksums of what it receives.
func (c *Conn) RxChecksum(name string) (bool, error) {
	v := value{cmd: unix.ETHTOOL_GRXCSUM}
	err := c.Request(name, unsafe.Pointer(&v))
	return v.data != 0, err
}

// StripsVLAN says whether the device takes the VLAN tag off what it receives: programs of XDP
// see such a frame as if it had none.
func (c *Conn) StripsVLAN(name string) (bool, error) {
	const rxVLAN = 1 << 8 // ETH_FLAG_RXVLAN
	v := value{cmd: unix.ETHTOOL_GFLAGS}
	err := c.Request(name, unsafe.Pointer(&v))
	return v.data&rxVLAN != 0, err
}

// SetRxChecksum switches that.
func (c *Conn) SetRxChecksum(name string, on bool) error {
	v := value{cmd: unix.ETHTOOL_SRXCSUM}
	if on {
		v.data = 1
	}
	return c.Request(name, unsafe.Pointer(&v))
}
