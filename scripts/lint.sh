#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Check everything that a reader would otherwise have to: formatting, vet,
# staticcheck, go.mod, words, shell scripts, the C under bpf/. Prints every problem,
# then fails when there was one. A checker that is not installed is named and,
# where CI is set, is a failure.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2

scratch=$(mktemp -d)
trap 'rm -rf --one-file-system "$scratch"' EXIT
failed=
check() { # TITLE COMMAND...: a check passes when it exits 0 with nothing on stdout; go reports downloads on stderr
    local title=$1 status=0
    shift
    "$@" >"$scratch/out" 2>"$scratch/err" || status=$?
    if [ "$status" -ne 0 ] || [ -s "$scratch/out" ]; then
        printf '%s:\n' "$title"
        cat "$scratch/out" "$scratch/err"
        failed=1
    fi
}
have() {
    command -v "$1" >/dev/null && return
    echo "$1 is not installed: left out"
    [ -z "${CI:-}" ] || failed=1
    return 1
}

words() { # words that must not return: internal/testutil/archtest/words.txt
    local out
    out=$(go test ./internal/testutil/archtest -run '^TestWords$') || { printf '%s\n' "$out"; return 1; }
}

deletes() { # a folder is deleted as root: not what another file system holds that is mounted below it
    ! git grep -nE 'rm -[a-z]*r' -- '*.sh' Makefile .ci/run | grep -vE -e '--one-file-system|git grep'
}

itself() { # a script changes folder first: by $0 it does not find itself when it was called from another one
    ! git grep -nE '"[$]0" ' -- '*.sh' .ci/run | grep -vE 'git grep|echo|>&2'
}

mapfile -t shell < <(git ls-files '*.sh' .ci/run)
mapfile -t c < <(git ls-files 'bpf/*.c' 'bpf/*.h' ':!bpf/include')

check gofmt gofmt -l .
check "go vet" go vet ./...
check staticcheck go run "$staticcheck" ./...
check "go.mod is not tidy" go mod tidy -diff
check words words
check "deletes other file systems" deletes
check "calls itself by \$0" itself
if have shellcheck; then check shellcheck shellcheck "${shell[@]}"; fi
if [ ${#c[@]} -gt 0 ] && have clang-format-19; then
    check clang-format clang-format-19 --dry-run --Werror "${c[@]}"
fi

[ -z "$failed" ] || exit 1
echo "lint: nothing found"
