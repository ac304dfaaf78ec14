#!/bin/sh
# /init of the emulated Debian of run.sh. First boot: the package is installed. It is refused to go while /dev/kvm is open, then
# removed. Second boot: it is gone.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root PAGER=cat DPKG_PAGER=cat
[ -d /proc/self ] || mount -t proc proc /proc
[ -d /sys/module ] || mount -t sysfs sysfs /sys
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
boot=$(cat /boot-number 2>/dev/null || echo 1)
echo $((boot + 1)) >/boot-number
echo "=== boot $boot"
check() { # check NAME COMMAND...
    name=$1
    shift
    if "$@"; then echo "ok boot_${boot}_$name"; else echo "not ok boot_${boot}_$name"; fi
}
fails_with() { # fails_with TEXT COMMAND...
    text=$1
    shift
    ! "$@" >/tmp/log 2>&1 && grep -q "$text" /tmp/log
}
quietly() { "$@" >/tmp/log 2>&1; }
serves() { exitbench run cpuid --repetitions 1 --iterations 50 2>&1 | tail -n 1 | grep -q "on $1\$"; }
stock() { [ ! -e /sys/module/kvm/version ] && serves kvm_amd; }
gannet() { [ -e /sys/module/kvm/version ] && serves gannet; }
installed() { dkms status 2>/dev/null | grep -q 'gannet.*: installed'; }

# What udev does for the CPU's alias. Some modules for this CPU find nothing here.
modprobe "$(cat /sys/devices/system/cpu/modalias)" 2>/dev/null
if [ "$boot" = 1 ]; then
    check gannet_is_loaded_by_the_cpus_feature gannet
    check a_parameter_where_tools_look_for_it [ "$(cat /sys/module/kvm_amd/parameters/npt)" = Y ]
    exec 3</dev/kvm
    check upgrade_is_refused_while_in_use fails_with 'virtual machines run on Gannet' apt-get -y install /debs/next.deb
    check removal_is_refused_while_in_use fails_with 'virtual machines run on Gannet' apt-get -y remove gannet-dkms
    check it_is_still_installed installed
    exec 3<&-
    check removal quietly apt-get -y remove gannet-dkms
    check stock_kvm_serves_at_once stock
    check dkms_has_forgotten_it [ -z "$(dkms status 2>/dev/null)" ]
else
    check stock_kvm_is_loaded_by_the_cpus_feature stock
fi
check the_log_is_clean [ -z "$(dmesg | grep -E 'BUG:|WARNING:|Oops')" ]
sync
echo "=== end"
echo o >/proc/sysrq-trigger
sleep 9
