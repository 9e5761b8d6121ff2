// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// cluster is a real API, asked with somebody's token.
type cluster struct {
	t      *testing.T
	client *http.Client
	server string
	token  string
}

func newCluster(t *testing.T, dir string) *cluster {
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	token, err := os.ReadFile(filepath.Join(dir, "token"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &cluster{t, &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}, os.Getenv("NATKIT_KUBE_API"), strings.TrimSpace(string(token))}
}

// ask sends a request; body nil is a GET.
func (c *cluster) ask(method, path string, body any) (status int, answer map[string]any) {
	c.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		c.t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(c.t.Context(), method, c.server+path, bytes.NewReader(text))
	if err != nil {
		c.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+c.token)
	r.Header.Set("Content-Type", "application/json")
	if method == "PATCH" {
		r.Header.Set("Content-Type", "application/strategic-merge-patch+json")
	}
	response, err := c.client.Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	defer response.Body.Close()
	all, err := io.ReadAll(response.Body)
	if err == nil {
		err = json.Unmarshal(all, &answer)
	}
	if err != nil {
		c.t.Fatalf("%s %s: %v: %s", method, path, err, all)
	}
	return response.StatusCode, answer
}

// make creates an object.
func (c *cluster) make(path string, object any) map[string]any {
	c.t.Helper()
	status, answer := c.ask("POST", path+"?fieldValidation=Strict", object)
	if status != http.StatusCreated {
		c.t.Fatalf("POST %s: %d %v", path, status, answer["message"])
	}
	return answer
}

// object is one as the API has them.
func object(version, kind, name string, more map[string]any) map[string]any {
	out := map[string]any{"apiVersion": version, "kind": kind, "metadata": map[string]any{"name": name}}
	for k, v := range more {
		out[k] = v
	}
	return out
}

// event is the Event of a cause and object, "" type and message if there is none.
func (c *cluster) event(namespace, name, reason string) (kind, message, count string) {
	_, list := c.ask("GET", "/api/v1/namespaces/"+namespace+"/events?fieldSelector=source=natkit,reason="+reason+",involvedObject.name="+name, nil)
	items, _ := list["items"].([]any)
	if len(items) > 1 {
		c.t.Errorf("%d Events of %s and %s", len(items), name, reason)
	}
	if len(items) == 0 {
		return "", "", ""
	}
	return fmt.Sprint(at(c.t, items[0], "type")), fmt.Sprint(at(c.t, items[0], "message")), fmt.Sprint(at(c.t, items[0], "count"))
}

// condition is NATProblem of the node.
func (c *cluster) condition() (status, reason string) {
	_, node := c.ask("GET", "/api/v1/nodes/n1", nil)
	conditions, _ := at(c.t, node, "status").(map[string]any)["conditions"].([]any)
	for _, v := range conditions {
		if at(c.t, v, "type") == "NATProblem" {
			return fmt.Sprint(at(c.t, v, "status")), fmt.Sprint(at(c.t, v, "reason"))
		}
	}
	return "", ""
}

// A real API (make test-kubernetes): the objects of deploy/kubernetes are accepted, and what they
// give natkit is enough and no more; a fault in a pod is an Event and the condition, and ends.
func TestKubernetesAPI(t *testing.T) {
	admin := os.Getenv("NATKIT_KUBE_ADMIN")
	if admin == "" {
		return // TestCourseReplayed has recorded answers
	}
	api := newCluster(t, admin)
	api.make("/api/v1/nodes", object("v1", "Node", "n1", nil))
	for i := range 100 {
		api.make("/api/v1/nodes", object("v1", "Node", fmt.Sprintf("node-%d", i), nil))
	}
	paths := map[string]string{"Namespace": "/api/v1/namespaces", "ServiceAccount": "/api/v1/namespaces/natkit/serviceaccounts", "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", "DaemonSet": "/apis/apps/v1/namespaces/natkit/daemonsets"}
	for _, d := range documents(t, deployKubernetes+"natkit.yaml") {
		api.make(paths[fmt.Sprint(d["kind"])], d)
	}
	api.make("/api/v1/namespaces", object("v1", "Namespace", "shop", nil))
	pod := api.make("/api/v1/namespaces/shop/pods", object("v1", "Pod", "cart", map[string]any{"spec": map[string]any{"nodeName": "n1", "containers": []any{map[string]any{"name": "c", "image": "x"}}}}))
	uid := fmt.Sprint(at(t, pod, "metadata", "uid"))
	_, token := api.ask("POST", "/api/v1/namespaces/natkit/serviceaccounts/natkit/token", object("authentication.k8s.io/v1", "TokenRequest", "", map[string]any{"spec": map[string]any{"audiences": []any{}}}))
	credentials := os.Getenv("NATKIT_KUBE_CREDENTIALS")
	for path, text := range map[string]string{credentials + "/token": fmt.Sprint(at(t, token, "status", "token")), admin + "/pod": uid} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	own := newCluster(t, credentials)
	for _, path := range []string{"/api/v1/nodes", "/api/v1/nodes/n1", "/api/v1/pods", "/api/v1/events", "/api/v1/secrets"} {
		if status, _ := own.ask("GET", path, nil); status != http.StatusForbidden {
			t.Errorf("natkit may read %s: %d", path, status)
		}
	}
	faultInPod(t, api, uid)
	// What docs/kubernetes.md removes the condition with.
	api.ask("PATCH", "/api/v1/nodes/n1/status", map[string]any{"status": map[string]any{"conditions": []any{map[string]any{"type": "NATProblem", "$patch": "delete"}}}})
	if status, _ := api.condition(); status != "" {
		t.Errorf("the condition is not removed: %s", status)
	}
}

// faultInPod is the course of a fault in the network namespace of pod shop/cart, which is the
// gateway of a lab.
func faultInPod(t *testing.T, api *cluster, uid string) {
	natkit := ktest.Natkit(t)
	start := func(name string, args ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = time.Minute
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	must := func(name string, args ...string) {
		t.Helper()
		if err := start(name, args...).Wait(); err != nil {
			t.Fatalf("%s %q: %v", name, args, err)
		}
	}
	must(natkit, "lab", "up", "routed", "--name", "k", "--server", "none")
	t.Cleanup(func() { exec.Command(natkit, "lab", "down", "k").Run() })
	asPod(t, start("ip", "netns", "exec", "k-gateway", "sleep", "600"), uid)
	ping := start("ip", "netns", "exec", "k-client", "ping", "-q", "-i", "0.05", "203.0.113.2")
	monitor := start(natkit, "monitor", "--node-name", "n1", "--kubernetes-api", os.Getenv("NATKIT_KUBE_API"), "--kubernetes-credentials", os.Getenv("NATKIT_KUBE_CREDENTIALS"), "--metrics", "", interval(t))
	wait := func(what string, f func() bool) time.Duration {
		t.Helper()
		begun := time.Now()
		ktest.Wait(t, 3*time.Minute, what, f)
		return time.Since(begun).Round(100 * time.Millisecond)
	}
	wait("the node is healthy", func() bool { status, _ := api.condition(); return status == "False" })
	must("ip", "netns", "exec", "k-gateway", "sysctl", "-qw", "net.ipv4.ip_forward=0")
	took := wait("the Event", func() bool { kind, _, _ := api.event("shop", "cart", "IpForwardOff"); return kind == "Warning" })
	tookNode := took + wait("the condition", func() bool { status, reason := api.condition(); return status == "True" && reason == "IpForwardOff" })
	must("ip", "netns", "exec", "k-gateway", "sysctl", "-qw", "net.ipv4.ip_forward=1")
	cured := wait("the end of both", func() bool {
		status, _ := api.condition()
		kind, message, _ := api.event("shop", "cart", "IpForwardOff")
		return status == "False" && kind == "Normal" && strings.HasPrefix(message, "ended after ")
	})
	t.Logf("after the fault: Event %v, condition %v; after the cure: %v", took, tookNode, cured)
	if took > 30*time.Second {
		t.Errorf("the Event took %v, want at most 30 s", took)
	}
	ping.Process.Signal(os.Interrupt)
	monitor.Process.Signal(os.Interrupt)
	if err := monitor.Wait(); err != nil {
		t.Errorf("natkit monitor: %v", err)
	}
	ping.Wait()
}

// interval is that of the DaemonSet.
func interval(t *testing.T) string {
	for _, a := range at(t, daemonSet(t), "spec", "template", "spec", "containers", 0, "args").([]any) {
		if strings.HasPrefix(fmt.Sprint(a), "--interval=") {
			return fmt.Sprint(a)
		}
	}
	t.Fatal("the DaemonSet has no --interval")
	return ""
}

// asPod has a process be in the pod shop/cart, as containerd shows it.
func asPod(t *testing.T, cmd *exec.Cmd, uid string) {
	t.Helper()
	id := strings.Repeat("3f2a9c0d1e2b4455", 4)
	group := "/sys/fs/cgroup/kubepods/besteffort/pod" + uid + "/" + id
	state := "/run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id
	for path, text := range map[string]string{group + "/cgroup.procs": fmt.Sprint(cmd.Process.Pid),
		state + "/config.json": `{"annotations":{"io.kubernetes.cri.container-type":"sandbox","io.kubernetes.cri.sandbox-namespace":"shop","io.kubernetes.cri.sandbox-name":"cart"}}`} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		for ; group != "/sys/fs/cgroup"; group = filepath.Dir(group) {
			os.Remove(group) // what others use stays: it is not empty
		}
	})
}
