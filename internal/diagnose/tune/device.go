// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
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

// interfaceIn is the interface in a setting's name, "" where none is.
func interfaceIn(setting string) string {
	parts := strings.Split(setting, ".")
	at := interfacePart(parts)
	if at < 0 {
		return ""
	}
	return strings.ReplaceAll(parts[at], "/", ".")
}

// interfaces are the namespace's, by index.
func (s *space) interfaces() (names map[int]string, err error) {
	if s.root != procSys {
		return nil, nil // a tree of files has none
	}
	names = map[int]string{}
	err = s.handle.Do(func() error {
		list, err := net.Interfaces()
		for _, i := range list {
			names[i.Index] = i.Name
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list interfaces%s: %w", s.where(), err)
	}
	return names, nil
}

// indices are those of the interfaces that a change names.
func (s *space) indices(c set) (indices map[string]int, err error) {
	wanted := map[string]bool{interfaceIn(c.Setting): true}
	for name := range c.Along {
		wanted[interfaceIn(name)] = true
	}
	if delete(wanted, ""); len(wanted) == 0 {
		return nil, nil
	}
	names, err := s.interfaces()
	for index, name := range names {
		if wanted[name] {
			if indices == nil {
				indices = map[string]int{}
			}
			indices[name] = index
		}
	}
	return indices, err
}

// renamed is a change by the names that its interfaces have now, and false where the one that it is of is gone.
func (s *space) renamed(c set) (set, bool, error) {
	if len(c.Interfaces) == 0 {
		return c, true, nil
	}
	names, err := s.interfaces()
	if err != nil {
		return c, false, err
	}
	now := func(setting string) (string, bool) {
		index, known := c.Interfaces[interfaceIn(setting)]
		if !known { // "all", or an earlier natkit wrote it
			return setting, true
		}
		parts := strings.Split(setting, ".")
		parts[interfacePart(parts)] = strings.ReplaceAll(names[index], ".", "/")
		return strings.Join(parts, "."), names[index] != ""
	}
	along := map[string]string{}
	for name, value := range c.Along {
		if name, there := now(name); there {
			along[name] = value
		}
	}
	setting, there := now(c.Setting)
	if there {
		c.Setting, c.Along = setting, along
	}
	return c, there, nil
}

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
