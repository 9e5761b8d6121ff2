// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/snapshot"
)

// owners finds who besides natkit sets a setting: they may write it back.
func owners() source {
	return source{
		name:  snapshot.CanOwners,
		costs: "a plan does not say who else sets a setting",
		end: func(v *view, s *snapshot.Snapshot) error {
			if _, err := os.Stat(filepath.Join(v.root, "etc")); err != nil {
				return err
			}
			s.Owners = readOwners(v.root, cmp.Or(s.Host.CPUs, runtime.NumCPU()))
			return nil
		},
	}
}

// readOwners finds who besides natkit sets settings below net on this machine:
// sysctl.d files, a tuned profile, kube-proxy, Docker. For each of them it
// names each setting once, with the value that wins. A setting may hold a "*", as
// in a sysctl.d file. What can't be read is passed over: most machines have none
// of these.
//
// root is where the machine's etc, run, usr and proc are; cpus is how many
// processors it has, from which kube-proxy computes.
func readOwners(root string, cpus int) []snapshot.Owner {
	processes := readProcesses(root)
	return slices.Concat(
		sysctlFiles(root),
		tunedProfile(root),
		kubeProxy(root, processes, cpus),
		docker(root, processes),
	)
}

// sysctlDirs are searched by systemd-sysctl and sysctl --system. Of two files
// with one name only that in the earlier directory counts.
var sysctlDirs = []string{"etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d", "lib/sysctl.d"}

// sysctlFiles reads what is set at boot. The files are applied in the order of
// their names, whatever their directory, and /etc/sysctl.conf after all; the last
// one to name a setting wins.
func sysctlFiles(root string) []snapshot.Owner {
	files := map[string]string{}
	for _, dir := range sysctlDirs {
		entries, _ := os.ReadDir(filepath.Join(root, dir))
		for _, e := range entries {
			if _, taken := files[e.Name()]; !taken && strings.HasSuffix(e.Name(), ".conf") {
				files[e.Name()] = filepath.Join(dir, e.Name())
			}
		}
	}
	var paths []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		paths = append(paths, files[name])
	}
	const last = "etc/sysctl.conf"
	paths = append(paths, last)

	var out ownerList
	for _, path := range paths {
		// 99-sysctl.conf is often a link to /etc/sysctl.conf. A link to /dev/null masks
		// the file. An absolute one means a file below root.
		full := filepath.Join(root, path)
		if target, err := os.Readlink(full); err == nil {
			if filepath.IsAbs(target) {
				full = filepath.Join(root, target)
			} else {
				full = filepath.Join(filepath.Dir(full), target)
			}
		}
		if path != last && full == filepath.Join(root, last) {
			continue // read as itself, at the end
		}
		forLines(full, func(n int, line string) {
			name, value, ok := sysctlLine(line)
			if !ok {
				return
			}
			who := "sysctl.d"
			if filepath.Base(path) == "90-natkit.conf" {
				who = "natkit"
			}
			out.put(snapshot.Owner{Setting: name, Value: value, Who: who, Where: "/" + path + ":" + strconv.Itoa(n)})
		})
	}
	return out
}

// sysctlLine reads a line of a sysctl.d file: "net.ipv4.ip_forward = 1", with
// slashes for dots if the first separator is one, with "-" before it where an
// error does not matter.
func sysctlLine(line string) (name, value string, ok bool) {
	line = strings.TrimSpace(line)
	if strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
		return "", "", false
	}
	name, value, ok = strings.Cut(line, "=")
	name = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(name), "-"))
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '/' {
		name = snapshot.SysctlName(strings.Split(name, "/")...)
	}
	if name == "net.nf_conntrack_max" { // an older name of the same setting
		name = "net.netfilter.nf_conntrack_max"
	}
	return name, strings.Join(strings.Fields(value), " "), ok && strings.HasPrefix(name, "net.")
}

