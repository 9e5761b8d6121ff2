// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"

	"natkit/internal/diagnose/kconfig"
	"natkit/internal/words/plural"
)

// KconfigText writes what a kernel's configuration means for NAT: what it lacks,
// then what it could do without.
func KconfigText(w io.Writer, r *kconfig.Report) error {
	var p page
	kernel := "a kernel"
	if r.Kernel != "" {
		kernel = "Linux " + r.Kernel
	}
	p.text("", "", fmt.Sprintf("%s, %s: %s as a NAT machine needs it.", kernel, r.Source, plural.Count(len(r.Well), "option")))
	titles := map[kconfig.Kind]string{
		kconfig.Need: "Missing, and NAT does not work without", kconfig.Want: "Missing, and would help",
		kconfig.Debug: "Set for kernel developers: every packet pays", kconfig.Spare: "Set, and not needed for NAT",
	}
	var last kconfig.Kind
	for _, list := range [][]kconfig.Line{r.Lacks, r.Spare} {
		for _, l := range list {
			if l.Kind != last {
				last = l.Kind
				fmt.Fprintf(&p.b, "\n%s:\n", titles[l.Kind])
			}
			p.text("  ", "      ", fmt.Sprintf("CONFIG_%s=%s: %s", l.Name, cmp.Or(l.Set, l.Value), l.Reason))
		}
	}
	if len(r.Lacks)+len(r.Spare) > 0 {
		p.b.WriteString("\n")
		p.text("", "", "natkit kconfig -o fragment writes this for scripts/kconfig/merge_config.sh. =n means off, =m a module that is loaded on demand.")
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}
