/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The border between the module's C and its Rust.
 *
 * gnt_*    is implemented here in C and called from Rust (crates/host/src/sys/kernel.rs declares the
 *          same functions); gannet_* is implemented in Rust (linux/module) and called from here.
 * Structs that both sides see are asserted on both sides.
 */
#ifndef GANNET_H
#define GANNET_H

#include <linux/compiler.h>
#include <linux/types.h>
#include <linux/version.h>

struct srcu_struct;
struct cpumask;
struct eventfd_ctx;
struct file;
struct kernel_param_ops;
struct module;
struct gnt_debug_dir;
struct seq_file;

/* What became of the kernel's structs that live inside Rust objects: bytes reserved there. */
#define GNT_TIMER_BYTES		192
#define GNT_NOTIFIER_BYTES	128
#define GNT_WATCH_BYTES		192
#define GNT_WAITER_BYTES	8
#define GNT_FPU_BYTES		64

struct gnt_timer;
struct gnt_notifier;
struct gnt_watch;
struct rcuwait;
struct fpu_guest;

/* ---- shared structs ---- */

struct gnt_host_page {
	u64 pfn;
	u8 writable;
	u8 refcounted;
	u8 level;
	u8 held;
	u8 dirty;
	u8 reserved[3];
};
static_assert(sizeof(struct gnt_host_page) == 16);

struct gnt_notifier_calls {
	void (*invalidate_start)(void *context, u64 start, u64 end, int may_block);
	void (*invalidate_end)(void *context, u64 start, u64 end);
	int (*clear_young)(void *context, u64 start, u64 end);
	int (*test_young)(void *context, u64 start, u64 end);
	void (*release)(void *context);
};
static_assert(sizeof(struct gnt_notifier_calls) == 40);

struct gnt_watch_calls {
	void (*fired)(void *context);
	void (*hung_up)(void *context);
};
static_assert(sizeof(struct gnt_watch_calls) == 16);

struct gnt_file_calls {
	s64 (*ioctl)(void *object, u32 command, u64 argument, int compat);
	u64 (*page)(void *object, u64 offset);
	void (*release)(void *object);
	s64 (*read)(void *object, u64 offset, u64 buffer, u64 len);
	u64 mappable;
	u64 readable;
	u64 kind[2];	/* Rust's business */
};
static_assert(sizeof(struct gnt_file_calls) == 64);

struct gnt_debug_calls {
	const char *(*name)(u32 file);
	void (*show)(void *object, u32 file, struct seq_file *to);
	u64 (*value)(void *object, u32 file);
	void (*release)(void *object);
	u32 files;
	u32 totals;	/* so many of the first are numbers, which add up */
};
static_assert(sizeof(struct gnt_debug_calls) == 40);

struct gnt_trace_exit {
	u64 rip;
	u64 info1;
	u64 info2;
	u32 code;
	u32 event;
	u32 event_error;
	u32 vcpu_id;
};
static_assert(sizeof(struct gnt_trace_exit) == 40);

struct gnt_clock_snapshot {
	u64 tsc;
	u64 monotonic_ns;
	u64 boot_ns;
	u64 raw_ns;
	u64 real_ns;
	u64 tsc_based;
};
static_assert(sizeof(struct gnt_clock_snapshot) == 48);

struct gnt_host_tables {
	u64 gdt;
	u64 idt;
	u64 task;
	u16 cs;
	u16 ss;
	u16 tr;
	u16 reserved;
};
static_assert(sizeof(struct gnt_host_tables) == 32);

/* ---- C for Rust ---- */

/* mm.c */
extern u64 gnt_direct_map_base;
u64 gnt_page_alloc(void);
u64 gnt_page_alloc_low(void);
void gnt_page_free(u64 hpa);
u64 gnt_pages_alloc(u32 order);
void gnt_pages_free(u64 hpa, u32 order);
void *gnt_alloc(size_t size, size_t align, int zero);
void gnt_free(void *p);

