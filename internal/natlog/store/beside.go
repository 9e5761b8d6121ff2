// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"natkit/internal/words/schema"
)

// Beside is a JSON file in the folder of the log that is written again and again, whole each time.
type Beside struct {
	Name    string
	Kind    string // of its schema
	Version int
}

// What Beside.Read finds wrong with a file.
var (
	ErrNewer   = errors.New("of a newer natkit: use that")
	ErrDamaged = errors.New("damaged")
)

// Read reads the file into a pointer. Errors are fs.ErrNotExist, ErrNewer and ErrDamaged.
func (f Beside) Read(dir string, into any) error {
	path := filepath.Join(dir, f.Name)
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	name, err := schema.Of(b)
	if kind, version, ok := schema.Parse(name); err == nil && ok && kind == f.Kind && version > f.Version {
		return fmt.Errorf("%s is %w", path, ErrNewer)
	}
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	if err != nil {
		return fmt.Errorf("%s is %w", path, ErrDamaged)
	}
	return nil
}

// Write puts the file in its place.
func (f Beside) Write(dir string, value any) error {
	b, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, f.Name)
	draft := path + ".new"
	err = os.WriteFile(draft, append(schema.Put(schema.Name(f.Kind, f.Version), b), '\n'), 0o600)
	if err == nil {
		err = os.Rename(draft, path)
	}
	if err != nil {
		os.Remove(draft) // if it was made
	}
	return err
}
