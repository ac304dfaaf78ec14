#!/bin/bash
# migrate.sh [linux|l2]: two emulated AMD hosts on a wire, between which QEMU moves a running guest, back and forth, from stock KVM to Gannet and
# back, and between two of the same. `linux` has two CPUs, computes, writes to a disk that both hosts reach, sends packets and watches its clocks; `l2` is
# a hypervisor with Debian's own KVM, whose guest counts and looks after its memory. Prints a table. ROUNDS=25 is how often it goes each way.
# With BY=libvirt both hosts are Debian 12 with libvirt and its QEMU (libvirt-root.sh), and `virsh migrate --live` moves `linux`.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
lab=$root/target/lab
folder=${FOLDER:-$root/target/vmms}/wire
rounds=${ROUNDS:-25}
by=${BY:-qemu} kinds="linux l2"
[ $by = qemu ] || kinds=linux
rm -rf "$folder"
mkdir -p "$folder"
FOLDER=$folder sh "$here/gather.sh" "$folder/tree"
cp "$here/host.sh" "$folder/tree/vmm/"
[ $by = qemu ] || bash "$here/libvirt-root.sh" "$folder" || exit 1
pack() { (cd "$1" && find . | "$lab/busybox/bin/busybox" cpio -o -H newc 2>/dev/null); }

# image HOST: what the host boots from, where QEMU moves the guest.
image() {
    local host=$1 beside=$folder/beside-$1
    mkdir -p "$beside/bin" "$beside/proc" "$beside/sys" "$beside/dev" "$beside/tmp" "$beside/modules"
    cp "$lab/busybox/bin/busybox" "$beside/bin/"
    ln -sf busybox "$beside/bin/sh"
    cp "$lab/kernel/6.12/modules/"*.ko "$beside/modules/"
    cp "${GANNET_KO:-$lab/module/6.12/gannet.ko}" "$beside/modules/gannet.ko"
    cat >"$beside/init" <<INIT
#!/bin/sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
for m in irqbypass kvm ccp kvm-amd; do insmod /modules/\$m.ko; done
number=$host PATIENCE=${PATIENCE:-5}
. /vmm/host.sh
INIT
    chmod +x "$beside/init"
    { pack "$folder/tree"; pack "$beside"; } >"$folder/image-$host"
}

# up HOST: host 1 or 2 runs and answers.
up() {
    local host=$1 append boot
    if [ $by = libvirt ]; then
        boot=(-kernel "$folder/vmlinuz" -initrd "$folder/initrd" -drive "file=$folder/system,format=raw,if=none,id=s,snapshot=on" -device virtio-blk-pci,drive=s)
        append="root=/dev/vda rw init=/vmm/libvirt-host.sh host=$host net.ifnames=0"
    else
        image "$host"
        boot=(-kernel "$lab/kernel/6.12/vmlinux" -initrd "$folder/image-$host")
    fi
    rm -f "$folder/control-$host".* "$folder/monitor-$host".*
    mkfifo "$folder/control-$host".{in,out} "$folder/monitor-$host".{in,out}
    # The emulator loses a wake-up now and then; a key that means nothing wakes the machine.
    (while sleep 2; do echo 'sendkey shift' >&8; done 8<>"$folder/monitor-$host.in") >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- &
    pids+=($!)
    cat <>"$folder/monitor-$host.out" >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- &
    pids+=($!)
    local wire=stream,id=w,addr.type=unix,addr.path=$folder/wire
    [ "$host" = 1 ] && wire=$wire,server=on
    "$lab/bin/qemu" -accel tcg,thread=single -machine q35 -cpu EPYC,+svm,+npt,+x2apic -m 1024 -smp 1 -nodefaults -no-user-config -display none \
        -serial "file:$folder/console-$host" -chardev "pipe,id=c,path=$folder/control-$host" -serial chardev:c -no-reboot \
        -chardev "pipe,id=m,path=$folder/monitor-$host" -mon chardev=m,mode=readline \
        "${boot[@]}" -netdev "$wire" -device "virtio-net-pci,netdev=w,mac=52:54:00:00:00:0$host,romfile=" \
        -drive "file=$folder/disk,format=raw,if=none,id=d,file.locking=off" -device virtio-blk-pci,drive=d,share-rw=on \
        -append "console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 random.trust_cpu=on \
        tsc_early_khz=$khz ${append:-}" </dev/null >"$folder/emulator-$host" 2>&1 &
    pids+=($!)
    case $host in
        1) exec 3<>"$folder/control-1.in" 4<>"$folder/control-1.out" ;;
        2) exec 5<>"$folder/control-2.in" 6<>"$folder/control-2.out" ;;
    esac
    answer "$host" >/dev/null || { echo "host $host does not come up"; return 1; }
}

