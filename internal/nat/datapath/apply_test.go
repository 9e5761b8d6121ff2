// SPDX-License-Identifier: Apache-2.0

package datapath

import "testing"

// Bits of free ports changed from user space obey the words and their summary.
func TestChangePorts(t *testing.T) {
	e, err := Create(testDir(t), smallSize)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	get := func() (p abiNatPorts) {
		if err := e.maps["free_addresses"].Lookup(uint32(0), &p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, index := range []uint32{7, 70, 65535} {
		if err := e.giveAddresses([]uint32{index}, true); err != nil {
			t.Fatal(err)
		}
		if err := e.giveAddresses([]uint32{index}, true); err != nil { // twice counts once
			t.Fatal(err)
		}
	}
	p := get()
	if p.Free != 3 || p.Words[0] != 1<<7 || p.Words[1] != 1<<6 || p.Words[1023] != 1<<63 || p.Summary[0] != 3 || p.Summary[15] != 1<<63 {
		t.Errorf("free %d, words %x %x %x, summary %x", p.Free, p.Words[0], p.Words[1], p.Words[1023], p.Summary)
	}
	if err := e.changePorts([]portChange{{Class: anAddress, Port: 7}, {Class: anAddress, Port: 8}}); err != nil {
		t.Fatal(err)
	}
	if p := get(); p.Free != 2 || p.Words[0] != 0 || p.Summary[0] != 2 {
		t.Errorf("after taking: free %d, word %x, summary %x", p.Free, p.Words[0], p.Summary)
	}
}
