#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Build the kube-apiserver and kube-proxy that `make test-kubernetes` and
# scripts/record-corpus.sh run, or run the first of them.
#
#   scripts/kube-apiserver.sh              build what is missing, print the folder
#   scripts/kube-apiserver.sh run FOLDER   serve at https://ADDRESS:6443 until it is
#                                          ended, with what it keeps in FOLDER
#
# What runs has etcd beside it (Debian's etcd-server), authorizes by RBAC, and has one
# administrator whose token is in FOLDER/token; FOLDER/ca.crt is what it is recognized
# by. ADDRESS is $KUBE_ADDRESS, or 10.255.0.1; a network namespace should have it.
#
# They are built once, from the module k8s.io/kubernetes, into
# $NATKIT_KUBE_CACHE (otherwise natkit/kube in the user's cache folder): 250 MB
# of programs, 4 GB of build cache that may be removed afterwards, and up to 20
# minutes on two processors. The module replaces its parts (k8s.io/api and so
# on) with folders that only its repository has; they are published with the
# same number as versions of their own.
set -euo pipefail

version=1.37.2
cache=${NATKIT_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/natkit/kube}
bin=$cache/v$version
module=$cache/module-v$version

build() {
    mkdir -p "$bin" "$module"
    exec 9>"$cache/lock"
    flock 9
    cd "$module"

    # A module of its own, which has nothing but the requirement.
    if [ ! -e complete ]; then
        rm -f go.mod go.sum
        go mod init natkit-kubernetes >&2
        go mod edit -require "k8s.io/kubernetes@v$version"
        download=$(GOFLAGS=-mod=mod go mod download -json "k8s.io/kubernetes@v$version")
        gomod=$(sed -n 's/.*"GoMod": "\(.*\)".*/\1/p' <<<"$download")
        sed -n 's|^[[:space:]]*\(k8s.io/[^ ]*\) => ./staging/.*|\1|p' "$gomod" |
            while read -r part; do
                go mod edit -replace "$part=$part@v0.${version#1.}"
            done
        touch complete
    fi

    # The build cache is beside it, so that it can be removed with the folder.
    export GOCACHE=$cache/build GOFLAGS="-mod=mod -p=${NATKIT_KUBE_JOBS:-2}" CGO_ENABLED=0
    for program in kube-apiserver kube-proxy; do
        [ -x "$bin/$program" ] && continue
        echo "building $program $version, which takes minutes" >&2
        # The version decides which API versions are served; its own build sets it so.
        stamp=k8s.io/component-base/version
        go build -trimpath -o "$bin/$program.draft" \
            -ldflags "-s -w -X $stamp.gitVersion=v$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=$(cut -d. -f2 <<<$version)" \
            "k8s.io/kubernetes/cmd/$program" >&2
        mv "$bin/$program.draft" "$bin/$program"
    done
}

run() {
    mkdir -p "$1"
    cd "$1"
    address=${KUBE_ADDRESS:-10.255.0.1}
    etcd='' server=''
    trap stop EXIT
    trap 'exit 143' TERM INT
    # They end with this script, also if it is killed.
    setpriv --pdeathsig KILL etcd --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync --log-level error >etcd.log 2>&1 &
    etcd=$!
    openssl genrsa -out service-accounts.key 2048 2>/dev/null
    (umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >token)
    echo "$(cat token),admin,admin,system:masters" >tokens.csv
    # Without controllers nothing makes the service account that pods get by default.
    setpriv --pdeathsig KILL "$bin/kube-apiserver" --etcd-servers http://127.0.0.1:2379 --cert-dir certificates --bind-address 0.0.0.0 --secure-port 6443 \
        --advertise-address "$address" --service-cluster-ip-range 10.96.0.0/16 --authorization-mode RBAC --token-auth-file tokens.csv \
        --service-account-issuer https://kubernetes.default.svc --service-account-key-file service-accounts.key \
        --service-account-signing-key-file service-accounts.key --disable-admission-plugins ServiceAccount >apiserver.log 2>&1 &
    server=$!
    until curl -sf -m 2 --cacert certificates/apiserver.crt -H "Authorization: Bearer $(cat token)" "https://$address:6443/readyz" >/dev/null 2>&1; do
        [ "$(jobs -rp | wc -l)" = 2 ] || { tail -n 5 etcd.log apiserver.log >&2; exit 1; }
        sleep 0.2
    done
    cp certificates/apiserver.crt ca.crt
    # It ends with the first of them.
    wait -n
}

# stop ends the API server before etcd: without etcd it does not end on SIGTERM.
stop() {
    trap '' TERM INT
    end "$server" 15
    end "$etcd" 5
}

# end PID SECONDS ends a process, by force if it takes longer.
end() {
    kill "$1" 2>/dev/null || return 0
    for ((i = 0; i < 10 * $2; i++)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

if [ ! -x "$bin/kube-apiserver" ] || [ ! -x "$bin/kube-proxy" ]; then
    (build)
fi
case ${1:-} in
run) run "$2" ;;
"") echo "$bin" ;;
*) echo "usage: $0 [run FOLDER]" >&2 && exit 2 ;;
esac
