/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Tracepoints with the names, fields and print formats that tools know from KVM: perf kvm stat,
 * trace-cmd, kvm_stat. Each tells when somebody listens, so that a vCPU need not ask per exit.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM kvm

#if !defined(GANNET_KVM_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define GANNET_KVM_TRACE_H

#include <linux/tracepoint.h>

#include <asm/kvm.h>
#include <asm/svm.h>
#include <asm/vmx.h>

#include "gannet.h"

#ifndef GNT_TRACE_SWITCHES
#define GNT_TRACE_SWITCHES
int gnt_on_kvm_entry(void);
void gnt_off_kvm_entry(void);
int gnt_on_kvm_exit(void);
void gnt_off_kvm_exit(void);
int gnt_on_kvm_pio(void);
void gnt_off_kvm_pio(void);
int gnt_on_kvm_mmio(void);
void gnt_off_kvm_mmio(void);
int gnt_on_kvm_msr(void);
void gnt_off_kvm_msr(void);
int gnt_on_kvm_cpuid(void);
void gnt_off_kvm_cpuid(void);
int gnt_on_kvm_hypercall(void);
void gnt_off_kvm_hypercall(void);
int gnt_on_kvm_inj_virq(void);
void gnt_off_kvm_inj_virq(void);
int gnt_on_kvm_page_fault(void);
void gnt_off_kvm_page_fault(void);
#endif

TRACE_EVENT_FN(kvm_entry,
	TP_PROTO(u32 id, u64 pc),
	TP_ARGS(id, pc),
	TP_STRUCT__entry(
		__field(unsigned int, vcpu_id)
		__field(unsigned long, rip)
		__field(bool, immediate_exit)
	),
	TP_fast_assign(
		__entry->vcpu_id = id;
		__entry->rip = pc;
		__entry->immediate_exit = false;
	),
	TP_printk("vcpu %u, rip 0x%lx%s", __entry->vcpu_id, __entry->rip,
		  __entry->immediate_exit ? "[immediate exit]" : ""),
	gnt_on_kvm_entry, gnt_off_kvm_entry
);

/* Which list of names a reason is found in: VMX's or SVM's. */
#define GNT_ISA_VMX	1
#define GNT_ISA_SVM	2

#define gnt_reason_name(isa, reason)						\
	(isa == GNT_ISA_VMX) ?							\
	__print_symbolic(reason & 0xffff, VMX_EXIT_REASONS) :			\
	__print_symbolic(reason, SVM_EXIT_REASONS),				\
	(isa == GNT_ISA_VMX && reason & ~0xffff) ? " " : "",			\
	(isa == GNT_ISA_VMX) ?							\
	__print_flags(reason & ~0xffff, " ", VMX_EXIT_REASON_FLAGS) : ""

TRACE_EVENT_FN(kvm_exit,
	TP_PROTO(const struct gnt_trace_exit *x),
	TP_ARGS(x),
	TP_STRUCT__entry(
		__field(unsigned int, exit_reason)
		__field(unsigned long, guest_rip)
		__field(u32, isa)
		__field(u64, info1)
		__field(u64, info2)
		__field(u32, intr_info)
		__field(u32, error_code)
		__field(unsigned int, vcpu_id)
	),
	TP_fast_assign(
		__entry->exit_reason = x->code;
		__entry->guest_rip = x->rip;
		__entry->isa = boot_cpu_has(X86_FEATURE_VMX) ?
			       GNT_ISA_VMX : GNT_ISA_SVM;
		__entry->info1 = x->info1;
		__entry->info2 = x->info2;
		__entry->intr_info = x->event;
		__entry->error_code = x->event_error;
		__entry->vcpu_id = x->vcpu_id;
	),
	TP_printk("vcpu %u reason %s%s%s rip 0x%lx info1 0x%016llx info2 0x%016llx intr_info 0x%08x error_code 0x%08x",
		  __entry->vcpu_id, gnt_reason_name(__entry->isa, __entry->exit_reason),
		  __entry->guest_rip, __entry->info1, __entry->info2, __entry->intr_info,
		  __entry->error_code),
	gnt_on_kvm_exit, gnt_off_kvm_exit
);

TRACE_EVENT_FN(kvm_pio,
	TP_PROTO(u32 write, u32 at, u32 bytes, u32 items, u32 first),
	TP_ARGS(write, at, bytes, items, first),
	TP_STRUCT__entry(
		__field(unsigned int, rw)
		__field(unsigned int, port)
		__field(unsigned int, size)
		__field(unsigned int, count)
		__field(unsigned int, val)
	),
	TP_fast_assign(
		__entry->rw = write;
		__entry->port = at;
		__entry->size = bytes;
		__entry->count = items;
		__entry->val = first;
	),
	TP_printk("pio_%s at 0x%x size %d count %d val 0x%x %s",
		  __entry->rw ? "write" : "read", __entry->port, __entry->size, __entry->count,
		  __entry->val, __entry->count > 1 ? "(...)" : ""),
	gnt_on_kvm_pio, gnt_off_kvm_pio
);

#define gnt_mmio_kinds		\
	{ 0, "unsatisfied-read" }, { 1, "read" }, { 2, "write" }

