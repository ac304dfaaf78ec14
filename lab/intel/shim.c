// SPDX-License-Identifier: GPL-2.0-only
// Loaded before Bochs: what it takes to run Debian's program as it is, the same way each time. bootstrap.sh adds a function that
// aborts for each function of GTK, the libraries of the graphical debugger, which is never opened here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

// Bochs seeds what RDRAND gives from the time.
void srand(unsigned seed)
{
	(void)seed;
	srandom(1);
}

// Bochs maps the guest's memory in blocks, in the order of their first use, but loads a file into memory as if blocks lay side by
// side. Asked again after each small piece, it goes through its map.
ssize_t read(int file, void *to, size_t size)
{
	const size_t piece = 1 << 16;
	return syscall(SYS_read, file, to, size > piece ? piece : size);
}

// The display without a display serves VNC. Nobody outside this machine is to see it.
int bind(int socket, const struct sockaddr *address, socklen_t size)
{
	struct sockaddr_in own;
	if (address->sa_family != AF_INET || size < sizeof own)
		return syscall(SYS_bind, socket, address, size);
	own = *(const struct sockaddr_in *)address;
	own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return syscall(SYS_bind, socket, &own, sizeof own);
}

// A virtual interrupt waits until the guest can take it. Bochs looks at that when nothing else happens, but when an interrupt of the
// host's comes it delivers the virtual one whatever RFLAGS.IF says. And if an exit interrupts the delivery, it reports another event,
// any that was delivered before. Both are mended here, only in the program that is known: where InterruptAcknowledge chooses, it asks
// for RFLAGS.IF as well (both are bit 9, of the events that wait, 0x93b0, and of RFLAGS, 0xf8), and it notes RVI (0x90d9) as the event
// that is being delivered (0x9178).
void *bochs_delivers, *bochs_leaves;

__attribute__((naked, used)) static void choose(void)
{
	asm("mov 0x93b0(%rbx), %eax\n\t"
	    "and 0xf8(%rbx), %eax\n\t"
	    "mov %rbx, %rdi\n\t"
	    "test $2, %ah\n\t"
	    "jz 1f\n\t"
	    "movzbl 0x90d9(%rbx), %eax\n\t"
	    "mov %eax, 0x9178(%rbx)\n\t"
	    "mov bochs_delivers@GOTPCREL(%rip), %rax\n\t"
	    "jmp *(%rax)\n"
	    "1:\tmov bochs_leaves@GOTPCREL(%rip), %rax\n\t"
	    "jmp *(%rax)");
}

// #VMEXIT clears what is pending of debug traps and of shadows, as a VM exit does. Bochs's does not: a step that a guest with RFLAGS.TF was
// still to take is the host's, whose TR is the guest's then, and the machine is gone. Two stores near the end of Svm_Vmexit make room.
__attribute__((naked, used)) static void leave(void)
{
	asm("movb $0, 0x93aa(%rbx)\n\t"
	    "movl $0, 0x93d8(%rbx)\n\t"
	    "movl $0, 0x298(%rbx)\n\t"
	    "movl $0, 0x140(%rbx)\n\t"
	    "ret");
}

static void overwrite(unsigned char *at, const unsigned char *with, size_t size)
{
	void *page = (void *)((unsigned long)at & -4096ul);

	if (mprotect(page, 2 * 4096, PROT_READ | PROT_WRITE | PROT_EXEC))
		return;
	memcpy(at, with, size);
	mprotect(page, 2 * 4096, PROT_READ | PROT_EXEC);
}

// VMRUN says what is masked by the guest's RFLAGS.IF before it notes that a guest runs, so that a virtual interrupt (V_IRQ) stays masked
// that a guest with IF set is entered with, and the host's interrupts where the guest has IF clear. It is said again when that is noted;
// the host's (0xc00) begin as not masked. And it leaves CR2 as it was, the host's, though it reads the guest's in the control block.
void *bochs_masks;

__attribute__((naked, used)) static void enter(void)
{
	asm("movl $1, 0x93b8(%rbx)\n\t"
	    "movw $0x101, 0x9260(%rbx)\n\t"
	    "andl $0xfffff3ff, 0x93b4(%rbx)\n\t"
	    "mov 0x9270(%rbx), %rax\n\t"
	    "test %rax, %rax\n\t"
	    "jz 1f\n\t"
	    "mov 0x640(%rax), %rax\n\t"
	    "mov %rax, 0x2a0(%rbx)\n"
	    "1:\t"
	    "mov %rbx, %rdi\n\t"
	    "mov bochs_masks@GOTPCREL(%rip), %rax\n\t"
	    "jmp *(%rax)");
}

// An exit in the middle of a virtual interrupt's delivery reports another event as interrupted, as with APICv below: the vector (EBP) is
// noted as that event.
__attribute__((naked, used)) static void deliver(void)
{
	asm("andl $0xfffffeff, 0x93b0(%rbx)\n\t"
	    "mov %ebp, 0x9374(%rbx)\n\t"
	    "movl $0, 0x9378(%rbx)\n\t"
	    "mov 0xd8(%rbx), %rcx\n\t"
	    "ret");
}

// A guest's triple fault is an exit, where shutdowns are intercepted. Bochs asks for VMX's guests alone, and gives up.
void *bochs_shuts_down, *bochs_tells_vmx, *bochs_stops;

