// SPDX-License-Identifier: Apache-2.0

package probe

// Owners of settings that configure firewall and interfaces. Each writes what it
// is told to when it starts, or when an interface comes up.

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"natkit/internal/snapshot"
)

// forwards is the setting by which these let packets through.
const forwards = "net.ipv4.ip_forward"

// running finds a program among the processes that own settings.
func running(processes []process, name string) (pid string, ok bool) {
	i := slices.IndexFunc(processes, func(p process) bool { return p.name() == name })
	if i < 0 {
		return "", false
	}
	return processes[i].pid, true
}

// ufw has a file in the manner of sysctl.d, which it applies when it starts.
func ufw(root string) []snapshot.Owner {
	enabled, file := false, ""
	forLines(filepath.Join(root, "etc/ufw/ufw.conf"), func(_ int, line string) {
		enabled = enabled || strings.TrimSpace(line) == "ENABLED=yes"
	})
	forLines(filepath.Join(root, "etc/default/ufw"), func(_ int, line string) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "IPT_SYSCTL="); ok {
			file = strings.Trim(value, `"'`)
		}
	})
	if !enabled || file == "" {
		return nil
	}
	file = filepath.Clean("/" + file)
	var out ownerList
	forLines(filepath.Join(root, file), func(n int, line string) {
		if name, value, ok := sysctlLine(line); ok {
			out.put(snapshot.Owner{Setting: name, Value: value, Who: "ufw", Where: place(file, n)})
		}
	})
	return out
}

// firewalldForwards is what makes firewalld switch forwarding on, in a zone or a
// policy: masquerading, or a port that leads to another address.
var firewalldForwards = regexp.MustCompile(`<masquerade\b|\bto-addr=`)

func firewalld(root string, processes []process) []snapshot.Owner {
	if _, ok := running(processes, "firewalld"); !ok {
		return nil
	}
	for _, dir := range []string{"etc/firewalld/zones", "etc/firewalld/policies"} {
		files, _ := filepath.Glob(filepath.Join(escapeGlob(filepath.Join(root, dir)), "*.xml"))
		for _, file := range files {
			line := 0
			forLines(file, func(n int, text string) {
				if line == 0 && firewalldForwards.MatchString(text) {
					line = n
				}
			})
			if line > 0 {
				return []snapshot.Owner{{Setting: forwards, Value: "1", Who: "firewalld", Where: place("/"+dir+"/"+filepath.Base(file), line)}}
			}
		}
	}
	return nil
}

// networkManager forwards for connections that it shares with others, and for
// those told to.
func networkManager(root string, processes []process) []snapshot.Owner {
	if _, ok := running(processes, "NetworkManager"); !ok {
		return nil
	}
	var out ownerList
	forFiles(root, []string{"etc/NetworkManager/system-connections", "run/NetworkManager/system-connections", "usr/lib/NetworkManager/system-connections"},
		".nmconnection", func(path string) {
			device := "*"
			var found ownerList
			forSettings(filepath.Join(root, path), func(n int, section, key, value string) {
				put := func(setting, value string) {
					found.put(snapshot.Owner{Setting: setting, Value: value, Who: "NetworkManager", Where: place("/"+path, n)})
				}
				switch {
				case section == "connection" && key == "interface-name":
					device = value
				case section == "ipv4" && key == "method" && value == "shared":
					put(forwards, "1")
				case section == "ipv4" && key == "forwarding":
					if on, ok := map[string]string{"yes": "1", "1": "1", "no": "0", "0": "0"}[value]; ok {
						put("net.ipv4.conf.*.forwarding", on)
					}
				}
			})
			for _, o := range found {
				if o.Setting != forwards { // the interface may stand after it
					o.Setting = snapshot.SysctlName("net", "ipv4", "conf", device, "forwarding")
				}
				out.put(o)
			}
		})
	return out
}

