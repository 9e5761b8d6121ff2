#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run the tests that work with the kernel on other Linux versions, in qemu, and
# write the table of docs/kernels.md.
#
#   scripts/test-kernels.sh [-c] [-k VERSION] [-r TESTS] [-t SECONDS] [PACKAGE...]
#
#   -c   one processor and a clock that counts instructions: the tests' own limits
#        then hold however busy this machine is, and waiting takes no time
#   -k   only on this Linux version; with -full behind it on Debian's kernel for every
#        machine instead of the one for virtual ones: it has PPP
#   -r   only tests that match this regular expression
#   -t   limit for one package on one kernel, 600 without; qemu without KVM is some
#        20 times slower than the machine
#
# Without packages it takes every one whose tests use internal/testutil/ktest, but for those
# that need the source tree or the go command, and rewrites the table; with packages
# or tests only these, and the table stays. Kernels are Debian's packages, kept in
# .cache/kernels with the log of each run.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=(6.1 6.12)
memory=5G # above 4 GB the kernel makes the connection tracking table as large as on a server
limit=600
clock=()
tests=
while getopts ck:r:t: option; do
    case $option in
    c) clock=(-c) ;;
    k) versions=("$OPTARG") ;;
    r) tests=$OPTARG ;;
    t) limit=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
cache=$PWD/.cache/kernels

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
guest=$work/guest
scripts/make-guest.sh "$guest"

# Some tests compare names with those of the C.
mkdir -p "$guest/natkit/bpf"
cp -r bpf/lib bpf/nat bpf/accel "$guest/natkit/bpf/"

packages=("$@")
[ $# -gt 0 ] || mapfile -t packages < <(
    git grep -l '"natkit/internal/testutil/ktest"' -- '*_test.go' ':!internal/testutil/archtest' ':!cmd' | xargs -n 1 dirname | sort -u)
for package in "${packages[@]}"; do
    mkdir -p "$guest/natkit/$package"
    CGO_ENABLED=0 go test -c -o "$guest/natkit/$package/package.test" "./$package"
    [ ! -d "$package/testdata" ] || cp -r "$package/testdata" "$guest/natkit/$package/"
done

# result says in a few words how a run ended, from its log and its exit status.
result() {
    awk -v status="$2" '
        /^--- PASS: / { passed++ }
        /^--- SKIP: / { skipped++ }
        /^--- FAIL: / { failed = failed " " $3 }
        END {
            if (failed != "") print "FAILED:" failed
            else if (status == 124) print "FAILED: over the time limit"
            else if (status == 125) print "FAILED: the kernel died"
            else if (status != 0) print "FAILED: exit status " status
            else print passed + 0 " passed" (skipped ? ", " skipped " left out" : "")
        }' "$1"
}

# reasons lists why tests of a log were left out.
reasons() {
    awk '
        /^=== / { test = $3 }
        /^ +[a-z0-9_]+\.go:[0-9]+: / { said[test] = $0; sub(/^ *[a-z0-9_]+\.go:[0-9]+: /, "", said[test]) }
        /^ *--- SKIP: / { n[said[$3]]++ }
        END { for (reason in n) print "    left out: " n[reason] " x " reason }' "$1"
}

mkdir -p "$cache"
head="| package |" rule="|---|" status=0
declare -A row
for version in "${versions[@]}"; do
    kernel=$(scripts/fetch-kernel.sh "$version")
    release=$(ls "$kernel/lib/modules")
    head+=" Linux $release |" rule+="---|"
    for package in "${packages[@]}"; do
        log=$cache/$version-${package//\//-}.log
        run=0
        # Nothing loads these two by itself; a machine with NAT has them. With
        # -short what needs the speed of a real machine is left out.
        # shellcheck disable=SC2016 # $0 is for the guest's shell
        scripts/run-in-vm.sh "${clock[@]}" -t "$limit" -m "$memory" "$kernel" "$guest" \
            sh -c 'modprobe -a nf_conntrack br_netfilter; cd "/natkit/$0" && exec ./package.test -test.short -test.v -test.timeout 0 -test.run "$1"' \
            "$package" "$tests" >"$log" 2>&1 || run=$?
        cell=$(result "$log" "$run")
        [[ $cell != FAILED* ]] || status=1
        row[$package]+=" $cell |"
        printf '%-20s Linux %-28s %s\n' "$package" "$release" "$cell"
        reasons "$log"
    done
done

if [ $# = 0 ] && [ -z "$tests" ] && [ ${#versions[@]} = 2 ]; then
    {
        sed '/^<!-- results/q' docs/kernels.md
        printf '%s\n%s\n' "$head" "$rule"
        for package in "${packages[@]}"; do printf '| %s |%s\n' "$package" "${row[$package]}"; done
        sed -n '/^<!-- end of results/,$p' docs/kernels.md
    } >"$work/kernels.md"
    cp "$work/kernels.md" docs/kernels.md
fi
exit "$status"
