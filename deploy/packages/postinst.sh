#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs after natkit was installed or upgraded (.deb and .rpm). No service is enabled by the package: what translates or
# watches is the administrator's decision. Services that run get the new program; packets do not depend on them.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload || true
for unit in natkit.service natkit-monitor.service natkit-log.service; do
    systemctl try-restart "$unit" || true
done
exit 0
