// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Rules of nftables as nft list prints them, made of their JSON.

func statementText(word string, arg any) string {
	a := object(arg)
	switch word {
	case "match":
		return matchText(a)
	case "counter", "quota", "limit":
		if name, ok := arg.(string); ok {
			return word + " name " + quote(name)
		}
		switch {
		case word == "limit":
			return limitText(a)
		case word == "quota":
			return quotaText(a)
		case a == nil:
			return "counter"
		}
		return fmt.Sprintf("counter packets %s bytes %s", exprText(a["packets"]), exprText(a["bytes"]))
	case "jump", "goto":
		return word + " " + exprText(a["target"])
	case "vmap":
		return exprText(a["key"]) + " vmap " + exprText(a["data"])
	case "mangle":
		return exprText(a["key"]) + " set " + exprText(written(a["key"], a["value"]))
	case "snat", "dnat", "masquerade", "redirect":
		return natText(word, arg)
	case "log":
		return logText(a)
	case "tproxy":
		return natText(word, arg)
	case "xt":
		return "xt " + exprText(a["type"]) + " " + exprText(a["name"])
	}
	if arg == nil {
		return word
	}
	if a == nil {
		return word + " " + exprText(arg)
	}
	var parts []string
	for _, key := range sortedKeys(a) {
		parts = append(parts, key+" "+exprText(a[key]))
	}
	return strings.Join(append([]string{word}, parts...), " ")
}

// matchText is a condition: "field value", or with what compares them where that is not
// that they are equal.
func matchText(a map[string]any) string {
	op, _ := a["op"].(string)
	left, right := exprText(a["left"]), exprText(written(a["left"], a["right"]))
	mask, masked := object(a["left"])["&"].([]any)
	if op == "==" || op == "in" {
		op = ""
	}
	switch {
	case masked && len(mask) == 2 && exprText(mask[0]) == "tcp flags":
		left, right = "tcp flags", right+" / "+exprText(mask[1])
	case masked && len(mask) == 2:
		left = exprText(mask[0]) + " & " + exprText(written(mask[0], mask[1]))
		right = exprText(written(mask[0], a["right"]))
		op = cmp.Or(op, "==")
	}
	return strings.Join(strings.Fields(left+" "+op), " ") + " " + right
}

// written is a value as nft prints it where it is of that field: marks are hexadecimal, names
// of interfaces and times are quoted.
func written(field, value any) any {
	key := exprText(object(object(field)["meta"])["key"])
	if key == "" {
		key = exprText(object(object(field)["ct"])["key"])
	}
	switch key {
	case "mark":
		return each(value, func(v any) any {
			if n, ok := v.(float64); ok {
				return fmt.Sprintf("0x%08x", uint32(n))
			}
			return v
		})
	case "iifname", "oifname", "iif", "oif", "hour", "day", "time":
		return each(value, func(v any) any {
			if name, ok := v.(string); ok && !strings.HasPrefix(name, "@") {
				return literal(quote(name))
			}
			return v
		})
	}
	return value
}

// literal is text that is printed as it is.
type literal string

// each changes the values of an expression, and leaves the fields in it alone.
func each(value any, change func(any) any) any {
	switch v := value.(type) {
	case []any:
		out := make([]any, len(v))
		for k := range v {
			out[k] = each(v[k], change)
		}
		return out
	case map[string]any:
		out := map[string]any{}
		for word, arg := range v {
			if slices.Contains([]string{"set", "range", "elem", "val", "&", "|", "^", "<<", ">>"}, word) {
				arg = each(arg, change)
			}
			out[word] = arg
		}
		return out
	}
	return change(value)
}

// quote is how nft writes names and comments: it escapes nothing.
func quote(text string) string { return `"` + text + `"` }

func quotaText(a map[string]any) string {
	text := "quota "
	if a["inv"] == true {
		text += "over "
	}
	text += exprText(a["val"]) + " " + exprText(a["val_unit"])
	if used, ok := a["used"].(float64); ok && used > 0 {
		text += " used " + exprText(used) + " " + exprText(a["used_unit"])
	}
	return text
}

func logText(a map[string]any) string {
	text := "log"
	if prefix, ok := a["prefix"].(string); ok {
		text += " prefix " + quote(prefix)
	}
	for _, key := range []string{"group", "snaplen", "queue-threshold", "level", "flags"} {
		if a[key] != nil {
			text += " " + key + " " + exprText(a[key])
		}
	}
	return text
}

func natText(word string, arg any) string {
	a := object(arg)
	if a == nil && arg != nil || a["map"] != nil || a["range"] != nil || a["prefix"] != nil || a["concat"] != nil {
		a = map[string]any{"addr": arg}
	}
	text := word
	if family, ok := a["family"].(string); ok {
		text += " " + family
	}
	if flags := exprText(a["flags"]) + "," + exprText(a["type_flags"]); strings.Contains(flags, "netmap") || strings.Contains(flags, "prefix") {
		text += " prefix"
	}
	to := ""
	if a["addr"] != nil {
		to = exprText(a["addr"])
		if _, plain := a["addr"].(string); plain && a["port"] != nil && strings.Contains(to, ":") {
			to = "[" + to + "]"
		}
	}
	if a["port"] != nil {
		to += ":" + exprText(a["port"])
	}
	if to != "" {
		text += " to " + to
	}
	flags, ok := a["flags"].([]any)
	if !ok && a["flags"] != nil {
		flags = []any{a["flags"]}
	}
	flags = slices.DeleteFunc(slices.Clone(flags), func(f any) bool { return f == "netmap" })
	for k, f := range flags {
		text += []string{" ", ","}[min(k, 1)] + exprText(f)
	}
	return text
}

