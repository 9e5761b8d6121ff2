// SPDX-License-Identifier: Apache-2.0

//go:build armbe || arm64be || m68k || mips || mips64 || mips64p32 || ppc || ppc64 || s390 || s390x || shbe || sparc || sparc64

package littleendian

var _ = natkit_does_not_run_on_big_endian_processors_because_its_eBPF_programs_are_little_endian
