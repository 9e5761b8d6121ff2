// SPDX-License-Identifier: Apache-2.0

package control

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
)

// What brings something up again has every flag that it was brought up with.
func TestCommandsKeepFlags(t *testing.T) {
	here := (*netns.Handle)(nil)
	accepted := []Bypassed{{What: "chain ip filter/FORWARD"}}
	for want, rec := range map[string]*record{
		"`natkit up -f /etc/nat.yaml`":                                        {Engine: EngineEBPF, Attach: AttachAuto, Rules: ruleText{File: "/etc/nat.yaml"}},
		"`natkit up -f /etc/nat.yaml --attach xdp --bypass`":                  {Engine: EngineEBPF, Attach: AttachXDP, Accepted: accepted, Rules: ruleText{File: "/etc/nat.yaml"}},
		"`natkit up -f - --attach tc`":                                        {Engine: EngineEBPF, Attach: AttachTC, Rules: ruleText{File: rulefile.Stdin}},
		"`natkit up -f '/etc/my nat.yaml' --engine nft`":                      {Engine: EngineNFT, Attach: AttachAuto, Rules: ruleText{File: "/etc/my nat.yaml"}},
		"`natkit accel on eth0 eth1`":                                         {Engine: EngineAccel, Attach: AttachAuto, Accel: &accelRecord{Flows: 262144}, Links: []linkRecord{{Name: "eth0"}, {Name: "eth1"}}},
		"`natkit accel on --tcp-liberal --flows 4096 --attach tc --bypass a`": {Engine: EngineAccel, Attach: AttachTC, Accepted: accepted, Accel: &accelRecord{Flows: 4096, Asked: 4096, TCPTimeout: 300}, Links: []linkRecord{{Name: "a"}}},
	} {
		if got := rec.again(here); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// No message of the package names a command that restarts something but by those that keep the
// flags.
func TestCommandsAreWhole(t *testing.T) {
	bare := regexp.MustCompile("`natkit (up|apply|serve|accel on)`")
	generic := []string{"ErrDown", "errAccelOn", "ErrAccelOff"} // nothing is known of what is not up
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if spec, is := n.(*ast.ValueSpec); is && slices.Contains(generic, spec.Names[0].Name) {
				return false
			}
			if lit, is := n.(*ast.BasicLit); is && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err != nil || bare.MatchString(text) {
					t.Errorf("%s: %s: use again, restart or onFile", set.Position(lit.Pos()), lit.Value)
				}
			}
			return true
		})
	}
}

// The doctor gets the flags of what is up, whichever it is.
func TestFactsHaveFlags(t *testing.T) {
	b := newTestbed(t)
	check := func(want ...string) {
		t.Helper()
		if facts, err := ReadFacts(b.gateway, nil, false); err != nil || !slices.Equal(facts.Flags, want) {
			t.Errorf("facts %+v, %v, want flags %q", facts, err, want)
		}
	}
	for _, o := range []Options{{Attach: AttachTC}, {Attach: AttachXDP}, {Engine: EngineNFT}} {
		o.Namespace = b.gateway
		b.up(baseRules, o)
		if o.Engine == EngineNFT {
			check("--engine", "nft")
		} else {
			check("--attach", string(o.Attach))
		}
		if _, err := Down(b.gateway); err != nil {
			t.Fatal(err)
		}
	}
	o := b.accelOptions()
	o.Attach, o.Flows, o.TCPLiberal = AttachTC, 2*MinAccelFlows(), true
	b.accelOn(o)
	check("--tcp-liberal", "--flows", strconv.Itoa(o.Flows), "--attach", "tc")
}
