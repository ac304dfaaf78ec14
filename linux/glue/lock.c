// SPDX-License-Identifier: GPL-2.0-only
/*
 * Locks. The words live in Rust objects that may move while unlocked, so the kernel's plain
 * architecture locks are used: they are a word or two, zero when free, and hold no pointers.
 */
#include <linux/preempt.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/srcu.h>
#include <linux/wait_bit.h>

#include "gannet.h"

static_assert(sizeof(arch_spinlock_t) == 4);
static_assert(sizeof(arch_rwlock_t) == 8);

/* 0 free, 1 held, 2 held and somebody may sleep. The fast paths are in Rust. */
void gnt_mutex_lock_slow(u32 *word)
{
	might_sleep();
	/*
	 * Taken as 2, for others may sleep still. At worst the next unlock wakes nobody, as after a
	 * killed waiter.
	 */
	wait_var_event(word, xchg(word, 2) == 0);
}

int gnt_mutex_lock_killable_slow(u32 *word)
{
	might_sleep();
	return wait_var_event_killable(word, xchg(word, 2) == 0);
}

/* The exchange that freed the word was a full barrier. */
void gnt_mutex_wake(u32 *word)
{
	wake_up_var(word);
}

unsigned long gnt_spin_lock_irqsave(void *word)
{
	unsigned long flags;

	local_irq_save(flags);
	preempt_disable();
	arch_spin_lock(word);
	return flags;
}

void gnt_spin_unlock_irqrestore(void *word, unsigned long flags)
{
	arch_spin_unlock(word);
	/* Preemption last: then a switch that an interrupt asks for here is made at once. */
	local_irq_restore(flags);
	preempt_enable();
}

void gnt_read_lock(void *words)
{
	preempt_disable();
	arch_read_lock((arch_rwlock_t *)words);
}

void gnt_read_unlock(void *words)
{
	arch_read_unlock((arch_rwlock_t *)words);
	preempt_enable();
}

void gnt_write_lock(void *words)
{
	preempt_disable();
	arch_write_lock((arch_rwlock_t *)words);
}

void gnt_write_unlock(void *words)
{
	arch_write_unlock((arch_rwlock_t *)words);
	preempt_enable();
}

int gnt_rwlock_is_contended(void *words)
{
	return arch_rwlock_is_contended((arch_rwlock_t *)words);
}

struct srcu_struct *gnt_srcu_new(void)
{
	struct srcu_struct *domain = kzalloc(sizeof(*domain), GFP_KERNEL_ACCOUNT);

	if (domain && init_srcu_struct(domain)) {
		kfree(domain);
		domain = NULL;
	}
	return domain;
}

/* The kernel leaves a domain alone that has readers, and so does this: a reader that got lost leaks it. */
void gnt_srcu_free(struct srcu_struct *domain)
{
	cleanup_srcu_struct(domain);
	if (!domain->sda)
		kfree(domain);
}

int gnt_srcu_read_lock(struct srcu_struct *domain)
{
	return srcu_read_lock(domain);
}

void gnt_srcu_read_unlock(struct srcu_struct *domain, int index)
{
	srcu_read_unlock(domain, index);
}

/* Expedited: a VMM changes memslots by the hundred while its guest boots. */
void gnt_srcu_synchronize(struct srcu_struct *domain)
{
	synchronize_srcu_expedited(domain);
}
