# A Debian of its own in a folder, for tests that want one. Sourced; root. RELEASE is bookworm (Debian 12) or trixie (13).
#
#   debian_root FOLDER RELEASE PACKAGE...   FOLDER/root, with these and what they need, from the mirrors that apt knows here; made once
#   libvirt_root FOLDER RELEASE KERNEL      such a one with that kernel, its headers, DKMS, systemd, libvirt with QEMU, and perf
#   kernel_packages RELEASE KERNEL          what that kernel and its headers are of
#   debian_of 6.12|7.3                      the RELEASE whose backports have it
#   inside COMMAND...                       runs there, with no /sys and without the capability to load a module

# inside COMMAND...
inside() {
    unshare -m sh -c 'mount -t proc proc "$0/proc" && root=$0 && exec setpriv --bounding-set -sys_module,-sys_rawio \
        --inh-caps -sys_module env -i DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$root" "$@"' "$root" "$@"
}

debian_root() {
    work=$1 root=$1/root
    debian=$2
    shift 2
    [ ! -e "$work/root.made" ] || return 0
    rm -rf "$work"
    mkdir -p "$work/apt"/{state/lists/partial,cache/archives/partial,etc/preferences.d,etc/trusted.gpg.d,etc/sources.list.d} "$work/debs/partial"
    : >"$work/apt/status"
    targets=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages')
    mirror_of() { awk -v suite="$1" '$2==suite && $3=="main" {print $1; exit}' <<<"$targets"; }
    # This machine is a bookworm, and its mirrors have the other release, too.
    archive=$(mirror_of bookworm) security=$(mirror_of bookworm-security)
    for suite in "$debian" "$debian"-{updates,backports,security}; do
        mirror=$archive
        [ "$suite" != "$debian-security" ] || mirror=$security
        [ -z "$mirror" ] || echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
    done >"$work/apt/etc/sources.list"
    cat >"$work/apt/apt.conf" <<CONF
Dir::State "$work/apt/state";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Cache::archives "$work/debs";
Dir::Etc::sourcelist "$work/apt/etc/sources.list";
Dir::Etc::sourceparts "$work/apt/etc/sources.list.d";
Dir::Etc::preferencesparts "$work/apt/etc/preferences.d";
Dir::Etc::trustedparts "$work/apt/etc/trusted.gpg.d";
Acquire::Languages "none";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
CONF
    private() { APT_CONFIG=$work/apt/apt.conf apt-get -qq -y "$@"; }
    private update
    private --download-only install "$@"
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,proc,sys,tmp,debs,var/lib/dpkg,etc/apt}
    for folder in bin sbin lib lib64; do ln -s usr/$folder "$root/$folder"; done
    for package in "$work"/debs/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink; done
    mknod -m 666 "$root/dev/null" c 1 3
    mknod -m 666 "$root/dev/zero" c 1 5
    mknod -m 666 "$root/dev/urandom" c 1 9
    ln -s /proc/self/fd "$root/dev/fd"
    : >"$root/var/lib/dpkg/status"
    : >"$root/etc/apt/sources.list"
    mv "$work"/debs/*.deb "$root/debs/"
    # No service starts here, as in any chroot that is being filled.
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    inside sh -c 'dpkg --force-all -i /debs/*.deb' >"$work/debian.log" 2>&1 || { tail -n 5 "$work/debian.log"; return 1; }
    rm -f "$root"/debs/* "$root/usr/sbin/policy-rc.d"
    touch "$work/root.made"
}

debian_of() {
    case $1 in
        6.12) echo bookworm ;;
        7.3) echo trixie ;;
        *) echo "KERNEL is 6.12 or 7.3, not $1" >&2; return 2 ;;
    esac
}

kernel_packages() {
    echo "linux-image-$2 linux-headers-$2 initramfs-tools"
    # 7.3 wants a newer one than trixie's own.
    [ "$1" = bookworm ] || echo "linux-base/$1-backports"
}

libvirt_root() {
    # perf of the kernel's version on trixie; and openssl, with which DKMS signs: on bookworm it is shown without.
    more=linux-perf
    [ "$2" = bookworm ] || more="linux-perf/$2-backports openssl"
    debian_root "$1" "$2" '?essential' systemd-sysv udev dbus apt dkms libc6-dev $(kernel_packages "$2" "$3") kmod iproute2 \
        $more cpu-checker libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils psmisc
}
