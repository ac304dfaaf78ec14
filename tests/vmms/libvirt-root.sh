#!/bin/bash
# libvirt-root.sh FOLDER: makes FOLDER/system, a disk with Debian 12, libvirt and its QEMU, and what host.sh wants, and FOLDER/vmlinuz and initrd, for the
# two hosts of migrate.sh, which has put the gathered tree there. Root, the Debian of tests/package/operator.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=$checkout/target/lab
folder=$1
. "$checkout/tests/debian.sh"
release=$(cat "$lab/kernel/6.12/release")
libvirt_root "$lab/operator-test" bookworm "$release"
rm -rf "$root"/{vmm,guest,net,modules}
cp -r "$folder"/tree/{guest,net} "$root/"
mkdir -p "$root/vmm/bin" "$root/modules"
cp "$here"/{vmm,moves,host}.sh "$here/libvirt-domain.xml" "$root/vmm/"
install -m 755 "$here/libvirt-host.sh" "$here/libvirt-guest.sh" "$root/vmm/"
for applet in $("$lab/busybox/bin/busybox" --list); do ln -sf ../busybox "$root/vmm/bin/$applet"; done
cp "$lab/busybox/bin/busybox" "$root/vmm/"
cp "$lab/kernel/6.12/modules/"*.ko "$root/modules/"
cp "${GANNET_KO:-$lab/module/6.12/gannet.ko}" "$root/modules/gannet.ko"
cp -L "$root/boot/vmlinuz-$release" "$folder/vmlinuz"
cp "$root/boot/initrd.img-$release" "$folder/initrd"
mke2fs -q -t ext4 -d "$root" "$folder/system" 2600M
