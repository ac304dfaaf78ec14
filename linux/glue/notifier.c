// SPDX-License-Identifier: GPL-2.0-only
/* Notices of changes to the VMM's address space, passed on to Rust. */
#include <linux/mmu_notifier.h>
#include <linux/sched/mm.h>

#include "compat.h"
#include "gannet.h"

struct gnt_notifier {
	struct mmu_notifier mn;
	const struct gnt_notifier_calls *calls;
	void *context;
	/* NULL until registered. */
	struct mm_struct *mm;
};
static_assert(sizeof(struct gnt_notifier) <= GNT_NOTIFIER_BYTES);

static struct gnt_notifier *of(struct mmu_notifier *mn)
{
	return container_of(mn, struct gnt_notifier, mn);
}

static int invalidate_start(struct mmu_notifier *mn, const struct mmu_notifier_range *range)
{
	struct gnt_notifier *n = of(mn);

	n->calls->invalidate_start(n->context, range->start, range->end,
				   mmu_notifier_range_blockable(range));
	return 0;
}

static void invalidate_end(struct mmu_notifier *mn, const struct mmu_notifier_range *range)
{
	struct gnt_notifier *n = of(mn);

	n->calls->invalidate_end(n->context, range->start, range->end);
}

static gnt_young clear_young(struct mmu_notifier *mn, struct mm_struct *mm, unsigned long start,
			     unsigned long end)
{
	struct gnt_notifier *n = of(mn);

	return n->calls->clear_young(n->context, start, end);
}

static gnt_young test_young(struct mmu_notifier *mn, struct mm_struct *mm, unsigned long address)
{
	struct gnt_notifier *n = of(mn);

	return n->calls->test_young(n->context, address, address + PAGE_SIZE);
}

static void release(struct mmu_notifier *mn, struct mm_struct *mm)
{
	struct gnt_notifier *n = of(mn);

	n->calls->release(n->context);
}

static const struct mmu_notifier_ops ops = {
	.invalidate_range_start = invalidate_start,
	.invalidate_range_end = invalidate_end,
	.clear_flush_young = clear_young,
	.clear_young = clear_young,
	.test_young = test_young,
	.release = release,
};

int gnt_notifier_register(struct gnt_notifier *n, const struct gnt_notifier_calls *calls,
			  void *context)
{
	int r;

	n->mn.ops = &ops;
	n->calls = calls;
	n->context = context;
	r = mmu_notifier_register(&n->mn, current->mm);
	if (r)
		return r;
	mmgrab(current->mm);
	n->mm = current->mm;
	return 0;
}

/* Calls release() if the address space still lives, and waits until no notice is under way. */
void gnt_notifier_unregister(struct gnt_notifier *n)
{
	if (!n->mm)
		return;
	mmu_notifier_unregister(&n->mn, n->mm);
	mmdrop(n->mm);
	n->mm = NULL;
}

int gnt_notifier_is_current(const struct gnt_notifier *n)
{
	return n->mm == current->mm;
}
