/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The world switch of VMX.
 *
 *   u64 gnt_vmx_enter(u64 *gprs, struct vmx_switch *s)
 *
 * Called with interrupts off and a VMCS current whose host state is this CPU's. `gprs` are sixteen
 * words in the order of the instruction encoding; RSP is not touched, for it travels in the VMCS.
 * `s` is cpu::VmxSwitch. Returns 0 after an exit, 1 when the entry failed without one.
 *
 * A VM exit loads the host's segment registers and bases, so per-CPU data is there at once. NMIs are
 * blocked after an exit by an NMI, until the handler's IRET.
 *
 * What stands between the guest and the host, in the order in which it must:
 *   before   SPEC_CTRL takes the guest's value, where the two differ; VERW empties the CPU's buffers.
 *   after    the guest's registers are stored and cleared, so that no speculation in the host starts
 *            from a value of the guest's; the return stack is refilled before the first RET;
 *            SPEC_CTRL takes the host's value: always with IBRS in the kernel, where the write is
 *            the barrier itself, else where the two differ, with a fence for the branch that tells;
 *            the branch history is cleared.
 *
 * Each is an alternative that the kernel patches by what it decided for this CPU. SDM vol. 3C
 * chapters 27 and 28 say what entry and exit themselves load.
 */
#include <linux/linkage.h>
#include <linux/objtool.h>
#include <linux/version.h>

#include <asm/alternative.h>
#include <asm/asm.h>
#include <asm/cpufeatures.h>
#include <asm/msr-index.h>
#include <asm/nospec-branch.h>
#include <asm/unwind_hints.h>

#include "glue/history.h"

#ifdef X86_FEATURE_CLEAR_CPU_BUF_VM_MMIO
#define GNT_CLEAR_BUFFERS	ALTERNATIVE "", __CLEAR_CPU_BUFFERS, GNT_VERW_FOR_VMX
#else
#define GNT_CLEAR_BUFFERS	CLEAR_CPU_BUFFERS
#endif

#define AT_RAX	(0 * 8)
#define AT_RCX	(1 * 8)
#define AT_RDX	(2 * 8)
#define AT_RBX	(3 * 8)
#define AT_RBP	(5 * 8)
#define AT_RSI	(6 * 8)
#define AT_RDI	(7 * 8)
#define AT_R8	(8 * 8)
#define AT_R9	(9 * 8)
#define AT_R10	(10 * 8)
#define AT_R11	(11 * 8)
#define AT_R12	(12 * 8)
#define AT_R13	(13 * 8)
#define AT_R14	(14 * 8)
#define AT_R15	(15 * 8)

/* cpu::VmxSwitch */
#define S_HOST_RSP		0
#define S_GUEST_SPEC_CTRL	8
#define S_HOST_SPEC_CTRL	16
#define S_FLAGS			24
#define FLAG_LAUNCHED		0	/* bit number */
#define FLAG_READ_SPEC_CTRL	2	/* mask */

#define VMCS_HOST_RSP		0x6c14

.section .noinstr.text, "ax"

SYM_FUNC_START(gnt_vmx_enter)
	push %rbp
	push %r15
	push %r14
	push %r13
	push %r12
	push %rbx
	push %rsi			/* switch */
	push %rdi			/* gprs */

	/* The stack lies where it lay at the last entry, unless another thread runs the vCPU. */
	cmp %rsp, S_HOST_RSP(%rsi)
	jne .Lstack_moved
.Lstack_is_known:

	/* No barrier is needed for the branch: entries wait for all that is older. */
	mov S_GUEST_SPEC_CTRL(%rsi), %rdx
	cmp S_HOST_SPEC_CTRL(%rsi), %rdx
	je .Lspec_ctrl_is_the_guests
	mov %edx, %eax
	shr $32, %rdx
	mov $MSR_IA32_SPEC_CTRL, %ecx
	wrmsr
.Lspec_ctrl_is_the_guests:

	/* CF, which neither the loads nor VERW change. */
	btl $FLAG_LAUNCHED, S_FLAGS(%rsi)

	mov AT_RAX(%rdi), %rax
	mov AT_RCX(%rdi), %rcx
	mov AT_RDX(%rdi), %rdx
	mov AT_RBX(%rdi), %rbx
	mov AT_RBP(%rdi), %rbp
	mov AT_RSI(%rdi), %rsi
	mov AT_R8(%rdi), %r8
	mov AT_R9(%rdi), %r9
	mov AT_R10(%rdi), %r10
	mov AT_R11(%rdi), %r11
	mov AT_R12(%rdi), %r12
	mov AT_R13(%rdi), %r13
	mov AT_R14(%rdi), %r14
	mov AT_R15(%rdi), %r15
	mov AT_RDI(%rdi), %rdi

	/* Changes ZF only. Everything loaded after this could leak again, so it is the last thing. */
	GNT_CLEAR_BUFFERS

	UNWIND_HINT_SAVE
	jnc .Lvmlaunch

