#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Boot a Debian with systemd in qemu, install natkit's package there, and reboot it twice:
# the gateway and the log of translations must be back before the network carries traffic, settings of natkit tune and
# acceleration must be back, too. Needs root, mmdebstrap and qemu; takes minutes without KVM.
#
#   scripts/test-boot.sh
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
scripts/packages.sh "$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' CHANGELOG.md | head -n 1)" amd64 >"$work/made"

mmdebstrap --quiet --variant=minbase --include=systemd-sysv,udev,dbus,initramfs-tools,linux-image-cloud-amd64,iproute2,iputils-ping,procps,nftables \
    "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$work/root" >/dev/null
cp dist/*.deb "$work/root/natkit.deb"
cp "$work/root"/boot/vmlinuz-* "$work/kernel"
cp "$work/root"/boot/initrd.img-* "$work/initrd"

mkdir -p "$work/root/etc/systemd/network" "$work/root/etc/natkit"
cat >"$work/root/etc/systemd/network/lan.netdev" <<'END'
[NetDev]
Name=lan
Kind=veth
[Peer]
Name=client0
END
printf '[Match]\nName=lan\n[Network]\nAddress=192.168.7.1/24\n' >"$work/root/etc/systemd/network/lan.network"
printf '[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n' >"$work/root/etc/systemd/network/wan.network"
cat >"$work/root/etc/systemd/system/scenario.service" <<'END'
[Unit]
After=multi-user.target natkit.service natkit-accel.service
[Service]
Type=oneshot
ExecStart=/scenario
StandardOutput=file:/dev/ttyS1
StandardError=inherit
FailureAction=poweroff-force
[Install]
WantedBy=default.target
END
cat >"$work/root/scenario" <<'END'
#!/bin/bash
# What happens in the guest, boot by boot.
set -eE
fail() { echo "FAILED: $*"; systemctl --no-pager status natkit natkit-accel natkit-monitor natkit-log || true; journalctl -b --no-pager | tail -n 40; exit 1; }
trap 'fail "line $LINENO"' ERR
boot=$(cat /boots 2>/dev/null || echo 1)
echo $((boot + 1)) >/boots
echo "boot $boot, $(uname -r)"

# A client behind the interface lan, which systemd-networkd makes at each boot.
client() {
    for _ in $(seq 60); do [ -e /sys/class/net/client0 ] && break; sleep 1; done
    ip netns add client
    ip link set client0 netns client
    ip -n client addr add 192.168.7.2/24 dev client0
    ip -n client link set client0 up
    ip -n client route add default via 192.168.7.1
    for _ in $(seq 30); do ip netns exec client ping -c 1 -W 10 -q 10.0.2.2 >/dev/null && return; sleep 1; done
    fail "the client reaches nothing"
}
# The service that watches: it is active because it said so (Type=notify), keeps saying that it is alive, serves, and is
# started again when it hangs.
monitor() {
    systemctl is-active natkit-monitor
    systemd-analyze verify --man=no /lib/systemd/system/natkit-monitor.service
    systemd-analyze security natkit-monitor | tail -n 1
    for _ in $(seq 60); do [[ $(get healthz) = *" 200 OK"* ]] && break; sleep 2; done
    [[ $(get healthz) = *" 200 OK"* ]] || fail "healthz: $(get healthz)"
    [[ $(get metrics) = *natkit_monitor_intervals_total* ]] || fail "no metrics"
    [ "$(systemctl show -p WatchdogTimestampMonotonic --value natkit-monitor)" -gt 0 ] || fail "no sign of life"
    [ "$(systemctl show -p NRestarts --value natkit-monitor)" = 0 ] || fail "it was started again"
    kill -STOP "$(systemctl show -p MainPID --value natkit-monitor)"
    for _ in $(seq 90); do [ "$(systemctl show -p NRestarts --value natkit-monitor)" -gt 0 ] && break; sleep 5; done
    for _ in $(seq 60); do systemctl -q is-active natkit-monitor && break; sleep 5; done
    systemctl is-active natkit-monitor || fail "it hung, and was not started again"
    [ "$(systemctl show -p NRestarts --value natkit-monitor)" = 1 ] || fail "restarts: $(systemctl show -p NRestarts --value natkit-monitor)"
    natkit history --since 1h | head -n 3
}
# The service that records: it knows who has the address and port of the client's session.
recorded() {
    systemctl is-active natkit-log
    systemd-analyze verify --man=no /lib/systemd/system/natkit-log.service
    [ "$(began natkit-log)" -lt "$(began network-pre.target)" ] || fail "natkit-log started after network-pre.target"
    [ "$(systemctl show -p NRestarts --value natkit-log)" = 0 ] || fail "natkit-log was started again"
    local external
    external=$(natkit sessions | grep -o '10\.0\.2\.15:[0-9]*' | head -n 1)
    for _ in $(seq 30); do natkit who "$external" icmp --at 1s | grep -q 192.168.7.2 && return; sleep 1; done
    fail "$(natkit who "$external" icmp --at 1s 2>&1)"
}
get() { (exec 3<>/dev/tcp/127.0.0.1/9641 && printf 'GET /%s HTTP/1.0\r\n\r\n' "$1" >&3 && cat <&3) 2>/dev/null | tr -d '\0' || true; }
began() { systemctl show -p ActiveEnterTimestampMonotonic --value "$1"; }

case $boot in
1)
    dpkg -i /natkit.deb >/dev/null
    systemctl enable systemd-networkd
    printf 'inside: [lan]\noutside: [eth0]\nrules:\n  - masquerade: 192.168.7.0/24\n' >/etc/natkit/nat.yaml
    systemctl enable natkit natkit-monitor natkit-log
    # An emulated processor takes its time to load the programs.
    mkdir -p /etc/systemd/system/{natkit,natkit-monitor,natkit-log}.service.d
    printf '[Service]\nTimeoutStartSec=10min\n' | tee /etc/systemd/system/{natkit,natkit-monitor,natkit-log}.service.d/slow.conf >/dev/null
    echo WatchdogSec=1min >>/etc/systemd/system/natkit-monitor.service.d/slow.conf
    # A table whose hash is far too small: natkit tune corrects it, also for the next boots.
    modprobe nf_conntrack
    echo nf_conntrack >/etc/modules-load.d/nf_conntrack.conf
    sysctl -qw net.netfilter.nf_conntrack_max=131072 net.netfilter.nf_conntrack_buckets=1024
    natkit tune apply --persist | cat
    cat /etc/sysctl.d/90-natkit.conf
    ;;
2)
    systemctl is-active natkit natkit-monitor # both have notified
    [ "$(began natkit)" -lt "$(began systemd-networkd)" ] || fail "natkit started after the network"
    [ "$(began natkit)" -lt "$(began network-pre.target)" ] || fail "natkit started after network-pre.target"
    client
    natkit status
    natkit sessions | grep -q 192.168.7.2 || fail "no session of the client"
    recorded
    monitor
    set -- $(sed -n 's/^net.netfilter.nf_conntrack_buckets *= *//p' /etc/sysctl.d/90-natkit.conf)
    [ "$(cat /proc/sys/net/netfilter/nf_conntrack_buckets)" = "$1" ] || fail "buckets: $(cat /proc/sys/net/netfilter/nf_conntrack_buckets), not $1"
    # Now the kernel's NAT, accelerated.
    systemctl disable --now natkit
    natkit down
    printf 'table ip nat { chain post { type nat hook postrouting priority 100; ip saddr 192.168.7.0/24 masquerade; }; }\n' >/etc/nftables.conf
    systemctl enable nftables
    echo net.ipv4.ip_forward=1 >/etc/sysctl.d/50-forward.conf
    sed -i 's/^NATKIT_ACCEL=.*/NATKIT_ACCEL="lan eth0"/' /etc/default/natkit
    systemctl enable natkit-accel
    ;;
