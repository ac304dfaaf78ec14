#!/bin/sh
# /init of the lab's machine (the L1 host): loads the module that the job names, runs its command, sends back what it left in /out
# through the second serial port, or the emulator's debug port where the machine has one, and powers off.
export PATH=/bin HOME=/
if [ -x /bin/debug-port ] && [ -z "$ON_PORT" ]; then
    export ON_PORT=1
    /bin/sh /init 2>&1 | /bin/debug-port
    /bin/busybox poweroff -f
fi
[ -z "$ON_PORT" ] || printf '\001GANNET-CONSOLE\n'
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
mount -t debugfs none /sys/kernel/debug 2>/dev/null
mkdir -p /out /tmp
# A break on the console, by which a silent machine is tapped, is no text.
[ ! -c /dev/ttyS0 ] || stty -F /dev/ttyS0 -echo 2>/dev/null
echo '<6>gannet-lab: the job starts' >/dev/kmsg
# It is asked at the end; by itself it would look every ten minutes.
[ ! -w /sys/kernel/debug/kmemleak ] || echo scan=off >/sys/kernel/debug/kmemleak
MODULES= PARAMETERS= PULSE=
. /job/settings

# From the first CPU of the machine a task goes to the second, and from the second to the first, every two seconds: the interrupt by which
# it is woken there makes a CPU look at its local APIC again that has lost its timer's (docs/lab.md). A tap from outside comes to one CPU.
pulse() { # pulse FROM TO
    # A CPU may be away for a while.
    while :; do taskset -c "$1" sleep 2 || sleep 2; taskset -c "$2" true; done
}
[ -z "$PULSE" ] || { pulse 0 1 2>/dev/null & pulse 1 0 2>/dev/null & }

load() { # every module of the list; MODULE.NAME=VALUE goes to that module, NAME=VALUE to the first that has it, or to the last
    while [ $# -gt 0 ]; do
        own= others= name=${1##*/}
        for parameter in $PARAMETERS; do
            case "$parameter" in
            "$name".*) own="$own ${parameter#"$name".}" ;;
            *.*=*) others="$others $parameter" ;;
            *) if [ $# = 1 ] || grep -q "parm\(type\)\?=${parameter%%=*}:" "/modules/$1.ko"; then own="$own $parameter"
               else others="$others $parameter"; fi ;;
            esac
        done
        PARAMETERS=$others
        insmod "/modules/$1.ko" $own || return 1
        shift
    done
    # The kernel loads a module that does not have a parameter all the same. Here that counts as refused.
    ! dmesg | grep -q "unknown parameter '.*' ignored"
}

if load $MODULES; then
    echo 0 >/out/.loaded
    sh /job/command
    echo $? >/out/.status
else
    echo 1 >/out/.loaded
    dmesg | tail -n 20
fi
# A debug kernel tells what nobody points to any more, of what is older than five seconds; the first look alone is not enough. The log
# takes short lines, and few of them. It is asked when the module is gone, and with it all that it points to, and once, for a look takes
# long: the functions in the reports are then numbers, which the module's place gives names. It cannot go while somebody still holds a VM.
leaks=/sys/kernel/debug/kmemleak
look_for_leaks() {
    sleep 6
    echo scan >$leaks && echo scan >$leaks
    cat $leaks >/tmp/kmemleak
    count=$(grep -c 'unreferenced object' /tmp/kmemleak)
    { [ -z "$text" ] || echo "gannet.ko's .text was at $text"; cat /tmp/kmemleak; } >/out/kmemleak
    [ "$count" = 0 ] && return
    head -n 60 /out/kmemleak
    echo "<4>kmemleak: $count times: unreferenced object" >/dev/kmsg
}
if [ -w $leaks ]; then
    text=
    if [ -d /sys/module/gannet ]; then
        text=$(cat /sys/module/gannet/sections/.text)
        rmmod gannet || echo '<4>BUG: gannet is held by something that is gone' >/dev/kmsg
    fi
    look_for_leaks
fi
# What it has found once it looks for no more.
if grep -q 'debug_locks: *0' /proc/lockdep_stats 2>/dev/null; then echo '<4>BUG: lockdep has switched itself off' >/dev/kmsg; fi
dmesg >/out/.dmesg
cd /out
send() {
    for file in .loaded .status .dmesg *; do
        [ -f "$file" ] || continue
        echo "FILE $file $(stat -c %s "$file")"
        cat "$file"
    done
}
if [ -n "$ON_PORT" ]; then
    printf '\001GANNET-FILES\n'
    send
    exit
fi
stty -F /dev/ttyS1 raw -echo
send >/dev/ttyS1
poweroff -f
