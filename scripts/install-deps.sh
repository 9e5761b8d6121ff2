#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Install what a make target needs and this machine lacks, on Debian and Ubuntu.
#
#   scripts/install-deps.sh test|compare|race|lint|generate|kernels|packages|kubernetes|arm64|collectors ...
#   scripts/install-deps.sh --list TARGET   only print the programs of a target
#
# Only packages whose program is missing are installed. Without root (or sudo
# that asks no password), or on another system, it names what is missing and
# exits 0 all the same: what needs a program reports that it is missing.
set -euo pipefail

# What each target needs: program, Debian package. Building and the demo need
# nothing but Go. Tests compare natkit with the programs of the target compare.
needs() {
    case $1 in
    test)
        needs compare
        needs generate
        cat <<-'END'
		promtool            prometheus
		systemd-analyze     systemd
		setpriv             util-linux
		modprobe            kmod
		unshare             util-linux
		nfacctd             pmacct
		ipfixDump           libfixbuf-tools
		nfcapd              nfdump
		nfdump              nfdump
		END
        ;;
    compare)
        cat <<-'END'
		ip                  iproute2
		ss                  iproute2
		tc                  iproute2
		nstat               iproute2
		sysctl              procps
		nft                 nftables
		iptables-legacy     iptables
		ip6tables-legacy    iptables
		ip6tables-nft       iptables
		iptables-nft        iptables
		iptables-legacy-restore  iptables
		iptables-nft-restore     iptables
		conntrack           conntrack
		ipset               ipset
		bpftool             bpftool
		ethtool             ethtool
		ab                  apache2-utils
		curl                curl
		nginx               nginx
		iperf3              iperf3
		wrk                 wrk
		ping                iputils-ping
		tcpdump             tcpdump
		arping              iputils-arping
		traceroute          traceroute
		vsftpd              vsftpd
		turnserver          coturn
		natpmpc             natpmpc
		upnpc               miniupnpc
		miniupnpd           miniupnpd-nftables
		turnutils_natdiscovery   coturn
		END
        ;;
    packages)
        cat <<-'END'
		mmdebstrap          mmdebstrap
		iperf3              iperf3
		nsenter             util-linux
		ss                  iproute2
		lintian             lintian
		rpm                 rpm
		dockerd             docker.io
		docker              docker.io
		END
        ;;
    kubernetes)
        cat <<-'END'
		etcd                etcd-server
		curl                curl
		openssl             openssl
		ip                  iproute2
		ping                iputils-ping
		END
        ;;
    arm64)
        cat <<-'END'
		qemu-system-aarch64 qemu-system-arm
		depmod              kmod
		cpio                cpio
		xz                  xz-utils
		END
        ;;
    collectors)
        cat <<-'END'
		python3             python3-venv
		java                default-jre-headless
		mvn                 maven
		END
        ;;
    lint)
        cat <<-'END'
		shellcheck          shellcheck
		clang-format-19     clang-format-19
		END
        ;;
    race)
        cat <<-'END'
		gcc                 gcc
		gencat              libc6-dev
		END
        ;;
    generate)
        cat <<-'END'
		clang-19            clang-19
		llvm-strip-19       llvm-19
		END
        ;;
    kernels)
        cat <<-'END'
		qemu-system-x86_64  qemu-system-x86
		busybox             busybox-static
		depmod              kmod
		cpio                cpio
		xz                  xz-utils
		mke2fs              e2fsprogs
		END
        ;;
    *)
        echo "usage: $0 [--list] test|compare|race|lint|generate|kernels|packages|kubernetes|arm64|collectors ..." >&2
        exit 2
        ;;
    esac
}

# missing prints the packages of the given targets whose program is not there.
missing() {
    local target program package
    for target; do needs "$target"; done | while read -r program package; do
        command -v "$program" >/dev/null || echo "$package"
    done | sort -u
}

# Administrators' programs are not in every user's PATH.
PATH=$PATH:/usr/sbin:/sbin

[ $# -gt 0 ] || needs ""
if [ "$1" = --list ]; then
    needs "${2:-}" | awk '{print $1}'
    exit
fi
for target; do needs "$target" >/dev/null; done
mapfile -t packages < <(missing "$@")
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then
    root=(env)
elif sudo -n true 2>/dev/null; then
    root=(sudo -n env)
else
    root=()
fi
if [ ${#root[@]} -gt 0 ] && command -v apt-get >/dev/null; then
    echo "installing: ${packages[*]}"
    apt() { "${root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" </dev/null; }
    apt update || true
    # A server that the tests start by themselves must not begin to serve the machine.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap '"${root[@]}" rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' | "${root[@]}" install -m 755 /dev/stdin "$policy"
    fi
    # One package that this release does not have must not cost the others.
    apt install -y --no-install-recommends "${packages[@]}" >/dev/null ||
        for package in "${packages[@]}"; do
            apt install -y --no-install-recommends "$package" >/dev/null || true
        done
    for server in nginx vsftpd coturn prometheus nfdump; do
        if [[ " ${packages[*]} " = *" $server "* ]] && command -v systemctl >/dev/null; then
            "${root[@]}" systemctl disable -q "$server" || true
        fi
    done
    mapfile -t packages < <(missing "$@")
fi
[ ${#packages[@]} -eq 0 ] || echo "not installed, and left out: ${packages[*]} (as root: apt-get install ${packages[*]})"
