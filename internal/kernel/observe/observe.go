// SPDX-License-Identifier: Apache-2.0

// Package observe watches the kernel at work: which packets it drops and where,
// which functions hang on the netfilter hooks, and where its time goes. It owns
// the programs in bpf/trace, attaches them for as long as an observer is open,
// and turns what they count into facts. It changes no packet and no setting, and
// it does not judge.
//
// What an observer needs from the kernel may not be there. Then its constructor
// returns an error that wraps [ErrUnavailable] and says in a sentence what is
// missing, so that a caller can go on without this part of the answer.
package observe

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// ErrUnavailable means that this kernel, or this process's rights, do not allow
// the observation. Trying again gives the same answer.
var ErrUnavailable = errors.New("not possible here")

// unavailableError keeps the cause for errors.As, and out of the message: what
// the eBPF library says of a refusal is often about something else.
type unavailableError struct {
	what, why string
	cause     error
}

func (e *unavailableError) Error() string {
	return e.what + ": " + ErrUnavailable.Error() + ": " + e.why
}

func (e *unavailableError) Unwrap() []error {
	if e.cause == nil {
		return []error{ErrUnavailable}
	}
	return []error{ErrUnavailable, e.cause}
}

// refused explains why the kernel did not let natkit do what (a verb and its
// object), for errors that mean "not on this machine"; others pass through.
func refused(what string, err error) error {
	why := ""
	var verifier *ebpf.VerifierError
	switch {
	case errors.As(err, &verifier) && len(verifier.Log) > 0: // whatever its errno is
		why = "the kernel's verifier refuses natkit's program: " + firstLine(err)
	case errors.Is(err, unix.ENOSYS):
		why = "the kernel, or a seccomp filter, does not offer the system call"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		why = missingRight()
	case errors.Is(err, ebpf.ErrNotSupported):
		why = "this kernel does not support it: " + firstLine(err)
	default:
		return fmt.Errorf("%s: %w", what, err)
	}
	return &unavailableError{what: what, why: why, cause: err}
}

// missingRight says which right the process lacks to load tracing programs.
func missingRight() string {
	const sysAdmin, perfmon, bpf = 1 << unix.CAP_SYS_ADMIN, 1 << unix.CAP_PERFMON, 1 << unix.CAP_BPF
	caps := effectiveCapabilities()
	switch {
	case caps&sysAdmin == 0 && caps&(perfmon|bpf) != perfmon|bpf && os.Geteuid() != 0:
		return "run as root, or with the capabilities CAP_BPF and CAP_PERFMON"
	case caps&sysAdmin == 0 && caps&(perfmon|bpf) != perfmon|bpf:
		return "the capabilities CAP_BPF and CAP_PERFMON are missing (a container without them?)"
	}
	lockdown, _ := os.ReadFile("/sys/kernel/security/lockdown")
	if strings.Contains(string(lockdown), "[confidentiality]") {
		return "the kernel is locked down (mode confidentiality)"
	}
	return "the kernel refuses it to this process (a security module or a seccomp filter)"
}

// effectiveCapabilities is CapEff of this thread; 0 when it can't be read.
func effectiveCapabilities() uint64 {
	status, _ := os.ReadFile("/proc/thread-self/status")
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "CapEff:"); ok {
			caps, _ := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
			return caps
		}
	}
	return 0
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// typeModules hold types that the programs read, where they are not built in.
var typeModules = []string{"nf_conntrack", "nf_nat", "nf_tables", "x_tables"}

// kernelTypes reads the running kernel's type information, against which the
// programs are relocated, and that of the modules in typeModules as far as they
// are loaded.
func kernelTypes() (kernel *btf.Spec, opts ebpf.ProgramOptions, err error) {
	cache := btf.NewCache()
	kernel, err = cache.Kernel()
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, fs.ErrNotExist) {
		why := "it was built without them (CONFIG_DEBUG_INFO_BTF)"
		if _, err := os.Stat("/sys/kernel"); err != nil {
			why = "no sysfs is mounted on /sys, where the kernel shows them: run `mount -t sysfs sysfs /sys`"
		}
		return nil, opts, &unavailableError{"read the kernel's types", why, err}
	}
	if err != nil {
		return nil, opts, refused("read the kernel's types", err)
	}
	opts.KernelTypes = kernel
	for _, name := range typeModules {
		switch module, err := cache.Module(name); {
		case err == nil:
			opts.ExtraRelocationTargets = append(opts.ExtraRelocationTargets, module)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, opts, refused("read the types of module "+name, err)
		}
	}
	return kernel, opts, nil
}
