#!/bin/bash
# The operator's whole path in one run: a Debian 12 with systemd, libvirt, perf and kernel 6.12 from backports boots in the emulated AMD machine; there,
# `apt install ./gannet-dkms_*.deb`, which has DKMS compile under emulation, reboot, `virsh start`, `perf kvm stat`, `apt remove`, reboot. With KERNEL=7.3 it
# is a Debian 13, and that kernel is from its backports. What was typed and what it said is in operator.log in target/lab/operator-test, or
# operator-test-7.3; what is typed, in operator-init.sh.
#
#   make deb && tests/package/operator.sh           # ten minutes, root, 4 GB in target/lab/operator-test, 350 MB of downloads the first time
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=$checkout/target/lab
. "$checkout/tests/debian.sh"
deb=$(ls "$lab"/gannet-dkms_*_amd64.deb)
kernel=${KERNEL:-6.12} suffix=
debian=$(debian_of "$kernel")
[ "$kernel" = 6.12 ] || suffix=-$kernel
# The guest's kernel is 6.12 on both.
"$checkout/lab/bootstrap.sh" qemu kernel-6.12 "kernel-$kernel" busybox
release=$(cat "$lab/kernel/$kernel/release")
# The machine has no network: what the package needs (DKMS, the kernel's headers) is there before.
libvirt_root "$lab/operator-test$suffix" "$debian" "$release"

sh "$checkout/tests/vmms/gather.sh" "$work/gathered"
rm -rf "$root"/{guest,vmm,net,modules} "$root"/root/*
mkdir -p "$root/guest"
cp "$work"/gathered/guest/{vmlinuz,initramfs} "$root/guest/"
sed 's|/tmp/serial.log|/var/lib/libvirt/images/serial.log|' "$checkout/tests/tools/domain.xml" >"$root/guest/domain.xml"
cp "$deb" "$root/root/"
install -m 755 "$here/operator-init.sh" "$root/usr/local/sbin/operator"
units=$root/etc/systemd/system
cat >"$units/operator.service" <<'UNIT'
[Unit]
Description=What the operator types
After=multi-user.target libvirtd.service
[Service]
ExecStart=/usr/local/sbin/operator
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
UNIT
mkdir -p "$units/graphical.target.wants" "$units/multi-user.target.wants"
ln -sf ../operator.service "$units/multi-user.target.wants/operator.service"
# They would take apt's lock for an archive that is not there.
for timer in apt-daily apt-daily-upgrade; do ln -sf /dev/null "$units/$timer.timer"; done
# apt counts no percents into the log.
echo 'Dpkg::Use-Pty "0";' >"$root/etc/apt/apt.conf.d/99lab"
echo lab >"$root/etc/hostname"
rm -f "$work/disk"
mke2fs -q -t ext4 -d "$root" "$work/disk" 2600M

# The emulator's time-stamp counter is this machine's, and a kernel that has to find its frequency under load finds a wrong one.
khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
rm -f "$work/monitor".*
mkfifo "$work/monitor".{in,out}
cat <>"$work/monitor.out" >/dev/null &
reader=$!
# The emulator loses a wake-up now and then; a key that means nothing wakes the machine.
(while sleep 2; do echo 'sendkey shift' >&8; done 8<>"$work/monitor.in") >/dev/null 2>&1 &
tapper=$!
trap 'kill $reader $tapper 2>/dev/null' EXIT
# What operator-init.sh asks in its three boots: a verdict that is not there is a failure, too.
checks=55
: >"$work/operator.log"
for boot in 1 2 3; do
    rm -f "$work/boot$boot.log"
    timeout 2400 "$lab/bin/qemu" -accel tcg,thread=single -machine q35 -cpu EPYC,+svm,+npt,+x2apic -m 2048M -smp 1 -nodefaults \
        -no-user-config -display none -no-reboot -serial "file:$work/console$boot" -serial "file:$work/boot$boot.log" \
        -chardev "pipe,id=m,path=$work/monitor" -mon chardev=m,mode=readline -kernel "$root/boot/vmlinuz-$release" \
        -initrd "$root/boot/initrd.img-$release" -drive "file=$work/disk,format=raw,if=virtio" -append "console=ttyS0 quiet \
        root=/dev/vda rw mitigations=off no_timer_check tsc=reliable nokaslr random.trust_cpu=on tsc_early_khz=$khz systemd.getty_auto=no" \
        </dev/null >"$work/emulator$boot" 2>&1 &
    machine=$!
    # It may have ended before it has one.
    until [ -e "$work/boot$boot.log" ] || ! kill -0 $machine 2>/dev/null; do sleep 0.2; done
    tail -n +1 --pid=$machine -f "$work/boot$boot.log" | stdbuf -oL tr -d '\r' | tee -a "$work/operator.log" | grep --line-buffered -E '^(ok|not ok) ' || true
    wait $machine || true
    grep -q "^=== end of boot $boot" "$work/boot$boot.log" || { echo "not ok boot_${boot}_came_to_its_end" | tee -a "$work/operator.log"; break; }
done
passed=$(grep -c '^ok ' "$work/operator.log" || true)
failures=$(grep -c '^not ok ' "$work/operator.log" || true)
echo "$passed of $checks passed, $failures failed; the log is $work/operator.log"
[ "$failures" = 0 ] && [ "$passed" = $checks ]
