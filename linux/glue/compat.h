/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What kernels call by different names. The glue uses the newest kernel's; here older ones learn them. Which it is, Kbuild
 * asks the headers (GNT_HAS_*), for stable kernels take over from later ones what no version number tells.
 */
#ifndef GANNET_COMPAT_H
#define GANNET_COMPAT_H

#include <linux/version.h>

#include <asm/msr.h>

#ifndef GNT_HAS_MSRQ
#define rdmsrq(msr, value)	rdmsrl(msr, value)
#define rdmsrq_safe(msr, value)	rdmsrl_safe(msr, value)
#define wrmsrq_safe(msr, value)	wrmsrl_safe(msr, value)
#define wrmsrq(msr, value)	wrmsrl(msr, value)
#define native_wrmsrq(msr, value)	native_wrmsrl(msr, value)
#endif

/* Device memory that is memory had a bit of its own in page tables. */
#ifndef GNT_HAS_PTE_DEVMAP
#define pte_devmap(pte)		false
#endif

/* Exclusive was what is queued first; the newest kernels refuse a second one. */
#ifndef GNT_HAS_PRIORITY_EXCLUSIVE
#define add_wait_queue_priority_exclusive(head, entry)	(add_wait_queue_priority(head, entry), 0)
#endif

/* What a notifier answers that was asked whether pages are in use. */
#ifdef GNT_HAS_YOUNG_BOOL
typedef bool gnt_young;
#else
typedef int gnt_young;
#endif

#endif
