// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the kernel knows of this CPU's leaks, and the cache flush at VM entry.
 *
 * The kernel names what a hypervisor does in files of its own
 * (/sys/devices/system/cpu/vulnerabilities), from variables that the hypervisor sets.
 */
#include <linux/cpu.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/sched/smt.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include <asm/cpufeature.h>
#include <asm/nospec-branch.h>
#include <asm/processor.h>
#include <asm/spec-ctrl.h>
#include <asm/vmx.h>

#include "compat.h"
#include "gannet.h"
#include "history.h"

/* Exported; older kernels declare it in no header. */
extern bool itlb_multihit_kvm_mitigation;

/* Twice the L1 data cache of the CPUs that have no instruction to flush it. */
#define FLUSH_ORDER	4
#define FLUSH_BYTES	(PAGE_SIZE << FLUSH_ORDER)

/* As in stock KVM, the numbers are those of enum vmx_l1d_flush_state. */
static const char * const l1d_names[] = {
	[VMENTER_L1D_FLUSH_AUTO] = "auto",
	[VMENTER_L1D_FLUSH_NEVER] = "never",
	[VMENTER_L1D_FLUSH_COND] = "cond",
	[VMENTER_L1D_FLUSH_ALWAYS] = "always",
	[VMENTER_L1D_FLUSH_EPT_DISABLED] = "EPT disabled",
	[VMENTER_L1D_FLUSH_NOT_REQUIRED] = "not required",
};

/* host::mitigation::NxHugePages */
static const char * const nx_names[] = { "auto", "off", "force" };

static u32 nx_asked;
static bool nx_splits;
static_assert(VMENTER_L1D_FLUSH_AUTO == 0);
/* The file lives on while the module goes. */
static DEFINE_MUTEX(l1d_lock);
static bool l1d_running;
static u8 *flush_pages;

static int l1d_set(const char *text, const struct kernel_param *kp)
{
	int r, asked = __sysfs_match_string(l1d_names, VMENTER_L1D_FLUSH_ALWAYS + 1, text);

	if (asked < 0)
		return asked;
	mutex_lock(&l1d_lock);
	WRITE_ONCE(*(u32 *)kp->arg, asked);
	/* Once loaded, on a CPU that leaks; else there is nothing to be changed. */
	r = l1d_running ? gannet_l1d_flush_changed() : 0;
	mutex_unlock(&l1d_lock);
	return r;
}

static int l1d_get(char *text, const struct kernel_param *kp)
{
	return sysfs_emit(text, "%s\n", l1d_names[l1tf_vmx_mitigation]);
}

const struct kernel_param_ops gnt_l1d_ops = { .set = l1d_set, .get = l1d_get };
GNT_EXPORT(gnt_l1d_ops);

static int nx_set(const char *text, const struct kernel_param *kp)
{
	int asked = __sysfs_match_string(nx_names, ARRAY_SIZE(nx_names), text);
	bool on;

	if (asked < 0) {
		if (kstrtobool(text, &on))
			return -EINVAL;
		asked = on ? 2 : 1;
	}
	nx_asked = asked;
	return 0;
}

static int nx_get(char *text, const struct kernel_param *kp)
{
	return sysfs_emit(text, "%c\n", nx_splits ? 'Y' : 'N');
}

static const struct kernel_param_ops nx_ops = { .set = nx_set, .get = nx_get };
module_param_cb(nx_huge_pages, &nx_ops, NULL, 0444);
MODULE_PARM_DESC(nx_huge_pages,
	"large pages cannot be executed, and are split where a guest fetches instructions, against iTLB multihit: auto (default: on CPUs that have the flaw, unless mitigations=off), off, force");

u32 gnt_nx_huge_pages_asked(void)
{
	return nx_asked;
}

/* What was chosen, for the kernel to show. */
void gnt_nx_huge_pages_chosen(bool splits)
{
	nx_splits = splits;
	itlb_multihit_kvm_mitigation = splits;
}

