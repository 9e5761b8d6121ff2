// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"

	"natkit/internal/bench"
)

// Probe writes what this machine can measure, and how to fix what it can't.
func Probe(w io.Writer, r *bench.ProbeResult) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", printable(machine(r.Environment)))
	for _, a := range r.Abilities {
		fmt.Fprintf(&b, "%-4s %-15s %s\n", yesNo(a.Have), a.Name, printable(a.Detail))
		if !a.Have {
			fmt.Fprintf(&b, "     %-15s fix: %s\n", "", strings.Join(a.Fix, "; "))
		}
	}
	if len(r.Routers) > 0 {
		b.WriteString("\nRouters\n")
	}
	for _, u := range r.Routers {
		what := u.Describe
		if u.Unsupported != "" {
			what = u.Unsupported
		}
		fmt.Fprintf(&b, "%-4s %-15s %s\n", yesNo(u.Unsupported == ""), printable(u.Name), printable(what))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func yesNo(have bool) string {
	if have {
		return "yes"
	}
	return "NO"
}
