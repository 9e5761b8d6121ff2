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
	// Lasts: a power failure leaves the file of now or of before. Without it, it may leave an empty one.
	Lasts bool
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
	return writeWhole(filepath.Join(dir, f.Name), string(schema.Put(schema.Name(f.Kind, f.Version), b))+"\n", f.Lasts)
}

// writeWhole has a file in its place, whole or not at all; lasts: after a power failure, too.
func writeWhole(path, text string, lasts bool) error {
	draft := path + ".draft"
	f, err := os.OpenFile(draft, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if lasts {
		err = errors.Join(err, syncFile(f))
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(draft, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(draft))
	}
	return nil
}

// syncFile is a variable for tests.
var syncFile = (*os.File).Sync
