// SPDX-License-Identifier: Apache-2.0

package ktest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

var built struct {
	once sync.Once
	path string
	err  string
}

// Natkit returns the path of the program: the one that NATKIT_TEST_PROGRAM names, which
// scripts/test.sh builds once for all packages, or one that is built once for all tests of the
// process. CleanNatkit, called by TestMain, removes that.
func Natkit(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("NATKIT_TEST_PROGRAM"); path != "" {
		return path
	}
	built.once.Do(func() {
		dir, err := os.MkdirTemp("", "natkit-program")
		if err != nil {
			built.err = err.Error()
			return
		}
		built.path = filepath.Join(dir, "natkit")
		if out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", built.path, "natkit/cmd/natkit").CombinedOutput(); err != nil {
			built.err = "go build: " + err.Error() + "\n" + string(out)
		}
	})
	if built.err != "" {
		t.Fatal(built.err)
	}
	return built.path
}

// CleanNatkit removes what Natkit has built.
func CleanNatkit() {
	if built.path != "" {
		os.RemoveAll(filepath.Dir(built.path))
	}
}

var (
	// A word in capitals that the reader would have to replace, as in "via ROUTER"; what
	// programs write in capitals themselves is none.
	placeholder = regexp.MustCompile(`(?:^|[ =/])([A-Z][A-Z_]{2,})(?:$|[ /:,;)])`)
	capitals    = regexp.MustCompile(`^(?:POSTROUTING|PREROUTING|FORWARD|INPUT|OUTPUT|ACCEPT|DROP|REJECT|MASQUERADE|SNAT|DNAT|REDIRECT|TCPMSS|NFQUEUE|CT|LOG|RETURN|DOCKER(?:-USER)?|NETMAP|SYNPROXY|NOTRACK|SYN_SENT|SYN_RECV|TIME_WAIT|CLOSE_WAIT|ESTABLISHED|RELATED|INVALID|UNREPLIED|NEW|KUBE-\w+|RST|SYN|FIN|ACK|FRAG)$`)
	// A command in a remark stands behind a colon, at the end.
	inRemark   = regexp.MustCompile(`: ((?:ip|nft|conntrack|sysctl|natkit|iptables\S*|ethtool|ss|tc|nstat) .*)$`)
	afterwards = regexp.MustCompile(` (?:[|<>;]|&&).*`)
	stretch    = regexp.MustCompile(`^(?:ip netns exec \S+|nsenter \S+(?: \d+ -n)?) `)
)

// CheckCommand checks a line of a remedy: that it is a command for a shell, whose program
// is there, with nothing in it that the reader has to fill in; and of natkit's own commands
// that the program knows them. A remark may have a command at its end, behind a colon.
func CheckCommand(t testing.TB, where, line string) {
	t.Helper()
	command, remark := strings.CutPrefix(line, "#")
	if remark {
		m := inRemark.FindStringSubmatch(command)
		if m == nil {
			return
		}
		command = m[1]
	}
	if out, err := exec.Command("bash", "-n", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %q is no command: %s", where, line, out)
		return
	}
	for _, m := range placeholder.FindAllStringSubmatch(command, -1) {
		if !capitals.MatchString(m[1]) && !remark {
			t.Errorf("%s: %q: what is %s?", where, line, m[1])
		}
	}
	command = stretch.ReplaceAllString(command, "")
	program, _, _ := strings.Cut(command, " ")
	if program != "natkit" {
		if _, err := exec.LookPath(program); err != nil {
			Missing(t, "%s: %q: needs the program %s", where, line, program)
		}
		return
	}
	command = afterwards.ReplaceAllString(command, "") // a pipe, a file: --help is for natkit
	help, _ := helps.LoadOrStore(inNamespace.ReplaceAllString(command, " --netns x"), sync.OnceValue(func() string {
		cmd := exec.Command("bash", "-c", command+" --help")
		cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(Natkit(t))+":"+os.Getenv("PATH"))
		if out, err := cmd.CombinedOutput(); err != nil {
			return err.Error() + ": " + string(out)
		}
		return ""
	}))
	if wrong := help.(func() string)(); wrong != "" {
		t.Errorf("%s: %q: %s", where, line, wrong)
	}
}

// helps are what natkit's commands said of --help, by the command: they are printed often.
var (
	helps       sync.Map // of string: func() string
	inNamespace = regexp.MustCompile(` --netns \S+`)
)
