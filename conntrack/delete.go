// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flush removes every entry of the calling thread's namespace, as `conntrack -F`.
func Flush(ctx context.Context) error {
	s, err := openSocket(ctx, 0)
	if err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	defer s.close()
	var m message
	s.seq++
	m.begin(msgDelete, unix.NLM_F_ACK, s.seq, unix.AF_UNSPEC)
	m.end()
	if err := s.send(m.b); err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	if _, err := s.answers(s.seq, func(errno unix.Errno) error { return explain(errno) }); err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	return nil
}
