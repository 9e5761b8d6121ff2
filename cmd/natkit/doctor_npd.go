// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"natkit/internal/ui/report"
)

// npdStatus is the exit code of natkit doctor -o npd, whose line is printed already.
type npdStatus int

func (npdStatus) Error() string { return "reported to node-problem-detector" }

func showNPD(e *env, n *report.NPD) error {
	line, status := n.Line()
	if _, err := fmt.Fprintln(e.stdout, line); err != nil {
		return err
	}
	return npdStatus(status)
}

// npdFailure is a doctor that failed, as node-problem-detector wants it: 1, natkit's exit code
// of an error, would mean a problem of the node. The line goes into the node's condition, the
// whole of it on standard error into the detector's log.
func npdFailure(e *env, err error) error {
	if _, reported := err.(npdStatus); reported || err == nil {
		return err
	}
	fmt.Fprintln(e.stdout, report.NPDFailure(inWords(err)))
	fmt.Fprintf(e.stderr, "natkit: %s\n", inWords(err))
	return npdStatus(report.NPDUnknown)
}
