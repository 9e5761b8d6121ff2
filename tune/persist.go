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

// persistName is the one file that natkit writes below /etc, in sysctl.d. It is
// read at boot after most others.
const persistName = "90-natkit.conf"

// persistHeader begins the file, and shows that it is natkit's.
const persistHeader = `# Written by "natkit tune apply --persist"; "natkit tune rollback" takes it back.
# Keep settings of your own in a file of your own: this one is written as a whole.
`

const persistModule = `#
# The settings of net.netfilter exist once the module nf_conntrack is loaded. Where
# nothing loads it before sysctl.d is read at boot, these lines do nothing: then put
# the line "nf_conntrack" into a file in /etc/modules-load.d.
`

// persistText is the content of the file for these changes.
func persistText(changes []Change) string {
	var b strings.Builder
	b.WriteString(persistHeader)
	if slices.ContainsFunc(changes, func(c Change) bool { return strings.HasPrefix(c.Setting, "net.netfilter.") }) {
		b.WriteString(persistModule)
	}
	for _, c := range changes {
		fmt.Fprintf(&b, "%s = %s\n", c.Setting, c.New)
	}
	return b.String()
}

// readPersistent reads the file back: setting and New of each change. It refuses
// a file that is not natkit's.
func readPersistent(path string) ([]Change, error) {
	text, err := readFile(path)
	if err != nil || text == nil {
		return nil, err
	}
	if !strings.HasPrefix(*text, persistHeader) {
		return nil, fmt.Errorf("%s was not written by natkit: move it away, or keep its settings under another name", path)
	}
	var out []Change
	for line := range strings.Lines(*text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		k, err := find(strings.TrimSpace(name))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if value, err = k.value(value); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		out = append(out, Change{Setting: k.name, New: value})
	}
	return out, nil
}

// persistent is what the file should hold: what it holds, then what natkit has
// applied to the initial namespace since boot and what still stands, then the
// new changes.
func persistent(p Place, accounts []*account, initial *space, added []Change) (*fileChange, error) {
	path := p.file()
	old, err := readFile(path)
	if err != nil {
		return nil, err
	}
	list, err := readPersistent(path)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	put := func(c Change) {
		i := slices.IndexFunc(list, func(x Change) bool { return x.Setting == c.Setting })
		if i < 0 {
			list = append(list, c)
		} else {
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
			if present, err := initial.read(s.Setting); err == nil && k.took(present, s.New) {
				put(s.Change)
			}
		}
	}
	for _, c := range added {
		put(c)
	}
	inOrder(list)
	text := persistText(list)
	if len(list) == 0 || (old != nil && *old == text) {
		return nil, nil
	}
	return &fileChange{Path: path, Old: old, New: text}, nil
}

// readFile returns a file's content, nil when it is not there.
func readFile(path string) (*string, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read sysctl.d file: %w", err)
	}
	text := string(data)
	return &text, nil
}

// writeFile puts a file into place as a whole, or takes it away where text is
// nil: at no moment is half of it there.
func writeFile(path string, text *string) error {
	dir := filepath.Dir(path)
	if text == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove sysctl.d file: %w", err)
		}
		return syncDir(dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make sysctl.d: %w", err)
	}
	temporary := path + ".new" // not *.conf: never read at boot
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return fmt.Errorf("write sysctl.d file: %w", err)
	}
	_, err = f.WriteString(*text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return fmt.Errorf("write sysctl.d file: %w", err)
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
