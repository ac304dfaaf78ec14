// SPDX-License-Identifier: GPL-2.0-only
/* Module parameters: the switches by which each mechanism can be measured. Those of one vendor's CPUs are in vendor.c. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cc_platform.h>
#include <linux/moduleparam.h>
#include <linux/module.h>
#include <linux/printk.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "compat.h"
#include "gannet.h"

static unsigned int halt_poll_ns = 200000;
module_param(halt_poll_ns, uint, 0644);
MODULE_PARM_DESC(halt_poll_ns,
	"How long, in ns, a halted vCPU polls for work before its thread sleeps (default 200000; 0: never)");

static bool xstate_cache = true;
module_param(xstate_cache, bool, 0444);
MODULE_PARM_DESC(xstate_cache,
	"Read the layout of the XSAVE area once, at load (default 1; 0: with CPUID whenever a guest's required size is computed, to measure against)");

static bool keep_roots = true;
module_param(keep_roots, bool, 0444);
MODULE_PARM_DESC(keep_roots,
	"Keep a vCPU's page-table roots when its paging mode changes (default 1); 0: unload and rebuild them, as KVM once did");

static bool lazy_tscdeadline = true;
module_param(lazy_tscdeadline, bool, 0444);
MODULE_PARM_DESC(lazy_tscdeadline,
	"Lazy TSC deadline: guests may put a timer off without an exit (default 1; 0: not offered)");

#ifdef GNT_SPLIT

/* An `options kvm` that was written for the stock module is no reason not to load. */
static int constant_set(const char *value, const struct kernel_param *kp)
{
	pr_warn("parameter %s cannot be changed\n", kp->name);
	return 0;
}

static int constant_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%s\n", (const char *)kp->arg);
}

const struct kernel_param_ops gnt_constant_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG, .set = constant_set, .get = constant_get
};
GNT_EXPORT(gnt_constant_ops);

const struct kernel_param_ops gnt_constant_bool_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG, .set = constant_set, .get = param_get_bool
};
GNT_EXPORT(gnt_constant_bool_ops);

static bool is_used(const struct kernel_param *kp)
{
	const struct gnt_use_of *use = kp->arg;

	return READ_ONCE(*use->uses) & BIT(use->bit);
}

static int use_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%c\n", is_used(kp) ? 'Y' : 'N');
}

const struct kernel_param_ops gnt_use_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG, .set = constant_set, .get = use_get
};
GNT_EXPORT(gnt_use_ops);

/* Many of stock kvm_amd are numbers. */
static int use_number_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%d\n", is_used(kp));
}

const struct kernel_param_ops gnt_use_number_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG, .set = constant_set, .get = use_number_get
};
GNT_EXPORT(gnt_use_number_ops);

static int bool_number_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%d\n", *(const bool *)kp->arg);
}

const struct kernel_param_ops gnt_bool_number_ops = { .set = param_set_bool, .get = bool_number_get };
GNT_EXPORT(gnt_bool_number_ops);

GNT_CONSTANT(force_emulation_prefix, "0");
GNT_CONSTANT(ignore_msrs, "N");
GNT_CONSTANT(enable_pmu, "N");
GNT_CONSTANT(enable_vmware_backdoor, "N");
GNT_CONSTANT(eager_page_split, "N");
GNT_CONSTANT(tdp_mmu, "N");

#endif

/* Those of the vendor's module, while it is started; else a set that nobody reads. */
static struct gnt_switches nobodys = GNT_SWITCHES_DEFAULT;
static struct gnt_switches *switches = &nobodys;

int gnt_npt(void)
{
	return switches->npt;
}

int gnt_ept(void)
{
	return switches->ept;
}

int gnt_keep_roots(void)
{
	return keep_roots;
}

int gnt_nested_dirty_tracking(void)
{
	return switches->nested_dirty_tracking;
}

int gnt_nested_apicv(void)
{
	return switches->nested_apicv;
}

int gnt_lazy_tscdeadline(void)
{
	return lazy_tscdeadline;
}

int gnt_enable_apicv(int possible)
{
	switches->enable_apicv = switches->enable_apicv && possible;
	return switches->enable_apicv;
}

int gnt_nested(int possible)
{
	switches->nested = switches->nested && possible;
	return switches->nested;
}

int gnt_enable_shadow_vmcs(int possible)
{
	switches->enable_shadow_vmcs = switches->enable_shadow_vmcs && possible;
	return switches->enable_shadow_vmcs;
}

int gnt_preemption_timer(void)
{
	return switches->preemption_timer;
}

/* As in stock KVM the parameter then tells what is. Before the module is seen in sysfs as live. */
void gnt_no_preemption_timer(void)
{
	switches->preemption_timer = false;
}

/* As in stock KVM the parameters tell what is. Before the module is seen in sysfs as live. */
void gnt_uses(u32 uses)
{
	switches->uses = uses;
}

u32 gnt_l1d_flush_asked(void)
{
	return READ_ONCE(switches->l1d_flush);
}

u64 gnt_halt_poll_ns(void)
{
	return READ_ONCE(halt_poll_ns);
}

int gnt_host_state_by_msr(void)
{
	return !strcmp(switches->host_state, "msr");
}

int gnt_xstate_cache(void)
{
	return xstate_cache;
}

/*
 * With SEV-SNP an entry marks the page of a control block as in use, which the first CPUs of that kind take for the whole
 * large page around it.
 */
static bool snp_is_on(void)
{
#ifdef X86_FEATURE_SEV_SNP
	u64 word;

	/* What the kernel may do later, and what was done before it. */
	if (cc_platform_has(CC_ATTR_HOST_SEV_SNP))
		return true;
	if (boot_cpu_has(X86_FEATURE_SEV_SNP) && !rdmsrq_safe(MSR_AMD64_SYSCFG, &word))
		return word & MSR_AMD64_SYSCFG_SNP_EN;
#endif
	return false;
}

/* Each call and return changes per-CPU data then, and in the loop of SVM the GS base is the guest's. */
static bool counts_calls(void)
{
#ifdef X86_FEATURE_CALL_DEPTH
	return boot_cpu_has(X86_FEATURE_SVM) && boot_cpu_has(X86_FEATURE_CALL_DEPTH);
#else
	return false;
#endif
}

/* 0 or a negative errno, with a reason in the log. NULL: they go. */
int gnt_params_use(struct gnt_switches *given)
{
	switches = &nobodys;
	if (!given)
		return 0;
	/* Control blocks and tables would have to carry the encryption bit in every address. */
	if (cc_platform_has(CC_ATTR_HOST_MEM_ENCRYPT)) {
		pr_err("memory encryption of the host (SME) is active, which is not supported\n");
		return -EOPNOTSUPP;
	}
	if (snp_is_on()) {
		pr_err("SEV-SNP is enabled on the host, which is not supported\n");
		return -EOPNOTSUPP;
	}
	if (counts_calls()) {
		pr_err("the kernel counts calls (retbleed=stuff), which is not supported on AMD CPUs\n");
		return -EOPNOTSUPP;
	}
	if (strcmp(given->host_state, "vmsave") && strcmp(given->host_state, "msr")) {
		pr_err("host_state=%s: unknown; use vmsave or msr\n", given->host_state);
		return -EINVAL;
	}
	switches = given;
	return 0;
}
