// SPDX-License-Identifier: Apache-2.0

// Problems of a rule file: all at once, each with its place.

package rulefile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is something in a rule file that is wrong, or that its author should know.
type Problem struct {
	File string `json:"file"`
	Position
	Message string `json:"message"`
}

// String is the form that compilers and editors know: file:line:column: message.
func (p Problem) String() string {
	if p.Line == 0 {
		return p.File + ": " + p.Message
	}
	return fmt.Sprintf("%s:%d:%d: %s", p.File, p.Line, p.Column, p.Message)
}

// Problems is the error of Parse: everything that is wrong with a file, in its order.
type Problems []Problem

func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, one := range p {
		lines[i] = one.String()
	}
	return strings.Join(lines, "\n")
}

// maxProblems are reported of one file; who has more starts with these. Of a file that is
// something else altogether no more than maxKept are kept to choose from.
const (
	maxProblems = 100
	maxKept     = 10000
	maxMessage  = 300 // bytes of a message: a value that it quotes may be a whole file
)

// collector gathers the problems of one file.
type collector struct {
	name     string
	problems Problems
	count    int // of all, kept or not
}

func (c *collector) add(at Position, format string, args ...any) {
	if c.count++; c.count <= maxKept {
		c.problems = append(c.problems, Problem{c.name, at, shorten(fmt.Sprintf(format, args...))})
	}
}

// shorten leaves out the middle of a message that is too long.
func shorten(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	half := maxMessage / 2
	return strings.ToValidUTF8(message[:half], "") + "..." + strings.ToValidUTF8(message[len(message)-half:], "")
}

// sorted gives them in the order of the file.
func (c *collector) sorted() Problems {
	slices.SortStableFunc(c.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	if more := c.count - maxProblems; more > 0 {
		c.problems = append(c.problems[:maxProblems], Problem{File: c.name, Message: fmt.Sprintf("and %d more problems", more)})
	}
	return c.problems
}
