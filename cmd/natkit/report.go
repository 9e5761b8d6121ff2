// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"natkit/internal/ui/report"
)

func newReportCommand(e *env) *cobra.Command {
	var compare bool
	cmd := &cobra.Command{
		Use:   "report [flags] FILE...",
		Short: "Show saved measurements as text or HTML, or compare two",
		Long: `Show what "natkit bench" and "natkit demo" saved with -o json. natkit recognizes a
file by its content; "-" is standard input. Everything shown is computed again from
the raw values in the files.

With -o html the page is one file that needs no network and no script: bars with
their spread, curves of loss and latency against the load, cost against the number
of rules, distributions of times, and tables to copy. Figures published by others
are marked.

--compare compares two files, figure by figure, for the same router, metric and
conditions. It shows for each change whether it is outside the noise, and by which
rule.`,
		Example: `  natkit report udp.json
  natkit report -o html udp.json rules.json > report.html
  natkit report --compare before.json after.json
  natkit report --compare -o html before.json after.json > change.html`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().BoolVar(&compare, "compare", false, "compare two files")
	out := outputFlag(cmd, "text", "html", "json")
	cmd.RunE = func(_ *cobra.Command, files []string) error {
		if compare && len(files) != 2 {
			return usagef("--compare: want two files, got %d", len(files))
		}
		if e.netns != "" {
			return usagef("--netns %q: a report is made from files alone", e.netns)
		}
		var saved []*report.Saved
		for _, name := range files {
			s, err := e.load(name)
			if err != nil {
				return err
			}
			saved = append(saved, s)
		}
		if compare {
			c, err := report.Compare(saved[0], saved[1])
			if err != nil {
				return err
			}
			switch *out {
			case "html":
				return report.ComparedHTML(e.stdout, c)
			case "json":
				return report.JSON(e.stdout, c)
			}
			return report.Compared(e.stdout, c)
		}
		switch *out {
		case "html":
			return report.HTML(e.stdout, saved)
		case "json":
			return report.JSON(e.stdout, report.SavedResults{Results: saved})
		}
		return report.Text(e.stdout, saved)
	}
	return cmd
}

// load reads a saved result from a file, or from the standard input.
func (e *env) load(name string) (*report.Saved, error) {
	var from io.Reader = e.stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, fmt.Errorf("read result: %w", err)
		}
		defer f.Close()
		from = f
	}
	return report.Load(name, from)
}

// resultFile is a file that a long command writes at its end. It is opened before,
// so that one which can't be written is known in time; what it held stays until
// there is something to write.
type resultFile struct {
	name    string
	created bool
	content bytes.Buffer
}

func openResultFile(name string) (*resultFile, error) {
	_, err := os.Lstat(name)
	r := &resultFile{name: name, created: os.IsNotExist(err)}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	return r, f.Close()
}

// close writes the content. Without any it leaves no file that was not there.
func (r *resultFile) close() error {
	switch {
	case r.content.Len() > 0:
		return os.WriteFile(r.name, r.content.Bytes(), 0o666)
	case r.created:
		return os.Remove(r.name)
	}
	return nil
}