// tunedProfile reads the sysctl section of the active tuned profiles and of
// those that they include; the including one wins.
func tunedProfile(root string) []snapshot.Owner {
	active, err := os.ReadFile(filepath.Join(root, "etc/tuned/active_profile"))
	if err != nil {
		return nil
	}
	var out ownerList
	seen := map[string]bool{}
	var read func(profile string)
	read = func(profile string) {
		if seen[profile] || profile != filepath.Base(profile) || profile == ".." {
			return
		}
		seen[profile] = true
		for _, dir := range []string{"etc/tuned/profiles", "etc/tuned", "usr/lib/tuned/profiles", "usr/lib/tuned"} {
			path := filepath.Join(dir, profile, "tuned.conf")
			if _, err := os.Stat(filepath.Join(root, path)); err != nil {
				continue
			}
			section := ""
			var own []snapshot.Owner
			forLines(filepath.Join(root, path), func(n int, line string) {
				line = strings.TrimSpace(line)
				if strings.HasPrefix(line, "[") {
					section = strings.Trim(line, "[]")
					return
				}
				name, value, ok := strings.Cut(line, "=")
				switch name = strings.TrimSpace(name); {
				case !ok:
				case section == "main" && name == "include":
					for _, p := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' }) {
						read(p)
					}
				case section == "sysctl":
					if name, value, ok := sysctlLine(line); ok {
						// ">1024" means: at least that.
						value = strings.TrimLeft(value, "<>=")
						own = append(own, snapshot.Owner{Setting: name, Value: value, Who: "tuned", Where: "/" + path + ":" + strconv.Itoa(n)})
					}
				}
			})
			for _, o := range own {
				out.put(o)
			}
			return
		}
	}
	for _, profile := range strings.Fields(string(active)) {
		read(profile)
	}
	return out
}

// process is a process that may own settings.
type process struct {
	pid  string
	args []string
}

// name is the program's name.
func (p process) name() string { return filepath.Base(p.args[0]) }

// flag returns the value of --name, given as one argument or two.
func (p process) flag(name string) (string, bool) {
	for i, a := range p.args[1:] {
		a = "-" + strings.TrimLeft(a, "-")
		if value, ok := strings.CutPrefix(a, "-"+name+"="); ok {
			return value, true
		}
		if a == "-"+name {
			if i+2 < len(p.args) && !strings.HasPrefix(p.args[i+2], "-") {
				return p.args[i+2], true
			}
			return "true", true
		}
	}
	return "", false
}

// readProcesses finds the kube-proxy and dockerd processes.
func readProcesses(root string) []process {
	paths, _ := filepath.Glob(filepath.Join(root, "proc/[0-9]*/cmdline"))
	var out []process
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || len(data) == 0 {
			continue
		}
		p := process{filepath.Base(filepath.Dir(path)), strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")}
		if n := p.name(); n == "kube-proxy" || n == "dockerd" {
			out = append(out, p)
		}
	}
	return out
}

// kubeProxy is what kube-proxy writes when it starts: its conntrack settings, by
// flag or configuration file, otherwise its defaults; 0 leaves one alone. (It also
// enlarges the hash to a quarter of the limit, but makes it never smaller.)
func kubeProxy(root string, processes []process, cpus int) []snapshot.Owner {
	i := slices.IndexFunc(processes, func(p process) bool { return p.name() == "kube-proxy" })
	if i < 0 {
		return nil
	}
	p := processes[i]
	where := "process " + p.pid + " (kube-proxy)"
	var file map[string]string
	if path, ok := p.flag("config"); ok {
		where += ", " + path
		// The path is meant inside of its container.
		path = filepath.Join(root, "proc", p.pid, "root", filepath.Clean("/"+path))
		if _, err := os.Stat(path); err == nil {
			file = yamlSection(path, "conntrack")
		}
	}
	get := func(flag, key, otherwise string) string {
		if file != nil { // then the flags do not count
			return cmp.Or(file[key], otherwise)
		}
		v, _ := p.flag(flag)
		return cmp.Or(v, otherwise)
	}

	var out ownerList
	put := func(setting, value string) {
		out.put(snapshot.Owner{Setting: "net.netfilter." + setting, Value: value, Who: "kube-proxy", Where: where})
	}
	perCore, _ := strconv.ParseUint(get("conntrack-max-per-core", "maxPerCore", "32768"), 10, 32)
	least, _ := strconv.ParseUint(get("conntrack-min", "min", "131072"), 10, 32)
	if limit := max(perCore*uint64(cpus), least); perCore > 0 && limit > 0 {
		put("nf_conntrack_max", strconv.FormatUint(limit, 10))
	}
	for _, t := range []struct{ flag, key, otherwise, setting string }{
		{"conntrack-tcp-timeout-established", "tcpEstablishedTimeout", "24h", "nf_conntrack_tcp_timeout_established"},
		{"conntrack-tcp-timeout-close-wait", "tcpCloseWaitTimeout", "1h", "nf_conntrack_tcp_timeout_close_wait"},
		{"conntrack-udp-timeout", "udpTimeout", "0s", "nf_conntrack_udp_timeout"},
		{"conntrack-udp-timeout-stream", "udpStreamTimeout", "0s", "nf_conntrack_udp_timeout_stream"},
	} {
		if d, err := time.ParseDuration(get(t.flag, t.key, t.otherwise)); err == nil && d > 0 {
			put(t.setting, strconv.Itoa(int(d.Seconds())))
		}
	}
	if get("conntrack-tcp-be-liberal", "tcpBeLiberal", "false") == "true" {
		put("nf_conntrack_tcp_be_liberal", "1")
	}
	return out
}

