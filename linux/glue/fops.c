// SPDX-License-Identifier: GPL-2.0-only
/*
 * Files: the device /dev/kvm, and the anonymous files that stand for a VM and for a vCPU.
 *
 * A file of the second kind owns a Rust object and knows it by a table of functions; which ioctls
 * it understands and what its pages are is Rust's business.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/anon_inodes.h>
#include <linux/compat.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "gannet.h"

/*
 * Who started: kept by each file of ours, as the kernel keeps this module by its functions. They are two where the vendor's
 * half is a module of its own.
 */
static struct module *started_by;

struct gnt_object {
	const struct gnt_file_calls *calls;
	void *object;
};

static long object_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct gnt_object *o = file->private_data;

	return o->calls->ioctl(o->object, command, argument, 0);
}

#ifdef CONFIG_COMPAT
static long object_compat_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct gnt_object *o = file->private_data;

	return o->calls->ioctl(o->object, command, (unsigned long)compat_ptr(argument), 1);
}
#endif

static int object_release(struct inode *inode, struct file *file)
{
	struct gnt_object *o = file->private_data;

	o->calls->release(o->object);
	kfree(o);
	/* Last: the vendor's module, if it is one of its own, may go from here on. */
	module_put(started_by);
	return 0;
}

static vm_fault_t object_fault(struct vm_fault *vmf)
{
	struct gnt_object *o = vmf->vma->vm_file->private_data;
	u64 hpa = o->calls->page(o->object, vmf->pgoff);

	if (!hpa)
		return VM_FAULT_SIGBUS;
	vmf->page = pfn_to_page(PHYS_PFN(hpa));
	/* The mapping's own reference: a page in it outlives the object. */
	get_page(vmf->page);
	return 0;
}

static const struct vm_operations_struct object_vm_ops = { .fault = object_fault };

static int object_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct gnt_object *o = file->private_data;

	if (!o->calls->mappable)
		return -ENODEV;
	vma->vm_ops = &object_vm_ops;
	return 0;
}

static const struct file_operations object_fops = {
	.owner = THIS_MODULE,
	.release = object_release,
	.unlocked_ioctl = object_ioctl,
#ifdef CONFIG_COMPAT
	.compat_ioctl = object_compat_ioctl,
#endif
	.mmap = object_mmap,
	.llseek = noop_llseek,
};

static ssize_t object_read(struct file *file, char __user *buffer, size_t len, loff_t *offset)
{
	struct gnt_object *o = file->private_data;
	ssize_t r = o->calls->read(o->object, *offset, (unsigned long)buffer, len);

	if (r > 0)
		*offset += r;
	return r;
}

/* A file that is read, at any offset, and nothing else. */
static const struct file_operations readable_fops = {
	.owner = THIS_MODULE,
	.release = object_release,
	.read = object_read,
	.llseek = noop_llseek,
};

/* On failure *fd is a negative errno, and the object is still the caller's. */
struct file *gnt_file_new(const char *name, s64 number, const struct gnt_file_calls *calls,
			  void *object, int *fd)
{
	struct gnt_object *o;
	struct file *file;
	char full[32];

	o = kmalloc(sizeof(*o), GFP_KERNEL_ACCOUNT);
	if (!o) {
		*fd = -ENOMEM;
		return NULL;
	}
	o->calls = calls;
	o->object = object;
	if (number >= 0)
		snprintf(full, sizeof(full), "%s:%lld", name, number);
	else
		strscpy(full, name, sizeof(full));
	*fd = get_unused_fd_flags(O_CLOEXEC);
	if (*fd < 0) {
		kfree(o);
		return NULL;
	}
	if (calls->readable)
		file = anon_inode_getfile(full, &readable_fops, o, O_RDONLY);
	else
		file = anon_inode_getfile(full, &object_fops, o, O_RDWR);
	if (IS_ERR(file)) {
		put_unused_fd(*fd);
		*fd = PTR_ERR(file);
		kfree(o);
		return NULL;
	}
	/* Readers use pread, which an anonymous file does not allow by itself. */
	if (calls->readable)
		file->f_mode |= FMODE_PREAD;
	/* It is there, for it is kept by the file whose ioctl this is. */
	__module_get(started_by);
	return file;
}

void gnt_file_install(struct file *file, int fd)
{
	fd_install(fd, file);
}

void gnt_file_cancel(struct file *file, int fd)
{
	put_unused_fd(fd);
	fput(file);
}

struct file *gnt_file_get(int fd, const struct gnt_file_calls **calls, void **object)
{
	struct file *file = fget(fd);
	struct gnt_object *o;

	if (!file)
		return NULL;
	/* Only files of ours have a struct gnt_object behind them. */
	if (file->f_op != &object_fops && file->f_op != &readable_fops) {
		fput(file);
		return NULL;
	}
	o = file->private_data;
	*calls = o->calls;
	*object = o->object;
	return file;
}

void gnt_file_put(struct file *file)
{
	fput(file);
}

/* /dev/kvm is claimed before virtualization is switched on, and usable only afterwards. */
static bool usable;

static int device_open(struct inode *inode, struct file *file)
{
	return smp_load_acquire(&usable) && try_module_get(started_by) ? 0 : -ENODEV;
}

static int device_close(struct inode *inode, struct file *file)
{
	module_put(started_by);
	return 0;
}

static long device_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	return gannet_dev_ioctl(command, argument, 0);
}

#ifdef CONFIG_COMPAT
static long device_compat_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	/* The arguments of /dev/kvm's own ioctls are numbers and pointers; both survive this. */
	return gannet_dev_ioctl(command, (unsigned long)compat_ptr(argument), 1);
}
#endif

static const struct file_operations device_fops = {
	.owner = THIS_MODULE,
	.open = device_open,
	.release = device_close,
	.unlocked_ioctl = device_ioctl,
#ifdef CONFIG_COMPAT
	.compat_ioctl = device_compat_ioctl,
#endif
	.llseek = noop_llseek,
};

static struct miscdevice device = {
	.minor = KVM_MINOR,
	.name = "kvm",
	.fops = &device_fops,
};

int gnt_device_claim(struct module *owner)
{
	int r;

	started_by = owner;
	r = misc_register(&device);
	if (r == -EBUSY || r == -EEXIST)
		pr_err("/dev/kvm belongs to another hypervisor; unload it first (kvm_amd, kvm_intel)\n");
	else if (r)
		pr_err("cannot register /dev/kvm: error %d\n", r);
	return r;
}

void gnt_device_open_for_use(void)
{
	smp_store_release(&usable, true);
}

void gnt_device_release(void)
{
	smp_store_release(&usable, false);
	misc_deregister(&device);
}
