// SPDX-License-Identifier: GPL-2.0-only
/* CPUs: which one this is, and how to make another leave the guest. */
#include <linux/cpumask.h>
#include <linux/percpu.h>
#include <linux/preempt.h>
#include <linux/smp.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
#include <trace/events/ipi.h>
#endif

#include "gannet.h"

/* Scratch for gnt_sync_*, whose user cannot be preempted; too large for the stack. */
static struct cpumask __percpu *masks;

int gnt_smp_init(void)
{
	masks = __alloc_percpu(cpumask_size(), __alignof__(unsigned long));
	return masks ? 0 : -ENOMEM;
}

void gnt_smp_exit(void)
{
	free_percpu(masks);
}

u32 gnt_cpu_id(void)
{
	return raw_smp_processor_id();
}

u32 gnt_max_cpus(void)
{
	return nr_cpu_ids;
}

u32 gnt_online_cpus(void)
{
	return num_online_cpus();
}

void gnt_kick(u32 cpu)
{
	/* What takes a CPU down waits for those that cannot be preempted: it is there for the IPI. */
	preempt_disable();
	if (cpu_online(cpu))
		smp_send_reschedule(cpu);
	preempt_enable();
}

static void acknowledge(void *unused)
{
}

struct cpumask *gnt_sync_begin(void)
{
	struct cpumask *mask;

	preempt_disable();
	mask = this_cpu_ptr(masks);
	cpumask_clear(mask);
	return mask;
}

void gnt_sync_add(struct cpumask *mask, u32 cpu)
{
	__cpumask_set_cpu(cpu, mask);
}

/* When it returns, every CPU of the mask has left what it was in: who frees memory relies on that. */
void gnt_sync_end(struct cpumask *mask)
{
	if (!cpumask_empty(mask))
		smp_call_function_many(mask, acknowledge, NULL, true);
	preempt_enable();
}

static void call(void *f)
{
	((void (*)(void))f)();
}

void gnt_run_on_all(void (*f)(void))
{
	on_each_cpu(call, f, 1);
}

struct request {
	void (*f)(u64);
	u64 argument;
};

static void serve(void *r)
{
	struct request *request = r;

	request->f(request->argument);
}

bool gnt_run_on(u32 cpu, void (*f)(u64), u64 argument)
{
	struct request request = { .f = f, .argument = argument };

	return smp_call_function_single(cpu, serve, &request, 1) == 0;
}
