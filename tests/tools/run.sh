#!/bin/bash
# run.sh [gannet|stock]...: the tools that an administrator has for KVM (lscpu, kvm-ok, virt-host-validate, trace-cmd, perf, kvm_stat, libvirt
# with QEMU), Debian's own, unmodified, and what Kata and KubeVirt ask of a node, in an emulated AMD machine that runs Debian 12 with kernel
# 6.12 from a disk. Each module by itself; both without a name. PART=node,kvm_stat runs these parts alone, of node, tracing, kvm_stat and
# libvirt. Root, 3 GB in target/lab/tools-test, 400 MB of downloads the first time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=$checkout/target/lab
. "$checkout/tests/debian.sh"
exitbench=$lab/cargo-static/x86_64-unknown-linux-gnu/release/exitbench
[ -x "$exitbench" ] && [ -e "$lab/module/core.o" ] || { echo "nothing is built: run  make try COMMAND=true  once" >&2; exit 1; }
"$checkout/lab/bootstrap.sh" qemu kernel-6.12 busybox kvm-stat
release=$(cat "$lab/kernel/6.12/release")
# A folder of before kvm_stat has no Python.
[ -x "$lab/tools-test/root/usr/bin/python3" ] || rm -f "$lab/tools-test/root.made"
debian_root "$lab/tools-test" bookworm '?essential' apt "linux-image-$release" initramfs-tools kmod iproute2 linux-perf trace-cmd cpu-checker \
    libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils python3

# Gannet under KVM's names, as the package has it.
sources=$work/module
mkdir -p "$sources"
cp -ru "$checkout"/linux/* "$sources/"
make -s -C "$lab/kernel/6.12/headers" "M=$sources" GANNET_NAME=kvm "GANNET_CORE=$lab/module/core.o" GANNET_VERSION=test PAHOLE=true \
    CONFIG_DEBUG_INFO_BTF_MODULES= modules >"$work/module.log" 2>&1 || { tail -n 20 "$work/module.log"; exit 1; }
updates=$root/lib/modules/$release/updates
mkdir -p "$updates"
for name in kvm kvm-amd kvm-intel; do cp "$sources/$name.ko" "$updates/"; done
inside depmod "$release"

# The guest of libvirt's, as the other tests of VMMs have it.
sh "$checkout/tests/vmms/gather.sh" "$work/gathered"
rm -rf "$root/guest"
cp -r "$work/gathered/guest" "$root/guest"
cp "$exitbench" "$root/usr/local/bin/"
install -m 755 "$lab/kvm-stat/kvm_stat" "$here/node.py" "$root/usr/local/bin/"
install -m 755 "$here/init.sh" "$root/init.sh"
install -m 644 "$here/domain.xml" "$root/guest/domain.xml"
disk=$work/disk
rm -f "$disk"
mke2fs -q -t ext4 -d "$root" "$disk" 2200M

# boot MODULE: the machine's console, in $work/MODULE.log. The emulator loses a wake-up now and then, and a kernel that waits for it
# says nothing: without a word within three minutes it is started again.
boot() {
    for attempt in 1 2 3; do
        timeout 1500 "$lab/bin/qemu" -accel tcg,thread=single -machine q35 -cpu EPYC,+svm,+npt,+x2apic -m 2048M -smp 1 -nodefaults \
            -no-user-config -display none -no-reboot -serial "file:$work/$1.log" -kernel "$root/boot/vmlinuz-$release" -initrd \
            "$root/boot/initrd.img-$release" -drive "file=$disk,format=raw,if=virtio,snapshot=on" -append "console=ttyS0 quiet \
            root=/dev/vda rw init=/init.sh module=$1 only=${PART:-} mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 \
            random.trust_cpu=on" </dev/null >/dev/null 2>&1 &
        machine=$!
        limit=$((SECONDS + 180))
        until grep -qs '^=== begin' "$work/$1.log"; do
            [ $SECONDS -lt $limit ] && kill -0 $machine 2>/dev/null || break
            sleep 1
        done
        if grep -qs '^=== begin' "$work/$1.log"; then
            tail -n +1 --pid=$machine -f "$work/$1.log" | stdbuf -oL tr -d '\r' | grep --line-buffered -E '^(ok|not ok|skip) ' || true
            wait $machine || true
            return
        fi
        kill $machine 2>/dev/null
        wait $machine || true
    done
}

failures=0
[ $# != 0 ] || set -- gannet stock
for module; do
    echo "# $module"
    rm -f "$work/$module.log"
    boot "$module"
    failed=$(tr -d '\r' <"$work/$module.log" | grep -c '^not ok ' || true)
    tr -d '\r' <"$work/$module.log" | grep -q '^=== end' || { echo "not ok $module: the machine did not come to its end"; failed=$((failed + 1)); }
    failures=$((failures + failed))
done
echo "$failures failed; the logs are in $work"
[ $failures = 0 ]
