// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// owners finds who besides natkit sets a setting: they may write it back.
func owners(opts Options) source {
	return source{
		name:  snapshot.CanOwners,
		costs: "a plan does not show who else sets a setting",
		end: func(v *view, s *snapshot.Snapshot) error {
			if _, err := os.Stat(filepath.Join(v.root, "etc")); err != nil {
				return err
			}
			read := func() []snapshot.Owner { return readOwners(v.root, cmp.Or(s.Host.CPUs, runtime.NumCPU())) }
			if opts.shared != nil {
				s.Owners = opts.shared.ownersOf(read)
			} else {
				s.Owners = read()
			}
			return nil
		},
	}
}

// readOwners finds who besides natkit sets settings below net on this machine:
// sysctl.d files, a tuned profile, kube-proxy, alone or inside of k3s, Docker,
// and what configures firewall and interfaces (ownersnet.go). For each of them it
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
		k3s(root, processes, cpus),
		docker(root, processes),
		ufw(root),
		firewalld(root, processes),
		networkManager(root, processes),
		networkd(root, processes),
	)
}

// sysctlDirs are searched by systemd-sysctl and sysctl --system. Of two files
// with one name only that in the earlier directory counts.
var sysctlDirs = []string{"etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d", "lib/sysctl.d"}

// sysctlFiles reads what is set at boot. The files are applied in the order of
// their names, whatever their directory, and /etc/sysctl.conf at the end; the last
// one to name a setting wins.
func sysctlFiles(root string) []snapshot.Owner {
	var paths []string
	forFiles(root, sysctlDirs, ".conf", func(path string) { paths = append(paths, path) })
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
			out.put(snapshot.Owner{Setting: name, Value: value, Who: who, Where: place("/"+path, n)})
		})
	}
	return out
}

// place names a line of a file.
func place(path string, line int) string { return path + ":" + strconv.Itoa(line) }

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
						own = append(own, snapshot.Owner{Setting: name, Value: value, Who: "tuned", Where: place("/"+path, n)})
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

// name is the program's name, whether it is a binary, a script that Python runs,
// or has written a line of its own where its arguments were ("/usr/bin/k3s server").
func (p process) name() string {
	first := strings.Fields(p.args[0])
	if len(first) == 0 {
		return ""
	}
	name := filepath.Base(first[0])
	if strings.HasPrefix(name, "python") {
		for _, a := range p.args[1:] {
			if !strings.HasPrefix(a, "-") {
				return filepath.Base(a)
			}
		}
	}
	return name
}

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

