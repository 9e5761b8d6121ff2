// SPDX-License-Identifier: Apache-2.0

package ktest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

const ownTests = "NATKIT_TEST_OWN" // set in the process that OwnMachine starts

// OwnMachine is what TestMain of a package calls whose tests trace all network namespaces that there are: with process
// numbers and a /run of its own it finds those of the package, and the initial one, and adds no table to those of other packages. It
// returns the exit code.
func OwnMachine(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run()
	}
	if os.Getenv(ownTests) != "" {
		err := errors.Join(unix.Mount("proc", "/proc", "proc", 0, ""), unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=0755"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), ownTests+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	err = netns.OnNewThread(func() error {
		if err := netns.OwnMounts(); err != nil {
			return err
		}
		return cmd.Run() // here: the process ends with the thread that started it
	})
	if err != nil && cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

// WithoutTraces lists the rules of a namespace when no trace of another package's tests has a table there: of those Debian's nft writes
// half a line of JSON.
func WithoutTraces(t testing.TB, list func() ([]byte, error)) (listed []byte, err error) {
	t.Helper()
	Wait(t, time.Minute, "rules without a trace's", func() bool {
		listed, err = list()
		return err != nil || !bytes.Contains(listed, []byte("natkit-trace-"))
	})
	return listed, err
}
