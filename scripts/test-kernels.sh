#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run tests and scenarios that work with the kernel on other Linux versions, in qemu, and
# write how each went into the table of docs/kernels.md.
#
#   scripts/test-kernels.sh [-p] [-k VERSION] [-r TESTS] [-t SECONDS] [RUN|PACKAGE...]
#   scripts/test-kernels.sh -n
#   scripts/test-kernels.sh -s
#
#   -k   only on this Linux version; with -full behind it on Debian's kernel for every
#        machine instead of the one for virtual ones: it has PPP
#   -n   run nothing: have the table say whose eBPF programs have changed since they ran
#   -p   two processors and this machine's clock. Without it there is one, whose clock
#        counts instructions: the tests' own limits then hold however busy this machine
#        is, and waiting takes no time
#   -r   only tests of the packages that match this regular expression
#   -s   short, for every change: on Linux 6.1 one life of each engine and of accel, and the
#        packet tests that pay most, side by side; minutes, and nothing is written
#   -t   limit for one run on one kernel, 7200 without; qemu without KVM is some 20 times
#        slower than the machine
#
# A RUN is one of the list below, and has a row in the table for each kernel, which is
# written as soon as it ends; without arguments all of them. Of a PACKAGE, or with -r, the
# result is only printed. Kernels are Debian's packages, kept in .cache/kernels with the log
# of each run.
set -euo pipefail
cd "$(dirname "$0")/.."

# The runs: name, package, the package whose eBPF objects are what it is about if that is
# another, and which of its tests, or `natkit` and its arguments.
runs() {
    cat <<-'END'
	conntrack|internal/kernel/conntrack||
	journal|internal/kernel/journal||
	netns|internal/kernel/netns||
	observe|internal/kernel/observe||
	probe|internal/diagnose/probe||
	tune|internal/diagnose/tune||
	nft|internal/nat/nft||
	lab|internal/lab||
	packets|internal/nat/datapath||
	engines|internal/nat/control|internal/nat/datapath|^(TestGateway|TestKilled|TestDownKilled|TestFailedUpgrade|TestTwoAtOnce|TestApplyNothing|TestProgramsTakenOff|TestServeReload)$
	accel|internal/nat/control|internal/nat/datapath|^(TestAccelUDP|TestAccelTCP|TestAccelOffTCP|TestAccelObeys|TestAccelKilled|TestAccelXDP)$
	table-full|natkit|internal/kernel/observe|lab run conntrack-table-full
	demo|natkit|cmd/natkit|demo
	END
}

# The short runs: package and tests. Left out are tests that take as long as several of these.
short_runs() {
    cat <<-'END'
	internal/nat/control ^(TestGateway|TestKilled|TestDownKilled|TestFailedUpgrade|TestTwoAtOnce|TestAccelUDP|TestAccelTCP|TestAccelObeys|TestAccelKilled)$
	internal/nat/datapath ^(TestVerifierWork|TestDecision|TestReasons|TestSession|TestHit|TestStateTCP|TestICMPErrors|TestFragments|TestMSS|TestMalformed|TestPortsAll|TestSourcesOfEveryRule|TestRandomPackets|TestAccelCache|TestAccelThreshold|TestAccelEnds)$
	END
}

versions=(6.1 6.12)
memory=5G # above 4 GB the kernel makes the connection tracking table as large as on a server
limit=7200
clock=(-c)
tests='' note='' short=''
while getopts k:npr:st: option; do
    case $option in
    k) versions=("$OPTARG") ;;
    n) note=1 ;;
    p) clock=() ;;
    r) tests=$OPTARG ;;
    s) short=1 ;;
    t) limit=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
cache=$PWD/.cache/kernels
table=docs/kernels.md

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT

# programs prints a fingerprint of a package's eBPF programs.
programs() { go run scripts/programs.go "$1" | awk '{ print $2 }'; }

