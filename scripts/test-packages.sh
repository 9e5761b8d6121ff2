#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make the packages and live with them on a bare Debian of their own: check with lintian
# and systemd's tools, install, upgrade while a gateway translates, remove, purge.
# Needs root, mmdebstrap, lintian and rpm. Nothing outside its own network namespace and
# a temporary folder is touched.
#
#   scripts/test-packages.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "packages: FAILED: $*" >&2
    exit 1
}
newest=$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' CHANGELOG.md | head -n 1)

# What needs the network first; the rest runs in namespaces of its own.
if [ "${1:-}" != in-namespace ]; then
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    arch=$(go env GOHOSTARCH)
    for version in "$newest~before" "$newest"; do
        scripts/packages.sh "$version" "$arch" >"$work/made" || {
            cat "$work/made"
            exit 1
        }
        (cd dist && sha256sum --quiet -c SHA256SUMS)
        grep -q '"bomFormat": "CycloneDX"' dist/*.cdx.json || fail "no bill of materials"
        cp dist/*.deb "$work/${version#"$newest"}.deb"
        cp dist/*.rpm "$work/natkit.rpm"
    done
    mmdebstrap --quiet --variant=minbase --include=systemd,iproute2,iputils-ping,procps,rpm \
        "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$work/bare" >/dev/null
    mkdir "$work/bare/packages"
    mv "$work/~before.deb" "$work/bare/packages/old.deb"
    mv "$work/.deb" "$work/bare/packages/new.deb"
    mv "$work/natkit.rpm" "$work/bare/packages/"
    unshare --mount --net --propagation private scripts/test-packages.sh in-namespace "$work"
    exit
fi
work=$2
root=$work/bare

echo "== lintian"
lintian --allow-root --fail-on error "$root/packages/new.deb"

echo "== a bare Debian"
mount --bind "$root" "$root" # ip netns needs a root that is a mount
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t bpf bpf "$root/sys/fs/bpf"
in_root() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"; }
(cd "$root" && find . -xdev ! -path './packages*' ! -path './var/*' | sort) >"$work/files"

echo "== install"
in_root dpkg -i /packages/old.deb >/dev/null
[ "$(in_root natkit version | cut -d' ' -f2)" = "$newest~before" ] || fail "natkit version: $(in_root natkit version)"
for file in man/man8/natkit.8.gz bash-completion/completions/natkit zsh/vendor-completions/_natkit fish/vendor_completions.d/natkit.fish; do
    [ -s "$root/usr/share/$file" ] || fail "no /usr/share/$file"
done
[ -s "$root/etc/default/natkit" ] || fail "no default configuration"
in_root sh -c 'systemd-analyze verify --man=no /lib/systemd/system/natkit*.service' || fail "systemd refuses a unit"
for unit in "$root"/lib/systemd/system/natkit*.service; do
    in_root systemd-analyze security --offline=yes --threshold=50 "/${unit#"$root/"}" | tail -n 1 || fail "$unit is exposed more than 5.0"
done
for unit in natkit natkit-accel natkit-monitor natkit-log; do
    [ ! -e "$root/etc/systemd/system/multi-user.target.wants/$unit.service" ] || fail "$unit is enabled although nobody asked for it"
done

echo "== upgrade under traffic"
cat >"$root/etc/natkit/nat.yaml" <<'END'
inside: [in]
outside: [out]
rules:
  - masquerade: 10.0.0.0/24
END
echo '# changed here' >>"$root/etc/default/natkit"
in_root sh -e <<'END'
ip netns add client; ip netns add gateway; ip netns add server
ip link add in netns gateway type veth peer eth0 netns client
ip link add out netns gateway type veth peer eth0 netns server
ip -n client addr add 10.0.0.2/24 dev eth0; ip -n gateway addr add 10.0.0.1/24 dev in
ip -n gateway addr add 192.0.2.1/24 dev out; ip -n server addr add 192.0.2.2/24 dev eth0
for n in client gateway server; do ip -n $n link set lo up; done
ip -n client link set eth0 up; ip -n gateway link set in up; ip -n gateway link set out up; ip -n server link set eth0 up
ip -n client route add default via 10.0.0.1
END
serve() { # starts a service of the installed natkit and waits until it is ready
    chroot "$root" /usr/bin/natkit serve -f /etc/natkit/nat.yaml --netns gateway >"$work/serve" 2>&1 &
    service=$!
    for _ in $(seq 100); do
        ! grep -qE ' (up on|adopted)' "$work/serve" || return 0
        kill -0 $service 2>/dev/null || break
        sleep 0.1
    done
    cat "$work/serve"
    fail "natkit serve is not ready"
}
stop_serve() {
    kill $service
    wait $service || fail "natkit serve ended with an error"
}
serve
within() { nsenter --net="$root/run/netns/$1" "${@:2}"; }
within server iperf3 --server --one-off >"$work/iperf3-server" &
for _ in $(seq 100); do
    [ -z "$(within server ss -Hltn 'sport = 5201')" ] || break
    sleep 0.1
done
within client iperf3 --client 192.0.2.2 --time 15 --interval 1 --bitrate 20M >"$work/tcp" & # one connection, open before the upgrade and after it
tcp=$!
in_root ip netns exec client ping -i 0.005 -c 2000 -q 192.0.2.2 >"$work/ping" &
ping=$!
sleep 2 # both are running
in_root dpkg -i /packages/new.deb >/dev/null
stop_serve
serve
[ "$(in_root natkit version | cut -d' ' -f2)" = "$newest" ] || fail "natkit version: $(in_root natkit version)"
wait $ping || {
    cat "$work/ping"
    fail "packets were lost during the upgrade"
}
tail -n 2 "$work/ping"
wait $tcp || {
    cat "$work/tcp"
    fail "a TCP connection did not live through the upgrade"
}
awk '/ sec / && !/sender|receiver/ {n++; if ($5 == 0) stalled++} END {print "one TCP connection, " n " s, " stalled + 0 " of them without data"; exit n < 15 || stalled > 0}' "$work/tcp" || {
    cat "$work/tcp"
    fail "a TCP connection stalled during the upgrade"
}
grep -q '^# changed here' "$root/etc/default/natkit" || fail "the upgrade overwrote /etc/default/natkit"
stop_serve
in_root natkit down --netns gateway >/dev/null

echo "== remove and purge, with a gateway running"
in_root sh -ec 'ip link add in type veth peer in-peer; ip link add out type veth peer out-peer; ip addr add 192.0.2.1/24 dev out; ip link set in up; ip link set in-peer up; ip link set out up; ip link set out-peer up
    natkit up -f /etc/natkit/nat.yaml >/dev/null; natkit status >/dev/null'
in_root dpkg -r natkit >/dev/null
[ -z "$(find "$root/sys/fs/bpf/natkit" "$root/run/natkit" -type f 2>/dev/null)" ] || fail "removing the package left a gateway running"
mv "$root/etc/natkit/nat.yaml" "$root/run/nat.yaml"
in_root dpkg -P natkit >/dev/null
in_root ip -all netns del
(cd "$root" && find . -xdev ! -path './packages*' ! -path './var/*' | sort) | comm -13 "$work/files" - >"$work/left"
[ ! -s "$work/left" ] || fail "the purge left: $(cat "$work/left")"
[ ! -e "$root/var/lib/natkit" ] || fail "the purge left /var/lib/natkit"

echo "== rpm"
in_root rpm -i --nodeps /packages/natkit.rpm
[ "$(in_root natkit version | cut -d' ' -f2)" = "$newest" ] || fail "natkit version: $(in_root natkit version)"
in_root rpm -V --nodeps natkit
# A gateway that somebody has damaged is stopped, too.
in_root sh -ec 'natkit up -f /run/nat.yaml >/dev/null; rm /sys/fs/bpf/natkit/*/maps/control; ! natkit status >/dev/null 2>&1'
in_root rpm -e natkit
[ -z "$(find "$root/sys/fs/bpf/natkit" "$root/run/natkit" -type f 2>/dev/null)" ] || fail "removing the package left a damaged gateway running"
[ ! -e "$root/usr/bin/natkit" ] || fail "rpm -e left /usr/bin/natkit"
echo "packages: passed"
