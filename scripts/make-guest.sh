#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lay out below a folder what a guest of run-in-vm.sh needs besides busybox and the
# kernel: the programs of this machine that tests and labs use, with their libraries.
#
#   scripts/make-guest.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
guest=${1:?which folder}

# add copies a program and its libraries into the guest.
add() {
    local program library
    program=$(command -v "$1") || return 0
    install -D "$program" "$guest$program"
    for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*'); do
        install -D "$library" "$guest$library"
    done
}

mkdir -p "$guest/etc"
PATH=$PATH:/usr/sbin:/sbin
for program in $(scripts/install-deps.sh --list compare); do add "$program"; done
# busybox's shell would run its own ip and sysctl instead of these.
add dash
install -D "$(command -v dash)" "$guest/bin/sh"
echo "127.0.0.1 localhost" >"$guest/etc/hosts"
cp /etc/protocols /etc/services "$guest/etc/" 2>/dev/null || true
printf '%s\n' root:x:0:0::/:/bin/sh nobody:x:65534:65534::/:/bin/false >"$guest/etc/passwd"
printf '%s\n' root:x:0: nogroup:x:65534: >"$guest/etc/group"
xtables=$(dirname "$(find /usr/lib -name libxt_conntrack.so -print -quit)")
[ "$xtables" = . ] || { mkdir -p "$guest$xtables" && cp "$xtables"/*.so "$guest$xtables/"; }
