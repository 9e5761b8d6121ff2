// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
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
		op, _ := a["op"].(string)
		left, right := exprText(a["left"]), exprText(a["right"])
		if name, ok := a["right"].(string); ok && (strings.HasPrefix(left, "iif") || strings.HasPrefix(left, "oif")) && !strings.HasPrefix(name, "@") {
			right = strconv.Quote(name)
		}
		if op == "==" || op == "in" {
			return left + " " + right
		}
		return left + " " + op + " " + right
	case "counter":
		if a == nil {
			return "counter"
		}
		return fmt.Sprintf("counter packets %s bytes %s", exprText(a["packets"]), exprText(a["bytes"]))
	case "jump", "goto":
		return word + " " + exprText(a["target"])
	case "vmap":
		return exprText(a["key"]) + " vmap " + exprText(a["data"])
	case "mangle":
		return exprText(a["key"]) + " set " + exprText(a["value"])
	case "snat", "dnat", "masquerade", "redirect":
		return natText(word, arg)
	case "limit":
		return limitText(a)
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
			return strconv.Quote(x)
		}
		return x
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
				text += " seed " + exprText(a["seed"])
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

func offsetText(a map[string]any) string {
	if offset, ok := a["offset"].(float64); ok && offset != 0 {
		return " offset " + exprText(offset)
	}
	return ""
}
