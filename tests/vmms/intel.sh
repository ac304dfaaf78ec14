#!/bin/sh
# intel.sh stock|gannet TEST...: run.sh's tests in the emulated Intel machine, which is slow: the first module is loaded there, the other
# one lies beside it. ROUNDS and VERBOSE as for machine.sh; SECONDS is how long its console may be silent.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
folder=${FOLDER:-$root/target/vmms}
module=$1
shift
case $module in stock) list="kvm kvm-intel" ;; gannet) list=gannet ;; *) echo "stock or gannet, not $module" >&2; exit 2 ;; esac
[ -n "${KEEP:-}" ] && [ -x "$folder/tree/vmm/run.sh" ] || sh "$here/gather.sh" "$folder/tree"
for script in vmm.sh run.sh moves.sh; do cp "$here/$script" "$folder/tree/vmm/"; done
cat >"$folder/tree/vmm/begin.sh" <<BEGIN
for m in irqbypass $list; do insmod /modules/\$m.ko \$([ \$m != kvm-intel ] || echo pml=0); done # as in moves.sh
PATIENCE=${PATIENCE:-12} VERBOSE=${VERBOSE:-} SHOWN=${SHOWN:-} ROUNDS=${ROUNDS:-} sh /vmm/run.sh $*
BEGIN
tar -C "$folder/tree" --exclude=guest/vmlinuz -cf "$folder/tree.tar" .
exec make -C "$root" try MACHINE=intel MODULE=none PROGRAMS="$folder/tree.tar" SECONDS="${SECONDS:-900}" \
    COMMAND='tar -x -C / -f /bin/tree.tar; rm /bin/tree.tar; sh /vmm/begin.sh'
