#!/bin/sh
# /init of the guest that the VMMs boot: says that user space answers and does what `job=` on the kernel command line names.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
job=plain ending=reboot kvm=
for word in $(cat /proc/cmdline); do
    case $word in job=*) job=${word#job=} ;; ending=*) ending=${word#ending=} ;; kvm=*) kvm=${word#kvm=} ;; esac
done
echo "GUEST-USERSPACE cpus=$(nproc) kernel=$(uname -r) job=$job"

sum_of() { md5sum "$@" | cut -d' ' -f1; }
interrupts_of() { grep -E "$1" /proc/interrupts | awk '{for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n += $i} END {print n + 0}'; }

# Processes, memory, time, the interrupts of every CPU.
plain() {
    sum=0 i=0
    while [ $i -lt 20 ]; do sum=$((sum + $(echo $i | cat))) i=$((i + 1)); done
    [ $sum = 190 ] && echo "guest: 20 processes came and went" || echo "guest: WRONG sum $sum"
    dd if=/dev/zero of=/tmp/zeros bs=64k count=64 2>/dev/null
    [ "$(sum_of /tmp/zeros)" = b5cfa9d6c8febd618f91ac2843d50a1c ] && echo "guest: 4 MiB written and read back" || echo "guest: WRONG memory"
    usleep 20000 && echo "guest: slept 20 ms"
    for cpu in $(seq 0 $(($(nproc) - 1))); do
        taskset $((1 << cpu)) sh -c 'usleep 5000; grep -q . /proc/self/stat' && echo "guest: cpu $cpu works"
    done
    echo "guest: clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
    dmesg | grep -E 'Hypervisor detected|kvm-guest|kvm-clock: using|Booting paravirtualized' | sed 's/^\[[^]]*\] /guest: /'
    grep -E 'CPU|timer|ttyS|LOC|RES|CAL|TLB' /proc/interrupts | sed 's/^/guest: /'
}

# A virtio disk: 8 MiB out, caches dropped, the same 8 MiB back.
disk() {
    insmod /modules/virtio_blk.ko || echo "guest: WRONG no virtio_blk"
    [ -b /dev/vda ] || { echo "guest: WRONG no /dev/vda"; return; }
    seq 1 1300000 | head -c 8388608 >/tmp/wanted
    dd if=/tmp/wanted of=/dev/vda bs=256k conv=fsync 2>/dev/null || echo "guest: WRONG write"
    echo 3 >/proc/sys/vm/drop_caches
    blockdev --flushbufs /dev/vda
    got=$(dd if=/dev/vda bs=64k count=128 2>/dev/null | sum_of)
    [ "$got" = "$(sum_of /tmp/wanted)" ] && echo "guest: disk holds what was written, $(interrupts_of 'virtio.*req') interrupts" ||
        echo "guest: WRONG disk"
}

# A virtio network card on the VMM's own network: ARP and ping to its gateway.
net() {
    for module in failover net_failover virtio_net; do insmod /modules/$module.ko || echo "guest: WRONG no $module"; done
    ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0
    ping -c 5 -i 0.2 -W 5 10.0.2.2 | grep -q ' 0% packet loss' && echo "guest: gateway answers, $(interrupts_of 'virtio.*put') interrupts" ||
        echo "guest: WRONG no answer from the gateway"
}

# Counts aloud, for what the monitor does meanwhile.
count() {
    echo "guest: symbol do_nanosleep $(awk '$3 == "do_nanosleep" {print $1}' /proc/kallsyms)"
    n=0
    while [ $n -lt 3000 ]; do echo "guest: tick $n" | tee /dev/tty0; n=$((n + 1)); usleep 50000; done
}

# Every CPU busy with system calls and memory for a while, checked at the end.
busy() {
    for cpu in $(seq 0 $(($(nproc) - 1))); do
        (i=0; while [ $i -lt 12 ]; do dd if=/dev/zero bs=128k count=16 2>/dev/null | sum_of; i=$((i + 1)); done | sort -u >/tmp/busy.$cpu) &
    done
    wait
    [ "$(cat /tmp/busy.* | sort -u)" = b2d1236c286a3c0704224fe4105eca49 ] && echo "guest: all CPUs computed the same" || echo "guest: WRONG sums"
}

# What the kernel has to say from now on, if it is about a fault.
watch_log() {
    while read -r line; do
        case $line in
            *WARNING* | *BUG* | *'Call Trace'* | *RIP:* | *stall* | *lockup* | *'general protection'* | *'blocked for more'*)
                echo "guest: WRONG log: $line" ;;
        esac
    done </proc/kmsg
}

