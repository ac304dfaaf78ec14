// SPDX-License-Identifier: GPL-2.0-only
/* One-shot timers on CLOCK_MONOTONIC, fired from the hard interrupt. */
#include <linux/hrtimer.h>

#include "gannet.h"

struct gnt_timer {
	struct hrtimer timer;
	u64 (*expired)(void *context);
	void *context;
};
static_assert(sizeof(struct gnt_timer) <= GNT_TIMER_BYTES);

static enum hrtimer_restart expired(struct hrtimer *timer)
{
	struct gnt_timer *t = container_of(timer, struct gnt_timer, timer);
	u64 again = t->expired(t->context);

	/*
	 * Started anew under the timer base's lock rather than by HRTIMER_RESTART: another CPU may
	 * have started it meanwhile, and then its expiry must not be changed in the queue.
	 */
	if (again)
		gnt_timer_start(t, again);
	return HRTIMER_NORESTART;
}

void gnt_timer_init(struct gnt_timer *t, u64 (*expired_fn)(void *context), void *context)
{
	t->expired = expired_fn;
	t->context = context;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
	hrtimer_setup(&t->timer, expired, CLOCK_MONOTONIC, HRTIMER_MODE_ABS_HARD);
#else
	hrtimer_init(&t->timer, CLOCK_MONOTONIC, HRTIMER_MODE_ABS_HARD);
	t->timer.function = expired;
#endif
}

void gnt_timer_start(struct gnt_timer *t, u64 at)
{
	/* The time may come from a guest's deadline, beyond what a ktime holds. */
	hrtimer_start(&t->timer, ns_to_ktime(min_t(u64, at, KTIME_MAX)), HRTIMER_MODE_ABS_HARD);
}

int gnt_timer_cancel(struct gnt_timer *t)
{
	/* A value that was never initialised (its making failed) has no base. */
	return t->expired ? hrtimer_cancel(&t->timer) : 0;
}

int gnt_timer_try_cancel(struct gnt_timer *t)
{
	return hrtimer_try_to_cancel(&t->timer);
}
