// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v4"

	"natkit/internal/testutil/golden"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

const deployKubernetes = "../../deploy/kubernetes/"

// documents are the objects in a file of YAML.
func documents(t *testing.T, path string) (out []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var d map[string]any
		err := decoder.Decode(&d)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		out = append(out, d)
	}
}

// at is a value below a path of fields; elements of lists are numbers.
func at(t *testing.T, v any, path ...any) any {
	t.Helper()
	for _, p := range path {
		switch p := p.(type) {
		case string:
			v = v.(map[string]any)[p]
		case int:
			v = v.([]any)[p]
		}
		if v == nil {
			t.Fatalf("no %v of %v", p, path)
		}
	}
	return v
}

// natkit.yaml is what kustomize makes of the folder: its files one after the other, because
// nothing in kustomization.yaml changes them. -update rewrites it.
func TestKubernetesYAML(t *testing.T) {
	k := documents(t, deployKubernetes+"kustomization.yaml")[0]
	for field := range k {
		if !slices.Contains([]string{"apiVersion", "kind", "resources", "images"}, field) {
			t.Errorf("kustomization.yaml has %s, which natkit.yaml would lack", field)
		}
	}
	image := at(t, k, "images", 0)
	want := []byte("# SPDX-License-Identifier: Apache-2.0\n#\n# What kustomize makes of this folder: kubectl apply -f natkit.yaml\n")
	for i, name := range at(t, k, "resources").([]any) {
		text, err := os.ReadFile(deployKubernetes + name.(string))
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			want = append(want, "---\n"...)
		}
		want = append(want, text...)
	}
	golden.Check(t, deployKubernetes+"natkit.yaml", want)
	container := at(t, daemonSet(t), "spec", "template", "spec", "containers", 0)
	if named := fmt.Sprintf("%v:%v", at(t, image, "newName"), at(t, image, "newTag")); named != at(t, container, "image") || at(t, image, "name") != at(t, image, "newName") {
		t.Errorf("kustomization.yaml makes the image %s, the DaemonSet has %v", named, at(t, container, "image"))
	}
	// Its command line is one that natkit has.
	var args []string
	for _, a := range at(t, container, "args").([]any) {
		args = append(args, a.(string))
	}
	cmd, flags, err := newRoot(&env{}).Find(args)
	if err != nil || cmd.Name() != "monitor" || cmd.ParseFlags(flags) != nil {
		t.Errorf("%q: %v", args, err)
	}
}

func daemonSet(t *testing.T) map[string]any {
	all := documents(t, deployKubernetes+"daemonset.yaml")
	return all[len(all)-1]
}

// capabilities are those of the DaemonSet.
func capabilities(t *testing.T) (out []string) {
	for _, c := range at(t, daemonSet(t), "spec", "template", "spec", "containers", 0, "securityContext", "capabilities", "add").([]any) {
		out = append(out, c.(string))
	}
	return out
}

// lostWithout is what of natkit's sources needs a capability.
var lostWithout = map[string][]string{
	"NET_ADMIN":       {"nftables", "ipsec", "refused-connections"},
	"NET_RAW":         {"frames", "leaving-packets"},
	"SYS_ADMIN":       {"namespaces", "drop-tracing", "hooks", "nics", "routes"},
	"SYS_PTRACE":      {"namespaces"},
	"DAC_READ_SEARCH": {"process-names"},
	"SYSLOG":          {"kernel-log"},
}

// With the capabilities of the DaemonSet natkit sees all; without any one of them, it lacks what
// docs/kubernetes.md says.
func TestKubernetesCapabilities(t *testing.T) {
	page, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	all := capabilities(t)
	for _, c := range all {
		for _, lost := range lostWithout[c] {
			if row := regexp.MustCompile("(?m)^\\| `" + c + "` \\|.*$").Find(page); !bytes.Contains(row, []byte("`"+lost+"`")) {
				t.Errorf("docs/kubernetes.md does not say that without %s there is no %s", c, lost)
			}
		}
	}
	if len(all) != len(lostWithout) {
		t.Errorf("the DaemonSet has %q", all)
	}
	ktest.Tool(t, "setpriv")
	ktest.Tool(t, "unshare")
	ktest.Lacking(t, func(t *testing.T) {
		natkit := ktest.Natkit(t)
		// A pod: a process of another user, in a namespace that has no name.
		pod := exec.CommandContext(t.Context(), "unshare", "-n", "sh", "-c", "ip link add v0 type veth peer name v1 && ip link set v0 up && echo ready && exec setpriv --reuid 65534 --regid 65534 --clear-groups cat")
		// A listener here that it has: whose it is can only be read with more rights than its user's.
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		file, err := listener.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		pod.ExtraFiles = []*os.File{file}
		ready, _ := pod.StdoutPipe()
		stdin, err := pod.StdinPipe()
		if err := errors.Join(err, pod.Start()); err != nil {
			t.Fatal(err)
		}
		defer func() { stdin.Close(); pod.Wait() }()
		listener.Close()
		file.Close()
		if _, err := ready.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		without := append([]string{""}, all...)
		lost := make([][]string, len(without))
		var group sync.WaitGroup
		for i, c := range without {
			group.Go(func() { lost[i] = lostBy(t, natkit, all, c) })
		}
		group.Wait()
		for i, c := range without {
			want := append([]string{"neighbours"}, lostWithout[c]...) // tables that only the initial namespace shows
			if slices.Sort(want); !slices.Equal(lost[i], want) {
				t.Errorf("without %q: lost %q, want %q", c, lost[i], want)
			}
		}
	})
}

// lostBy are the sources that a doctor with all but one of some capabilities lacks, and "namespaces" where
// it did not see both.
func lostBy(t *testing.T, natkit string, all []string, without string) (lost []string) {
	set := "-all"
	for _, c := range all {
		if c != without {
			set += ",+" + strings.ToLower(c)
		}
	}
	cmd := exec.CommandContext(t.Context(), "setpriv", "--bounding-set", set, "--no-new-privs", natkit, "doctor", "--all-netns", "--for", "1s", "-o", "json")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var result report.DoctorAllResult
	if err2 := json.Unmarshal(out, &result); err2 != nil {
		t.Errorf("without %q: %v, %v: %s", without, err, err2, stderr.String())
		return nil
	}
	if len(result.Namespaces) != 2 {
		lost = append(lost, "namespaces")
	}
	for _, n := range result.Namespaces {
		for _, c := range n.Capabilities {
			if !c.OK && !c.Waived && !slices.Contains(lost, c.Name) {
				lost = append(lost, c.Name)
			}
		}
	}
	slices.Sort(lost)
	return lost
}
