// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Each engine's way to write a container into the tree of control groups, and
// what people call it.
func TestOwnerOf(t *testing.T) {
	id := strings.Repeat("3f2a9c0d1e2b4455", 4)
	const uid = "6f7a1b2c-1111-2222-3333-444455556666"
	escaped := strings.ReplaceAll(uid, "-", "_")
	dockerConfig := map[string]string{"var/lib/docker/containers/" + id + "/config.v2.json": `{"ID":"x","Name":"/web1"}`}
	containerdConfig := map[string]string{"run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id + "/config.json": `{"annotations":{"io.kubernetes.cri.sandbox-namespace":"shop","io.kubernetes.cri.sandbox-name":"cart-5d8f"}}`}
	crioConfig := map[string]string{"run/containers/storage/overlay-containers/" + id + "/userdata/config.json": `{"annotations":{"io.kubernetes.pod.namespace":"shop","io.kubernetes.pod.name":"cart-5d8f"}}`}
	numberedConfig := map[string]string{"run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id + "/config.json": `{"annotations":{"io.kubernetes.cri.container-type":"sandbox","io.kubernetes.cri.sandbox-namespace":"shop","io.kubernetes.cri.sandbox-name":"cart-5d8f","io.kubernetes.cri.sandbox-uid":"` + uid + `"}}`}
	under := func(dir string, files map[string]string) map[string]string {
		out := map[string]string{}
		for path, text := range files {
			out[strings.Replace(path, "run/containerd", dir, 1)] = text
		}
		return out
	}
	static := strings.Repeat("0123456789abcdef", 2)
	named := map[string]string{"proc/7/root/etc/hostname": "cart-5d8f\n"}
	for _, r := range []struct {
		name, groups string
		files        map[string]string
		want         string
	}{
		{"docker, systemd", "0::/system.slice/docker-" + id + ".scope\n", dockerConfig, "docker web1"},
		{"docker, cgroupfs of version 1", "12:cpu:/docker/" + id + "\n11:memory:/docker/" + id + "\n", dockerConfig, "docker web1"},
		{"docker, its files not readable", "0::/system.slice/docker-" + id + ".scope\n", nil, "docker 3f2a9c0d1e2b"},
		{"docker, its own name is its number", "0::/system.slice/docker-" + id + ".scope\n", map[string]string{"proc/7/root/etc/hostname": "3f2a9c0d1e2b\n"}, "docker 3f2a9c0d1e2b"},
		{"pod of containerd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + escaped + ".slice/cri-containerd-" + id + ".scope\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod of cri-o", "0::/kubepods.slice/kubepods-pod" + escaped + ".slice/crio-" + id + ".scope\n", crioConfig, "pod shop/cart-5d8f"},
		{"pod, cgroupfs", "3:cpu:/kubepods/besteffort/pod" + uid + "/" + id + "\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod, cgroupfs, from inside a container of another class", "0::/../../../burstable/pod" + uid + "/" + id + "\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod, cgroupfs, from inside a container beside it", "0::/../../pod" + uid + "/" + id + "\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod, systemd, from inside a container", "0::/../../kubepods-besteffort-pod" + escaped + ".slice/cri-containerd-" + id + ".scope\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod of kind, whose node is a container", "0::/docker/" + strings.Repeat("ab", 32) + "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + escaped + ".slice/cri-containerd-" + id + ".scope\n", containerdConfig, "pod shop/cart-5d8f"},
		{"pod of k3s", "0::/kubepods/besteffort/pod" + uid + "/" + id + "\n", under("run/k3s/containerd", containerdConfig), "pod shop/cart-5d8f"},
		{"pod whose number is annotated alone", "0::/system.slice/cri-containerd-" + id + ".scope\n", numberedConfig, "pod shop/cart-5d8f"},
		{"pod of cri-dockerd", "0::/kubepods.slice/kubepods-pod" + escaped + ".slice/docker-" + id + ".scope\n",
			map[string]string{"var/lib/docker/containers/" + id + "/config.v2.json": `{"Name":"/k8s_POD_cart-5d8f_shop_` + uid + `_0"}`}, "pod shop/cart-5d8f"},
		{"pod, known by its logs", "3:cpu:/kubepods/besteffort/pod" + uid + "/" + id + "\n", map[string]string{"var/log/pods/shop_cart-5d8f_" + uid + "/cart/0.log": "", "var/log/pods/shop_other_1/x": ""}, "pod shop/cart-5d8f"},
		{"static pod", "0::/kubepods/burstable/pod" + static + "/" + id + "\n", map[string]string{"var/log/pods/kube-system_etcd-n1_" + static + "/etcd/0.log": ""}, "pod kube-system/etcd-n1"},
		{"pod with damaged annotations", "3:cpu:/kubepods/besteffort/pod" + uid + "/" + id + "\n", map[string]string{"run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id + "/config.json": `{"annotations":[`}, "pod " + uid},
		{"a container of Docker from inside another", "0::/../" + id + "\n", dockerConfig, "docker web1"},
		{"a container of what engine ever, from inside another", "0::/../" + id + "\n", nil, "container 3f2a9c0d1e2b"},
		{"pod, known by its own name", "3:cpu:/kubepods/besteffort/pod" + uid + "/" + id + "\n", named, "pod cart-5d8f"},
		{"pod, known by number", "0::/kubepods.slice/kubepods-pod" + escaped + ".slice/cri-containerd-" + id + ".scope\n", nil, "pod " + uid},
		{"podman", "0::/machine.slice/libpod-" + id + ".scope/container\n", named, "podman cart-5d8f"},
		{"podman, by its list", "0::/machine.slice/libpod-" + id + ".scope/container\n", map[string]string{"var/lib/containers/storage/overlay-containers/containers.json": `[{"id":"x","names":["other"]},{"id":"` + id + `","names":["cart"]}]`}, "podman cart"},
		{"podman, a container that is not kept", "0::/machine.slice/libpod-" + id + ".scope\n", map[string]string{"run/containers/storage/overlay-containers/volatile-containers.json": `[{"id":"` + id + `","names":["cart"]}]`}, "podman cart"},
		{"podman, a damaged list", "0::/machine.slice/libpod-" + id + ".scope\n", map[string]string{"var/lib/containers/storage/overlay-containers/containers.json": `[{"id":5}]`}, "podman 3f2a9c0d1e2b"},
		{"nerdctl", "0::/system.slice/nerdctl-" + id + ".scope\n", map[string]string{"run/containerd/io.containerd.runtime.v2.task/default/" + id + "/config.json": `{"annotations":{"nerdctl/name":"cart"}}`}, "nerdctl cart"},
		{"nerdctl, its files not readable", "0::/system.slice/nerdctl-" + id + ".scope\n", nil, "nerdctl 3f2a9c0d1e2b"},
		{"containerd alone", "0::/system.slice/cri-containerd-" + id + ".scope\n", nil, "containerd 3f2a9c0d1e2b"},
		{"lxc", "0::/lxc.payload.mail/init.scope\n", nil, "lxc mail"},
		{"nspawn", "0::/machine.slice/machine-old\\x2ddb.scope/payload\n", nil, "machine old-db"},
		{"a service with a network of its own", "0::/system.slice/openvpn.service\n", nil, "service openvpn"},
		{"damaged files", "0::/system.slice/docker-" + id + ".scope\n", map[string]string{"var/lib/docker/containers/" + id + "/config.v2.json": `{"Name":5`}, "docker 3f2a9c0d1e2b"},
		{"a login", "0::/user.slice/user-0.slice/session-3.scope\n", nil, ""},
		{"nothing", "0::/\n", nil, ""},
	} {
		t.Run(r.name, func(t *testing.T) {
			files := map[string]string{"proc/7/cgroup": r.groups}
			maps.Copy(files, r.files)
			v := &view{root: tree(t, files), net: "proc/net"}
			want := Owner{Name: r.want}
			if strings.HasPrefix(r.want, "pod ") && (strings.Contains(r.groups, uid) || strings.Contains(r.groups, escaped) || strings.HasSuffix(r.name, "annotated alone")) {
				want.PodUID = uid
			}
			if got := ownerOf(v, []string{"6", "7"}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// A container's files are its own: what they lead to outside is not read.
func TestHostnameIn(t *testing.T) {
	root := tree(t, map[string]string{"etc/secret": "secret\n", "proc/7/root/etc/x": "", "proc/8/root/etc/hostname": strings.Repeat("x", 300)})
	for _, target := range []string{"/etc/secret", "../../../../etc/secret"} {
		link := filepath.Join(root, "proc/7/root/etc/hostname")
		os.Remove(link)
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		if got := hostnameIn(&view{root: root}, "7"); got != "" {
			t.Errorf("through a link to %s: %q", target, got)
		}
	}
	if got := hostnameIn(&view{root: root}, "8"); got != "" {
		t.Errorf("300 characters are a name: %q", got)
	}
}

// What a container has in the place of the file may be a device, which must not even be opened.
func TestHostnameIsOpenedOnlyIfRegular(t *testing.T) {
	root := tree(t, map[string]string{"proc/7/root/etc/x": "", "proc/8/root/etc/hostname": "web"})
	pipe := filepath.Join(root, "proc/7/root/etc/hostname")
	if err := unix.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, pipe, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	if got := hostnameIn(&view{root: root}, "7"); got != "" {
		t.Errorf("%q from a pipe", got)
	}
	if n, err := unix.Read(fd, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("the pipe was opened: %d bytes of events, %v", n, err)
	}
	if got := hostnameIn(&view{root: root}, "8"); got != "web" {
		t.Errorf("%q, want web", got)
	}
}
