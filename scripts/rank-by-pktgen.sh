#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Rank the kernel's own routers by the kernel's own packet generator, in qemu, whose
# clock runs by instructions: a check of natkit bench udp that shares nothing with it.
# pktgen sends through two veth pairs, nftables counts what arrives.
#
#   scripts/rank-by-pktgen.sh [VERSION]
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
guest=$work/guest
for program in ip nft dash awk; do
    program=$(command -v "$program")
    for file in "$program" $(ldd "$program" | grep -o '/[^ ]*'); do install -D "$file" "$guest$file"; done
done
cat >"$guest/rank" <<'END'
modprobe -a nf_conntrack nft_chain_nat nft_masq nf_flow_table nf_flow_table_inet nft_flow_offload pktgen veth
mac() { ip $1 link show "$2" | awk '/ether/ {print $2}'; }
gateway() { ip netns exec gateway "$@"; }
ip netns add gateway
ip netns add sink
ip link add out type veth peer name in netns gateway
ip -n gateway link add out type veth peer name in netns sink
ip addr add 10.1.0.2/24 dev out
ip -n gateway addr add 10.1.0.1/24 dev in
ip -n gateway addr add 10.2.0.1/24 dev out
ip -n sink addr add 10.2.0.2/24 dev in
ip link set out up
ip -n gateway link set in up
ip -n gateway link set out up
ip -n sink link set in up
ip -n gateway neigh add 10.2.0.2 lladdr "$(mac '-n sink' in)" dev out
gateway dash -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
ip netns exec sink nft 'table netdev t { chain c { type filter hook ingress device in priority 0; udp dport 9 counter drop; }; }'
echo "add_device out" >/proc/net/pktgen/kpktgend_0
for set in "count 20000" "pkt_size 60" "delay 0" "dst 10.2.0.2" "src_min 10.1.0.2" "src_max 10.1.0.2" "dst_mac $(mac '-n gateway' in)" \
    "udp_src_min 5000" "udp_src_max 5000" "udp_dst_min 9" "udp_dst_max 9"; do
    echo "$set" >/proc/net/pktgen/out
done
masquerade='chain nat { type nat hook postrouting priority 100; oifname "out" masquerade; };'
flowtable='flowtable f { hook ingress priority 0; devices = { in, out }; }; chain forward { type filter hook forward priority 0; meta l4proto udp flow add @f; };'
for round in 1 2 3; do
    for router in none nft nft-flowtable; do
        gateway nft flush ruleset
        case $router in
        nft) gateway nft "table ip t { $masquerade }" ;;
        nft-flowtable) gateway nft "table ip t { $flowtable $masquerade }" ;;
        esac
        echo start >/proc/net/pktgen/pgctrl
        awk -v router=$router -F '[ (]+' '/OK:/ {printf "%-14s %6.0f instructions a packet\n", router, $3 * 1000 / 20000}' /proc/net/pktgen/out
    done
done
ip netns exec sink nft list ruleset | awk '/counter/ {print $6 " of 180000 packets arrived"}'
END
scripts/run-in-vm.sh -c -t 1800 "$(scripts/fetch-kernel.sh "${1:-6.12}")" "$guest" "$(command -v dash)" /rank
