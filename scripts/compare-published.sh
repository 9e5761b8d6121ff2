#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Requests a second through a published container port (veth, bridge, container): the
# kernel's NAT with Docker's rules, the same under `natkit accel`, and engine ebpf in its
# place, in turn. wrk and nginx share this machine's processors. Needs root; works in the
# network namespaces of a lab of its own.
#
#   scripts/compare-published.sh [-n ROUNDS] [-d SECONDS]
#
# For keep-alive and for a connection a request: requests/s of each, and how many times
# those of the kernel in the same round; median, quartiles, least and most.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
rounds=30 seconds=2
while getopts n:d: option; do
    case $option in
    n) rounds=$OPTARG ;;
    d) seconds=$OPTARG ;;
    *) exit 2 ;;
    esac
done
work=$(mktemp -d)
natkit=$work/natkit lab=compare$$
host=$lab-host
trap '"$natkit" lab down "$lab" >"$work/down" 2>&1 || cat "$work/down" >&2; rm -rf --one-file-system "$work"' EXIT
CGO_ENABLED=0 go build -o "$natkit" ./cmd/natkit
"$natkit" lab up published --name "$lab" --server nginx >/dev/null
cat >"$work/nat.yaml" <<'END'
inside: [docker0]
outside: [eth0]
rules:
  - {dnat: "tcp 192.168.0.96:8080", to: "172.17.0.2:80"}
  - {masquerade: 172.17.0.0/16}
END

# use ROUTER ARGUMENTS OF WRK: requests/s; what comes before and after is not measured.
use() {
    local router=$1 rate
    shift
    case $router in
    accel) "$natkit" accel on eth0 docker0 --tcp-liberal --netns "$host" >/dev/null ;;
    engine) "$natkit" up --bypass -f "$work/nat.yaml" --netns "$host" >/dev/null ;;
    esac
    # Connections that have ended are entries for two minutes more.
    ip netns exec "$host" conntrack -F >/dev/null 2>&1
    rate=$(ip netns exec "$lab-client" wrk -t1 -d"${seconds}s" "$@" http://192.168.0.96:8080/ |
        awk '/^Requests\/sec:/ {r = $2} /Socket errors|Non-2xx/ {print > "/dev/stderr"; exit 1} END {print r}')
    case $router in
    accel) "$natkit" accel off --netns "$host" >/dev/null ;;
    engine) "$natkit" down --netns "$host" >/dev/null ;;
    esac
    echo "$rate"
}

compare() { # TITLE ARGUMENTS OF WRK
    local title=$1 kernel
    shift
    : >"$work/rates"
    for ((round = 1; round <= rounds; round++)); do
        [ ! -t 2 ] || printf '\r%s: round %d of %d ' "$title" "$round" "$rounds" >&2
        kernel=$(use kernel "$@")
        for router in accel engine; do
            echo "$router $kernel $(use "$router" "$@")" >>"$work/rates"
        done
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
    echo "$title"
    for router in accel engine; do
        awk -v router=$router '$1 == router {print $3 / $2}' "$work/rates" | spread "  $router, times the kernel:" %.3f
        awk -v router=$router '$1 == router {print $3}' "$work/rates" | spread "    requests/s:" %.0f
        awk -v router=$router '$1 == router {print $2}' "$work/rates" | spread "    the kernel's:" %.0f
    done
}

# spread TITLE FORMAT: of the numbers of stdin
spread() {
    sort -n | awk -v title="$1" -v format="$2" '
        function at(share) { return sprintf(format, a[1 + int((NR - 1) * share + 0.5)]) }
        {a[NR] = $1}
        END {printf "%s %s, quartiles %s and %s, %s - %s, n = %d\n", title, at(.5), at(.25), at(.75), at(0), at(1), NR}'
}

compare "keep-alive, 64 connections" -c64
compare "a connection a request, 32 at a time" -c32 -H 'Connection: close'
