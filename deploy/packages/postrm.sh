#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs after natkit was removed or purged: dpkg passes "remove" or "purge", rpm 0 or 1.
set -e
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
if [ "$1" = purge ]; then
    rm -f /etc/sysctl.d/90-natkit.conf /etc/udev/rules.d/90-natkit.rules
    rm -rf --one-file-system /var/lib/natkit
    rmdir /etc/natkit 2>/dev/null || true
fi
exit 0
