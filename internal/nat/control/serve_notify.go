// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// notify tells systemd how a service of Type=notify stands: a datagram to the socket that
// it named. Without one nobody has asked; a message that does not arrive is systemd's to
// miss, and no reason to end.
func notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer c.Close()
	c.Write([]byte(state))
}

// reloading is the message of a service of Type=notify-reload; READY=1 ends it.
func reloading() string {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return "RELOADING=1"
	}
	return fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Nano()/1000)
}
