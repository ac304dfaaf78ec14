// SPDX-License-Identifier: GPL-2.0-only
/* Load and unload: each service in turn, the last thing being /dev/kvm that answers. */
#include <linux/init.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

#include <asm/page.h>

#include "gannet.h"

static int __init start(void)
{
	int r = gnt_params_check();

	if (r)
		return r;
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
	/* Claimed first, so that two hypervisors cannot both believe that they own the CPUs. */
	r = gnt_device_claim();
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
	gnt_clock_exit();
no_clock:
	gnt_sched_exit();
no_sched:
	gnt_smp_exit();
	return r;
}

static void __exit stop(void)
{
	gnt_device_release();
	gnt_debug_exit();
	gnt_power_exit();
	gannet_exit();
	gnt_rivals_exit();
	gnt_clock_exit();
	gnt_sched_exit();
	gnt_smp_exit();
}

module_init(start);
module_exit(stop);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Gannet, a hypervisor with the /dev/kvm interface");
MODULE_VERSION(GANNET_VERSION);
MODULE_ALIAS_MISCDEV(KVM_MINOR);
MODULE_ALIAS("devname:kvm");
