// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// The image, made without Docker, in a real Docker: the doctor and the monitor see all with the
// capabilities of the DaemonSet, a read-only root, and Docker's own seccomp profile.
func TestImage(t *testing.T) {
	if testing.Short() {
		ktest.Unsupported(t, "takes long (-short)")
	}
	ktest.Tool(t, "dockerd")
	ktest.Tool(t, "docker")
	ktest.Lacking(t, func(t *testing.T) {
		const dir = "/run/image" // of this machine alone: Docker leaves mounts behind
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		const image = dir + "/image.tar"
		make := exec.CommandContext(t.Context(), "scripts/image.sh", runtime.GOARCH, image)
		make.Dir = "../.."
		if out, err := make.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		docker := dockerDaemon(t, dir, "--iptables=false", "--bridge", "none") // no rules and no bridge
		if out := docker("load", "-i", image); !strings.Contains(out, "natkit:latest") {
			t.Fatalf("docker load: %s", out)
		}
		labels := docker("image", "inspect", "-f", `{{index .Config.Labels "org.opencontainers.image.version"}} {{index .Config.Labels "org.opencontainers.image.revision"}}`, "natkit:latest")
		if !regexp.MustCompile(`^\S+ [0-9a-f]{40}\n$`).MatchString(labels) {
			t.Errorf("labels %q", labels)
		}
		as := []string{"run", "--network", "host", "--pid", "host", "--read-only", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"}
		for _, c := range capabilities(t) {
			as = append(as, "--cap-add", c)
		}
		out := docker(append(as, "--rm", "natkit:latest", "doctor", "--all-netns", "--for", "1s")...)
		// In a machine of its own, which does not have the initial namespace.
		lost := regexp.MustCompile(`(?m)^  ([a-z-]+): `).FindAllStringSubmatch(out[max(0, strings.Index(out, "Could not be seen:")):], -1)
		for _, l := range lost {
			if l[1] != "neighbours" && l[1] != "softirq-wait" {
				t.Errorf("the doctor lacks %s:\n%s", l[1], out)
			}
		}
		docker(append(as, "--name", "monitor", "-d", "-v", dir+"/state:/var/lib/natkit", "natkit:latest", "monitor", "--metrics", "127.0.0.1:9641", "--interval", "1s")...)
		ktest.Wait(t, time.Minute, "the monitor is healthy", func() bool {
			answer, err := http.Get("http://127.0.0.1:9641/healthz")
			if err != nil {
				return false
			}
			answer.Body.Close()
			return answer.StatusCode == http.StatusOK
		})
		answer, err := http.Get("http://127.0.0.1:9641/metrics")
		if err != nil {
			t.Fatal(err)
		}
		metrics, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || !strings.Contains(string(metrics), "\nnatkit_drop_tracing 1\n") {
			t.Errorf("metrics (%v): %s", err, metrics)
		}
		if files, _ := filepath.Glob(dir + "/state/history/*.segment"); len(files) == 0 {
			t.Error("no history")
		}
		docker("stop", "monitor")
		if code := docker("inspect", "-f", "{{.State.ExitCode}}", "monitor"); code != "0\n" {
			t.Errorf("the monitor ended with %s: %s", code, docker("logs", "monitor"))
		}
	})
}

// dockerDaemon starts a Docker of the test's own.
func dockerDaemon(t *testing.T, dir string, options ...string) (docker func(args ...string) string) {
	t.Helper()
	if err := exec.Command("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup").Run(); err != nil {
		t.Fatalf("mount cgroup2: %v", err)
	}
	log, err := os.Create(dir + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	socket := "unix://" + dir + "/docker.sock"
	daemon := exec.Command("dockerd", append([]string{"--data-root", dir + "/root", "--exec-root", dir + "/exec", "-H", socket, "--pidfile", dir + "/pid", "--storage-driver", "vfs",
		"--containerd", "", "--exec-opt", "native.cgroupdriver=cgroupfs"}, options...)...)
	daemon.Stdout, daemon.Stderr = log, log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		daemon.Process.Signal(os.Interrupt)
		daemon.Wait()
	})
	run := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "docker", append([]string{"-H", socket}, args...)...).Output()
		if exit, ok := err.(*exec.ExitError); ok {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return string(out), err
	}
	ktest.Wait(t, time.Minute, "dockerd", func() bool { _, err := run("info"); return err == nil })
	return func(args ...string) string {
		t.Helper()
		out, err := run(args...)
		if exit := (*exec.ExitError)(nil); err != nil && !(errors.As(err, &exit) && exit.ExitCode() == exitUnjudged) {
			t.Fatalf("docker %q: %v", args, err)
		}
		return out
	}
}
