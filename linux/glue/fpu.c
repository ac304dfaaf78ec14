// SPDX-License-Identifier: GPL-2.0-only
/* The guest's FPU and extended state, in the kernel's own containers for guests. */
#include <asm/cpufeature.h>
#include <asm/fpu/api.h>
#include <asm/fpu/types.h>
#include <asm/fpu/xcr.h>

#include "compat.h"
#include "gannet.h"

static_assert(sizeof(struct fpu_guest) <= GNT_FPU_BYTES);

static u64 host_xcr0 __ro_after_init;
static u64 host_xss __ro_after_init;

void gnt_fpu_init(void)
{
	if (boot_cpu_has(X86_FEATURE_XSAVE))
		host_xcr0 = xgetbv(XCR_XFEATURE_ENABLED_MASK);
	if (boot_cpu_has(X86_FEATURE_XSAVES))
		rdmsrq_safe(MSR_IA32_XSS, &host_xss);
}

u64 gnt_host_xcr0(void)
{
	return host_xcr0;
}

u64 gnt_host_xss(void)
{
	return host_xss;
}

u64 gnt_fpu_guest_xfeatures(void)
{
	return host_xcr0 & xstate_get_guest_group_perm();
}

int gnt_fpu_alloc(struct fpu_guest *f)
{
	return fpu_alloc_guest_fpstate(f) ? 0 : -ENOMEM;
}

void gnt_fpu_free(struct fpu_guest *f)
{
	fpu_free_guest_fpstate(f);
}

/* *owner is the task whose state it is, if any. Nothing happens twice, nor by another task. */
void gnt_fpu_swap(struct fpu_guest *f, int enter, u64 *owner)
{
	u64 from = enter ? 0 : (unsigned long)current;

	if (*owner != from)
		return;
	*owner = from ^ (unsigned long)current;
	fpu_swap_kvm_fpstate(f, enter);
}

void gnt_fpu_ensure(void)
{
	if (unlikely(test_thread_flag(TIF_NEED_FPU_LOAD)))
		switch_fpu_return();
}

void gnt_fpu_to_uabi(struct fpu_guest *f, void *out, size_t len, u64 xfeatures, u32 pkru)
{
	fpu_copy_guest_fpstate_to_uabi(f, out, len, xfeatures, pkru);
}

int gnt_fpu_from_uabi(struct fpu_guest *f, const void *from, u64 xcr0, u32 *pkru)
{
	return fpu_copy_uabi_to_guest_fpstate(f, from, xcr0, pkru);
}

size_t gnt_fpu_uabi_size(const struct fpu_guest *f)
{
	return max_t(size_t, f->uabi_size, 4096);
}

int gnt_fpu_enable_features(struct fpu_guest *f, u64 xfeatures)
{
	return fpu_enable_guest_xfd_features(f, xfeatures);
}

void gnt_fpu_update_xfd(struct fpu_guest *f, u64 xfd)
{
	fpu_update_guest_xfd(f, xfd);
}

void gnt_fpu_sync_xfd(void)
{
	fpu_sync_guest_vmexit_xfd_state();
}
