#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Read the log with programs that are too large for `make test`: its Parquet files with
# chDB (ClickHouse in Python), DuckDB and pandas, by the SQL of docs/log.md; its IPFIX and
# NetFlow with goflow2; its syslog with rsyslog and syslog-ng; its messages to Kafka from a
# broker, which is also killed. Tailscale's port mapper asks for mappings by PCP and NAT-PMP.
#
#   scripts/test-collectors.sh [ARGUMENTS OF GO TEST]
#
# They are installed once, in two minutes, from PyPI, the Go module proxy, Maven Central and Debian
# into $NATKIT_COLLECTORS_CACHE (otherwise natkit/collectors in the user's cache folder): 1.1 GB.
# The script needs python3 with its module venv, Java 17 or newer, Maven, and Debian or Ubuntu.
set -euo pipefail
cd "$(dirname "$0")/.."

chdb=4.4.0 duckdb=2.0.1 goflow2=2.2.6 kafka=4.1.1 tailscale=1.92.0
cache=${NATKIT_COLLECTORS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/natkit/collectors}
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9

python=$cache/python-$chdb-$duckdb
if [ ! -e "$python/complete" ]; then
    echo "installing chdb $chdb with pandas, and duckdb $duckdb"
    python3 -m venv "$python"
    "$python/bin/pip" install -q --no-cache-dir "chdb==$chdb" "duckdb==$duckdb"
    touch "$python/complete"
fi

flow=$cache/goflow2-$goflow2
if [ ! -x "$flow/goflow2" ]; then
    echo "building goflow2 $goflow2"
    GOBIN=$flow GOFLAGS=-mod=mod go install "github.com/netsampler/goflow2/v2/cmd/goflow2@v$goflow2"
fi

broker=$cache/kafka-$kafka
if [ ! -e "$broker/complete" ]; then
    echo "installing Kafka $kafka"
    mkdir -p "$broker"
    cat >"$broker/pom.xml" <<END
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>natkit</groupId><artifactId>broker</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>$kafka</version></dependency>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>$kafka</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
END
    mvn -q -B -f "$broker/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$broker/jars" </dev/null
    touch "$broker/complete"
fi
# unpack NAME PACKAGE...: not installed, since each would replace the machine's own program for the system's log.
unpack() {
    local to=$cache/$1
    shift
    [ ! -e "$to/complete" ] || return 0
    echo "unpacking $1"
    mkdir -p "$to/packages"
    (cd "$to/packages" && apt-get -qq download "$@" 2>&1)
    for package in "$to"/packages/*.deb; do dpkg -x "$package" "$to/unpacked"; done
    touch "$to/complete"
}
log=$cache/rsyslog-tls
unpack rsyslog-tls rsyslog rsyslog-gnutls libestr0 libfastjson4 liblognorm5
libraries=$(dirname "$(echo "$log/unpacked/usr/lib/"*/rsyslog)")
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s -M %s "$@"\n' "$libraries" "$log/unpacked/usr/sbin/rsyslogd" "$libraries/rsyslog" >"$log/rsyslogd"
ng=$cache/syslog-ng
unpack syslog-ng syslog-ng-core libivykis0 libnet1 libwrap0 libjson-c5 libpcre3 libglib2.0-0
modules=$(echo "$ng/unpacked/usr/lib/syslog-ng/"[0-9]*)
libraries=$(echo "$ng/unpacked/lib/"*-linux-gnu "$ng/unpacked/usr/lib/"*-linux-gnu "$(dirname "$modules")" | tr ' ' :)
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s --module-path=%s "$@"\n' "$libraries" "$ng/unpacked/usr/sbin/syslog-ng" "$modules" >"$ng/syslog-ng"
chmod +x "$log/rsyslogd" "$ng/syslog-ng"
mapper=$cache/portmapper-$tailscale
source=internal/nat/control/testdata/portmapper/main.go
if [ ! -x "$mapper/portmapper" ] || ! cmp -s "$source" "$mapper/main.go"; then
    echo "building Tailscale's port mapper $tailscale"
    mkdir -p "$mapper"
    cp "$source" "$mapper"
    (
        cd "$mapper"
        [ -e go.mod ] || go mod init portmapper
        GOFLAGS=-mod=mod go get "tailscale.com/net/portmapper@v$tailscale"
        GOFLAGS=-mod=mod CGO_ENABLED=0 go build -o portmapper
    ) 2>&1
fi
flock -u 9

# A requirement that is missing is a failure here.
export CI=true NATKIT_KAFKA=$broker/jars PATH=$flow:$python/bin:$log:$ng:$mapper:$PATH
go test -count=1 -timeout 30m -v "$@" -run '^Test(ColumnReaders|Goflow2|Syslog|KafkaBroker\w*|PCPTailscale)$' ./internal/natlog/sink ./internal/natlog/store ./internal/nat/control
