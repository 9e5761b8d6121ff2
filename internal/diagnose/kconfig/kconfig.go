// SPDX-License-Identifier: Apache-2.0

// Package kconfig says what a kernel's configuration means for a machine that does
// NAT: what it lacks, and what it could do without. It is a function of the
// configuration's text; options.go is what it knows.
package kconfig

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// maxBytes is far more than a configuration has; a real one is some 300 kB.
const maxBytes = 16 << 20

// Config is a kernel's configuration.
type Config struct {
	Kernel string // as its head says; "" where it does not
	// values are the options' values, without CONFIG_: y, m, n where it says "is
	// not set", or a text or number.
	values map[string]string
}

// Read reads the format of .config, plain or compressed as /proc/config.gz is.
func Read(r io.Reader) (*Config, error) {
	head := bufio.NewReader(r)
	if magic, _ := head.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(head)
		if err != nil {
			return nil, fmt.Errorf("read kernel configuration: %w", err)
		}
		return read(z)
	}
	return read(head)
}

func read(r io.Reader) (*Config, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read kernel configuration: %w", err)
	}
	if len(text) > maxBytes {
		return nil, fmt.Errorf("read kernel configuration: longer than %d MiB", maxBytes>>20)
	}
	c := &Config{values: map[string]string{}}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if kernel, ok := strings.CutPrefix(line, "# Linux/"); ok && c.Kernel == "" {
			if _, version, ok := strings.Cut(strings.TrimSuffix(kernel, " Kernel Configuration"), " "); ok {
				c.Kernel = printable(version)
			}
			continue
		}
		if name, ok := strings.CutPrefix(line, "# CONFIG_"); ok {
			if name, ok := strings.CutSuffix(name, " is not set"); ok && isName(name) {
				c.values[name] = "n"
			}
			continue
		}
		name, value, ok := strings.Cut(line, "=")
		name, isOption := strings.CutPrefix(name, "CONFIG_")
		if ok && isOption && isName(name) {
			c.values[name] = printable(value)
		}
	}
	if len(c.values) == 0 {
		return nil, errors.New("read kernel configuration: no line such as CONFIG_NET=y in it: want a kernel's .config, or /proc/config.gz")
	}
	return c, nil
}

func isName(s string) bool {
	return s != "" && strings.IndexFunc(s, func(r rune) bool {
		return r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) < 0
}

// printable keeps what a terminal shows, of a file that may be anybody's.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}

// Value is an option's value, "" where the configuration does not have it: what it
// depends on is off, or this version has none of that name.
func (c *Config) Value(name string) string { return c.values[name] }

// on says whether an option is built in or a module.
func (c *Config) on(name string) bool { return c.values[name] == "y" || c.values[name] == "m" }

// Kind is what an option is to a machine that does NAT.
type Kind string

const (
	Need  Kind = "needed" // there is no NAT without, or no way to look at it
	Want  Kind = "useful" // without, NAT is slower, or less can be seen
	Spare Kind = "spare"  // costs packets or memory and is not needed for NAT
	Debug Kind = "debug"  // for looking for errors of the kernel; costs every packet
)

// Line is one option of the table, and what the configuration says of it.
type Line struct {
	Name   string `json:"name"` // without CONFIG_
	Kind   Kind   `json:"kind"`
	Value  string `json:"value,omitempty"` // "" where it is not in the configuration
	Reason string `json:"reason"`
	// Set is what to set it to; "" where it is well as it is, or a matter of choice.
	Set string `json:"set,omitempty"`
}

// Report is what a configuration means.
type Report struct {
	Kernel string `json:"kernel"`
	Source string `json:"read_from"` // where the configuration was read
	Lacks  []Line `json:"lacks"`     // needed first
	Spare  []Line `json:"spare"`     // debug first
	Well   []Line `json:"well"`
}

// Judge holds a configuration against what is known. Source is where it is from.
func Judge(c *Config, source string) *Report {
	r := &Report{Kernel: c.Kernel, Source: source, Lacks: []Line{}, Spare: []Line{}, Well: []Line{}}
	for _, o := range options {
		l := Line{Name: o.Name, Kind: o.Kind, Value: c.Value(o.Name), Reason: o.Reason}
		switch {
		case o.Kind == Need || o.Kind == Want:
			if c.on(o.Name) {
				r.Well = append(r.Well, l)
				continue
			}
			if l.Set = "y"; o.Module {
				l.Set = "m"
			}
			r.Lacks = append(r.Lacks, l)
		case c.Value(o.Name) == "y":
			if l.Set = "n"; o.Module {
				l.Set = "m"
			}
			if o.Choice {
				l.Set = ""
			}
			r.Spare = append(r.Spare, l)
		default:
			r.Well = append(r.Well, l)
		}
	}
	rank := []Kind{Need, Want, Debug, Spare}
	for _, list := range [][]Line{r.Lacks, r.Spare} {
		slices.SortStableFunc(list, func(a, b Line) int { return slices.Index(rank, a.Kind) - slices.Index(rank, b.Kind) })
	}
	return r
}

// Fragment writes what to change in the form that the kernel's
// scripts/kconfig/merge_config.sh takes.
func (r *Report) Fragment(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# For a machine that does NAT, to merge into the configuration of %s:\n", cmp.Or(r.Kernel, "a kernel"))
	b.WriteString("#   scripts/kconfig/merge_config.sh .config FRAGMENT\n")
	for _, list := range [][]Line{r.Lacks, r.Spare} {
		for _, l := range list {
			fmt.Fprintf(&b, "\n# %s: %s\n", l.Kind, l.Reason)
			switch l.Set {
			case "":
				fmt.Fprintf(&b, "# left as it is: CONFIG_%s\n", l.Name)
			case "n":
				fmt.Fprintf(&b, "# CONFIG_%s is not set\n", l.Name)
			default:
				fmt.Fprintf(&b, "CONFIG_%s=%s\n", l.Name, l.Set)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