/* What was chosen, for the kernel to show. */
void gnt_l1d_flush_chosen(u32 state)
{
	l1tf_vmx_mitigation = state;
	l1d_running = true;
}

/* Before the first flush; process context. */
int gnt_l1d_flush_prepare(void)
{
	struct page *pages;
	u32 i;

	if (flush_pages || boot_cpu_has(X86_FEATURE_FLUSH_L1D))
		return 0;
	pages = alloc_pages(GFP_KERNEL, FLUSH_ORDER);
	if (!pages)
		return -ENOMEM;
	flush_pages = page_address(pages);
	/* Pages that differ, so that nothing below makes one of them. */
	for (i = 0; i < 1 << FLUSH_ORDER; i++)
		memset(flush_pages + i * PAGE_SIZE, i + 1, PAGE_SIZE);
	return 0;
}

void gnt_mitigations_exit(void)
{
	mutex_lock(&l1d_lock);
	l1d_running = false;
	l1tf_vmx_mitigation = VMENTER_L1D_FLUSH_AUTO;
	itlb_multihit_kvm_mitigation = false;
	if (flush_pages)
		free_pages((unsigned long)flush_pages, FLUSH_ORDER);
	flush_pages = NULL;
	mutex_unlock(&l1d_lock);
}

/*
 * Nothing of the host's may be loaded between this and the entry but what the entry itself needs.
 * Without the instruction, reading twice the cache's size puts out what was in it; once over the
 * pages first, so that no page walk comes between.
 */
noinstr void gnt_l1d_flush(void)
{
	const u8 *from = flush_pages;
	u32 i;

	if (cpu_feature_enabled(X86_FEATURE_FLUSH_L1D)) {
		native_wrmsrq(MSR_IA32_FLUSH_CMD, L1D_FLUSH);
		return;
	}
	if (!from)
		return;
	for (i = 0; i < FLUSH_BYTES; i += PAGE_SIZE)
		(void)READ_ONCE(from[i]);
	asm volatile("lfence" : : : "memory");
	for (i = 0; i < FLUSH_BYTES; i += 64)
		(void)READ_ONCE(from[i]);
	asm volatile("lfence" : : : "memory");
}

/* Numbered as host::mitigation::Facts::l1tf has it: the kernel's own numbers change. */
static u64 l1tf_choice(void)
{
	switch (l1tf_mitigation) {
	case L1TF_MITIGATION_OFF:
		return 0;
	case L1TF_MITIGATION_FULL:
		return 2;
	case L1TF_MITIGATION_FULL_FORCE:
		return 3;
	/* With or without SMT and a warning; in newer kernels also "auto", as in stock KVM. */
	default:
		return 1;
	}
}

/*
 * Whether the kernel wants buffers cleared before guests that reach a device's memory. Its word for that
 * has changed twice.
 */
static bool clears_for_devices(void)
{
#ifdef X86_FEATURE_CLEAR_CPU_BUF_VM_MMIO
	return boot_cpu_has(X86_FEATURE_CLEAR_CPU_BUF_VM_MMIO);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 16, 0)
	return static_branch_unlikely(&cpu_buf_vm_clear);
#else
	return static_branch_unlikely(&mmio_stale_data_clear);
#endif
}

#define FACT(bit, condition)	((condition) ? 1ull << (bit) : 0)

