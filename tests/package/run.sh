#!/bin/bash
# Installs the Debian package as an administrator would, and removes it, in a Debian 12 of its own, whose lintian looks at it first; then all of it in the
# emulated machine, with libvirt (operator.sh): about twenty minutes, root, 5 GB in target/lab/package-test and operator-test, 600 MB of downloads.
# With KERNEL=7.3 it is a Debian 13, in package-test-7.3 and operator-test-7.3, which boots under Secure Boot, too (secure-boot.sh).
#
#   make deb && tests/package/run.sh
#
# The package is installed in a chroot, where DKMS compiles at this machine's speed, with no /sys and without the capability to load a
# module; everything that has to do with the running kernel happens in the emulated machine (init.sh), which boots the same disk twice.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=$checkout/target/lab
. "$checkout/tests/debian.sh"
deb=$(ls "$lab"/gannet-dkms_*_amd64.deb)
exitbench=$lab/cargo-static/x86_64-unknown-linux-gnu/release/exitbench
[ -x "$exitbench" ] || { echo "exitbench is not built: run  make try COMMAND=true  once" >&2; exit 1; }
kernel=${KERNEL:-6.12} suffix=
debian=$(debian_of "$kernel")
secure=
[ "$kernel" = 6.12 ] || { suffix=-$kernel; secure='ovmf shim-signed grub-efi-amd64-signed python3-virt-firmware'; }
"$checkout/lab/bootstrap.sh" qemu "kernel-$kernel"
release=$(cat "$lab/kernel/$kernel/release")

# --- a Debian of its own ---
# One that was made before there was lintian in it is made anew.
[ -x "$lab/package-test$suffix/root/usr/bin/lintian" ] || rm -f "$lab/package-test$suffix/root.made"
debian_root "$lab/package-test$suffix" "$debian" '?essential' apt dkms lintian openssl libc6-dev $(kernel_packages "$debian" "$release") $secure

# --- install; upgrade ---
failures=0
check() { # check NAME COMMAND...
    if "${@:2}"; then echo "ok $1"; else echo "not ok $1"; failures=$((failures + 1)); fi
}
version=$(dpkg-deb -f "$deb" Version)
rm -f "$root"/debs/*
cp "$deb" "$root/debs/first.deb"
"$checkout/linux/debian/build.sh" "$version+next" "$lab/module/core.o" "$root/debs/next.deb"
check lintian_finds_nothing inside lintian --fail-on=error,warning /debs/first.deb
inside apt-get -y purge gannet-dkms >/dev/null 2>&1 || true
module() { inside modinfo -k "$release" -F "$1" "$2" 2>/dev/null; }
stock=$(inside sh -c "cd /lib/modules/$release/kernel/arch/x86/kvm && sha256sum *")
inside apt-get -y install /debs/first.deb >"$work/install.log" 2>&1 || true
check installs grep -q 'Gannet serves /dev/kvm after a reboot' "$work/install.log"
check modprobe_finds_it [ "$(module description kvm)" = "Gannet, a hypervisor with the /dev/kvm interface" ]
check dkms_has_signed_it [ -n "$(module signer kvm_intel)" ]
inside apt-get -y install /debs/next.deb >"$work/upgrade.log" 2>&1 || true
check upgrades [ "$(module version kvm)" = "$version+next" ]
inside apt-get -y --allow-downgrades install /debs/first.deb >"$work/downgrade.log" 2>&1 || true
check downgrades [ "$(module version kvm)" = "$version" ]
check leaves_the_stock_modules [ "$(inside sh -c "cd /lib/modules/$release/kernel/arch/x86/kvm && sha256sum *")" = "$stock" ]

# A kernel that nothing can be built for: its installation waits for these two, and must not fail.
hooks() {
    inside sh -c 'mkdir -p /lib/modules/6.99/build/include && for h in dkms gannet-dkms; do /etc/kernel/postinst.d/$h 6.99 || exit 1; done'
}
hooks >"$work/hooks.log" 2>&1 && quiet=true || quiet=false
inside rm -r /lib/modules/6.99
check a_kernel_for_which_it_does_not_build_is_installed $quiet
check and_it_says_so grep -q 'not built for 6.99' "$work/hooks.log"

# --- two boots ---
cp "$here/init.sh" "$root/init.sh"
cp "$exitbench" "$root/usr/local/bin/"
chmod 755 "$root/init.sh"
rm -f "$work/disk"
mke2fs -q -t ext4 -d "$root" "$work/disk" 2000M
[ -z "$secure" ] || "$here/secure-boot.sh" "$work" || failures=$((failures + 1))
for boot in 1 2; do
    timeout 900 "$lab/bin/qemu" -accel tcg,thread=single -machine q35 -cpu EPYC,+svm,+npt,+x2apic -m 2048M -smp 1 -nodefaults \
        -no-user-config -display none -no-reboot -serial stdio -kernel "$root/boot/vmlinuz-$release" \
        -initrd "$root/boot/initrd.img-$release" -drive "file=$work/disk,format=raw,if=virtio" -append "console=ttyS0 quiet \
        root=/dev/vda rw init=/init.sh mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 random.trust_cpu=on" \
        >"$work/boot$boot.log" 2>&1 </dev/null || true
    tr -d '\r' <"$work/boot$boot.log" | grep -E '^(ok|not ok) ' || true
    failures=$((failures + $(grep -c '^not ok ' "$work/boot$boot.log" || true)))
    check "boot_${boot}_came_to_its_end" grep -q '^=== end' "$work/boot$boot.log"
done
echo "$failures failed; the logs are in $work"
"$here/operator.sh" || failures=$((failures + 1))
[ $failures = 0 ]
