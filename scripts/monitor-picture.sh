#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Draw docs/monitor.png: what Prometheus shows of a lab in which faults come and go, scraped from natkit monitor.
# Needs root, prometheus and chromium (Debian's); takes four minutes. All of it is in namespaces of its own.
#
#   scripts/monitor-picture.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != inside ]; then
    made=$(mktemp -d)
    trap 'rm -rf --one-file-system "$made"' EXIT
    CGO_ENABLED=0 go build -o "$made/natkit" ./cmd/natkit
    unshare -n -m -p -f --mount-proc scripts/monitor-picture.sh inside "$made/natkit"
    exit
fi
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
ip link set lo up
work=/run/picture
mkdir -p "$work"
natkit=$2
cat >"$work/prometheus.yml" <<'END'
global: {scrape_interval: 2s, evaluation_interval: 2s}
scrape_configs:
  - job_name: natkit-monitor
    static_configs: [{targets: ["127.0.0.1:9641"]}]
END
"$natkit" monitor --interval 2s >"$work/monitor" 2>&1 &
prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" --web.listen-address=127.0.0.1:9090 --log.level=error >"$work/prometheus" 2>&1 &
sleep 20 # healthy
for fault in ip-forward-off rule-drop snat-ports-exhausted; do
    "$natkit" lab run "$fault" --for 20s >"$work/$fault" 2>&1 || { tail "$work/$fault"; exit 1; }
done
sleep 10
ask() { printf 'g%d.expr=%s&g%d.tab=0&g%d.range_input=5m&g%d.stacked=%d&' "$1" "$2" "$1" "$1" "$1" "$3"; }
url="http://127.0.0.1:9090/graph?$(ask 0 'sum%20by%20(cause)%20(natkit_finding)%20%3E%200' 1)$(ask 1 'rate(natkit_dropped_packets_total%5B10s%5D)%20%3E%200' 0)"
timeout 120 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$work/chromium" --hide-scrollbars --virtual-time-budget=20000 \
    --window-size=1280,1500 --screenshot="$work/monitor.png" "$url" >/dev/null 2>&1
cp "$work/monitor.png" docs/monitor.png.new
mv docs/monitor.png.new docs/monitor.png
ls -l docs/monitor.png
