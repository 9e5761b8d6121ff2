// SPDX-License-Identifier: Apache-2.0

package observe

// This file names the kernel's drop reasons. Their numbers differ from kernel to
// kernel, so the names come from the running one.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// reasons names drop reasons. The high 16 bits of a reason are the subsystem
// that defined it; 0 is the core.
type reasons struct {
	core       map[uint32]string
	subsystems map[uint32]string
}

const subsystemShift = 16

// loadReasons reads the names out of the kernel's types; enums that a kernel
// does not have leave their numbers unnamed.
func loadReasons(kernel *btf.Spec) (reasons, error) {
	core, err := enumNames(kernel, "skb_drop_reason", "SKB_DROP_REASON_", "SKB_")
	if err != nil {
		return reasons{}, err
	}
	subsystems, err := enumNames(kernel, "skb_drop_reason_subsys", "SKB_DROP_REASON_SUBSYS_")
	return reasons{core, subsystems}, err
}

// enumNames returns value -> name of an enum, without the first of the prefixes
// that fits; empty when there is no such enum.
func enumNames(types *btf.Spec, enum string, prefixes ...string) (map[uint32]string, error) {
	var t *btf.Enum
	if err := types.TypeByName(enum, &t); errors.Is(err, btf.ErrNotFound) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read enum %s: %w", enum, err)
	}
	names := make(map[uint32]string, len(t.Values))
	for _, v := range t.Values {
		name := v.Name
		for _, prefix := range prefixes {
			if rest, ok := strings.CutPrefix(name, prefix); ok {
				name = rest
				break
			}
		}
		names[uint32(v.Value)] = name
	}
	return names, nil
}

// name returns "NETFILTER_DROP"; "OPENVSWITCH/3" for a reason that a subsystem
// defined; "reason 200" for one the kernel does not name.
func (r reasons) name(reason uint32) string {
	if subsystem := reason >> subsystemShift; subsystem != 0 {
		name, ok := r.subsystems[subsystem]
		if !ok {
			name = fmt.Sprintf("subsystem %d", subsystem)
		}
		return fmt.Sprintf("%s/%d", name, reason&(1<<subsystemShift-1))
	}
	if name, ok := r.core[reason]; ok {
		return name
	}
	return fmt.Sprintf("reason %d", reason)
}

// checkDropArguments makes sure that the tracepoint passes what the program
// reads: packet, place, reason. Later kernels append arguments.
func checkDropArguments(kernel *btf.Spec) error {
	var def *btf.Typedef
	if err := kernel.TypeByName("btf_trace_kfree_skb", &def); err != nil {
		return fmt.Errorf("tracepoint kfree_skb: %w", errors.Join(ebpf.ErrNotSupported, err))
	}
	pointer, _ := def.Type.(*btf.Pointer)
	if pointer == nil {
		return fmt.Errorf("tracepoint kfree_skb: unexpected type %v: %w", def.Type, ebpf.ErrNotSupported)
	}
	proto, _ := pointer.Target.(*btf.FuncProto) // its first parameter is the tracer's own
	if proto == nil || len(proto.Params) < 4 {
		return fmt.Errorf("tracepoint kfree_skb reports no reason (Linux 5.17 and later do): %w", ebpf.ErrNotSupported)
	}
	if _, ok := btf.UnderlyingType(proto.Params[3].Type).(*btf.Enum); !ok {
		return fmt.Errorf("tracepoint kfree_skb has other arguments than natkit knows: %w", ebpf.ErrNotSupported)
	}
	return nil
}
