#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make what natkit is released as, below dist/: .deb, .rpm and the bare binary for each
# architecture, a bill of materials (CycloneDX) and checksums.
#
#   scripts/packages.sh [VERSION [ARCHITECTURE...]]
#
# VERSION is the newest one of CHANGELOG.md, with the commit behind it unless the commit
# has that tag. ARCHITECTURE is amd64 or arm64, both without.
set -euo pipefail
cd "$(dirname "$0")/.."

# The programs that make packages, from Go's module proxy; no part of natkit.
nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.0
bom=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.9.0

release=$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' CHANGELOG.md | head -n 1)
version=${1:-$release}
if [ $# = 0 ] && [ "$(git describe --exact-match --tags 2>/dev/null)" != "v$release" ]; then
    version=$release~git$(git log -1 --format=%cd --date=format:%Y%m%d%H%M).$(git rev-parse --short=10 HEAD)
fi
shift || true
[ $# -gt 0 ] || set -- amd64 arm64
export VERSION=$version
export MAINTAINER=${MAINTAINER:-natkit <natkit@packages.invalid>}
# Files have the time of the commit, so that the same commit makes the same packages.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

rm -rf --one-file-system dist
mkdir -p dist
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT

# lay_out puts below $ROOT what both kinds of packages contain; where units and the completion of zsh go differs.
lay_out() {
    local doc=$ROOT/usr/share/doc/natkit file
    install -D -m 755 "$1" "$ROOT/usr/bin/natkit"
    install -d "$ROOT/usr/share/man/man8" "$doc"
    gzip -9nc docs/natkit.8 >"$ROOT/usr/share/man/man8/natkit.8.gz"
    mkdir -p "$ROOT"/usr/share/{bash-completion/completions,zsh,fish/vendor_completions.d}
    "$work/host" completion bash >"$ROOT/usr/share/bash-completion/completions/natkit"
    "$work/host" completion zsh >"$ROOT/usr/share/zsh/_natkit"
    "$work/host" completion fish >"$ROOT/usr/share/fish/vendor_completions.d/natkit.fish"
    install -D -m 644 -t "$ROOT/usr/lib/systemd/system" deploy/systemd/*.service
    install -m 644 README.md SECURITY.md "$doc/"
    install -m 644 deploy/packages/copyright "$doc/copyright"
    gzip -9nc CHANGELOG.md >"$doc/CHANGELOG.md.gz"
    {
        printf 'natkit (%s) unstable; urgency=medium\n\n  * The changes are in CHANGELOG.md.gz beside this file.\n\n' "$VERSION"
        printf ' -- %s  %s\n' "$MAINTAINER" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$doc/changelog.gz"
    install -D -m 644 -t "$doc/examples" deploy/examples/* deploy/prometheus/natkit.rules.yml deploy/grafana/*
    # What the documents link to and a reader needs.
    for file in docs/*.md docs/*.svg docs/*.png docs/*.yaml docs/causes/*.md docs/schema/*.json; do
        install -D -m 644 "$file" "$doc/$file"
    done
    find "$ROOT" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
}

build() {
    CGO_ENABLED=0 GOARCH=$1 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.release=$VERSION" -o "$2" ./cmd/natkit
}

build "$(go env GOHOSTARCH)" "$work/host"
GOBIN=$work go install "$nfpm"
GOBIN=$work go install "$bom"
for ARCH in "$@"; do
    export ARCH
    echo "natkit $VERSION for $ARCH"
    binary=dist/natkit-${VERSION//[~+]/-}-linux-$ARCH
    build "$ARCH" "$binary"
    export ROOT=$work/$ARCH
    lay_out "$binary"
    UNITS=/lib/systemd/system ZSH=/usr/share/zsh/vendor-completions "$work/nfpm" package -f deploy/packages/nfpm.yaml -p deb -t dist/
    UNITS=/usr/lib/systemd/system ZSH=/usr/share/zsh/site-functions "$work/nfpm" package -f deploy/packages/nfpm.yaml -p rpm -t dist/
    GOARCH=$ARCH "$work/cyclonedx-gomod" bin -json -licenses -output "$binary.cdx.json" "$binary" 2>"$work/bom.log" || {
        cat "$work/bom.log" >&2
        exit 1
    }
done
(cd dist && sha256sum -- * >SHA256SUMS)
ls -l dist