/* gup.c: 0, or 1 fault, 2 interrupted, 3 poisoned, 4 again */
int gnt_fault_in(u64 hva, int write, int mode, struct gnt_host_page *out);
int gnt_hva_level(u64 hva);
void gnt_page_put(u64 pfn);
/* SIGBUS, BUS_MCEERR_AR at hva, for the current thread. */
void gnt_signal_poisoned(u64 hva);
void gnt_page_set_dirty(u64 pfn);
void gnt_page_set_accessed(u64 pfn);

/* notifier.c */
int gnt_notifier_register(struct gnt_notifier *n, const struct gnt_notifier_calls *calls,
			  void *context);
void gnt_notifier_unregister(struct gnt_notifier *n);
int gnt_notifier_is_current(const struct gnt_notifier *n);

/* user.c: 0 or a negative errno */
int gnt_user_read(void *to, u64 hva, size_t len);
int gnt_user_write(u64 hva, const void *from, size_t len);
int gnt_user_read_nofault(void *to, u64 hva, size_t len);
int gnt_user_write_nofault(u64 hva, const void *from, size_t len);
int gnt_user_cmpxchg(u64 hva, u32 size, u64 old, u64 new);
int gnt_user_clear(u64 hva, size_t len);
int gnt_user_range_ok(u64 hva, u64 len);
u64 gnt_user_end(void);

/* lock.c */
/* How a lock is taken: `host::lockdep::Taken`. */
#define GNT_TAKEN_ALONE		0
#define GNT_TAKEN_SHARED	1
#define GNT_TAKEN_TRIED		2
#define GNT_TAKEN_ASLEEP	4
void gnt_lockdep_acquire(const char *file, size_t len, u32 line, u32 how);
void gnt_lockdep_release(const char *file, size_t len, u32 line);
void gnt_irq_disable(void);
void gnt_irq_enable(void);
void gnt_mutex_lock_slow(u32 *word);
int gnt_mutex_lock_killable_slow(u32 *word);
void gnt_mutex_wake(u32 *word);
unsigned long gnt_spin_lock_irqsave(void *word);
void gnt_spin_unlock_irqrestore(void *word, unsigned long flags);
void gnt_read_lock(void *words);
void gnt_read_unlock(void *words);
void gnt_write_lock(void *words);
void gnt_write_unlock(void *words);
int gnt_rwlock_is_contended(void *words);
struct srcu_struct *gnt_srcu_new(void);
void gnt_srcu_free(struct srcu_struct *domain);
int gnt_srcu_read_lock(struct srcu_struct *domain);
void gnt_srcu_read_unlock(struct srcu_struct *domain, int index);
void gnt_srcu_synchronize(struct srcu_struct *domain);

/* timer.c */
void gnt_timer_init(struct gnt_timer *t, u64 (*expired)(void *context), void *context);
void gnt_timer_start(struct gnt_timer *t, u64 at);
int gnt_timer_cancel(struct gnt_timer *t);
int gnt_timer_try_cancel(struct gnt_timer *t);

/* sched.c */
int gnt_may_poll(void);
void gnt_waiter_prepare(struct rcuwait *w);
void gnt_waiter_finish(struct rcuwait *w);
void gnt_waiter_sleep(struct rcuwait *w);
int gnt_waiter_wake(struct rcuwait *w);
int gnt_work_pending(void);
int gnt_handle_work(void);
int gnt_signal_pending(void);
int gnt_need_resched(void);
void gnt_cond_resched(void);
u64 gnt_run_delay_ns(void);
u32 gnt_current_tid(void);
void gnt_sigmask_set(u64 mask);
void gnt_sigmask_restore(void);
int gnt_sched_init(void);
void gnt_sched_exit(void);

/* context.c */
void gnt_guest_enter(void);
void gnt_guest_exit(bool interrupted);
void gnt_guest_time_end(void);
void gnt_guest_pause(void);
void gnt_guest_resume(void);

