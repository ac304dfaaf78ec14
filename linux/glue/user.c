// SPDX-License-Identifier: GPL-2.0-only
/* Copies to and from the VMM's memory. */
#include <linux/uaccess.h>

#include "gannet.h"

int gnt_user_range_ok(u64 hva, u64 len)
{
	return access_ok((void __user *)hva, len);
}

/* The first address that no user memory has: larger with five-level paging. */
u64 gnt_user_end(void)
{
	return TASK_SIZE_MAX;
}

int gnt_user_read(void *to, u64 hva, size_t len)
{
	return copy_from_user(to, (const void __user *)hva, len) ? -EFAULT : 0;
}

int gnt_user_write(u64 hva, const void *from, size_t len)
{
	return copy_to_user((void __user *)hva, from, len) ? -EFAULT : 0;
}

int gnt_user_read_nofault(void *to, u64 hva, size_t len)
{
	return copy_from_user_nofault(to, (const void __user *)hva, len) ? -EFAULT : 0;
}

int gnt_user_write_nofault(u64 hva, const void *from, size_t len)
{
	return copy_to_user_nofault((void __user *)hva, from, len) ? -EFAULT : 0;
}

int gnt_user_clear(u64 hva, size_t len)
{
	return clear_user((void __user *)hva, len) ? -EFAULT : 0;
}

/*
 * 0: exchanged; 1: it held something else; -EFAULT. Size and alignment were checked in Rust. The
 * kernel's macro makes a label of the name it is given, so each use has its own.
 */
#define EXCHANGE(type)									\
	({										\
		type expected = (type)old;						\
											\
		__try_cmpxchg_user((type __user *)hva, &expected, (type)new, fault_##type); \
	})

int gnt_user_cmpxchg(u64 hva, u32 size, u64 old, u64 new)
{
	if (!access_ok((void __user *)hva, size))
		return -EFAULT;
	switch (size) {
	case 1:
		return EXCHANGE(u8);
	case 2:
		return EXCHANGE(u16);
	case 4:
		return EXCHANGE(u32);
	case 8:
		return EXCHANGE(u64);
	default:
		return -EFAULT;
	}
}