TRACE_EVENT_FN(kvm_mmio,
	TP_PROTO(u32 kind, u32 bytes, u64 at, u64 value),
	TP_ARGS(kind, bytes, at, value),
	TP_STRUCT__entry(
		__field(u32, type)
		__field(u32, len)
		__field(u64, gpa)
		__field(u64, val)
	),
	TP_fast_assign(
		__entry->type = kind;
		__entry->len = bytes;
		__entry->gpa = at;
		__entry->val = value;
	),
	TP_printk("mmio %s len %u gpa 0x%llx val 0x%llx",
		  __print_symbolic(__entry->type, gnt_mmio_kinds), __entry->len, __entry->gpa,
		  __entry->val),
	gnt_on_kvm_mmio, gnt_off_kvm_mmio
);

TRACE_EVENT_FN(kvm_msr,
	TP_PROTO(u32 writes, u32 index, u64 value, bool faulted),
	TP_ARGS(writes, index, value, faulted),
	TP_STRUCT__entry(
		__field(unsigned, write)
		__field(u32, ecx)
		__field(u64, data)
		__field(u8, exception)
	),
	TP_fast_assign(
		__entry->write = writes;
		__entry->ecx = index;
		__entry->data = value;
		__entry->exception = faulted;
	),
	TP_printk("msr_%s %x = 0x%llx%s", __entry->write ? "write" : "read", __entry->ecx,
		  __entry->data, __entry->exception ? " (#GP)" : ""),
	gnt_on_kvm_msr, gnt_off_kvm_msr
);

TRACE_EVENT_FN(kvm_cpuid,
	TP_PROTO(u32 leaf, u32 subleaf, const u32 *answer, bool known),
	TP_ARGS(leaf, subleaf, answer, known),
	TP_STRUCT__entry(
		__field(unsigned int, function)
		__field(unsigned int, index)
		__field(unsigned long, rax)
		__field(unsigned long, rbx)
		__field(unsigned long, rcx)
		__field(unsigned long, rdx)
		__field(bool, found)
		__field(bool, used_max_basic)
	),
	TP_fast_assign(
		__entry->function = leaf;
		__entry->index = subleaf;
		__entry->rax = answer[0];
		__entry->rbx = answer[1];
		__entry->rcx = answer[2];
		__entry->rdx = answer[3];
		__entry->found = known;
		__entry->used_max_basic = false;
	),
	TP_printk("func %x idx %x rax %lx rbx %lx rcx %lx rdx %lx, cpuid entry %s%s",
		  __entry->function, __entry->index, __entry->rax, __entry->rbx, __entry->rcx,
		  __entry->rdx, __entry->found ? "found" : "not found",
		  __entry->used_max_basic ? ", used max basic" : ""),
	gnt_on_kvm_cpuid, gnt_off_kvm_cpuid
);

TRACE_EVENT_FN(kvm_hypercall,
	TP_PROTO(const u64 *call),
	TP_ARGS(call),
	TP_STRUCT__entry(
		__field(unsigned long, nr)
		__field(unsigned long, a0)
		__field(unsigned long, a1)
		__field(unsigned long, a2)
		__field(unsigned long, a3)
	),
	TP_fast_assign(
		__entry->nr = call[0];
		__entry->a0 = call[1];
		__entry->a1 = call[2];
		__entry->a2 = call[3];
		__entry->a3 = call[4];
	),
	TP_printk("nr 0x%lx a0 0x%lx a1 0x%lx a2 0x%lx a3 0x%lx", __entry->nr, __entry->a0,
		  __entry->a1, __entry->a2, __entry->a3),
	gnt_on_kvm_hypercall, gnt_off_kvm_hypercall
);

TRACE_EVENT_FN(kvm_inj_virq,
	TP_PROTO(u32 which, bool by_instruction, bool again),
	TP_ARGS(which, by_instruction, again),
	TP_STRUCT__entry(
		__field(unsigned int, vector)
		__field(bool, soft)
		__field(bool, reinjected)
	),
	TP_fast_assign(
		__entry->vector = which;
		__entry->soft = by_instruction;
		__entry->reinjected = again;
	),
	TP_printk("%s 0x%x%s", __entry->soft ? "Soft/INTn" : "IRQ", __entry->vector,
		  __entry->reinjected ? " [reinjected]" : ""),
	gnt_on_kvm_inj_virq, gnt_off_kvm_inj_virq
);

TRACE_EVENT_FN(kvm_page_fault,
	TP_PROTO(u32 id, u64 pc, u64 address, u64 error),
	TP_ARGS(id, pc, address, error),
	TP_STRUCT__entry(
		__field(unsigned int, vcpu_id)
		__field(unsigned long, guest_rip)
		__field(u64, fault_address)
		__field(u64, error_code)
	),
	TP_fast_assign(
		__entry->vcpu_id = id;
		__entry->guest_rip = pc;
		__entry->fault_address = address;
		__entry->error_code = error;
	),
	TP_printk("vcpu %u rip 0x%lx address 0x%016llx error_code 0x%llx", __entry->vcpu_id,
		  __entry->guest_rip, __entry->fault_address, __entry->error_code),
	gnt_on_kvm_page_fault, gnt_off_kvm_page_fault
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE kvm_trace

#include <trace/define_trace.h>
