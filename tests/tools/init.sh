#!/bin/bash
# /init of the emulated Debian of run.sh: asks every tool what an administrator would. What is mounted is what the initramfs has
# mounted, and what the tools mount for themselves.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C HOME=/root PAGER=cat TERM=dumb
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
ip link set lo up
echo '=== begin'
module=stock only=
for word in $(cat /proc/cmdline); do case $word in module=*) module=${word#module=} ;; only=*) only=${word#only=} ;; esac; done
begun=$SECONDS
# wanted PART: all are, or those of PART=node,kvm_stat.
wanted() { case ,$only, in ,, | *,"$1",*) ;; *) return 1 ;; esac; }

# check NAME COMMAND...: what it says is shown if it fails.
check() {
    name=$1
    shift
    if "$@" >/tmp/said 2>&1; then echo "ok $name ($((SECONDS - begun)) s)"; else echo "not ok $name"; tail -n 25 /tmp/said; fi
    begun=$SECONDS
}
# shown TEXT COMMAND...: the command says it, however it ends; has: and succeeds.
shown() { text=$1; shift; "$@" >/tmp/has 2>&1; status=$?; cat /tmp/has; grep -qE "$text" /tmp/has; }
has() { shown "$@" && [ $status = 0 ]; }
# within SECONDS COMMAND...
# told NAME COMMAND...: a check whose words are kept in the log, well or not.
told() { name=$1; shift; check "$name" "$@"; grep -v ' 0 *0$' /tmp/said | sed 's/^/# /'; }
within() { limit=$((SECONDS + $1)); shift; until "$@"; do [ $SECONDS -lt $limit ] || return 1; sleep 0.3; done; }

if [ "$module" = stock ]; then
    modprobe irqbypass
    for name in kernel/virt/lib/irqbypass kernel/arch/x86/kvm/kvm kernel/drivers/crypto/ccp/ccp kernel/arch/x86/kvm/kvm-amd; do
        insmod "/lib/modules/$(uname -r)/$name.ko.xz" 2>/dev/null || insmod "/lib/modules/$(uname -r)/$name.ko" 2>/dev/null
    done
else
    modprobe kvm_amd
fi
loaded() { if [ "$module" = stock ]; then [ ! -e /sys/module/kvm/version ]; else [ -e /sys/module/kvm/version ]; fi; }
check the_module_is_loaded loaded
check lsmod has '^kvm +[0-9]+ +1 kvm_amd|^kvm .*kvm_amd' lsmod
check lscpu has 'Virtualization: +AMD-V' lscpu
check kvm_ok has 'KVM acceleration can be used' kvm-ok
check virt_host_validate_hardware shown 'hardware virtualization +: PASS' virt-host-validate qemu
check virt_host_validate_device shown '/dev/kvm is accessible +: PASS' virt-host-validate qemu

# --- a node's checks ---
if wanted node; then
told as_kata_checks_a_node node.py kata
told as_kubevirt_labels_a_node node.py kubevirt
fi

# --- tracing ---
if wanted tracing; then
traced() {
    trace-cmd record -q -e kvm:kvm_exit -e kvm:kvm_entry -o /tmp/trace.dat exitbench run cpuid --repetitions 1 --iterations 300 || return 1
    trace-cmd report -i /tmp/trace.dat >/tmp/trace.txt 2>/dev/null
    tail -n 3 /tmp/trace.txt
    [ "$(grep -ci 'kvm_exit:.*cpuid' /tmp/trace.txt)" -ge 300 ] && [ "$(grep -c 'kvm_entry:' /tmp/trace.txt)" -ge 300 ]
}
check trace_cmd traced
check perf_lists_the_tracepoints has 'kvm:kvm_exit' perf list tracepoint
check perf_stat has '[1-9][0-9,]* +kvm:kvm_exit' perf stat -e kvm:kvm_exit,kvm:kvm_entry exitbench run cpuid --repetitions 1 --iterations 300
reported() {
    perf kvm stat record -o /tmp/perf.data exitbench run cpuid --repetitions 1 --iterations 300 || return 1
    perf kvm -i /tmp/perf.data stat report --stdio >/tmp/report 2>&1 || perf kvm -i /tmp/perf.data stat report >/tmp/report 2>&1
    cat /tmp/report
    awk '/cpuid/ && $2 >= 300 {found = 1} END {exit !found}' /tmp/report
}
check perf_kvm_stat_report reported
live() {
    (while :; do exitbench run cpuid --repetitions 1 --iterations 300 >/dev/null 2>&1; done) &
    load=$!
    timeout -s INT -k 10 40 perf kvm stat live -d 3 </dev/null >/tmp/live 2>&1
    kill $load; wait $load 2>/dev/null
    head -n 40 /tmp/live
    grep -qE 'cpuid +[0-9]+' /tmp/live
}
check perf_kvm_stat_live live
statistics() { exitbench run cpuid --repetitions 1 --iterations 300 >/dev/null & sleep 1; ls /sys/kernel/debug/kvm; wait; [ -e /sys/kernel/debug/kvm/exits ]; }
check debugfs_has_statistics statistics
fi

# --- kvm_stat ---
if wanted kvm_stat; then
# The kernel's own kvm_stat, by tracepoints (its default) and by debugfs, for a second in which a guest exits. It wants a debugfs; there is no mount(8).
counted() { # counted LINE OPTION...: the line that begins so has grown
    line=$1; shift
    mountpoint -q /sys/kernel/debug || python3 -c 'import ctypes; ctypes.CDLL(None).mount(b"none", b"/sys/kernel/debug", b"debugfs", 0, None)'
    # One guest all the time: of one that has gone kvm_stat drops the files in debugfs.
    exitbench run cpuid --repetitions 1 --iterations 200000 --timeout 300 >/dev/null 2>&1 &
    load=$!
    sleep 1
    timeout 120 kvm_stat -1 "$@" >/tmp/counted 2>&1
    status=$?
    kill $load; wait $load 2>/dev/null
    cat /tmp/counted
    [ $status = 0 ] && awk -v line="$line" 'index($1, line) == 1 && $NF > 0 {found = 1} END {exit !found}' /tmp/counted
}
told kvm_stat_by_tracepoints counted 'kvm_exit(CPUID)'
told kvm_stat_by_debugfs counted exits -d
fi

