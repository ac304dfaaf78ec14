// SPDX-License-Identifier: GPL-2.0-only
/*
 * The kernel's view of a CPU that runs a guest: RCU does not wait for it, its time is the guest's.
 * Nothing here may be instrumented: between the two calls RCU does not watch this CPU.
 */
#include <linux/kvm_host.h>

#include <asm/nospec-branch.h>

#include "gannet.h"

/*
 * What the kernel's guest_state_enter_irqoff() and guest_state_exit_irqoff() do, apart from telling
 * RCU of a quiet moment.
 */
static __always_inline void enter_quietly(void)
{
	instrumentation_begin();
	trace_hardirqs_on_prepare();
	lockdep_hardirqs_on_prepare();
	instrumentation_end();
	context_tracking_guest_enter();
	lockdep_hardirqs_on(CALLER_ADDR0);
}

static __always_inline void exit_quietly(void)
{
	lockdep_hardirqs_off(CALLER_ADDR0);
	context_tracking_guest_exit();
	instrumentation_begin();
	trace_hardirqs_off_finish();
	instrumentation_end();
}

noinstr void gnt_guest_enter(void)
{
	guest_timing_enter_irqoff();
	/*
	 * Kernels that note a quiet moment for RCU at the exit note it at the entry too; once will do,
	 * and the exit is where a long run in the guest ends.
	 */
	if (LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0))
		enter_quietly();
	else
		guest_state_enter_irqoff();
}

/*
 * A quiet moment for RCU is noted when an interrupt ended the guest's run. RCU needs one per tick, and
 * a tick that comes while the guest runs ends its run; one that comes outside finds the task in the
 * kernel as any other. Guest time ends here, too, unless an interrupt is to be taken first.
 */
noinstr void gnt_guest_exit(bool interrupted)
{
	if (interrupted) {
		guest_state_exit_irqoff();
	} else {
		exit_quietly();
		guest_timing_exit_irqoff();
	}
	/* The guest may have trained the branch predictor against the VMM (VMSCAPE). */
	if (cpu_feature_enabled(X86_FEATURE_IBPB_EXIT_TO_USER))
		this_cpu_write(x86_ibpb_exit_to_user, true);
}

/* After the interrupt that ended the guest's run was taken, so that a tick counts as the guest's. */
noinstr void gnt_guest_time_end(void)
{
	guest_timing_exit_irqoff();
}

/*
 * A handler inside the loop calls the kernel: RCU has to watch again. Nothing but two patched jumps
 * unless this CPU is tracked (nohz_full).
 */
noinstr void gnt_guest_pause(void)
{
	exit_quietly();
}

noinstr void gnt_guest_resume(void)
{
	enter_quietly();
}
