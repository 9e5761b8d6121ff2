// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// Drift is how the machine has moved away from what an engine was configured with: status
// names it, an apply of the rules in use follows it, and Serve does that by itself.
type Drift struct {
	What  string
	Waits bool // nothing can be done before more happens on the machine
	Stops bool // packets are not translated until then
}

// staleGC is how old the last run of expiry may be. It comes several times a second.
const staleGC = 5 * time.Second

// driftOf compares. Made are the changes of the namespace that the instance has made.
func driftOf(ns *netns.Handle, rec *record, file *rulefile.File, e running, made []Change) ([]Drift, error) {
	d := &drifting{rec: rec, file: file, made: made}
	err := ns.Do(func() error {
		if err := e.drift(d); err != nil {
			return err
		}
		return d.changes()
	})
	return d.out, err
}

type drifting struct {
	rec    *record
	file   *rulefile.File
	made   []Change
	engine *datapath.Engine // of engine ebpf
	out    []Drift
}

func (d *drifting) add(format string, args ...any) {
	d.out = append(d.out, Drift{What: fmt.Sprintf(format, args...)})
}

func (d *drifting) stop(format string, args ...any) {
	d.out = append(d.out, Drift{What: fmt.Sprintf(format, args...), Stops: true})
}

func (d *drifting) wait(format string, args ...any) {
	d.out = append(d.out, Drift{What: fmt.Sprintf(format, args...), Waits: true})
}

func (d *drifting) programs() error {
	stats, err := d.engine.Stats()
	if err != nil {
		return err
	}
	if time.Duration(stats.GCAge) > staleGC {
		d.stop("expiry has not run for %v", time.Duration(stats.GCAge).Round(time.Second))
	}
	if d.rec.Make != datapath.Make() {
		d.add("the programs are another natkit's; no session is lost when they are replaced")
	}
	return nil
}

// interfaces compares what the engine knows of interfaces and addresses. The calling
// thread is in the namespace.
func (d *drifting) interfaces(pins string) error {
	attached, err := datapath.Attached(pins)
	if err != nil {
		return err
	}
	local, err := localAddresses()
	if err != nil {
		return err
	}
	for _, name := range interfacesOf(d.file) {
		i := slices.IndexFunc(d.rec.Links, func(l linkRecord) bool { return l.Name == name })
		if i < 0 {
			continue // a record that is older than its rules: its apply was killed, and settled since
		}
		known := d.rec.Links[i]
		l, err := netlink.LinkByName(name)
		if err != nil {
			d.wait("%s", missingLink(name, known.Ifindex))
			continue
		}
		if err := d.device(l, known, attached); err != nil {
			return err
		}
		if err := d.masquerade(l, known); err != nil {
			return err
		}
	}
	if err := d.moved(attached); err != nil {
		return err
	}
	for _, a := range d.rec.Addresses {
		if has := slices.Contains(local, a.Addr); has != a.Owned && !a.Leaving && !a.Masquerade {
			d.add("%s is %s the gateway's own address", a.Addr, map[bool]string{true: "now", false: "no longer"}[has])
		}
	}
	return nil
}

// missingLink is what has become of an interface that is not there by its name. The calling thread is in the namespace.
func missingLink(name string, ifindex int) string {
	if l, err := netlink.LinkByIndex(ifindex); ifindex != 0 && err == nil {
		return fmt.Sprintf("interface %s was renamed to %s, and the rule file names it %s", name, l.Attrs().Name, name)
	}
	return fmt.Sprintf("interface %s is gone", name)
}

// moved finds programs on interfaces that are in another namespace now: the kernel leaves them
// on, and they would go on with packets there by the rules of this one.
func (d *drifting) moved(attached map[int][]datapath.Hook) error {
	for _, ifindex := range slices.Sorted(maps.Keys(attached)) {
		_, err := netlink.LinkByIndex(ifindex)
		switch {
		case ifindex == 0 || err == nil: // deleted, or here
		case errors.As(err, new(netlink.LinkNotFoundError)):
			d.add("interface number %d was moved to another namespace and carries a program of this one", ifindex)
		default:
			return fmt.Errorf("interface %d: %w", ifindex, err)
		}
	}
	return nil
}

// device compares the interface itself.
func (d *drifting) device(l netlink.Link, known linkRecord, attached map[int][]datapath.Hook) error {
	is := l.Attrs()
	was, err := d.engine.Link(known.Index)
	if err != nil {
		return err
	}
	off, err := d.takenOff(is, attached)
	if err != nil {
		return err
	}
	switch {
	case was.Ifindex == 0:
		d.stop("interface %s is there now", is.Name)
	case was.Ifindex != is.Index:
		d.stop("interface %s was recreated and carries no program", is.Name)
	case off != "":
		d.stop("somebody has taken the program off the %s hook of interface %s", off, is.Name)
	case was.Ethernet && string(was.MAC[:]) != string(is.HardwareAddr):
		d.add("interface %s has another MAC address, %s", is.Name, is.HardwareAddr)
	case was.MTU != min(is.MTU, 65535):
		d.add("interface %s has another MTU, %d", is.Name, is.MTU)
	}
	return nil
}

