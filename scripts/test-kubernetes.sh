#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run natkit monitor against a real kube-apiserver with etcd, in namespaces of their own: what
# deploy/kubernetes installs is accepted, its service account suffices, a fault in a pod
# is an Event within 30 s and ends, the node's condition goes True and back, and a hundred nodes report at once.
#
#   scripts/test-kubernetes.sh [--record]
#
# --record rewrites internal/diagnose/kubernetes/testdata/exchanges.json, which make test
# replays. Needs root, etcd-server, and what scripts/kube-apiserver.sh builds.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != --inside ]; then
    scripts/kube-apiserver.sh >/dev/null
    exec unshare -n -m -p --propagation private --fork --mount-proc --kill-child scripts/test-kubernetes.sh --inside "$@"
fi
shift

mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
mount --make-shared /run/netns
ip link set lo up
ip addr add 10.255.0.1/32 dev lo

kube=/run/kube
scripts/kube-apiserver.sh run $kube &
server=$!
until [ -e $kube/ca.crt ]; do
    kill -0 $server
    sleep 0.2
done
mkdir $kube/natkit
cp $kube/ca.crt $kube/natkit/
export NATKIT_KUBE_API=https://10.255.0.1:6443 NATKIT_KUBE_ADMIN=$kube NATKIT_KUBE_CREDENTIALS=$kube/natkit

# This one installs what the others need.
status=0
go test -count=1 -v ./cmd/natkit -run '^TestKubernetesAPI$' || status=$?
NATKIT_KUBE_POD=$(cat $kube/pod) go test -count=1 -v ./internal/diagnose/kubernetes -run Real ${1:+-record} || status=$?
kill $server
wait $server || true
if left=$(grep -lxE 'etcd|kube-apiserver' /proc/[0-9]*/comm 2>/dev/null); then
    echo "still running after scripts/kube-apiserver.sh has ended: $left" >&2
    status=1
fi
# Every fault of the lab as an Event, in machines of their own with an API that only keeps Events: half an hour.
if [ -z "${1:-}" ]; then
    events=$(mktemp)
    NATKIT_ALL_EVENTS=$events go test -count=1 -timeout 90m ./internal/scenario -run '^TestFaultsBecomeEvents$' || status=$?
    sort "$events"
    rm "$events"
fi
exit $status
