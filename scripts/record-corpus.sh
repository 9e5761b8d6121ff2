#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Record the corpus of internal/ui/report/testdata/corpus: what natkit doctor --save
# writes of a gateway whose rules a real program has made, with traffic through them.
#
#   scripts/record-corpus.sh [PROGRAM...]
#
# PROGRAM is docker, firewalld, kube-proxy-iptables, kube-proxy-nftables, libvirt or ufw; all of
# them without. kube-proxy is built with its API server by scripts/kube-apiserver.sh and needs
# etcd-server; the others run from their Debian packages. All run in network, mount and process namespaces of its own and is not installed here: what
# is missing is named. Needs root and ./natkit (make build). Run the tests of report with
# -update afterwards, and read what the doctor says of each.
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=$PWD/internal/ui/report/testdata/corpus
natkit=${NATKIT:-$PWD/natkit}

if [ "${1:-}" != --inside ]; then
    mkdir -p "$corpus"
    [ $# -gt 0 ] || set -- docker firewalld kube-proxy-iptables kube-proxy-nftables libvirt ufw
    for program in "$@"; do
        case $program in kube-proxy-*) scripts/kube-apiserver.sh ;; esac # what it builds stays
        NATKIT=$natkit unshare -m --propagation private -n -p --fork --mount-proc --kill-child \
            scripts/record-corpus.sh --inside "$program" "$corpus"
    done
    exit
fi
program=$2 corpus=$3

# Folders of the machine's own are not written to.
mount -t tmpfs tmpfs /run
work=/run/work
mount -t sysfs sysfs /sys && mount -t bpf bpf /sys/fs/bpf && mount -t tracefs tracefs /sys/kernel/tracing && mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in /etc /var/lib; do
    mkdir -p "$work$folder"/{upper,work}
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$work$folder/upper,workdir=$work$folder/work" "$folder"
done

# client 198.51.100.9 -- eth0 198.51.100.1 | this | lan0 10.0.0.1 -- server 10.0.0.2
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1
mkdir -p /run/netns
end() {
    ip netns add "$1"
    ip link add "$2" type veth peer name eth0 netns "$1"
    ip link set "$2" up
    ip addr add "$3/24" dev "$2"
    ip -n "$1" link set lo up
    ip -n "$1" link set eth0 up
    ip -n "$1" addr add "$4/24" dev eth0
    ip -n "$1" route add default via "$3"
}
end client eth0 198.51.100.1 198.51.100.9
end server lan0 10.0.0.1 10.0.0.2

until_true() {
    for _ in $(seq 300); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    cat /run/*.log >&2
    echo "$program: not within a minute: $*" >&2
    exit 1
}

# Each leads port 8080 of the outside to a web server, and lets it out again.
target=10.0.0.2
ports=(8080)
case $program in
ufw)
    sed -i 's/^DEFAULT_FORWARD_POLICY=.*/DEFAULT_FORWARD_POLICY="DROP"/' /etc/default/ufw
    cat >>/etc/ufw/before.rules <<'RULES'
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -i eth0 -p tcp --dport 8080 -j DNAT --to-destination 10.0.0.2:80
-A POSTROUTING -s 10.0.0.0/24 -o eth0 -j MASQUERADE
COMMIT
RULES
    ufw allow 22/tcp
    ufw route allow in on eth0 out on lan0 to 10.0.0.2 port 80 proto tcp
    ufw route allow in on lan0 out on eth0
    ufw --force enable
    ;;
firewalld)
    offline=(firewall-offline-cmd -q)
    "${offline[@]}" --zone=external --add-interface=eth0
    "${offline[@]}" --zone=internal --add-interface=lan0
    "${offline[@]}" --zone=external --add-forward-port=port=8080:proto=tcp:toport=80:toaddr=10.0.0.2
    "${offline[@]}" --new-policy=out
    "${offline[@]}" --policy=out --add-ingress-zone=internal
    "${offline[@]}" --policy=out --add-egress-zone=external
    "${offline[@]}" --policy=out --set-target=ACCEPT
    export DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/dbus
    dbus-daemon --system --address="$DBUS_SYSTEM_BUS_ADDRESS" --nofork --nopidfile 2>/run/dbus.log &
    until_true test -S /run/dbus
    firewalld --nofork --nopid &
    until_true nft list chain inet firewalld nat_POST_external_allow
    ;;
