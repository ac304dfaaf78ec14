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

__attribute__((constructor)) static void mend_svm(void)
{
	// movb $0, 0x93aa(%rbx); movl $0, 0x93d8(%rbx)
	static const unsigned char known[] = { 0xc6, 0x83, 0xaa, 0x93, 0, 0, 0, 0xc7, 0x83, 0xd8, 0x93, 0, 0, 0, 0, 0, 0 };
	// mov $leave, %rax; call *%rax; and a NOP of five bytes. The flags are still wanted.
	unsigned char call[sizeof known] = { 0x48, 0xb8, [10] = 0xff, 0xd0, 0x0f, 0x1f, 0x44, 0, 0 };
	unsigned char *function = dlsym(RTLD_DEFAULT, "_ZN8BX_CPU_C10Svm_VmexitEimm");
	void *to = leave;

	if (!function)
		return;
	if (memcmp(function + 0x15e, known, sizeof known)) {
		fprintf(stderr, "this Bochs is not the one whose debug traps can be mended\n");
		return;
	}
	memcpy(call + 2, &to, sizeof to);
	overwrite(function + 0x15e, call, sizeof call);
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
