// SPDX-License-Identifier: GPL-2.0-only
/* Module parameters: the switches by which each mechanism can be measured. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cc_platform.h>
#include <linux/moduleparam.h>
#include <linux/module.h>
#include <linux/printk.h>
#include <linux/string.h>

#include "gannet.h"

static unsigned int halt_poll_ns = 200000;
module_param(halt_poll_ns, uint, 0644);
MODULE_PARM_DESC(halt_poll_ns,
	"How long, in ns, a halted vCPU polls for work before its thread sleeps (default 200000; 0: never)");

static char *host_state = "vmsave";
module_param(host_state, charp, 0444);
MODULE_PARM_DESC(host_state,
	"How the host's segment and system-call registers are kept while a guest runs: vmsave (default), or msr: read and written one by one, to measure against");

static bool xstate_cache = true;
module_param(xstate_cache, bool, 0444);
MODULE_PARM_DESC(xstate_cache,
	"Read the layout of the XSAVE area once, at load (default 1; 0: with CPUID whenever a guest's required size is computed, to measure against)");

static bool npt = true;
module_param(npt, bool, 0444);
MODULE_PARM_DESC(npt, "AMD: nested page tables (default 1); 0: shadow paging");

static bool ept = true;
module_param(ept, bool, 0444);
MODULE_PARM_DESC(ept, "Intel: extended page tables (default 1); 0: shadow paging");

static bool keep_roots = true;
module_param(keep_roots, bool, 0444);
MODULE_PARM_DESC(keep_roots,
	"Keep a vCPU's page-table roots when its paging mode changes (default 1); 0: unload and rebuild them, as KVM once did");

int gnt_npt(void)
{
	return npt;
}

int gnt_ept(void)
{
	return ept;
}

int gnt_keep_roots(void)
{
	return keep_roots;
}

static bool nested_dirty_tracking = true;
module_param(nested_dirty_tracking, bool, 0444);
MODULE_PARM_DESC(nested_dirty_tracking,
	"Intel, guests that are hypervisors: write into the VMCS of a guest's guest what changed (default 1); 0: all of it at each entry, to measure against");

int gnt_nested_dirty_tracking(void)
{
	return nested_dirty_tracking;
}

static bool lazy_tscdeadline = true;
module_param(lazy_tscdeadline, bool, 0444);
MODULE_PARM_DESC(lazy_tscdeadline,
	"Lazy TSC deadline: guests may put a timer off without an exit (default 1; 0: not offered)");

int gnt_lazy_tscdeadline(void)
{
	return lazy_tscdeadline;
}

static bool enable_apicv = true;
module_param(enable_apicv, bool, 0444);
MODULE_PARM_DESC(enable_apicv,
	"Have the CPU serve local APICs in x2APIC mode where it can, Intel only (default 1; 0: every interrupt is injected)");

int gnt_enable_apicv(int possible)
{
	enable_apicv = enable_apicv && possible;
	return enable_apicv;
}

static bool nested = true;
module_param(nested, bool, 0444);
MODULE_PARM_DESC(nested,
	"Guests may be hypervisors, where this module can run their guests (default 1; 0: not offered). Shows what is offered");

int gnt_nested(int possible)
{
	nested = nested && possible;
	return nested;
}

static bool enable_shadow_vmcs = true;
module_param(enable_shadow_vmcs, bool, 0444);
MODULE_PARM_DESC(enable_shadow_vmcs,
	"Intel, guests that are hypervisors: the CPU serves their VMREAD and VMWRITE of frequent fields where it can (default 1; 0: each is an exit). Shows what is used");

int gnt_enable_shadow_vmcs(int possible)
{
	enable_shadow_vmcs = enable_shadow_vmcs && possible;
	return enable_shadow_vmcs;
}

static bool preemption_timer = true;
module_param(preemption_timer, bool, 0444);
MODULE_PARM_DESC(preemption_timer,
	"Intel: a running guest's APIC timer is the VMX-preemption timer where the CPU has one (default 1; 0: the host's timer). Shows what is used");

int gnt_preemption_timer(void)
{
	return preemption_timer;
}

/* As in stock KVM the parameter then tells what is. Before the module is seen in sysfs as live. */
void gnt_no_preemption_timer(void)
{
	preemption_timer = false;
}

u64 gnt_halt_poll_ns(void)
{
	return READ_ONCE(halt_poll_ns);
}

int gnt_host_state_by_msr(void)
{
	return !strcmp(host_state, "msr");
}

int gnt_xstate_cache(void)
{
	return xstate_cache;
}

int gnt_params_check(void)
{
	/* Control blocks and tables would have to carry the encryption bit in every address. */
	if (cc_platform_has(CC_ATTR_HOST_MEM_ENCRYPT)) {
		pr_err("memory encryption of the host (SME) is active, which is not supported\n");
		return -EOPNOTSUPP;
	}
	if (strcmp(host_state, "vmsave") && strcmp(host_state, "msr")) {
		pr_err("host_state=%s: unknown; use vmsave or msr\n", host_state);
		return -EINVAL;
	}
	return 0;
}