.Lvmresume:
	vmresume
	jmp .Lfailed

.Lvmlaunch:
	vmlaunch
	jmp .Lfailed

	_ASM_EXTABLE(.Lvmresume, .Lfault)
	_ASM_EXTABLE(.Lvmlaunch, .Lfault)

.Lstack_moved:
	mov %rsp, S_HOST_RSP(%rsi)
	mov $VMCS_HOST_RSP, %eax
	vmwrite %rsp, %rax
	jmp .Lstack_is_known

	/* The guest has exited: RSP is the host's, all other registers hold what the guest left. */
SYM_INNER_LABEL(gnt_vmx_exit, SYM_L_GLOBAL)
	/* A VM exit is no indirect branch. */
	ANNOTATE_NOENDBR
	UNWIND_HINT_RESTORE
	push %rax
	mov 8(%rsp), %rax
	mov %rcx, AT_RCX(%rax)
	mov %rdx, AT_RDX(%rax)
	mov %rbx, AT_RBX(%rax)
	mov %rbp, AT_RBP(%rax)
	mov %rsi, AT_RSI(%rax)
	mov %rdi, AT_RDI(%rax)
	mov %r8, AT_R8(%rax)
	mov %r9, AT_R9(%rax)
	mov %r10, AT_R10(%rax)
	mov %r11, AT_R11(%rax)
	mov %r12, AT_R12(%rax)
	mov %r13, AT_R13(%rax)
	mov %r14, AT_R14(%rax)
	mov %r15, AT_R15(%rax)
	pop AT_RAX(%rax)
	xor %ebx, %ebx

.Lclear:
	xor %eax, %eax
	xor %ecx, %ecx
	xor %edx, %edx
	xor %ebp, %ebp
	xor %esi, %esi
	xor %edi, %edi
	xor %r8d, %r8d
	xor %r9d, %r9d
	xor %r10d, %r10d
	xor %r11d, %r11d
	xor %r12d, %r12d
	xor %r13d, %r13d
	xor %r14d, %r14d
	xor %r15d, %r15d

	FILL_RETURN_BUFFER %rcx, RSB_CLEAR_LOOPS, X86_FEATURE_RSB_VMEXIT, X86_FEATURE_RSB_VMEXIT_LITE

	pop %rdi			/* gprs */
	pop %rsi			/* switch */

	testl $FLAG_READ_SPEC_CTRL, S_FLAGS(%rsi)
	jnz .Lread_spec_ctrl
.Lspec_ctrl_is_known:
	mov S_HOST_SPEC_CTRL(%rsi), %rdx
	ALTERNATIVE "jmp .Lcompare", "", X86_FEATURE_KERNEL_IBRS
	jmp .Lwrite
.Lcompare:
	cmp S_GUEST_SPEC_CTRL(%rsi), %rdx
	je .Lspec_ctrl_is_the_hosts
.Lwrite:
	mov %edx, %eax
	shr $32, %rdx
	mov $MSR_IA32_SPEC_CTRL, %ecx
	wrmsr
.Lspec_ctrl_is_the_hosts:
	ALTERNATIVE "", "lfence", X86_FEATURE_LFENCE_RDTSC

#ifdef GNT_CLEAR_HISTORY
	ALTERNATIVE "", "call clear_bhb_loop", GNT_CLEAR_HISTORY
#endif

	mov %ebx, %eax
	pop %rbx
	pop %r12
	pop %r13
	pop %r14
	pop %r15
	pop %rbp
	RET

.Lread_spec_ctrl:
	mov $MSR_IA32_SPEC_CTRL, %ecx
	rdmsr
	shl $32, %rdx
	or %rdx, %rax
	mov %rax, S_GUEST_SPEC_CTRL(%rsi)
	jmp .Lspec_ctrl_is_known

	/* The instruction faults when VMX is off: only on the way to a reboot may that be so. */
.Lfault:
	cmpb $0, gnt_rebooting(%rip)
	jne .Lfailed
	ud2
	/* The guest was not entered; its registers are what they were. */
.Lfailed:
	mov $1, %ebx
	jmp .Lclear
SYM_FUNC_END(gnt_vmx_enter)