# A hypervisor with Debian's own KVM, whose guest counts aloud and checks its memory, registers and clock; on two CPUs it has two.
l2() {
    watch_log &
    vendor=intel
    grep -qw svm /proc/cpuinfo && vendor=amd && insmod /modules/ccp.ko
    for module in irqbypass kvm; do insmod /modules/$module.ko || echo "guest: WRONG no $module"; done
    insmod /modules/kvm-$vendor.ko $kvm || echo "guest: WRONG no kvm-$vendor"
    if [ "$(nproc)" = 2 ]; then
        taskset 2 labtests --count | while read -r line; do echo "guest: tock${line#guest: tick}"; done &
        taskset -p 1 $$ >/dev/null
    fi
    labtests --count
    echo "guest: WRONG the count has ended"
}

# Everything at once, for a guest that is moved from host to host: clocks, a computation, a disk, packets. What the clocks say
# goes to the console and, by TCP, to the host 10.0.0.1.
moves() {
    watch_log &
    for module in virtio_blk failover net_failover virtio_net; do insmod /modules/$module.ko || echo "guest: WRONG no $module"; done
    ip link set eth0 up && ip addr add 10.0.0.100/24 dev eth0
    (while :; do
        sum=$(dd if=/dev/zero bs=128k count=16 2>/dev/null | sum_of)
        [ "$sum" = b2d1236c286a3c0704224fe4105eca49 ] || echo "guest: WRONG sum $sum"
    done) &
    # Each of 32 pieces of the disk is written anew in its turn, and one written before is read back.
    (round=0
    while :; do
        piece=$((round % 32)) old=$(((round * 7 + 3) % 32))
        seq $((round * 15000)) $((round * 15000 + 14999)) | head -c 65536 >/tmp/piece
        dd if=/tmp/piece of=/dev/vda bs=64k seek=$piece conv=fsync 2>/dev/null || echo "guest: WRONG write"
        sum_of /tmp/piece >/tmp/sum.$piece
        echo "guest: disk $round $piece $(cat /tmp/sum.$piece)"
        blockdev --flushbufs /dev/vda
        if [ -f /tmp/sum.$old ]; then
            sum=$(dd if=/dev/vda bs=64k skip=$old count=1 2>/dev/null | sum_of)
            [ "$sum" = "$(cat /tmp/sum.$old)" ] || echo "guest: WRONG disk, piece $old in round $round"
        fi
        round=$((round + 1))
    done) &
    (while :; do ping -c 50 -i 0.1 -W 5 10.0.0.2 | sed -n 's/.*packets transmitted/guest: ping &/p' | sed 's/.*ping \([0-9]*\) .* \([0-9]*\) packets received.*/guest: ping \1 \2/'; done) &
    until ping -c 1 -W 2 10.0.0.1 >/dev/null; do sleep 1; done
    mkfifo /tmp/stream
    nc 10.0.0.1 9000 </tmp/stream &
    labtests --clocks | while read -r line; do
        case $line in guest:*) ;; *) echo "guest: WRONG clocks: $line" ;; esac
        echo "$line"
        echo "$line" >&4
    done 4>/tmp/stream
    echo "guest: WRONG the clocks have ended"
}

$job
echo "guest: done"
$ending -f
