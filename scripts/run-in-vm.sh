#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run one command as root on another Linux kernel, in qemu, without KVM.
#
#   scripts/run-in-vm.sh [-c] [-t SECONDS] [-m MEMORY] KERNEL FILES COMMAND [ARGUMENT...]
#
#   KERNEL   an unpacked Debian kernel package: has boot/ and lib/modules/
#   FILES    a folder that is laid over the guest's root; COMMAND is a path in it
#   -c       a clock that counts instructions: each takes the guest's one processor a
#            nanosecond of its time
#   -t       time limit in seconds, 300 without
#   -m       memory of the guest, 1G without
#
# The guest is an initramfs: busybox, the kernel's network modules, which the
# kernel loads by itself as it does on a real machine, and FILES. What COMMAND
# prints comes out here, and its exit status is the script's; 124 means that the
# limit passed, 125 that the guest died, with the end of its kernel log on stderr.
set -euo pipefail

limit=300 memory=1G clock=(-smp 2)
while getopts ct:m: option; do
    case $option in
    c) clock=(-smp 1 -icount "shift=0,sleep=off") ;;
    t) limit=$OPTARG ;;
    m) memory=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 3 ] || {
    sed -n '/^#   scripts/s/^# *//p' "$0" >&2
    exit 2
}
kernel=$1 files=$2
shift 2

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT

# archive packs a folder as the kernel wants an initramfs.
archive() { (cd "$1" && find . -print0 | cpio --null -o -H newc --quiet); }

# base makes the part of the guest that depends on the kernel alone, once.
base() {
    local root=$work/base release folder
    release=$(ls "$kernel/lib/modules")
    mkdir -p "$root"/{bin,sbin,dev,proc,sys,run,tmp,etc} "$root/lib/modules/$release/kernel/drivers"
    cp "$(command -v busybox)" "$root/bin/busybox"
    for folder in net lib crypto arch drivers/net; do
        [ ! -d "$kernel/lib/modules/$release/kernel/$folder" ] ||
            cp -r "$kernel/lib/modules/$release/kernel/$folder" "$root/lib/modules/$release/kernel/$folder"
    done
    rm -rf --one-file-system "$root/lib/modules/$release/kernel/drivers/net/"{ethernet,wireless,usb}
    cp "$kernel/lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$root/lib/modules/$release/"
    find "$root/lib/modules" -name '*.ko.xz' -exec xz -d {} +
    depmod -b "$root" "$release"
    cat >"$root/init" <<'INIT'
#!/bin/busybox sh
# The guest's first process. The kernel talks on the first serial port, the
# command's output goes to the second, its status to the third.
/bin/busybox --install -s /bin
ln -s /bin/modprobe /sbin/modprobe
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
ln -s /proc/self/fd /dev/fd
ip link set lo up
stty -F /dev/ttyS1 -onlcr
sh /command </dev/null >/dev/ttyS1 2>&1
echo $? >/dev/ttyS2
poweroff -f
INIT
    chmod +x "$root/init"
    archive "$root"
}
[ -s "$kernel/guest.cpio" ] || {
    base >"$work/guest.cpio"
    mv "$work/guest.cpio" "$kernel/guest.cpio"
}

# Two archives in a row are one initramfs; the second holds what this run adds.
mkdir "$work/run"
cp -r "$files/." "$work/run/"
printf '%q ' "$@" >"$work/run/command"
{
    cat "$kernel/guest.cpio"
    archive "$work/run"
} >"$work/initramfs"

timeout -k 5 "$limit" qemu-system-x86_64 -M pc -accel tcg -cpu max "${clock[@]}" -m "$memory" -nodefaults -no-user-config \
    -display none -no-reboot -serial "file:$work/console" \
    -chardev stdio,id=output,signal=off -serial chardev:output -serial "file:$work/status" \
    -kernel "$kernel"/boot/vmlinuz-* -initrd "$work/initramfs" \
    -append "console=ttyS0 panic=-1 oops=panic quiet loglevel=5" </dev/null || {
    status=$?
    [ "$status" != 124 ] && [ "$status" != 137 ] || exit 124
    exit 125
}
status=$(tr -dc 0-9 <"$work/status")
if [ -z "$status" ]; then # the machine ended by itself: a panic
    tail -n 20 "$work/console" >&2
    exit 125
fi
exit "$status"
