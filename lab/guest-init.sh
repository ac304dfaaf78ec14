#!/bin/sh
# /init of the lab's Linux guest: says that user space answers, does the task that `gannet.task=` on the kernel's command line names,
# and resets. Without one it uses processes, memory, timers and interrupts a little.
export PATH=/bin:/usr/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
echo "GANNET-GUEST-USERSPACE cpus=$(nproc) kernel=$(uname -r)"
task=
for word in $(cat /proc/cmdline); do
    case $word in gannet.task=*) task=${word#gannet.task=} ;; esac
done

# The measured task: 200 processes one after the other, each of them a fork, an exec, 64 pages touched and an exit.
if [ "$task" = forks ]; then
    sync
    echo "GANNET-FORKS-BEGIN"
    i=0
    while [ $i -lt 200 ]; do
        /bin/dd if=/dev/zero of=/dev/null bs=256k count=1 2>/dev/null || echo "guest: WRONG end of process $i"
        i=$((i + 1))
    done
    echo "GANNET-FORKS-END processes=$i"
    reboot -f
fi

# Request and response between two tasks, and how late timers are: by the lazy TSC deadline, whose module is loaded and unloaded again,
# where that is offered and unless `gannet.lazy=0`; `gannet.lazy=1` insists on it. With `gannet.hotplug=1` CPUs go and come meanwhile.
if [ "$task" = pingpong ]; then
    lazy= hotplug=0 rounds=8000 sleeps=10000 timeout=2000
    for word in $(cat /proc/cmdline); do
        case $word in
            gannet.lazy=*) lazy=${word#*=} ;;
            gannet.hotplug=*) hotplug=${word#*=} ;;
            gannet.rounds=*) rounds=${word#*=} ;;
            gannet.sleeps=*) sleeps=${word#*=} ;;
            gannet.timeout=*) timeout=${word#*=} ;;
        esac
    done
    counts=/sys/module/lazy_tscdeadline/parameters
    if [ "$lazy" != 0 ]; then
        if insmod /lib/lazy_tscdeadline.ko; then
            echo "guest: lazy TSC deadline"
            lazy=1
        else
            [ "$lazy" = 1 ] && echo "guest: WRONG no lazy TSC deadline"
            lazy=0
        fi
    fi
    if [ $hotplug = 1 ]; then
        (while :; do for on in 0 1; do echo $on >/sys/devices/system/cpu/cpu1/online; usleep 100000; done; done) &
        plugging=$!
    fi
    set_before=$(cat $counts/set 2>/dev/null) written_before=$(cat $counts/written 2>/dev/null)
    /bin/pingpong $rounds $sleeps $timeout || echo "guest: WRONG end of pingpong"
    if [ $lazy = 1 ]; then
        echo "guest: $(($(cat $counts/set) - set_before)) deadlines set, $(($(cat $counts/written) - written_before)) of them written"
    fi
    if [ $hotplug = 1 ]; then
        kill $plugging
        wait
        echo 1 >/sys/devices/system/cpu/cpu1/online
    fi
    # The way into suspend to memory or into the image of a hibernation, down to the last CPU and back.
    if [ $lazy = 1 ] && [ $hotplug = 1 ]; then
        returned=$(cat $counts/returned)
        echo core >/sys/power/pm_test
        echo 1 >/sys/module/suspend/parameters/pm_test_delay
        echo disk >/sys/power/state || echo "guest: WRONG no suspend"
        [ $(($(cat $counts/returned) - returned)) = $(nproc) ] && echo "guest: $(nproc) timers given back for suspend" ||
            echo "guest: WRONG timers given back: $(cat $counts/returned) after $returned"
        set_before=$(cat $counts/set)
        /bin/pingpong 100 100 >/dev/null && [ $(($(cat $counts/set) - set_before)) -gt 100 ] && echo "guest: taken over again" ||
            echo "guest: WRONG timers after suspend: $(cat $counts/set) after $set_before"
    fi
    if [ $lazy = 1 ]; then
        rmmod lazy_tscdeadline || echo "guest: WRONG lazy_tscdeadline stays"
        /bin/pingpong 100 100 >/dev/null && echo "guest: timers work without it" || echo "guest: WRONG timers"
    fi
    echo "guest: $(nproc) CPUs at the end"
    echo "GANNET-PINGPONG-DONE"
    reboot -f
fi

# A C program is built and run, as a file and in memory.
if [ "$task" = compile ]; then
    tcc -o /tmp/program /src/program.c && /tmp/program || echo "guest: WRONG program"
    tcc -run /src/program.c || echo "guest: WRONG program in memory"
    echo "GANNET-COMPILE-DONE"
    reboot -f
fi

# Processes: fork, exec, pipe, wait.
sum=0 i=0
while [ $i -lt 20 ]; do
    sum=$((sum + $(echo $i | cat))) i=$((i + 1))
done
[ $sum = 190 ] && echo "guest: 20 processes came and went" || echo "guest: WRONG sum $sum"
# Memory: what was written is read back.
dd if=/dev/zero of=/tmp/zeros bs=64k count=64 2>/dev/null
[ "$(md5sum </tmp/zeros)" = "$(dd if=/dev/zero bs=64k count=64 2>/dev/null | md5sum)" ] &&
    echo "guest: 4 MiB written and read back" || echo "guest: WRONG memory"
# Time: a timer interrupt wakes a sleeper.
usleep 20000 && echo "guest: slept 20 ms, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
cat /proc/interrupts | grep -E 'CPU|timer|ttyS|LOC|RES' | sed 's/^/guest: /'
echo "guest: done"
reboot -f