// yamlSection reads the "key: value" lines of one top-level section of a YAML
// file: as much of YAML as kube-proxy's configuration has there.
func yamlSection(path, section string) map[string]string {
	out := map[string]string{}
	inside := false
	forLines(path, func(_ int, line string) {
		line, _, _ = strings.Cut(line, " #")
		key, value, ok := strings.Cut(line, ":")
		if line != "" && line[0] != ' ' && line[0] != '\t' && line[0] != '#' {
			inside = ok && key == section
			return
		}
		value = strings.Trim(strings.TrimSpace(value), `"'`)
		if key = strings.TrimSpace(key); inside && ok && value != "" && value != "null" {
			out[key] = value
		}
	})
	return out
}

// docker is what dockerd may write when it starts or makes a network.
func docker(root string, processes []process) []snapshot.Owner {
	i := slices.IndexFunc(processes, func(p process) bool { return p.name() == "dockerd" })
	if i < 0 {
		return nil
	}
	p := processes[i]
	path := "/etc/docker/daemon.json"
	if given, ok := p.flag("config-file"); ok {
		path = filepath.Clean("/" + given)
	}
	var config struct {
		IPForward *bool `json:"ip-forward"`
		IPTables  *bool `json:"iptables"`
	}
	if data, err := os.ReadFile(filepath.Join(root, path)); err == nil {
		_ = json.Unmarshal(data, &config) // dockerd would not run with a broken one
	}
	on := func(name string, configured *bool) bool {
		if v, ok := p.flag(name); ok {
			return v != "false"
		}
		return configured == nil || *configured
	}
	var out ownerList
	put := func(setting string) {
		out.put(snapshot.Owner{Setting: setting, Value: "1", Who: "docker", Where: "process " + p.pid + " (dockerd)"})
	}
	if on("ip-forward", config.IPForward) {
		put("net.ipv4.ip_forward")
	}
	if on("iptables", config.IPTables) {
		put("net.bridge.bridge-nf-call-iptables")
		put("net.bridge.bridge-nf-call-ip6tables")
	}
	return out
}

// ownerList keeps one owner a setting and kind: the last one put. natkit's own
// file hides nobody.
type ownerList []snapshot.Owner

func (l *ownerList) put(o snapshot.Owner) {
	*l = slices.DeleteFunc(*l, func(x snapshot.Owner) bool { return x.Who == o.Who && x.Setting == o.Setting })
	*l = append(*l, o)
}

// forLines calls fn with the number and text of each line of a file; a file that
// can't be read has none, and one that is no text ends where that shows.
func forLines(path string, fn func(n int, line string)) {
	if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() { // opening a pipe would wait
		return
	}
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for n := 1; sc.Scan(); n++ {
		fn(n, sc.Text())
	}
}
