// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Memory is what the table takes. Sizes that this kernel does not tell are 0,
// and Unknown says why.
type Memory struct {
	Limits
	// ObjectBytes is what one entry takes of its slab: struct nf_conn, rounded up,
	// and its share of what is left over at the end of a slab.
	ObjectBytes  uint64
	ObjectSource string // the file it was read from
	// ExtensionBytes is what an entry takes besides when it has extensions; see
	// extensionBytes.
	ExtensionBytes uint64
	BucketBytes    uint64
	// HostEntries is how many entries all namespaces have, as the slab counts
	// them: up to some hundreds too many, since freed ones that a processor keeps
	// for itself count as in use. 0 when not readable.
	HostEntries uint64
	SlabBytes   uint64 // what the slab holds now, with what is free in it
	Unknown     []string
}

// extensionBytes: an entry that is masqueraded, accounted, time-stamped,
// labelled, watched by events or has a helper carries a struct nf_ct_ext in
// memory of its own. The kernel allocates at least 128 bytes for it
// (NF_CT_EXT_PREALLOC in nf_conntrack_extend.c), and all of that without helper
// and sequence adjustment fits: header 16, NAT 8, accounting 32, time stamps 16,
// events 32, labels 16 bytes on Linux 6.18. With a helper it is 192. No file says
// which entries have one, and it comes from the kernel's general caches, so this
// is what it takes at most in the usual case, not a sum of what is there.
const extensionBytes = 128

// bucketBytes is struct hlist_nulls_head: a pointer. natkit runs as a program of
// the kernel's own word size or on a 64-bit kernel.
const bucketBytes = 8

// ReadMemory reads what the table of the calling thread's namespace takes. The
// object size comes from /proc/slabinfo, or from /sys/kernel/slab where that
// does not list the cache by name; both need root.
func ReadMemory() (Memory, error) {
	limits, err := ReadLimits()
	if err != nil {
		return Memory{}, err
	}
	return readMemory(limits, "/"), nil
}

// readMemory reads the sizes below root.
func readMemory(l Limits, root string) Memory {
	m := Memory{Limits: l, ExtensionBytes: extensionBytes, BucketBytes: bucketBytes}
	errProc := m.readSlabinfo(filepath.Join(root, "proc/slabinfo"))
	if errProc == nil {
		return m
	}
	if errSys := m.readSlabDir(filepath.Join(root, "sys/kernel/slab/nf_conntrack")); errSys != nil {
		m.Unknown = append(m.Unknown, fmt.Sprintf("size of an entry: %v; %v", errProc, errSys))
	}
	m.Unknown = append(m.Unknown, fmt.Sprintf("entries of all namespaces: %v", errProc))
	return m
}

// readSlabinfo reads the line of the cache: name, active objects, objects, size
// of an object, objects per slab, pages per slab, ..., active slabs, slabs. Below
// Linux 4.7 each namespace has a cache of its own, nf_conntrack_ADDRESS.
func (m *Memory) readSlabinfo(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return needsRoot(err)
	}
	found := false
	for line := range strings.Lines(string(text)) {
		w := strings.Fields(line)
		if len(w) < 16 || !isConntrackCache(w[0]) {
			continue
		}
		var n [15]uint64
		for i := range n {
			n[i], _ = strconv.ParseUint(w[i+1], 10, 64)
		}
		active, size, perSlab, pages, slabs := n[0], n[2], n[3], n[4], n[13]
		if size == 0 || perSlab == 0 || pages == 0 {
			return fmt.Errorf("read %s: line %q", path, strings.TrimSpace(line))
		}
		slabBytes := pages * uint64(os.Getpagesize())
		m.ObjectBytes = slabBytes / perSlab
		m.ObjectSource = path
		m.HostEntries += active
		m.SlabBytes += slabs * slabBytes
		found = true
	}
	if !found {
		return fmt.Errorf("read %s: no line nf_conntrack (the kernel may have merged it with a cache of the same size)", path)
	}
	return nil
}

func isConntrackCache(name string) bool {
	if name == "nf_conntrack" {
		return true
	}
	suffix, ok := strings.CutPrefix(name, "nf_conntrack_")
	return ok && strings.Trim(suffix, "0123456789abcdef") == "" // not nf_conntrack_expect
}

// readSlabDir reads the size from SLUB's own files; they are there by name for
// merged caches too, whose counts say nothing about the table.
func (m *Memory) readSlabDir(dir string) error {
	perSlab, err := readNumber(filepath.Join(dir, "objs_per_slab"))
	if err != nil {
		return needsRoot(err)
	}
	order, err := readNumber(filepath.Join(dir, "order"))
	if err != nil {
		return needsRoot(err)
	}
	if perSlab == 0 || order > 20 {
		return errors.New("read " + dir + ": no objects in a slab")
	}
	m.ObjectBytes = uint64(os.Getpagesize()) << order / perSlab
	m.ObjectSource = dir
	return nil
}

func needsRoot(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w (needs root)", err)
	}
	return err
}

// Bytes is what so many entries in a hash of so many buckets take, without and
// with extensions.
func (m *Memory) Bytes(entries, buckets uint64) (least, most uint64) {
	hash := buckets * m.BucketBytes
	return hash + entries*m.ObjectBytes, hash + entries*(m.ObjectBytes+m.ExtensionBytes)
}

// Chain is how many entries a look-up meets on average in the hash when all
// namespaces together have entries entries: each is in it twice, once a
// direction.
func (m *Memory) Chain(entries uint64) float64 {
	if m.Buckets == 0 {
		return 0
	}
	return 2 * float64(entries) / float64(m.Buckets)
}
