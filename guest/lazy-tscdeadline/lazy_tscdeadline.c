// SPDX-License-Identifier: GPL-2.0-only
/*
 * The guest's half of the lazy TSC deadline: moves the local APIC timer's deadline without a VM exit
 * when the new one is later than the one that the hypervisor's timer is wound for. The interface and
 * why nothing is lost: docs/adr/0020-lazy-tsc-deadline.md.
 *
 * The clock event device of each CPU is the kernel's own and no symbol for modules. It is found where
 * the kernel itself names it: a kprobe on lapic_next_deadline(), the function to be replaced, sees it
 * as the second argument. So a CPU is taken over if, and only if, its timer runs in TSC-deadline mode.
 * Everything is done on the CPU concerned, with interrupts off, as the device's functions are called.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cc_platform.h>
#include <linux/clockchips.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/delay.h>
#include <linux/kprobes.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/reboot.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/syscore_ops.h>
#include <asm/barrier.h>
#include <asm/cpufeature.h>
#include <asm/io.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/tsc.h>

#define FEATURES_LEAF 1
#define FEATURE_LAZY_TSCDEADLINE 18
#define MSR_LAZY_TSCDEADLINE 0x4b564d09
#define ENABLED 1ULL

/* The device counts eighths of the TSC (TSC_DIVISOR in arch/x86/kernel/apic/apic.c). */
#define TSC_TICKS 8

/* One attempt to see the device is a sleep of this length, which programs it. */
#define ATTEMPTS 1000
#define ATTEMPT_US 50

/* What a CPU shares with the hypervisor. 64 bytes from kmalloc() are aligned to 64. */
struct lazy_page {
	u64 armed;
	u64 pending;
	u32 flags;
	u32 pad[11];
};
static_assert(sizeof(struct lazy_page) == 64);

struct lazy_cpu {
	struct lazy_page *page;
	/* Seen by the kprobe. */
	struct clock_event_device *seen;
	/* Taken over; NULL when not. */
	struct clock_event_device *device;
	int (*next_event)(unsigned long delta, struct clock_event_device *device);
	unsigned long set;
	unsigned long written;
	unsigned long returned;
};

static DEFINE_PER_CPU(struct lazy_cpu, lazy_cpus);
static int hotplug_state;

static int lazy_next_event(unsigned long delta, struct clock_event_device *device)
{
	struct lazy_cpu *cpu = this_cpu_ptr(&lazy_cpus);
	struct lazy_page *page = cpu->page;
	u64 armed, deadline = rdtsc() + (u64)delta * TSC_TICKS;

	cpu->set++;
	/*
	 * A store and a full barrier, on kernels for one CPU too: the other side is no CPU of theirs.
	 * Pairs with the hypervisor's fence between its store of armed and its load of pending.
	 */
	virt_store_mb(page->pending, deadline);
	armed = READ_ONCE(page->armed);
	if (!armed || deadline < armed) {
		cpu->written++;
		wrmsrl(MSR_IA32_TSC_DEADLINE, deadline);
	}
	return 0;
}

static int see_device(struct kprobe *probe, struct pt_regs *regs)
{
	/* lapic_next_deadline(unsigned long delta, struct clock_event_device *evt) */
	WRITE_ONCE(this_cpu_ptr(&lazy_cpus)->seen, (struct clock_event_device *)regs->si);
	return 0;
}

static struct kprobe probe = {
	.symbol_name = "lapic_next_deadline",
	.pre_handler = see_device,
};

/* Whether the device counts what lazy_next_event() takes it to count, to one part in a thousand. */
static bool counts_as_expected(const struct clock_event_device *device)
{
	u64 frequency = mul_u64_u32_shr(NSEC_PER_SEC, device->mult, device->shift);
	u64 ticks = frequency * TSC_TICKS, tsc = (u64)tsc_khz * 1000;

	return max(ticks, tsc) - min(ticks, tsc) <= div_u64(tsc, 1000);
}

/* On the CPU, interrupts off. */
static int take_over(struct lazy_cpu *cpu, struct clock_event_device *device)
{
	memset(cpu->page, 0, sizeof(*cpu->page));
	if (wrmsrl_safe(MSR_LAZY_TSCDEADLINE, virt_to_phys(cpu->page) | ENABLED))
		return -EIO;
	/* The deadline that runs is known to the hypervisor; the next one is the first of ours. */
	cpu->next_event = device->set_next_event;
	cpu->device = device;
	device->set_next_event = lazy_next_event;
	return 0;
}

