#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What natkit monitor costs where all is well: processor time and memory from its start, with 250 network
# namespaces that translate and 50 000 conntrack entries; a line after each ten minutes. Needs root; all of it is in
# namespaces of its own.
#
#   scripts/monitor-cost.sh [MINUTES [NAMESPACES [ENTRIES]]]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != inside ]; then
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    CGO_ENABLED=0 go build -o "$work/natkit" ./cmd/natkit
    unshare -n -m -p -f --mount-proc scripts/monitor-cost.sh inside "$work/natkit" "${1:-10}" "${2:-250}" "${3:-50000}"
    exit
fi
natkit=$2 minutes=$3 namespaces=$4 entries=$5
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
ip link set lo up
for i in $(seq "$namespaces"); do
    ip netns add "n$i"
    ip -n "n$i" link set lo up
    ip -n "n$i" link add pod0 type veth peer name pod1
    ip -n "n$i" addr add 10.0.0.1/24 dev pod0
    ip -n "n$i" link set pod0 up
    ip -n "n$i" link set pod1 up
    ip netns exec "n$i" sysctl -qw net.ipv4.ip_forward=1
    ip netns exec "n$i" nft 'table ip nat { chain post { type nat hook postrouting priority 100; oifname "eth9" masquerade; }; }'
done
# shellcheck disable=SC2016 # the inner shell expands it
ip netns exec n1 bash -c 'echo 7200 >/proc/sys/net/netfilter/nf_conntrack_udp_timeout
    for ((port = 1; port <= $1; port++)); do echo >/dev/udp/127.0.0.1/$port; done 2>/dev/null' fill "$entries" || true
"$natkit" monitor >/run/monitor 2>&1 &
monitor=$!
ticks() { awk '{print $14 + $15}' "/proc/$monitor/stat"; }
for ((passed = 0; passed < minutes; )); do
    step=$((minutes - passed < 10 ? minutes - passed : 10))
    sleep "$((step * 60))"
    passed=$((passed + step))
    kill -0 "$monitor" || { cat /run/monitor; exit 1; }
    echo "$namespaces namespaces, $(ip netns exec n1 cat /proc/sys/net/netfilter/nf_conntrack_count) entries, $passed minutes:" \
        "$(awk -v t="$(ticks)" -v hz="$(getconf CLK_TCK)" -v s="$((passed * 60))" 'BEGIN {printf "%.2f %% of one core", 100 * t / hz / s}')," \
        "$(awk '/VmHWM/ {printf "%d MB", $2 / 1024}' "/proc/$monitor/status")"
done
cat /run/monitor
kill "$monitor"
wait "$monitor" || true
