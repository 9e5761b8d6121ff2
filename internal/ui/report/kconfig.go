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
	p.text("", "", fmt.Sprintf("%s, %s: %s as a NAT machine wants it.", kernel, r.Source, plural.Count(len(r.Well), "option")))
	titles := map[kconfig.Kind]string{
		kconfig.Need: "Lacks, and NAT does not work without", kconfig.Want: "Lacks, and would serve",
		kconfig.Debug: "Has, for kernel developers: every packet pays", kconfig.Spare: "Has, and NAT could do without",
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
		p.text("", "", "natkit kconfig -o fragment writes this for scripts/kconfig/merge_config.sh. =n is to be left out, =m a module that is loaded when something wants it.")
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}
