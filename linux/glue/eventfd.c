// SPDX-License-Identifier: GPL-2.0-only
/* Eventfds: signalling one, and hearing from one through its wait queue. */
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/poll.h>
#include <linux/wait.h>

#include "compat.h"
#include "gannet.h"

struct gnt_watch {
	wait_queue_entry_t entry;
	poll_table table;
	const struct gnt_watch_calls *calls;
	void *context;
	/* NULL until attached; keeps the wait queue alive. */
	struct eventfd_ctx *eventfd;
	int refused;
};
static_assert(sizeof(struct gnt_watch) <= GNT_WATCH_BYTES);

int gnt_fd_is_open(int fd)
{
	struct file *file = fget(fd);

	if (file)
		fput(file);
	return file != NULL;
}

struct eventfd_ctx *gnt_eventfd_get(int fd)
{
	struct eventfd_ctx *e = eventfd_ctx_fdget(fd);

	return IS_ERR(e) ? NULL : e;
}

void gnt_eventfd_put(struct eventfd_ctx *e)
{
	eventfd_ctx_put(e);
}

void gnt_eventfd_signal(struct eventfd_ctx *e, u64 count)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	/* These kernels add one, whatever is asked; nobody asks for more. */
	if (count)
		eventfd_signal(e);
#else
	eventfd_signal(e, count);
#endif
}

/* Under the wait queue's lock, interrupts off. */
static int woken(wait_queue_entry_t *entry, unsigned int mode, int sync, void *key)
{
	struct gnt_watch *w = container_of(entry, struct gnt_watch, entry);
	__poll_t events = key_to_poll(key);
	int consumed = 0;

	if (events & EPOLLIN) {
		u64 count;

		/* The wait queue's lock, which is held, is the counter's. */
		eventfd_ctx_do_read(w->eventfd, &count);
		w->calls->fired(w->context);
		consumed = 1;
	}
	if (events & EPOLLHUP)
		w->calls->hung_up(w->context);
	return consumed;
}

static void queue(struct file *file, wait_queue_head_t *head, poll_table *table)
{
	struct gnt_watch *w = container_of(table, struct gnt_watch, table);

	w->refused = add_wait_queue_priority_exclusive(head, &w->entry);
}

/* The caller holds `expected`: another eventfd that has come in its place meanwhile it has not looked at. */
int gnt_watch_attach(struct gnt_watch *w, int fd, const struct eventfd_ctx *expected,
		     const struct gnt_watch_calls *calls, void *context)
{
	__poll_t events;
	struct eventfd_ctx *e;
	struct file *file = eventfd_fget(fd);

	if (IS_ERR(file))
		return PTR_ERR(file);
	e = eventfd_ctx_fileget(file);
	if (IS_ERR(e)) {
		fput(file);
		return PTR_ERR(e);
	}
	if (e != expected) {
		eventfd_ctx_put(e);
		fput(file);
		return -EBADF;
	}
	w->calls = calls;
	w->context = context;
	w->eventfd = e;
	init_waitqueue_func_entry(&w->entry, woken);
	init_poll_funcptr(&w->table, queue);
	w->refused = 0;
	/* A count that is there already wakes nobody: look now that the entry is queued. */
	events = vfs_poll(file, &w->table);
	if (w->refused) {
		w->eventfd = NULL;
		eventfd_ctx_put(e);
		fput(file);
		return w->refused;
	}
	if (events & EPOLLIN) {
		unsigned long flags;

		/* fired() knows one context, and finds interrupts off in it. */
		local_irq_save(flags);
		calls->fired(context);
		local_irq_restore(flags);
	}
	fput(file);
	return 0;
}

/* Takes the wait queue's lock: afterwards no callback runs or will run. */
void gnt_watch_detach(struct gnt_watch *w)
{
	u64 count;

	if (!w->eventfd)
		return;
	eventfd_ctx_remove_wait_queue(w->eventfd, &w->entry, &count);
	eventfd_ctx_put(w->eventfd);
	w->eventfd = NULL;
}

struct eventfd_ctx *gnt_watch_context(const struct gnt_watch *w)
{
	return w->eventfd;
}
