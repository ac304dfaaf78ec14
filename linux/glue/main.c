// SPDX-License-Identifier: GPL-2.0-only
/*
 * Load and unload. The core is set up once; a vendor's half then starts it, the last thing being /dev/kvm that answers. In
 * one module both are one; under KVM's names kvm-amd or kvm-intel starts what kvm holds.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/init.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mutex.h>

#include <asm/page.h>

#include "gannet.h"

static DEFINE_MUTEX(starting);
static bool started;

static int start(struct gnt_switches *switches, struct module *owner)
{
	int r = gnt_params_use(switches);

	if (r)
		return r;
	/* Claimed first, so that two hypervisors cannot both believe that they own the CPUs. */
	r = gnt_device_claim(owner);
	if (r)
		goto no_device;
	r = gnt_rivals_init();
	if (r)
		goto no_rivals;
	r = gannet_init();
	if (r)
		goto no_rust;
	r = gnt_power_init();
	if (r)
		goto no_power;
	gnt_debug_init();
	gnt_device_open_for_use();
	return 0;

no_power:
	gannet_exit();
no_rust:
	gnt_rivals_exit();
no_rivals:
	gnt_device_release();
no_device:
	gnt_params_use(NULL);
	return r;
}

/* 0 or a negative errno. The switches stay the caller's, who calls gnt_stop() before they go. */
int gnt_start(struct gnt_switches *switches, struct module *owner)
{
	int r = -EEXIST;

	mutex_lock(&starting);
	if (started)
		pr_err("already started, by the module for the other vendor's CPUs\n");
	else
		r = start(switches, owner);
	started |= !r;
	mutex_unlock(&starting);
	return r;
}
GNT_EXPORT(gnt_start);

void gnt_stop(void)
{
	mutex_lock(&starting);
	/* First: this waits for an open() under way, and none comes after it. */
	gnt_device_release();
	gnt_debug_exit();
	/* Off on every CPU before the memory goes that it works on. */
	gnt_power_exit();
	gannet_exit();
	gnt_rivals_exit();
	gnt_params_use(NULL);
	started = false;
	mutex_unlock(&starting);
}
GNT_EXPORT(gnt_stop);

static void end(void)
{
	gannet_unload();
	gnt_clock_exit();
	gnt_sched_exit();
	gnt_smp_exit();
}

static int __init begin(void)
{
	int r;

	gnt_direct_map_base = PAGE_OFFSET;
	gnt_fpu_init();
	gnt_hostcpu_init();
	gnt_perf_init();
	r = gnt_smp_init();
	if (r)
		return r;
	r = gnt_sched_init();
	if (r)
		goto no_sched;
	r = gnt_clock_init();
	if (r)
		goto no_clock;
	return 0;

no_clock:
	gnt_sched_exit();
no_sched:
	gnt_smp_exit();
	return r;
}

static int __init load(void)
{
	int r = begin();

#ifndef GNT_SPLIT
	if (r)
		return r;
	r = gnt_start(&gnt_own_switches, THIS_MODULE);
	if (r)
		end();
#endif
	return r;
}

static void __exit unload(void)
{
#ifndef GNT_SPLIT
	gnt_stop();
#endif
	end();
}

module_init(load);
module_exit(unload);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Gannet, a hypervisor with the /dev/kvm interface");
MODULE_VERSION(GANNET_VERSION);
MODULE_INFO(gannet_core, GANNET_CORE);
MODULE_ALIAS_MISCDEV(KVM_MINOR);
MODULE_ALIAS("devname:kvm");
