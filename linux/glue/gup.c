// SPDX-License-Identifier: GPL-2.0-only
/*
 * From the VMM's virtual address to the host frame behind it, without pinning: the caller keeps the
 * translation valid by the MMU notifier.
 *
 * Anonymous memory, which is most of what guests have, goes a short way: the page table is read
 * without locks or references, and where the page is missing the kernel's fault handler is called
 * and the page table read again. What the page table said is checked by the caller against the MMU
 * notifier's count before it is used, so no reference is needed. All other memory, and whatever is
 * unusual, goes through get_user_pages, which knows every case.
 */
#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/pgtable.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/swap.h>

#include "compat.h"
#include "gannet.h"

#ifndef FOLL_INTERRUPTIBLE
#define FOLL_INTERRUPTIBLE 0	/* before 6.2: only a fatal signal ends the wait */
#endif

#ifndef VM_SHADOW_STACK
#define VM_SHADOW_STACK 0
#endif

/* Memory whose faults ask user space, that a plain write must not reach, or that is not memory. */
#define UNUSUAL_VMAS	(VM_UFFD_MISSING | VM_UFFD_WP | VM_SHADOW_STACK | VM_IO | VM_PFNMAP)

enum { GNT_FAULT = 1, GNT_INTERRUPTED, GNT_POISONED, GNT_AGAIN };

static int outcome(long error)
{
	switch (error) {
	case -EHWPOISON:
		return GNT_POISONED;
	case -EINTR:
	case -ERESTARTSYS:
	case -ERESTARTNOINTR:
		return GNT_INTERRUPTED;
	case -EAGAIN:
		return GNT_AGAIN;
	default:
		return GNT_FAULT;
	}
}

/*
 * What a leaf of the host's page table says, if it maps anonymous memory and allows the access. A
 * page that may be written serves readers and writers alike. Only anonymous memory: secretmem, DAX
 * and device memory have rules that their struct pages or their VMAs alone tell.
 */
static __always_inline bool leaf_of_anonymous(u64 entry, unsigned int shift, u64 hva, bool write,
			      struct gnt_host_page *out)
{
	pte_t leaf = __pte(entry);
	u64 pfn = (entry & PTE_PFN_MASK) >> PAGE_SHIFT;

	if (unlikely(shift != PAGE_SHIFT)) {
		u64 within = (1ul << (shift - PAGE_SHIFT)) - 1;

		/* Bit 12 of a large leaf is its PAT bit: it goes with the bits within the page. */
		pfn = (pfn & ~within) | (hva >> PAGE_SHIFT & within);
	}

	out->writable = pte_access_permitted(leaf, true);
	if (!out->writable && (write || !pte_access_permitted(leaf, false)))
		return false;
	/* The bit for special entries is the same at every level. */
	if (pte_special(leaf) || pte_devmap(leaf) || !PageAnon(pfn_to_page(pfn)))
		return false;
	out->pfn = pfn;
	out->level = shift == PAGE_SHIFT ? 1 : shift == PMD_SHIFT ? 2 : 3;
	out->refcounted = 1;
	out->held = 0;
	out->dirty = !!pte_dirty(leaf);
	return true;
}

/* The entry for hva in the table that `entry` points to, which covers 2^shift bytes each. */
static __always_inline u64 entry_below(u64 entry, unsigned long mask, unsigned int shift, u64 hva)
{
	const u64 *table = __va(entry & mask);

	return READ_ONCE(table[hva >> shift & (PTRS_PER_PTE - 1)]);
}

/*
 * The leaf of the current task's page table at hva, without a lock: not present where there is none.
 * Tables are freed only after every CPU has answered an interrupt (or an RCU grace period), so they
 * stay while interrupts are off. A bit that only a large leaf has, it has at each level.
 */
static __always_inline u64 leaf_at(u64 hva, unsigned int *shift)
{
	unsigned long mask = PTE_PFN_MASK;
	u64 entry = pgd_val(READ_ONCE(*pgd_offset(current->mm, hva)));

	lockdep_assert_irqs_disabled();
	*shift = PAGE_SHIFT;
	if (pgtable_l5_enabled()) {
		if (!(entry & _PAGE_PRESENT))
			return 0;
		entry = entry_below(entry, mask, P4D_SHIFT, hva);
	}
	if (!(entry & _PAGE_PRESENT))
		return 0;
	entry = entry_below(entry, mask, PUD_SHIFT, hva);
	if (!(entry & _PAGE_PRESENT))
		return 0;
	if (entry & _PAGE_PSE) {
		*shift = PUD_SHIFT;
		return entry;
	}
	entry = entry_below(entry, mask, PMD_SHIFT, hva);
	if (!(entry & _PAGE_PRESENT))
		return 0;
	if (entry & _PAGE_PSE) {
		*shift = PMD_SHIFT;
		return entry;
	}
	return entry_below(entry, mask, PAGE_SHIFT, hva);
}

/* The level at which the current task's page table maps hva. */
int gnt_hva_level(u64 hva)
{
	unsigned int shift = PAGE_SHIFT;
	unsigned long flags;

	if (!current->mm || hva >= TASK_SIZE_MAX)
		return 1;
	local_irq_save(flags);
	leaf_at(hva, &shift);
	local_irq_restore(flags);
	return 1 + (shift - PAGE_SHIFT) / 9;
}

/* The page behind hva if it is anonymous and mapped with that access: no reference is taken. */
static __always_inline bool mapped_anonymous(u64 hva, bool write, struct gnt_host_page *out)
{
	unsigned long flags;
	unsigned int shift;
	bool found;
	u64 leaf;

	local_irq_save(flags);
	leaf = leaf_at(hva, &shift);
	found = (leaf & _PAGE_PRESENT) && leaf_of_anonymous(leaf, shift, hva, write, out);
	local_irq_restore(flags);
	return found;
}

