// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"

	"natkit/internal/diagnose/causes"
	"natkit/internal/scenario"
	"natkit/internal/words/shell"
)

// FaultResult is a fault scenario as -o json prints it.
type FaultResult struct {
	Code  string      `json:"code"`
	Title string      `json:"title"`
	Note  string      `json:"note,omitempty"`
	Steps []FaultStep `json:"steps"` // healthy, broken, cured; fewer when it ended early
	OK    bool        `json:"ok"`    // the doctor said what it should about each
	Error string      `json:"error,omitempty"`
}

// FaultStep is one state of the lab and the doctor's answer about it.
type FaultStep struct {
	Name     string       `json:"name"`
	What     string       `json:"what"`
	Commands []string     `json:"commands"` // of the finding's remedy, that the cure consists of
	Doctor   DoctorResult `json:"doctor"`
}

// Fault is what became of a scenario.
func Fault(f scenario.Fault, steps []scenario.FaultStep, err error) FaultResult {
	res := FaultResult{Code: f.Code, Title: faultTitle(f), Note: f.Note, Steps: []FaultStep{}, OK: err == nil}
	if err != nil {
		res.Error = err.Error()
	}
	for _, s := range steps {
		res.Steps = append(res.Steps, FaultStep{s.Name, s.What, append([]string{}, s.Commands...), Doctor(s.Facts, s.Findings)})
	}
	return res
}

func faultTitle(f scenario.Fault) string {
	for _, c := range causes.Catalogue() {
		if c.Code == f.Code {
			return c.Title
		}
	}
	return ""
}

// FaultText tells a scenario for people, as it happens.
type FaultText struct {
	W     io.Writer
	Color bool
	steps int
}

// Begin says what is going to happen, and shows the lab.
func (t *FaultText) Begin(f scenario.Fault, drawing string, notes []string) error {
	p := &page{color: t.Color}
	p.b.WriteString(p.style(bold, f.Code+": "+faultTitle(f)) + "\n\n" + drawing)
	if f.Note != "" {
		p.text("", "", "Note: "+f.Note+".")
	}
	for _, n := range notes {
		p.text("", "", "Note: "+n+".")
	}
	_, err := io.WriteString(t.W, p.b.String())
	return err
}

// Step shows one step: what was done, and what the doctor says.
func (t *FaultText) Step(s *scenario.FaultStep) error {
	t.steps++
	p := &page{color: t.Color}
	p.b.WriteByte('\n')
	p.text(fmt.Sprintf("%d. %s: ", t.steps, strings.ToUpper(s.Name)), "   ", s.What+".")
	for _, c := range s.Commands {
		p.b.WriteString("   $ " + c + "\n")
	}
	p.b.WriteString("   $ " + shell.Command("natkit", "doctor", "--netns", s.Facts.Netns.Name) + "\n")
	if len(s.Findings) == 0 {
		p.text("   ", "   ", nothingWrong(s.Facts, causes.NotJudged(s.Facts, s.Findings)))
	}
	for _, f := range s.Findings {
		p.finding(f)
	}
	if s.Name == "broken" { // once is enough
		p.unseen(s.Facts.Capabilities)
	}
	_, err := io.WriteString(t.W, p.b.String())
	return err
}

// FaultInfo is one scenario in the list of them.
type FaultInfo struct {
	Code    string `json:"code"`
	Title   string `json:"title"`
	Healthy string `json:"healthy"`
	Broken  string `json:"broken"`
	Cured   string `json:"cured"`
	Note    string `json:"note,omitempty"`
}

// Faults is what natkit lab run --list prints with -o json.
type Faults struct {
	Faults []FaultInfo `json:"faults"`
}

// NewFaults lists the scenarios.
func NewFaults(faults []scenario.Fault) Faults {
	out := Faults{[]FaultInfo{}}
	for _, f := range faults {
		out.Faults = append(out.Faults, FaultInfo{f.Code, faultTitle(f), f.Healthy, f.Broken, f.Cured, f.Note})
	}
	return out
}

// FaultList writes the code of each scenario and, beside it, what is broken.
func FaultList(w io.Writer, faults []scenario.Fault) error {
	width := 0
	for _, f := range faults {
		width = max(width, len(f.Code)+2)
	}
	var p page
	for _, f := range faults {
		p.text(fmt.Sprintf("%-*s", width, f.Code), strings.Repeat(" ", width), f.Broken)
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}
