// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
)

// A background server is a child of the process that runs Up, and outlives it.
// It starts inside the namespace as the ServeCommand, which calls Serve. The two
// talk over pipes:
//
//	goPipe      parent -> child: one byte, once the child is in the journal. The
//	            end of the pipe without it means that the parent died: so does the
//	            child, which nobody would ever find.
//	statusPipe  child -> parent: why it can't serve. Its end without a word means
//	            that the child listens, or has become the program it was asked for.
const (
	goPipe     = 3
	statusPipe = 4
)

// Serve is the body of the background server: args are what startServer gave it.
// It returns when ctx ends, or with the reason why it does not serve; that has
// been told to the parent already.
func Serve(ctx context.Context, args []string) error {
	for _, fd := range []int{goPipe, statusPipe} {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return errors.New("serve: this is for natkit lab up to run, not for people")
		}
		unix.CloseOnExec(fd)
	}
	goahead, status := os.NewFile(goPipe, "go"), os.NewFile(statusPipe, "status")
	var word [1]byte
	if _, err := io.ReadFull(goahead, word[:]); err != nil {
		return errors.New("serve: natkit lab up ended before it said to go")
	}
	goahead.Close()
	err := func() error {
		if len(args) < 2 {
			return fmt.Errorf("serve %q: want http ADDRESS:PORT, or exec PROGRAM and its arguments", args)
		}
		switch args[0] {
		case "http":
			s, err := listenHTTP(nil, args[1], HTTPServerOptions{})
			if err != nil {
				return err
			}
			status.Close()
			// This process does nothing else: its one loop shall not be moved from
			// thread to thread, nor tell the scheduler of every short wait.
			runtime.GOMAXPROCS(1)
			s.hold = 2
			defer context.AfterFunc(ctx, s.stop)()
			s.loop()
			return s.err
		case "exec":
			return fmt.Errorf("execute %q: %w", args[1], unix.Exec(args[1], args[1:], os.Environ()))
		}
		return fmt.Errorf("serve %q: not a kind of server", args[0])
	}()
	if err != nil {
		fmt.Fprint(status, err)
	}
	return err
}

// startServer starts the web server of Options.Server in a node and waits until it
// answers.
func (l *Lab) startServer(ctx context.Context, at listenPlan, j *journal.Journal) error {
	if len(l.plan.options.ServeCommand) == 0 {
		return errors.New("no command given that would serve")
	}
	node := l.mustNode(at.role)
	args := []string{"http", at.addr.String()}
	if l.plan.options.Server == ServerNginx {
		path, err := lookPath("nginx")
		if err != nil {
			return errors.New("nginx is not installed: install it, or use --server builtin")
		}
		dir := filepath.Join(runDir(), l.name+"."+at.role)
		if err := writeNginx(dir, at.addr, j); err != nil {
			return err
		}
		if err := node.Do(func() error {
			return errors.Join(raiseSysctl("net.core.somaxconn", defaultBacklog), raiseSysctl("net.ipv4.tcp_max_syn_backlog", defaultBacklog))
		}); err != nil {
			return err
		}
		args = []string{"exec", path, "-p", dir, "-c", filepath.Join(dir, "nginx.conf")}
	}
	ended, err := l.spawn(node, args, j)
	if err != nil {
		return err
	}
	if err := awaitListener(ctx, node, at.addr, ended); err != nil {
		if log, _ := os.ReadFile(filepath.Join(runDir(), l.name+"."+at.role, "error.log")); len(log) > 0 {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(log)))
		}
		return err
	}
	return nil
}

// spawn starts a background server. The channel is closed when it ends.
func (l *Lab) spawn(node *Node, args []string, j *journal.Journal) (ended <-chan struct{}, err error) {
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer goWrite.Close()
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		goRead.Close()
		return nil, err
	}
	defer statusRead.Close()

	argv := append(l.plan.options.ServeCommand[:len(l.plan.options.ServeCommand):len(l.plan.options.ServeCommand)], args...)
	cmd := node.Command(context.Background(), argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{goRead, statusWrite}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	goRead.Close()
	statusWrite.Close()
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait() // however it ended, it is not there; its last words came over the pipe
	}()
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	if err := j.Append(record{Process: &p}); err != nil {
		return nil, err
	}
	if _, err := goWrite.Write([]byte{1}); err != nil {
		return nil, fmt.Errorf("start %q: %w", argv, err)
	}
	trouble, err := io.ReadAll(statusRead)
	if err == nil && len(trouble) > 0 {
		err = errors.New(string(trouble))
	}
	return done, err
}

// awaitListener waits until something accepts connections there.
func awaitListener(ctx context.Context, node *Node, addr netip.AddrPort, ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("it does not listen after 10 s"))
	defer cancel()
	for {
		err := node.Do(func() error {
			c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(addr))
			if err == nil {
				c.Close()
			}
			return err
		})
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		case <-ended:
			return errors.New("the server ended at once")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// writeNginx makes a directory with all that an nginx of this lab reads and writes.
func writeNginx(dir string, addr netip.AddrPort, j *journal.Journal) error {
	if err := j.Append(record{Dir: dir}); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make directory for nginx: %w", err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read limit of open files: %w", err)
	}
	// One process, so that ending it ends all of it.
	conf := fmt.Sprintf(`daemon off;
master_process off;
pid nginx.pid;
error_log error.log;
worker_rlimit_nofile %[1]d;
events { worker_connections %[2]d; }
http {
	access_log off;
	keepalive_requests 1000000; # of who asks for it
	client_body_temp_path client;
	proxy_temp_path proxy;
	fastcgi_temp_path fastcgi;
	uwsgi_temp_path uwsgi;
	scgi_temp_path scgi;
	server {
		listen %[3]s backlog=%[4]d;
		location / { default_type text/plain; return 200 %[5]q; }
	}
}
`, limit.Max, min(limit.Max, 65536), addr, defaultBacklog, defaultBody)
	return os.WriteFile(filepath.Join(dir, "nginx.conf"), []byte(conf), 0o600)
}
