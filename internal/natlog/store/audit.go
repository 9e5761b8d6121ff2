// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// AuditFile is the name of the file of look-ups in the folder of the log.
const AuditFile = "who.audit"

// Audit is a line of that file: who asked what, and what the log had.
type Audit struct {
	Time     time.Time `json:"time"`
	UID      int       `json:"uid"`
	LoginUID *uint32   `json:"login_uid,omitempty"` // as whom they logged in, which su and sudo do not change; absent for services
	User     string    `json:"user,omitempty"`      // who became root by sudo, as sudo has it
	External string    `json:"external"`
	Protocol string    `json:"protocol,omitempty"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until"`
	Verdict  string    `json:"verdict"`
	Found    int       `json:"found_count"`
}

// WriteAudit appends a line and has it on the disk when it returns.
func WriteAudit(dir string, a Audit) error {
	if err := writeAudit(dir, a); err != nil {
		return fmt.Errorf("write the audit file: %w", err)
	}
	return nil
}

func writeAudit(dir string, a Audit) error {
	line, err := json.Marshal(a)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, AuditFile), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if size := info.Size(); size > 0 { // the disk may have been full in the middle of the last line
		var last [1]byte
		if _, err := f.ReadAt(last[:], size-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			line = append([]byte{'\n'}, line...)
		}
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if info.Size() == 0 { // its name is new
		return syncFolder(dir)
	}
	return nil
}
