// SPDX-License-Identifier: GPL-2.0-only
/*
 * SVM and VMX on and off on the CPU that this runs on.
 *
 * Newer kernels do it themselves, for they have a use of their own for VMX (TDX), and count the users of each CPU. A crash
 * then switches off what is on, and calls a hypervisor before for what it alone knows. Older kernels leave it to the
 * hypervisor.
 */
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/preempt.h>

#include <asm/asm.h>
#include <asm/cpufeature.h>
#include <asm/perf_event.h>
#include <asm/reboot.h>
#include <asm/tlbflush.h>
#ifdef GNT_HAS_X86_VIRT
#include <asm/virt.h>
#endif

#include "compat.h"
#include "gannet.h"

/* The kernel reads IA32_FEATURE_CONTROL when a CPU comes up, and locks it where firmware did not. */
bool gnt_vmx_allowed(void)
{
	return boot_cpu_has(X86_FEATURE_MSR_IA32_FEAT_CTL) && boot_cpu_has(X86_FEATURE_VMX);
}

/* A crash is under way: the kernel, if it does this itself, does it after the callback. */
static bool crashing;

#ifdef GNT_HAS_X86_VIRT

static DEFINE_PER_CPU(bool, counted);

static int virt_on(int feature)
{
	int r;

	if (this_cpu_read(counted))
		return 0;
	r = x86_virt_get_ref(feature);
	if (!r)
		this_cpu_write(counted, true);
	return r;
}

static void virt_off(int feature)
{
	if (READ_ONCE(crashing) || !this_cpu_read(counted))
		return;
	this_cpu_write(counted, false);
	x86_virt_put_ref(feature);
}

static int svm_on(void)
{
	return virt_on(X86_FEATURE_SVM);
}

static void svm_off(void)
{
	virt_off(X86_FEATURE_SVM);
}

/* The region for VMXON is the kernel's, too. */
int gnt_vmx_on(u64 region)
{
	return virt_on(X86_FEATURE_VMX);
}

void gnt_vmx_off(void)
{
	virt_off(X86_FEATURE_VMX);
}

#else

static int svm_on(void)
{
	u64 efer;

	rdmsrq(MSR_EFER, efer);
	if (efer & EFER_SVME)
		return -EBUSY;
	wrmsrq(MSR_EFER, efer | EFER_SVME);
	return 0;
}

static void svm_off(void)
{
	u64 efer;

	rdmsrq(MSR_EFER, efer);
	wrmsrq(MSR_EFER, efer & ~EFER_SVME);
}

/*
 * Processor trace must not be on where the CPU cannot trace in VMX operation, and CR4 is the
 * kernel's, which keeps a copy of it.
 */
int gnt_vmx_on(u64 region)
{
	intel_pt_handle_vmx(1);
	cr4_set_bits(X86_CR4_VMXE);
	asm goto("1: vmxon %[region]\n\t"
		 "jbe %l[refused]\n\t"
		 _ASM_EXTABLE(1b, %l[refused])
		 : : [region] "m"(region) : "cc", "memory" : refused);
	return 0;

refused:
	cr4_clear_bits(X86_CR4_VMXE);
	intel_pt_handle_vmx(0);
	return -EIO;
}

/* An NMI of a crash may hit between CR4.VMXE and VMXON: then VMXOFF faults, and nothing is lost. */
void gnt_vmx_off(void)
{
	asm goto("1: vmxoff\n\t"
		 _ASM_EXTABLE(1b, %l[off])
		 : : : "cc", "memory" : off);
off:
	cr4_clear_bits(X86_CR4_VMXE);
	intel_pt_handle_vmx(0);
}

#endif

/*
 * Where the kernel leaves return predictions (SRSO) to the hypervisor, branch prediction is reduced while SVM is on: for as
 * long as the module is loaded. A hypervisor below may show the feature and not have the MSR.
 */
static void reduce_speculation(bool on)
{
#ifdef X86_FEATURE_SRSO_BP_SPEC_REDUCE
	u64 config;

	if (!cpu_feature_enabled(X86_FEATURE_SRSO_BP_SPEC_REDUCE))
		return;
	if (rdmsrq_safe(MSR_ZEN4_BP_CFG, &config))
		return;
	config &= ~BIT_ULL(MSR_ZEN4_BP_CFG_BP_SPEC_REDUCE_BIT);
	if (on)
		config |= BIT_ULL(MSR_ZEN4_BP_CFG_BP_SPEC_REDUCE_BIT);
	wrmsrq_safe(MSR_ZEN4_BP_CFG, config);
#endif
}

/* With SVM on, counters can be told to count the host alone. */
int gnt_svm_on(void)
{
	int r = svm_on();

	if (!r) {
		reduce_speculation(true);
		amd_pmu_enable_virt();
	}
	return r;
}

/* A crash is no time for perf. */
void gnt_svm_off(void)
{
	if (!in_nmi() && !gnt_rebooting)
		amd_pmu_disable_virt();
	reduce_speculation(false);
	svm_off();
}

/* A crash stops CPUs by NMI; each then switches it off, so that INIT reaches it again. */
static void __maybe_unused emergency(void)
{
	WRITE_ONCE(crashing, true);
	WRITE_ONCE(gnt_rebooting, true);
	gannet_cpu_offline();
}

void gnt_virt_init(void)
{
#if defined(GNT_HAS_X86_VIRT)
	x86_virt_register_emergency_callback(emergency);
#elif defined(GNT_HAS_EMERGENCY_CALLBACK)
	cpu_emergency_register_virt_callback(emergency);
#endif
}

void gnt_virt_exit(void)
{
#if defined(GNT_HAS_X86_VIRT)
	x86_virt_unregister_emergency_callback(emergency);
#elif defined(GNT_HAS_EMERGENCY_CALLBACK)
	cpu_emergency_unregister_virt_callback(emergency);
#endif
}

/* No entry after this succeeds, nor has to: the world switch takes its faults. */
void gnt_virt_ends(void)
{
	WRITE_ONCE(gnt_rebooting, true);
#ifdef GNT_HAS_X86_VIRT
	WRITE_ONCE(virt_rebooting, true);
#endif
}
