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
    sort "$NATKIT_TEST_SKIPS" | awk -F '\t' '
        { if (!($2 in n)) order[++reasons] = $2; n[$2]++; names[$2] = names[$2] "\n    " $1 }
        END { for (i = 1; i <= reasons; i++) printf "  %s: %d%s\n", order[i], n[order[i]], names[order[i]] }'
fi
if [ "$status" = 0 ]; then echo "tests: all that ran passed"; else echo "tests: FAILED"; fi
exit "$status"
