// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// The test binary is also the program that labs start as their background server,
// and the process that dies with a lab of its own.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "serve":
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
			defer stop()
			if lab.Serve(ctx, os.Args[3:]) != nil {
				os.Exit(1)
			}
			os.Exit(0)
		case "own":
			own(os.Args[2])
		}
	}
	dir, err := os.MkdirTemp("", "natkit-lab-")
	if err != nil {
		panic(err)
	}
	os.Setenv("NATKIT_RUN_DIR", dir)
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// own makes a lab that belongs to this process, says so, and waits to be killed.
func own(name string) {
	var err error
	owned, err = lab.Up(context.Background(), "routed", lab.Options{Name: name, Owned: true, Server: lab.ServerBuiltin, ServeCommand: serveCommand(name)})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("up")
	select {}
}

var owned *lab.Lab // what nobody refers to is collected, and its journal closed

// serveCommand is this program as the background server of a lab; the name is
// there for processesOf to find.
func serveCommand(name string) []string {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return []string{self, "serve", name}
}

// up makes a lab for the test, with a name of its own, and removes it afterwards.
func up(t testing.TB, topology string, o lab.Options) *lab.Lab {
	t.Helper()
	ktest.Root(t)
	if o.Name == "" {
		o.Name = ktest.Name(t)
	}
	if o.Server != "" && o.Server != lab.ServerNone {
		o.ServeCommand = serveCommand(o.Name)
	}
	l, err := lab.Up(t.Context(), topology, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
		nothingLeft(t, l.Name())
	})
	return l
}

// nothingLeft fails the test if a lab of that name has left something: a
// namespace, a file, a process.
func nothingLeft(t testing.TB, name string) {
	t.Helper()
	list, err := netns.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range list {
		role, ours := strings.CutPrefix(n.Name, name+"-")
		if ours && !strings.Contains(role, "-") {
			t.Errorf("network namespace %s is left", n.Name)
		}
	}
	files, err := filepath.Glob(filepath.Join(os.Getenv("NATKIT_RUN_DIR"), "lab", name+".*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
	if pids := processesOf(t, name); len(pids) > 0 {
		t.Errorf("processes are left: %v", pids)
	}
}

// processesOf returns the background servers of a lab: those of this test's run
// directory that have the lab's name, or that of its files, in their command line.
func processesOf(t testing.TB, name string) (out []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	self := fmt.Sprintf("/proc/%d/", os.Getpid())
	for _, path := range paths {
		env, err := os.ReadFile(path)
		if err != nil || strings.HasPrefix(path, self) || !strings.Contains(string(env), "NATKIT_RUN_DIR="+os.Getenv("NATKIT_RUN_DIR")+"\x00") {
			continue
		}
		cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if args := strings.ReplaceAll(string(cmdline), "\x00", " "); strings.Contains(args, " serve "+name+" ") || strings.Contains(args, name+".") {
			out = append(out, filepath.Base(filepath.Dir(path))+" "+args)
		}
	}
	return out
}

// openFiles is how many descriptors this process has.
func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
