#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What it takes to record every session of engine ebpf: new UDP sessions at a steady rate, two records
# each, and the processor time and memory of natkit log, a line each minute; in the end how many sessions
# the engine made and ended, and how many records the log has (one more for the rule file). Needs root; all
# of it is in namespaces of its own, the log in memory.
#
#   scripts/log-rate.sh [MINUTES [RECORDS A SECOND]]
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
if [ "${1:-}" != inside ]; then
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    CGO_ENABLED=0 go build -o "$work/natkit" ./cmd/natkit
    unshare -n -m -p -f --mount-proc scripts/log-rate.sh inside "$work" "${1:-10}" "${2:-50000}"
    exit
fi
work=$2 minutes=$3 rate=$4
natkit=$work/natkit log=/run/log
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mount -t bpf none /sys/fs/bpf
for name in tester gateway; do
    ip netns add "$name"
    ip -n "$name" link set dev lo up
done
ip link add name tx netns tester type veth peer name in netns gateway
ip link add name rx netns tester type veth peer name out netns gateway
for link in tester/tx/192.0.2.2 tester/rx/203.0.113.2 gateway/in/192.0.2.1 gateway/out/203.0.113.1; do
    IFS=/ read -r netns name address <<<"$link"
    ip -n "$netns" addr add "$address/24" dev "$name"
    ip -n "$netns" link set dev "$name" up
done
ip -n gateway route add 198.18.0.0/16 via 192.0.2.2
ip -n gateway route add 198.19.0.0/16 via 203.0.113.2
ip -n tester route add 198.19.0.0/16 via 192.0.2.1
ip netns exec gateway sysctl -qw net.ipv4.ip_forward=1
# The next session of a flow comes when all others had theirs, 20 s later: its own has ended then.
cat >"$work/nat.yaml" <<END
inside: [in]
outside: [out]
limits: {sessions: 1048576, mappings: 1048576}
defaults: {timeouts: {udp: 5s, port_hold_down: 5s}}
pools:
  all: {addresses: [203.0.113.64/26]}
log: {record: sessions}
rules:
  - {snat: 198.18.0.0/16, to: all}
END
ip netns exec gateway "$natkit" up --engine ebpf --attach xdp -f "$work/nat.yaml"
ip netns exec gateway "$natkit" log --dir "$log" >"$work/said" 2>&1 &
keeper=$!
trap 'kill "$keeper" 2>/dev/null || true' EXIT
# What the generator sends before, to find its own limit, is recorded too, and not measured.
until [ -e "$log/log.json" ]; do
    kill -0 "$keeper" || { cat "$work/said"; exit 1; }
    sleep 0.1
done
ticks() { awk '{print $14 + $15}' "/proc/$keeper/stat"; }
ip netns exec tester "$natkit" bench udp --tx tx --rx rx --flows "$((rate * 10))" --rate "$((rate / 2))" --trials 1 \
    --duration "$((minutes * 60))s" >"$work/sent" 2>&1 &
load=$!
before=$(ticks) begin=$EPOCHREALTIME passed=0
while kill -0 "$load" 2>/dev/null; do
    sleep 1
    passed=$((passed + 1))
    [ $((passed % 60)) = 0 ] || continue
    awk -v t="$(($(ticks) - before))" -v hz="$(getconf CLK_TCK)" -v begin="$begin" -v now="$EPOCHREALTIME" \
        -v memory="$(awk '/VmHWM/ {print int($2 / 1024)}' "/proc/$keeper/status")" -v size="$(du -sm "$log" | cut -f1)" \
        'BEGIN {printf "%d s: %.1f %% of one core, %d MB of memory, %d MB of log\n", now - begin, 100 * t / hz / (now - begin), memory, size}'
done
cat "$work/sent"
for _ in {1..60}; do # until the last sessions have ended: 5 s, and garbage collection
    ip netns exec gateway "$natkit" status >"$work/status"
    if grep -q '^0 sessions' "$work/status"; then break; fi
    sleep 1
done
kill -INT "$keeper"
wait "$keeper" || true
cat "$work/said"
grep -E '^ +[0-9]+ +(created|expired) ' "$work/status"
grep -E '"(lost_)?records_total"|"gaps"' "$log/log.json"
