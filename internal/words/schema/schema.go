// SPDX-License-Identifier: Apache-2.0

// Package schema is the first field of every JSON object that natkit writes, which says what
// the object is: "schema": "natkit/doctor/1". docs/json.md is the contract.
package schema

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Key is the field's name.
const Key = "schema"

const program = "natkit"

// Name is the value for a kind of object in a version.
func Name(kind string, version int) string { return fmt.Sprintf("%s/%s/%d", program, kind, version) }

// Parse takes a Name apart.
func Parse(name string) (kind string, version int, ok bool) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 || parts[0] != program || parts[1] == "" {
		return "", 0, false
	}
	version, err := strconv.Atoi(parts[2])
	return parts[1], version, err == nil && version > 0
}

// Of is what a JSON object says it is, "" where it says nothing. An error is that of
// package json. Where the object says it first, as natkit's do, nothing after that is read: only
// then is what follows JSON for all that Of knows.
func Of(object []byte) (string, error) {
	d := json.NewDecoder(bytes.NewReader(object))
	if begin, _ := d.Token(); begin == json.Delim('{') {
		if key, _ := d.Token(); key == Key {
			value, _ := d.Token()
			if name, ok := value.(string); ok {
				return name, nil
			}
		}
	}
	var head struct {
		Schema string `json:"schema"`
	}
	err := json.Unmarshal(object, &head)
	return head.Schema, err
}

// Put returns a JSON object, compact or indented, with the name as its first field.
func Put(name string, object []byte) []byte {
	rest, _ := bytes.CutPrefix(object, []byte("{"))
	body := bytes.TrimLeft(rest, " \n")
	space := rest[:len(rest)-len(body)]
	out := make([]byte, 0, len(object)+len(space)+len(Key)+len(name)+len(`"":"",: `))
	out = append(append(out, '{'), space...)
	out = append(strconv.AppendQuote(out, Key), ':')
	if len(space) > 0 {
		out = append(out, ' ')
	}
	out = strconv.AppendQuote(out, name)
	if !bytes.HasPrefix(body, []byte("}")) {
		out = append(out, ',')
	}
	return append(append(out, space...), body...)
}