# answer HOST: its answer to the last line, and whether it succeeded.
answer() {
    local line
    while read -r -t 1200 -u $((2 + 2 * $1)) line; do
        line=${line%$'\r'}
        case $line in '=DONE 0') return 0 ;; '=DONE '*) return 1 ;; *) printf '%s\n' "$line" ;; esac
    done
    echo "WRONG: host $1 says nothing"
    return 1
}
on() { # on HOST COMMAND
    echo "$2" >&$((1 + 2 * $1))
    answer "$1"
}
down() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; done
    exec 3>&- 4>&- 5>&- 6>&-
    pids=()
}

serial_of() { on "$1" 'base64 $work/serial; : >$work/serial' | base64 -d | tr -d '\r' >>"$folder/history"; }

# chain KIND MODULE1 MODULE2 MOVES: the guest begins on host 1 and moves so often.
chain() {
    local kind=$1 modules=([1]=$2 [2]=$3) moves=$4 here=1 there=2 move pair swap
    truncate -s 16M "$folder/disk"
    : >"$folder/history"
    rm -f "$folder"/downtime.* "$folder"/in_l2.*
    up 1 && up 2 || return 1
    on 1 "under ${modules[1]}" && on 2 "under ${modules[2]}" && on 1 listen || return 1
    # libvirt reckons a move's downtime by the clocks of both hosts, which began with whole seconds.
    [ $by = qemu ] || { on 1 daemon && on 2 daemon && on 1 "date -s @$(date +%s.%N)" && on 2 "date -s @$(date +%s.%N)"; } || return 1
    on 1 "guest $kind" || return 1
    on 1 "serial 'guest: (clocks|tick) 5' 240" || { on 1 'cat $work/serial'; return 1; }
    for move in $(seq "$moves"); do
        [ $by = libvirt ] || on $there "guest $kind -incoming tcp:0:4444; monitor 'info status'; answer inmigrate 60" || return 1
        on $here "leave 10.0.0.$there" >"$folder/leave" || { cat "$folder/leave"; on $there 'cat $work/stderr'; return 1; }
        pair=${modules[here]}-${modules[there]}
        tr -d ' ' <"$folder/leave" | sed -n 's/^downtime:\([0-9]*\)ms.*/\1/p' | tail -n 1 >>"$folder/downtime.$pair"
        sed -n 's/in L2: //p' "$folder/leave" >"$folder/in_l2.$here"
        serial_of $here
        on $there "moved_in" || return 1
        swap=$here here=$there there=$swap
        sleep "${PAUSE:-2}"
    done
    sleep 2
    on $here 'monitor stop; usleep 500000' >/dev/null
    serial_of $here
    on 1 'base64 $work/stream' | base64 -d >"$folder/stream"
    for host in 1 2; do
        on $host 'stop_vmm; sleep 1; under stock' || { echo "host $host: its module does not go"; return 1; }
        on $host '! dmesg | grep -E "WARNING|BUG|Oops|general protection|Call Trace|RIP:|soft lockup|rcu.*stall|page allocation"' || { echo "host $host says nothing, or its log is not clean"; return 1; }
    done
    down
    verify "$kind"
}

