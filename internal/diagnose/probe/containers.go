// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
)

// Where a process is in the tree of control groups tells which container it is
// in: each engine has its own way of writing the container's number there.
//
//	docker      /docker/ID                /system.slice/docker-ID.scope
//	containerd  /kubepods/.../podUID/ID   .../cri-containerd-ID.scope
//	cri-o       .../crio-ID.scope
//	cri-dockerd /kubepods/.../podUID/ID   .../docker-ID.scope
//	podman      .../libpod-ID.scope
//	nerdctl     .../nerdctl-ID.scope
//	lxc         /lxc.payload.NAME         /lxc/NAME
//	systemd     /machine.slice/machine-NAME.scope, /system.slice/NAME.service
var (
	containerScope = regexp.MustCompile(`(?m)(docker|cri-containerd|crio|libpod|nerdctl)-([0-9a-f]{64})(?:\.scope)?(?:/|$)`)
	containerPath  = regexp.MustCompile(`(?m)/(docker|kubepods)[^:\n]*/([0-9a-f]{64})(?:/|$)`)
	// From inside a container with a cgroup namespace, what lies above is shown as ".."
	// (cgroup_namespaces(7)), and the names of the levels in between are missing.
	containerBeside = regexp.MustCompile(`(?m):/\.\.[^:\n]*/([0-9a-f]{64})(?:/|$)`)
	lxcPath         = regexp.MustCompile(`/lxc(?:\.payload\.|/)([^/\n]+)`)
	machineScope    = regexp.MustCompile(`/machine-([^/\n]+)\.scope`)
	systemdUnit     = regexp.MustCompile(`(?m)/([^/\n]+)\.service(?:/|$)`)
	// A static pod, which the kubelet makes of a file, has a hash of that for a number.
	podUID = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})`)
)

// An Owner is what processes are part of.
type Owner struct {
	// Name is what people call it: "docker web1", "pod shop/cart-5d8f". Where the files of its
	// engine can't be read, it is what it calls itself, otherwise its number; "" when nothing tells.
	Name string
	// PodUID is the number by which the Kubernetes API knows the pod. Static pods have none: the API
	// has a mirror of them with another.
	PodUID string
}

// ownerOf says what the first of the processes that tells is part of.
func ownerOf(v *view, pids []string) Owner {
	for _, pid := range pids {
		groups, err := v.read("proc/" + pid + "/cgroup")
		if err != nil {
			continue
		}
		if name, uid := containerIn(v, pid, groups); name != "" {
			if !strings.Contains(uid, "-") {
				uid = ""
			}
			return Owner{name, uid}
		}
	}
	return Owner{}
}

func containerIn(v *view, pid, groups string) (name, uid string) {
	engine, id := "", ""
	if m := containerScope.FindStringSubmatch(groups); m != nil {
		engine, id = m[1], m[2]
	} else if m := containerPath.FindStringSubmatch(groups); m != nil {
		engine, id = m[1], m[2]
	} else if m := containerBeside.FindStringSubmatch(groups); m != nil {
		engine, id = "container", m[1]
	}
	switch {
	case id != "":
		return containerName(v, pid, engine, id, groups)
	case lxcPath.MatchString(groups):
		return "lxc " + lxcPath.FindStringSubmatch(groups)[1], ""
	case machineScope.MatchString(groups):
		return "machine " + strings.ReplaceAll(machineScope.FindStringSubmatch(groups)[1], `\x2d`, "-"), ""
	case systemdUnit.MatchString(groups):
		return "service " + systemdUnit.FindStringSubmatch(groups)[1], ""
	}
	return "", ""
}

func containerName(v *view, pid, engine, id, groups string) (name, uid string) {
	if m := podUID.FindStringSubmatch(groups); m != nil {
		uid = strings.ReplaceAll(m[1], "_", "-")
	}
	named := dockerName(v, id)
	if uid != "" || engine != "docker" && engine != "libpod" && engine != "nerdctl" {
		p := annotatedPod(v, id)
		if p.name == "" {
			p = dockerPod(named)
		}
		if p.name == "" {
			p = loggedPod(v, uid)
		}
		if p.name != "" {
			return "pod " + p.namespace + "/" + p.name, cmp.Or(uid, p.uid)
		}
	}
	if named != "" {
		return "docker " + named, ""
	}
	if name := podmanName(v, id); engine == "libpod" && name != "" {
		return "podman " + name, ""
	}
	if name := nerdctlName(v, id); (engine == "nerdctl" || engine == "container") && name != "" {
		return "nerdctl " + name, ""
	}
	kind := map[string]string{"libpod": "podman", "cri-containerd": "containerd", "kubepods": "pod", "crio": "cri-o"}[engine]
	if uid != "" {
		kind = "pod"
	}
	kind = cmp.Or(kind, engine)
	host := hostnameIn(v, pid)
	switch short := id[:12]; {
	case host != "" && host != short:
		return kind + " " + host, uid
	case uid != "":
		return kind + " " + uid, uid
	default:
		return kind + " " + short, ""
	}
}

// pod is what the state of a machine's container engine tells of one.
type pod struct{ namespace, name, uid string }

// containerdState are the folders that containerd keeps its state in: its own, and those of
// distributions of Kubernetes which bring it along.
var containerdState = []string{"run/containerd", "run/k3s/containerd", "run/k0s/containerd", "var/snap/microk8s/common/run/containerd"}

// annotatedPod is the pod that containerd or CRI-O noted among the container's annotations
// (containerd's pkg/cri/annotations, CRI-O's pkg/annotations).
func annotatedPod(v *view, id string) pod {
	var paths []string
	for _, dir := range containerdState {
		paths = append(paths, dir+"/io.containerd.runtime.v2.task/k8s.io/"+id+"/config.json")
	}
	paths = append(paths, "run/containers/storage/overlay-containers/"+id+"/userdata/config.json", "var/lib/containers/storage/overlay-containers/"+id+"/userdata/config.json")
	for _, path := range paths {
		text, err := v.read(path)
		if err != nil {
			continue
		}
		var spec struct{ Annotations map[string]string }
		if json.Unmarshal([]byte(text), &spec) != nil {
			continue
		}
		for _, keys := range []string{"io.kubernetes.cri.sandbox-", "io.kubernetes.pod."} {
			if name := spec.Annotations[keys+"name"]; name != "" {
				return pod{spec.Annotations[keys+"namespace"], name, spec.Annotations[keys+"uid"]}
			}
		}
	}
	return pod{}
}

// dockerPod is the pod of a container that cri-dockerd has named: k8s_CONTAINER_POD_NAMESPACE_UID_ATTEMPT.
func dockerPod(name string) pod {
	parts := strings.Split(name, "_")
	if len(parts) != 6 || parts[0] != "k8s" {
		return pod{}
	}
	return pod{parts[3], parts[2], parts[4]}
}

// loggedPod is the pod of that number by the folder of its logs, which the kubelet makes
// whatever the container engine: NAMESPACE_POD_UID.
func loggedPod(v *view, uid string) pod {
	if uid == "" {
		return pod{}
	}
	folders, _ := filepath.Glob(filepath.Join(v.root, "var/log/pods", "*_"+uid)) // the pattern is right
	for _, folder := range folders {
		if parts := strings.Split(filepath.Base(folder), "_"); len(parts) == 3 {
			return pod{parts[0], parts[1], uid}
		}
	}
	return pod{}
}

// podmanName is the name that podman ps shows of a container of root's, from the list that
// its storage keeps, or the one of containers that are not kept (--rm).
func podmanName(v *view, id string) string {
	for _, path := range []string{"var/lib/containers/storage/overlay-containers/containers.json",
		"run/containers/storage/overlay-containers/volatile-containers.json", "var/lib/containers/storage/overlay-containers/volatile-containers.json"} {
		text, err := v.read(path)
		if err != nil {
			continue
		}
		var containers []struct {
			ID    string
			Names []string
		}
		if json.Unmarshal([]byte(text), &containers) != nil {
			continue
		}
		for _, c := range containers {
			if c.ID == id && len(c.Names) > 0 {
				return c.Names[0]
			}
		}
	}
	return ""
}

// nerdctlName is the name that nerdctl ps shows, which is among the container's annotations.
func nerdctlName(v *view, id string) string {
	text, err := v.read("run/containerd/io.containerd.runtime.v2.task/default/" + id + "/config.json")
	if err != nil {
		return ""
	}
	var spec struct{ Annotations map[string]string }
	if json.Unmarshal([]byte(text), &spec) != nil {
		return ""
	}
	return spec.Annotations["nerdctl/name"]
}

// dockerName is the name that docker ps shows.
func dockerName(v *view, id string) string {
	text, err := v.read("var/lib/docker/containers/" + id + "/config.v2.json")
	if err != nil {
		return ""
	}
	var config struct{ Name string }
	if json.Unmarshal([]byte(text), &config) != nil {
		return ""
	}
	return strings.TrimPrefix(config.Name, "/")
}

// hostnameIn is what a container calls itself: of a pod its name. The file is the
// container's own: a link in it leads nowhere but into the container.
func hostnameIn(v *view, pid string) string {
	f, err := openInside(v.root, pid, "etc/hostname")
	if err != nil {
		return ""
	}
	defer f.Close()
	const longest = 253 // of a host's name
	buf := make([]byte, longest+1)
	n, err := f.Read(buf)
	if err != nil || n > longest {
		return ""
	}
	name, _, _ := strings.Cut(strings.TrimSpace(string(buf[:n])), "\n")
	return name
}
