// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// persistName is the file that natkit writes below /etc, in sysctl.d. It is read
// at boot after most others. Settings of devices are in udevName, in udev/rules.d:
// udev sets them whenever the device appears or gets its name.
const (
	persistName = "90-natkit.conf"
	udevName    = "90-natkit.rules"
)

// persistHeader begins either file, and shows that it is natkit's.
const persistHeader = `# Written by "natkit tune apply --persist"; "natkit tune rollback" undoes it.
# Keep your own settings in another file: natkit overwrites this one.
`

const persistModule = `#
# The settings of net.netfilter exist once the module nf_conntrack is loaded. Where
# nothing loads it before sysctl.d is read at boot, these lines do nothing: then put
# the line "nf_conntrack" into a file in /etc/modules-load.d.
`

// persistFile is one of the two.
type persistFile struct {
	path   string
	device bool // it holds the settings of devices, and no other
}

// text is the content of the file for these changes.
func (f persistFile) text(changes []Change) string {
	var b strings.Builder
	b.WriteString(persistHeader)
	if slices.ContainsFunc(changes, func(c Change) bool { return strings.HasPrefix(c.Setting, "net.netfilter.") }) {
		b.WriteString(persistModule)
	}
	for _, c := range changes {
		if f.device { // the comment is what is read back
			fmt.Fprintf(&b, "%s%s = %s\n%s\n", devicePrefix, c.Setting, c.New, udevRule(c.Setting, c.New))
		} else {
			fmt.Fprintf(&b, "%s = %s\n", c.Setting, c.New)
		}
	}
	return b.String()
}

const devicePrefix = "# setting: "

// udevRule sets a device's setting when it appears, or is given its name.
func udevRule(setting, value string) string {
	device, key := deviceOf(setting)
	run := func(script string) string { return fmt.Sprintf(`RUN+="/bin/sh -c '%s'"`, script) }
	var what string
	switch key {
	case "rps_cpus":
		if masks := strings.Fields(value); len(masks) > 1 {
			var each []string
			for n, mask := range masks {
				each = append(each, fmt.Sprintf("echo %s > /sys/class/net/%s/"+rpsFiles, mask, device, n))
			}
			what = run(strings.Join(each, "; "))
		} else {
			what = run(fmt.Sprintf("for q in /sys/class/net/%s/queues/rx-*/rps_cpus; do echo %s > $$q; done", device, value))
		}
	case "rx_ring":
		what = run(fmt.Sprintf("ethtool -G %s rx %s", device, value))
	case "combined_channels":
		what = run(fmt.Sprintf("ethtool -L %s combined %s", device, value))
	case "rx_checksum":
		what = run(fmt.Sprintf("ethtool -K %s rx %s", device, map[string]string{"0": "off", "1": "on"}[value]))
	default:
		what = fmt.Sprintf("ATTR{%s}=%q", key, value)
	}
	return fmt.Sprintf(`ACTION=="add|move", SUBSYSTEM=="net", KERNEL=="%s", %s`, device, what)
}

// read reads the file back: setting and New of each change. It refuses a file that
// is not natkit's.
func (f persistFile) read() ([]Change, error) {
	text, err := readFile(f.path)
	if err != nil || text == nil {
		return nil, err
	}
	if !strings.HasPrefix(*text, persistHeader) {
		return nil, fmt.Errorf("%s was not written by natkit: move it away, or keep its settings under another name", f.path)
	}
	return f.parse(*text)
}

// parse reads what text wrote.
func (f persistFile) parse(text string) ([]Change, error) {
	var out []Change
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if f.device {
			rest, ok := strings.CutPrefix(line, devicePrefix)
			if !ok {
				continue
			}
			line = rest
		}
		name, value, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		k, err := find(strings.TrimSpace(name))
		if err == nil {
			value, err = k.value(value)
		}
		if err == nil && isDevice(k.name) != f.device {
			err = fmt.Errorf("setting %q: not one for this file", k.name)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.path, err)
		}
		out = append(out, Change{Setting: k.name, New: value})
	}
	return out, nil
}

// persistent is what the files should hold, as far as they do not: what they hold,
// then what natkit has applied to the initial namespace since boot and what still
// stands, then the new changes.
func persistent(p Place, accounts []*account, initial *space, added []Change) ([]*fileChange, error) {
	var out []*fileChange
	for _, f := range p.files() {
		c, err := f.change(accounts, initial, added)
		if err != nil {
			return nil, err
		}
		if c != nil {
			out = append(out, c)
		}
	}
	return out, nil
}

func (f persistFile) change(accounts []*account, initial *space, added []Change) (*fileChange, error) {
	old, err := readFile(f.path)
	if err != nil {
		return nil, err
	}
	list, err := f.read()
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	for _, c := range added {
		if !canPersist(c.Setting) {
			return nil, fmt.Errorf("setting %q: the interface's name has characters that udev, sysctl.d or a shell would read as something else at boot: rename the interface, or apply without --persist", c.Setting)
		}
	}
	put := func(c Change) {
		i := slices.IndexFunc(list, func(x Change) bool { return x.Setting == c.Setting })
		switch {
		case isDevice(c.Setting) != f.device:
		case i < 0:
			list = append(list, c)
		default:
			list[i] = c
		}
	}
	for _, a := range accounts {
		for _, s := range a.sets {
			if a.State != StateApplied || a.boot != boot || !s.Initial {
				continue
			}
			k, err := find(s.Setting)
			if err != nil {
				return nil, err
			}
			if !canPersist(s.Setting) {
				continue // nobody asked for it in a file
			}
			if present, err := initial.read(s.Setting); err == nil && k.took(present, s.New) {
				put(s.Change)
			}
		}
	}
	for _, c := range added {
		put(c)
	}
	inOrder(list)
	text := f.text(list)
	if len(list) == 0 || (old != nil && *old == text) {
		return nil, nil
	}
	return &fileChange{Path: f.path, Old: old, New: text}, nil
}

// canPersist says whether a setting's name means itself in the files, whose patterns and programs other characters
// are: an interface may be called almost anything.
func canPersist(setting string) bool {
	return !strings.ContainsFunc(setting, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_./-@+", r))
	})
}

// readFile returns a file's content, nil when it is not there.
func readFile(path string) (*string, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read file of settings: %w", err)
	}
	text := string(data)
	return &text, nil
}

// temporarySuffix ends the name of a file that is being written: not *.conf or *.rules, so
// that half of one is never read at boot.
const temporarySuffix = ".new"

// writeFile puts a file into place as a whole, or takes it away where text is
// nil: at no moment is half of it there.
func writeFile(path string, text *string) error {
	dir := filepath.Dir(path)
	if text == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove file of settings: %w", err)
		}
		return syncDir(dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make folder for settings: %w", err)
	}
	temporary := path + temporarySuffix
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return fmt.Errorf("write file of settings: %w", err)
	}
	_, err = f.WriteString(*text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return fmt.Errorf("write file of settings: %w", err)
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}
