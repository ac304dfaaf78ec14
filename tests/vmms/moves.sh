# moves.sh: read by run.sh. Guests that are saved and go on elsewhere, while a guest of theirs runs (`job=l2` of guest-init.sh): in the
# same VMM, in another, and under the other module, which is loaded in between. What the guest counts on its serial port has to go
# on without a gap and without a repeat; L2 itself looks after its memory, registers, clock and timer (`labtests --count`).
rounds=${ROUNDS:-3}

# hypervisor ARGUMENTS...: QEMU with a guest that is one, the kernel command line of which has $guest_append.
hypervisor() {
    start -no-reboot -M pc -m 160 -kernel /guest/vmlinux -initrd /guest/hypervisor -append "$append job=l2 $guest_append" $cpus "$@"
}

# The emulated Intel CPU logs addresses of which stock KVM expects that they are a page's, and says so for each.
stock_parameters() { grep -qw svm /proc/cpuinfo || echo pml=0; }

loaded() { [ -d /sys/module/gannet ] && echo gannet || echo stock; }

# under MODULE: loads it, if the other one is there.
under() {
    [ "$(loaded)" = "$1" ] && return
    vendor=kvm-intel
    grep -qw svm /proc/cpuinfo && vendor=kvm-amd
    if [ "$1" = gannet ]; then
        rmmod $vendor kvm && insmod /modules/gannet.ko || why="gannet does not load"
    else
        if [ $vendor = kvm-amd ] && [ ! -d /sys/module/ccp ]; then insmod /modules/ccp.ko; fi
        rmmod gannet && insmod /modules/kvm.ko && insmod /modules/$vendor.ko $(stock_parameters) || why="stock KVM does not load"
    fi
    [ -z "$why" ]
}

# paused: the guest stands; $in_l2 counts how often L2 was in the middle of its program then.
paused() {
    : >$work/monitor
    monitor 'info registers'; answer '^CR3=|CR3=' || return 1
    grep -qE 'RIP=0000000000010[0-9a-f]{3} ' $work/monitor && in_l2=$((in_l2 + 1))
    stops=$((stops + 1))
}

# in_order: the count of all that came so far has no gap and no repeat. A line that is not complete yet is left out.
in_order() {
    cat $work/history $work/serial | tr -d '\r' >$work/all
    grep -q WRONG $work/all && { why=$(grep -m1 WRONG $work/all); return 1; }
    why=$(sed '$d' $work/all | awk '/^guest: t[io]ck/ {if ($2 in last && $3 != last[$2] + 1) {print $2, $3 " comes after " last[$2]; exit} last[$2] = $3}')
    [ -z "$why" ]
}

counts_on() { # counts_on TICKS SECONDS: it counts so many more
    before=$(last_tick)
    serial "guest: tick $((${before:-0} + $1))$(printf '\r')?\$" "$2" && in_order
}

begin() {
    : >$work/history
    in_l2=0 stops=0 downtimes=
    hypervisor "$@" && serial 'guest: tick 3' 240
}

told() { # what the test's line says besides
    note="$stops times, L2 ran in $in_l2"
    [ -z "$downtimes" ] || note="$note; downtime in ms:$downtimes"
}

# l2_moves FROM TO ROUNDS: to TO and back again, by way of a file, with a new VMM each time.
l2_moves() {
    under "$1" && begin || return 1
    here=$1 there=$2 round=0
    while [ $round -lt "$3" ]; do
        monitor 'migrate_set_parameter max-bandwidth 4g'
        monitor 'migrate_set_parameter downtime-limit 2000'
        monitor "migrate file:$work/state"
        limit=$(($(now) + 24000 * ${PATIENCE:-1}))
        until grep -q 'Status: *completed\|Migration status: completed' $work/monitor; do
            [ "$(now)" -lt $limit ] && vmm_up || { why="migration has not ended: $(grep -a 'tatus' $work/monitor | tail -n 1)"; return 1; }
            : >$work/monitor; monitor 'info migrate'; usleep 500000
        done
        cp $work/monitor $work/migrated
        downtimes="$downtimes $(tr -d '\r' <$work/migrated | sed -n 's/^downtime: *\([0-9]*\) ms.*/\1/p' | tail -n 1)"
        [ -z "$VERBOSE" ] || cat $work/migrated
        paused || return 1
        stop_vmm
        cat $work/serial >>$work/history
        under "$there" || return 1
        hypervisor -incoming file:$work/state
        swap=$here here=$there there=$swap round=$((round + 1))
        serial 'guest: tick' 240 && counts_on 5 240 || { why="move $round, to $here: $why"; return 1; }
        rm -f $work/state
        grep -q 'GUEST-USERSPACE' $work/serial && { why="it booted anew"; return 1; }
    done
    told
}
l2_moves_from_vmm_to_vmm() { l2_moves "$(loaded)" "$(loaded)" "$rounds"; }
l2_moves_from_stock_to_gannet_and_back() { l2_moves stock gannet "$rounds"; }
l2_without_npt_moves_from_stock_to_gannet_and_back() { guest_append=kvm=npt=0 l2_moves stock gannet "$rounds"; }
l2s_on_two_cpus_move_from_vmm_to_vmm() { two_l2s "$(loaded)" "$(loaded)"; }
l2s_on_two_cpus_move_from_stock_to_gannet_and_back() { two_l2s stock gannet; }
two_l2s() {
    cpus="-smp 2" l2_moves "$1" "$2" "$rounds" && { grep -q 'guest: tock' $work/serial || { why="the second CPU's guest is silent"; return 1; }; }
}

# The snapshot of a running machine, which goes on for a while and is then put back to it.
l2_is_saved_and_put_back() {
    disk_image
    begin -drive file=$work/disk,format=raw,if=none,id=d -device virtio-blk-pci,drive=d || return 1
    monitor "snapshot_blkdev d $work/overlay.qcow2 qcow2"; usleep 500000
    round=0
    while [ $round -lt "$rounds" ]; do
        round=$((round + 1))
        monitor stop; paused || return 1
        at_save=$(stat -c %s $work/serial)
        monitor "savevm s$round"; : >$work/monitor; monitor 'info snapshots'; answer "s$round " 120 || return 1
        monitor cont; counts_on 4 240 || { why="round $round, saved: $why"; return 1; }
        monitor stop; paused || return 1
        { cat $work/history; head -c "$at_save" $work/serial; } >$work/all
        monitor "loadvm s$round"; monitor "delvm s$round"; : >$work/monitor; monitor 'info status'; answer 'VM status: paused' 120 || return 1
        mv $work/all $work/history
        : >$work/serial
        monitor cont; serial 'guest: tick' 240 && counts_on 4 240 || { why="round $round, put back: $why"; return 1; }
    done
    rm -f $work/overlay.qcow2
    told
}
