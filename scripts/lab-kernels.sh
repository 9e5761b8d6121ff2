#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run the demo and make the faults that the doctor knows on other Linux versions, in qemu,
# with `natkit demo` and `natkit lab run`: something healthy that looks similar, the fault, the cure.
#
#   scripts/lab-kernels.sh [-k VERSION] [-t SECONDS] [CODE|demo|demo-2...]
#
#   -k   only on this Linux version, as test-kernels.sh takes them
#   -t   limit for everything on one kernel, 7200 without
#
# demo and demo-2 are the demo of each site. Without codes it takes both and every fault
# there is. A line each says how it went; what natkit printed is in
# .cache/kernels/VERSION-lab.log.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=(6.1 6.12) limit=7200
while getopts k:t: option; do
    case $option in
    k) versions=("$OPTARG") ;;
    t) limit=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
cache=$PWD/.cache/kernels

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
guest=$work/guest
scripts/make-guest.sh "$guest"
install -d "$guest/usr/bin"
CGO_ENABLED=0 go build -o "$guest/usr/bin/natkit" ./cmd/natkit

codes=("$@")
[ $# -gt 0 ] || mapfile -t codes < <(printf 'demo\ndemo-2\n' && "$guest/usr/bin/natkit" lab run --list | awk '/^[a-z]/ { print $1 }')
cat >"$guest/faults" <<'FAULTS'
modprobe -a nf_conntrack br_netfilter
for code; do
    echo "=== $code"
    case $code in
    demo) natkit demo ;;
    demo-2) natkit demo --site 2 ;;
    *) natkit lab run "$code" ;;
    esac
    echo "=== $code: exit status $?"
done
FAULTS

mkdir -p "$cache"
failed=0
for version in "${versions[@]}"; do
    kernel=$(scripts/fetch-kernel.sh "$version")
    log=$cache/$version-lab.log
    scripts/run-in-vm.sh -c -t "$limit" -m 5G "$kernel" "$guest" sh /faults "${codes[@]}" >"$log" 2>&1 || true
    for code in "${codes[@]}"; do
        # Progress that natkit draws may be left on the line.
        outcome=$(sed -n "s/.*=== $code: exit status //p" "$log")
        case $outcome in
        0) said="passed" ;;
        "") said="not reached" failed=1 ;;
        *) said="FAILED: exit status $outcome" failed=1 ;;
        esac
        printf '%-30s Linux %-28s %s\n' "$code" "$(ls "$kernel/lib/modules")" "$said"
    done
done
exit "$failed"
