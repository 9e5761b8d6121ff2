// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// Hooks lists the functions on the netfilter hooks of a namespace, by family,
// hook and the order in which a packet meets them. A nil handle is the caller's
// own namespace.
//
// The kernel's lists are read by a program; where it is not allowed to run, the
// kernel is asked by netlink (Linux 5.14 and later with
// CONFIG_NETFILTER_NETLINK_HOOK), which does not tell the chains inside the NAT
// core. The error wraps ErrUnavailable where neither is possible.
func Hooks(ns *netns.Handle) ([]snapshot.Hook, error) {
	l := OpenHooks()
	defer l.Close()
	return l.List(ns)
}

// HookLister is Hooks for several namespaces: its program is loaded once, which
// takes far longer than to run it.
type HookLister struct {
	objs   hooksObjects
	reader *ringbuf.Reader
	syms   *symbols
	err    error // the program can't be loaded: netlink has to do
}

const listHooks = "list netfilter hooks"

// OpenHooks loads the program. Where that is not possible List says why, unless
// netlink answers. Close must be called.
func OpenHooks() *HookLister {
	l := &HookLister{}
	if l.err = l.load(); l.err != nil {
		l.Close()
	}
	return l
}

func (l *HookLister) load() error {
	_, opts, err := kernelTypes()
	if err != nil {
		return err
	}
	if err := loadHooksObjects(&l.objs, &ebpf.CollectionOptions{Programs: opts}); err != nil {
		l.objs = hooksObjects{}
		return refused(listHooks, err)
	}
	l.syms, _ = kernelSymbols() // without, addresses are shown, and the chains tell much still
	for name, kind := range hookKinds {
		if addr := l.syms.address(name); addr != 0 {
			if err := l.objs.Kinds.Put(addr, kind); err != nil {
				return fmt.Errorf("%s: %w", listHooks, err)
			}
		}
	}
	if l.reader, err = ringbuf.NewReader(l.objs.Entries); err != nil {
		return fmt.Errorf("%s: %w", listHooks, err)
	}
	return nil
}

// Close releases the program.
func (l *HookLister) Close() {
	if l.reader != nil {
		l.reader.Close()
		l.reader = nil
	}
	if l.objs.ListHooks != nil {
		l.objs.Close()
		l.objs = hooksObjects{}
	}
}

// List is Hooks for one namespace.
func (l *HookLister) List(ns *netns.Handle) ([]snapshot.Hook, error) {
	hooks, err := l.walk(ns)
	if err != nil {
		var netlinkErr error
		if hooks, netlinkErr = netlinkHooks(ns); netlinkErr != nil {
			return nil, fmt.Errorf("%w; %w", err, netlinkErr)
		}
	}
	sortHooks(hooks)
	snapshot.Clean(&snapshot.Snapshot{Hooks: hooks}) // a chain may be called anything
	return hooks, nil
}

// walk runs the program in the namespace and returns what it found.
func (l *HookLister) walk(ns *netns.Handle) ([]snapshot.Hook, error) {
	if l.err != nil {
		return nil, l.err
	}
	var leftOut uint32
	err := ns.Do(func() (err error) {
		leftOut, err = l.objs.ListHooks.Run(&ebpf.RunOptions{})
		return err
	})
	if err != nil {
		return nil, refused(listHooks, err)
	}
	l.reader.SetDeadline(time.Now())
	hooks := []snapshot.Hook{}
	for {
		record, err := l.reader.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", listHooks, err)
		}
		var e hooksHookEntry
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &e); err != nil {
			return nil, fmt.Errorf("%s: %w", listHooks, err)
		}
		hooks = append(hooks, e.hook(l.syms))
	}
	if leftOut > 0 { // what there was room for is read, so that it is not the next one's
		return nil, fmt.Errorf("%s: %d more than there is room for", listHooks, leftOut)
	}
	return hooks, nil
}

