#!/bin/sh
# run.sh [TEST...]: runs inside the machine; real VMMs on whatever /dev/kvm is loaded. One `ok` or `FAIL` line per test with its time in
# seconds, and at the end `N passed, N failed`. Without names: every test.
. /vmm/vmm.sh
passed=0 failed=0

# --- the tests ------------------------------------------------------------------------------------------------------------------

# Firmware alone, in real and protected mode, to its last message.
firmware() {
    start -M "$1,graphics=off" $2 && serial 'No bootable device' 60
}
firmware_on_pc() { firmware pc; }
firmware_on_q35() { firmware q35; }
# The firmware moves SMBASE by an SMI and waits for what its handler, in SMRAM that only it sees, has to say.
firmware_with_smm() {
    firmware q35,smm=on "-smp 2" || return 1
    for i in 1 2 3 4 5; do monitor 'o /b 0xb2 0'; done
    usleep 500000
    monitor 'info status' && answer 'VM status: running'
}
linux_with_smm() { guest_append=job=plain linux -M q35,smm=on -smp 2 && booted 2 && both_cpus; }
linux_without_smm() { guest_append=job=plain linux -M q35,smm=off && booted 1; }
firmware_with_two_cpus() { firmware pc "-smp 2"; }

booted() { # booted CPUS: the guest's user space answered, worked, and ended the VMM
    serial "GUEST-USERSPACE cpus=$1 " "${2:-90}" && serial 'guest: done' 60 && ended 30 && right
}
linux_on_pc() { guest_append=job=plain linux -M pc && booted 1; }
linux_on_pc_with_two_cpus() { guest_append=job=plain linux -M pc -smp 2 && booted 2 && both_cpus; }
linux_on_pc_with_four_cpus() { guest_append=job=plain linux -M pc -smp 4 && booted 4 120; }
both_cpus() { grep -q 'cpu 1 works' $work/serial || { why="cpu 1 does not work"; return 1; }; }
linux_on_q35() { guest_append=job=plain linux -M q35 && booted 1; }
linux_on_q35_with_two_cpus() { guest_append=job=plain linux -M q35 -smp 2 && booted 2 && both_cpus; }
linux_on_microvm() { # no PCI, no ACPI: the leanest machine
    accel=kvm,kernel-irqchip=on; microvm
}
linux_on_microvm_with_irqchip_split() { accel=kvm,kernel-irqchip=split; microvm; }
microvm() {
    guest_append=job=plain linux -M microvm,acpi=off,isa-serial=on,rtc=on -bios bios-microvm.bin && serial "GUEST-USERSPACE cpus=1 " 90 &&
        serial 'guest: done' 60 && right
}
linux_knows_where_it_is() { # paravirtual clock and hypercalls are found
    guest_append=job=plain linux -M pc && serial 'guest: done' 90 && right &&
        { grep -q 'Hypervisor detected: KVM' $work/serial || { why="the guest sees no KVM"; return 1; }; } &&
        { grep -q 'guest: clock kvm-clock\|guest: clock tsc' $work/serial || { why=$(grep 'guest: clock' $work/serial); return 1; }; }
}
linux_from_bzimage() { # the option ROM's way: real mode, decompression, 32 to 64 bit
    guest_append= start -no-reboot -M pc -kernel /guest/vmlinuz -initrd /guest/initramfs -append "$append job=plain" && booted 1 200
}
linux_with_old_interrupts() { # PIC and PIT alone
    guest_append="job=plain noapic nolapic clocksource=pit" linux -M pc,acpi=off && booted 1
}
linux_with_x2apic_off() { guest_append="job=plain nox2apic" linux -M pc -smp 2 && booted 2; }
linux_on_a_named_cpu() { guest_append=job=plain linux -M pc -cpu qemu64 && booted 1; }
linux_above_four_gib() { guest_append=job=plain linux -M pc -m 4608 && booted 1 150; }
linux_with_irqchip_split() { accel=kvm,kernel-irqchip=split; guest_append=job=plain linux -M q35 && booted 1; }
all_cpus_busy() { guest_append=job=busy linux -M pc -smp 2 && serial 'all CPUs computed the same' 150 && ended 30 && right; }
powers_off() { guest_append="job=true ending=poweroff" linux -M pc && serial 'guest: done' 90 && ended 30; }