// networkd sets what the [Network] sections of its .network files say for the
// interfaces that match, and what networkd.conf says for all.
func networkd(root string, processes []process) []snapshot.Owner {
	if _, ok := running(processes, "systemd-networkd"); !ok {
		return nil
	}
	dirs := []string{"etc/systemd/network", "run/systemd/network", "usr/local/lib/systemd/network", "usr/lib/systemd/network", "lib/systemd/network"}
	var out ownerList
	own := func(setting, value, where string) {
		if value != "" {
			out.put(snapshot.Owner{Setting: setting, Value: value, Who: "systemd-networkd", Where: where})
		}
	}
	forSettings(filepath.Join(root, "etc/systemd/networkd.conf"), func(n int, section, key, value string) {
		where := place("/etc/systemd/networkd.conf", n)
		switch {
		case section == "Network" && key == "IPv4Forwarding":
			own(forwards, boolean(value), where)
		case section == "Network" && key == "IPv6Forwarding":
			own("net.ipv6.conf.all.forwarding", boolean(value), where)
		}
	})
	forFiles(root, dirs, ".network", func(path string) {
		names := []string{"*"}
		read := func(path string) {
			forSettings(filepath.Join(root, path), func(n int, section, key, value string) {
				if section+"."+key != "Match.Name" {
					networkSetting(section+"."+key, value, names, func(setting, value string) { own(setting, value, place("/"+path, n)) })
				} else if !strings.HasPrefix(value, "!") && value != "" { // it comes first, as systemd's own documentation has it
					names = strings.Fields(value)
				}
			})
		}
		read(path)
		var dropIns []string
		for _, dir := range dirs {
			dropIns = append(dropIns, filepath.Join(dir, filepath.Base(path)+".d"))
		}
		forFiles(root, dropIns, ".conf", read)
	})
	return out
}

// networkSetting gives the sysctls that a key of a .network file sets on the interfaces of these names.
func networkSetting(key, value string, names []string, own func(setting, value string)) {
	each := func(family, setting, value string) {
		for _, name := range names {
			own(snapshot.SysctlName("net", family, "conf", name, setting), value)
		}
	}
	switch key {
	case "Network.IPForward": // until systemd 255, for all interfaces
		if on := boolean(value); on == "1" || value == "ipv4" {
			own(forwards, "1")
		}
		if on := boolean(value); on == "1" || value == "ipv6" {
			own("net.ipv6.conf.all.forwarding", "1")
		}
	case "Network.IPMasquerade":
		if on := boolean(value); on == "1" || value == "ipv4" || value == "both" {
			each("ipv4", "forwarding", "1")
		}
	case "Network.IPv4Forwarding":
		each("ipv4", "forwarding", boolean(value))
	case "Network.IPv6Forwarding":
		each("ipv6", "forwarding", boolean(value))
	case "Network.IPv4ReversePathFilter":
		each("ipv4", "rp_filter", map[string]string{"no": "0", "strict": "1", "loose": "2"}[value])
	case "Network.IPv4RouteLocalnet":
		each("ipv4", "route_localnet", boolean(value))
	case "Network.IPv4AcceptLocal":
		each("ipv4", "accept_local", boolean(value))
	}
}

// boolean is "1" or "0" for what systemd takes for one, "" for anything else.
func boolean(text string) string {
	switch strings.ToLower(text) {
	case "1", "yes", "y", "true", "t", "on":
		return "1"
	case "0", "no", "n", "false", "f", "off":
		return "0"
	}
	return ""
}

// forFiles calls fn with each file of these folders that ends so, in the order of
// their names; of two with one name only that in the earlier folder counts.
func forFiles(root string, dirs []string, suffix string, fn func(path string)) {
	files := map[string]string{}
	for _, dir := range dirs {
		entries, _ := os.ReadDir(filepath.Join(root, dir))
		for _, e := range entries {
			if _, taken := files[e.Name()]; !taken && strings.HasSuffix(e.Name(), suffix) {
				files[e.Name()] = filepath.Join(dir, e.Name())
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fn(files[name])
	}
}

// forSettings calls fn with each "key=value" of a file with [sections].
func forSettings(path string, fn func(n int, section, key, value string)) {
	section := ""
	forLines(path, func(n int, line string) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			section = strings.Trim(line, "[]")
			return
		}
		key, value, ok := strings.Cut(line, "=")
		if ok && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ";") {
			fn(n, section, strings.TrimSpace(key), strings.TrimSpace(value))
		}
	})
}