func limitText(a map[string]any) string {
	text := "limit rate "
	if a["inv"] == true {
		text += "over "
	}
	text += exprText(a["rate"])
	if unit, ok := a["rate_unit"].(string); ok && unit != "packets" {
		text += " " + unit
	}
	text += "/" + exprText(a["per"])
	if burst, ok := a["burst"].(float64); ok && burst != 0 {
		text += " burst " + exprText(burst) + " packets"
	}
	return text
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func exprText(v any) string {
	switch x := v.(type) {
	case nil:
		return ""
	case string:
		if x == "" || strings.ContainsAny(x, " \"") {
			return quote(x)
		}
		return x
	case literal:
		return string(x)
	case bool:
		return strconv.FormatBool(x)
	case float64:
		if x == math.Trunc(x) && math.Abs(x) < 1<<53 {
			return strconv.FormatInt(int64(x), 10)
		}
		return strconv.FormatFloat(x, 'g', -1, 64)
	case []any:
		return joined(x, ",")
	case map[string]any:
		return objectText(x)
	}
	return fmt.Sprint(v)
}

func joined(list []any, separator string) string {
	texts := make([]string, len(list))
	for k, v := range list {
		texts[k] = exprText(v)
	}
	return strings.Join(texts, separator)
}

func objectText(o map[string]any) string {
	for word, arg := range o {
		a, list := object(arg), []any(nil)
		list, _ = arg.([]any)
		switch word {
		case "meta", "ct", "rt", "socket", "exthdr", "tcp option", "ip option":
			return metaText(word, a)
		case "payload":
			if a["base"] != nil {
				return fmt.Sprintf("@%s,%s,%s", exprText(a["base"]), exprText(a["offset"]), exprText(a["len"]))
			}
			return exprText(a["protocol"]) + " " + exprText(a["field"])
		case "fib":
			flags := strings.ReplaceAll(exprText(a["flags"]), ",", " . ")
			return "fib " + flags + " " + exprText(a["result"])
		case "prefix":
			return exprText(a["addr"]) + "/" + exprText(a["len"])
		case "range":
			return joined(list, "-")
		case "concat":
			return joined(list, " . ")
		case "&", "|", "^", "<<", ">>":
			return joined(list, " "+word+" ")
		case "set":
			return setText(arg)
		case "map":
			return exprText(a["key"]) + " map " + exprText(a["data"])
		case "elem":
			return exprText(a["val"])
		case "numgen":
			return fmt.Sprintf("numgen %s mod %s%s", exprText(a["mode"]), exprText(a["mod"]), offsetText(a))
		case "jhash", "symhash":
			text := word
			if a["expr"] != nil {
				text += " " + exprText(a["expr"])
			}
			text += " mod " + exprText(a["mod"])
			if a["seed"] != nil {
				text += " seed " + seedText(a["seed"])
			}
			return text + offsetText(a)
		case "accept", "drop", "return", "continue":
			return word
		case "jump", "goto":
			return word + " " + exprText(a["target"])
		}
	}
	var parts []string
	for _, key := range sortedKeys(o) {
		parts = append(parts, strings.TrimSpace(key+" "+exprText(o[key])))
	}
	return strings.Join(parts, " ")
}

// unqualified are the keys of meta that nft prints without the word.
var unqualified = []string{"iifname", "oifname", "iif", "oif", "iifgroup", "oifgroup", "iiftype", "oiftype"}

func metaText(word string, a map[string]any) string {
	key := exprText(a["key"])
	if word == "meta" && slices.Contains(unqualified, key) {
		return key
	}
	if word == "ct" {
		return strings.Join(strings.Fields(word+" "+exprText(a["dir"])+" "+key), " ")
	}
	if key == "" {
		key = strings.TrimSpace(exprText(a["name"]) + " " + exprText(a["field"]))
	}
	return word + " " + key
}

func setText(v any) string {
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	texts := make([]string, len(list))
	for k, e := range list {
		if pair, ok := e.([]any); ok && len(pair) == 2 {
			texts[k] = exprText(pair[0]) + " : " + exprText(pair[1])
			continue
		}
		texts[k] = exprText(e)
	}
	return "{ " + strings.Join(texts, ", ") + " }"
}

func seedText(v any) string {
	if n, ok := v.(float64); ok {
		return fmt.Sprintf("0x%x", uint32(n))
	}
	return exprText(v)
}

func offsetText(a map[string]any) string {
	if offset, ok := a["offset"].(float64); ok && offset != 0 {
		return " offset " + exprText(offset)
	}
	return ""
}
