// SPDX-License-Identifier: GPL-2.0-only
/*
 * Observation: tracepoints, and the switch of the cycle histograms. Who observes what is one word
 * that a vCPU reads when it enters its inner loop; a change of it interrupts every CPU, so that
 * vCPUs that are in the guest leave the loop and look again.
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/smp.h>

#include "gannet.h"

#define CREATE_TRACE_POINTS
#include "kvm_trace.h"

u32 gnt_observed;
static DEFINE_MUTEX(switching);

static void look_again(void *unused)
{
}

static void observe(u32 what, bool on)
{
	u32 now;

	mutex_lock(&switching);
	now = on ? gnt_observed | what : gnt_observed & ~what;
	/* What was noted of an exit while the histograms were on last time is of no use. */
	if (what == GNT_OBSERVE_CYCLES)
		now += GNT_OBSERVE_TURN;
	WRITE_ONCE(gnt_observed, now);
	/* This CPU runs no guest now. */
	smp_call_function(look_again, NULL, 1);
	mutex_unlock(&switching);
}

/* Called when the first listener comes and when the last one goes. */
#define SWITCH(name, what)		\
	int gnt_on_##name(void)		\
	{				\
		observe(what, true);	\
		return 0;		\
	}				\
	void gnt_off_##name(void)	\
	{				\
		observe(what, false);	\
	}

SWITCH(kvm_entry, GNT_OBSERVE_ENTRY)
SWITCH(kvm_exit, GNT_OBSERVE_EXIT)
SWITCH(kvm_pio, GNT_OBSERVE_PIO)
SWITCH(kvm_mmio, GNT_OBSERVE_MMIO)
SWITCH(kvm_msr, GNT_OBSERVE_MSR)
SWITCH(kvm_cpuid, GNT_OBSERVE_CPUID)
SWITCH(kvm_hypercall, GNT_OBSERVE_HYPERCALL)
SWITCH(kvm_inj_virq, GNT_OBSERVE_INJ_VIRQ)
SWITCH(kvm_page_fault, GNT_OBSERVE_PAGE_FAULT)

static bool exit_histograms;

static int set_histograms(const char *value, const struct kernel_param *param)
{
	bool before = exit_histograms;
	int r = param_set_bool(value, param);

	if (!r && before != exit_histograms)
		observe(GNT_OBSERVE_CYCLES, exit_histograms);
	return r;
}

static const struct kernel_param_ops histogram_ops = {
	.set = set_histograms,
	.get = param_get_bool,
};
module_param_cb(exit_histograms, &histogram_ops, &exit_histograms, 0644);
__MODULE_PARM_TYPE(exit_histograms, "bool");
MODULE_PARM_DESC(exit_histograms,
	"Histograms of the cycles from each exit to the next entry, by reason (default 0)");

void gnt_trace_entry(u32 vcpu_id, u64 rip)
{
	trace_kvm_entry(vcpu_id, rip);
}

void gnt_trace_exit(const struct gnt_trace_exit *x)
{
	trace_kvm_exit(x);
}

void gnt_trace_pio(u32 write, u32 port, u32 size, u32 count, u32 value)
{
	trace_kvm_pio(write, port, size, count, value);
}

void gnt_trace_mmio(u32 kind, u32 len, u64 gpa, u64 value)
{
	trace_kvm_mmio(kind, len, gpa, value);
}

void gnt_trace_msr(u32 write, u32 index, u64 value, u32 faulted)
{
	trace_kvm_msr(write, index, value, faulted);
}

void gnt_trace_cpuid(u32 leaf, u32 subleaf, const u32 *answer, u32 found)
{
	trace_kvm_cpuid(leaf, subleaf, answer, found);
}

void gnt_trace_hypercall(const u64 *call)
{
	trace_kvm_hypercall(call);
}

void gnt_trace_inj_virq(u32 vector)
{
	trace_kvm_inj_virq(vector, false, false);
}

void gnt_trace_page_fault(u32 vcpu_id, u64 rip, u64 address, u64 error)
{
	trace_kvm_page_fault(vcpu_id, rip, address, error);
}
