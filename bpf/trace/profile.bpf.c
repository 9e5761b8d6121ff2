// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Takes the kernel stack of whatever runs when a CPU's sampling clock ticks, and
 * hands it to user space, which joins equal ones. Stacks are sent, not counted
 * here by their hash: a table of hashes loses those that collide.
 */
#include "kernel.h"

enum {
	PROFILE_DEPTH = 127, /* PERF_MAX_STACK_DEPTH: the kernel unwinds no further */
};

struct profile_sample {
	__u32 idle;  /* the CPU's idle task ran; an interrupt on top of it may be at work */
	__u32 netns; /* of the task that ran: the inode of /proc/PID/ns/net */
	__u64 frames[PROFILE_DEPTH]; /* return addresses, innermost first */
};

struct profile_count {
	__u64 user; /* ticks that found no kernel stack */
	__u64 lost; /* ticks for which there was no room */
};

/* Samples to user space, which looks ten times a second: 128 CPUs with deep stacks
 * make some 3 MB in that time at 499 Hz. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 * 1024 * 1024);
} samples SEC(".maps");

/* Room to put a sample together; each CPU has one tick at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct profile_sample);
} drafts SEC(".maps");

/* Ticks that made no sample, since the program was loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct profile_count);
} counts SEC(".maps");

SEC("perf_event")
int take_sample(void *ctx)
{
	const __u64 header = __builtin_offsetof(struct profile_sample, frames);
	__u32 zero = 0;
	struct profile_sample *s = bpf_map_lookup_elem(&drafts, &zero);
	struct profile_count *count = bpf_map_lookup_elem(&counts, &zero);
	struct task_struct *task = (void *)bpf_get_current_task();
	long bytes;

	if (!s || !count)
		return 0;
	bytes = bpf_get_stack(ctx, s->frames, sizeof(s->frames), 0);
	if (bytes <= 0) {
		count->user++;
		return 0;
	}
	s->idle = (__u32)bpf_get_current_pid_tgid() == 0;
	s->netns = BPF_CORE_READ(task, nsproxy, net_ns, ns.inum);
	if (bytes > (long)sizeof(s->frames)) /* never; the verifier wants to know */
		return 0;
	if (bpf_ringbuf_output(&samples, s, header + bytes, BPF_RB_NO_WAKEUP))
		count->lost++;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
