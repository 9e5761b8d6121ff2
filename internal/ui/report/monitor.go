// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
)

// MonitorLineText writes something that natkit monitor has seen, on one line; stamp says whether
// with the time.
func MonitorLineText(w io.Writer, l monitor.Line, stamp bool) error {
	var b strings.Builder
	at := l.At
	if at.IsZero() {
		at = time.Now()
	}
	if stamp {
		b.WriteString(at.Local().Format(time.DateTime) + " ")
	}
	switch {
	case l.Problem != "":
		b.WriteString("problem: " + l.Problem)
	case l.Kind == history.Ended && l.Why != "":
		fmt.Fprintf(&b, "ended: %s in %s: %s", l.Code, l.Namespace, l.Why)
	case l.Kind == history.Ended:
		fmt.Fprintf(&b, "ended: %s in %s, last seen %s", l.Code, l.Namespace, l.Since.Local().Format(time.TimeOnly))
	default:
		fmt.Fprintf(&b, "%s: %s %s in %s: %s", l.Kind, l.Severity, l.Code, l.Namespace, l.Title)
	}
	_, err := io.WriteString(w, b.String()+"\n")
	return err
}