// hookKinds are the hook functions whose private pointer the program can follow.
var hookKinds = map[string]hooksHookKind{
	"ipt_do_table":        hooksHookKindHOOK_XT,
	"ip6t_do_table":       hooksHookKindHOOK_XT,
	"arpt_do_table":       hooksHookKindHOOK_XT,
	"iptable_mangle_hook": hooksHookKindHOOK_XT, "ip6table_mangle_hook": hooksHookKindHOOK_XT,

	"nf_nat_ipv4_pre_routing": hooksHookKindHOOK_NAT, "nf_nat_ipv4_local_in": hooksHookKindHOOK_NAT,
	"nf_nat_ipv4_in": hooksHookKindHOOK_NAT, "nf_nat_ipv4_local_fn": hooksHookKindHOOK_NAT,
	"nf_nat_ipv4_fn": hooksHookKindHOOK_NAT, "nf_nat_ipv4_out": hooksHookKindHOOK_NAT,
	"nf_nat_ipv6_in": hooksHookKindHOOK_NAT, "nf_nat_ipv6_local_fn": hooksHookKindHOOK_NAT,
	"nf_nat_ipv6_fn": hooksHookKindHOOK_NAT, "nf_nat_ipv6_out": hooksHookKindHOOK_NAT,
}

// hook names what the kernel numbers.
func (e *hooksHookEntry) hook(syms *symbols) snapshot.Hook {
	name := func(addr uint64) string {
		if function, _ := syms.function(addr); function != "" {
			return function
		}
		return fmt.Sprintf("0x%x", addr)
	}
	h := snapshot.Hook{
		Family:   familyName(e.Family),
		Hook:     hookName(e.Family, uint32(e.Hook)),
		Priority: int(e.Priority),
		Function: name(e.Function),
		Device:   cString(e.Device[:]),
	}
	if e.Via != 0 {
		h.Via = name(e.Via)
	}
	switch {
	case e.Type == hookOpNFTables:
		h.Owner, h.Chain = "nf_tables", cString(e.Table[:])+"/"+cString(e.Chain[:])
	case e.Type == hookOpBPF:
		h.Owner = "bpf"
	case e.Type == hookOpFlowtable, strings.HasPrefix(h.Function, "nf_flow_offload"):
		h.Owner = "flowtable"
	case hooksHookKind(e.Kind) == hooksHookKindHOOK_XT:
		h.Owner, h.Chain = "iptables", cString(e.Table[:])+"/"+strings.ToUpper(h.Hook)
	}
	return h
}

// enum nf_hook_ops_type.
const (
	hookOpNFTables  = 1
	hookOpBPF       = 2
	hookOpFlowtable = 3
)

func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

func familyName(family uint8) string {
	switch family {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_IPV4:
		return "ipv4"
	case unix.NFPROTO_ARP:
		return "arp"
	case unix.NFPROTO_NETDEV:
		return "netdev"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_IPV6:
		return "ipv6"
	}
	return fmt.Sprintf("family-%d", family)
}

// hookNames of each family; those of the bridge are numbered like IP's.
var (
	ipHookNames     = []string{"prerouting", "input", "forward", "output", "postrouting", "ingress"}
	arpHookNames    = []string{"input", "output", "forward"}
	netdevHookNames = []string{"ingress", "egress"}
)

func hookName(family uint8, hook uint32) string {
	names := ipHookNames
	switch family {
	case unix.NFPROTO_ARP:
		names = arpHookNames
	case unix.NFPROTO_NETDEV:
		names = netdevHookNames
	}
	if int(hook) < len(names) {
		return names[hook]
	}
	return fmt.Sprintf("hook-%d", hook)
}

// sortHooks orders by family and hook, as a packet meets them; what is inside of
// a function follows it. Within one hook the kernel's own order stays.
func sortHooks(hooks []snapshot.Hook) {
	families := []string{"netdev", "bridge", "arp", "ipv4", "ipv6", "inet"}
	order := []string{"ingress", "prerouting", "input", "forward", "output", "postrouting", "egress"}
	slices.SortStableFunc(hooks, func(a, b snapshot.Hook) int {
		return cmp.Or(cmp.Compare(slices.Index(families, a.Family), slices.Index(families, b.Family)),
			cmp.Compare(a.Device, b.Device),
			cmp.Compare(slices.Index(order, a.Hook), slices.Index(order, b.Hook)))
	})
}