/* smp.c */
u32 gnt_cpu_id(void);
u32 gnt_max_cpus(void);
u32 gnt_online_cpus(void);
void gnt_kick(u32 cpu);
struct cpumask *gnt_sync_begin(void);
void gnt_sync_add(struct cpumask *mask, u32 cpu);
void gnt_sync_end(struct cpumask *mask);
void gnt_run_on_all(void (*f)(void));
bool gnt_run_on(u32 cpu, void (*f)(u64), u64 argument);
int gnt_smp_init(void);
void gnt_smp_exit(void);

/* fpu.c */
int gnt_fpu_alloc(struct fpu_guest *f);
void gnt_fpu_free(struct fpu_guest *f);
void gnt_fpu_swap(struct fpu_guest *f, int enter, u64 *owner);
void gnt_fpu_ensure(void);
void gnt_fpu_to_uabi(struct fpu_guest *f, void *out, size_t len, u64 xfeatures, u32 pkru);
int gnt_fpu_from_uabi(struct fpu_guest *f, const void *from, u64 xcr0, u32 *pkru);
size_t gnt_fpu_uabi_size(const struct fpu_guest *f);
int gnt_fpu_enable_features(struct fpu_guest *f, u64 xfeatures);
void gnt_fpu_update_xfd(struct fpu_guest *f, u64 xfd);
void gnt_fpu_sync_xfd(void);
u64 gnt_fpu_guest_xfeatures(void);
u64 gnt_host_xcr0(void);
u64 gnt_host_xss(void);
void gnt_fpu_init(void);

/* eventfd.c */
int gnt_fd_is_open(int fd);
struct eventfd_ctx *gnt_eventfd_get(int fd);
void gnt_eventfd_put(struct eventfd_ctx *e);
void gnt_eventfd_signal(struct eventfd_ctx *e, u64 count);
int gnt_watch_attach(struct gnt_watch *w, int fd, const struct eventfd_ctx *expected,
		     const struct gnt_watch_calls *calls, void *context);
void gnt_watch_detach(struct gnt_watch *w);
struct eventfd_ctx *gnt_watch_context(const struct gnt_watch *w);

/* clock.c */
u64 gnt_monotonic_ns(void);
u64 gnt_boottime_ns(void);
u64 gnt_random_word(void);
u64 gnt_realtime_ns(void);
u32 gnt_tsc_khz(void);
int gnt_tsc_is_stable(void);
void gnt_clock_snapshot(struct gnt_clock_snapshot *out);
u32 gnt_clock_generation(void);
u64 gnt_tsc_lost(void);
void gnt_clock_sleeps(void);
void gnt_clock_wakes(void);
int gnt_clock_init(void);
void gnt_clock_exit(void);

/* hostcpu.c */
bool gnt_ibpb_on_switch(void);
u64 gnt_host_spec_ctrl(void);
void gnt_guest_ssbd(bool on);
void gnt_restore_debug_regs(void);
u64 gnt_host_debugctl(void);
void gnt_machine_check(void);
bool gnt_uses_ldt(void);
bool gnt_detects_split_locks(void);
bool gnt_guest_split_lock(u64 rip);
u64 gnt_host_selectors(void);
void gnt_load_host_selectors(u16 fs, u16 gs, u16 ldt);
void gnt_load_data_selectors(u16 ds, u16 es);
void gnt_load_task_register(void);
void gnt_hostcpu_init(void);
void gnt_perf_init(void);
int gnt_lost_cpu(void);
u32 gnt_kernel_features(u32 leaf, u32 subleaf, u32 reg);

/* virt.c: on the CPU itself; 0 or a negative errno */
bool gnt_vmx_allowed(void);
int gnt_svm_on(void);
void gnt_svm_off(void);
int gnt_vmx_on(u64 region);
void gnt_vmx_off(void);
void gnt_virt_init(void);
void gnt_virt_exit(void);
void gnt_virt_ends(void);

