#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs before natkit is removed or upgraded: dpkg passes "remove" or "upgrade", rpm 0 or 1. An upgrade leaves
# everything running. Removing stops what natkit runs in this network namespace, so that nothing is left that no
# program can show or stop.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
    systemctl --no-reload disable --now natkit.service natkit-accel.service natkit-monitor.service natkit-log.service || true
fi
# Also what is damaged, so that its status cannot be read.
here=$(stat -L -c %i /proc/self/ns/net)
if [ -e "/run/natkit/nat/$here.json" ] || [ -d "/sys/fs/bpf/natkit/$here" ]; then
    natkit accel off >/dev/null 2>&1 || natkit down
fi
for file in /etc/sysctl.d/90-natkit.conf /etc/udev/rules.d/90-natkit.rules; do
    [ ! -e "$file" ] || echo "natkit: settings that 'natkit tune apply --persist' made stay in $file: dpkg --purge natkit removes it, rpm does not" >&2
done
exit 0
