// SPDX-License-Identifier: Apache-2.0

package observe

// This file turns kernel addresses into function names.

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// symbols are the kernel's functions, sorted by address. Names stand in one
// string, so that 200 000 of them cost a few megabytes and no garbage.
type symbols struct {
	table   []symbol
	names   string
	modules []string // "" for the kernel proper, "bpf" for programs and what leads into them
}

type symbol struct {
	addr       uint64
	start, end uint32 // its name is names[start:end]
	module     uint16 // index in modules
}

// maxFunctionBytes: an address further from the nearest symbol belongs to
// something that has none.
const maxFunctionBytes = 1 << 20

// known are the symbols as of the modules that were loaded when they were read.
var known struct {
	sync.Mutex
	symbols *symbols
	err     error
	modules string
}

// kernelSymbols reads those of the kernel and its modules from /proc/kallsyms, which takes about 0.1 s:
// once, and again when other modules are loaded. The error wraps ErrUnavailable where the kernel
// hides addresses; the table is then empty, and so are all names.
func kernelSymbols() (*symbols, error) {
	known.Lock()
	defer known.Unlock()
	if modules := loadedModules(); known.symbols == nil || modules != known.modules {
		known.symbols, known.err = readSymbols(false)
		known.modules = modules
	}
	return known.symbols, known.err
}

// symbolsWithPrograms reads those of eBPF programs, too, which come and go: no list of modules tells.
func symbolsWithPrograms() (*symbols, error) { return readSymbols(true) }

func readSymbols(programs bool) (*symbols, error) {
	const what = "read the kernel's symbols"
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return &symbols{}, refused(what, err)
	}
	defer f.Close()
	s, err := parseSymbols(f, programs)
	if err == nil && len(s.table) == 0 {
		err = &unavailableError{what: what, why: "the kernel hides their addresses: run as root or with the capability CAP_SYSLOG, and see kernel.kptr_restrict"}
	}
	return s, err
}

// loadedModules is the names of the modules; "" for a kernel that has none.
func loadedModules() string {
	data, _ := os.ReadFile("/proc/modules")
	var names strings.Builder
	for line := range strings.Lines(string(data)) {
		name, _, _ := strings.Cut(line, " ")
		names.WriteString(name)
		names.WriteByte(' ')
	}
	return names.String()
}

// HasFunction says whether the running kernel has a function of that name.
func HasFunction(name string) (bool, error) {
	s, err := kernelSymbols()
	return s.address(name) != 0, err
}

// programsModule is what /proc/kallsyms has for a module of eBPF programs, which come after all modules.
const programsModule = "bpf"

// parseSymbols reads the format of /proc/kallsyms: address, type, name and
// perhaps a module. Where programs are not wanted it ends before them: the kernel looks for each of
// theirs from the first one on.
func parseSymbols(r io.Reader, programs bool) (*symbols, error) {
	s := &symbols{modules: []string{""}}
	byModule := map[string]uint16{"": 0}
	var names []byte
	sc := bufio.NewScanner(bufio.NewReaderSize(r, 1<<18))
	for sc.Scan() {
		line := sc.Bytes()
		hex, rest, ok := bytes.Cut(line, []byte{' '})
		if !ok || len(rest) < 3 || rest[1] != ' ' || !bytes.ContainsRune([]byte("tTwW"), rune(rest[0])) {
			continue // data, or not a symbol
		}
		addr, err := strconv.ParseUint(string(hex), 16, 64)
		if err != nil || addr == 0 {
			continue
		}
		name, module, _ := bytes.Cut(rest[2:], []byte{'\t'})
		module = bytes.Trim(module, "[]")
		if !programs && string(module) == programsModule {
			break
		}
		number, ok := byModule[string(module)]
		if !ok && len(s.modules) < math.MaxUint16 {
			number = uint16(len(s.modules))
			s.modules = append(s.modules, string(module))
			byModule[string(module)] = number
		}
		start := len(names)
		names = append(names, name...)
		s.table = append(s.table, symbol{addr, uint32(start), uint32(len(names)), number})
	}
	if err := sc.Err(); err != nil {
		return &symbols{}, fmt.Errorf("read kernel symbols: %w", err)
	}
	s.names = string(names)
	slices.SortStableFunc(s.table, func(a, b symbol) int {
		if a.addr < b.addr {
			return -1
		} else if a.addr > b.addr {
			return 1
		}
		return 0
	})
	return s, nil
}

// function returns the name of the function that holds addr and how far into it
// addr is; "" when that is not known.
func (s *symbols) function(addr uint64) (name string, offset uint64) {
	if sym := s.find(addr); sym != nil {
		return s.names[sym.start:sym.end], addr - sym.addr
	}
	return "", 0
}

// module returns the module that holds addr; "" for the kernel proper.
func (s *symbols) module(addr uint64) string {
	if sym := s.find(addr); sym != nil {
		return s.modules[sym.module]
	}
	return ""
}

// find returns the symbol that holds addr, nil when there is none.
func (s *symbols) find(addr uint64) *symbol {
	i, found := slices.BinarySearchFunc(s.table, addr, func(sym symbol, addr uint64) int {
		if sym.addr < addr {
			return -1
		} else if sym.addr > addr {
			return 1
		}
		return 0
	})
	if !found {
		if i == 0 {
			return nil
		}
		i--
	}
	if sym := &s.table[i]; addr-sym.addr < maxFunctionBytes {
		return sym
	}
	return nil
}

// baseName is a function's name as in the source, without what the compiler puts
// behind it: .isra.0, .constprop.0, .cold.
func baseName(function string) string {
	name, _, _ := strings.Cut(function, ".")
	return name
}

// place is addr as people write it: "nf_hook_slow+0xa6", or the bare address.
func (s *symbols) place(addr uint64) string {
	name, offset := s.function(addr)
	if name == "" {
		return fmt.Sprintf("0x%x", addr)
	}
	return fmt.Sprintf("%s+0x%x", name, offset)
}

// address returns where the function called name begins, 0 when it is not known.
func (s *symbols) address(name string) uint64 {
	for _, sym := range s.table {
		if s.names[sym.start:sym.end] == name {
			return sym.addr
		}
	}
	return 0
}
