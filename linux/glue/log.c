// SPDX-License-Identifier: GPL-2.0-only
/* Messages that Rust has formatted, and the end of a Rust panic. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bug.h>
#include <linux/printk.h>
#include <linux/ratelimit.h>

#include "gannet.h"

int gnt_log_ratelimit(void)
{
	static DEFINE_RATELIMIT_STATE(limit, DEFAULT_RATELIMIT_INTERVAL, DEFAULT_RATELIMIT_BURST);

	return __ratelimit(&limit);
}

void gnt_log(u32 level, const char *text, size_t len)
{
	switch (level) {
	case 3:
		pr_err("%.*s\n", (int)len, text);
		break;
	case 4:
		pr_warn("%.*s\n", (int)len, text);
		break;
	default:
		pr_info("%.*s\n", (int)len, text);
	}
}

void __noreturn gnt_panic(const char *text, size_t len)
{
	pr_emerg("%.*s\n", (int)len, text);
	BUG();
}