libvirt)
    # The server is a virtual machine at the network that libvirt makes by itself; the port is
    # published by a rule before libvirt's, as in its documentation's hook for that.
    ip addr flush dev lan0
    ip -n server addr flush dev eth0
    # Users of its package, without which it does not start.
    echo libvirt-qemu:x:64055:64055::/:/bin/false >>/etc/passwd
    echo libvirt-qemu:x:64055: >>/etc/group
    libvirtd >/run/libvirtd.log 2>&1 &
    virsh=(virsh -c network:///system)
    until_true "${virsh[@]}" net-list
    "${virsh[@]}" net-define /dev/stdin <<'XML'
<network>
  <name>default</name>
  <forward mode='nat'/>
  <bridge name='virbr0' stp='on' delay='0'/>
  <ip address='192.168.122.1' netmask='255.255.255.0'>
    <dhcp><range start='192.168.122.100' end='192.168.122.254'/></dhcp>
  </ip>
</network>
XML
    "${virsh[@]}" net-start default
    ip link set lan0 master virbr0
    target=192.168.122.2
    ip -n server addr add $target/24 dev eth0
    ip -n server route replace default via 192.168.122.1
    iptables -I FORWARD -o virbr0 -p tcp -d $target --dport 80 -j ACCEPT
    iptables -t nat -I PREROUTING -p tcp --dport 8080 -j DNAT --to-destination $target:80
    ;;
docker)
    mkdir -p /run/root /run/exec
    dockerd --data-root /run/root --exec-root /run/exec -H unix:///run/docker.sock --pidfile /run/docker.pid \
        --storage-driver vfs --containerd "" --exec-opt native.cgroupdriver=cgroupfs >/run/dockerd.log 2>&1 &
    docker=(docker -H unix:///run/docker.sock)
    until_true "${docker[@]}" info
    mkdir -p /run/image/bin /run/image/www
    cp "$(command -v busybox)" /run/image/bin/busybox
    tar -C /run/image -c . | "${docker[@]}" import - web
    "${docker[@]}" run -d --name web -p 8080:80 web /bin/busybox httpd -f -p 80 -h /www
    target=
    ;;
kube-proxy-*)
    # The server is a pod. Services: web, also at a port of the node; near, only for pods of the
    # node, which keeps the client's address; gone, without a pod.
    ports=(30080 30081)
    ip addr add 10.255.0.1/32 dev lo
    scripts/kube-apiserver.sh run /run/kube &
    until_true test -e /run/kube/ca.crt
    api=https://10.255.0.1:6443
    # shellcheck disable=SC2317 # until_true runs it
    create() {
        curl -sf --cacert /run/kube/ca.crt -H "Authorization: Bearer $(cat /run/kube/token)" -H 'Content-Type: application/json' -d "$2" "$api/$1"
    }
    service() { # NAME ADDRESS SPEC
        create api/v1/namespaces/default/services "{\"apiVersion\":\"v1\",\"kind\":\"Service\",\"metadata\":{\"name\":\"$1\"},\"spec\":{\"clusterIP\":\"$2\",$3}}"
        [ "$1" = gone ] || create apis/discovery.k8s.io/v1/namespaces/default/endpointslices "{\"apiVersion\":\"discovery.k8s.io/v1\",\"kind\":\"EndpointSlice\",
            \"metadata\":{\"name\":\"$1-1\",\"labels\":{\"kubernetes.io/service-name\":\"$1\"}},\"addressType\":\"IPv4\",\"ports\":[{\"name\":\"\",\"port\":80,\"protocol\":\"TCP\"}],
            \"endpoints\":[{\"addresses\":[\"$target\"],\"nodeName\":\"n1\",\"conditions\":{\"ready\":true}}]}"
    }
    {
        create api/v1/nodes '{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"},"status":{"addresses":[{"type":"InternalIP","address":"198.51.100.1"}]}}'
        service web 10.96.0.30 '"type":"NodePort","ports":[{"port":80,"nodePort":30080}]'
        service near 10.96.0.31 '"type":"NodePort","externalTrafficPolicy":"Local","ports":[{"port":80,"nodePort":30081}]'
        service gone 10.96.0.32 '"type":"NodePort","ports":[{"port":80,"nodePort":30082}]'
    } >/run/kube.log
    cat >/run/kube/config <<CONFIG
{"apiVersion":"v1","kind":"Config","current-context":"x","contexts":[{"name":"x","context":{"cluster":"x","user":"x"}}],
"clusters":[{"name":"x","cluster":{"server":"$api","certificate-authority":"/run/kube/ca.crt"}}],"users":[{"name":"x","user":{"token":"$(cat /run/kube/token)"}}]}
CONFIG
    "$(scripts/kube-apiserver.sh)/kube-proxy" --kubeconfig /run/kube/config --hostname-override n1 --proxy-mode "${program#kube-proxy-}" --cluster-cidr 10.0.0.0/24 \
        --conntrack-max-per-core 0 --conntrack-tcp-timeout-established 0s --conntrack-tcp-timeout-close-wait 0s >/run/kube-proxy.log 2>&1 &
    # What a network plugin adds: pods leave with the node's address.
    iptables -t nat -A POSTROUTING -s 10.0.0.0/24 ! -d 10.0.0.0/24 -m comment --comment "network plugin" -j MASQUERADE
    ;;
*)
    echo "$program is none of docker, firewalld, kube-proxy-iptables, kube-proxy-nftables, libvirt, ufw" >&2
    exit 2
    ;;
esac

# Traffic through the rules, from both sides, while the doctor watches.
mkdir -p /run/www && echo hello >/run/www/index.html
if [ -n "$target" ]; then
    (cd /run/www && exec ip netns exec server python3 -m http.server 80 >/dev/null 2>&1) &
fi
(cd /run/www && exec ip netns exec client python3 -m http.server 80 >/dev/null 2>&1) &
until_true ip netns exec client curl -s -m 2 http://127.0.0.1/
for port in "${ports[@]}"; do
    until_true ip netns exec client curl -s -m 2 "http://198.51.100.1:$port/"
done
load() {
    while :; do
        for port in "${ports[@]}"; do
            ip netns exec client curl -s -m 2 -o /dev/null "http://198.51.100.1:$port/" || true
        done
        ip netns exec server curl -s -m 2 -o /dev/null http://198.51.100.9/ || true
        sleep 0.05
    done
}
load 2>/dev/null &
"$natkit" doctor --for 3s --save "$corpus/$program.json" --redact || [ $? -gt 2 ]

# And where somebody has blocked the service by a rule of their own before the program's.
chain=FORWARD
[ "$program" != docker ] || chain=DOCKER-USER
iptables -I $chain -p tcp --dport 80 -j DROP
for _ in $(seq 20); do
    while :; do ip netns exec client curl -s -m 1 -o /dev/null "http://198.51.100.1:${ports[0]}/" || true; done &
done
sleep 1
"$natkit" doctor --for 3s --save "$corpus/$program-blocked.json" --redact || [ $? -gt 2 ]
