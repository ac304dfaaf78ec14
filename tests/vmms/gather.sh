#!/bin/sh
# gather.sh FOLDER: puts everything that the VMM runs need inside the machine into FOLDER, as it shall lie under `/` there: Debian's
# QEMU with its libraries and ROMs, the guest's kernel (compressed and not), modules and initramfs, and run.sh.
# Takes all of it from what lab/bootstrap.sh has unpacked and downloaded.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
lab=$root/target/lab
cache=${GANNET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gannet}
out=$1
guest=6.12
[ -x "$lab/qemu/usr/bin/qemu-system-x86_64" ] || { echo "the lab is not there: run lab/bootstrap.sh" >&2; exit 1; }
rm -rf "$out"
mkdir -p "$out/vmm/share" "$out/lib" "$out/lib64" "$out/guest"

# QEMU, and the libraries it is linked with, wherever the loader finds them.
cp "$lab/qemu/usr/bin/qemu-system-x86_64" "$out/vmm/"
LD_LIBRARY_PATH=$lab/qemu/usr/lib/x86_64-linux-gnu:$lab/qemu/lib/x86_64-linux-gnu ldd "$out/vmm/qemu-system-x86_64" |
    awk '$3 ~ /^\// {print $3}' | while read -r library; do cp -L "$library" "$out/lib/"; done
cp -L /lib64/ld-linux-x86-64.so.2 "$out/lib64/"
if [ -n "${VMM_EXTRA:-}" ]; then cp $VMM_EXTRA "$out/vmm/"; fi

# ROMs.
for rom in bios-256k.bin bios.bin bios-microvm.bin vgabios-stdvga.bin; do cp "$lab/qemu/usr/share/seabios/$rom" "$out/vmm/share/"; done
for rom in kvmvapic.bin linuxboot.bin linuxboot_dma.bin pvh.bin multiboot_dma.bin qboot.rom; do cp "$lab/qemu/usr/share/qemu/$rom" "$out/vmm/share/"; done
mkdir -p "$out/vmm/share/keymaps"
cp "$lab/qemu/usr/share/qemu/keymaps/en-us" "$out/vmm/share/keymaps/"

# The guest: Debian's kernel as it is, its virtio modules out of the package in the cache, busybox.
cp "$lab/kernel/$guest/vmlinux" "$out/guest/vmlinux"
cp -L "$lab/kernel/$guest/vmlinuz" "$out/guest/vmlinuz"
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/bin" "$tree/proc" "$tree/sys" "$tree/dev" "$tree/tmp" "$tree/modules" "$tree/x"
deb=$cache/debs/$(awk -v g="kernel-$guest" '$1 == g && $2 ~ /^linux-image/ {print $4}' "$root/lab/lab.lock").deb
dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$tree/x" --wildcards '*/virtio_blk.ko*' '*/failover.ko*' '*/net_failover.ko*' '*/virtio_net.ko*' '*/virtio_mmio.ko*' \
    '*/tun.ko*' '*/bridge.ko*' '*/stp.ko*' '*/llc.ko*'
find "$tree/x" -name '*.ko.xz' -exec xz -d {} +
find "$tree/x" -name '*.ko' -exec cp {} "$tree/modules/" \;
mkdir -p "$out/net" # for a machine that is a host on a wire
for module in virtio_blk failover net_failover virtio_net; do cp "$tree/modules/$module.ko" "$out/net/"; done
for module in llc stp bridge tun; do mv "$tree/modules/$module.ko" "$out/net/"; done
rm -rf "$tree/x"
cp "$lab/busybox/bin/busybox" "$tree/bin/"
ln -s busybox "$tree/bin/sh"
install -m 755 "$here/guest-init.sh" "$tree/init"
(cd "$tree" && find . | LC_ALL=C sort | "$lab/busybox/bin/busybox" cpio -o -H newc 2>/dev/null) >"$out/guest/initramfs"

# The guest that is a hypervisor: the same, with the kernel's own KVM and the program that counts in a guest of its own.
counter=$lab/cargo-static/x86_64-unknown-linux-gnu/release/labtests
if [ -x "$counter" ]; then
    cp "$counter" "$tree/bin/"
    for module in irqbypass kvm ccp kvm-amd kvm-intel; do cp "$lab/kernel/$guest/modules/$module.ko" "$tree/modules/"; done
    (cd "$tree" && find . | LC_ALL=C sort | "$lab/busybox/bin/busybox" cpio -o -H newc 2>/dev/null) >"$out/guest/hypervisor"
fi
for script in vmm.sh run.sh moves.sh; do install -m 755 "$here/$script" "$out/vmm/$script"; done
