# Whether Gannet is the loaded hypervisor, and whether a VM or an open /dev/kvm keeps it. The stock modules have no version.
gannet_is_loaded() { [ -e /sys/module/kvm/version ]; }
gannet_half() {
    for half in kvm_amd kvm_intel; do
        [ ! -d "/sys/module/$half" ] || echo "$half"
    done
}
gannet_is_in_use() {
    gannet_is_loaded || return 1
    for half in $(gannet_half); do
        [ "$(cat "/sys/module/$half/refcnt")" = 0 ] || return 0
    done
    return 1
}
refuse_while_in_use() {
    gannet_is_in_use || return 0
    echo "gannet-dkms: virtual machines run on Gannet, or a program has /dev/kvm open: stop or migrate them first (fuser -v /dev/kvm)." >&2
    echo "gannet-dkms: nothing was changed." >&2
    exit 1
}
# Whichever modules modprobe finds now.
load_anew() {
    gannet_is_loaded || return 0
    half=$(gannet_half)
    modprobe -r $half kvm || { echo "gannet-dkms: the modules on disk serve after a reboot." >&2; return 0; }
    [ -z "$half" ] || modprobe $half || echo "gannet-dkms: $half does not load; see dmesg." >&2
}
