// SPDX-License-Identifier: Apache-2.0

// Package datapath is the NAT engine in eBPF: it owns the objects of bpf/nat_*.bpf.c,
// their maps and pins, and turns a rule file into what the maps hold.
package datapath
