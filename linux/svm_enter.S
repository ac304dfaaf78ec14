/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The world switch of SVM.
 *
 *   void gnt_svm_vmrun(u64 vmcb, u64 *gprs, u64 guest_spec_ctrl, u64 host_spec_ctrl)
 *
 * Called with GIF clear and IF set: nothing interrupts the host here, and a physical interrupt that
 * arrives while the guest runs ends it (V_INTR_MASKING lets the host's IF decide). `vmcb` is the
 * control block's physical address. `gprs` are sixteen words in the order of the instruction
 * encoding; RAX and RSP are not touched, for they travel in the control block.
 *
 * FS, GS, TR and LDTR may be the guest's before and after: nothing here may use per-CPU data. Macros
 * of the kernel's do, for its count of calls: what fills the return stack, what untrains returns, and
 * the IBPB that the kernel has as a function. So that count is left out of the first two, and the
 * IBPB is written out here. A check of the built object looks for accesses by GS, and for calls of
 * anything that is not known to have none.
 *
 * What stands between the guest and the host, in the order in which it must:
 *   before   SPEC_CTRL takes the guest's value, where the two differ; the divider is used once on
 *            CPUs that leak its last result (DIV0); VERW empties the CPU's buffers.
 *   after    the guest's registers are stored; the return stack is refilled before the first RET;
 *            SPEC_CTRL takes the host's value; return predictions are untrained, with an IBPB where
 *            the kernel chose that; every register is cleared, so that no speculation in the host
 *            starts from a value of the guest's.
 *
 * Each is an alternative that the kernel patches by what it decided for this CPU, so it is nothing
 * on a CPU that needs nothing. APM vol. 2 §15.5.1 says what VMRUN itself saves and restores.
 */
#include <linux/linkage.h>
#include <linux/version.h>

#include <asm/alternative.h>
#include <asm/asm.h>
#include <asm/cpufeatures.h>
#include <asm/msr-index.h>
#include <asm/nospec-branch.h>

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

/*
 * The kernel's count of calls is per-CPU data. It is for CPUs with CALL_DEPTH, where the module
 * refuses SVM; but what fills the return stack sets it on all CPUs. These are expanded where they are
 * used; the assembler's macros of that header have them already, and FILL_RETURN_BUFFER is one.
 */
#undef CREDIT_CALL_DEPTH
#define CREDIT_CALL_DEPTH
#undef CALL_THUNKS_DEBUG_INC_CTXSW
#define CALL_THUNKS_DEBUG_INC_CTXSW

/* What each kernel's own SVM code uses. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define GNT_REFILL_FOR	X86_FEATURE_RSB_VMEXIT
#else
#define GNT_REFILL_FOR	X86_FEATURE_RETPOLINE
#endif
/* Where UNTRAIN_RET_VM is not, the kernel's own has UNTRAIN_RET, with an IBPB for either. */
#ifdef UNTRAIN_RET_VM
#define GNT_IBPB_FOR	X86_FEATURE_IBPB_ON_VMEXIT
#else
#define GNT_IBPB_FOR	X86_FEATURE_ENTRY_IBPB
#ifdef X86_FEATURE_IBPB_ON_VMEXIT
#define GNT_IBPB_FOR_2	X86_FEATURE_IBPB_ON_VMEXIT
#endif
#endif
#ifndef GNT_IBPB_FOR_2
#define GNT_IBPB_FOR_2	GNT_IBPB_FOR
#endif
#ifdef VM_CLEAR_CPU_BUFFERS
#define GNT_CLEAR_BUFFERS	VM_CLEAR_CPU_BUFFERS
#elif defined(X86_FEATURE_CLEAR_CPU_BUF_VM)
#define GNT_CLEAR_BUFFERS	ALTERNATIVE "", __CLEAR_CPU_BUFFERS, X86_FEATURE_CLEAR_CPU_BUF_VM
#else
#define GNT_CLEAR_BUFFERS	CLEAR_CPU_BUFFERS
#endif

/* FILL_RETURN_BUFFER without per-CPU data. Uses RAX. */
.macro REFILL_RETURN_STACK feature:req
	ALTERNATIVE "jmp .Lrefilled_\@", \
		__stringify(__FILL_RETURN_BUFFER(%rax, RSB_CLEAR_LOOPS)), \feature
.Lrefilled_\@:
.endm

.section .noinstr.text, "ax"

SYM_FUNC_START(gnt_svm_vmrun)
	push %rbp
	push %r15
	push %r14
	push %r13
	push %r12
	push %rbx
	push %rsi			/* gprs */
	push %rcx			/* host's SPEC_CTRL */
	push %rdx			/* guest's SPEC_CTRL */

	/* No barrier is needed for the branch: VMRUN lets nothing younger start early. */
	cmp %rcx, %rdx
	je .Lspec_ctrl_is_the_guests
	mov %edx, %eax
	shr $32, %rdx
	mov $MSR_IA32_SPEC_CTRL, %ecx
	wrmsr
.Lspec_ctrl_is_the_guests:

	ALTERNATIVE "jmp .Ldivider_is_clear", "", X86_BUG_DIV0
	xor %eax, %eax
	xor %edx, %edx
	mov $1, %ecx
	div %ecx
.Ldivider_is_clear:

	mov %rdi, %rax
	mov AT_RCX(%rsi), %rcx
	mov AT_RDX(%rsi), %rdx
	mov AT_RBX(%rsi), %rbx
	mov AT_RBP(%rsi), %rbp
	mov AT_RDI(%rsi), %rdi
	mov AT_R8(%rsi), %r8
	mov AT_R9(%rsi), %r9
	mov AT_R10(%rsi), %r10
	mov AT_R11(%rsi), %r11
	mov AT_R12(%rsi), %r12
	mov AT_R13(%rsi), %r13
	mov AT_R14(%rsi), %r14
	mov AT_R15(%rsi), %r15
	mov AT_RSI(%rsi), %rsi

	/* Changes ZF only. Everything loaded after this could leak again, so it is the last thing. */
	GNT_CLEAR_BUFFERS

.Lvmrun:
	vmrun %rax

.Lexit:
	/* RSP and RAX are the host's again; all other registers hold what the guest left there. */
	mov 16(%rsp), %rax
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

	REFILL_RETURN_STACK GNT_REFILL_FOR

	pop %rdx
	pop %rax
	/* The host's value before the first RET. */
	cmp %rax, %rdx
	je .Lspec_ctrl_is_the_hosts
	mov %rax, %rdx
	shr $32, %rdx
	mov $MSR_IA32_SPEC_CTRL, %ecx
	wrmsr
.Lspec_ctrl_is_the_hosts:

	CALL_UNTRAIN_RET
	ALTERNATIVE_2 "", "jmp .Libpb", GNT_IBPB_FOR, "jmp .Libpb", GNT_IBPB_FOR_2
.Lpredictions_are_the_hosts:

	xor %eax, %eax
	xor %ecx, %ecx
	xor %edx, %edx
	xor %ebx, %ebx
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

	pop %rbx			/* gprs */
	pop %rbx
	pop %r12
	pop %r13
	pop %r14
	pop %r15
	pop %rbp
	RET

	/* As entry_ibpb() and write_ibpb() have it, but that they may write the weaker SBPB. */
.Libpb:
	mov $MSR_IA32_PRED_CMD, %ecx
	mov $PRED_CMD_IBPB, %eax
	xor %edx, %edx
	wrmsr
#ifdef X86_BUG_IBPB_NO_RET
	/* On these CPUs it leaves the return stack as it is. */
	REFILL_RETURN_STACK X86_BUG_IBPB_NO_RET
#endif
	jmp .Lpredictions_are_the_hosts

	/* VMRUN faults when SVM is off: only on the way to a reboot may that be so. */
.Lfault:
	cmpb $0, gnt_rebooting(%rip)
	jne .Lexit
	ud2
	_ASM_EXTABLE(.Lvmrun, .Lfault)
SYM_FUNC_END(gnt_svm_vmrun)

/*
 * void gnt_refill_return_stack(void)
 *
 * For an IBPB between two vCPUs: as the kernel's write_ibpb() since 6.15, which modules of other
 * names may not call.
 */
SYM_FUNC_START(gnt_refill_return_stack)
#ifdef X86_BUG_IBPB_NO_RET
	REFILL_RETURN_STACK X86_BUG_IBPB_NO_RET
#endif
	RET
SYM_FUNC_END(gnt_refill_return_stack)
