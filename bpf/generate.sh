#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compile one eBPF program into an object and the Go code that embeds it: bpf2go
# with natkit's flags and the one compiler the committed objects are made by, so
# that the same source gives the same bytes. Called by `go generate` from the
# package that owns the program:
#
#   BPF/generate.sh [OPTIONS OF BPF2GO] IDENT BPF/.../NAME.bpf.c
#
# BPF_CLANG and BPF_STRIP name other paths of the programs; another version than
# bpf/CLANG_VERSION says is refused.
set -euo pipefail
bpf=$(cd "$(dirname "$0")" && pwd)
want=$(cat "$bpf/CLANG_VERSION")
clang=${BPF_CLANG:-clang-${want%%.*}}
strip=${BPF_STRIP:-llvm-strip-${want%%.*}}

for program in "$clang" "$strip"; do
    if ! output=$("$program" --version); then
        echo "$0: $program is needed (Debian: clang-${want%%.*} and llvm-${want%%.*})" >&2
        exit 1
    fi
    have=$(sed -n 's/.*version \([0-9.]*\).*/\1/p' <<<"$output" | head -n1)
    if [ "$have" != "$want" ]; then
        echo "$0: $program is version $have, the objects are pinned to $want (bpf/CLANG_VERSION)" >&2
        exit 1
    fi
done

# The source by its whole path, so that the object is the same whatever folder it is made from.
source=$(realpath "${!#}")
set -- "${@:1:$#-1}" "$source"
exec go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel -cc "$clang" -strip "$strip" \
    -cflags "-O2 -mcpu=v3 -Wall -Wextra -Wno-unused-parameter -Werror -nostdinc -I$bpf -I$bpf/include -fdebug-prefix-map=$bpf=bpf" "$@"