none_runs() { ! grep -qs "^$1" /proc/[0-9]*/comm; }
# --- libvirt ---
if wanted libvirt || wanted node; then
# The user that the package libvirt-daemon-system makes; it wants systemd, which is not here.
grep -q libvirt-qemu /etc/passwd || echo "libvirt-qemu:x:64055:106:libvirt:/var/lib/libvirt:/usr/sbin/nologin" >>/etc/passwd
grep -q libvirt-qemu /etc/group || printf 'kvm:x:106:\nlibvirt-qemu:x:64055:\n' >>/etc/group
mkdir -p /var/lib/libvirt/images /run/libvirt /var/log/libvirt/qemu
cat >/etc/libvirt/qemu.conf <<CONF
user = "root"
group = "root"
security_driver = "none"
stdio_handler = "file"
namespaces = []
CONF
cat >/etc/libvirt/libvirtd.conf <<CONF
auth_unix_rw = "none"
unix_sock_group = "root"
log_outputs = "2:file:/tmp/libvirtd.log"
CONF
virtlogd -d 2>/dev/null
check libvirtd_starts libvirtd -d
export LIBVIRT_DEFAULT_URI=qemu:///system
answers() { within 60 virsh -q version >/tmp/version 2>&1; status=$?; cat /tmp/version; [ $status = 0 ] || { tail -n 3 /tmp/version; cat /tmp/libvirtd.log; }; return $status; }
check virsh_answers answers
check capabilities_have_kvm has "domain type='kvm'" virsh capabilities
check domcapabilities has "<mode name='host-passthrough' supported='yes'" virsh domcapabilities --virttype kvm
# What KubeVirt's node labeller runs in its container.
labels() {
    q35="--machine q35 --arch x86_64 --virttype kvm"
    virsh domcapabilities $q35 >/tmp/domcapabilities.xml || return 1
    virsh hypervisor-cpu-baseline --features /tmp/domcapabilities.xml $q35 >/tmp/features.xml || return 1
    virsh capabilities >/tmp/capabilities.xml || return 1
    echo "host model: $(grep -o "<model fallback='forbid'>[^<]*" /tmp/domcapabilities.xml | sed 's/.*>//'), features: $(grep -c '<feature' /tmp/features.xml)"
    echo "CPU models that are usable: $(sed -n "s/.*usable='yes'.*>\(.*\)<.*/\1/p" /tmp/domcapabilities.xml | tr '\n' ' ')"
    grep -q '<feature' /tmp/features.xml
}
told as_kubevirt_asks_libvirt labels
told what_no_cpu_model_has node.py models
if wanted libvirt; then
qemu-img create -q -f qcow2 /var/lib/libvirt/images/one.qcow2 64M
serial=/tmp/serial.log
lines() { wc -l <$serial 2>/dev/null || echo 0; }
ticks() { grep -q 'guest: tick' $serial; }
goes_on() { from=$(lines); within 60 grows "$from"; }
grows() { [ "$(lines)" -gt $(($1 + 3)) ]; }
state_is() { [ "$(virsh domstate one | head -n 1)" = "$1" ]; }
check define has 'defined' virsh define /guest/domain.xml
check start has 'started' virsh start one
check guest_reaches_user_space within 240 ticks
check dominfo has 'State: +running' virsh dominfo one
check it_is_kvm has 'type=.kvm.' virsh dumpxml one
check vcpupin virsh vcpupin one 0 0
check vcpuinfo has 'State: +running' virsh vcpuinfo one
check domstats has 'vcpu.0.state=1' virsh domstats one
suspended() { virsh suspend one && state_is paused && sleep 1 && from=$(lines) && sleep 2 && [ "$(lines)" = "$from" ] && virsh resume one && goes_on; }
check suspend_and_resume suspended
check setmem virsh setmem one 96M --live
saved() { virsh save one /tmp/one.save && state_is "shut off" && virsh restore /tmp/one.save && state_is running && goes_on; }
check save_and_restore saved
managed() { virsh managedsave one && state_is "shut off" && virsh start one && state_is running && goes_on; }
check managed_save managed
snapshot() { virsh snapshot-create-as one first && goes_on && virsh snapshot-revert one first && state_is running && goes_on && virsh snapshot-delete one first; }
check snapshot_and_revert snapshot
hot() { virsh setvcpus one 2 --live && has 'current +live +2' virsh vcpucount one; }
check a_second_vcpu_by_hotplug hot
restarted() { virsh reset one && goes_on; }
check reset restarted
check destroy has 'destroyed' virsh destroy one
check undefine virsh undefine one
check nothing_is_left within 20 none_runs qemu-system
fi
for daemon in libvirtd virtlogd; do kill "$(cat /run/$daemon.pid)"; done
check libvirtd_ends within 20 none_runs libvirtd
fi
unloaded() { within 20 rmmod kvm_amd && rmmod kvm; }
check the_module_unloads unloaded
clean() { ! dmesg | grep -E 'BUG:|WARNING:|Oops|general protection|Call Trace'; }
check the_log_is_clean clean
echo "=== end"
sync
echo o >/proc/sysrq-trigger
sleep 9
