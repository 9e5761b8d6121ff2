// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/snapshot"
)

// MonitorLineText writes something that natkit monitor has seen, on one line; stamp says whether
// with the time.
func MonitorLineText(w io.Writer, l monitor.Line, stamp bool) error {
	var b strings.Builder
	if stamp {
		b.WriteString(l.At.Local().Format(time.DateTime) + " ")
	}
	switch {
	case l.Tuning != nil:
		b.WriteString(tuningInWords(*l.Tuning))
	case l.Problem != "":
		b.WriteString("problem: " + l.Problem)
	case l.Kind == history.Ended && l.Why != "":
		fmt.Fprintf(&b, "ended: %s in %s: %s", l.Code, l.Namespace, l.Why)
	case l.Kind == history.Ended:
		fmt.Fprintf(&b, "ended: %s in %s, last seen %s", l.Code, l.Namespace, l.Since.Local().Format(time.TimeOnly))
	default:
		fmt.Fprintf(&b, "%s: %s %s in %s: %s", l.Kind, l.Severity, l.Code, l.Namespace, l.Title)
	}
	_, err := io.WriteString(w, snapshot.CleanText(b.String())+"\n") // the API of a cluster may reply anything
	return err
}

// tuningInWords is what natkit monitor did about a setting.
func tuningInWords(n history.Tuning) string {
	what := fmt.Sprintf("%s in %s: %s -> %s", n.Setting, n.Namespace, n.Old, n.New)
	why := n.Why
	if n.Code != "" && (n.Kind == history.Proposed || n.Kind == history.Applied) {
		why = n.Code + ": " + why
	}
	switch n.Kind {
	case history.Proposed:
		return "would tune " + what + ", for " + why
	case history.Applied:
		return "tuned " + what + ", for " + why + " (natkit tune rollback " + n.ID + " undoes it)"
	case history.Kept:
		return "tuning stays: " + what + ": " + why
	case history.NotTheCause:
		return "tuning may be tried again: " + what + ": " + why
	case history.TakenBack:
		return "tuning taken back: " + what + ": " + why
	}
	return "tuning failed: " + what + ": " + why
}