disk_image() { dd if=/dev/zero of=$work/disk bs=1M count=16 2>/dev/null; }
disk_on_pc() {
    disk_image
    guest_append=job=disk linux -M pc -drive file=$work/disk,format=raw,if=none,id=d -device virtio-blk-pci,drive=d && booted 1 &&
        { grep -q 'disk holds what was written' $work/serial || { why="no answer from the disk"; return 1; }; }
}
disk_on_q35_with_a_thread() {
    disk_image
    guest_append=job=disk linux -M q35 -smp 2 -object iothread,id=t -drive file=$work/disk,format=raw,if=none,id=d \
        -device virtio-blk-pci,drive=d,iothread=t,num-queues=2 && booted 2
}
disk_with_line_interrupts() { # no MSI-X: level-triggered line, resampling
    disk_image
    guest_append="job=disk pci=nomsi" linux -M pc -drive file=$work/disk,format=raw,if=none,id=d -device virtio-blk-pci,drive=d && booted 1
}
disk_without_ioeventfd() {
    disk_image
    guest_append=job=disk linux -M pc -drive file=$work/disk,format=raw,if=none,id=d -device virtio-blk-pci,drive=d,ioeventfd=off && booted 1
}
network() {
    guest_append=job=net linux -M pc -netdev user,id=n -device virtio-net-pci,netdev=n,romfile= && booted 1 &&
        { grep -q 'gateway answers' $work/serial || { why="no answer from the gateway"; return 1; }; }
}

