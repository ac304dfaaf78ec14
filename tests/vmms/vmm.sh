# vmm.sh: read by scripts that run inside the machine: a VMM in the background, its serial port and its monitor.
work=/tmp/vmm
qemu_binary=/vmm/qemu-system-x86_64
append="console=ttyS0 quiet mitigations=off panic=-1"
mkdir -p $work
echo 1 >/proc/sys/vm/overcommit_memory # a guest may be larger than this machine; it touches little

now() { # hundredths of a second since boot
    read -r up _ </proc/uptime
    echo "${up%.*}${up#*.}"
}

# --- a QEMU in the background: serial port in $work/serial, monitor behind two pipes --------------------------------------------

vmm_up() { kill -0 "$vmm" 2>/dev/null; }

# start ARGUMENTS...: QEMU with 128 MiB, the host's CPU, no devices but these.
start() {
    rm -f $work/mon.in $work/mon.out $work/serial.old
    mkfifo $work/mon.in $work/mon.out
    : >$work/serial
    : >$work/monitor
    $qemu_binary -L /vmm/share -accel "$accel" -cpu host -m 128 -nodefaults -no-user-config -display none \
        -chardev file,id=serial,path=$work/serial,append=on -serial chardev:serial -chardev pipe,id=mon,path=$work/mon -mon chardev=mon,mode=readline "$@" >$work/stdout 2>$work/stderr &
    vmm=$!
    cat $work/mon.out >>$work/monitor 2>/dev/null &
    reader=$!
    exec 3<>$work/mon.in
}
accel=kvm

# linux ARGUMENTS...: the same with the guest's uncompressed kernel, which must lead in $guest_append.
linux() { start -no-reboot -kernel /guest/vmlinux -initrd /guest/initramfs -append "$append $guest_append" "$@"; }

monitor() { echo "$*" >&3; }

# expect FILE PATTERN SECONDS: waits for it; 1 when the VMM ended without it or time is over. On a busy machine PATIENCE=5 waits five times as long.
expect() {
    limit=$(($(now) + $3 * 100 * ${PATIENCE:-1}))
    while :; do
        grep -qE "$2" $work/$1 && return 0
        if ! vmm_up; then
            grep -qE "$2" $work/$1 && return 0
            why="the VMM ended without '$2'"; return 1
        fi
        [ "$(now)" -lt $limit ] || { why="no '$2' within $3 s"; return 1; }
        usleep 100000
    done
}
serial() { expect serial "$1" "${2:-60}"; }
answer() { expect monitor "$1" "${2:-20}"; }

# ended SECONDS: waits until the VMM ends by itself.
ended() {
    limit=$(($(now) + $1 * 100 * ${PATIENCE:-1}))
    while vmm_up; do
        [ "$(now)" -lt $limit ] || { why="the VMM has not ended within $1 s"; return 1; }
        usleep 100000
    done
    wait "$vmm"
    status=$?
    [ $status = 0 ] || { why="the VMM ended with status $status"; return 1; }
}

stop_vmm() {
    kill -9 "$vmm" 2>/dev/null
    wait "$vmm" 2>/dev/null
    exec 3>&-
    kill "$reader" 2>/dev/null
    wait "$reader" 2>/dev/null
}

right() { # nothing in the serial log says WRONG
    if grep -q WRONG $work/serial; then why=$(grep -m1 WRONG $work/serial); return 1; fi
}
