// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Prints for each package a fingerprint of the eBPF objects that it and its tests are
// linked with, by which docs/kernels.md tells programs that a kernel has run from those
// that have changed since. It is made of what the kernel is given: instructions,
// relocations, kinds and sizes of maps, initial values. Comments, names of files, maps and
// functions, and the order of functions do not change it.
//
//	go run scripts/programs.go PACKAGE...
package main

import (
	"crypto/sha256"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

func main() {
	log.SetFlags(0)
	for _, pkg := range os.Args[1:] {
		objects, err := linked(pkg)
		if err != nil {
			log.Fatal(err)
		}
		sum, err := fingerprint(objects)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(pkg, sum)
	}
}

// linked lists the object files that a package and its tests are linked with.
func linked(pkg string) ([]string, error) {
	out, err := exec.Command("go", "list", "-deps", "-test", "-f", `{{if not .Standard}}{{.Dir}}{{end}}`, "./"+pkg).Output()
	if err != nil {
		return nil, fmt.Errorf("go list ./%s: %w", pkg, err)
	}
	dirs := strings.Fields(string(out))
	slices.Sort(dirs)
	var objects []string
	for _, dir := range slices.Compact(dirs) {
		files, err := filepath.Glob(filepath.Join(dir, "*_bpfel.o"))
		if err != nil {
			return nil, err
		}
		objects = append(objects, files...)
	}
	own, err := filepath.Glob(filepath.Join(pkg, "*_bpfel_test.o"))
	return append(objects, own...), err
}

// fingerprint returns "none" without objects.
func fingerprint(objects []string) (string, error) {
	if len(objects) == 0 {
		return "none", nil
	}
	var parts []string
	for _, file := range objects {
		spec, err := ebpf.LoadCollectionSpec(file)
		if err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
		for _, m := range spec.Maps {
			parts = append(parts, fmt.Sprint("map ", m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.MapExtra, values(m)))
		}
		for _, p := range spec.Programs {
			parts = append(parts, fmt.Sprint("program ", p.Type, p.AttachType, p.AttachTo, p.Flags, functions(p)))
		}
	}
	slices.Sort(parts)
	return fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(parts, "\n"))))[:8], nil
}

// values are what a map of variables or constants begins with.
func values(m *ebpf.MapSpec) (v []any) {
	for _, entry := range m.Contents {
		if data, ok := entry.Value.([]byte); ok {
			v = append(v, data)
		}
	}
	return v
}

// functions are what a program consists of, each with the fields and functions of the kernel
// that it is linked with, in an order that does not depend on names.
func functions(p *ebpf.ProgramSpec) (all []string) {
	for i := range p.Instructions {
		ins := &p.Instructions[i]
		if ins.Symbol() != "" || i == 0 {
			all = append(all, "")
		}
		constant := ins.Constant
		if ins.IsLoadFromMap() || ins.IsFunctionReference() {
			constant = 0 // where the other one is
		}
		text := fmt.Sprintln(ins.OpCode, ins.Dst, ins.Src, ins.Offset, constant)
		if core := btf.CORERelocationMetadata(ins); core != nil {
			what, _, _ := strings.Cut(core.String(), ", local_id=") // a number in the object
			text += what
		}
		if ins.IsKfuncCall() {
			text += ins.Reference()
		}
		all[len(all)-1] += text
	}
	slices.Sort(all)
	return all
}
