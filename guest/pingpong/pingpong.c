// SPDX-License-Identifier: GPL-2.0-only
/*
 * Request and response between two tasks over a socket, each waiting with a timeout that almost never
 * expires: what a guest's timer sees of most services. The timeout is shorter than a tick of the
 * guest's kernel (4 ms), or the tick would always come first and the timer not be touched. Then how
 * late timers are: a task sleeps until given times and looks at the clock.
 *
 *   pingpong ROUNDS SLEEPS [TIMEOUT_US]
 *
 * Prints figures, latencies in nanoseconds at so many thousandths. The lines GANNET-PINGPONG-BEGIN and
 * -END stand around the rounds alone, for who counts VM exits between them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "pingpong: %s: %s\n", what, strerror(errno));
	exit(1);
}

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* With more than one CPU the two tasks have one each. */
static void stay_on(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void send_byte(int fd)
{
	if (write(fd, "x", 1) != 1)
		die("write");
}

/* Returns how often the wait ended by its timeout. */
static long await_byte(int fd, const struct timespec *timeout)
{
	struct pollfd wait = { .fd = fd, .events = POLLIN };
	long timeouts = 0;
	char byte;
	int ready;

	while ((ready = ppoll(&wait, 1, timeout, NULL)) == 0)
		timeouts++;
	if (ready < 0)
		die("ppoll");
	if (read(fd, &byte, 1) != 1)
		die("read");
	return timeouts;
}

static void ping_pong(long rounds, const struct timespec *timeout)
{
	const long warm_up = rounds / 20 + 10;
	long long start = 0, took;
	long n, timeouts = 0;
	int pair[2], status;
	pid_t other;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		die("socketpair");
	other = fork();
	if (other < 0)
		die("fork");
	if (!other) {
		stay_on(1);
		for (n = 0; n < rounds + warm_up; n++) {
			await_byte(pair[1], timeout);
			send_byte(pair[1]);
		}
		exit(0);
	}
	stay_on(0);
	for (n = 0; n < rounds + warm_up; n++) {
		if (n == warm_up) {
			puts("GANNET-PINGPONG-BEGIN");
			timeouts = 0;
			start = now_ns();
		}
		send_byte(pair[0]);
		timeouts += await_byte(pair[0], timeout);
	}
	took = now_ns() - start;
	if (rounds)
		puts("GANNET-PINGPONG-END");
	if (waitpid(other, &status, 0) != other || status)
		die("the other task");
	close(pair[0]);
	close(pair[1]);
	printf("GANNET-FIGURE round_trips_per_second %lld\n",
	       took ? rounds * 1000000000LL / took : 0);
	printf("GANNET-FIGURE timeouts %ld\n", timeouts);
}

static int by_value(const void *a, const void *b)
{
	const long long *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

/*
 * Prints a percentile, in thousandths, and how low it may be of what these sleeps are a sample of: two
 * standard deviations of a binomial distribution further down, which is so in 97 of 100 samples.
 */
static void percentile(const long long *late, long count, long thousandths)
{
	const long rank = count * thousandths / 1000;
	const long variance = count * thousandths / 1000 * (1000 - thousandths) / 1000;
	long deviation = 0;

	while ((deviation + 1) * (deviation + 1) <= 4 * variance)
		deviation++;
	printf("GANNET-FIGURE latency_%ld %lld\n", thousandths, late[rank]);
	printf("GANNET-FIGURE latency_%ld_low %lld\n", thousandths, late[rank > deviation ? rank - deviation : 0]);
}

static void sleep_late(long sleeps)
{
	long long *late = calloc(sleeps, sizeof(*late)), wake;
	unsigned int random = 1;
	struct timespec at;
	long n;

	if (!late)
		die("memory");
	for (n = 0; n < sleeps; n++) {
		/* 200 to 1224 microseconds from now. */
		random = random * 1103515245 + 12345;
		wake = now_ns() + 200000 + (random >> 12 & 0xfffff);
		at.tv_sec = wake / 1000000000;
		at.tv_nsec = wake % 1000000000;
		if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
			die("clock_nanosleep");
		late[n] = now_ns() - wake;
	}
	qsort(late, sleeps, sizeof(*late), by_value);
	printf("GANNET-FIGURE sleeps_early %d\n", late[0] < 0);
	percentile(late, sleeps, 500);
	percentile(late, sleeps, 990);
	percentile(late, sleeps, 999);
	printf("GANNET-FIGURE latency_max %lld\n", late[sleeps - 1]);
	free(late);
}

int main(int count, char **words)
{
	const long rounds = count > 1 ? atol(words[1]) : 8000;
	const long sleeps = count > 2 ? atol(words[2]) : 10000;
	const long timeout_us = count > 3 ? atol(words[3]) : 2000;
	const struct timespec timeout = { timeout_us / 1000000, timeout_us % 1000000 * 1000 };
	struct sched_param real_time = { 0 };

	setvbuf(stdout, NULL, _IONBF, 0);
	if (rounds > 0)
		ping_pong(rounds, &timeout);
	/* The timer's slack is not its lateness: a real-time task has none. */
	real_time.sched_priority = 1;
	if (sched_setscheduler(0, SCHED_FIFO, &real_time))
		die("SCHED_FIFO");
	if (sleeps > 0)
		sleep_late(sleeps);
	return 0;
}