counting() { guest_append=job=count linux -M pc "$@" && serial 'guest: tick 5' 90; }
last_tick() { grep 'guest: tick' $work/serial | tail -n 1 | tr -d '\r' | sed 's/.* //'; }
ticks_on() { # the count grows
    before=$(last_tick)
    serial "guest: tick $((before + 5))" 30 && right
}
registers_are_shown() {
    counting -smp 2 || return 1
    monitor 'info kvm'; answer 'kvm support: enabled' || return 1
    monitor 'info registers -a'; answer 'CPU#1' && answer 'EFER=0000000000000d01' && ticks_on
}
stops_and_continues() {
    counting || return 1
    monitor stop; monitor 'info status'; answer 'VM status: paused' || return 1
    sleep 1; before=$(last_tick); sleep 1
    [ "$(last_tick)" = "$before" ] || { why="it counts although stopped"; return 1; }
    monitor cont; ticks_on
}
is_reset() { # from outside, twice; with -no-reboot a reset would end the VMM, so boot without it
    start -M pc -kernel /guest/vmlinux -initrd /guest/initramfs -append "$append job=count" -smp 2 && serial 'guest: tick 5' 90 || return 1
    for round in 1 2; do
        cp $work/serial $work/serial.old; : >$work/serial
        monitor system_reset; serial 'GUEST-USERSPACE cpus=2' 90 && serial 'guest: tick 5' 30 || { why="after reset: $why"; return 1; }
    done
}
resets_itself() { # reboot from the guest: the keyboard controller or ACPI, then firmware again
    start -M pc -kernel /guest/vmlinux -initrd /guest/initramfs -append "$append job=plain" -smp 2 && serial 'guest: done' 90 || return 1
    limit=$(($(now) + 9000))
    while [ "$(grep -c GUEST-USERSPACE $work/serial)" -lt 2 ]; do
        vmm_up && [ "$(now)" -lt $limit ] || { why="no second boot"; return 1; }
        usleep 200000
    done
}
nmi_arrives() { counting && monitor nmi && serial 'NMI received' 20 && ticks_on; }
power_button_is_seen() { # ACPI's SCI: an interrupt line with its own polarity
    guest_append="job=count" linux -M pc && serial 'guest: tick 5' 90 || return 1
    monitor system_powerdown; ticks_on
}
migrates_to_a_file() {
    counting -smp 2 || return 1
    monitor 'migrate_set_parameter max-bandwidth 1g'
    monitor "migrate file:$work/state"
    limit=$(($(now) + 6000))
    until grep -q 'Status:.*completed\|Migration status: completed' $work/monitor; do
        [ "$(now)" -lt $limit ] && vmm_up || { why="migration has not ended: $(grep -a 'tatus' $work/monitor | tail -n 1)"; return 1; }
        monitor 'info migrate'; usleep 500000
    done
    before=$(last_tick)
    cp $work/serial $work/serial.old
    stop_vmm
    guest_append=job=count linux -M pc -smp 2 -incoming file:$work/state && serial "guest: tick $((before + 10))" 60 || return 1
    rm -f $work/state
    grep -q 'GUEST-USERSPACE' $work/serial && { why="it booted anew"; return 1; }
    right
}
saves_and_loads() { # into a qcow2 image: the snapshot of the drive, then savevm and loadvm in one VMM
    disk_image
    counting -drive file=$work/disk,format=raw,if=none,id=d -device virtio-blk-pci,drive=d || return 1
    monitor "snapshot_blkdev d $work/overlay.qcow2 qcow2"; usleep 500000
    monitor 'savevm one'; monitor 'info snapshots'; answer 'one ' 60 || { rm -f $work/overlay.qcow2; return 1; }
    saved=$(last_tick)
    ticks_on && ticks_on && monitor 'loadvm one' && : >$work/serial && ticks_after_load
    result=$?
    rm -f $work/overlay.qcow2
    return $result
}
ticks_after_load() { serial "guest: tick $((saved + 4))$(printf '\r')?\$" 30 && ticks_on; }
screen_follows() { # the standard VGA: its memory is logged for dirty pages, text goes through the legacy window
    append_was=$append
    append="console=tty0 console=ttyS0 panic=-1 mitigations=off"
    guest_append=job=count linux -M pc -device VGA
    append=$append_was
    serial 'guest: tick 2' 120 || return 1
    monitor "screendump $work/one.ppm"; sleep 1
    ticks_on || return 1
    monitor "screendump $work/two.ppm"; sleep 1
    lit=$(tr -d '\000' <$work/one.ppm | wc -c)
    [ "$lit" -gt 1000 ] || { why="the screen is dark ($lit bytes lit)"; return 1; }
    if cmp -s $work/one.ppm $work/two.ppm; then why="the screen stands still"; return 1; fi
}
framebuffer_follows() { # a linear framebuffer, drawn by the guest, with the log read by QEMU's display
    append_was=$append
    append="console=tty0 console=ttyS0 panic=-1 mitigations=off"
    start -no-reboot -M pc -device VGA -kernel /guest/vmlinuz -initrd /guest/initramfs -append "$append job=count vga=0x314"
    append=$append_was
    serial 'guest: tick 2' 200 || return 1
    monitor "screendump $work/one.ppm"; sleep 1
    ticks_on || return 1
    monitor "screendump $work/two.ppm"; sleep 1
    head -c 15 $work/one.ppm | grep -q '800 600' || { why="not in 800x600: $(head -c 11 $work/one.ppm | tr '\n' ' ')"; return 1; }
    if cmp -s $work/one.ppm $work/two.ppm; then why="the screen stands still"; return 1; fi
}
dies_without_a_trace() { # killed while its CPUs run
    for after in 1 2 3; do
        guest_append=job=busy linux -M pc -smp 2
        sleep $after
        stop_vmm
    done
    why="the VMM did not die"
    ! vmm_up
}
alioth_boots() { # a VMM in Rust; it wants a terminal, any terminal
    [ -x /vmm/alioth ] || return 77
    (/vmm/alioth boot -k /guest/vmlinuz -i /guest/initramfs -c "$append job=plain" --memory size=128M --cpu count=${1:-1} </dev/tty5 >$work/serial 2>$work/stderr) &
    vmm=$!
    exec 3>/dev/null; reader=$vmm
    serial "GUEST-USERSPACE cpus=${1:-1} " 150 && serial 'guest: done' 60 && right
}
alioth_boots_two_cpus() { alioth_boots 2; }

alioth_disk() { # its queues are eventfds, its interrupts MSI through irqfd
    [ -x /vmm/alioth ] || return 77
    disk_image
    (/vmm/alioth boot -k /guest/vmlinuz -i /guest/initramfs -c "$append job=disk" --memory size=128M --cpu count=2 \
        --blk file,path=$work/disk,api=mio </dev/tty5 >$work/serial 2>$work/stderr) &
    vmm=$!
    exec 3>/dev/null; reader=$vmm
    serial 'disk holds what was written' 150 && serial 'guest: done' 60 && right
}

# --- a debugger on the guest: the remote protocol by hand -------------------------------------------------------------------------

