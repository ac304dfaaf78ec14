/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * By which features the kernel says what is done about leaks of VMX, where that has changed: one name for the code that
 * does it and for the code that reports it.
 */
#ifndef GANNET_HISTORY_H
#define GANNET_HISTORY_H

#include <asm/cpufeatures.h>

/* Branch history after a VM exit. Kernels of the first months had one feature for system calls and VM exits. */
#if defined(X86_FEATURE_CLEAR_BHB_LOOP_ON_VMEXIT)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_LOOP_ON_VMEXIT
#elif defined(X86_FEATURE_CLEAR_BHB_VMEXIT)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_VMEXIT
#elif defined(X86_FEATURE_CLEAR_BHB_LOOP)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_LOOP
#endif

/* VERW before an entry. Older kernels have one feature for ways to user space and to guests of VMX. */
#if defined(X86_FEATURE_CLEAR_CPU_BUF_VM_MMIO)
#define GNT_VERW_FOR_VMX	X86_FEATURE_CLEAR_CPU_BUF_VM
#elif defined(X86_FEATURE_CLEAR_CPU_BUF)
#define GNT_VERW_FOR_VMX	X86_FEATURE_CLEAR_CPU_BUF
#endif

#endif
