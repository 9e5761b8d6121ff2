// SPDX-License-Identifier: Apache-2.0

package ktest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"natkit/internal/words/schema"
)

// Schemas are those of docs/schema, by what their objects say of themselves. They are stricter
// than the files: a field that these do not name is an error.
type Schemas map[string]*jsonschema.Schema

// ReadSchemas reads them.
func ReadSchemas(t testing.TB) Schemas {
	t.Helper()
	top, _ := packageDir()
	paths, err := filepath.Glob(filepath.Join(top, "docs/schema/*.json"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("docs/schema: %d files, %v", len(paths), err)
	}
	out := Schemas{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var head struct {
			Properties struct {
				Schema struct {
					Const string `json:"const"`
				} `json:"schema"`
			} `json:"properties"`
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err := errors.Join(err, json.Unmarshal(text, &head)); err != nil || head.Properties.Schema.Const == "" {
			t.Fatalf("%s: of %q, %v", path, head.Properties.Schema.Const, err)
		}
		closeObjects(doc)
		c := jsonschema.NewCompiler()
		c.AssertFormat()
		if err := c.AddResource(path, doc); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if out[head.Properties.Schema.Const], err = c.Compile(path); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	return out
}

// closeObjects makes a schema refuse fields that it does not name.
func closeObjects(node any) {
	switch n := node.(type) {
	case map[string]any:
		if _, ok := n["properties"].(map[string]any); ok && n["type"] == "object" {
			n["additionalProperties"] = false
		}
		for _, below := range n {
			closeObjects(below)
		}
	case []any:
		for _, below := range n {
			closeObjects(below)
		}
	}
}

// Check validates all objects of an output and returns their schemas.
func (v Schemas) Check(t testing.TB, what string, output []byte) (names []string) {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(output))
	for {
		var object json.RawMessage
		if err := dec.Decode(&object); errors.Is(err, io.EOF) {
			return names
		} else if err != nil {
			t.Errorf("%s: %v\n%s", what, err, output)
			return names
		}
		name, err := schema.Of(object)
		if head := string(bytes.TrimLeft(bytes.TrimPrefix(object, []byte("{")), " \n")); err != nil || !strings.HasPrefix(head, `"`+schema.Key+`"`) {
			t.Errorf("%s: its first field is not its schema (%v)\n%.200s", what, err, object)
			continue
		}
		names = append(names, name)
		kind := v[name]
		if kind == nil {
			t.Errorf("%s: %q has no file in docs/schema", what, name)
			continue
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(object))
		if err == nil {
			err = kind.Validate(value)
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
