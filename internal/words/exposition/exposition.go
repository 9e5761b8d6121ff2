// SPDX-License-Identifier: Apache-2.0

// Package exposition writes numbers in the text format 0.0.4 of Prometheus. It is written here
// because client_golang, which knows more formats, would be a tenth of the program.
package exposition

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
)

// Family is the series of one name.
type Family struct {
	Name, Help string
	Labels     []string
}

// Metric is a family of natkit.
func Metric(name, help string, labels ...string) *Family {
	return &Family{"natkit_" + name, help, labels}
}

// Exposition is the answer to a scrape.
type Exposition struct {
	kinds  map[*Family]string
	series map[*Family][]string
	err    error // the first that kept a value from being read
}

// New is one without series.
func New() *Exposition {
	return &Exposition{kinds: map[*Family]string{}, series: map[*Family][]string{}}
}

// Gauge adds a series of a value that goes up and down; labels are the values of f.Labels.
func (e *Exposition) Gauge(f *Family, value float64, labels ...string) {
	e.add("gauge", f, value, labels)
}

// Counter adds a series of a value that only grows.
func (e *Exposition) Counter(f *Family, value float64, labels ...string) {
	e.add("counter", f, value, labels)
}

// Fail notes that a value could not be read.
func (e *Exposition) Fail(f *Family, err error) {
	if e.err == nil {
		e.err = fmt.Errorf("%s: %w", f.Name, err)
	}
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func (e *Exposition) add(kind string, f *Family, value float64, labels []string) {
	var pairs []string
	for i, name := range f.Labels {
		// A value that is no UTF-8 would have Prometheus refuse the whole answer.
		pairs = append(pairs, name+`="`+labelEscapes.Replace(strings.ToValidUTF8(labels[i], "\ufffd"))+`"`)
	}
	series := f.Name
	if len(pairs) > 0 {
		series += "{" + strings.Join(pairs, ",") + "}"
	}
	e.kinds[f] = kind
	e.series[f] = append(e.series[f], series+" "+strconv.FormatFloat(value, 'g', -1, 64))
}

// Err is the first value that could not be read.
func (e *Exposition) Err() error { return e.err }

// Len is how many series there are.
func (e *Exposition) Len() (n int) {
	for _, series := range e.series {
		n += len(series)
	}
	return n
}

// Write writes the families by their names.
func (e *Exposition) Write(w io.Writer) error {
	var families []*Family
	for f := range e.series {
		families = append(families, f)
	}
	slices.SortFunc(families, func(a, b *Family) int { return strings.Compare(a.Name, b.Name) })
	var b strings.Builder
	for _, f := range families {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", f.Name, f.Help, f.Name, e.kinds[f])
		for _, line := range e.series[f] {
			b.WriteString(line + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Of the process, by the names that Prometheus' own client gives them.
var (
	descGo         = &Family{"go_info", "Information about the Go environment.", []string{"version"}}
	descGoroutines = &Family{"go_goroutines", "Number of goroutines that currently exist.", nil}
	descHeap       = &Family{"go_memstats_heap_alloc_bytes", "Number of heap bytes allocated and currently in use.", nil}
	descGoMemory   = &Family{"go_memstats_sys_bytes", "Number of bytes obtained from system.", nil}
	descCPU        = &Family{"process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", nil}
	descOpenFiles  = &Family{"process_open_fds", "Number of open file descriptors.", nil}
	descMaxFiles   = &Family{"process_max_fds", "Maximum number of open file descriptors.", nil}
	descVirtual    = &Family{"process_virtual_memory_bytes", "Virtual memory size in bytes.", nil}
	descResident   = &Family{"process_resident_memory_bytes", "Resident memory size in bytes.", nil}
	descStart      = &Family{"process_start_time_seconds", "Start time of the process since unix epoch in seconds.", nil}
)

// Process adds what this process takes. What /proc does not show is left out.
func (e *Exposition) Process() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	e.Gauge(descGo, 1, runtime.Version())
	e.Gauge(descGoroutines, float64(runtime.NumGoroutine()))
	e.Gauge(descHeap, float64(m.HeapAlloc))
	e.Gauge(descGoMemory, float64(m.Sys))
	self, err := procfs.Self()
	if err != nil {
		return
	}
	if s, err := self.Stat(); err == nil {
		e.Counter(descCPU, s.CPUTime())
		e.Gauge(descVirtual, float64(s.VirtualMemory()))
		e.Gauge(descResident, float64(s.ResidentMemory()))
		if start, err := s.StartTime(); err == nil {
			e.Gauge(descStart, start)
		}
	}
	if n, err := self.FileDescriptorsLen(); err == nil {
		e.Gauge(descOpenFiles, float64(n))
	}
	if l, err := self.Limits(); err == nil {
		e.Gauge(descMaxFiles, float64(l.OpenFiles))
	}
}