/* vmx.c */
bool gnt_perf_enter(u64 *global_ctrl);
void gnt_perf_leave(void);
void gnt_host_tables(struct gnt_host_tables *out);
void gnt_vmx_nmi(void);
void gnt_vmx_left(void);
bool gnt_watch_user_return(void);
void gnt_end_user_return(void);

/* mitigations.c */
u64 gnt_mitigation_facts(void);
extern const struct kernel_param_ops gnt_l1d_ops;
void gnt_l1d_flush_chosen(u32 state);
int gnt_l1d_flush_prepare(void);
void gnt_l1d_flush(void);
u32 gnt_nx_huge_pages_asked(void);
void gnt_nx_huge_pages_chosen(bool splits);
void gnt_mitigations_exit(void);

/* log.c */
int gnt_log_ratelimit(void);
void gnt_log(u32 level, const char *text, size_t len);
void __noreturn gnt_panic(const char *text, size_t len);

/* params.c */
u64 gnt_halt_poll_ns(void);
int gnt_host_state_by_msr(void);
int gnt_xstate_cache(void);
int gnt_keep_roots(void);
int gnt_nested_dirty_tracking(void);
int gnt_nested_apicv(void);
int gnt_lazy_tscdeadline(void);
int gnt_enable_apicv(int possible);
int gnt_nested(int possible);
int gnt_enable_shadow_vmcs(int possible);
int gnt_preemption_timer(void);
void gnt_no_preemption_timer(void);
void gnt_uses(u32 uses);
int gnt_npt(void);
int gnt_ept(void);
u32 gnt_l1d_flush_asked(void);
/* What one vendor's CPUs can be told not to use: its module's parameters. */
struct gnt_switches {
	bool nested, npt, ept, nested_dirty_tracking, enable_apicv, enable_shadow_vmcs, preemption_timer, nested_apicv;
	char *host_state;
	u32 l1d_flush;	/* enum vmx_l1d_flush_state */
	u32 uses;	/* bits: enum gnt_use */
};
#define GNT_SWITCHES_DEFAULT	{ true, true, true, true, true, true, true, false, "vmsave", 0, 0 }
extern struct gnt_switches gnt_own_switches;
int gnt_params_use(struct gnt_switches *given);

/* Parameters of stock KVM's that programs read, where there is nothing to choose here. */
extern const struct kernel_param_ops gnt_constant_ops, gnt_constant_bool_ops, gnt_use_ops, gnt_use_number_ops, gnt_bool_number_ops;
/* Which parts of the CPU are used, in the order of `Use` in crates/host/src/params.rs. */
enum gnt_use {
	GNT_LBR, GNT_NRIP_SAVE, GNT_VIRTUAL_VMLOAD, GNT_VIRTUAL_NMI, GNT_TSC_SCALING, GNT_PML, GNT_VPID, GNT_EPT_DIRTY
};
struct gnt_use_of {
	const u32 *uses;
	u32 bit;
};
#define GNT_CONSTANT(name, value) \
	module_param_cb(name, &gnt_constant_ops, value, 0444); \
	MODULE_PARM_DESC(name, "As in stock KVM, for programs that read it: always " value)
