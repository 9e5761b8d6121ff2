#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Copy the headers that the eBPF programs include from Debian's development
# packages, with their licences and versions, so that a build needs neither
# package and gives the same bytes everywhere. Run on amd64 with libbpf-dev and
# linux-libc-dev installed; `make generate` afterwards.
set -euo pipefail
cd "$(dirname "$0")"

libbpf="bpf_core_read.h bpf_endian.h bpf_helper_defs.h bpf_helpers.h bpf_tracing.h"
uapi="linux/bpf.h linux/bpf_common.h linux/posix_types.h linux/stddef.h linux/types.h
      asm-generic/bitsperlong.h asm-generic/int-ll64.h asm-generic/posix_types.h asm-generic/types.h"
machine="asm/bitsperlong.h asm/posix_types.h asm/posix_types_64.h asm/types.h"

rm -rf --one-file-system asm asm-generic bpf linux
for header in $libbpf; do install -D -m 644 "/usr/include/bpf/$header" "bpf/$header"; done
for header in $uapi; do install -D -m 644 "/usr/include/$header" "$header"; done
for header in $machine; do install -D -m 644 "/usr/include/x86_64-linux-gnu/$header" "$header"; done
install -m 644 /usr/share/doc/libbpf-dev/copyright LICENSE.libbpf
install -m 644 /usr/share/doc/linux-libc-dev/copyright LICENSE.linux
dpkg-query -W -f '${Package} ${Version}\n' libbpf-dev linux-libc-dev >VERSIONS
