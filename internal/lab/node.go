// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
)

// Node is one namespace of a lab.
type Node struct {
	Role  string
	Netns string     // its name in /run/netns
	Addr  netip.Addr // as the clients' side sees it; invalid for a switch

	handle *netns.Handle
	lab    *Lab
}

// Handle is the node's namespace, open as long as the Lab is.
func (n *Node) Handle() *netns.Handle { return n.handle }

// Do runs fn inside the namespace, see netns.Handle.Do.
func (n *Node) Do(fn func() error) error { return n.handle.Do(fn) }

// Sysctl writes a setting of the namespace. The key is dotted as for sysctl(8),
// or a path below /proc/sys.
func (n *Node) Sysctl(key, value string) error {
	return n.Do(func() error { return writeSysctl(key, value) })
}

// SysctlValue reads a setting of the namespace.
func (n *Node) SysctlValue(key string) (value string, err error) {
	err = n.Do(func() error {
		data, err := os.ReadFile(sysctlPath(key))
		value = strings.TrimSpace(string(data))
		return err
	})
	return value, err
}

func writeSysctl(key, value string) error {
	f, err := os.OpenFile(sysctlPath(key), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("set sysctl %s: %w", key, err)
	}
	_, err = f.WriteString(value)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("set sysctl %s to %q: %w", key, value, err)
	}
	return nil
}

func sysctlPath(key string) string {
	if !strings.Contains(key, "/") {
		key = strings.ReplaceAll(key, ".", "/")
	}
	return filepath.Join("/proc/sys", key)
}

// FillConntrack adds assured entries to the namespace's connection tracking table
// until only so many places are left of nf_conntrack_max. progress may be nil.
func (n *Node) FillConntrack(ctx context.Context, leave int, progress func(done, total int)) (res conntrack.FillResult, err error) {
	err = n.Do(func() error {
		limits, err := conntrack.ReadLimits()
		if err != nil {
			return err
		}
		free := int64(limits.Max) - int64(limits.Count) - int64(leave)
		if free <= 0 {
			return nil
		}
		res, err = conntrack.Fill(ctx, conntrack.FillOptions{Count: int(free), Progress: progress})
		return err
	})
	return res, err
}

// Command prepares a program to be run inside the namespace, with the namespace's
// own devices under /sys. It is used as an exec.Cmd; the end of ctx kills it.
func (n *Node) Command(ctx context.Context, name string, args ...string) *Command {
	return &Command{Cmd: exec.CommandContext(ctx, name, args...), node: n}
}

// Command is an exec.Cmd that starts inside a namespace.
type Command struct {
	*exec.Cmd
	node *Node
}

// Start starts the program, see exec.Cmd.
func (c *Command) Start() error { return c.node.handle.DoWithSys(c.Cmd.Start) }

// Run starts the program and waits for it, see exec.Cmd.
func (c *Command) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the program and returns what it wrote to its standard output.
func (c *Command) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// CombinedOutput runs the program and returns all that it wrote.
func (c *Command) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// Exec turns this process into the program, inside the namespace: terminal,
// signals and exit code are the program's own. It returns only when that fails.
func (n *Node) Exec(argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return n.handle.DoWithSys(func() error {
		if err := unix.Exec(path, argv, os.Environ()); err != nil {
			return fmt.Errorf("execute %q: %w", path, err)
		}
		return nil
	})
}
