#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run all tests, then list what was left out and why.
#
#   scripts/test.sh [ARGUMENTS OF GO TEST]
#
# Without root, tests that need it are skipped. Where CI is set a test whose
# requirements are missing fails instead.
#
# Tests that work with the kernel share the machine with whatever else runs there. So
# each of up to three that failed is run once more by itself, when all are through. If
# they pass then, so does the run, and names them as unsteady, with how they failed.
# What is final at once: a package that does not build or that does not come to its end
# (a panic, a time-out), and a data race.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NATKIT_TEST_SKIPS=$work/skips
: >"$NATKIT_TEST_SKIPS"

# As root the tests work with the kernel: nothing is cached, and one package
# runs at a time, so that they do not disturb each other's timing.
args=(-timeout 25m)
[ "$(id -u)" != 0 ] || args+=(-count=1 -p 1)

status=0
go test "${args[@]}" "$@" ./... 2>&1 | tee "$work/output" || status=$?

# Lines "package test" of what failed, in a package that came to its end: then its own
# line FAIL is before go's. Of any other package, "package".
awk '
    /^--- FAIL: / { failed[++n] = $3 }
    /^FAIL$/ { ended = 1 }
    /^FAIL\t/ {
        for (i = 1; i <= n && ended; i++) print $2, failed[i]
        if (!n || !ended) print $2
    }
    /^(FAIL|ok  )\t/ { n = ended = 0 }' "$work/output" >"$work/failed"

unsteady=
if [ "$status" != 0 ] && [ -s "$work/failed" ] && [ "$(wc -l <"$work/failed")" -le 3 ] &&
    ! grep -qv ' ' "$work/failed" && ! grep -q 'DATA RACE' "$work/output"; then
    unsteady=1
    while read -r package name; do
        printf '\nonce more, by itself: %s %s\n' "$package" "$name"
        if NATKIT_TEST_SKIPS='' go test "${args[@]}" "$@" -v -run "^$name\$" "$package" >"$work/again" 2>&1 </dev/null &&
            grep -q "^--- PASS: $name " "$work/again"; then
            echo passed
        else
            cat "$work/again"
            unsteady=
        fi
    done <"$work/failed"
fi

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
if [ -n "$unsteady" ]; then
    status=0
    printf '\nunsteady: failed once, passed when run again:\n'
    sed 's/^/  /' "$work/failed"
    echo "how they failed:"
    awk '/^--- FAIL: / { on = 1 } /^(FAIL|PASS|ok)/ { on = 0 } on { print "  " $0 }' "$work/output"
fi
if [ "$status" = 0 ]; then echo "tests: all that ran passed"; else echo "tests: FAILED"; fi
exit "$status"
