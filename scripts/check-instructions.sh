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
# Some four minutes of one processor.
set -euo pipefail
cd "$(dirname "$0")/.."
write=
[ "${1:-}" != -w ] || write=1
routers=xdp-forward,ebpf,accel,ebpf-tc,accel-tc
table=docs/bench.md

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/count-instructions.sh 6.12 --router "$routers" --both-ways --flows 1 --trials 3 --duration 20ms >"$work/output" || {
    cat "$work/output"
    exit 1
}
# Thousands of instructions stand where a clock that counts time has microseconds.
awk -v routers="$routers" '
    BEGIN { split(routers, list, ","); for (i in list) known[list[i]] = 1 }
    /^Cost of a packet/ { cost = 1 }
    /^Packets forwarded/ { cost = 0 }
    cost && $1 in known && $2 ~ /^[0-9]+$/ { printf "%s %.0f\n", $1, $3 * 1000 }' "$work/output" >"$work/counts"
[ "$(wc -l <"$work/counts")" = 5 ] || { cat "$work/output"; echo "$0: not every router was counted" >&2; exit 1; }

# The rows between the marks: | router | instructions | why |
row() { sed -n '/^<!-- instructions -->/,/^<!-- end of instructions -->/p' "$table" | grep "^| $1 |"; }
status=0
while read -r router count; do
    old=$(row "$router" | awk -F ' *[|] *' '{ print $3 }')
    [ -n "$old" ] || { echo "$0: $table has no row for $router" >&2; exit 1; }
    change=$(awk -v a="$old" -v b="$count" 'BEGIN { printf "%+.1f", (b / a - 1) * 100 }')
    printf '%-12s %6d instructions, %6d in %s (%s %%)\n' "$router" "$count" "$old" "$table" "$change"
    if [ -n "$write" ]; then
        sed -i "/^<!-- instructions -->/,/^<!-- end of instructions -->/s/^| $router | [0-9]* |/| $router | $count |/" "$table"
    elif awk -v change="$change" 'BEGIN { exit !(change > 3) }'; then
        echo "  over 3 % more: find out why; if it must be, run $0 -w and say in the row of $table why"
        status=1
    fi
done <"$work/counts"
exit "$status"
