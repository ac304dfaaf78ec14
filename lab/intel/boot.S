/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The option ROM of the machine `intel`. It takes over INT 19h, by which the BIOS starts the operating system, and enters a kernel
 * that the emulator has put into memory already: by PVH, 32-bit protected mode with the start-of-day structure in EBX (Xen:
 * docs/misc/pvh.pandoc). Nothing is decompressed and no disk is read.
 *
 * The runner writes the page at INFO: the start-of-day structure with the command line and the initramfs, at +56 the kernel's entry,
 * at +60 whether the machine has been started before. Here it gets what only the BIOS knows: the memory map.
 */
	.set	INFO, 0xf00000		/* lab/runner/src/bochs.rs: INFO */
	.set	SEGMENT, 0xd000		/* lab/runner/src/bochs.rs: ROM */
	.set	MAP, 0x5000		/* entries of 24 bytes, as INT 15h E820 and PVH have them */

	.code16
	.globl	_start
_start:
	.byte	0x55, 0xaa, 2		/* an option ROM of 2 * 512 bytes; the runner mends the checksum */
	push	%ax
	push	%ds
	xor	%ax, %ax
	mov	%ax, %ds
	movw	$boot, 0x19 * 4
	mov	%cs, %ax
	mov	%ax, 0x19 * 4 + 2
	pop	%ds
	pop	%ax
	lret

boot:
	cli
	cld
	xor	%ax, %ax
	mov	%ax, %ds
	mov	%ax, %es
	mov	%ax, %ss
	mov	$0x7c00, %sp
	mov	$MAP, %di
	mov	$0x800, %cx
	rep stosw
	mov	$MAP, %di
	xor	%ebx, %ebx
1:	mov	$0xe820, %eax
	mov	$0x534d4150, %edx	/* "SMAP" */
	mov	$20, %ecx
	int	$0x15
	jc	2f
	add	$24, %di
	test	%ebx, %ebx
	jnz	1b
2:	cli
	in	$0x92, %al		/* A20 on, without touching the reset bit */
	or	$2, %al
	and	$0xfe, %al
	out	%al, $0x92
	lgdtl	%cs:table_register
	mov	%cr0, %eax
	or	$1, %al
	mov	%eax, %cr0
	ljmpl	$8, $SEGMENT * 16 + flat

	.code32
flat:
	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	$INFO, %ebx
	cmpl	$0, 60(%ebx)
	jne	again
	movl	$1, 60(%ebx)
	movzwl	%di, %eax
	sub	$MAP, %eax
	mov	$24, %ecx
	xor	%edx, %edx
	div	%ecx
	mov	%eax, 48(%ebx)		/* memmap_entries */
	jmp	*56(%ebx)

again:	/* The machine was reset: it has ended. Bochs's port for that wants a word. */
	mov	$0x8900, %edx
	mov	$SEGMENT * 16 + word, %esi
	mov	$8, %ecx
	rep outsb
	hlt

word:	.ascii	"Shutdown"
	.balign	8
table:	.quad	0, 0x00cf9a000000ffff, 0x00cf92000000ffff
table_register:
	.word	23
	.long	SEGMENT * 16 + table
	.org	1024
