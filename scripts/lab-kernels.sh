#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make faults that the doctor knows on other Linux versions, in qemu, with `natkit lab
# run`: something like the fault and healthy, the fault, the cure.
#
#   scripts/lab-kernels.sh [-k VERSION] [-t SECONDS] [CODE...]
#
#   -k   only on this Linux version, as test-kernels.sh takes them
#   -t   limit for all faults on one kernel, 3600 without
#
# Without codes it takes every one there is. A line each says how it went; what natkit
# said is in .cache/kernels/VERSION-lab.log.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=(6.1 6.12) limit=3600
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
trap 'rm -rf "$work"' EXIT
guest=$work/guest
scripts/make-guest.sh "$guest"
install -d "$guest/usr/bin"
CGO_ENABLED=0 go build -o "$guest/usr/bin/natkit" ./cmd/natkit

codes=("$@")
[ $# -gt 0 ] || mapfile -t codes < <("$guest/usr/bin/natkit" lab run --list | awk '/^[a-z]/ { print $1 }')
cat >"$guest/faults" <<'FAULTS'
modprobe -a nf_conntrack br_netfilter
for code; do
    echo "=== $code"
    natkit lab run "$code"
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
        0) said="found, cured, found no more" ;;
        "") said="not reached" failed=1 ;;
        *) said="FAILED: exit status $outcome" failed=1 ;;
        esac
        printf '%-30s Linux %-28s %s\n' "$code" "$(ls "$kernel/lib/modules")" "$said"
    done
done
exit "$failed"