# verify KIND: what the guest said, at both hosts, in its order.
verify() {
    local bad
    grep -a WRONG "$folder/history" "$folder/stream" && return 1
    case $1 in
        linux)
            for log in history stream; do
                # Ten lines a second, and two seconds at least on each host: a guest whose clocks or whose TCP stopped has fewer.
                [ "$(grep -a -c '^guest: clocks' "$folder/$log")" -ge $((10 * moves)) ] || { echo "$log: too few ticks for $moves moves"; return 1; }
                bad=$(grep -a '^guest: clocks' "$folder/$log" | sed '$d' | awk '{if (seen && $3 != last + 1) {print $3 " comes after " last; exit} seen = 1; last = $3}')
                [ -z "$bad" ] || { echo "$log: $bad"; return 1; }
            done
            # Each piece of the disk is what was last said to be written to it; one more may have been underway.
            grep -a '^guest: disk' "$folder/history" | awk '{sum[$4] = $5} END {for (piece in sum) print piece, sum[piece]}' >"$folder/pieces"
            bad=0
            while read -r piece sum; do
                [ "$(dd if="$folder/disk" bs=64k skip="$piece" count=1 status=none | md5sum | cut -d' ' -f1)" = "$sum" ] || bad=$((bad + 1))
            done <"$folder/pieces"
            [ "$(wc -l <"$folder/pieces")" -ge 2 ] || { echo "the disk was hardly written to"; return 1; }
            [ $bad -le 1 ] || { echo "$bad pieces of the disk are not what was written"; return 1; } ;;
        l2)
            bad=$(grep -a '^guest: tick' "$folder/history" | sed '$d' | awk '{if (seen && $3 != last + 1) {print $3 " comes after " last; exit} seen = 1; last = $3}')
            [ -z "$bad" ] || { echo "$bad"; return 1; } ;;
    esac
}

spread() { sort -n | awk '{v[NR] = $1} END {if (NR) print NR " | " v[1] " / " v[int((NR + 1) / 2)] " / " v[NR]}'; }
checked() {
    case $1 in
        linux)
            awk '/clocks/ {n++; if ($NF > longest) longest = $NF; boot = $7; day = $9; if (!b) {b = boot; d = day}}
                END {printf "%d ticks of %d s on the console and by TCP, longest stop seen %d ms, the day %d ms beside the boot", n, (boot - b) / 1000, longest / 1000, (day - d) - (boot - b)}' "$folder/stream"
            grep -a '^guest: disk' "$folder/history" | awk 'END {printf ", %d pieces of the disk", NR}'
            awk '/^guest: ping/ {sent += $3; got += $4} END {printf ", %d of %d pings lost", sent - got, sent}' "$folder/history" ;;
        l2) grep -a '^guest: tick' "$folder/history" | awk 'END {printf "%d rounds of L2", NR}'; cat "$folder"/in_l2.* | awk '{n += $1} END {printf ", which ran in the instant of %d moves", n}' ;;
    esac
}

trap 'down 2>/dev/null' EXIT
declare -a pids
# The emulator's time-stamp counter is this machine's, and a kernel that has to find its frequency under load finds a wrong one.
khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
failed=0
echo '| guest | pair | rounds | downtime in ms: least / median / most | checked |'
echo '|---|---|---:|---|---|'
for kind in ${*:-$kinds}; do
    for pair in ${PAIRS:-stock-stock gannet-gannet stock-gannet}; do
        moves=$rounds
        [ "${pair%-*}" = "${pair#*-}" ] || moves=$((2 * rounds))
        if chain $kind "${pair%-*}" "${pair#*-}" $moves >"$folder/said" 2>&1; then
            for file in "$folder"/downtime.*; do echo "| $kind, by $by | ${file##*.} | $(spread <"$file") | $(checked $kind) |"; done
        else
            failed=$((failed + 1))
            echo "not ok $kind $pair: $(tail -n 40 "$folder/said")"
            cp -r "$folder/history" "$folder/failed-$kind-$pair" 2>/dev/null
        fi
        down 2>/dev/null
    done
done
echo "$failed failed"
[ $failed = 0 ]
