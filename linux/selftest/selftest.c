// SPDX-License-Identifier: GPL-2.0-only
/*
 * Exercises the kernel's services through the module's test file (feature `selftest`). Each check
 * prints its name and "ok"; a failure prints the line of selftest.rs. Ends with the number failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 4096

static int kvm, bench, failed;

#define ask(command, argument) ioctl(bench, 0xaf00 + (command), argument)

static void report(const char *name, long got, long wanted)
{
	if (got == wanted) {
		printf("%-40s ok\n", name);
		return;
	}
	failed++;
	printf("%-40s FAILED: %ld, not %ld (%s)\n", name, got, wanted, got < 0 ? strerror(errno) : "");
}

static void *hammer(void *unused)
{
	return (void *)(long)ask(3, (unsigned long)ROUNDS);
}

static void nothing(int signal)
{
}

static void *interrupt(void *main_thread)
{
	usleep(50000);
	pthread_kill(*(pthread_t *)main_thread, SIGUSR1);
	return NULL;
}

static void threads(void)
{
	pthread_t t[THREADS];
	long worst = 0;
	void *r;
	int i;

	for (i = 0; i < THREADS; i++)
		pthread_create(&t[i], NULL, hammer, NULL);
	for (i = 0; i < THREADS; i++) {
		pthread_join(t[i], &r);
		if (r)
			worst = (long)r;
	}
	report("locks hold under threads", worst, 0);
	report("nothing was lost", ask(4, (unsigned long)THREADS * ROUNDS), 0);
}

static void memory(void)
{
	const size_t huge = 2 << 20;
	char *area = mmap(NULL, 4 * huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *base = (char *)(((uintptr_t)area + huge - 1) & ~(huge - 1));
	long before, after;

	madvise(base, huge, MADV_NOHUGEPAGE);
	madvise(base + huge, huge, MADV_HUGEPAGE);
	memset(base + huge, 1, huge);
	base[0] = 1;
	base[2 * 4096] = 1;
	mprotect(base + 2 * 4096, 4096, PROT_READ);
	munmap(base + 3 * 4096, 4096);
	report("user memory", ask(7, base), 0);
	report("frames", ask(8, base), 0);

	before = ask(9, 0);
	madvise(base + huge, huge, MADV_DONTNEED);
	after = ask(9, 0);
	report("an invalidation is heard", before >= 0 && after - before >= 2048, 1);
	munmap(area, 4 * huge);
}

static void events(void)
{
	int fd = eventfd(0, EFD_CLOEXEC);
	uint64_t one = 1, value = 0;

	report("a watch is attached", ask(10, fd), 0);
	write(fd, &one, 8);
	write(fd, &one, 8);
	report("each write is heard", ask(11, 0), 2);
	report("a signal from inside is heard", ask(11, 1) > 2, 1);
	close(fd);
	report("a closed eventfd hangs up", ask(11, 2) >= 1000, 1);

	fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	write(fd, &one, 8);
	report("a count that is set", ask(10, fd), 0);
	report("is heard at once", ask(11, 2), 1);
	write(fd, &one, 8);
	read(fd, &value, 8);
	report("nobody consumes after the end", value >= 1, 1);
	close(fd);
}

static void page(void)
{
	volatile uint64_t *p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, bench, 0);
	int status;

	if (p == MAP_FAILED) {
		report("the page can be mapped", -1, 0);
		return;
	}
	p[0] = 42;
	report("the page is shared", ask(16, 42UL), 0);
	report("both ways", p[1], 43);
	if (!fork()) {
		signal(SIGBUS, SIG_DFL);
		p[512] = 1;
		_exit(0);
	}
	wait(&status);
	report("beyond it is SIGBUS", WIFSIGNALED(status) ? WTERMSIG(status) : 0, SIGBUS);
	report("another address space is not ours", ({
		       pid_t child = fork();
		       if (!child)
			       _exit(ask(9, 0) == -1 && errno == EPERM ? 0 : 1);
		       waitpid(child, &status, 0);
		       WEXITSTATUS(status);
	       }), 0);
	close(bench);
	report("the page outlives the descriptor", p[1], 43);
	munmap((void *)p, 8192);
}

int main(void)
{
	struct sigaction action = { .sa_handler = nothing };
	pthread_t self = pthread_self(), other;

	kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	bench = ioctl(kvm, 0xaef0, 0);
	if (bench < 0) {
		perror("no test file: is the module built with the feature selftest?");
		return 1;
	}
	report("pages", ask(1, 0), 0);
	report("heap", ask(2, 0), 0);
	threads();
	report("timers", ask(5, 0), 0);
	report("waiter", ask(6, 0), 0);
	memory();
	events();
	report("clocks", ask(12, 0), 0);
	report("floating point", ask(13, 0), 0);
	report("cpus", ask(14, 0), 0);
	report("signals", ask(15, 0), 0);
	sigaction(SIGUSR1, &action, NULL);
	pthread_create(&other, NULL, interrupt, &self);
	report("a signal ends a sleep", ask(17, 0), 0);
	pthread_join(other, NULL);
	report("the world switch", ask(18, 1UL), 0);
	report("the world switch, again and again", ask(18, 100000UL), 0);
	report("an unknown command", ask(99, 0) == -1 && errno == ENOTTY, 1);
	page();
	printf("%d failed\n", failed);
	return failed != 0;
}