/* On the CPU, interrupts off. */
static void give_back(struct lazy_cpu *cpu)
{
	struct clock_event_device *device = cpu->device;
	bool outstanding;

	if (!device)
		return;
	cpu->device = NULL;
	cpu->seen = NULL;
	cpu->returned++;
	if (device->set_next_event == lazy_next_event)
		device->set_next_event = cpu->next_event;
	outstanding = READ_ONCE(cpu->page->armed) != 0;
	wrmsrl(MSR_LAZY_TSCDEADLINE, 0);
	/*
	 * The hypervisor winds its timer for the newest deadline now. Not every one may: a deadline
	 * that was only stored is written. If it has come meanwhile, one interrupt finds nothing to do.
	 */
	if (outstanding && clockevent_state_oneshot(device))
		wrmsrl(MSR_IA32_TSC_DEADLINE, READ_ONCE(cpu->page->pending));
}

/* Runs in a thread of the CPU that has come, bound to it. */
static int cpu_comes(unsigned int n)
{
	struct lazy_cpu *cpu = this_cpu_ptr(&lazy_cpus);
	struct clock_event_device *device;
	unsigned long flags;
	int attempt, err;

	if (!cpu->page)
		cpu->page = kzalloc_node(sizeof(*cpu->page), GFP_KERNEL, cpu_to_node(n));
	if (!cpu->page)
		return -ENOMEM;
	for (attempt = 0; attempt < ATTEMPTS && !READ_ONCE(cpu->seen); attempt++)
		usleep_range(ATTEMPT_US, ATTEMPT_US);
	device = READ_ONCE(cpu->seen);
	if (!device || !cpumask_test_cpu(n, device->cpumask) || !counts_as_expected(device)) {
		/* A CPU is not to be kept from coming for want of this. */
		pr_warn("CPU %u: no TSC-deadline timer to take over\n", n);
		return 0;
	}
	local_irq_save(flags);
	err = take_over(cpu, device);
	local_irq_restore(flags);
	if (err)
		pr_warn("CPU %u: the hypervisor does not take the page\n", n);
	return 0;
}

static int cpu_goes(unsigned int n)
{
	unsigned long flags;

	local_irq_save(flags);
	give_back(this_cpu_ptr(&lazy_cpus));
	local_irq_restore(flags);
	return 0;
}

/*
 * The last CPU, when all others have gone: for suspend to memory, after which the hypervisor may have forgotten the page and a stale
 * promise in it would stand for ever; for the image of a hibernation, which wakes in another machine; and for what ends the kernel
 * without the notifiers (a jump of kexec). One CPU runs, with interrupts off.
 */
static struct clock_event_device *of_last_cpu;

#ifdef SYSCORE_TAKES_DATA
#define SYSCORE_DATA void *unused
#else
#define SYSCORE_DATA void
#endif

static int before_sleep(SYSCORE_DATA)
{
	struct lazy_cpu *cpu = this_cpu_ptr(&lazy_cpus);

	of_last_cpu = cpu->device;
	give_back(cpu);
	return 0;
}

static void after_sleep(SYSCORE_DATA)
{
	struct clock_event_device *device = of_last_cpu;

	of_last_cpu = NULL;
	/* Whoever does not take the page leaves the CPU with the kernel's own function, which works. */
	if (device && take_over(this_cpu_ptr(&lazy_cpus), device))
		pr_warn("CPU %u: the hypervisor does not take the page any more\n", smp_processor_id());
}

static void at_shutdown(SYSCORE_DATA)
{
	unsigned long flags;

	local_irq_save(flags);
	give_back(this_cpu_ptr(&lazy_cpus));
	local_irq_restore(flags);
}

#ifdef SYSCORE_TAKES_DATA
static const struct syscore_ops sleep_calls = {
	.suspend = before_sleep,
	.resume = after_sleep,
	.shutdown = at_shutdown,
};
static struct syscore sleep_ops = { .ops = &sleep_calls };
#define register_sleep()	register_syscore(&sleep_ops)
#define unregister_sleep()	unregister_syscore(&sleep_ops)
#else
static struct syscore_ops sleep_ops = {
	.suspend = before_sleep,
	.resume = after_sleep,
	.shutdown = at_shutdown,
};
#define register_sleep()	register_syscore_ops(&sleep_ops)
#define unregister_sleep()	unregister_syscore_ops(&sleep_ops)
#endif