// takenOff is a hook of an interface at which the programs are not any more, "" if there is
// none.
func (d *drifting) takenOff(is *netlink.LinkAttrs, attached map[int][]datapath.Hook) (datapath.Hook, error) {
	has, err := datapath.Hooks(attached, is.Index)
	if err != nil {
		return "", err
	}
	if !slices.Contains(has, datapath.HookTC) {
		return datapath.HookTC, nil
	}
	i := slices.IndexFunc(d.rec.Rules.Placements, func(p Placement) bool { return p.Interface == is.Name })
	if i >= 0 && d.rec.Rules.Placements[i].XDP && !slices.Contains(has, datapath.HookXDP) {
		return datapath.HookXDP, nil
	}
	return "", nil
}

// masquerade compares the address that packets get which leave by an interface.
func (d *drifting) masquerade(l netlink.Link, known linkRecord) error {
	have, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("addresses of %q: %w", l.Attrs().Name, err)
	}
	var now netip.Addr
	if len(have) > 0 {
		now, _ = netip.AddrFromSlice(have[0].IP.To4())
	}
	i := slices.IndexFunc(d.rec.Addresses, func(a datapath.ExternalAddress) bool {
		return a.Masquerade && !a.Leaving && a.Link == known.Index
	})
	name := l.Attrs().Name
	switch {
	case known.Awaited && now.IsValid():
		d.stop("interface %s has an address now, %s", name, now)
	case i < 0:
	case !now.IsValid():
		d.wait("interface %s no longer has the address %s that it masquerades behind, nor another", name, d.rec.Addresses[i].Addr)
	case now != d.rec.Addresses[i].Addr:
		d.stop("interface %s no longer has the address %s that it masquerades behind, but %s", name, d.rec.Addresses[i].Addr, now)
	}
	return nil
}

// changes finds what of the instance's own changes of the namespace is not there any
// more: an interface that goes down forgets whom it answers ARP for. The calling thread
// is in the namespace.
func (d *drifting) changes() error {
	proxies, err := proxied()
	if err != nil {
		return err
	}
	routes, err := hostRoutes()
	if err != nil {
		return err
	}
	seen := map[Change]bool{}
	for _, c := range d.made {
		c.Old, c.Keep, c.Ifindex, c.Reason = "", "", 0, ""
		if seen[c] {
			continue
		}
		seen[c] = true
		switch c.Kind {
		case changeNeighbour:
			_, err := netlink.LinkByName(c.Interface)
			if err == nil && !slices.Contains(proxies, datapath.ProxyNeighbour{Link: c.Interface, Addr: c.Address}) {
				d.stop("ARP for %s is no longer answered on %s", c.Address, c.Interface)
			}
		case changeRoute:
			if !routes[c.Address] {
				d.stop("the route of %s, for which ARP is answered, is gone", c.Address)
			}
		case changeSetting:
			if c.Setting != settingForward {
				continue // others may add ports to those that are kept
			}
			if now, err := readSetting(c.Setting); err != nil {
				return err
			} else if now != c.New {
				d.stop("somebody has set %s to %s", c.Setting, now)
			}
		}
	}
	return nil
}

// unanswered finds addresses for which engine nft is to answer since it was configured with the
// interfaces: one has an address again. Those that it was configured with are among its changes.
func (d *drifting) unanswered() error {
	wanted, tooMany, err := kernelProxies(d.file)
	if err != nil {
		return err
	}
	if tooMany != "" {
		d.wait("%s", tooMany)
	}
	have, err := proxied()
	if err != nil {
		return err
	}
	answered := map[datapath.ProxyNeighbour]bool{}
	for _, n := range have {
		answered[n] = true
	}
	for _, c := range d.made {
		answered[datapath.ProxyNeighbour{Link: c.Interface, Addr: c.Address}] = true
	}
	open := map[string][]string{}
	for _, n := range wanted {
		if !answered[n] {
			open[n.Link] = append(open[n.Link], n.Addr.String())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(open)) {
		d.stop("ARP is not answered on %s for %s", name, listed(open[name]))
	}
	return nil
}

// readDrift opens what driftOf needs. ErrDown says that nothing is up, or not whole.
func readDrift(ns *netns.Handle, file *rulefile.File) ([]Drift, error) {
	rec, err := readSettled(ns)
	if err == nil && !rec.Whole {
		err = ErrDown
	}
	if err != nil {
		return nil, err
	}
	made, err := standing(instancePath(ns.Inode(), ".journal"))
	if err != nil {
		return nil, err
	}
	e, err := rec.open(ns)
	if err != nil {
		return nil, err
	}
	drift, err := driftOf(ns, rec, file, e, made)
	return drift, errors.Join(err, e.Close())
}
