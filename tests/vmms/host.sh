# host.sh: runs inside a machine that is one of two hosts on a wire (migrate.sh). Takes lines from the second serial port, carries them
# out here, and says how each ended. `number` is 1 or 2.
. /vmm/vmm.sh
. /vmm/moves.sh
why= note= guest_append= cpus= accel=kvm vmm=999999 reader=999999
for module in virtio_blk failover net_failover virtio_net llc stp bridge tun; do insmod /net/$module.ko; done
ip link set eth0 up
brctl addbr br0 && echo 0 >/sys/class/net/br0/bridge/forward_delay; brctl addif br0 eth0
tunctl -t tap0 >/dev/null && brctl addif br0 tap0
ip link set tap0 up && ip addr add 10.0.0.$number/24 dev br0 && ip link set br0 up
: >$work/stream

# What the guest sends by TCP, if this host is where it goes. The listener ends when it has nothing more to say itself.
listen() { : >$work/stream; (tail -f /dev/null | nc -l -p 9000 >>$work/stream 2>$work/listener) & }

# guest KIND ARGUMENTS...: the guest that is moved. `linux` has two CPUs, a disk that both hosts reach, and a network; `l2` is a hypervisor.
guest() {
    kind=$1
    shift
    case $kind in
        linux) start -no-reboot -M pc -cpu ${model:-host} -smp 2 -kernel /guest/vmlinux -initrd /guest/hypervisor -append "$append job=moves" \
            -blockdev driver=host_device,node-name=d,filename=/dev/vda,cache.direct=on -device virtio-blk-pci,drive=d \
            -netdev tap,id=n,ifname=tap0,script=no,downscript=no -device virtio-net-pci,netdev=n,mac=52:54:00:00:00:64,romfile= "$@" ;;
        l2) hypervisor "$@" ;;
    esac
}

# leave IP: the guest goes there; what the monitor has to say of it.
leave() {
    : >$work/monitor
    monitor 'migrate_set_parameter max-bandwidth 4g'
    monitor "migrate_set_parameter downtime-limit ${downtime_limit:-300}"
    monitor "migrate -d tcp:$1:4444"
    limit=$(($(now) + 12000 * ${PATIENCE:-1}))
    until grep -q 'Status: *completed\|Migration status: completed' $work/monitor; do
        [ "$(now)" -lt $limit ] && vmm_up && ! grep -qi 'status: *failed' $work/monitor || { echo "WRONG: migration has not ended"; tail -n 40 $work/monitor $work/stderr; return 1; }
        : >$work/monitor; monitor 'info migrate'; usleep 300000
    done
    tr -d '\r' <$work/monitor
    paused
    echo "in L2: $in_l2"
    stop_vmm
    return 0
}
moved_in() { serial 'guest: ' "${1:-120}" && ! grep -q 'GUEST-USERSPACE' $work/serial && right || { echo "WRONG: $why"; tail -n 20 $work/serial $work/stderr; return 1; }; }

# Where libvirt moves it, some of these are others.
[ ! -e /vmm/libvirt-guest.sh ] || . /vmm/libvirt-guest.sh

stty -F /dev/ttyS1 raw -echo
exec 8<>/dev/ttyS1
in_l2=0 stops=0
echo "=DONE 0" >&8
while read -r line <&8; do
    eval "$line" >/tmp/answer 2>&1
    result=$?
    { cat /tmp/answer; echo "=DONE $result"; } >&8
done
