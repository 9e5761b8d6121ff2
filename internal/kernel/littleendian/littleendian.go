// SPDX-License-Identifier: Apache-2.0

// Package littleendian refuses to be compiled for big-endian processors (s390x, ppc64,
// mips): the eBPF programs in the packages that import it are compiled for the order of
// bytes of the others, and a kernel would run them on numbers with their bytes swapped.
package littleendian