/*
 * Lets the kernel fault a page of anonymous memory in for writing, once. Whether it did the caller
 * sees in the page table; whatever went wrong get_user_pages finds too, and says.
 */
static void fault_anonymous(u64 hva, bool interruptible)
{
	unsigned int flags = FAULT_FLAG_WRITE | FAULT_FLAG_ALLOW_RETRY | FAULT_FLAG_KILLABLE;
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;
	vm_fault_t fault = 0;

	if (interruptible)
		flags |= FAULT_FLAG_INTERRUPTIBLE;
	if (!mmap_read_trylock(mm) && mmap_read_lock_killable(mm))
		return;
	vma = vma_lookup(mm, hva);
	/* Whether a mapping allows writing the fault handler does not ask: its caller does. */
	if (vma && vma_is_anonymous(vma) &&
	    (vma->vm_flags & (VM_WRITE | UNUSUAL_VMAS)) == VM_WRITE)
		fault = handle_mm_fault(vma, hva, flags, NULL);
	/* With either of them the handler has let the lock go. */
	if (!(fault & (VM_FAULT_RETRY | VM_FAULT_COMPLETED)))
		mmap_read_unlock(mm);
}

static int give(struct gnt_host_page *out, u64 hva, struct page *page, bool writable)
{
	out->pfn = page_to_pfn(page);
	out->writable = writable;
	out->refcounted = 1;
	out->held = 1;
	out->dirty = 0;
	out->level = gnt_hva_level(hva);
	return 0;
}

/* One attempt to read the frame of a mapping that has no struct page. */
static int raw_mapping(struct vm_area_struct *vma, u64 hva, bool write, struct gnt_host_page *out)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
	struct follow_pfnmap_args args = { .vma = vma, .address = hva };
	int r = follow_pfnmap_start(&args);

	if (r)
		return r;
	out->pfn = args.pfn;
	out->writable = args.writable;
	follow_pfnmap_end(&args);
#else
	spinlock_t *lock;
	pte_t *ptep, pte;
	int r = follow_pte(vma->vm_mm, hva, &ptep, &lock);

	if (r)
		return r;
	pte = *ptep;
	out->pfn = pte_pfn(pte);
	out->writable = !!pte_write(pte);
	pte_unmap_unlock(ptep, lock);
#endif
	return write && !out->writable ? -EFAULT : 0;
}

/*
 * Device memory mapped into the VMM (VFIO). No reference is taken, for there may be nothing to
 * count: the MMU notifier alone keeps the frame ours.
 */
static int device_memory(u64 hva, bool write, struct gnt_host_page *out)
{
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;
	int r = -EFAULT;

	mmap_read_lock(mm);
	vma = vma_lookup(mm, hva);
	if (vma && (vma->vm_flags & (VM_IO | VM_PFNMAP)) &&
	    (vma->vm_flags & (write ? VM_WRITE : VM_READ))) {
		r = raw_mapping(vma, hva, write, out);
		if (r) {
			bool unlocked = false;

			r = fixup_user_fault(mm, hva, write ? FAULT_FLAG_WRITE : 0, &unlocked);
			/* While the lock was let go the mapping may have become another. */
			if (!r)
				r = unlocked ? -EAGAIN : raw_mapping(vma, hva, write, out);
		}
		out->refcounted = 0;
		out->held = 0;
		out->dirty = 0;
		out->level = 1;
	}
	mmap_read_unlock(mm);
	return r ? outcome(r) : 0;
}

int gnt_fault_in(u64 hva, int write, int mode, struct gnt_host_page *out)
{
	unsigned int flags = FOLL_HWPOISON | (write ? FOLL_WRITE : 0);
	struct page *page, *better;
	long n;

	if (!current->mm || hva >= TASK_SIZE_MAX)
		return GNT_FAULT;
	/* Where the caller expects nothing a look would cost as much as the look after the fault. */
	if (!(write && mode == 3) && mapped_anonymous(hva, write, out))
		return 0;
	if (mode == 3)
		mode = 1;
	if (write && mode != 0) {
		fault_anonymous(hva, mode == 1);
		if (mapped_anonymous(hva, write, out))
			return 0;
	}
	/* What is mapped writable serves readers and writers alike. */
	if (get_user_page_fast_only(hva, FOLL_WRITE, &page))
		return give(out, hva, page, true);
	if (mode == 0) {
		if (!write && get_user_page_fast_only(hva, 0, &page))
			return give(out, hva, page, false);
		return GNT_AGAIN;
	}
	if (mode == 1)
		flags |= FOLL_INTERRUPTIBLE;
	n = get_user_pages_unlocked(hva, 1, &page, flags);
	if (n == 1) {
		if (!write && get_user_page_fast_only(hva, FOLL_WRITE, &better)) {
			put_page(page);
			return give(out, hva, better, true);
		}
		return give(out, hva, page, write);
	}
	if (n == -EFAULT)
		return device_memory(hva, write, out);
	return outcome(n ?: -EFAULT);
}

void gnt_signal_poisoned(u64 hva)
{
	send_sig_mceerr(BUS_MCEERR_AR, (void __user *)hva, PAGE_SHIFT, current);
}

void gnt_page_put(u64 pfn)
{
	put_page(pfn_to_page(pfn));
}

void gnt_page_set_dirty(u64 pfn)
{
	struct page *page = pfn_to_page(pfn);

	/* The zero page is reserved: nobody writes it back. */
	if (!PageReserved(page))
		SetPageDirty(page);
}

void gnt_page_set_accessed(u64 pfn)
{
	struct page *page = pfn_to_page(pfn);

	if (!PageReserved(page))
		mark_page_accessed(page);
}
