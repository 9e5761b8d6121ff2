#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Unpack Debian's newest kernel package of a version below .cache/kernels, unless it
# is there, and print where: the small one for virtual machines, or with -full that for
# every machine, which has PPP besides.
#
#   scripts/fetch-kernel.sh VERSION[-full]
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?which version, such as 6.12}
kind=cloud-amd64
case $version in *-full) version=${version%-full} kind=amd64 ;; esac
cache=$PWD/.cache/kernels

newest() {
    apt-cache search --names-only "^linux-image-${version/./\\.}\.[0-9.]+([+~][0-9a-z.+~]*)?(-[0-9]+)?-$kind$" |
        awk '{print $1}' | sort -V | tail -n 1
}
package=$(newest)
# The lists of packages may be missing, or older than what the archive still has.
if [ -z "$package" ] || [ ! -d "$cache/$package/boot" ]; then
    [ "$(id -u)" != 0 ] || apt-get -qq update >&2 || true
    package=$(newest)
fi
[ -n "$package" ] || {
    echo "no Debian package of Linux $version here: is this Debian, and was 'apt-get update' run?" >&2
    exit 1
}
folder=$cache/$package
if [ ! -d "$folder/boot" ]; then
    rm -rf --one-file-system "$folder"
    mkdir -p "$folder"
    (cd "$folder" && apt-get -qq download "$package" 2>/dev/null && dpkg -x ./*.deb unpacked &&
        rm -- *.deb && mv unpacked/lib unpacked/boot . && rm -r --one-file-system unpacked) || {
        rm -rf --one-file-system "$folder"
        echo "cannot download $package" >&2
        exit 1
    }
fi
echo "$folder"
