// SPDX-License-Identifier: GPL-2.0-only
/*
 * Statistics in debugfs, where KVM has them: /sys/kernel/debug/kvm, in it a directory per VM named
 * PID-FD with one per vCPU, and files with totals over all VMs beside them.
 *
 * A directory owns a share of the Rust object whose statistics it shows, and gives it back when it
 * is removed; the kernel has by then waited for readers, and refuses later ones. Everything is
 * optional: without debugfs, or with a name that is taken, there is just nothing to see.
 */
#include <linux/debugfs.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include "gannet.h"

struct entry {
	struct gnt_debug_dir *dir;
	u32 index;
};

struct gnt_debug_dir {
	struct dentry *dentry;
	const struct gnt_debug_calls *calls;
	void *object;
	/* Among all VMs; empty for a vCPU. */
	struct list_head all;
	struct entry entries[];
};

/* What is Gannet's alone lies beside: for kvm_stat each file in KVM's directory is a counter. */
static struct dentry *root, *own;
static const struct gnt_debug_calls *totals;
static LIST_HEAD(vms);
static DEFINE_MUTEX(vms_lock);

static int entry_show(struct seq_file *to, void *unused)
{
	struct entry *e = to->private;

	e->dir->calls->show(e->dir->object, e->index, to);
	return 0;
}

static int total_show(struct seq_file *to, void *unused)
{
	u32 index = (unsigned long)to->private;
	struct gnt_debug_dir *d;
	u64 sum = 0;

	/* A directory leaves the list under this lock before its object goes. */
	mutex_lock(&vms_lock);
	list_for_each_entry(d, &vms, all)
		sum += totals->value(d->object, index);
	mutex_unlock(&vms_lock);
	seq_printf(to, "%llu\n", sum);
	return 0;
}

static int mitigations_show(struct seq_file *to, void *unused)
{
	gannet_show_mitigations(to);
	return 0;
}

DEFINE_SHOW_ATTRIBUTE(entry);
DEFINE_SHOW_ATTRIBUTE(mitigations);
DEFINE_SHOW_ATTRIBUTE(total);

void gnt_seq_write(struct seq_file *to, const char *text, size_t len)
{
	seq_write(to, text, len);
}

/*
 * A VM is named by its creator and descriptor, which may both be used again while it lives. The kernel says so without limit
 * to whoever makes a directory that exists.
 */
static struct dentry *vm_dir(const char *name)
{
	struct dentry *dir;

	mutex_lock(&vms_lock);
	dir = debugfs_lookup(name, root);
	if (dir) {
		dput(dir);
		dir = NULL;
	} else {
		dir = debugfs_create_dir(name, root);
	}
	mutex_unlock(&vms_lock);
	return dir;
}

/*
 * NULL when there is nothing to be seen; the share of the object is then the caller's still. The
 * parent is NULL for a VM, and its directory for a vCPU.
 */
struct gnt_debug_dir *gnt_debug_add(const char *name, struct gnt_debug_dir *parent,
				    const struct gnt_debug_calls *calls, void *object)
{
	struct gnt_debug_dir *d;
	u32 i;

	if (IS_ERR_OR_NULL(root))
		return NULL;
	d = kzalloc(struct_size(d, entries, calls->files), GFP_KERNEL_ACCOUNT);
	if (!d)
		return NULL;
	d->calls = calls;
	d->object = object;
	INIT_LIST_HEAD(&d->all);
	d->dentry = parent ? debugfs_create_dir(name, parent->dentry) : vm_dir(name);
	if (IS_ERR_OR_NULL(d->dentry)) {
		kfree(d);
		return NULL;
	}
	for (i = 0; i < calls->files; i++) {
		d->entries[i] = (struct entry){ .dir = d, .index = i };
		debugfs_create_file(calls->name(i), 0444, d->dentry, &d->entries[i], &entry_fops);
	}
	if (!parent) {
		mutex_lock(&vms_lock);
		list_add(&d->all, &vms);
		mutex_unlock(&vms_lock);
	}
	return d;
}

/* Sleeps until nobody reads. A VM's directory takes those of its vCPUs along, which come first. */
void gnt_debug_remove(struct gnt_debug_dir *d)
{
	mutex_lock(&vms_lock);
	list_del_init(&d->all);
	mutex_unlock(&vms_lock);
	debugfs_remove(d->dentry);
	d->calls->release(d->object);
	kfree(d);
}

void gnt_debug_init(void)
{
	u32 i;

	totals = gannet_debug_totals();
	root = debugfs_create_dir("kvm", NULL);
	if (IS_ERR_OR_NULL(root))
		return;
	for (i = 0; i < totals->totals; i++)
		debugfs_create_file(totals->name(i), 0444, root, (void *)(unsigned long)i,
				    &total_fops);
	own = debugfs_create_dir("gannet", NULL);
	if (!IS_ERR_OR_NULL(own))
		debugfs_create_file("mitigations", 0444, own, NULL, &mitigations_fops);
}

void gnt_debug_exit(void)
{
	debugfs_remove(own);
	debugfs_remove(root);
	own = root = NULL;
}