# write_rows writes the table with one row changed: write_rows NAME VERSION ROW, or
# without arguments with those marked whose programs have changed.
write_rows() {
    local name package objects version row now
    exec 9>"$cache/lock" # another run, on the other kernel
    flock 9
    {
        sed '/^<!-- results/q' "$table"
        printf '| Run | Linux | Programs | Result |\n|---|---|---|---|\n'
        while IFS='|' read -r name package objects _; do
            for version in 6.1 6.12; do
                row=$(grep -E "^\| $name \| ${version/./\\.}[. ]" "$table" || true)
                [ "$name $version" != "${1:-} ${2:-}" ] || row=$3
                if [ $# = 0 ] && [[ $row != *'| not run |' && -n $row ]]; then
                    now=$(programs "${objects:-$package}")
                    row=${row/ (changed since)/}
                    [[ $row == *"| $now |"* ]] || row=$(awk -F ' [|] ' -v OFS=' | ' '{ $3 = $3 " (changed since)" } 1' <<<"$row")
                fi
                echo "${row:-| $name | $version | - | not run |}"
            done
        done < <(runs)
        sed -n '/^<!-- end of results/,$p' "$table"
    } >"$work/table"
    cp "$work/table" "$table"
    flock -u 9
}
mkdir -p "$cache"
if [ -n "$note" ]; then
    write_rows
    exit
fi

if [ -n "$short" ]; then
    scripts/fetch-kernel.sh 6.1 >/dev/null # once: the runs share it
    pids=() packages=() status=0
    while read -r package which; do
        scripts/test-kernels.sh -k 6.1 -r "$which" -t 1800 "$package" &
        pids+=($!) packages+=("$package")
    done < <(short_runs)
    for i in "${!pids[@]}"; do
        wait "${pids[i]}" || {
            status=1
            echo "${packages[i]}: the end of its log:" >&2
            tail -n 60 "$cache/6.1-${packages[i]//\//-}.log" >&2 || true
        }
    done
    exit "$status"
fi

guest=$work/guest
scripts/make-guest.sh "$guest"
# Some tests compare names with those of the C, and paths with the documentation's.
mkdir -p "$guest/natkit/bpf"
cp -r bpf/lib bpf/nat bpf/accel "$guest/natkit/bpf/"
cp ARCHITECTURE.md "$guest/natkit/"

# build puts a package's tests into the guest, or natkit itself.
build() {
    if [ "$1" = natkit ]; then
        CGO_ENABLED=0 go build -o "$guest/usr/bin/natkit" ./cmd/natkit
        return
    fi
    mkdir -p "$guest/natkit/$1"
    CGO_ENABLED=0 go test -c -o "$guest/natkit/$1/package.test" "./$1"
    [ ! -d "$1/testdata" ] || cp -r "$1/testdata" "$guest/natkit/$1/"
}

# result says in a few words how a run ended, from its log and its exit status.
result() {
    awk -v status="$2" '
        /^--- PASS: / { passed++ }
        /^--- SKIP: / { skipped++ }
        /^--- FAIL: / { failed = failed " " $3 }
        END {
            if (failed != "") print passed + 0 " passed, FAILED:" failed
            else if (status == 124) print "FAILED: over the time limit"
            else if (status == 125) print "FAILED: the kernel died"
            else if (status != 0) print "FAILED: exit status " status
            else if (passed + skipped == 0) print "passed"
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

names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(runs | cut -d '|' -f 1)
mkdir -p "$guest/usr/bin"
status=0
for name in "${names[@]}"; do
    IFS='|' read -r _ package objects which < <(runs | grep "^$name|") || package=$name objects='' which=''
    build "$package"
    built=$(programs "${objects:-$package}")
    command=(natkit)
    if [ "$package" = natkit ]; then
        read -r -a arguments <<<"$which"
        command+=("${arguments[@]}")
    else
        # With -short what needs the speed of a real machine is left out.
        command=(./package.test -test.short -test.v -test.timeout 0 -test.run "${tests:-$which}")
    fi
    for version in "${versions[@]}"; do
        kernel=$(scripts/fetch-kernel.sh "$version")
        release=$(ls "$kernel/lib/modules")
        log=$cache/$version-${name//\//-}.log
        ended=0 began=$SECONDS
        # Nothing loads these by itself; a machine with NAT has the first two.
        # shellcheck disable=SC2016 # for the guest's shell
        scripts/run-in-vm.sh "${clock[@]}" -t "$limit" -m "$memory" "$kernel" "$guest" \
            sh -c 'modprobe -a nf_conntrack br_netfilter tun; cd "/natkit/$0" 2>/dev/null || cd /; exec "$@"' \
            "$package" "${command[@]}" >"$log" 2>&1 || ended=$?
        cell=$(result "$log" "$ended")
        [[ $cell != *FAILED:* ]] || status=1
        printf '%-20s Linux %-28s %5d s  %s\n' "$name" "$release" $((SECONDS - began)) "$cell"
        reasons "$log"
        if [ "$package" != "$name" ] && [ -z "$tests" ]; then
            write_rows "$name" "${version%-full}" "| $name | $release | $built | $cell |"
        fi
    done
    rm -rf --one-file-system "${guest:?}/natkit/$package/package.test"
done
exit "$status"