3)
    systemctl is-active natkit-accel natkit-log
    client
    natkit accel status
    echo "all boots: passed"
    systemctl poweroff
    exit
    ;;
esac
systemctl reboot
END
chmod +x "$work/root/scenario"
chroot "$work/root" systemctl -q enable scenario.service
: >"$work/root/etc/fstab"
size=$(du -sm "$work/root" | cut -f1)
mke2fs -q -t ext4 -d "$work/root" "$work/disk" "$((size + 300))M"

timeout 1500 qemu-system-x86_64 -M pc -accel tcg -cpu max -smp 2 -m 1G -nodefaults -no-user-config -display none \
    -drive "file=$work/disk,format=raw,if=virtio,cache=unsafe" -netdev user,id=wan,restrict=on -device virtio-net-pci,netdev=wan \
    -serial "file:$work/console" -serial "file:$work/output" -kernel "$work/kernel" -initrd "$work/initrd" \
    -append "root=/dev/vda rw console=ttyS0 net.ifnames=0 quiet systemd.show_status=no" </dev/null || echo "qemu: exit $?"
sed -i 's/\r$//' "$work/output" # the serial line's
cat "$work/output"
grep -qx 'all boots: passed' "$work/output" || {
    tail -n 30 "$work/console"
    exit 1
}
