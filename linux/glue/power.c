// SPDX-License-Identifier: GPL-2.0-only
/*
 * Virtualization on and off: per CPU as CPUs come and go, over suspend, and off for good before a reboot, a
 * kexec or a crash kernel, which would not survive a CPU that ignores INIT.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/reboot.h>
#include <linux/smp.h>
#include <linux/syscore_ops.h>

#include "gannet.h"

/*
 * The kernel has a state made for hypervisors, torn down after the last task has left the CPU. It
 * has one owner, so a stock KVM that holds it makes the setup fail.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
#define GNT_CPUHP_STATE CPUHP_AP_KVM_ONLINE
#else
#define GNT_CPUHP_STATE CPUHP_AP_KVM_STARTING
#endif

/* Read by the world switch when it faults. */
bool gnt_rebooting;

static int online(unsigned int cpu)
{
	return gannet_cpu_online();
}

static int offline(unsigned int cpu)
{
	gnt_end_user_return();
	gannet_cpu_offline();
	return 0;
}

static void offline_here(void *unused)
{
	gannet_cpu_offline();
}

static void off_for_good(void)
{
	gnt_virt_ends();
	on_each_cpu(offline_here, NULL, 1);
}

static int rebooting(struct notifier_block *nb, unsigned long action, void *data)
{
	off_for_good();
	return NOTIFY_OK;
}

/* Before vCPU threads can be stopped: they must find the CPU gone, not the entry faulting. */
static struct notifier_block reboot_notifier = { .notifier_call = rebooting };

/* Suspend and resume run on the last CPU with interrupts off; the others were unplugged. */
#ifdef GNT_HAS_SYSCORE_DATA
static int suspend(void *unused)
#else
static int suspend(void)
#endif
{
	gnt_end_user_return();
	gannet_cpu_offline();
	gnt_clock_sleeps();
	return 0;
}

#ifdef GNT_HAS_SYSCORE_DATA
static void resume(void *unused)
#else
static void resume(void)
#endif
{
	gnt_clock_wakes();
	if (gannet_cpu_online())
		pr_err("virtualization cannot be switched on again after suspend\n");
}

#ifdef GNT_HAS_SYSCORE_DATA
static void shutdown(void *unused)
#else
static void shutdown(void)
#endif
{
	off_for_good();
}

#ifdef GNT_HAS_SYSCORE_DATA
static const struct syscore_ops syscore_calls = {
	.suspend = suspend,
	.resume = resume,
	.shutdown = shutdown,
};
static struct syscore syscore = { .ops = &syscore_calls };
#define register_syscore_calls()	register_syscore(&syscore)
#define unregister_syscore_calls()	unregister_syscore(&syscore)
#else
static struct syscore_ops syscore = {
	.suspend = suspend,
	.resume = resume,
	.shutdown = shutdown,
};
#define register_syscore_calls()	register_syscore_ops(&syscore)
#define unregister_syscore_calls()	unregister_syscore_ops(&syscore)
#endif

int gnt_power_init(void)
{
	int r;

	/* As long as a CPU may be in VMX operation, a crash has somebody who ends that. */
	gnt_virt_init();
	r = cpuhp_setup_state(GNT_CPUHP_STATE, "gannet:online", online, offline);
	if (r < 0) {
		gnt_virt_exit();
		if (r == -EBUSY)
			pr_err("another hypervisor owns this machine's CPUs\n");
		return r;
	}
	register_syscore_calls();
	register_reboot_notifier(&reboot_notifier);
	return 0;
}

void gnt_power_exit(void)
{
	unregister_reboot_notifier(&reboot_notifier);
	unregister_syscore_calls();
	cpuhp_remove_state(GNT_CPUHP_STATE);
	gnt_virt_exit();
}
