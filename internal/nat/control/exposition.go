// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
)

// A family is the series of one name.
type family struct {
	name, help string
	labels     []string
}

func metric(name, help string, labels ...string) *family {
	return &family{"natkit_" + name, help, labels}
}

// An exposition is the answer to a scrape, in the text format 0.0.4 of Prometheus. It
// is written here because client_golang, which knows more formats, would be a tenth of
// the program.
type exposition struct {
	kinds  map[*family]string
	series map[*family][]string
	err    error // the first that kept a value from being read
}

func newExposition() *exposition {
	return &exposition{kinds: map[*family]string{}, series: map[*family][]string{}}
}

func (e *exposition) gauge(f *family, value float64, labels ...string) {
	e.add("gauge", f, value, labels)
}

func (e *exposition) counter(f *family, value float64, labels ...string) {
	e.add("counter", f, value, labels)
}

func (e *exposition) fail(f *family, err error) {
	if e.err == nil {
		e.err = fmt.Errorf("%s: %w", f.name, err)
	}
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func (e *exposition) add(kind string, f *family, value float64, labels []string) {
	var pairs []string
	for i, name := range f.labels {
		pairs = append(pairs, name+`="`+labelEscapes.Replace(labels[i])+`"`)
	}
	series := f.name
	if len(pairs) > 0 {
		series += "{" + strings.Join(pairs, ",") + "}"
	}
	e.kinds[f] = kind
	e.series[f] = append(e.series[f], series+" "+strconv.FormatFloat(value, 'g', -1, 64))
}

// write writes the families by their names.
func (e *exposition) write(w io.Writer) error {
	var families []*family
	for f := range e.series {
		families = append(families, f)
	}
	slices.SortFunc(families, func(a, b *family) int { return strings.Compare(a.name, b.name) })
	var b strings.Builder
	for _, f := range families {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", f.name, f.help, f.name, e.kinds[f])
		for _, line := range e.series[f] {
			b.WriteString(line + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Of the process, by the names that Prometheus' own client gives them.
var (
	descGo         = &family{"go_info", "Information about the Go environment.", []string{"version"}}
	descGoroutines = &family{"go_goroutines", "Number of goroutines that currently exist.", nil}
	descHeap       = &family{"go_memstats_heap_alloc_bytes", "Number of heap bytes allocated and currently in use.", nil}
	descGoMemory   = &family{"go_memstats_sys_bytes", "Number of bytes obtained from system.", nil}
	descCPU        = &family{"process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", nil}
	descOpenFiles  = &family{"process_open_fds", "Number of open file descriptors.", nil}
	descMaxFiles   = &family{"process_max_fds", "Maximum number of open file descriptors.", nil}
	descVirtual    = &family{"process_virtual_memory_bytes", "Virtual memory size in bytes.", nil}
	descResident   = &family{"process_resident_memory_bytes", "Resident memory size in bytes.", nil}
	descStart      = &family{"process_start_time_seconds", "Start time of the process since unix epoch in seconds.", nil}
)

// process tells what serve itself takes. What /proc does not show is left out.
func (e *exposition) process() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	e.gauge(descGo, 1, runtime.Version())
	e.gauge(descGoroutines, float64(runtime.NumGoroutine()))
	e.gauge(descHeap, float64(m.HeapAlloc))
	e.gauge(descGoMemory, float64(m.Sys))
	self, err := procfs.Self()
	if err != nil {
		return
	}
	if s, err := self.Stat(); err == nil {
		e.counter(descCPU, s.CPUTime())
		e.gauge(descVirtual, float64(s.VirtualMemory()))
		e.gauge(descResident, float64(s.ResidentMemory()))
		if start, err := s.StartTime(); err == nil {
			e.gauge(descStart, start)
		}
	}
	if n, err := self.FileDescriptorsLen(); err == nil {
		e.gauge(descOpenFiles, float64(n))
	}
	if l, err := self.Limits(); err == nil {
		e.gauge(descMaxFiles, float64(l.OpenFiles))
	}
}
