#!/bin/sh
# Links the Rust of the module into one object that every kernel's build takes as it is:
#
#   linux/link-core.sh libgannet_module.a core.o
#
# Its roots alone are visible, and the kernel's memcpy and friends are in place of compiler_builtins'. core.o.debug keeps all symbols.
set -eu
here=$(dirname "$0") library=$1 out=$2
roots="gannet_init gannet_exit gannet_unload gannet_cpu_online gannet_cpu_offline gannet_user_return gannet_dev_ioctl gannet_debug_totals
  gannet_l1d_flush_changed gannet_show_mitigations"
each() { before=$1; shift; for name in "$@"; do printf '%s%s ' "$before" "$name"; done; }
rm -rf "$out.d"
mkdir -p "$out.d"
cp "$library" "$out.d/all.a"
(cd "$out.d" && ar x all.a && rm all.a)
renamed=
for name in memcpy memmove memset memcmp bcmp strlen; do renamed="$renamed --redefine-sym $name=__gannet_cb_$name"; done
for object in "$out.d"/compiler_builtins-*.o; do
    objcopy $renamed "$object"
done
ld -m elf_x86_64 -r --gc-sections $(each '-u ' $roots) -T "$here/merge.lds" -o "$out.debug" "$out.d"/*.o
objcopy -g $(each --keep-global-symbol= $roots) "$out.debug" "$out"
rm -rf "$out.d"
