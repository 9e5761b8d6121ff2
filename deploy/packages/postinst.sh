#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs after natkit was installed or upgraded (.deb and .rpm). No service is enabled by the package: what translates or
# watches is the administrator's decision. Services that run get the new program; packets do not depend on them. An
# engine that the new program cannot take over stays with the old one, whose process goes on.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload || true
systemctl try-restart natkit-monitor.service || true
code=0
why=$(natkit version --check 2>&1 >/dev/null) || code=$?
if [ "$code" != 5 ]; then
    for unit in natkit.service natkit-log.service; do
        systemctl try-restart "$unit" || true
    done
    exit 0
fi
cat >&2 <<END
$why
natkit: natkit.service and natkit-log.service are not restarted. Where they run they go on with the earlier version, and
no session is lost. To change to this version, when sessions may end:
    systemctl stop natkit; natkit down; systemctl start natkit; systemctl try-restart natkit-log
END
exit 0
