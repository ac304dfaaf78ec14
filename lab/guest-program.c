// SPDX-License-Identifier: GPL-2.0-only
/* What the lab's Linux guest builds and runs: memory that is mapped, protected, shared and copied on write. */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 512

static sigjmp_buf after;
static volatile int faults;

static void fault(int signal)
{
	faults++;
	siglongjmp(after, signal);
}

static int check(const char *what, int holds)
{
	printf("program: %s %s\n", what, holds ? "ok" : "WRONG");
	return !holds;
}

static int by_number(const void *a, const void *b)
{
	unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;

	return x < y ? -1 : x > y;
}

/* A write to a page without permission faults, and passes once it is there. */
static int protection(char *memory)
{
	int i, passed = 0;

	for (i = 0; i < PAGES; i++) {
		mprotect(memory + i * PAGE, PAGE, PROT_READ);
		if (!sigsetjmp(after, 1))
			memory[i * PAGE] = 1;
		mprotect(memory + i * PAGE, PAGE, PROT_READ | PROT_WRITE);
		memory[i * PAGE] = i;
		passed += memory[i * PAGE] == (char)i;
	}
	return check("protection", faults == PAGES && passed == PAGES);
}

/* What a child writes to its copy its parent does not see; what it writes to shared memory it does. */
static int copies(char *memory)
{
	char *shared = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int i, round, status, good = 0;

	for (round = 0; round < 5; round++) {
		memset(memory, round, PAGES * PAGE);
		if (fork() == 0) {
			for (i = 0; i < PAGES; i++) {
				shared[i * PAGE] = memory[i * PAGE] + 1;
				memory[i * PAGE] = 99;
			}
			_exit(round);
		}
		wait(&status);
		for (i = 0; i < PAGES; i++)
			good += memory[i * PAGE] == round && shared[i * PAGE] == round + 1;
		good += WEXITSTATUS(status) == round;
	}
	return check("copies", good == 5 * (PAGES + 1));
}

int main(void)
{
	char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned *numbers = malloc(100000 * sizeof(*numbers)), seed = 1;
	int i, wrong = 0, order = 1;

	signal(SIGSEGV, fault);
	wrong += protection(memory);
	wrong += copies(memory);
	for (i = 0; i < 100000; i++)
		numbers[i] = seed = seed * 1664525 + 1013904223;
	qsort(numbers, 100000, sizeof(*numbers), by_number);
	for (i = 1; i < 100000; i++)
		order &= numbers[i - 1] <= numbers[i];
	wrong += check("order", order);
	munmap(memory, PAGES * PAGE);
	if (!sigsetjmp(after, 1))
		memory[0] = 1;
	wrong += check("unmapped", faults == PAGES + 1);
	return wrong;
}
