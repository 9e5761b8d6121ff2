// SPDX-License-Identifier: Apache-2.0

package datapath

import _ "natkit/internal/kernel/littleendian" // as the objects below are

// The eBPF objects and their Go types are committed; a test compares them with
// their source. The types are those of bpf/nat/abi.h, and come from an object of their own.
//go:generate ../../../bpf/generate.sh -type nat_limit -type nat_side -type nat_class -type nat_mapping_mode -type nat_filtering_mode -type nat_timeout -type nat_reason -type nat_flow_state -type nat_refs -type nat_slot_use -type nat_mapping_value -type nat_address_flag -type nat_link_flag -type nat_rule_kind -type nat_rule_flag -type nat_destination_kind -type nat_lookup -type nat_config_flag -type nat_event_kind -type nat_addr -type nat_flow_key -type nat_flow -type nat_flow_rest -type nat_bucket -type nat_mapping_key -type nat_slot -type nat_ports -type nat_address -type nat_source_key -type nat_source -type nat_limits -type nat_granule -type nat_blocks -type nat_use -type nat_pool -type nat_refusal -type nat_block_id -type nat_slot_held -type nat_computed_key -type nat_computed -type nat_filter_key -type nat_filter_entry -type nat_lease_key -type nat_lease_filter -type nat_lease -type nat_lease_entry -type nat_lease_state -type nat_lease_epoch -type nat_lease_request -type nat_lease_flag -type nat_lease_op -type nat_lease_request_flag -type nat_lease_result -type nat_link -type nat_rule -type nat_target -type nat_exact_key -type nat_destination_key -type nat_origin_key -type nat_prefix_key -type nat_exclude_key -type nat_config -type nat_control -type nat_counts -type nat_stats -type nat_hold_down -type nat_fragment_key -type nat_fragment -type nat_event -type nat_log_what -type nat_log_kind -type nat_log_event -type nat_log_limit -type nat_log_record -type nat_log -type nat_accel_reason -type nat_accel_entry -type nat_accel_stats abi ../../../bpf/nat/abi.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types xdp ../../../bpf/nat/xdp.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types tc ../../../bpf/nat/tc.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types gc ../../../bpf/nat/gc.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types -output-suffix _test portTest ../../../bpf/test/port.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types ports ../../../bpf/nat/ports.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types lease ../../../bpf/nat/lease.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types -output-suffix _test sessionTest ../../../bpf/test/session.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types -output-suffix _test tableTest ../../../bpf/test/table.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types accelTc ../../../bpf/accel/tc.bpf.c
//go:generate ../../../bpf/generate.sh -no-global-types accelXdp ../../../bpf/accel/xdp.bpf.c
