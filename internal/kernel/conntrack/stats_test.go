// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"path/filepath"
	"reflect"
	"testing"
)

func TestStatsOfOldKernels(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       Stats
	}{
		{"Linux 2.6.32", "entries  searched found new invalid ignore delete delete_list insert insert_failed drop early_drop icmp_error  expect_new expect_create expect_delete\n" +
			"00000012  00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008 00000009 0000000a 0000000b 0000000c  0000000d 0000000e 0000000f\n",
			Stats{{"searched": 1, "found": 2, "new": 3, "invalid": 4, "ignore": 5, "delete": 6, "delete_list": 7, "insert": 8,
				"insert_failed": 9, "drop": 10, "early_drop": 11, "error": 12, "expect_new": 13, "expect_create": 14, "expect_delete": 15}}},
		{"two processors", "entries drop chainlength clashres\nffffffff fffffffe 1 2\nffffffff 3 4 5\n",
			Stats{{"drop": 0xfffffffe, "chaintoolong": 1, "clash_resolve": 2}, {"drop": 3, "chaintoolong": 4, "clash_resolve": 5}}},
	} {
		got, err := ParseStats(c.text)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, %v, want %v", c.name, got, err, c.want)
		}
	}
	for _, text := range []string{"", "entries drop\n", "entries drop insert_failed\n1 2\n", "drop insert_failed\n1 x\n"} {
		if got, err := ParseStats(text); err == nil {
			t.Errorf("%q: %v, want an error", text, got)
		}
	}
}

func TestStatsSince(t *testing.T) {
	before := Stats{{"drop": 1<<32 - 3, "found": 5, "gone": 1}, {"drop": 100, "found": 7}}
	now := Stats{{"drop": 2, "found": 12, "new": 9}, {"drop": 3, "found": 7}} // passed zero; began again
	if got, want := now.Since(before), map[string]uint64{"drop": 5 + 3, "found": 7}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := now.Sum(), map[string]uint64{"drop": 5, "found": 19, "new": 9}; !reflect.DeepEqual(got, want) {
		t.Errorf("sum %v, want %v", got, want)
	}
}

// By ctnetlink, as kernels without the file have it, the same as by the file.
func TestStatsWithoutFile(t *testing.T) {
	in(t, newNetns(t), func() error {
		if err := conntrackRun(t, "-I", "-t", "60", "-p", "udp", "-s", "10.0.0.1", "-d", "10.0.0.2", "--sport", "1", "--dport", "2"); err != nil {
			return err
		}
		file, err := ReadStats()
		if err != nil {
			return err
		}
		path := statsFile
		defer func() { statsFile = path }()
		statsFile = filepath.Join(t.TempDir(), "none")
		asked, err := ReadStats()
		if err != nil {
			return err
		}
		if len(asked) != len(file) {
			return fmt.Errorf("%d processors by ctnetlink, %d by /proc", len(asked), len(file))
		}
		for cpu := range asked {
			for name, n := range asked[cpu] {
				if file[cpu][name] != n {
					t.Errorf("processor %d: %s is %d by ctnetlink, %d by /proc", cpu, name, n, file[cpu][name])
				}
			}
			if len(asked[cpu]) < 8 {
				t.Errorf("processor %d: only %v by ctnetlink", cpu, asked[cpu])
			}
		}
		return nil
	})
}

func FuzzParseStats(f *testing.F) {
	f.Add("drop insert_failed\n1 3\n")
	f.Add("\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		if rows, err := ParseStats(text); err == nil && len(rows) == 0 {
			t.Error("counters of no processor")
		}
	})
}