/*
 * A crashed kernel runs no notifiers before the next one (kdump). What it calls is seen by a kprobe, on the CPU that crashed, which is
 * the one that goes on; the others are stopped for good, and an INIT ends the hypervisor's use of their pages.
 */
static int before_crash(struct kprobe *unused, struct pt_regs *regs)
{
	give_back(this_cpu_ptr(&lazy_cpus));
	return 0;
}

static struct kprobe crash_probe = {
	.symbol_name = "machine_crash_shutdown",
	.pre_handler = before_crash,
};
static bool sees_crashes;

static void give_back_here(void *unused)
{
	give_back(this_cpu_ptr(&lazy_cpus));
}

/* The next kernel, started by kexec, knows nothing of pages that the hypervisor writes to. */
static int before_reboot(struct notifier_block *block, unsigned long event, void *unused)
{
	on_each_cpu(give_back_here, NULL, 1);
	return NOTIFY_DONE;
}

static struct notifier_block reboot_block = {
	.notifier_call = before_reboot,
};

static unsigned long sum_of(size_t member)
{
	unsigned long sum = 0;
	int n;

	for_each_possible_cpu(n)
		sum += READ_ONCE(*(unsigned long *)((char *)per_cpu_ptr(&lazy_cpus, n) + member));
	return sum;
}

static int show_sum(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%lu\n", sum_of((size_t)kp->arg));
}

static const struct kernel_param_ops sum_ops = {
	.get = show_sum,
};

module_param_cb(set, &sum_ops, (void *)offsetof(struct lazy_cpu, set), 0444);
MODULE_PARM_DESC(set, "Deadlines set so far (read only)");
module_param_cb(written, &sum_ops, (void *)offsetof(struct lazy_cpu, written), 0444);
module_param_cb(returned, &sum_ops, (void *)offsetof(struct lazy_cpu, returned), 0444);
MODULE_PARM_DESC(returned, "Times that a CPU's timer was given back so far (read only)");
MODULE_PARM_DESC(written, "Those of them that needed a write of the MSR, which is a VM exit (read only)");

static bool is_offered(void)
{
	u32 base;

	if (!boot_cpu_has(X86_FEATURE_HYPERVISOR) || !boot_cpu_has(X86_FEATURE_TSC_DEADLINE_TIMER))
		return false;
	base = hypervisor_cpuid_base("KVMKVMKVM\0\0\0", FEATURES_LEAF);
	return base && (cpuid_eax(base + FEATURES_LEAF) & BIT(FEATURE_LAZY_TSCDEADLINE));
}

static void free_pages_of_all(void)
{
	int n;

	for_each_possible_cpu(n)
		kfree(per_cpu(lazy_cpus, n).page);
}

static int __init lazy_tscdeadline_init(void)
{
	int err, n, taken = 0;

	if (!is_offered()) {
		pr_info("not offered by the hypervisor\n");
		return -ENODEV;
	}
	/* The hypervisor could not read the page. */
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT))
		return -EOPNOTSUPP;
	err = register_kprobe(&probe);
	if (err)
		return err;
	hotplug_state = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "lazy_tscdeadline:online",
					  cpu_comes, cpu_goes);
	if (hotplug_state < 0) {
		err = hotplug_state;
		goto no_hotplug;
	}
	cpus_read_lock();
	for_each_online_cpu(n)
		taken += per_cpu(lazy_cpus, n).device != NULL;
	cpus_read_unlock();
	if (!taken) {
		err = -ENODEV;
		goto none_taken;
	}
	register_reboot_notifier(&reboot_block);
	register_sleep();
	/* Not every kernel can start another one. */
	sees_crashes = !register_kprobe(&crash_probe);
	pr_info("%d CPUs\n", taken);
	return 0;

none_taken:
	cpuhp_remove_state(hotplug_state);
no_hotplug:
	unregister_kprobe(&probe);
	free_pages_of_all();
	return err;
}

static void __exit lazy_tscdeadline_exit(void)
{
	if (sees_crashes)
		unregister_kprobe(&crash_probe);
	unregister_sleep();
	unregister_reboot_notifier(&reboot_block);
	/* Gives every CPU's device back, on that CPU: nobody is in lazy_next_event() after it. */
	cpuhp_remove_state(hotplug_state);
	unregister_kprobe(&probe);
	free_pages_of_all();
}

module_init(lazy_tscdeadline_init);
module_exit(lazy_tscdeadline_exit);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Lazy TSC deadline: later deadlines of the local APIC timer without VM exits");
