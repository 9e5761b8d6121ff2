// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"natkit/internal/diagnose/kconfig"
)

func TestKconfigCommand(t *testing.T) {
	kernelConfig := func(stdin, args string) (code int, stdout, stderr string) {
		var out, errs bytes.Buffer
		code = run(t.Context(), strings.Fields("kconfig "+args), &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs})
		return code, out.String(), errs.String()
	}
	const config = "# Linux/x86 6.1.5 Kernel Configuration\nCONFIG_NETFILTER=y\n# CONFIG_NF_FLOW_TABLE is not set\nCONFIG_KASAN=y\n"
	code, stdout, stderr := kernelConfig(config, "--from -")
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "Linux 6.1.5") || !strings.Contains(stdout, "CONFIG_NF_FLOW_TABLE=m") {
		t.Errorf("exit %d, %q\n%s", code, stderr, stdout)
	}
	code, stdout, _ = kernelConfig(config, "--from - -o fragment")
	if code != exitOK || !strings.Contains(stdout, "\n# CONFIG_KASAN is not set\n") {
		t.Errorf("exit %d\n%s", code, stdout)
	}
	code, stdout, _ = kernelConfig(config, "--from - -o json")
	var r kconfig.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || r.Kernel != "6.1.5" || len(r.Spare) != 1 {
		t.Errorf("exit %d, %v\n%s", code, err, stdout)
	}
	if code, _, stderr = kernelConfig("nonsense", "--from -"); code != exitError || !strings.Contains(stderr, "CONFIG_NET=y") {
		t.Errorf("nonsense: exit %d, %q", code, stderr)
	}
	if code, _, stderr = kernelConfig("", "--netns blue"); code != exitUsage {
		t.Errorf("--netns: exit %d, %q", code, stderr)
	}
}
