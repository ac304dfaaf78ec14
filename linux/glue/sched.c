// SPDX-License-Identifier: GPL-2.0-only
/* The current task: sleeping and waking, work that waits for it, its signals. */
#if __has_include(<linux/entry-virt.h>)
#define GNT_NO_STAND_IN
#include <linux/entry-virt.h>
#else
#include <linux/entry-kvm.h>
#endif
#include <linux/kvm_host.h>
#include <linux/rcuwait.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sched/stat.h>
#include <linux/slab.h>

#include "gannet.h"

static_assert(sizeof(struct rcuwait) <= GNT_WAITER_BYTES);

#ifdef GNT_NO_STAND_IN
int gnt_sched_init(void)
{
	return 0;
}

void gnt_sched_exit(void)
{
}

static int handle_work(void)
{
	return xfer_to_guest_mode_handle_work();
}
#else
/*
 * Older kernels' generic code for work before a guest entry wants a kvm_vcpu, of which it
 * only uses the exit reason and a counter, and those only when a signal arrives. All our vCPUs share
 * this one and none looks at it.
 */
static struct kvm_vcpu *stand_in;

int gnt_sched_init(void)
{
	stand_in = kvzalloc(sizeof(*stand_in), GFP_KERNEL);
	if (!stand_in)
		return -ENOMEM;
	stand_in->run = kzalloc(PAGE_SIZE, GFP_KERNEL);
	if (!stand_in->run) {
		kvfree(stand_in);
		return -ENOMEM;
	}
	return 0;
}

void gnt_sched_exit(void)
{
	kfree(stand_in->run);
	kvfree(stand_in);
}

static int handle_work(void)
{
	return xfer_to_guest_mode_handle_work(stand_in);
}
#endif

/*
 * With interrupts off: once this said no, SVM cannot be switched off for a reboot on this CPU before
 * the interrupt that does it gets through.
 */
int gnt_work_pending(void)
{
	return xfer_to_guest_mode_work_pending() || READ_ONCE(gnt_rebooting);
}

int gnt_handle_work(void)
{
	/*
	 * A reboot counts as a signal: this CPU enters no guest any more, and who asks again gets
	 * the same answer for ever.
	 */
	if (signal_pending(current) || READ_ONCE(gnt_rebooting))
		return -EINTR;
	return handle_work();
}

int gnt_may_poll(void)
{
	return single_task_running() && !need_resched() && !signal_pending(current);
}

void gnt_waiter_prepare(struct rcuwait *w)
{
	prepare_to_rcuwait(w);
	set_current_state(TASK_INTERRUPTIBLE);
}

void gnt_waiter_finish(struct rcuwait *w)
{
	finish_rcuwait(w);
}

void gnt_waiter_sleep(struct rcuwait *w)
{
	schedule();
}

int gnt_waiter_wake(struct rcuwait *w)
{
	return rcuwait_wake_up(w);
}

int gnt_signal_pending(void)
{
	return signal_pending(current);
}

int gnt_need_resched(void)
{
	return need_resched();
}

void gnt_cond_resched(void)
{
	cond_resched();
}

u64 gnt_run_delay_ns(void)
{
#ifdef CONFIG_SCHED_INFO
	return current->sched_info.run_delay;
#else
	return 0;
#endif
}

u32 gnt_current_tid(void)
{
	return task_pid_nr(current);
}

/*
 * real_blocked tells the signal code what the task will block again: a signal that it lets through
 * may then be delivered on the way out of the ioctl.
 */
void gnt_sigmask_set(u64 mask)
{
	sigset_t set = { .sig[0] = mask };

	sigprocmask(SIG_SETMASK, &set, &current->real_blocked);
}

void gnt_sigmask_restore(void)
{
	sigprocmask(SIG_SETMASK, &current->real_blocked, NULL);
	sigemptyset(&current->real_blocked);
}
