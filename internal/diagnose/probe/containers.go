// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// Where a process is in the tree of control groups tells which container it is
// in: each engine has its own way of writing the container's number there.
//
//	docker      /docker/ID                /system.slice/docker-ID.scope
//	containerd  /kubepods/.../podUID/ID   .../cri-containerd-ID.scope
//	cri-o       .../crio-ID.scope
//	podman      .../libpod-ID.scope
//	nerdctl     .../nerdctl-ID.scope
//	lxc         /lxc.payload.NAME         /lxc/NAME
//	systemd     /machine.slice/machine-NAME.scope, /system.slice/NAME.service
var (
	containerScope = regexp.MustCompile(`(?m)(docker|cri-containerd|crio|libpod|nerdctl)-([0-9a-f]{64})(?:\.scope)?(?:/|$)`)
	containerPath  = regexp.MustCompile(`(?m)/(docker|kubepods)[^:\n]*/([0-9a-f]{64})(?:/|$)`)
	lxcPath        = regexp.MustCompile(`/lxc(?:\.payload\.|/)([^/\n]+)`)
	machineScope   = regexp.MustCompile(`/machine-([^/\n]+)\.scope`)
	systemdUnit    = regexp.MustCompile(`(?m)/([^/\n]+)\.service(?:/|$)`)
	podUID         = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)
)

// containerOf says what the first of the processes that tells is part of, "" when
// none does: the name that people gave it, where its engine's files are readable,
// otherwise the name that it calls itself, otherwise its number.
func containerOf(v *view, pids []string) string {
	for _, pid := range pids {
		groups, err := v.read("proc/" + pid + "/cgroup")
		if err != nil {
			continue
		}
		if name := containerIn(v, pid, groups); name != "" {
			return name
		}
	}
	return ""
}

func containerIn(v *view, pid, groups string) string {
	engine, id := "", ""
	if m := containerScope.FindStringSubmatch(groups); m != nil {
		engine, id = m[1], m[2]
	} else if m := containerPath.FindStringSubmatch(groups); m != nil {
		engine, id = m[1], m[2]
	}
	switch {
	case id != "":
		return containerName(v, pid, engine, id, groups)
	case lxcPath.MatchString(groups):
		return "lxc " + lxcPath.FindStringSubmatch(groups)[1]
	case machineScope.MatchString(groups):
		return "machine " + strings.ReplaceAll(machineScope.FindStringSubmatch(groups)[1], `\x2d`, "-")
	case systemdUnit.MatchString(groups):
		return "service " + systemdUnit.FindStringSubmatch(groups)[1]
	}
	return ""
}

func containerName(v *view, pid, engine, id, groups string) string {
	pod := podUID.FindStringSubmatch(groups)
	if pod != nil || strings.HasPrefix(engine, "cri") || engine == "kubepods" {
		if name := podName(v, id); name != "" {
			return "pod " + name
		}
	}
	if name := dockerName(v, id); name != "" {
		return "docker " + name
	}
	if name := podmanName(v, id); engine == "libpod" && name != "" {
		return "podman " + name
	}
	if name := nerdctlName(v, id); engine == "nerdctl" && name != "" {
		return "nerdctl " + name
	}
	engine = map[string]string{"nerdctl": "nerdctl", "libpod": "podman", "cri-containerd": "containerd", "kubepods": "pod", "crio": "cri-o"}[engine]
	if engine == "" {
		engine = "docker"
	}
	if pod != nil {
		engine = "pod"
	}
	host := hostnameIn(v, pid)
	switch short := id[:12]; {
	case host != "" && host != short:
		return engine + " " + host
	case pod != nil:
		return engine + " " + strings.ReplaceAll(pod[1], "_", "-")
	default:
		return engine + " " + short
	}
}

// podName is "namespace/name", as the container's engine noted it among its
// annotations: containerd or cri-o.
func podName(v *view, id string) string {
	for _, path := range []string{
		"run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id + "/config.json",
		"run/containers/storage/overlay-containers/" + id + "/userdata/config.json",
	} {
		text, err := v.read(path)
		if err != nil {
			continue
		}
		var spec struct {
			Annotations map[string]string `json:"annotations"`
		}
		if json.Unmarshal([]byte(text), &spec) != nil {
			continue
		}
		for _, keys := range [][2]string{
			{"io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"},
			{"io.kubernetes.pod.namespace", "io.kubernetes.pod.name"},
		} {
			if name := spec.Annotations[keys[1]]; name != "" {
				return spec.Annotations[keys[0]] + "/" + name
			}
		}
	}
	return ""
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
	root, err := unix.Open(filepath.Join(v.root, "proc", pid, "root"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, "etc/hostname", &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	const longest = 253 // of a host's name
	buf := make([]byte, longest+1)
	n, err := unix.Read(fd, buf)
	if err != nil || n > longest {
		return ""
	}
	name, _, _ := strings.Cut(strings.TrimSpace(string(buf[:n])), "\n")
	return name
}
