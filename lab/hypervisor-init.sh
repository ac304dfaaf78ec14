#!/bin/sh
# /init of the lab's guest that is a hypervisor (L1): loads its kernel's own KVM, or the module that `gannet.module="..."` on its command
# line names, with the parameters of `gannet.kvm="..."`, runs the shell command of `gannet.command="..."`, shows what its kernel had to say of it, and resets.
export PATH=/bin HOME=/ EXITBENCH_UNIT=instructions
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
echo "GANNET-GUEST-USERSPACE cpus=$(nproc) kernel=$(uname -r)"
quoted() { sed -n "s/.*gannet\.$1=\"\([^\"]*\)\".*/\1/p" /proc/cmdline; }
module=$(quoted module)
if [ -z "$module" ]; then
	module=kvm-intel
	grep -qw svm /proc/cpuinfo && module=kvm-amd && insmod /modules/ccp.ko
	insmod /modules/irqbypass.ko
	insmod /modules/kvm.ko
fi
insmod /modules/$module.ko $(quoted kvm) || echo "hypervisor: $module did not load: $(dmesg | tail -n 3)"
echo '<6>GANNET-L2-LOG' >/dev/kmsg
echo GANNET-L2-BEGIN
sh -c "$(quoted command)"
echo "GANNET-L2-END status=$?"
dmesg | sed '1,/GANNET-L2-LOG/d; s/^/hypervisor log: /'
echo GANNET-L1-DONE
reboot -f
