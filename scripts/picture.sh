#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Draw docs/picture.svg, the picture in the README, from a run of `natkit demo`. Needs
# root; takes two minutes. With a file, from what such a run printed into it.
#
#   scripts/picture.sh [FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-}
if [ -z "$run" ]; then
    run=$(mktemp)
    trap 'rm -f "$run"' EXIT
    make -s build
    ./natkit demo --no-host-write >"$run"
fi
go run scripts/picture.go <"$run" >docs/picture.svg.new
mv docs/picture.svg.new docs/picture.svg
