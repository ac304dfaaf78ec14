// SPDX-License-Identifier: GPL-2.0-only
/* The host CPU's own settings that a guest's run displaces, and what the kernel decided. */
#include <linux/hw_breakpoint.h>
#include <linux/perf_event.h>
#include <linux/preempt.h>

#include <asm/cpu.h>
#include <asm/cpufeature.h>
#include <asm/debugreg.h>
#include <asm/desc.h>
#if __has_include(<asm/gsseg.h>)
#include <asm/gsseg.h>
#endif
#include <asm/mce.h>
#include <asm/nospec-branch.h>
#include <asm/perf_event.h>
#include <asm/ptrace.h>
#include <asm/segment.h>
#include <asm/vdso/processor.h>
#include <asm/spec-ctrl.h>

#include "compat.h"
#include "gannet.h"

/* As stock KVM: not where every exit has one already. */
bool gnt_ibpb_on_switch(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
	if (cpu_feature_enabled(X86_FEATURE_IBPB_ON_VMEXIT))
		return false;
#endif
#ifdef X86_FEATURE_USE_IBPB
	return boot_cpu_has(X86_FEATURE_USE_IBPB);
#else
	return static_key_enabled(&switch_vcpu_ibpb);
#endif
}

u64 gnt_host_spec_ctrl(void)
{
	return this_cpu_read(x86_spec_ctrl_current);
}

void gnt_restore_debug_regs(void)
{
	if (hw_breakpoint_active())
		hw_breakpoint_restore();
}

void gnt_guest_ssbd(bool on)
{
	x86_virt_spec_ctrl(SPEC_CTRL_SSBD, on);
}

/* The kernel's handler wants to know what was interrupted: not the kernel. */
void gnt_machine_check(void)
{
#ifdef CONFIG_X86_MCE
	struct pt_regs regs = { .cs = 3, .flags = X86_EFLAGS_IF };

	do_machine_check(&regs);
#endif
}

/* Intel CPUs alone have it: for AMD's the kernel sets another feature. */
bool gnt_detects_split_locks(void)
{
	return boot_cpu_has(X86_FEATURE_SPLIT_LOCK_DETECT);
}

bool gnt_guest_split_lock(u64 rip)
{
	return handle_guest_split_lock(rip);
}

/* Where nobody can have set in it what a guest would feel, it is not read. */
u64 gnt_host_debugctl(void)
{
	u64 value = 0;

	if (boot_cpu_has(X86_FEATURE_BUS_LOCK_DETECT) || test_thread_flag(TIF_BLOCKSTEP))
		rdmsrq(MSR_IA32_DEBUGCTLMSR, value);
	return value;
}

bool gnt_uses_ldt(void)
{
#ifdef CONFIG_MODIFY_LDT_SYSCALL
	return READ_ONCE(current->mm->context.ldt) != NULL;
#else
	return false;
#endif
}

/* FS, GS and LDTR in one word, lowest first. */
u64 gnt_host_selectors(void)
{
	u16 fs, gs, ldt;

	savesegment(fs, fs);
	savesegment(gs, gs);
	asm("sldt %w0" : "=r"(ldt));
	return fs | (u64)gs << 16 | (u64)ldt << 32;
}

/*
 * LDTR first, for FS and GS may name descriptors of it. The kernel's macros load the null selector
 * where a descriptor has gone meanwhile.
 */
void gnt_load_host_selectors(u16 fs, u16 gs, u16 ldt)
{
	asm volatile("lldt %w0" : : "r"(ldt));
	loadsegment(fs, fs);
	load_gs_index(gs);
}

/* User space's, perhaps of its local table: null where their descriptors have gone meanwhile, as in FS and GS. */
void gnt_load_data_selectors(u16 ds, u16 es)
{
	loadsegment(ds, ds);
	loadsegment(es, es);
}

void gnt_load_task_register(void)
{
	force_reload_TR();
}

/* What the kernel's GS base is above the place of a CPU's data. */
static u64 gs_base_offset;

void gnt_hostcpu_init(void)
{
	u64 base;

	preempt_disable();
	rdmsrq(MSR_GS_BASE, base);
	gs_base_offset = base - per_cpu_offset(smp_processor_id());
	preempt_enable();
}

/* By the GDT, which is the host's always: neither per-CPU data nor TSC_AUX may be. */
static __always_inline u32 cpu_by_gdt(void)
{
	u32 node;

	asm volatile("lsl %1, %0" : "=r"(node) : "r"(__CPUNODE_SEG));
	return node & VDSO_CPUNODE_MASK;
}

/*
 * The number of this CPU if its GS base is another than the kernel's, as in the loop of SVM; else -1. Uses
 * nothing that is found by GS, and knows by the second look that the thread has not moved meanwhile.
 */
noinstr int gnt_lost_cpu(void)
{
	u32 cpu = cpu_by_gdt();
	u64 base = __rdmsr(MSR_GS_BASE);

	if (cpu >= nr_cpu_ids || base == __per_cpu_offset[cpu] + gs_base_offset)
		return -1;
	return cpu_by_gdt() == cpu ? cpu : -1;
}

/*
 * What the kernel left of a word of CPUID features: bits that it found or was told not to use are
 * clear. Registers are numbered EAX, EBX, ECX, EDX; all ones for a word that it does not keep.
 */
u32 gnt_kernel_features(u32 leaf, u32 subleaf, u32 reg)
{
	static const struct {
		u32 leaf, subleaf, reg, word;
	} words[] = {
		{ 1, 0, 2, CPUID_1_ECX },
		{ 1, 0, 3, CPUID_1_EDX },
		{ 7, 0, 1, CPUID_7_0_EBX },
		{ 7, 0, 2, CPUID_7_ECX },
		{ 7, 0, 3, CPUID_7_EDX },
		{ 7, 1, 0, CPUID_7_1_EAX },
		{ 0xd, 1, 0, CPUID_D_1_EAX },
		{ 0x80000001, 0, 2, CPUID_8000_0001_ECX },
		{ 0x80000001, 0, 3, CPUID_8000_0001_EDX },
		{ 0x80000008, 0, 1, CPUID_8000_0008_EBX },
		{ 0x8000000a, 0, 3, CPUID_8000_000A_EDX },
		{ 0x80000021, 0, 0, CPUID_8000_0021_EAX },
	};
	u32 i;

	for (i = 0; i < ARRAY_SIZE(words); i++)
		if (words[i].leaf == leaf && words[i].subleaf == subleaf && words[i].reg == reg)
			return boot_cpu_data.x86_capability[words[i].word];
	return ~0u;
}
