// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of the kernel's own: whole pages for what hardware reads, and the heap behind Rust's
 * allocator. All of it is charged to the memory cgroup of the task that asks.
 */
#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "gannet.h"

/* Set when the module is loaded; Rust adds a physical address to it. */
u64 gnt_direct_map_base __ro_after_init;

u64 gnt_pages_alloc(u32 order)
{
	struct page *page = alloc_pages(GFP_KERNEL_ACCOUNT | __GFP_ZERO, order);

	return page ? PFN_PHYS(page_to_pfn(page)) : 0;
}

void gnt_pages_free(u64 hpa, u32 order)
{
	__free_pages(pfn_to_page(PHYS_PFN(hpa)), order);
}

u64 gnt_page_alloc(void)
{
	return gnt_pages_alloc(0);
}

/* For the PDPTEs of shadow paging: outside long mode CR3 has 32 bits. */
u64 gnt_page_alloc_low(void)
{
	struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_DMA32);

	return page ? PFN_PHYS(page_to_pfn(page)) : 0;
}

void gnt_page_free(u64 hpa)
{
	__free_page(pfn_to_page(PHYS_PFN(hpa)));
}

/*
 * kmalloc aligns a size that is a power of two to that size, and everything to
 * ARCH_KMALLOC_MINALIGN; from a page upwards kvmalloc aligns to pages. So a larger alignment is had
 * by rounding the size up.
 */
void *gnt_alloc(size_t size, size_t align, int zero)
{
	gfp_t flags = GFP_KERNEL_ACCOUNT | (zero ? __GFP_ZERO : 0);

	/* A VMM chooses some of the sizes: a refusal is an answer, not a reason for a warning. */
	if (align > PAGE_SIZE || size > INT_MAX)
		return NULL;
	if (size > PAGE_SIZE)
		flags |= __GFP_NOWARN;
	if (align > ARCH_KMALLOC_MINALIGN)
		size = roundup_pow_of_two(max(size, align));
	return kvmalloc(size, flags);
}

void gnt_free(void *p)
{
	kvfree(p);
}
