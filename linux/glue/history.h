/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When the branch history is cleared after a VM exit of VMX: one name for the code that does it and for the code
 * that reports it. Kernels of the first months had one feature for system calls and VM exits.
 */
#ifndef GANNET_HISTORY_H
#define GANNET_HISTORY_H

#include <asm/cpufeatures.h>

#if defined(X86_FEATURE_CLEAR_BHB_LOOP_ON_VMEXIT)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_LOOP_ON_VMEXIT
#elif defined(X86_FEATURE_CLEAR_BHB_VMEXIT)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_VMEXIT
#elif defined(X86_FEATURE_CLEAR_BHB_LOOP)
#define GNT_CLEAR_HISTORY	X86_FEATURE_CLEAR_BHB_LOOP
#endif

#endif
