#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run all tests, then list what was left out and why, and how much of each package the
# tests went through.
#
#   scripts/test.sh [-long] [ARGUMENTS OF GO TEST]
#
# -long: only the tests that -short leaves out or shortens, whole.
#
# Without root, tests that need it are skipped. Where CI is set a test whose
# requirements are missing fails instead.
#
# Tests that work with the kernel share the machine with whatever else runs there. So
# each of up to three that failed is run once more by itself, when all are through. If
# they pass then, so does the run, counts them and names them as unsteady, with how they
# failed. What is final at once: a package that does not build or that does not come to its
# end (a panic, a time-out), a data race, and a test that was run again in an earlier run,
# of those that have the same file NATKIT_TEST_AGAIN.
#
# What is built has the flags of make build, so that nothing is compiled twice; the program that
# tests run is built once for all packages (NATKIT_TEST_PROGRAM).
#
# As root it fails too when the tests leave something behind in natkit's folders.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
long=
if [ "${1:-}" = -long ]; then
    long=1
    shift
fi

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
export NATKIT_TEST_SKIPS=$work/skips
: >"$NATKIT_TEST_SKIPS"
again=${NATKIT_TEST_AGAIN:-$work/again-before}
[ -e "$again" ] || : >"$again"
folders=${NATKIT_TEST_FOLDERS:-/var/lib/natkit /run/natkit /run/netns /sys/fs/bpf}

GOFLAGS="$(go env GOFLAGS) -trimpath"
export GOFLAGS CGO_ENABLED=${CGO_ENABLED:-0}
if [ -d cmd/natkit ] && CGO_ENABLED=0 go build -ldflags '-s -w' -o "$work/natkit" ./cmd/natkit; then
    export NATKIT_TEST_PROGRAM=$work/natkit
fi

# As root the tests work with the kernel: nothing is cached. Several packages run side by side,
# for they wait more than they work; those whose tests measure, or look at what the whole
# machine has, by themselves. To link with what debuggers read takes longer than most
# packages take, and make lint vets.
args=(-timeout 25m -ldflags '-s -w')
alone='/internal/(bench|diagnose/probe|kernel/observe|lab)$'
longest='cmd/natkit nat/datapath nat/control scenario diagnose/follow testutil/archtest'
root=
if [ "$(id -u)" = 0 ]; then
    root=1
    args+=(-count=1 -vet=off)
fi
# Under the race detector, and for long, tests work more than they wait. Coverage would cost the
# detector's time again.
beside=2
case "$long $* " in *' -race '* | 1*) ;; *) beside=4 args+=(-cover) ;; esac

# present lists what is in natkit's folders. Of BPF folders an empty one is something, too.
# On a new machine most of the folders are missing.
present() {
    # shellcheck disable=SC2086 # words of folders
    { find $folders ! -type d -o -path '/sys/fs/bpf/*' 2>/dev/null || true; } | sort
}

# run tests packages and keeps what they print.
run() {
    go test "${args[@]}" "$@" 2>&1 | tee -a "$work/output"
}

: >"$work/output"
present >"$work/before"
status=0
# Checks of the source have nothing to race with, and the faults of the lab run what the
# tests of other packages run, too.
except=^$
[ -z "$root" ] || case " $* " in *' -race '*) except='/(archtest|scenario)$' ;; esac
go list ./... | grep -vE "$except" >"$work/packages"
if [ -n "$long" ]; then
    # Lines "./folder test" of those that ask whether they are to be short.
    # shellcheck disable=SC2016 # awk's fields
    find . -name '*_test.go' -exec awk '
        /^func / { split($2, name, "("); test = name[1] ~ /^Test/ ? name[1] : "" }
        /testing\.Short\(\)/ && test { folder = FILENAME; sub("/[^/]*$", "", folder); print folder, test; test = "" }' {} + >"$work/long"
    args+=(-run "^($(awk '{ print $2 }' "$work/long" | paste -sd '|'))\$")
    awk '{ print $1 }' "$work/long" | sort -u | xargs go list | grep -Fxf - "$work/packages" >"$work/with"
    mv "$work/with" "$work/packages"
fi
if [ -n "$root" ]; then
    mapfile -t together < <(
        # The longest first: nothing is left to run beside one that begins last.
        for name in $longest; do grep "/$name\$" "$work/packages" || true; done
        grep -vE "$alone|/(${longest// /|})\$" "$work/packages" || true
    )
    mapfile -t measuring < <(grep -E "$alone" "$work/packages")
    [ ${#together[@]} = 0 ] || run -p $beside "$@" "${together[@]}" || status=$?
    [ ${#measuring[@]} = 0 ] || run -p 1 "$@" "${measuring[@]}" || status=$?
else
    mapfile -t together <"$work/packages"
    run "$@" "${together[@]}" || status=$?
fi
present | comm -13 "$work/before" - >"$work/left"

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
grep -Fxf "$again" "$work/failed" >"$work/twice" || true
if [ -s "$work/twice" ]; then
    printf '\nrun again in an earlier run, and failed in this one:\n'
    sed 's/^/  /' "$work/twice"
elif [ "$status" != 0 ] && [ -s "$work/failed" ] && [ "$(wc -l <"$work/failed")" -le 3 ] &&
    ! grep -qv ' ' "$work/failed" && ! grep -q 'DATA RACE' "$work/output"; then
    unsteady=1
    cat "$work/failed" >>"$again"
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

# From lines "ok <tab> package <tab> time <tab> coverage: N% of statements".
awk -F '\t' '$1 ~ /^ok/ && $4 ~ /^coverage: [0-9]/ { split($4, w, "[ %]"); print w[2], $2 }' "$work/output" | sort -n >"$work/coverage"
if [ -s "$work/coverage" ]; then
    awk '{ v[NR] = $1; if (NR <= 3) least = least (NR > 1 ? ", " : "") $2 " " $1 " %" }
        END { printf "\ncoverage by the own tests of %d packages: median %s %%, least: %s\n", NR, v[int((NR + 1) / 2)], least }' "$work/coverage"
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
    printf '\nunsteady: failed once, passed when run again: %d\n' "$(wc -l <"$work/failed")"
    sed 's/^/  /' "$work/failed"
    echo "how they failed:"
    awk '/^--- FAIL: / { on = 1 } /^(FAIL|PASS|ok)/ { on = 0 } on { print "  " $0 }' "$work/output"
fi
if [ -n "$root" ] && [ -s "$work/left" ]; then
    status=1
    printf '\nleft behind on this machine:\n'
    sed 's/^/  /' "$work/left"
fi
if [ "$status" = 0 ]; then echo "tests: all that ran passed"; else echo "tests: FAILED"; fi
exit "$status"
