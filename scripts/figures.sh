#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measure what docs/bench.md leads with, and write its table and its chart again
# (docs/bench.svg). Rows as scripts/compare-speed.sh -r list names them. Needs root
# and a machine that does nothing else; works in network namespaces of its own; a minute
# and a half a round.
#
#   scripts/figures.sh [-n ROUNDS] [-d DURATION]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=7 duration=300ms
while getopts n:d: option; do
    case $option in
    n) rounds=$OPTARG ;;
    d) duration=$OPTARG ;;
    *) exit 2 ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
CGO_ENABLED=0 go build -o "$work/natkit" ./cmd/natkit
go run scripts/compare-speed.go -rounds "$rounds" -duration "$duration" -table docs/bench.md -chart docs/bench.svg "$work/natkit"
