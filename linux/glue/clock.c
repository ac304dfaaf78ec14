// SPDX-License-Identifier: GPL-2.0-only
/* The host's clocks, and its randomness. */
#include <linux/pvclock_gtod.h>
#include <linux/random.h>
#include <linux/timekeeper_internal.h>
#include <linux/timekeeping.h>

#include <asm/tsc.h>

#include "gannet.h"

/* Whether the kernel keeps time by the TSC now, and how often that changed or the host has slept. */
static bool by_tsc;
static u32 generation;

/* The TSC when the last CPU went to sleep, and by how much all sleeps have put it back. */
static u64 asleep_at;
static u64 lost;

u64 gnt_monotonic_ns(void)
{
	return ktime_get_ns();
}

u64 gnt_boottime_ns(void)
{
	return ktime_get_boottime_ns();
}

u64 gnt_random_word(void)
{
	return get_random_u64();
}

u64 gnt_realtime_ns(void)
{
	return ktime_get_real_ns();
}

u32 gnt_tsc_khz(void)
{
	return tsc_khz;
}

int gnt_tsc_is_stable(void)
{
	return boot_cpu_has(X86_FEATURE_CONSTANT_TSC) && !check_tsc_unstable();
}

u32 gnt_clock_generation(void)
{
	return READ_ONCE(generation);
}

u64 gnt_tsc_lost(void)
{
	return READ_ONCE(lost);
}

/* Suspend and hibernation, on the last CPU with interrupts off: no other has a later TSC. */
void gnt_clock_sleeps(void)
{
	asleep_at = rdtsc_ordered();
}

/*
 * The same CPU, before the others come; they follow it, or the kernel calls the TSC unstable. A TSC may have begun anew,
 * may have stood still, or may have gone on: the relation to the kernel's clocks is another in each case. Tasks are
 * frozen, so that no vCPU runs before it has looked.
 */
void gnt_clock_wakes(void)
{
	u64 now = rdtsc_ordered();

	if (now < asleep_at)
		WRITE_ONCE(lost, lost + (asleep_at - now));
	WRITE_ONCE(generation, generation + 1);
}

#ifdef GNT_HAS_SNAPSHOT_ID
#define GNT_REAL(snap)	((snap).systime)
#define GNT_RAW(snap)	((snap).monoraw)
#define read_clocks(snap)	ktime_get_snapshot_id(CLOCK_REALTIME, snap)
#else
#define GNT_REAL(snap)	((snap).real)
#define GNT_RAW(snap)	((snap).raw)
#define read_clocks(snap)	ktime_get_snapshot(snap)
#endif

/*
 * The kernel reads the counter and two clocks at one instant; the others differ from
 * CLOCK_REALTIME by offsets that change only when somebody sets the clock. Adding an offset to 0
 * yields the offset.
 */
void gnt_clock_snapshot(struct gnt_clock_snapshot *out)
{
	struct system_time_snapshot snap;
	s64 real, boot;

	do {
		real = ktime_to_ns(ktime_mono_to_any(0, TK_OFFS_REAL));
		boot = ktime_to_ns(ktime_mono_to_any(0, TK_OFFS_BOOT));
		read_clocks(&snap);
	} while (real != ktime_to_ns(ktime_mono_to_any(0, TK_OFFS_REAL)));
	out->tsc = snap.cycles;
	out->real_ns = ktime_to_ns(GNT_REAL(snap));
	out->monotonic_ns = out->real_ns - real;
	out->boot_ns = out->monotonic_ns + boot;
	out->raw_ns = ktime_to_ns(GNT_RAW(snap));
	out->tsc_based = READ_ONCE(by_tsc);
}

/* Called at registration and at every update of the timekeeper, with its lock held. */
static int updated(struct notifier_block *nb, unsigned long stepped, void *data)
{
	const struct timekeeper *tk = data;
	bool now = tk->tkr_mono.clock->vdso_clock_mode == VDSO_CLOCKMODE_TSC;

	if (now != by_tsc) {
		WRITE_ONCE(by_tsc, now);
		WRITE_ONCE(generation, generation + 1);
	}
	return 0;
}

static struct notifier_block timekeeper = { .notifier_call = updated };

int gnt_clock_init(void)
{
	return pvclock_gtod_register_notifier(&timekeeper);
}

void gnt_clock_exit(void)
{
	pvclock_gtod_unregister_notifier(&timekeeper);
}
