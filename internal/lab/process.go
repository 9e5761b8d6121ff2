// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// process names a process so that a later one with the same number is not taken
// for it, within one boot.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, /proc/PID/stat field 22
}

func identify(pid int) (process, error) {
	start, _, err := readStat(pid)
	return process{pid, start}, err
}

// alive says whether the process still runs; a zombie does not.
func (p process) alive() bool {
	start, state, err := readStat(p.PID)
	return err == nil && start == p.Start && state != 'Z' && state != 'X'
}

// kill ends the process and waits until it is gone. One that is gone is no error.
func (p process) kill() error {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	if !p.alive() { // the number, and so the descriptor, may be somebody else's by now
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	const limitMS = 5000
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, limitMS)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for process %d: %w", p.PID, err)
		case n == 0:
			return fmt.Errorf("process %d does not end after SIGKILL", p.PID)
		default:
			return nil
		}
	}
}

func readStat(pid int) (start uint64, state byte, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, fmt.Errorf("read state of process %d: %w", pid, err)
	}
	// The name in parentheses may hold anything; field 3 follows its last one.
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("read state of process %d: %d fields after its name", pid, len(fields))
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("read state of process %d: start time: %w", pid, err)
	}
	return start, fields[0][0], nil
}

// bootID changes with every boot: what a journal of an earlier one names is gone.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return string(bytes.TrimSpace(data)), nil
}
