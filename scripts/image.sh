#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make a container image of natkit without a Docker daemon: dist/natkit-image-ARCHITECTURE.tar.
#
#   scripts/image.sh [ARCHITECTURE [FILE]]
#
# ARCHITECTURE is amd64 or arm64, or that of this machine. The file is an OCI image layout
# (skopeo, ctr, podman, docker from version 25), and what docker save writes (every docker),
# over the same blobs. It holds the static program and nothing else. The same commit makes
# the same image. Needs Go, git, tar, gzip.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=${1:-$(go env GOARCH)}
file=${2:-dist/natkit-image-$arch.tar}
version=$(git describe --always --dirty --tags)
revision=$(git rev-parse HEAD)
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
blobs=$work/image/blobs/sha256
mkdir -p "$blobs" "$work/root" "$(dirname "$file")"

archive() { tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" --format=ustar -C "$1" -c .; }

# blob puts a file among the blobs and prints its digest.
blob() {
    local sum
    sum=$(sha256sum <"$1" | cut -d' ' -f1)
    mv "$1" "$blobs/$sum"
    echo "$sum"
}

# As make build does, for that processor.
GOARCH=$arch CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.release=$version" -o "$work/root/natkit" ./cmd/natkit
chmod 755 "$work/root" "$work/root/natkit"
archive "$work/root" >"$work/layer.tar"
diff=$(sha256sum <"$work/layer.tar" | cut -d' ' -f1)
gzip -9n "$work/layer.tar"
size=$(stat -c %s "$work/layer.tar.gz")
layer=$(blob "$work/layer.tar.gz")

cat >"$work/config" <<END
{"created":"$created","architecture":"$arch","os":"linux","config":{"Entrypoint":["/natkit"],"Env":["PATH=/"],"Labels":{
"org.opencontainers.image.title":"natkit","org.opencontainers.image.description":"Diagnosis, cure and acceleration of NAT on Linux",
"org.opencontainers.image.version":"$version","org.opencontainers.image.revision":"$revision","org.opencontainers.image.created":"$created",
"org.opencontainers.image.licenses":"Apache-2.0"}},"rootfs":{"type":"layers","diff_ids":["sha256:$diff"]},
"history":[{"created":"$created","created_by":"scripts/image.sh"}]}
END
config_size=$(stat -c %s "$work/config")
config=$(blob "$work/config")

cat >"$work/manifest" <<END
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",
"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:$config","size":$config_size},
"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:$layer","size":$size}]}
END
manifest_size=$(stat -c %s "$work/manifest")
manifest=$(blob "$work/manifest")

# A tag has other characters than a version (reference.TagRegexp of github.com/distribution/reference).
tag=${version//[^A-Za-z0-9_.-]/-}
cat >"$work/image/index.json" <<END
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[
{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:$manifest","size":$manifest_size,"platform":{"architecture":"$arch","os":"linux"},
"annotations":{"org.opencontainers.image.ref.name":"$tag","io.containerd.image.name":"docker.io/library/natkit:$tag"}}]}
END
echo '{"imageLayoutVersion":"1.0.0"}' >"$work/image/oci-layout"
cat >"$work/image/manifest.json" <<END
[{"Config":"blobs/sha256/$config","RepoTags":["natkit:$tag","natkit:latest"],"Layers":["blobs/sha256/$layer"]}]
END
archive "$work/image" >"$file"
echo "$file: natkit:$tag, $((size / 1000000)) MB"
