// SPDX-License-Identifier: GPL-2.0-only
/*
 * The stock KVM modules, kept out while we are here.
 *
 * The kernel has one callback for a crash, one CPU-hotplug state and one device number for a
 * hypervisor. A stock module that is loaded second finds the last two taken and gives up, but not
 * without a warning and without having thrown our callback away. So it is refused at the door.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/printk.h>
#include <linux/string.h>

#include "gannet.h"

#ifndef GNT_SPLIT
static int module_event(struct notifier_block *nb, unsigned long event, void *data)
{
	const struct module *other = data;

	if (event != MODULE_STATE_COMING)
		return NOTIFY_DONE;
	if (strcmp(other->name, "kvm_amd") && strcmp(other->name, "kvm_intel"))
		return NOTIFY_DONE;
	pr_err("%s refused: this module owns the machine's virtualization; unload it first\n",
	       other->name);
	return notifier_from_errno(-EBUSY);
}

static struct notifier_block notifier = { .notifier_call = module_event };

int gnt_rivals_init(void)
{
	return register_module_notifier(&notifier);
}

void gnt_rivals_exit(void)
{
	unregister_module_notifier(&notifier);
}
#else
/* Under KVM's names there can be no other: a stock half finds no stock kvm.ko to be linked with. */
int gnt_rivals_init(void)
{
	return 0;
}

void gnt_rivals_exit(void)
{
}
#endif
