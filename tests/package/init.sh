#!/bin/sh
# /init of the emulated Debian of run.sh. First boot: the package is installed. It is refused to go while /dev/kvm is open, then
# removed. Second boot: it is gone. Of secure-boot.sh, too, whose boots have `mok` on the kernel's command line, and do not count.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root PAGER=cat DPKG_PAGER=cat
[ -d /proc/self ] || mount -t proc proc /proc
[ -d /sys/module ] || mount -t sysfs sysfs /sys
[ -e /sys/kernel/security/lockdown ] || mount -t securityfs securityfs /sys/kernel/security
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
boot=$(cat /boot-number 2>/dev/null || echo 1)
echo $((boot + 1)) >/boot-number
[ -z "$mok" ] || boot=secure_key_$mok
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
locked_down() { dmesg | grep -q 'Secure boot enabled' && grep -q '\[integrity\]' /sys/kernel/security/lockdown; }
# Taints: of out-of-tree modules alone (bit 12), and not of one whose signature is not known (bit 13).
verified() { [ "$(cat /proc/sys/kernel/tainted)" = 4096 ]; }
# As at its installation, but that nothing is compiled: this machine is slow, and its disk is thrown away.
warned() {
    rm /lib/modules/*/build
    modprobe efivarfs; mount -t efivarfs efivarfs /sys/firmware/efi/efivars
    /var/lib/dpkg/info/gannet-dkms.postinst configure 2>&1 | grep -q 'Secure Boot is on'
}
installed() { dkms status 2>/dev/null | grep -q 'gannet.*: installed'; }

# What udev does for the CPU's alias. Some modules for this CPU find nothing here.
modprobe "$(cat /sys/devices/system/cpu/modalias)" 2>/dev/null
[ -z "$mok" ] || check secure_boot_is_on locked_down
if [ "$mok" = known ]; then
    check gannet_is_loaded_by_the_cpus_feature gannet
    check its_signature_is_verified verified
elif [ "$mok" = unknown ]; then
    check gannet_is_refused fails_with 'Key was rejected' modprobe kvm_amd
    check nothing_serves [ ! -e /dev/kvm ]
    check the_package_says_so warned
    check removal quietly apt-get -y remove gannet-dkms
    check stock_kvm_loads_then quietly modprobe kvm_amd
    check and_serves stock
elif [ "$boot" = 1 ]; then
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
