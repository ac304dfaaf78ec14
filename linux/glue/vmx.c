// SPDX-License-Identifier: GPL-2.0-only
/* What VM exits of VMX need of the kernel and leave changed. */
#include <linux/perf_event.h>
#include <linux/smp.h>
#include <linux/user-return-notifier.h>

#include <asm/cpu_entry_area.h>
#include <asm/cpufeature.h>
#include <asm/desc.h>
#include <asm/perf_event.h>
#include <asm/segment.h>
#ifdef CONFIG_X86_FRED
#include <asm/fred.h>
#include <asm/trapnr.h>
#ifdef GNT_HAS_ENTRY_FROM_KVM
#include <linux/entry-common.h>
#define GNT_FRED_ENTRY	x86_entry_from_kvm
#else
#define GNT_FRED_ENTRY	fred_entry_from_kvm
#endif
#endif

#include "compat.h"
#include "gannet.h"

/*
 * The host's counters that are not to count while a guest runs, and sampling into the host's memory (PEBS), which a
 * guest's addresses would lead into the guest's. perf says what each MSR is to hold on either side.
 * Returns whether they differ; then those of the guest's side are loaded, and *global_ctrl is what every entry has
 * to load once more, for an NMI that perf takes between two of them loads the host's.
 */
static noinline bool perf_enter(u64 *global_ctrl)
{
	struct perf_guest_switch_msr *msrs;
	bool differ = false;
	int i, nr = 0;

	msrs = perf_guest_get_msrs(&nr, NULL);
	if (!msrs)
		return false;
	for (i = 0; i < nr; i++) {
		if (msrs[i].msr == MSR_CORE_PERF_GLOBAL_CTRL)
			*global_ctrl = msrs[i].guest;
		if (msrs[i].host == msrs[i].guest)
			continue;
		differ = true;
		wrmsrq(msrs[i].msr, msrs[i].guest);
	}
	return differ;
}

/* Where perf has no such MSRs, as in most virtual machines, it need not be asked at every entry. */
static bool perf_has_msrs __ro_after_init;

void __init gnt_perf_init(void)
{
	int nr = 0;

	preempt_disable();
	perf_guest_get_msrs(&nr, NULL);
	preempt_enable();
	perf_has_msrs = nr > 0;
}

bool gnt_perf_enter(u64 *global_ctrl)
{
	return unlikely(perf_has_msrs) && perf_enter(global_ctrl);
}

/* What perf wants now: it may have changed its mind in an NMI meanwhile. */
void gnt_perf_leave(void)
{
	struct perf_guest_switch_msr *msrs;
	int i, nr = 0;

	msrs = perf_guest_get_msrs(&nr, NULL);
	for (i = 0; msrs && i < nr; i++)
		wrmsrq(msrs[i].msr, msrs[i].host);
}

void gnt_host_tables(struct gnt_host_tables *out)
{
	struct desc_ptr table;

	native_store_gdt(&table);
	out->gdt = table.address;
	store_idt(&table);
	out->idt = table.address;
	out->task = (unsigned long)&get_cpu_entry_area(raw_smp_processor_id())->tss.x86_tss;
	out->cs = __KERNEL_CS;
	out->ss = __KERNEL_DS;
	out->tr = GDT_ENTRY_TSS * 8;
}

/*
 * An NMI that ends a guest's run is not delivered: it is gone but for the blocking of further ones.
 * The handler is entered through the IDT, for it counts on its own stack; its IRET ends the
 * blocking.
 */
noinstr void gnt_vmx_nmi(void)
{
#ifdef CONFIG_X86_FRED
	if (cpu_feature_enabled(X86_FEATURE_FRED)) {
		GNT_FRED_ENTRY(EVENT_TYPE_NMI, X86_TRAP_NMI);
		return;
	}
#endif
	asm volatile("int %0" : : "i"(2) : "memory");
}

/*
 * A VM exit leaves DR7 without breakpoints, the GDT where it was and its limit at 64 KiB. TR is loaded again when a task with
 * an I/O bitmap needs it, or now if this is one.
 */
void gnt_vmx_left(void)
{
	struct desc_ptr gdt;

	gnt_restore_debug_regs();
	native_store_gdt(&gdt);
	gdt.size = GDT_SIZE - 1;
	native_load_gdt(&gdt);
	if (unlikely(test_thread_flag(TIF_IO_BITMAP)))
		force_reload_TR();
	else
		this_cpu_write(__tss_limit_invalid, true);
}

#ifdef CONFIG_USER_RETURN_NOTIFIER
static DEFINE_PER_CPU(struct user_return_notifier, notifier);
static DEFINE_PER_CPU(bool, watching);

/* Whichever task this CPU returns to user space with. */
static void returning(struct user_return_notifier *n)
{
	user_return_notifier_unregister(n);
	__this_cpu_write(watching, false);
	gannet_user_return();
}

bool gnt_watch_user_return(void)
{
	struct user_return_notifier *n = this_cpu_ptr(&notifier);

	n->on_user_return = returning;
	user_return_notifier_register(n);
	__this_cpu_write(watching, true);
	return true;
}

/* The CPU goes, or the module: nobody may be called any more. */
void gnt_end_user_return(void)
{
	unsigned long flags;

	local_irq_save(flags);
	if (__this_cpu_read(watching))
		returning(this_cpu_ptr(&notifier));
	local_irq_restore(flags);
}
#else
bool gnt_watch_user_return(void)
{
	return false;
}

void gnt_end_user_return(void)
{
}
#endif
