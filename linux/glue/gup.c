// SPDX-License-Identifier: GPL-2.0-only
/*
 * From the VMM's virtual address to the host frame behind it, without pinning: the caller keeps the
 * translation valid by the MMU notifier.
 */
#include <linux/mm.h>
#include <linux/pgtable.h>
#include <linux/sched/mm.h>
#include <linux/swap.h>

#include "gannet.h"

#ifndef FOLL_INTERRUPTIBLE
#define FOLL_INTERRUPTIBLE 0	/* before 6.2: only a fatal signal ends the wait */
#endif

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
	case -ENOMEM:
		return GNT_AGAIN;
	default:
		return GNT_FAULT;
	}
}

/*
 * The level at which the current task's page table maps hva, without a lock: tables are freed only
 * after every CPU has answered an interrupt (or an RCU grace period), so they stay while interrupts
 * are off.
 */
int gnt_hva_level(u64 hva)
{
	unsigned long flags;
	int level = 1;
	pgd_t pgd;
	p4d_t p4d;
	pud_t pud;
	pmd_t pmd;

	if (!current->mm || hva >= TASK_SIZE_MAX)
		return 1;
	local_irq_save(flags);
	pgd = READ_ONCE(*pgd_offset(current->mm, hva));
	if (pgd_none(pgd))
		goto out;
	p4d = READ_ONCE(*p4d_offset(&pgd, hva));
	if (p4d_none(p4d) || !p4d_present(p4d))
		goto out;
	pud = READ_ONCE(*pud_offset(&p4d, hva));
	if (pud_none(pud) || !pud_present(pud))
		goto out;
	if (pud_leaf(pud)) {
		level = 3;
		goto out;
	}
	pmd = READ_ONCE(*pmd_offset(&pud, hva));
	if (pmd_none(pmd) || !pmd_present(pmd))
		goto out;
#ifdef pmd_leaf
	if (pmd_leaf(pmd))
#else
	if (pmd_large(pmd))
#endif
		level = 2;
out:
	local_irq_restore(flags);
	return level;
}

static int give(struct gnt_host_page *out, u64 hva, struct page *page, bool writable)
{
	out->pfn = page_to_pfn(page);
	out->writable = writable;
	out->refcounted = 1;
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
			if (!r)
				r = unlocked ? -EAGAIN : raw_mapping(vma, hva, write, out);
		}
		out->refcounted = 0;
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

void gnt_page_put(u64 pfn)
{
	put_page(pfn_to_page(pfn));
}

void gnt_page_set_dirty(u64 pfn)
{
	struct page *page = pfn_to_page(pfn);

	if (!PageReserved(page))
		SetPageDirty(page);
}

void gnt_page_set_accessed(u64 pfn)
{
	struct page *page = pfn_to_page(pfn);

	if (!PageReserved(page))
		mark_page_accessed(page);
}
