#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run natkit on an emulated arm64 machine with Debian's kernel: every eBPF object is loaded,
# and a ping passes through the engine. Needs root, mmdebstrap and qemu-system-aarch64.
#
#   scripts/test-arm64.sh
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root guest=$work/guest
mmdebstrap --quiet --arch=arm64 --variant=extract --include=linux-image-cloud-arm64,busybox-static \
    "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$root" >/dev/null
release=$(ls "$root/lib/modules")
mkdir -p "$guest"/{bin,sbin,proc,sys,dev,run,tmp,etc,var/lib} "$guest/lib/modules/$release/kernel/drivers"
cp "$root/bin/busybox" "$guest/bin/"
for folder in net lib crypto arch drivers/net; do
    cp -r "$root/lib/modules/$release/kernel/$folder" "$guest/lib/modules/$release/kernel/$folder"
done
cp "$root/lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$guest/lib/modules/$release/"
find "$guest/lib/modules" -name '*.ko.xz' -exec xz -d {} +
depmod -b "$guest" "$release"
CGO_ENABLED=0 GOARCH=arm64 go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$guest/bin/natkit" ./cmd/natkit

cat >"$guest/init" <<'END'
#!/bin/busybox sh
/bin/busybox --install -s /bin
ln -s /bin/modprobe /sbin/modprobe
export PATH=/sbin:/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
ip link set lo up
modprobe nf_conntrack
modprobe nf_conntrack_netlink
uname -rm
step() { # NAME COMMAND...: nothing of a step that went well is shown but its name
    name=$1
    shift
    "$@" >/tmp/out 2>&1 && echo "ok: $name" || { echo "FAILED: $name"; cat /tmp/out; }
}
step lab natkit lab up routed
printf 'inside: [eth1]\noutside: [eth0]\nrules: [{masquerade: 192.168.0.0/16}]\n' >/tmp/nat.yaml
step drops natkit drops --for 2s
step hooks natkit hooks --cost --for 2s
step profile natkit profile --for 2s
step trace natkit trace 'tcp any -> any' --for 2s
step doctor natkit doctor --for 3s --netns routed-gateway
step 'bench udp' natkit bench udp --router none --trials 1 --duration 1s
step accel natkit accel on eth0 eth1 --netns routed-gateway
step 'accel off' natkit accel off --netns routed-gateway
step up natkit up -f /tmp/nat.yaml --netns routed-gateway --bypass
step ping natkit lab exec routed client -- ping -c 3 203.0.113.2
step sessions sh -c 'natkit sessions --netns routed-gateway | grep 192.168.0.2'
step down natkit down --netns routed-gateway
step 'lab down' natkit lab down routed
echo 'all steps done'
poweroff -f
END
chmod +x "$guest/init"
(cd "$guest" && find . -print0 | cpio --null -o -H newc --quiet) >"$work/initramfs"
timeout 1200 qemu-system-aarch64 -M virt -accel tcg -cpu max -smp 2 -m 2G -nodefaults -no-user-config -display none -no-reboot \
    -serial "file:$work/console" -kernel "$root"/boot/vmlinuz-* -initrd "$work/initramfs" \
    -append "console=ttyAMA0 panic=-1 loglevel=3" </dev/null || echo "qemu: exit $?"
cat "$work/console"
grep -q 'all steps done' "$work/console" && ! grep -q FAILED "$work/console"
