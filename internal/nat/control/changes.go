// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// Change is something that an instance changes in its namespace besides its own maps
// and rules. It is in the journal before it is made, and undone by Down.
type Change struct {
	Kind string `json:"kind"` // setting, neighbour, route

	Setting string `json:"setting,omitempty"` // "net.ipv4.ip_forward"
	Old     string `json:"old,omitempty"`
	New     string `json:"new,omitempty"`
	// Keep are settings, with spaces between, that the kernel changes when this one is put back,
	// and that were otherwise before.
	Keep string `json:"keep,omitempty"`

	Interface string     `json:"interface,omitempty"`
	Ifindex   int        `json:"ifindex,omitempty"` // of the interface of a neighbour or a setting: it may be renamed
	Address   netip.Addr `json:"address,omitzero"`

	Reason string `json:"reason"`
	Undone bool   `json:"undone,omitempty"` // in the journal: the change before it of that kind was taken back
}

const (
	changeSetting   = "setting"
	changeNeighbour = "neighbour" // a proxy neighbour: ARP for the address is answered
	changeRoute     = "route"     // the address by lo: the kernel answers only for what is not on the same interface
)

// routeProtocol marks natkit's routes; `ip route` shows it.
const routeProtocol = 110

func (c Change) String() string { return c.text(c.Address.String()) }

func (c Change) text(addresses string) string {
	switch c.Kind {
	case changeNeighbour:
		return fmt.Sprintf("answer ARP for %s on %s: %s", addresses, c.Interface, c.Reason)
	case changeRoute:
		return fmt.Sprintf("route %s to %s: %s", addresses, c.Interface, c.Reason)
	}
	return fmt.Sprintf("%s: %q -> %q: %s", c.Setting, c.Old, c.New, c.Reason)
}

// ChangesText says changes in a line each, and as one those that are alike but for the
// address: a pool makes two for each of its addresses.
func ChangesText(changes []Change) (lines []string) {
	alike := func(a, b Change) bool {
		return a.Kind != changeSetting && a.Kind == b.Kind && a.Interface == b.Interface && a.Reason == b.Reason
	}
	for i, c := range changes {
		if slices.ContainsFunc(changes[:i], func(before Change) bool { return alike(before, c) }) {
			continue
		}
		var addresses []string
		for _, other := range changes[i:] {
			if alike(c, other) {
				addresses = append(addresses, other.Address.String())
			}
		}
		lines = append(lines, c.text(listed(addresses)))
	}
	return lines
}

// settingChange is the change of a setting to a value, nil if it has it. The calling
// thread is in the namespace.
func settingChange(name, value, reason string) (*Change, error) {
	old, err := readSetting(name)
	if err != nil {
		return nil, err
	}
	if old == value {
		return nil, nil
	}
	return &Change{Kind: changeSetting, Setting: name, Old: old, New: value, Reason: reason}, nil
}

func readSetting(name string) (string, error) {
	data, err := os.ReadFile(settingFile(name))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return strings.TrimSpace(string(data)), nil
}

// do makes changes, each written down first. On error those that were made stay in the
// journal, for undo.
func do(ns *netns.Handle, j *journal.Journal, changes []Change) error {
	for _, c := range changes {
		if err := j.Append(c); err != nil {
			return err
		}
		if err := ns.Do(c.make); err != nil {
			return err
		}
	}
	return nil
}

func (c Change) make() error {
	switch c.Kind {
	case changeSetting:
		return writeSetting(c.Setting, c.New)
	case changeNeighbour:
		n, err := c.neighbour()
		if err != nil {
			return err
		}
		if err := netlink.NeighSet(n); err != nil {
			return fmt.Errorf("answer for %s on %s: %w", c.Address, c.Interface, err)
		}
		return nil
	case changeRoute:
		r, err := c.route()
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(r); err != nil {
			return fmt.Errorf("route %s to %s, which must be up: %w", c.Address, c.Interface, err)
		}
		return nil
	}
	return fmt.Errorf("change of unknown kind %q", c.Kind)
}

// splitForwarding takes out the changes that let packets through: they are made when
// somebody translates them, and undone before nobody does.
func splitForwarding(changes []Change) (others, forwarding []Change) {
	for _, c := range changes {
		if c.Setting == settingForward {
			forwarding = append(forwarding, c)
		} else {
			others = append(others, c)
		}
	}
	return others, forwarding
}

// standing reads the changes of a journal that were not taken back, oldest first.
func standing(path string) (changes []Change, err error) {
	err = journal.Read(path, func(line json.RawMessage) error {
		var c Change
		if err := json.Unmarshal(line, &c); err != nil {
			return err
		}
		if !c.Undone {
			changes = append(changes, c)
			return nil
		}
		c.Undone = false
		for i := len(changes) - 1; i >= 0; i-- {
			if changes[i] == c {
				changes = slices.Delete(changes, i, i+1)
				break
			}
		}
		return nil
	})
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: what was changed here can't be read from it; without the file `natkit down` leaves that as it is", err)
	}
	return changes, nil
}

// undo puts changes back, the last one first. What somebody else has changed since is
// kept, and reported. The journal is nil for changes that end with their namespace.
func undo(ns *netns.Handle, j *journal.Journal, changes []Change) (kept []string, err error) {
	var errs []error
	for _, c := range slices.Backward(changes) {
		err := ns.Do(func() error {
			why, err := c.unmake(j)
			if why != "" && !slices.Contains(kept, why) {
				kept = append(kept, why)
			}
			return err
		})
		errs = append(errs, err)
	}
	return kept, errors.Join(errs...)
}