#define GNT_USES(name, ops, which) \
	static const struct gnt_use_of use_##name = { &SWITCHES.uses, which }; \
	module_param_cb(name, &ops, (void *)&use_##name, 0444); \
	MODULE_PARM_DESC(name, "As in stock KVM, for programs that read it: whether it is used")

/* main.c */
#ifdef GNT_SPLIT
#define GNT_EXPORT	EXPORT_SYMBOL_GPL
#else
#define GNT_EXPORT(name)
#endif
int gnt_start(struct gnt_switches *switches, struct module *owner);
void gnt_stop(void);

/* fops.c */
struct file *gnt_file_new(const char *name, s64 number, const struct gnt_file_calls *calls,
			  void *object, int *fd);
void gnt_file_install(struct file *file, int fd);
void gnt_file_cancel(struct file *file, int fd);
struct file *gnt_file_get(int fd, const struct gnt_file_calls **calls, void **object);
void gnt_file_put(struct file *file);
int gnt_device_claim(struct module *owner);
void gnt_device_open_for_use(void);
void gnt_device_release(void);

/* debugfs.c */
void gnt_seq_write(struct seq_file *to, const char *text, size_t len);
struct gnt_debug_dir *gnt_debug_add(const char *name, struct gnt_debug_dir *parent,
				    const struct gnt_debug_calls *calls, void *object);
void gnt_debug_remove(struct gnt_debug_dir *d);
void gnt_debug_init(void);
void gnt_debug_exit(void);

/* trace.c */
#define GNT_OBSERVE_ENTRY	(1u << 0)
#define GNT_OBSERVE_EXIT	(1u << 1)
#define GNT_OBSERVE_PIO		(1u << 2)
#define GNT_OBSERVE_MMIO	(1u << 3)
#define GNT_OBSERVE_MSR		(1u << 4)
#define GNT_OBSERVE_CPUID	(1u << 5)
#define GNT_OBSERVE_HYPERCALL	(1u << 6)
#define GNT_OBSERVE_INJ_VIRQ	(1u << 7)
#define GNT_OBSERVE_PAGE_FAULT	(1u << 8)
#define GNT_OBSERVE_CYCLES	(1u << 9)
#define GNT_OBSERVE_TURN	(1u << 16)	/* counted up from here on */
extern u32 gnt_observed;
void gnt_trace_entry(u32 vcpu_id, u64 rip);
void gnt_trace_exit(const struct gnt_trace_exit *x);
void gnt_trace_pio(u32 write, u32 port, u32 size, u32 count, u32 value);
void gnt_trace_mmio(u32 kind, u32 len, u64 gpa, u64 value);
void gnt_trace_msr(u32 write, u32 index, u64 value, u32 faulted);
void gnt_trace_cpuid(u32 leaf, u32 subleaf, const u32 *answer, u32 found);
void gnt_trace_hypercall(const u64 *call);
void gnt_trace_inj_virq(u32 vector);
void gnt_trace_page_fault(u32 vcpu_id, u64 rip, u64 address, u64 error);

/* rivals.c */
int gnt_rivals_init(void);
void gnt_rivals_exit(void);

/* power.c */
int gnt_power_init(void);
void gnt_power_exit(void);

/* svm_enter.S; called from Rust only */
extern bool gnt_rebooting;
void gnt_svm_vmrun(u64 vmcb, u64 *gprs, u64 guest_spec_ctrl, u64 host_spec_ctrl);
void gnt_refill_return_stack(void);

/* ---- Rust for C (linux/module) ---- */

/* 0 or a negative errno; says why in the log. At each start, before anything else. */
int gannet_init(void);
/* After the last file is closed and virtualization is off everywhere. */
void gannet_exit(void);
/* Once, at unload. */
void gannet_unload(void);
/* On the CPU itself. 0 or a negative errno. */
int gannet_cpu_online(void);
/* On the CPU itself; harmless where it is off. Also from NMI context at a crash. */
void gannet_cpu_offline(void);
/* On the CPU itself, before it runs user space. Interrupts are off. */
void gannet_user_return(void);
/* How a VM is shown in debugfs. */
const struct gnt_debug_calls *gannet_debug_totals(void);
/* vmentry_l1d_flush was written while loaded. 0 or a negative errno. */
int gannet_l1d_flush_changed(void);
/* The file mitigations in debugfs. */
void gannet_show_mitigations(struct seq_file *to);
/* An ioctl on /dev/kvm itself. */
s64 gannet_dev_ioctl(u32 command, u64 argument, int compat);

#endif