debugger() { # debugger COMMAND: sends a packet
    text=$1 sum=0
    while [ -n "$text" ]; do
        rest=${text#?}
        sum=$(((sum + $(printf '%d' "'${text%"$rest"}")) & 255)) text=$rest
    done
    printf '$%s#%02x' "$1" $sum >&4
}
debugger_says() { # debugger_says PATTERN TIMES: the answers so far have it so often
    limit=$(($(now) + 2000))
    until [ "$(grep -ao "$1" $work/debugger | wc -l)" -ge "$2" ]; do
        vmm_up && [ "$(now)" -lt $limit ] || { why="the debugger got no $1 number $2: $(tail -c 200 $work/debugger)"; return 1; }
        usleep 100000
    done
}
debug_guest() { # debug_guest Z0|Z1: a breakpoint in the kernel is met, three single steps go on from there, without it the guest runs
    counting || return 1
    address=$(grep -m1 'symbol do_nanosleep' $work/serial | tr -d '\r' | sed 's/.* //')
    [ -n "$address" ] || { why="the guest names no address"; return 1; }
    ifconfig lo 127.0.0.1 up
    monitor 'gdbserver tcp:127.0.0.1:1234'; answer 'Waiting for gdb connection' || return 1
    rm -f $work/debugger.in; mkfifo $work/debugger.in; : >$work/debugger
    exec 4<>$work/debugger.in
    nc 127.0.0.1 1234 <$work/debugger.in >$work/debugger &
    debugger '?'; debugger_says T05 1 || return 1
    debugger "$1,$address,1"; debugger_says OK 1 || return 1
    debugger c; debugger_says T05 2 || return 1
    for step in 3 4 5; do debugger s; debugger_says T05 $step || return 1; done
    debugger c; debugger_says T05 6 || return 1 # met again
    debugger "z${1#Z},$address,1"; debugger_says OK 2 || return 1
    before=$(last_tick)
    debugger c
    serial "guest: tick $((before + 5))" 30; result=$?
    exec 4>&-
    return $result
}
debugger_with_planted_breakpoint() { debug_guest Z0; } # not in the list: the emulator delivers INT3 past the host's intercept
debugger_with_debug_register() { debug_guest Z1; }

. /vmm/moves.sh

every_test="firmware_on_pc firmware_on_q35 firmware_with_two_cpus firmware_with_smm linux_with_smm linux_without_smm
linux_on_pc linux_on_pc_with_two_cpus linux_on_q35 linux_on_q35_with_two_cpus linux_on_pc_with_four_cpus linux_on_microvm
linux_knows_where_it_is linux_from_bzimage linux_with_old_interrupts linux_with_x2apic_off linux_on_a_named_cpu linux_above_four_gib
linux_with_irqchip_split linux_on_microvm_with_irqchip_split all_cpus_busy powers_off
disk_on_pc disk_on_q35_with_a_thread disk_with_line_interrupts disk_without_ioeventfd network
registers_are_shown stops_and_continues is_reset resets_itself nmi_arrives power_button_is_seen
migrates_to_a_file saves_and_loads screen_follows framebuffer_follows dies_without_a_trace alioth_boots alioth_boots_two_cpus alioth_disk
debugger_with_debug_register"

# --- running them ---------------------------------------------------------------------------------------------------------------

for name in ${*:-$every_test}; do
    why= note= guest_append= cpus= accel=kvm vmm=999999 reader=999999
    began=$(now)
    $name
    result=$?
    took=$(($(now) - began))
    if [ $result = 1 ] && vmm_up; then # where it hangs
        for question in "info status" "info registers -a" "info lapic 0" "info lapic 1" "info pic" "x/8i \$eip"; do monitor "$question" & usleep 300000; done
    fi
    seconds=$((took / 100)).$(printf '%02d' $((took % 100)))
    stop_vmm
    if [ $result = 0 ]; then
        passed=$((passed + 1))
        echo "ok $name ($seconds s)${note:+: $note}"
        [ -z "$VERBOSE" ] || sed 's/^/    /' $work/serial
    elif [ $result = 77 ]; then
        echo "skip $name: its VMM is not here"
    elif grep -qi 'split.irqchip' $work/stderr 2>/dev/null; then
        echo "skip $name: it needs KVM_CAP_SPLIT_IRQCHIP"
    else
        failed=$((failed + 1))
        echo "FAIL $name: ${why:-no reason} ($seconds s)"
        for part in stdout stderr serial monitor; do
            [ -s $work/$part ] && { echo "  $part:"; tail -n ${SHOWN:-25} $work/$part | tr -d '\r' | cut -c1-200 | sed 's/^/    /'; }
        done
    fi
done
echo "$passed passed, $failed failed"