/* Mirrors host::mitigation::Facts. */
u64 gnt_mitigation_facts(void)
{
	u64 facts = l1tf_choice() << 56;

	facts |= FACT(0, boot_cpu_has_bug(X86_BUG_L1TF));
	facts |= FACT(1, boot_cpu_has_bug(X86_BUG_MDS));
	facts |= FACT(2, boot_cpu_has_bug(X86_BUG_TAA));
	facts |= FACT(3, boot_cpu_has_bug(X86_BUG_MMIO_STALE_DATA));
#ifdef X86_BUG_RFDS
	facts |= FACT(4, boot_cpu_has_bug(X86_BUG_RFDS));
#endif
	facts |= FACT(5, boot_cpu_has_bug(X86_BUG_SRBDS));
	facts |= FACT(6, boot_cpu_has_bug(X86_BUG_ITLB_MULTIHIT));
	facts |= FACT(7, boot_cpu_has_bug(X86_BUG_CPU_MELTDOWN));
	facts |= FACT(8, boot_cpu_has_bug(X86_BUG_SPEC_STORE_BYPASS));
#ifdef X86_BUG_GDS
	facts |= FACT(9, boot_cpu_has_bug(X86_BUG_GDS) && !gds_ucode_mitigated());
#endif
#ifdef X86_BUG_ITS
	facts |= FACT(10, boot_cpu_has_bug(X86_BUG_ITS));
#endif
#ifdef X86_BUG_TSA
	facts |= FACT(11, boot_cpu_has_bug(X86_BUG_TSA));
#endif
	facts |= FACT(16, boot_cpu_has(X86_FEATURE_FLUSH_L1D));
#ifdef GNT_VERW_FOR_VMX
	facts |= FACT(17, boot_cpu_has(GNT_VERW_FOR_VMX));
#endif
	facts |= FACT(18, boot_cpu_has(X86_FEATURE_RSB_VMEXIT));
	facts |= FACT(19, boot_cpu_has(X86_FEATURE_RSB_VMEXIT_LITE));
	facts |= FACT(20, boot_cpu_has(X86_FEATURE_KERNEL_IBRS));
	facts |= FACT(21, gnt_ibpb_on_switch());
#ifdef GNT_CLEAR_HISTORY
	facts |= FACT(22, boot_cpu_has(GNT_CLEAR_HISTORY));
#endif
	facts |= FACT(23, sched_smt_active());
	facts |= FACT(24, cpu_mitigations_off());
	facts |= FACT(25, boot_cpu_has(X86_FEATURE_RTM));
	facts |= FACT(26, boot_cpu_has(X86_FEATURE_MSR_SPEC_CTRL));
	facts |= FACT(27, boot_cpu_has(X86_FEATURE_ARCH_CAPABILITIES));
#ifdef X86_FEATURE_CLEAR_CPU_BUF_VM
	facts |= FACT(28, boot_cpu_has(X86_FEATURE_CLEAR_CPU_BUF_VM));
#endif
#ifdef X86_FEATURE_UNRET
	facts |= FACT(29, boot_cpu_has(X86_FEATURE_UNRET));
#endif
#ifdef X86_FEATURE_SRSO
	facts |= FACT(29, boot_cpu_has(X86_FEATURE_SRSO) || boot_cpu_has(X86_FEATURE_SRSO_ALIAS));
#endif
#ifdef X86_FEATURE_IBPB_ON_VMEXIT
	facts |= FACT(30, boot_cpu_has(X86_FEATURE_IBPB_ON_VMEXIT));
#endif
	facts |= FACT(31, boot_cpu_has(X86_FEATURE_LS_CFG_SSBD));
	facts |= FACT(32, boot_cpu_has(X86_FEATURE_LFENCE_RDTSC));
	facts |= FACT(33, boot_cpu_has_bug(X86_BUG_NULL_SEG));
	facts |= FACT(34, boot_cpu_has(X86_FEATURE_MWAIT) && !boot_cpu_has_bug(X86_BUG_MONITOR) &&
			  boot_cpu_has(X86_FEATURE_ARAT));
	facts |= FACT(35, cpu_smt_possible());
	facts |= FACT(36, clears_for_devices());
#ifdef X86_FEATURE_SRSO_BP_SPEC_REDUCE
	facts |= FACT(37, cpu_feature_enabled(X86_FEATURE_SRSO_BP_SPEC_REDUCE));
#endif
	return facts;
}
