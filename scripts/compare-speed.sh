#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Is this tree faster or slower than another revision? Builds both, measures them in
# turn, and prints for each row the ratio of the two, round by round, with its spread
# and a verdict: faster, slower, the same, or that the rounds cannot tell.
#
#   scripts/compare-speed.sh [-n ROUNDS] [-r ROWS] [-d DURATION] [-q] REV
#
#   -n   rounds, 9 without; fewer than 6 can't give a verdict
#   -r   only rows whose name matches this regular expression; -r list lists them
#   -d   of a trial, 300ms without
#   -q   leave out rows of more than 64 512 sessions, which take most of the time
#
# REV and this tree are measured in each round, the first of the two by turns. Beside
# each ratio stand those to nftables and to plain XDP forwarding of the same rounds,
# for a machine whose memory is slow today slows these too. Needs root; works in network
# namespaces of its own. About two minutes a round on a quiet machine, half of it with -q.
set -euo pipefail
cd "$(dirname "$0")/.."
arguments=()
while getopts n:r:d:q option; do
    case $option in
    q) arguments+=(-quick) ;;
    n) arguments+=(-rounds "$OPTARG") ;;
    r) arguments+=(-rows "$OPTARG") ;;
    d) arguments+=(-duration "$OPTARG") ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# = 1 ] || { echo "usage: $0 [-n ROUNDS] [-r ROWS] [-d DURATION] [-q] REV" >&2; exit 2; }
revision=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "$0: no revision $1" >&2; exit 2; }

work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
git worktree add --quiet --detach "$work/tree" "$revision"
(cd "$work/tree" && CGO_ENABLED=0 go build -o "$work/before" ./cmd/natkit)
CGO_ENABLED=0 go build -o "$work/after" ./cmd/natkit
go build -o "$work/compare" scripts/compare-speed.go
echo "before: $(git log -1 --format='%h %s' "$revision")"
echo "after:  $(git describe --always --dirty) (this tree)"
"$work/compare" "${arguments[@]}" "$work/before" "$work/after"