// readProcesses finds the processes that own settings, or are asked what they do.
func readProcesses(root string) []process {
	paths, _ := filepath.Glob(filepath.Join(root, "proc/[0-9]*/cmdline"))
	var out []process
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || len(data) == 0 {
			continue
		}
		p := process{filepath.Base(filepath.Dir(path)), strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")}
		switch p.name() {
		case "kube-proxy", "k3s", "rke2", "dockerd", "firewalld", "NetworkManager", "systemd-networkd":
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
		if f, err := openInside(root, p.pid, path); err == nil {
			file = yamlSection(f, "conntrack")
			f.Close()
		}
	}
	get := func(flag, key, otherwise string) string {
		if file != nil { // then the flags do not count
			return cmp.Or(file[key], otherwise)
		}
		v, _ := p.flag(flag)
		return cmp.Or(v, otherwise)
	}
	return kubeProxySettings("kube-proxy", where, cpus, get)
}

// kubeProxySettings is what the conntrack part of kube-proxy's configuration comes
// to; get gives it by flag or by key.
func kubeProxySettings(who, where string, cpus int, get func(flag, key, otherwise string) string) []snapshot.Owner {
	var out ownerList
	put := func(setting, value string) {
		out.put(snapshot.Owner{Setting: "net.netfilter." + setting, Value: value, Who: who, Where: where})
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

// conntrackArg is an argument for the kube-proxy inside of k3s, wherever it stands:
// a line of YAML, of a unit file, or the command line.
var conntrackArg = regexp.MustCompile(`(conntrack-[a-z-]+)=([0-9a-z]+)`)

// k3s is what k3s, or RKE2 which is made of it, writes when it starts: forwarding,
// bridged frames to the rules, and in the place of the kube-proxy inside of it the
// conntrack settings of that. It hides its arguments from others, so that its
// configuration and its unit are read.
func k3s(root string, processes []process, cpus int) []snapshot.Owner {
	i := slices.IndexFunc(processes, func(p process) bool {
		words := strings.Fields(strings.Join(p.args, " "))
		return (p.name() == "k3s" || p.name() == "rke2") && len(words) > 1 && (words[1] == "server" || words[1] == "agent")
	})
	if i < 0 {
		return nil
	}
	p := processes[i]
	who := p.name()
	where := "process " + p.pid + " (" + who + ")"
	given := map[string]string{}
	note := func(line string) {
		if strings.HasPrefix(strings.TrimSpace(line), "#") {
			return
		}
		for _, m := range conntrackArg.FindAllStringSubmatch(line, -1) {
			given[m[1]] = m[2]
		}
	}
	files := []string{"etc/rancher/" + who + "/config.yaml"}
	more, _ := filepath.Glob(filepath.Join(escapeGlob(root), "etc/rancher/"+who+"/config.yaml.d/*.yaml"))
	for _, path := range more {
		files = append(files, strings.TrimPrefix(path, root))
	}
	for _, unit := range []string{who, who + "-server", who + "-agent"} {
		files = append(files, "etc/systemd/system/"+unit+".service")
	}
	for _, path := range files {
		known := len(given)
		forLines(filepath.Join(root, path), func(_ int, line string) { note(line) })
		if len(given) > known {
			where += ", " + filepath.Clean("/"+path)
		}
	}
	note(strings.Join(p.args, " "))

	var out ownerList
	for _, setting := range []string{"net.ipv4.conf.all.forwarding", "net.ipv4.conf.default.forwarding", "net.bridge.bridge-nf-call-iptables"} {
		out.put(snapshot.Owner{Setting: setting, Value: "1", Who: who, Where: where})
	}
	return append(out, kubeProxySettings(who, where, cpus, func(flag, _, otherwise string) string { return cmp.Or(given[flag], otherwise) })...)
}

// yamlSection reads the "key: value" lines of one top-level section of a YAML
// file: as much of YAML as kube-proxy's configuration has there.
func yamlSection(file io.Reader, section string) map[string]string {
	out := map[string]string{}
	inside := false
	linesOf(file, func(_ int, line string) {
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
		Proxy     *bool `json:"userland-proxy"`
	}
	if f, err := openRegular(filepath.Join(root, path)); err == nil {
		_ = json.NewDecoder(io.LimitReader(f, maxFile)).Decode(&config) // dockerd would not run with a broken one
		f.Close()
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
		if !on("userland-proxy", config.Proxy) { // published ports on 127.0.0.1 are then translated
			put("net.ipv4.conf.docker0.route_localnet")
			put("net.ipv4.conf.br-*.route_localnet")
		}
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
	if f, err := openRegular(path); err == nil {
		linesOf(f, fn)
		f.Close()
	}
}

func linesOf(file io.Reader, fn func(n int, line string)) {
	sc := bufio.NewScanner(io.LimitReader(file, maxFile))
	for n := 1; sc.Scan(); n++ {
		fn(n, sc.Text())
	}
}

var errNotRegular = errors.New("not a regular file")

// openRegular opens a regular file. Anybody may have named it, by the arguments of a process: to open a pipe would wait,
// a device may have no end, and some do something when they are opened.
func openRegular(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return reopenRegular(fd)
}

// reopenRegular opens the file of a descriptor of O_PATH, which it closes, to read it, if it is a regular one.
func reopenRegular(fd int) (*os.File, error) {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, cmp.Or(err, errNotRegular)
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", fd)) // the same file, whatever its path leads to by now
}

// openInside opens a regular file by the path that it has for a process, which may be in a container: no link leads out of it.
func openInside(root, pid, path string) (*os.File, error) {
	inside, err := unix.Open(filepath.Join(root, "proc", pid, "root"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(inside)
	fd, err := unix.Openat2(inside, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil, err
	}
	return reopenRegular(fd)
}
