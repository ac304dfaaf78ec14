// SPDX-License-Identifier: GPL-2.0-only
/*
 * The parameters that are of one vendor's CPUs alone. In one module they are all there; under KVM's names this file is
 * kvm-amd.ko and, compiled once more, kvm-intel.ko, with KVM's names for what KVM has too: each is loaded by the CPU's
 * feature, and switches on what kvm.ko holds.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>

#include <asm/cpu_device_id.h>
#include <asm/processor.h>

#include "gannet.h"

#ifndef GNT_SPLIT
#define GNT_AMD
#define GNT_INTEL
#define SWITCHES	gnt_own_switches
struct gnt_switches SWITCHES = GNT_SWITCHES_DEFAULT;
#else
#define SWITCHES	switches
static struct gnt_switches SWITCHES = GNT_SWITCHES_DEFAULT;
#endif

#if defined(GNT_SPLIT) && defined(GNT_AMD)
/* Stock kvm_amd shows 1, kvm_intel Y. */
module_param_cb(nested, &gnt_bool_number_ops, &SWITCHES.nested, 0444);
__MODULE_PARM_TYPE(nested, "int");
#else
module_param_named(nested, SWITCHES.nested, bool, 0444);
#endif
MODULE_PARM_DESC(nested,
	"Guests may be hypervisors, where this module can run their guests (default 1; 0: not offered). Shows what is offered");

#ifdef GNT_AMD
module_param_named(npt, SWITCHES.npt, bool, 0444);
MODULE_PARM_DESC(npt, "AMD: nested page tables (default 1); 0: shadow paging");

module_param_named(host_state, SWITCHES.host_state, charp, 0444);
MODULE_PARM_DESC(host_state,
	"How the host's segment and system-call registers are kept while a guest runs: vmsave (default), or msr: read and written one by one, to measure against");
#endif

#ifdef GNT_INTEL
module_param_named(ept, SWITCHES.ept, bool, 0444);
MODULE_PARM_DESC(ept, "Intel: extended page tables (default 1); 0: shadow paging");

module_param_named(nested_dirty_tracking, SWITCHES.nested_dirty_tracking, bool, 0444);
MODULE_PARM_DESC(nested_dirty_tracking,
	"Intel, guests that are hypervisors: write into the VMCS of a guest's guest what changed (default 1); 0: all of it at each entry, to measure against");

module_param_named(nested_apicv, SWITCHES.nested_apicv, bool, 0444);
MODULE_PARM_DESC(nested_apicv,
	"Intel, guests that are hypervisors: 1: virtual-interrupt delivery and posted interrupts, done in software, where the CPU has no posted interrupts, too (default 0)");

module_param_named(enable_apicv, SWITCHES.enable_apicv, bool, 0444);
MODULE_PARM_DESC(enable_apicv,
	"Have the CPU serve local APICs in x2APIC mode where it can, Intel only (default 1; 0: every interrupt is injected)");

module_param_named(enable_shadow_vmcs, SWITCHES.enable_shadow_vmcs, bool, 0444);
MODULE_PARM_DESC(enable_shadow_vmcs,
	"Intel, guests that are hypervisors: the CPU serves their VMREAD and VMWRITE of frequent fields where it can (default 1; 0: each is an exit). Shows what is used");

module_param_named(preemption_timer, SWITCHES.preemption_timer, bool, 0444);
MODULE_PARM_DESC(preemption_timer,
	"Intel: a running guest's APIC timer is the VMX-preemption timer where the CPU has one (default 1; 0: the host's timer). Shows what is used");

module_param_cb(vmentry_l1d_flush, &gnt_l1d_ops, &SWITCHES.l1d_flush, 0644);
MODULE_PARM_DESC(vmentry_l1d_flush,
	"Intel: flush of the L1 data cache at VM entry on CPUs with L1TF: auto (default: what l1tf= says), never, cond: where the host ran since the last entry, always");
#endif

#ifdef GNT_SPLIT

#ifdef GNT_AMD
GNT_CONSTANT(avic, "N");
GNT_CONSTANT(vgif, "0");
GNT_USES(lbrv, gnt_use_number_ops, GNT_LBR);
GNT_USES(nrips, gnt_use_number_ops, GNT_NRIP_SAVE);
GNT_USES(vls, gnt_use_number_ops, GNT_VIRTUAL_VMLOAD);
GNT_USES(tsc_scaling, gnt_use_number_ops, GNT_TSC_SCALING);
GNT_USES(vnmi, gnt_use_ops, GNT_VIRTUAL_NMI);
#else
GNT_CONSTANT(allow_smaller_maxphyaddr, "N");
GNT_CONSTANT(flexpriority, "N");
GNT_CONSTANT(vnmi, "Y");
GNT_USES(pml, gnt_use_ops, GNT_PML);
GNT_USES(vpid, gnt_use_ops, GNT_VPID);
GNT_USES(eptad, gnt_use_ops, GNT_EPT_DIRTY);
module_param_cb(unrestricted_guest, &gnt_constant_bool_ops, &SWITCHES.ept, 0444);
MODULE_PARM_DESC(unrestricted_guest, "As in stock KVM, for programs that read it: as ept");
#endif

#ifdef GNT_AMD
#define IS_OURS		true
#define FEATURE		X86_FEATURE_SVM
#define CPUS		"AMD"
#else
#define IS_OURS		false
#define FEATURE		X86_FEATURE_VMX
#define CPUS		"Intel"
#endif

static const struct x86_cpu_id cpu_ids[] = {
	X86_MATCH_FEATURE(FEATURE, NULL),
	{}
};
MODULE_DEVICE_TABLE(x86cpu, cpu_ids);

/* Which CPUs the core takes for AMD's. Whether this one will do, and if not why, it says itself. */
static bool is_amd_like(void)
{
	return boot_cpu_data.x86_vendor == X86_VENDOR_AMD || boot_cpu_data.x86_vendor == X86_VENDOR_HYGON;
}

static int __init load(void)
{
	if (is_amd_like() != IS_OURS) {
		pr_err("this module is for " CPUS " CPUs\n");
		return -EOPNOTSUPP;
	}
	return gnt_start(&SWITCHES, THIS_MODULE);
}

static void __exit unload(void)
{
	gnt_stop();
}

module_init(load);
module_exit(unload);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Gannet on " CPUS " CPUs: the parameters, and the start of what kvm.ko holds");
MODULE_VERSION(GANNET_VERSION);

#endif
