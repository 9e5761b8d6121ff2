#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Count the instructions of the hot paths in qemu and compare them with the table of
# docs/bench.md. One that takes over 3 % more fails: it has become slower, or the table
# needs a new row that says why it may.
#
#   scripts/check-instructions.sh      compare
#   scripts/check-instructions.sh -w   write today's counts into the table
#
# Some four minutes of one processor, three times that if it fails.
set -euo pipefail
cd "$(dirname "$0")/.."
write=
[ "${1:-}" != -w ] || write=1
routers=xdp-forward,ebpf,accel,ebpf-tc,accel-tc
table=docs/bench.md

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT

# count adds a line for each router to the counts: its name, and instructions a packet.
count() {
    scripts/count-instructions.sh 6.12 --router "$routers" --both-ways --flows 1 --trials 3 --duration 20ms >"$work/output" || {
        cat "$work/output"
        return 1
    }
    # Thousands of instructions stand where a clock that counts time has microseconds.
    awk -v routers="$routers" '
        BEGIN { split(routers, list, ","); for (i in list) known[list[i]] = 1 }
        /^Cost of a packet/ { cost = 1 }
        /^Packets forwarded/ { cost = 0 }
        cost && $1 in known && $2 ~ /^[0-9]+$/ { printf "%s %.0f\n", $1, $3 * 1000 }' "$work/output" >"$work/new"
    [ "$(wc -l <"$work/new")" = 5 ] || { cat "$work/output"; echo "$0: not every router was counted" >&2; return 1; }
    cat "$work/new" >>"$work/counts"
}

# The rows between the marks: | router | instructions | why |
row() { sed -n '/^<!-- instructions -->/,/^<!-- end of instructions -->/p' "$table" | grep "^| $1 |"; }

# compare says how the least count of each router stands to its row; it fails if one is over 3 % more.
compare() {
    local router least old change status=0
    for router in ${routers//,/ }; do
        least=$(awk -v router="$router" '$1 == router { print $2 }' "$work/counts" | sort -n | head -1)
        old=$(row "$router" | awk -F ' *[|] *' '{ print $3 }')
        [ -n "$old" ] || { echo "$0: $table has no row for $router" >&2; return 2; }
        change=$(awk -v a="$old" -v b="$least" 'BEGIN { printf "%+.1f", (b / a - 1) * 100 }')
        printf '%-12s %6d instructions, %6d in %s (%s %%)\n' "$router" "$least" "$old" "$table" "$change"
        if [ -n "$write" ]; then
            sed -i "/^<!-- instructions -->/,/^<!-- end of instructions -->/s/^| $router | [0-9]* |/| $router | $least |/" "$table"
        elif awk -v change="$change" 'BEGIN { exit !(change > 3) }'; then
            status=1
        fi
    done
    return "$status"
}

# What the guest does besides (timers, packets that are passed to the stack once a second) only adds:
# of several counts the least is nearest.
for _ in 1 2 3; do
    count
    status=0
    compare || status=$?
    [ "$status" = 1 ] || exit "$status"
done
echo "over 3 % more: find out why; if it must be, run $0 -w and say in the row of $table why"
exit 1
