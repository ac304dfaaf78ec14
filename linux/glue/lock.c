// SPDX-License-Identifier: GPL-2.0-only
/*
 * Locks. The words live in Rust objects that may move while unlocked, so the kernel's plain
 * architecture locks are used: they are a word or two, zero when free, and hold no pointers.
 */
#include <linux/lockdep.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/srcu.h>
#include <linux/wait_bit.h>

#include "gannet.h"

#ifdef CONFIG_LOCKDEP
/*
 * The order of the locks of Rust, for a kernel that looks after it. A class is the place in the
 * source where a lock is made; its file's name lives as long as the module.
 */
struct class {
	struct lockdep_map map;
	struct lock_class_key key;
	const char *file;
	size_t len;
	u32 line;
	char name[64];
};

static struct class classes[64];
static unsigned int used;
static arch_spinlock_t adding = __ARCH_SPIN_LOCK_UNLOCKED;

static struct class *known(unsigned int count, const char *file, size_t len, u32 line)
{
	for (unsigned int i = 0; i < count; i++) {
		struct class *class = &classes[i];

		if (class->line == line && class->len == len && !memcmp(class->file, file, len))
			return class;
	}
	return NULL;
}

static void wait_type(struct class *class, u32 how)
{
	lockdep_init_map_wait(&class->map, class->name, &class->key, 0,
			      how & GNT_TAKEN_ASLEEP ? LD_WAIT_SLEEP : LD_WAIT_SPIN);
}

/* NULL once all are used, with a warning: a lock that nobody looks after is a fault of this table. */
static struct class *class_of(const char *file, size_t len, u32 line, u32 how)
{
	struct class *class = known(smp_load_acquire(&used), file, len, line);
	unsigned long flags;

	if (class)
		return class;
	raw_local_irq_save(flags);
	arch_spin_lock(&adding);
	class = known(used, file, len, line);
	if (!class && !WARN_ON_ONCE(used == ARRAY_SIZE(classes))) {
		class = &classes[used];
		class->file = file;
		class->len = len;
		class->line = line;
		snprintf(class->name, sizeof(class->name), "%.*s:%u", (int)min_t(size_t, len, 50),
			 file + (len > 50 ? len - 50 : 0), line);
		wait_type(class, how);
		smp_store_release(&used, used + 1);
	}
	arch_spin_unlock(&adding);
	raw_local_irq_restore(flags);
	return class;
}

void gnt_lockdep_acquire(const char *file, size_t len, u32 line, u32 how)
{
	struct class *class = class_of(file, len, line, how);

	if (class)
		lock_acquire(&class->map, 0, !!(how & GNT_TAKEN_TRIED), how == GNT_TAKEN_SHARED, 1, NULL,
			     _RET_IP_);
}

void gnt_lockdep_release(const char *file, size_t len, u32 line)
{
	struct class *class = known(smp_load_acquire(&used), file, len, line);

	if (class)
		lock_release(&class->map, _RET_IP_);
}

void gnt_irq_disable(void)
{
	local_irq_disable();
}

/* An interrupt that waits is taken before the caller goes on: STI holds it off for one instruction. */
void gnt_irq_enable(void)
{
	local_irq_enable();
}
#endif

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
