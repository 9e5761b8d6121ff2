// SPDX-License-Identifier: Apache-2.0

package shell

import (
	"os/exec"
	"testing"
)

// What a shell makes of a word is the word.
func TestQuote(t *testing.T) {
	for _, word := range []string{"", "plain-1.2:/@%+=,_", "two words", "it's", `$HOME "x" \ *`, "a;b|c&d", "line\nfeed", "-f", "größe"} {
		out, err := exec.Command("sh", "-c", "printf %s "+Quote(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q is read as %q, %v", word, out, err)
		}
	}
}

func TestNatkit(t *testing.T) {
	for want, words := range map[string][]string{
		"natkit down": {"", "down"}, "natkit --netns 'my net' up -f /etc/nat.yaml": {"my net", "up", "-f", "/etc/nat.yaml"},
	} {
		if got := Natkit(words[0], words[1:]...); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestIn(t *testing.T) {
	for want, netns := range map[string]string{
		"nft list ruleset": "", "nsenter -t 12 -n nft list ruleset": "pid:12", "nsenter --net='/run/my net' nft list ruleset": "/run/my net",
		`ip netns exec 'it'\''s' nft list ruleset`: "it's",
	} {
		if got := In(netns, "nft list ruleset"); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
