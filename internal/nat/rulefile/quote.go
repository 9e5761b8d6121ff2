// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"strconv"
	"strings"
)

// quoteName writes an interface's or pool's name so that YAML reads it as a string
// again.
func quoteName(name string) string {
	plain := strings.IndexFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' || r == '.')
	}) < 0
	if _, err := strconv.ParseFloat(name, 64); name == "" || plain && err != nil && !strings.HasPrefix(name, "-") && !reserved[strings.ToLower(name)] {
		return name
	}
	return strconv.Quote(name)
}

// reserved words are not strings in YAML.
var reserved = map[string]bool{"true": true, "false": true, "null": true, "yes": true, "no": true, "on": true, "off": true, "y": true, "n": true, "~": true}
