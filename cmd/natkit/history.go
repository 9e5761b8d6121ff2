// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/history"
	"natkit/internal/ui/report"
)

func newHistoryCommand(e *env) *cobra.Command {
	var dir, since, until string
	cmd := &cobra.Command{
		Use:   "history",
		Short: "Show when each finding began and ended, and what changed before",
		Long: `Show the findings that natkit monitor recorded: when each began and ended, and what
changed in rules, routes, links and settings in the two minutes before.

Times are local: 03:12 is the last time that it was 03:12, of --since the last time
before --until; 2026-03-01 03:12 and RFC 3339 work too, and so do durations before
now, such as 8h or 2d. For what was wrong at one time, with evidence and remedy, use
natkit doctor --at.

-o html is one self-contained page with the course of the night.`,
		Example: `  natkit history
  natkit history --since 8h
  natkit history --since 22:00 --until 06:00 -o html > night.html`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringVar(&since, "since", "24h", "show what was recorded since this `time`")
	f.StringVar(&until, "until", "", "show what was recorded until this `time`")
	f.StringVar(&dir, "history", "", "read the history in this `FOLDER`")
	out := outputFlag(cmd, "text", "json", "html")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		span, err := spanOf(since, until, time.Now())
		if err != nil {
			return err
		}
		// What began before is known from entries before.
		var r report.HistoryResult
		r.Since, r.Until = span.From, span.To
		damaged, err := history.Read(historyFolder(dir), history.Span{From: span.From.Add(-report.HistoryLead), To: span.To}, r.Add)
		if err != nil {
			return err
		}
		r.Finish(damaged)
		switch *out {
		case "json":
			return report.JSON(e.stdout, r)
		case "html":
			return r.HTML(e.stdout, time.Local)
		}
		return r.Text(e.stdout, time.Local, colored(e.stdout))
	}
	return cmd
}

// spanOf reads --since and --until.
func spanOf(since, until string, now time.Time) (span history.Span, err error) {
	if span.From, err = parseMoment(since, now); err != nil {
		return span, usagef("--since %w", err)
	}
	span.To = now
	if until != "" {
		if span.To, err = parseMoment(until, now); err != nil {
			return span, usagef("--until %w", err)
		}
	}
	if _, err := parseAge(since); err != nil && span.To.Before(span.From) { // of 22:00 to 06:00, the 22:00 of the night before
		if span.From, err = parseMoment(since, span.To); err != nil {
			return span, usagef("--since %w", err)
		}
	}
	if span.To.Before(span.From) {
		return span, usagef("--until %s is before --since %s", span.To.Format(time.DateTime), span.From.Format(time.DateTime))
	}
	return span, nil
}

// parseAge reads a duration, also in days.
func parseAge(text string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		return time.Duration(n) * 24 * time.Hour, err
	}
	d, err := time.ParseDuration(text)
	if err == nil && d < 0 {
		err = fmt.Errorf("%q is negative", text)
	}
	return d, err
}

// parseBytes reads a size: 256MB, 1GB, 512KB, which are MiB, GiB and KiB and may be written so.
func parseBytes(text string) (int64, error) {
	for unit, shift := range map[string]int{"KB": 10, "MB": 20, "GB": 30} {
		if number, ok := strings.CutSuffix(strings.ReplaceAll(strings.ToUpper(text), "IB", "B"), unit); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 20)
			return int64(n) << shift, err
		}
	}
	n, err := strconv.ParseUint(text, 10, 62)
	return int64(n), err
}
