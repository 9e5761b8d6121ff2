// SPDX-License-Identifier: Apache-2.0

package ktest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// changing are the system calls by which a program may change what outlives it. Two states that a kill leaves behind
// differ by which of them were made: what a process only holds, as a lock or a program that is not pinned, ends with it.
var changing = map[uint64]string{
	unix.SYS_EXIT_GROUP: "exit_group", unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHMODAT: "fchmodat", unix.SYS_FSYNC: "fsync",
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_IOCTL: "ioctl", unix.SYS_LINKAT: "linkat", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_MOUNT: "mount",
	unix.SYS_OPENAT: "openat", unix.SYS_PWRITE64: "pwrite64", unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_SENDMSG: "sendmsg",
	unix.SYS_SENDTO: "sendto", unix.SYS_SYMLINKAT: "symlinkat", unix.SYS_UMOUNT2: "umount2", unix.SYS_UNLINKAT: "unlinkat", unix.SYS_WRITE: "write",
}

// changingBPF are the commands of bpf that do.
var changingBPF = map[uint64]string{
	unix.BPF_MAP_UPDATE_ELEM: "MAP_UPDATE_ELEM", unix.BPF_MAP_DELETE_ELEM: "MAP_DELETE_ELEM", unix.BPF_OBJ_PIN: "OBJ_PIN", unix.BPF_PROG_ATTACH: "PROG_ATTACH",
	unix.BPF_PROG_DETACH: "PROG_DETACH", unix.BPF_PROG_TEST_RUN: "PROG_TEST_RUN", unix.BPF_MAP_FREEZE: "MAP_FREEZE", unix.BPF_MAP_UPDATE_BATCH: "MAP_UPDATE_BATCH",
	unix.BPF_MAP_DELETE_BATCH: "MAP_DELETE_BATCH", unix.BPF_LINK_CREATE: "LINK_CREATE", unix.BPF_LINK_UPDATE: "LINK_UPDATE", unix.BPF_LINK_DETACH: "LINK_DETACH",
}

// syscallInfo is struct ptrace_syscall_info of a call that begins or has ended.
type syscallInfo struct {
	op     uint8
	_      [3]uint8
	arch   uint32
	ip, sp uint64
	nr     uint64 // what it returns, when it has ended
	args   [6]uint64
}

// restarts reports whether the kernel has ended the call only to have it made again, as it does with writes to
// some settings, thousands of times, while somebody else holds the lock of the network's configuration.
func (s *syscallInfo) restarts() bool {
	const first, last = -512, -516 // ERESTARTSYS, ERESTART_RESTARTBLOCK
	return s.op == unix.PTRACE_SYSCALL_INFO_EXIT && last <= int64(s.nr) && int64(s.nr) <= first
}

// name is the call's that begins, if it may change what outlives the process.
func (s *syscallInfo) name() string {
	switch {
	case s.op != unix.PTRACE_SYSCALL_INFO_ENTRY:
		return ""
	case s.nr == unix.SYS_OPENAT && s.args[2]&(unix.O_CREAT|unix.O_TRUNC) == 0:
		return ""
	case s.nr == unix.SYS_BPF:
		return changingBPF[s.args[0]]
	}
	return changing[s.nr]
}

// KillAt runs a program in a folder, and kills it as its nth system call begins that may change what outlives it, of
// all its threads together; 0: never. It returns the names of these calls that it has made, in their order, what it
// has written, and how it ended. A tracer counts better than `strace --inject` does, which counts each thread by itself: Go's
// scheduler gives a call to another thread each time.
func KillAt(t testing.TB, nth int, dir, program string, args ...string) (calls []string, output string, end syscall.WaitStatus) {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "output")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	err = netns.OnNewThread(func() error { // only the thread that has started a process traces it
		pid, err := syscall.ForkExec(program, append([]string{program}, args...), &syscall.ProcAttr{
			Dir: dir, Env: os.Environ(), Files: []uintptr{out.Fd(), out.Fd(), out.Fd()}, Sys: &syscall.SysProcAttr{Ptrace: true},
		})
		if err != nil {
			return err
		}
		calls, end, err = trace(pid, nth)
		if err != nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return err
	})
	text, err2 := os.ReadFile(out.Name())
	if err := errors.Join(err, err2); err != nil {
		t.Fatalf("trace %s %q: %v", program, args, err)
	}
	return calls, string(text), end
}

// trace is KillAt for a process that has stopped at its first instruction, and is traced by the calling thread.
func trace(pid, nth int) (calls []string, end syscall.WaitStatus, err error) {
	const atCall = unix.SIGTRAP | 0x80 // PTRACE_O_TRACESYSGOOD
	began := false
	inCall := map[int]string{} // which calls the threads are in
	for {
		var status syscall.WaitStatus
		tid, err := syscall.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, 0, fmt.Errorf("wait: %w", err)
		case !status.Stopped() && tid == pid: // the last of its threads
			return calls, status, nil
		case !status.Stopped():
			continue
		}
		if !began {
			began = true
			if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL); err != nil {
				return nil, 0, fmt.Errorf("set options: %w", err)
			}
		}
		signal := status.StopSignal()
		if signal == atCall {
			var info syscallInfo
			_, _, failed := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(tid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
			if failed != 0 && failed != unix.ESRCH { // killed
				return nil, 0, fmt.Errorf("read a system call: %w", failed)
			}
			if name := info.name(); name != "" && name != inCall[tid] {
				inCall[tid] = name
				if calls = append(calls, name); len(calls) == nth {
					if err := unix.Kill(pid, unix.SIGKILL); err != nil {
						return nil, 0, err
					}
				}
			} else if name == "" && !info.restarts() {
				delete(inCall, tid)
			}
		}
		// Stops of the tracer's own are not for the program: at a call, at a new thread's first instruction, as it is cloned.
		if slices.Contains([]syscall.Signal{atCall, unix.SIGSTOP, unix.SIGTRAP}, signal) {
			signal = 0
		}
		if err := unix.PtraceSyscall(tid, int(signal)); err != nil && !errors.Is(err, unix.ESRCH) {
			return nil, 0, fmt.Errorf("go on: %w", err)
		}
	}
}
