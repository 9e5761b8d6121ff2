// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/ethtool"
)

// Settings of a network device have names of natkit's own, "dev.eth0.rx_ring": they
// are files below /sys, or what its driver is told. Both belong to the namespace
// that the device is in.

// sysNet is where devices are folders. Tests put a tree of their own there.
const sysNet = "/sys/class/net"

// isDevice says whether a setting is one of a device, and not below /proc/sys.
func isDevice(name string) bool { return strings.HasPrefix(name, "dev.") }

// deviceOf takes the name of a device's setting apart.
func deviceOf(name string) (device, key string) {
	_, rest, _ := strings.Cut(name, ".")
	device, key, _ = strings.Cut(rest, ".")
	return strings.ReplaceAll(device, "/", "."), key
}

// rpsFiles say which processors are handed what a receive queue gets.
const rpsFiles = "queues/rx-%d/rps_cpus"

func (s *space) readDevice(name string) (value string, err error) {
	device, key := deviceOf(name)
	switch key {
	case "threaded", "tx_queue_len": // files of these names
		err = s.doSys(device, func(root *os.Root) error {
			data, err := root.ReadFile(key)
			value = strings.TrimSpace(string(data))
			return err
		})
	case "rps_cpus": // of each receive queue
		err = s.doSys(device, func(root *os.Root) error {
			var masks []string
			for n := 0; ; n++ {
				data, err := root.ReadFile(fmt.Sprintf(rpsFiles, n))
				if n > 0 && errors.Is(err, fs.ErrNotExist) {
					break
				}
				if err != nil {
					return err
				}
				mask, err := canonicalMask(strings.TrimSpace(string(data)))
				if err != nil {
					return err
				}
				masks = append(masks, mask)
			}
			value = strings.Join(masks, " ")
			return nil
		})
	default:
		err = s.ask(func(c *ethtool.Conn) error {
			n, err := driverSetting(c, device, key)
			value = strconv.FormatUint(uint64(n), 10)
			return err
		})
	}
	return value, err
}

func driverSetting(c *ethtool.Conn, device, key string) (uint32, error) {
	switch key {
	case "rx_ring":
		length, _, err := c.RxRing(device)
		return length, err
	case "combined_channels":
		ch, err := c.Channels(device)
		if err == nil && ch.CombinedMax == 0 {
			err = unix.EOPNOTSUPP
		}
		return ch.Combined, err
	case "rx_checksum":
		on, err := c.RxChecksum(device)
		if on {
			return 1, err
		}
		return 0, err
	}
	return 0, unix.EOPNOTSUPP // find lets no other through
}

func (s *space) writeDevice(name, value string) error {
	device, key := deviceOf(name)
	var err error
	switch key {
	case "threaded", "tx_queue_len": // files of these names
		err = s.doSys(device, func(root *os.Root) error { return writeOnce(root, key, value) })
	case "rps_cpus":
		masks := strings.Fields(value) // one for all queues, or one for each
		err = s.doSys(device, func(root *os.Root) error {
			for n := 0; ; n++ {
				file := fmt.Sprintf(rpsFiles, n)
				if _, err := root.Stat(file); n > 0 && errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				if err := writeOnce(root, file, masks[min(n, len(masks)-1)]); err != nil {
					return err
				}
			}
		})
	default:
		var n uint64
		if n, err = strconv.ParseUint(value, 10, 32); err == nil {
			err = s.ask(func(c *ethtool.Conn) error { return tellDriver(c, device, key, uint32(n)) })
		}
	}
	return err
}

func tellDriver(c *ethtool.Conn, device, key string, n uint32) error {
	switch key {
	case "rx_ring":
		return c.SetRxRing(device, n)
	case "combined_channels":
		ch, err := c.Channels(device)
		if err != nil {
			return err
		}
		ch.Combined = n
		return c.SetChannels(device, ch)
	case "rx_checksum":
		return c.SetRxChecksum(device, n != 0)
	}
	return unix.EOPNOTSUPP
}

// doSys runs fn with the folder of a device.
func (s *space) doSys(device string, fn func(*os.Root) error) error {
	dir := sysNet
	if s.root != procSys {
		dir = path.Join(s.root, "../class-net")
	}
	return s.handle.DoWithSys(func() error {
		root, err := os.OpenRoot(path.Join(dir, device)) // a link to where the device is
		if err != nil {
			return err
		}
		defer root.Close()
		return fn(root)
	})
}

// ask runs fn with a socket on which the namespace's drivers are asked.
func (s *space) ask(fn func(*ethtool.Conn) error) error {
	if s.root != procSys {
		return fs.ErrNotExist // a tree of files has no drivers
	}
	err := s.handle.Do(func() error {
		c, err := ethtool.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		return fn(c)
	})
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return fs.ErrNotExist // no such device, or its driver has no such setting
	}
	return err
}