__attribute__((naked, used)) static void triple(void)
{
	asm("mov %rbx, %rdi\n\t"
	    "cmpb $0, 0x9260(%rbx)\n\t"
	    "je 1f\n\t"
	    "mov bochs_shuts_down@GOTPCREL(%rip), %rax\n\t"
	    "jmp *(%rax)\n"
	    "1:\tsub $8, %rsp\n\t"
	    "mov bochs_tells_vmx@GOTPCREL(%rip), %rax\n\t"
	    "call *(%rax)\n\t"
	    "add $8, %rsp\n\t"
	    "mov bochs_stops@GOTPCREL(%rip), %rax\n\t"
	    "jmp *(%rax)");
}

// A piece of a function of the emulator's, and what is called in its place.
struct piece {
	const char *name;
	unsigned at, size;
	unsigned char known[20];
	void (*instead)(void);
};

__attribute__((constructor)) static void mend_svm(void)
{
	static const struct piece pieces[] = {
		// movb $0, 0x93aa(%rbx); movl $0, 0x93d8(%rbx)
		{ "_ZN8BX_CPU_C10Svm_VmexitEimm", 0x15e, 17,
		  { 0xc6, 0x83, 0xaa, 0x93, 0, 0, 0, 0xc7, 0x83, 0xd8, 0x93 }, leave },
		// mov %rbx, %rdi; movl $1, 0x93b8(%rbx); mov %ax, 0x9260(%rbx): a guest runs, and GIF
		{ "_ZN8BX_CPU_C5VMRUNEP15bxInstruction_c", 0xd7, 20,
		  { 0x48, 0x89, 0xdf, 0xc7, 0x83, 0xb8, 0x93, 0, 0, 1, 0, 0, 0, 0x66, 0x89, 0x83, 0x60, 0x92 }, enter },
		// andl $0xfffffeff, 0x93b0(%rbx); mov 0xd8(%rbx), %rcx
		{ "_ZN8BX_CPU_C27VirtualInterruptAcknowledgeEv", 0x19, 17,
		  { 0x81, 0xa3, 0xb0, 0x93, 0, 0, 0xff, 0xfe, 0xff, 0xff, 0x48, 0x8b, 0x8b, 0xd8 }, deliver },
		// mov %rbx, %rdi; call VMexit_TripleFault; call bx_debug_break
		{ "_ZN8BX_CPU_C9exceptionEjt", 0x227, 13,
		  { 0x48, 0x89, 0xdf, 0xe8, 0x91, 0x3d, 0xfe, 0xff, 0xe8, 0xbc, 0xb7, 0xf8, 0xff }, triple },
	};
	enum { COUNT = sizeof pieces / sizeof pieces[0] };
	unsigned char *functions[COUNT];

	bochs_masks = dlsym(RTLD_DEFAULT, "_ZN8BX_CPU_C25handleInterruptMaskChangeEv");
	bochs_shuts_down = dlsym(RTLD_DEFAULT, "_ZN8BX_CPU_C8shutdownEv");
	bochs_tells_vmx = dlsym(RTLD_DEFAULT, "_ZN8BX_CPU_C18VMexit_TripleFaultEv");
	bochs_stops = dlsym(RTLD_DEFAULT, "_Z14bx_debug_breakv");
	for (int i = 0; i < COUNT; i++) {
		functions[i] = dlsym(RTLD_DEFAULT, pieces[i].name);
		if (!bochs_masks || !bochs_shuts_down || !bochs_tells_vmx || !bochs_stops || !functions[i])
			return;
		if (memcmp(functions[i] + pieces[i].at, pieces[i].known, pieces[i].size)) {
			fprintf(stderr, "this Bochs is not the one whose SVM can be mended\n");
			return;
		}
	}
	for (int i = 0; i < COUNT; i++) {
		// mov $instead, %rax; call *%rax; NOPs. RBX is the CPU; What the first calls keeps the flags; behind the second RDI is the CPU again.
		unsigned char call[20] = { 0x48, 0xb8, [10] = 0xff, 0xd0, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90 };

		memcpy(call + 2, &pieces[i].instead, sizeof pieces[i].instead);
		if (pieces[i].instead == enter)
			memcpy(call + 12, pieces[i].known, 3);
		overwrite(functions[i] + pieces[i].at, call, pieces[i].size);
	}
}

__attribute__((constructor)) static void mend(void)
{
	// mov 0x93b0(%rbx), %eax; je; mov %rbx, %rdi; test $2, %ah; jne; call VMexit_ExtInterrupt
	static const unsigned char known[] = { 0x8b, 0x83, 0xb0, 0x93, 0x00, 0x00, 0x74, 0x17, 0x48, 0x89, 0xdf,
					       0xf6, 0xc4, 0x02, 0x0f, 0x85, 0xd0, 0x00, 0x00, 0x00, 0xe8 };
	enum { CHOICE = 0x2c, LEAVES = 0x38, DELIVERS = 0x108 };
	unsigned char *function = dlsym(RTLD_DEFAULT, "_ZN8BX_CPU_C20InterruptAcknowledgeEv");
	unsigned char jump[12] = { 0x48, 0xb8, [10] = 0xff, 0xe0 }; // mov $choose, %rax; jmp *%rax
	void *to = choose;

	if (!function)
		return;
	if (memcmp(function + 0x24, known, sizeof known)) {
		fprintf(stderr, "this Bochs is not the one whose virtual interrupts can be mended\n");
		return;
	}
	bochs_delivers = function + DELIVERS;
	bochs_leaves = function + LEAVES;
	memcpy(jump + 2, &to, sizeof to);
	overwrite(function + CHOICE, jump, sizeof jump);
}
