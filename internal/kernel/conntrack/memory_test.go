// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

const slabHead = `slabinfo - version: 2.1
# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit> <batchcount> <sharedfactor> : slabdata <active_slabs> <num_slabs> <sharedavail>
nf_conntrack_expect      9      9    216   18    1 : tunables    0    0    0 : slabdata      1      1      0
`

func TestReadMemory(t *testing.T) {
	page := uint64(os.Getpagesize())
	for _, tt := range []struct {
		name    string
		files   map[string]string
		want    Memory
		unknown []string
	}{
		{
			"today's kernel",
			map[string]string{"proc/slabinfo": slabHead + "nf_conntrack      200064 200080    256   16    1 : tunables    0    0    0 : slabdata  12505  12505      0\n"},
			Memory{ObjectBytes: page / 16, HostEntries: 200064, SlabBytes: 12505 * page}, nil,
		},
		{
			"rest of a slab is shared out",
			map[string]string{"proc/slabinfo": slabHead + "nf_conntrack      100 200    320   25    2 : tunables    0    0    0 : slabdata  8  8      0\n"},
			Memory{ObjectBytes: 2 * page / 25, HostEntries: 100, SlabBytes: 16 * page}, nil,
		},
		{
			"a cache for each namespace",
			map[string]string{"proc/slabinfo": slabHead +
				"nf_conntrack_ffffffff81cd0c80      100 200    256   16    1 : tunables    0    0    0 : slabdata  8  8      0\n" +
				"nf_conntrack_ffff8800bb8f0000      11 16    256   16    1 : tunables    0    0    0 : slabdata  1  1      0\n"},
			Memory{ObjectBytes: page / 16, HostEntries: 111, SlabBytes: 9 * page}, nil,
		},
		{
			"merged with another cache",
			map[string]string{"proc/slabinfo": slabHead, "sys/kernel/slab/nf_conntrack/objs_per_slab": "16\n", "sys/kernel/slab/nf_conntrack/order": "0\n"},
			Memory{ObjectBytes: page / 16}, []string{"entries of all namespaces", "merged"},
		},
		{
			"nothing to read", nil, Memory{}, []string{"size of an entry", "entries of all namespaces"},
		},
		{
			"a line that makes no sense",
			map[string]string{"proc/slabinfo": slabHead + "nf_conntrack      0 0    0   0    0 : tunables    0    0    0 : slabdata  0  0      0\n"},
			Memory{}, []string{"size of an entry"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for name, text := range tt.files {
				path := filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			m := readMemory(Limits{Count: 5}, root)
			if m.ObjectBytes != tt.want.ObjectBytes || m.HostEntries != tt.want.HostEntries || m.SlabBytes != tt.want.SlabBytes || m.Count != 5 {
				t.Errorf("got %+v, want %+v", m, tt.want)
			}
			if (m.ObjectSource == "") != (m.ObjectBytes == 0) || (len(m.Unknown) == 0) != (tt.unknown == nil) {
				t.Errorf("source %q, unknown %q", m.ObjectSource, m.Unknown)
			}
			for _, w := range tt.unknown {
				if !strings.Contains(strings.Join(m.Unknown, "\n"), w) {
					t.Errorf("%q is not in %q", w, m.Unknown)
				}
			}
		})
	}
}

func TestMemorySums(t *testing.T) {
	m := Memory{Limits: Limits{Buckets: 65536}, ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8}
	least, most := m.Bytes(1000, m.Buckets)
	if least != 65536*8+256000 || most != 65536*8+384000 {
		t.Errorf("bytes %d to %d", least, most)
	}
	if c := m.Chain(65536); c != 2 {
		t.Errorf("chain %v: every entry is in two", c)
	}
}

func TestReadMemoryLive(t *testing.T) {
	ktest.Root(t)
	m, err := ReadMemory()
	if err != nil {
		t.Fatal(err)
	}
	// struct nf_conn is 200 to 400 bytes in all kernels that natkit knows.
	if m.ObjectBytes < 128 || m.ObjectBytes > 1024 || m.Buckets == 0 {
		t.Errorf("%+v", m)
	}
}
