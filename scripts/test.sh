#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run all tests, then list what was left out and why.
#
#   scripts/test.sh [ARGUMENTS OF GO TEST]
#
# Without root, tests that need it are skipped. Where CI is set a test whose
# requirements are missing fails instead.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

NATKIT_TEST_SKIPS=$(mktemp)
export NATKIT_TEST_SKIPS
trap 'rm -f "$NATKIT_TEST_SKIPS"' EXIT

# As root the tests work with the kernel: nothing is cached, and one package
# runs at a time, so that they do not disturb each other's timing.
args=()
[ "$(id -u)" != 0 ] || args=(-count=1 -p 1)

status=0
go test "${args[@]}" "$@" ./... || status=$?

left_out=$(wc -l <"$NATKIT_TEST_SKIPS")
if [ "$left_out" -gt 0 ]; then
    printf '\n%d tests left out:\n' "$left_out"
    # From lines "package test <tab> reason": how many for each reason and package.
    awk -F '\t' '{ split($1, name, " "); n[$2 FS name[1]]++ } END { for (k in n) print k FS n[k] }' "$NATKIT_TEST_SKIPS" |
        sort | awk -F '\t' '
            $1 != reason { printf "%s  %s:", end, $1; reason = $1; end = "\n"; comma = "" }
            { printf "%s %s %d", comma, $2, $3; comma = "," }
            END { print "" }'
fi
if [ "$status" = 0 ]; then echo "tests: all that ran passed"; else echo "tests: FAILED"; fi
exit "$status"
