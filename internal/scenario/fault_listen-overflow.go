// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"strings"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var listenFault = Fault{
	Code:    "listen-overflow",
	Healthy: "a web server with a long accept queue takes 300 connections at a time",
	Broken:  "the web server is started with a queue for one connection, and 300 arrive at a time",
	Cured:   "the server is restarted with the backlog that the finding proposes",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		s.watched = s.lab.ServerNode()
		s.traffic = append(s.traffic, s.httpLoad(bench.HTTPOptions{URL: s.lab.URL(), Concurrency: 300}))
		return s.restart(ctx, lab.HTTPServerOptions{})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.restart(ctx, lab.HTTPServerOptions{Backlog: 1})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		var backlog int
		for _, line := range f.Remedy {
			if _, after, ok := strings.Cut(line, "backlog="); ok {
				fmt.Sscanf(after, "%d", &backlog)
			}
		}
		if backlog == 0 {
			return fmt.Errorf("the remedy of %s names no backlog:\n%s", f.Code, strings.Join(f.Remedy, "\n"))
		}
		s.commands = append(s.commands, fmt.Sprintf("# listen with a backlog of %d", backlog))
		return s.restart(ctx, lab.HTTPServerOptions{Backlog: backlog})
	},
}

// restart puts a web server with other options in the place of the present one.
func (s *faultRun) restart(ctx context.Context, o lab.HTTPServerOptions) error {
	s.close()
	return s.serve(ctx, o)
}
