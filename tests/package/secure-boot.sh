#!/bin/bash
# secure-boot.sh FOLDER: part of run.sh, which has made FOLDER's Debian 13, installed the package there, and put it on FOLDER/disk, which is left as it
# is. It boots twice under Secure Boot, as a machine from a shop would: OVMF with Microsoft's keys, shim, GRUB, Debian's signed kernel, all of them
# Debian's files. Once the machine's owner has enrolled DKMS's key, as `mokutil --import` and a reboot do; once not. init.sh looks at what is loaded.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=$checkout/target/lab
. "$checkout/tests/debian.sh"
work=$1 root=$1/root
release=$(cat "$lab/kernel/7.3/release")
firmware=$root/usr/share/OVMF

# The disk that the firmware boots from: QEMU makes a FAT of the folder.
rm -rf "$work/esp"
mkdir -p "$work/esp/EFI/"{BOOT,debian}
cp "$root/usr/lib/shim/shimx64.efi.signed" "$work/esp/EFI/BOOT/BOOTX64.EFI"
cp "$root/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed" "$work/esp/EFI/BOOT/grubx64.efi"
cp "$root/boot/vmlinuz-$release" "$work/esp/vmlinuz"
cp "$root/boot/initrd.img-$release" "$work/esp/initrd"
# What names the owner of a key among the firmware's variables; any will do.
owner=605dab50-e046-4300-abb6-3dd810dd8b23
# The emulator's time-stamp counter is this machine's.
khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)

failures=0
for mok in known unknown; do
    cat >"$work/esp/EFI/debian/grub.cfg" <<GRUB
linux /vmlinuz console=ttyS0 quiet root=/dev/vda rw init=/init.sh mok=$mok mitigations=off no_timer_check tsc=reliable \
    tsc_early_khz=$khz nokaslr panic=-1 random.trust_cpu=on
initrd /initrd
boot
GRUB
    cp "$firmware/OVMF_VARS_4M.ms.fd" "$work/variables"
    if [ $mok = known ]; then
        openssl x509 -inform der -in "$root/var/lib/dkms/mok.pub" -out "$root/debs/mok.pem"
        inside virt-fw-vars -i /usr/share/OVMF/OVMF_VARS_4M.ms.fd -o /debs/variables --add-mok $owner /debs/mok.pem >"$work/variables.log" 2>&1
        mv "$root/debs/variables" "$work/variables"
    fi
    timeout 900 "$lab/bin/qemu" -accel tcg,thread=single -machine q35,smm=on -global driver=cfi.pflash01,property=secure,value=on \
        -drive "if=pflash,format=raw,unit=0,readonly=on,file=$firmware/OVMF_CODE_4M.secboot.fd" \
        -drive "if=pflash,format=raw,unit=1,file=$work/variables" -cpu EPYC,+svm,+npt,+x2apic -m 2048M -smp 1 -nodefaults -no-user-config \
        -display none -no-reboot -serial stdio -drive "file=$work/disk,format=raw,if=virtio,snapshot=on" \
        -drive "file=fat:$work/esp,format=raw,if=virtio,readonly=on" >"$work/secure-$mok.log" 2>"$work/secure-$mok.emulator" </dev/null || true
    # The firmware's last words have no end of line.
    tr -d '\r' <"$work/secure-$mok.log" | grep -aE '^(ok|not ok) ' || true
    failures=$((failures + $(grep -ac '^not ok ' "$work/secure-$mok.log" || true)))
    if grep -aq '^=== end' "$work/secure-$mok.log"; then echo "ok boot_secure_key_${mok}_came_to_its_end"
    else echo "not ok boot_secure_key_${mok}_came_to_its_end"; failures=$((failures + 1)); fi
done
[ $failures = 0 ]
