#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Count the instructions that a packet takes of a kernel: natkit bench udp in qemu,
# whose clock runs by instructions. It knows no caches: it ranks routers, and shows when
# one of them takes more than before, but is no rate.
#
#   scripts/count-instructions.sh [VERSION [ARGUMENTS OF natkit bench udp]]
#
# Without arguments Linux 6.12, and the routers that forward the packets of a flow, both
# ways: the kernel's flowtable takes only flows that both sides have spoken in. Its
# "microseconds" are thousands of instructions. Some ten minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-6.12}
shift || true
[ $# -gt 0 ] || set -- --router nft,nft-flowtable,xdp-forward,ebpf,accel,ebpf-tc,accel-tc --both-ways --flows 1 --trials 3 --duration 20ms

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
mkdir -p "$work/guest/bin"
CGO_ENABLED=0 go build -o "$work/guest/bin/natkit" ./cmd/natkit
kernel=$(scripts/fetch-kernel.sh "$version")
# shellcheck disable=SC2016 # for the shell in the guest
scripts/run-in-vm.sh -c -t 3600 -m 3G "$kernel" "$work/guest" \
    sh -c 'modprobe -a nf_conntrack nf_flow_table nf_flow_table_inet nft_flow_offload; natkit bench udp "$@" 2>/tmp/log || { status=$?; cat /tmp/log; exit $status; }' sh "$@"
