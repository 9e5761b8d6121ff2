#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# How much a natkit command slows the kernel's NAT while it runs: trials of natkit bench udp (nftables masquerade, 64 bytes)
# without and beside it, in turns, so that what else the machine does falls on both. Prints the pairs, both medians with
# their range, and the median of the pairs' differences with its quartiles and range. The benchmark's sink drops each packet,
# so programs that look at drops run for each. Needs root; half a minute a pair.
#
#   scripts/bench-beside.sh PAIRS monitor
#   scripts/bench-beside.sh PAIRS trace 'udp 203.0.113.9 -> 203.0.113.8:9'
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '4,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
if [ "$1" != inside ]; then
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    CGO_ENABLED=0 go build -o "$work/natkit" ./cmd/natkit
    unshare -n -m -p -f --mount-proc scripts/bench-beside.sh inside "$work/natkit" "$@"
    exit
fi
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
ip link set lo up
# A trace waits where connections are tracked, and else looks at each packet from its beginning.
nft 'table ip nat { chain post { type nat hook postrouting priority 100; masquerade; }; }'
natkit=$2 pairs=$3
shift 3
# The command finds the namespaces of a trial within two seconds, so that at least half of its seven are measured with it.
trial() {
    "$natkit" bench udp --router nft --trials 7 --duration 700ms --flows 1000 -o json 2>/dev/null |
        tr -d ' \n' | grep -o '"metric":"cost_ns".*' | grep -o '"median":[0-9.]*' | head -n 1 | cut -d : -f 2
}
beside() {
    "$natkit" "$@" >/run/beside 2>&1 &
    local command=$!
    for _ in $(seq 600); do # until it says that it has begun
        [ ! -s /run/beside ] || break
        sleep 0.1
    done
    trial
    kill "$command" || { cat /run/beside >&2; exit 1; }
    wait "$command" 2>/dev/null || true
}
for pair in $(seq "$pairs"); do
    # Which of the two is first takes turns, too.
    if [ $((pair % 2)) = 1 ]; then without=$(trial) && with=$(beside "$@"); else with=$(beside "$@") && without=$(trial); fi
    echo "$without $with"
done | tee /run/pairs | awk '{printf "without %7.1f ns a packet, with %7.1f: %+.2f %%\n", $1, $2, 100 * ($2 / $1 - 1); fflush()}'
spread() {
    sort -n | awk -v what="$1" '{v[NR] = $1}
        END {printf "%s: median %.1f, quartiles %.1f and %.1f (%.1f to %.1f), n = %d\n", what, v[int((NR + 1) / 2)], v[int((NR + 3) / 4)], v[int((3 * NR + 1) / 4)], v[1], v[NR], NR}'
}
awk '{print $1}' /run/pairs | spread "without, ns"
awk '{print $2}' /run/pairs | spread "with, ns"
awk '{print 100 * ($2 / $1 - 1)}' /run/pairs | spread "difference, %"
