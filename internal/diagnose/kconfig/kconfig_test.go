// SPDX-License-Identifier: Apache-2.0

package kconfig

import (
	"bytes"
	"compress/gzip"
	"strings"
	"testing"
)

const some = `#
# Automatically generated file; DO NOT EDIT.
# Linux/x86 6.18.44 Kernel Configuration
#
CONFIG_CC_VERSION_TEXT="gcc (Debian 12.2.0-14) 12.2.0"
CONFIG_INET=y
CONFIG_NETFILTER=y
CONFIG_NF_CONNTRACK=m
# CONFIG_NF_FLOW_TABLE is not set
CONFIG_KASAN=y
CONFIG_BRIDGE_NETFILTER=m
CONFIG_NF_CONNTRACK_FTP=y
CONFIG_NF_CONNTRACK_SIP=m
CONFIG_HZ=250
CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y
`

func compressed(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestRead(t *testing.T) {
	for name, text := range map[string]string{"plain": some, "compressed": compressed(t, some), "with CRLF": strings.ReplaceAll(some, "\n", "\r\n")} {
		c, err := Read(strings.NewReader(text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c.Kernel != "6.18.44" {
			t.Errorf("%s: kernel %q", name, c.Kernel)
		}
		for option, want := range map[string]string{"INET": "y", "NF_CONNTRACK": "m", "NF_FLOW_TABLE": "n", "ABSENT": "", "HZ": "250", "CC_VERSION_TEXT": `"gcc (Debian 12.2.0-14) 12.2.0"`} {
			if got := c.Value(option); got != want {
				t.Errorf("%s: %s is %q, want %q", name, option, got, want)
			}
		}
	}
	for text, want := range map[string]string{
		"":                                    "no line such as CONFIG_NET=y",
		"net.ipv4.ip_forward=1":               "no line such as CONFIG_NET=y",
		"\x1f\x8bnot gzip":                    "gzip",
		strings.Repeat("CONFIG_A=y\n", 2<<20): "longer than 16 MiB",
	} {
		if _, err := Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
	if _, err := Read(strings.NewReader(compressed(t, some)[:40])); err == nil {
		t.Error("a file that is cut was read")
	}
}

func TestJudge(t *testing.T) {
	c, err := Read(strings.NewReader(some))
	if err != nil {
		t.Fatal(err)
	}
	r := Judge(c, "here")
	lines := map[string]Line{}
	for _, list := range [][]Line{r.Lacks, r.Spare, r.Well} {
		for _, l := range list {
			if _, twice := lines[l.Name]; twice {
				t.Errorf("%s stands in two lists", l.Name)
			}
			lines[l.Name] = l
		}
	}
	if len(lines) != len(options) {
		t.Errorf("%d lines for %d options", len(lines), len(options))
	}
	for name, want := range map[string]string{ // value, then what to set
		"INET": "y ", "NF_CONNTRACK": "m ", "NF_NAT": " m", "NF_FLOW_TABLE": "n m", "RPS": " y",
		"KASAN": "y n", "KCSAN": " ", "BRIDGE_NETFILTER": "m ", "INIT_ON_ALLOC_DEFAULT_ON": "y ", "NF_CONNTRACK_FTP": "y m", "NF_CONNTRACK_SIP": "m ",
	} {
		if got := lines[name].Value + " " + lines[name].Set; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if r.Lacks[0].Kind != Need || r.Lacks[len(r.Lacks)-1].Kind != Want || r.Spare[0].Kind != Debug {
		t.Error("what matters most does not come first")
	}
}

// A configuration with the fragment merged into it lacks nothing.
func TestFragment(t *testing.T) {
	c, err := Read(strings.NewReader(some))
	if err != nil {
		t.Fatal(err)
	}
	var fragment bytes.Buffer
	if err := Judge(c, "here").Fragment(&fragment); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"CONFIG_NF_FLOW_TABLE=m\n", "# CONFIG_KASAN is not set\n", "CONFIG_NF_CONNTRACK_FTP=m\n", "configuration of 6.18.44"} {
		if !strings.Contains(fragment.String(), want) {
			t.Errorf("the fragment lacks %q:\n%s", want, fragment.String())
		}
	}
	merged, err := Read(strings.NewReader(some + fragment.String()))
	if err != nil {
		t.Fatal(err)
	}
	if r := Judge(merged, "merged"); len(r.Lacks) > 0 || len(r.Spare) != 1 { // but for what is a choice
		t.Errorf("after the merge: lacks %+v, spare %+v", r.Lacks, r.Spare)
	}
}

func TestOptions(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range options {
		if seen[o.Name] || !isName(o.Name) || strings.HasPrefix(o.Name, "CONFIG_") || o.Reason == "" {
			t.Errorf("%+v", o)
		}
		seen[o.Name] = true
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(some))
	f.Add([]byte("\x1f\x8b"))
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := Read(bytes.NewReader(in))
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := Judge(c, "").Fragment(&b); err != nil {
			t.Error(err)
		}
		for _, r := range c.Kernel {
			if r < ' ' || r > '~' {
				t.Errorf("kernel %q", c.Kernel)
			}
		}
	})
}
