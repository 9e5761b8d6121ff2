// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//
// Names the types of abi.h and entry.h that Go needs, so that bpf2go writes them down
// from the object's BTF. No program: the other objects are generated without types, so that Go has
// each type once.
#include "nat/abi.h"
#include "accel/entry.h"

#define NAT_NAME_TYPE(kind, name) const kind name *unused_##name __attribute__((unused))

NAT_NAME_TYPE(enum, nat_limit);
NAT_NAME_TYPE(enum, nat_side);
NAT_NAME_TYPE(enum, nat_class);
NAT_NAME_TYPE(enum, nat_mapping_mode);
NAT_NAME_TYPE(enum, nat_filtering_mode);
NAT_NAME_TYPE(enum, nat_timeout);
NAT_NAME_TYPE(enum, nat_reason);
NAT_NAME_TYPE(enum, nat_flow_state);
NAT_NAME_TYPE(enum, nat_refs);
NAT_NAME_TYPE(enum, nat_slot_use);
NAT_NAME_TYPE(enum, nat_mapping_value);
NAT_NAME_TYPE(enum, nat_address_flag);
NAT_NAME_TYPE(enum, nat_link_flag);
NAT_NAME_TYPE(enum, nat_rule_kind);
NAT_NAME_TYPE(enum, nat_rule_flag);
NAT_NAME_TYPE(enum, nat_destination_kind);
NAT_NAME_TYPE(enum, nat_lookup);
NAT_NAME_TYPE(enum, nat_config_flag);
NAT_NAME_TYPE(enum, nat_event_kind);
NAT_NAME_TYPE(struct, nat_addr);
NAT_NAME_TYPE(struct, nat_flow_key);
NAT_NAME_TYPE(struct, nat_flow);
NAT_NAME_TYPE(struct, nat_flow_rest);
NAT_NAME_TYPE(struct, nat_bucket);
NAT_NAME_TYPE(struct, nat_mapping_key);
NAT_NAME_TYPE(struct, nat_slot);
NAT_NAME_TYPE(struct, nat_ports);
NAT_NAME_TYPE(struct, nat_address);
NAT_NAME_TYPE(struct, nat_source_key);
NAT_NAME_TYPE(struct, nat_source);
NAT_NAME_TYPE(struct, nat_limits);
NAT_NAME_TYPE(struct, nat_granule);
NAT_NAME_TYPE(struct, nat_blocks);
NAT_NAME_TYPE(enum, nat_use);
NAT_NAME_TYPE(enum, nat_pool);
NAT_NAME_TYPE(enum, nat_refusal);
NAT_NAME_TYPE(enum, nat_block_id);
NAT_NAME_TYPE(enum, nat_slot_held);
NAT_NAME_TYPE(struct, nat_computed_key);
NAT_NAME_TYPE(struct, nat_computed);
NAT_NAME_TYPE(struct, nat_filter_key);
NAT_NAME_TYPE(struct, nat_filter_entry);
NAT_NAME_TYPE(struct, nat_lease_key);
NAT_NAME_TYPE(struct, nat_lease_filter);
NAT_NAME_TYPE(struct, nat_lease);
NAT_NAME_TYPE(struct, nat_lease_entry);
NAT_NAME_TYPE(struct, nat_lease_state);
NAT_NAME_TYPE(struct, nat_lease_epoch);
NAT_NAME_TYPE(struct, nat_lease_request);
NAT_NAME_TYPE(enum, nat_lease_flag);
NAT_NAME_TYPE(enum, nat_lease_op);
NAT_NAME_TYPE(enum, nat_lease_request_flag);
NAT_NAME_TYPE(enum, nat_lease_result);
NAT_NAME_TYPE(struct, nat_link);
NAT_NAME_TYPE(struct, nat_rule);
NAT_NAME_TYPE(struct, nat_target);
NAT_NAME_TYPE(struct, nat_exact_key);
NAT_NAME_TYPE(struct, nat_destination_key);
NAT_NAME_TYPE(struct, nat_origin_key);
NAT_NAME_TYPE(struct, nat_prefix_key);
NAT_NAME_TYPE(struct, nat_exclude_key);
NAT_NAME_TYPE(struct, nat_config);
NAT_NAME_TYPE(struct, nat_control);
NAT_NAME_TYPE(struct, nat_counts);
NAT_NAME_TYPE(struct, nat_stats);
NAT_NAME_TYPE(struct, nat_hold_down);
NAT_NAME_TYPE(struct, nat_fragment_key);
NAT_NAME_TYPE(struct, nat_fragment);
NAT_NAME_TYPE(struct, nat_event);
NAT_NAME_TYPE(enum, nat_log_what);
NAT_NAME_TYPE(enum, nat_log_kind);
NAT_NAME_TYPE(enum, nat_log_event);
NAT_NAME_TYPE(enum, nat_log_limit);
NAT_NAME_TYPE(struct, nat_log_record);
NAT_NAME_TYPE(struct, nat_log);
NAT_NAME_TYPE(enum, nat_accel_reason);
NAT_NAME_TYPE(struct, nat_accel_entry);
NAT_NAME_TYPE(struct, nat_accel_stats);