// takeBack undoes changes and writes that down: the instance goes on without them.
func takeBack(ns *netns.Handle, j *journal.Journal, changes []Change) error {
	_, err := undo(ns, j, changes)
	if err != nil {
		return err
	}
	for _, c := range slices.Backward(changes) {
		c.Undone = true
		if err := j.Append(c); err != nil {
			return err
		}
	}
	return nil
}

// unmake puts one change back. Who waits for it no more does not stop it: half put back is
// worse. Of TCP that was accelerated, connection tracking has not followed the windows; so
// before it looks at them again, connections that are open are excepted. No program may be
// attached any more by then, or others would miss packets until then.
func (c Change) unmake(j *journal.Journal) (kept string, err error) {
	switch c.Kind {
	case changeSetting:
		if c.Ifindex != 0 {
			l, err := netlink.LinkByIndex(c.Ifindex)
			if errors.As(err, new(netlink.LinkNotFoundError)) {
				return "", nil // another interface may have its name
			}
			if err != nil {
				return "", fmt.Errorf("interface %d: %w", c.Ifindex, err)
			}
			c.Setting = redirectSetting(l.Attrs().Name)
		}
		value, err := readSetting(c.Setting)
		switch {
		case errors.Is(err, os.ErrNotExist): // its interface is gone
			return "", nil
		case err != nil:
			return "", err
		case value == c.Old: // never made
			return "", nil
		case value != c.New:
			return fmt.Sprintf("%s is %q, which is not natkit's: it stays", c.Setting, value), nil
		case c.Setting == settingLiberal:
			if _, err := conntrack.IgnoreWindows(context.Background()); err != nil {
				return fmt.Sprintf("%s stays %s, or open connections could stall: %v; when they have ended, `sysctl -w %s=%s` puts it back", c.Setting, value, err, c.Setting, c.Old), nil
			}
		}
		return "", c.putBack(j)
	case changeNeighbour:
		n, err := c.neighbour()
		if err != nil {
			return "", nil // the interface is gone, and its neighbours with it
		}
		if err := netlink.NeighDel(n); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
			return "", fmt.Errorf("stop answering for %s on %s: %w", c.Address, c.Interface, err)
		}
		return "", nil
	case changeRoute:
		r, err := c.route()
		if err != nil {
			return "", err
		}
		if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			return "", fmt.Errorf("remove route of %s: %w", c.Address, err)
		}
		return "", nil
	}
	return "", fmt.Errorf("change of unknown kind %q", c.Kind)
}

// putBack gives a setting its old value, and leaves those of Keep as they are now.
func (c Change) putBack(j *journal.Journal) error {
	along := c.along(j)
	err := writeSetting(c.Setting, c.Old)
	for _, k := range along {
		if after, gone := readSetting(k.Setting); gone == nil && after != k.Old {
			err = errors.Join(err, writeSetting(k.Setting, k.Old))
		}
	}
	return err
}

// along are what the kernel may change of Keep as the setting is put back. They are in the journal before that, like
// what natkit changes: after a kill in between the setting has its old value, which does not
// show that those lack theirs.
func (c Change) along(j *journal.Journal) (along []Change) {
	for name := range strings.FieldsSeq(c.Keep) {
		value, err := readSetting(name)
		if err != nil {
			continue // its interface is gone
		}
		k := Change{Kind: changeSetting, Setting: name, Old: value, New: "1", Reason: "the kernel changes it with " + c.Setting}
		if value == k.New {
			k.New = "0"
		}
		if j != nil {
			_ = j.Append(k) // where there is no room to write it down, it is put back all the same
		}
		along = append(along, k)
	}
	return along
}

// keptFromForwarding are what Change.Keep is of settingForward. The kernel gives its value to the
// interfaces and to new ones, and switches the acceptance of redirects over (inet_forward_change):
// an interface that forwards though the namespace does not, or redirects that are refused though
// nothing is forwarded, would be lost. The calling thread is in the namespace.
func keptFromForwarding() (string, error) {
	folders, err := os.ReadDir(settingFile("net.ipv4.conf"))
	if err != nil {
		return "", fmt.Errorf("list settings of interfaces: %w", err)
	}
	var keep []string
	for _, f := range folders {
		name, forwarding := snapshot.SysctlName("net", "ipv4", "conf", f.Name(), "forwarding"), "1"
		if f.Name() == "all" { // which is settingForward itself
			name, forwarding = settingRedirects, "0"
		}
		value, err := readSetting(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		if value == forwarding {
			keep = append(keep, name)
		}
	}
	return strings.Join(keep, " "), nil
}

func (c Change) neighbour() (*netlink.Neigh, error) {
	if c.Ifindex == 0 { // as earlier natkits wrote it
		l, err := netlink.LinkByName(c.Interface)
		if err != nil {
			return nil, fmt.Errorf("interface %q: %w", c.Interface, err)
		}
		c.Ifindex = l.Attrs().Index
	}
	return &netlink.Neigh{LinkIndex: c.Ifindex, Flags: netlink.NTF_PROXY, IP: net.IP(c.Address.AsSlice())}, nil
}

func (c Change) route() (*netlink.Route, error) {
	l, err := netlink.LinkByName(c.Interface)
	if err != nil {
		return nil, fmt.Errorf("interface %q: %w", c.Interface, err)
	}
	return &netlink.Route{
		LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK, Protocol: routeProtocol,
		Dst: &net.IPNet{IP: c.Address.AsSlice(), Mask: net.CIDRMask(32, 32)},
	}, nil
}

func writeSetting(name, value string) error {
	if err := os.WriteFile(settingFile(name), []byte(value+"\n"), 0); err != nil {
		return fmt.Errorf("set %s to %q: %w", name, value, err)
	}
	return nil
}

func settingFile(name string) string { return "/proc/sys/" + snapshot.SysctlPath(name) }
