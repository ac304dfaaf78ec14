#!/bin/bash
# What the operator types in the emulated Debian of operator.sh, started by systemd on the second serial port, once per boot. Shows each command and
# what it says, and checks it. Boot 1: stock KVM serves, and the package is installed. Boot 2: Gannet serves; the package is removed.
# Boot 3: stock KVM serves again. A guest of libvirt's runs each time, and counts on its serial port.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root PAGER=cat TERM=dumb LIBVIRT_DEFAULT_URI=qemu:///system
cd /root || exit
boot=$(($(cat boot-number 2>/dev/null || echo 0) + 1))
echo $boot >boot-number
sync
echo "=== boot $boot"
began=$SECONDS serial=/var/lib/libvirt/images/serial.log

verdict() { # verdict STATUS NAME
    if [ "$1" = 0 ]; then echo "ok boot_${boot}_$2 ($((SECONDS - began)) s)"; else echo "not ok boot_${boot}_$2"; fi
    began=$SECONDS
}
# operator NAME TEXT COMMAND: the command is shown with what it says, ends well, and says TEXT, if one is given. fails: it does not end well; shows:
# however it ends.
typed() {
    echo "# $1"
    bash -c "$1" >/tmp/said 2>&1 </dev/null
    status=$?
    # Its last line may have no end, and a verdict is a line of its own.
    sed -e '$a\' /tmp/said
}
operator() { typed "$3"; [ $status = 0 ] && { [ -z "$2" ] || grep -qE "$2" /tmp/said; }; verdict $? "$1"; }
fails() { typed "$3"; [ $status != 0 ] && grep -qE "$2" /tmp/said; verdict $? "$1"; }
shows() { typed "$3"; grep -qE "$2" /tmp/said; verdict $? "$1"; }
check() { name=$1; shift; "$@"; verdict $? "$name"; }
within() { limit=$((SECONDS + $1)); shift; until "$@"; do [ $SECONDS -lt $limit ] || return 1; sleep 0.5; done; }

stock() { [ -d /sys/module/kvm_amd ] && [ ! -e /sys/module/kvm/version ]; }
gannet() { [ -d /sys/module/kvm_amd ] && [ -e /sys/module/kvm/version ]; }
told() { cat $serial 2>/dev/null | grep -ac 'guest: tick'; }
ticks() { [ "$(told)" -gt "$1" ]; }
counts() { have=$(told); within 60 ticks $((have + 5)); }
answers() { within 400 ticks 5 && grep -a -m 1 GUEST-USERSPACE $serial; }
clean() { dmesg >/tmp/log && ! grep -E 'BUG:|WARNING:|Oops|general protection|Call Trace|rcu.*stall' /tmp/log; }
forgotten() { [ $status = 0 ] && ! grep -q gannet /tmp/said; }
starts() { # the same guest, whatever module serves
    rm -f $serial
    operator guest_starts "started" "virsh start one"
    check guest_answers answers
    operator guest_is_listed 'one +running' "virsh list"
}
# What libvirt knows of /dev/kvm is of the module that was there before.
forget() { operator libvirt_asks_anew '' "rm -f /var/cache/libvirt/qemu/capabilities/*.xml; systemctl restart libvirtd.service"; }
ends() { operator guest_is_ended 'destroyed' "virsh destroy one"; }

# A machine as slow as this one is still at its beginning.
udevadm settle -t 180
within 120 systemctl -q is-active libvirtd.service
case $boot in
    1)
        operator kernel 'Debian' "uname -rv; cat /etc/debian_version"
        check stock_kvm_serves stock
        operator define 'defined' "virsh define /guest/domain.xml"
        qemu-img create -q -f qcow2 /var/lib/libvirt/images/one.qcow2 64M
        starts
        ends
        operator install 'Gannet serves /dev/kvm after a reboot' "apt install -y ./gannet-dkms_*.deb"
        operator dkms_has_built_it 'installed' "dkms status gannet"
        operator modprobe_finds_it 'updates/dkms/kvm-amd' "modprobe --show-depends kvm_amd"
        operator the_stock_modules_stay 'kvm-amd.ko' "ls /lib/modules/*/kernel/arch/x86/kvm"
        check stock_kvm_serves_until_the_reboot stock
        ;;
    2)
        check gannet_was_loaded_at_boot gannet
        operator version . "cat /sys/module/kvm/version"
        operator log 'SVM with' "journalctl -k -o cat | grep kvm:"
        operator lsmod '^kvm .*kvm_amd' "lsmod | grep -E '^(Module|kvm)'"
        operator lscpu 'AMD-V' "lscpu | grep -E 'Model name|Virtualization'"
        operator kvm_ok 'KVM acceleration can be used' "kvm-ok"
        shows virt_host_validate "/dev/kvm'? is accessible +: PASS" "virt-host-validate qemu"
        check virt_host_validate_has_no_failure [ -z "$(grep FAIL /tmp/said)" ]
        forget
        operator capabilities "<domain type='kvm'/?>" "virsh capabilities | grep \"domain type\" | sort -u"
        starts
        operator it_is_kvm 'kvm support: enabled' "virsh qemu-monitor-command one --hmp info kvm"
        operator dominfo 'running' "virsh dominfo one"
        operator domstats 'vcpu.0.state=1' "virsh domstats --vcpu --state one"
        operator suspend_and_resume 'resumed' "virsh suspend one; virsh domstate one; virsh resume one"
        check guest_counts_on counts
        operator perf_kvm_stat_record '' "perf kvm --host stat record -a sleep 5"
        operator perf_kvm_stat_report '^ +(hlt|io|msr|npf|interrupt|vintr) +[1-9]' "perf kvm --host stat report 2>&1 | grep -v '^\$'"
        operator perf_kvm_stat_report_of_ports '^ +0x[0-9a-f]+:POUT +[1-9]' "perf kvm --host stat report --event=ioport 2>&1 | grep -v '^\$'"
        operator perf_stat '[1-9][0-9,]* +kvm:kvm_exit' "perf stat -a -e kvm:kvm_exit,kvm:kvm_entry sleep 2"
        fails removal_is_refused_while_a_guest_runs 'virtual machines run on Gannet' "apt remove -y gannet-dkms"
        check guest_counts_on_after_that counts
        check gannet_still_serves gannet
        ends
        operator remove '' "apt remove -y gannet-dkms"
        check stock_kvm_serves_at_once stock
        forget
        starts
        ends
        typed "dkms status gannet"
        check dkms_has_forgotten_it forgotten
        ;;
    3)
        check stock_kvm_was_loaded_at_boot stock
        operator modprobe_finds_the_stock_module 'kernel/arch/x86/kvm/kvm-amd' "modprobe --show-depends kvm_amd"
        starts
        ends
        ;;
esac
check the_log_is_clean clean
sync
echo "=== end of boot $boot"
[ $boot = 3 ] && exec systemctl poweroff
echo "# reboot"
exec systemctl reboot
