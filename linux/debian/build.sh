#!/bin/sh
# Makes the Debian package: what DKMS compiles for each kernel, the Rust core that it compiles it around, and the scripts.
#
#   linux/debian/build.sh VERSION core.o gannet-dkms_VERSION_amd64.deb
#
# It is native: it has no packaging of its own version. Nothing but dpkg-deb, gzip and coreutils is needed.
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd) version=$1 core=$2 out=$3
linux=$(dirname "$here") root=$out.d
fill() { # fill FILE: with the version, and the functions that the scripts share
    sed -e "/^@IN_USE@$/{r $here/in-use.sh
d}" -e "s/@VERSION@/$version/g" "$1"
}
rm -rf "$root"
source=$root/usr/src/gannet-$version
doc=$root/usr/share/doc/gannet-dkms
mkdir -p "$source/glue" "$doc" "$root/usr/share/lintian/overrides" "$root/DEBIAN" "$root/usr/lib/gannet-dkms"
cp "$linux/Kbuild" "$linux"/*.S "$source/"
cp "$linux"/glue/*.[ch] "$source/glue/"
cp "$core" "$source/core.obj"
fill "$here/dkms.conf" >"$source/dkms.conf"
fill "$here/copyright" >"$doc/copyright"
fill "$here/changelog" | sed "s/@DATE@/$(date -R -u -r "$linux/../CHANGELOG.md")/" | gzip -9n >"$doc/changelog.gz"
cp "$here/lintian-overrides" "$root/usr/share/lintian/overrides/gannet-dkms"
for script in preinst postinst prerm postrm; do
    fill "$here/$script" >"$root/DEBIAN/$script"
    chmod 755 "$root/DEBIAN/$script"
done
find "$root" -type f ! -path '*/DEBIAN/*' -exec chmod 644 {} +
install -m 755 "$here/stock-stays" "$source/"
fill "$here/build-for" >"$root/usr/lib/gannet-dkms/build-for"
chmod 755 "$root/usr/lib/gannet-dkms/build-for"
for hooks in postinst.d header_postinst.d; do
    mkdir -p "$root/etc/kernel/$hooks"
    install -m 755 "$here/kernel-hook" "$root/etc/kernel/$hooks/gannet-dkms"
    echo "/etc/kernel/$hooks/gannet-dkms" >>"$root/DEBIAN/conffiles"
done
(cd "$root" && find usr -type f -exec md5sum {} + | sort -k2) >"$root/DEBIAN/md5sums"
fill "$here/control" | sed "s/@SIZE@/$(du -sk --apparent-size "$root/usr" | cut -f1)/" >"$root/DEBIAN/control"
dpkg-deb --root-owner-group --build "$root" "$out" >/dev/null
rm -rf "$root"
