#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# How much natkit monitor slows the kernel's NAT: trials of natkit bench udp (nftables masquerade, 64 bytes) without and with a
# monitor, in turns, so that what else the machine does falls on both. Prints the pairs, both medians with
# their range, and the median of the pairs' differences with its range. Needs root; half a minute a pair.
#
#   scripts/bench-monitor.sh [PAIRS]      9 pairs by default
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != inside ]; then
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    CGO_ENABLED=0 go build -o "$work/natkit" ./cmd/natkit
    unshare -n -m -p -f --mount-proc scripts/bench-monitor.sh inside "$work/natkit" "${1:-9}"
    exit
fi
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
ip link set lo up
natkit=$2 pairs=$3
trial() {
    "$natkit" bench udp --router nft --trials 3 --duration 500ms --flows 1000 -o json 2>/dev/null |
        tr -d ' \n' | grep -o '"metric":"cost_ns".*' | grep -o '"median":[0-9.]*' | head -n 1 | cut -d : -f 2
}
healthy() { (exec 3<>/dev/tcp/127.0.0.1/9641 && printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3 && grep -q ' 200 OK' <&3) 2>/dev/null; }
with() {
    "$natkit" monitor >/run/monitor 2>&1 &
    local monitor=$!
    for _ in $(seq 60); do healthy && break; sleep 1; done
    healthy || { cat /run/monitor >&2; exit 1; }
    trial
    kill "$monitor"
    wait "$monitor" 2>/dev/null || true
}
for pair in $(seq "$pairs"); do
    # Which of the two is first takes turns, too.
    if [ $((pair % 2)) = 1 ]; then without=$(trial) && beside=$(with); else beside=$(with) && without=$(trial); fi
    echo "$without $beside"
done | tee /run/pairs | awk '{printf "without %7.1f ns a packet, with %7.1f: %+.2f %%\n", $1, $2, 100 * ($2 / $1 - 1); fflush()}'
spread() { sort -n | awk -v what="$1" '{v[NR] = $1} END {printf "%s: median %.1f (%.1f to %.1f), n = %d\n", what, v[int((NR + 1) / 2)], v[1], v[NR], NR}'; }
awk '{print $1}' /run/pairs | spread "without, ns"
awk '{print $2}' /run/pairs | spread "with, ns"
awk '{print 100 * ($2 / $1 - 1)}' /run/pairs | spread "difference, %"
