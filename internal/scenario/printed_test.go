// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// printed runs what findings print, as a user would paste it: the namespace form
// in a root shell of the machine, the host form in one inside of the namespace.
type printed struct {
	natkit string // folder of the program, first in PATH
	host   bool
	dir    string // where the shell stands: commands may write files
}

func newPrinted(t *testing.T, host bool) *printed {
	return &printed{natkit: filepath.Dir(ktest.Natkit(t)), host: host, dir: t.TempDir()}
}

var (
	// hostWide are settings that all namespaces of a machine share. No test writes these.
	hostWide = regexp.MustCompile(`^sysctl -w (net\.netfilter\.nf_conntrack_(?:max|buckets)|net\.ipv[46]\.neigh\.default\.gc_thresh\d|net\.core\.[a-z_]+)=`)
	// long takes minutes whatever its window is, and changes nothing.
	long = regexp.MustCompile(`\bnatkit bench `)
	// asks are commands that change nothing: what they answer may be that there is nothing,
	// which is no success to a shell.
	asks = regexp.MustCompile(`^(?:ip(?: -\w+)* \w+ (?:show|get)|nft (?:-a )?list|iptables-\S+ (?:-t \w+ )?-[SL]|conntrack -[LSC]|s[st] |ss |nstat|ping|timeout|tcpdump|cat|sysctl (?:-ar )?[^-]|ethtool (?:-[a-zS] )?\S+$|ethtool -[Sgkl]|tc -s|natkit (?:doctor|drops|hooks|conntrack|profile|tune plan|explain|sessions|status|top|mappings|rules))`)
	// misuse is how programs say that they were asked in the wrong way.
	misuse     = regexp.MustCompile(`(?i)usage:|not found|unknown (?:option|command|flag|shorthand)|invalid option|syntax error|unrecognized|bad argument|try .*--help|is unknown, try|garbage|unexpected EOF`)
	inWindow   = regexp.MustCompile(`--for \d+s`)
	listening  = regexp.MustCompile(`\btcpdump\b`) // until so many packets have come
	namespaced = regexp.MustCompile(`^(?:ip netns exec \S+|nsenter \S+(?: \d+ -n)?) | --netns \S+`)
)

// bare is a command without what leads it to its namespace.
func bare(line string) string { return namespaced.ReplaceAllString(line, "") }

// command runs one line of a remedy.
func (p *printed) command(ctx context.Context, node *lab.Node, _, line string) error {
	_, err := p.run(ctx, node, line)
	return err
}

// check runs a line that shows whether the cure worked: the doctor is asked again.
func (p *printed) check(ctx context.Context, node *lab.Node, code, line string) error {
	out, err := p.run(ctx, node, line)
	if err == nil && strings.HasPrefix(bare(line), "natkit doctor") && strings.Contains(out, code) {
		err = fmt.Errorf("%s, after the cure:\n%s", line, out)
	}
	return err
}

func (p *printed) run(ctx context.Context, node *lab.Node, line string) (out string, err error) {
	command := bare(line)
	if m := hostWide.FindStringSubmatch(command); m != nil {
		_, err := os.Stat("/proc/sys/" + strings.ReplaceAll(m[1], ".", "/"))
		return "", err
	}
	if long.MatchString(command) {
		return "", nil // ktest.CheckCommand has parsed it
	}
	text := listening.ReplaceAllString(inWindow.ReplaceAllString(line, "--for 1s"), "timeout 2 tcpdump")
	if strings.HasPrefix(command, "natkit tune apply") {
		text += " --no-host-write"
	}
	for tries := 0; ; tries++ {
		out, err = p.shell(ctx, node, command, text)
		if err == nil || tries == 50 || !strings.Contains(err.Error(), entryGone) {
			return out, err
		}
	}
}

// entryGone is how conntrack -D ends when an entry that it was about to delete has gone by
// itself: it is to be run again.
const entryGone = "such conntrack doesn't exist"

func (p *printed) shell(ctx context.Context, node *lab.Node, command, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "bash", "-c", text)
	start := cmd.Run
	if p.host {
		inside := node.Command(ctx, "bash", "-c", text)
		cmd, start = inside.Cmd, inside.Run
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, &out, &errs
	cmd.Env = append(os.Environ(), "PATH="+p.natkit+":"+os.Getenv("PATH"), "NATKIT_STATE_DIR="+p.dir)
	err := start()
	var exit *exec.ExitError
	switch {
	case err == nil && !misuse.MatchString(errs.String()):
		return out.String(), nil
	case err != nil && !errors.As(err, &exit):
		return "", fmt.Errorf("run %q: %w", text, err)
	case misuse.MatchString(errs.String()):
	case asks.MatchString(command) && exit.ExitCode() < 126:
		return out.String(), nil
	case strings.HasPrefix(command, "conntrack -D") && strings.Contains(errs.String(), "0 flow entries"):
		return out.String(), nil // they have ended by themselves
	case strings.HasPrefix(command, "natkit tune apply") && strings.Contains(errs.String(), "not every change of the plan"):
		return out.String(), nil // what is the whole machine's is left alone here
	}
	return "", fmt.Errorf("run %q: %v: %s", text, err, strings.TrimSpace(errs.String()))
}

// checkPrinted looks at everything that a step's findings print, also at what is not run
// because another finding is the one that the scenario is about.
func checkPrinted(t *testing.T, findings []causes.Finding) {
	t.Helper()
	for _, f := range findings {
		for _, line := range append(append([]string{}, f.Remedy...), f.Verify...) {
			ktest.CheckCommand(t, f.Code, line)
		}
		checkPrinted(t, f.Consequences)
	}
}

// namesNoNamespace checks the commands for who is inside of the namespace.
func namesNoNamespace(t *testing.T, findings []causes.Finding) {
	t.Helper()
	for _, f := range findings {
		for _, line := range append(append([]string{}, f.Remedy...), f.Verify...) {
			if bare(line) != line {
				t.Errorf("%s: %q names a namespace, and is for who is in it", f.Code, line)
			}
		}
		namesNoNamespace(t, f.Consequences)
	}
}
