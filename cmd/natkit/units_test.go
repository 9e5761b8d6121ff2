// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

var execStart = regexp.MustCompile(`(?m)^ExecStart=/usr/bin/(natkit .*)$`)
var defaults = regexp.MustCompile(`(?m)^(NATKIT_[A-Z]+)="(.*)"$`)

// The units of systemd start commands that there are, and systemd understands every line of them.
func TestUnits(t *testing.T) {
	units, err := filepath.Glob("../../deploy/systemd/*.service")
	if err != nil || len(units) != 4 {
		t.Fatal(units, err)
	}
	text, err := os.ReadFile("../../deploy/default/natkit")
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]string{"NATKIT_ACCEL": "eth0 docker0 --tcp-liberal"} // empty in the file, as the comment there says
	for _, v := range defaults.FindAllStringSubmatch(string(text), -1) {
		if flags[v[1]] == "" {
			flags[v[1]] = v[2]
		}
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		start := execStart.FindSubmatch(text)
		if start == nil {
			t.Errorf("%s starts nothing", unit)
			continue
		}
		command := os.Expand(string(start[1]), func(name string) string {
			if flags[name] == "" {
				t.Errorf("%s: %s is not in deploy/default/natkit", filepath.Base(unit), name)
			}
			return flags[name]
		})
		checkCommandLines(t, filepath.Base(unit), "  "+command+"\n")
	}
	ktest.Tool(t, "systemd-analyze")
	startEarly(t, units)
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		// It looks for the program, too.
		there := filepath.Join(t.TempDir(), filepath.Base(unit))
		if err := os.WriteFile(there, []byte(strings.ReplaceAll(string(text), "/usr/bin/natkit", "/bin/true")), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("systemd-analyze", "verify", "--man=no", there).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", filepath.Base(unit), err, out)
		}
		const exposure = "50" // tenths: beyond it systemd calls a service exposed
		if out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold="+exposure, there).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", filepath.Base(unit), err, out)
		}
	}
}

// An exit code that starting again does not help ends natkit.service, and no other.
func TestUnitEndsForGood(t *testing.T) {
	text, err := os.ReadFile("../../deploy/systemd/natkit.service")
	if want := fmt.Sprintf("\nRestartPreventExitStatus=%d\n", exitReplace); err != nil || strings.Count(string(text), want) != 1 {
		t.Errorf("natkit.service lacks %q, %v", want, err)
	}
}

// postinst runs what is done after an upgrade, with a natkit whose check ends like that.
func postinst(t *testing.T, check string) (restarted []string, said string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range map[string]string{"natkit": check, "systemctl": `[ "$1" != try-restart ] || echo "$2"`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("unshare", "--mount", "sh", "-ec", "mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system; exec sh ../../deploy/packages/postinst.sh configure 0.0.1")
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s%s", err, out, &errs)
	}
	return strings.Fields(string(out)), errs.String()
}

// An upgrade of the package restarts what runs, but for what keeps an engine that the new natkit cannot
// take over: that stays, and the upgrade says how to change over.
func TestUpgradeRestarts(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "unshare")
	monitor, all := []string{"natkit-monitor.service"}, []string{"natkit-monitor.service", "natkit.service", "natkit-log.service"}
	for _, c := range []struct {
		check string
		want  []string
		says  string
	}{
		{"echo natkit 2", all, ""},
		{"echo natkit: no /proc >&2; exit 1", all, ""},
		{`[ "$*" = "version --check" ] || exit 0; echo natkit: the engine goes on >&2; exit 5`, monitor, "natkit: the engine goes on\nnatkit: natkit.service and natkit-log.service are not restarted"},
	} {
		got, said := postinst(t, c.check)
		if !slices.Equal(got, c.want) || !strings.HasPrefix(said, c.says) || (c.says == "") != (said == "") {
			t.Errorf("%s: restarted %q, want %q; %q", c.check, got, c.want, said)
		}
	}
}

// startEarly has systemd order the units together with one that needs the network before sysinit.target, as
// cloud-init's does: where units wait for each other, systemd leaves one out, which may be the network.
func startEarly(t *testing.T, units []string) {
	t.Helper()
	dir := t.TempDir()
	var names []string
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, filepath.Base(unit))
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(unit)), []byte(strings.ReplaceAll(string(text), "/usr/bin/natkit", "/bin/true")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	early := filepath.Join(dir, "early.service")
	text := "[Unit]\nDefaultDependencies=no\nWants=sysinit.target network-pre.target " + strings.Join(names, " ") +
		"\nAfter=network-pre.target\nBefore=network-online.target sysinit.target\n[Service]\nType=oneshot\nExecStart=/bin/true\n"
	if err := os.WriteFile(early, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("systemd-analyze", "verify", "--man=no", early)
	cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("with a network before sysinit.target: %v\n%s", err, out)
	}
}
