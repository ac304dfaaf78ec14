#!/bin/sh
# machine.sh KERNEL stock|gannet [TEST...]: boots the emulated machine with KERNEL (6.12 or 6.1), loads that module there, and runs
# run.sh's tests (all, or those named) with it. The other module lies beside it, for tests that change over.
#
# Environment: PATIENCE=5 waits five times as long for everything, SMP=2 host CPUs, ICOUNT=1 counts instructions (the clock is then instructions), TIMEOUT=seconds, APPEND=kernel
# parameters, GANNET_KO=file (default: the built one), FOLDER=where the gathered files are kept.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
lab=$root/target/lab
kernel=$1 module=$2
shift 2
folder=${FOLDER:-$root/target/vmms}
image=$folder/machine-$kernel-$module-$$.cpio
[ -n "${KEEP:-}" ] && [ -x "$folder/tree/vmm/run.sh" ] || sh "$here/gather.sh" "$folder/tree"

# What the archive has beside the gathered tree.
beside=$folder/beside-$$
mkdir -p "$beside/bin" "$beside/proc" "$beside/sys" "$beside/dev" "$beside/tmp" "$beside/modules"
trap 'rm -rf "$beside" "$image"' EXIT
cp "$lab/busybox/bin/busybox" "$beside/bin/"
mkdir -p "$beside/vmm"
cp "$here/vmm.sh" "$here/run.sh" "$here/moves.sh" "$beside/vmm/"
ln -s busybox "$beside/bin/sh"
cp "$lab/kernel/$kernel"/modules/*.ko "$beside/modules/"
cp "${GANNET_KO:-$lab/module/$kernel/gannet.ko}" "$beside/modules/gannet.ko" 2>/dev/null || [ "$module" = stock ]
case $module in
    stock) list="irqbypass kvm ccp kvm-amd" ;;
    gannet) list="irqbypass gannet" ;;
    *) echo "stock or gannet, not $module" >&2; exit 2 ;;
esac
cat >"$beside/init" <<INIT
#!/bin/sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
mount -t debugfs none /sys/kernel/debug 2>/dev/null
for m in $list; do insmod /modules/\$m.ko; done
VERBOSE=${VERBOSE:-} SHOWN=${SHOWN:-} ROUNDS=${ROUNDS:-} PATIENCE=${PATIENCE:-1} sh /vmm/run.sh $*
for m in gannet kvm_amd kvm ccp irqbypass; do [ ! -d /sys/module/\$m ] || rmmod \$m || echo "FAIL rmmod \$m"; done
dmesg | grep -E 'WARNING|BUG|Oops|general protection|Call Trace|RIP:|soft lockup|rcu.*stall|page allocation' && { echo "FAIL the host's log is not clean"; dmesg | tail -n 60; }
echo "machine: done"
poweroff -f
INIT
chmod +x "$beside/init"
pack() { (cd "$1" && find . | "$lab/busybox/bin/busybox" cpio -o -H newc 2>/dev/null); }
{ pack "$folder/tree"; pack "$beside"; } >"$image"
# The emulator's time-stamp counter is this machine's, and a kernel that has to find its frequency under load finds a wrong one.
khz=tsc_early_khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
[ -z "${ICOUNT:-}" ] || khz=
[ -n "${ICOUNT:-}" ] && set -- -icount shift=0,sleep=off -rtc base=2026-01-01,clock=vm -seed 1 || set --
timeout "${TIMEOUT:-900}" "$lab/bin/qemu" -accel tcg,thread=single -machine q35 -cpu EPYC,+svm,+npt,+x2apic -m 1536 -smp "${SMP:-1}" \
    -nodefaults -no-user-config -display none -serial stdio -no-reboot -kernel "$lab/kernel/$kernel/vmlinux" -initrd "$image" \
    -append "console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 random.trust_cpu=on $khz ${APPEND:-}" "$@"
