# libvirt-guest.sh: read by host.sh where libvirt moves the guest: its functions, by virsh.

# daemon: libvirt's, begun when the module is there, for it keeps what it has asked of /dev/kvm.
daemon() {
    virtlogd -d && libvirtd -d -l || return 1
    for attempt in $(seq 100); do virsh -q version && return 0; sleep 1; done
    return 1
}
vmm_up() { pidof qemu-system-x86_64 >/dev/null; }
monitor() { virsh qemu-monitor-command one --hmp "$*" >>$work/monitor 2>&1; }
stop_vmm() { virsh destroy one; virsh undefine one; }
connection() { echo "qemu+tcp://$1/system"; }
state_at() { virsh -c "$1" domstate one | head -n 1; }

# guest linux: defined and started here, with a CPU that both hosts offer. libvirt has no other guest.
guest() {
    [ "$1" = linux ] || return 1
    for uri in qemu:///system "$(connection 10.0.0.$((3 - number)))"; do virsh -c "$uri" domcapabilities --virttype kvm; done >/tmp/all.xml &&
        virsh hypervisor-cpu-baseline --migratable /tmp/all.xml >/tmp/cpu.xml || { cat /tmp/all.xml | head -n 5; return 1; }
    sed -e '/@CPU@/{r /tmp/cpu.xml
d}' /vmm/libvirt-domain.xml >/tmp/domain.xml
    cat /tmp/cpu.xml
    virsh define /tmp/domain.xml && virsh start one
}

# leave IP: libvirt moves it there.
leave() {
    timeout 600 virsh migrate --live --persistent one "$(connection "$1")" "tcp://$1" || { echo "WRONG: virsh migrate"; tail -n 20 /tmp/libvirtd.log; return 1; }
    virsh domjobinfo one --completed | sed -n 's/^Total downtime: *\([0-9]*\) *ms.*/downtime: \1 ms/p; s/^Time elapsed: .*/&/p'
    echo "in L2: 0"
    [ "$(state_at qemu:///system)" = "shut off" ] && [ "$(state_at "$(connection "$1")")" = running ] || { echo "WRONG: it does not run there alone"; return 1; }
}
