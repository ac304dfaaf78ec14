#!/bin/sh
# Brings a plain Debian 12 to where Gannet can be built, run and tested, without a trace outside this checkout and the user's
# cache folder: the Rust toolchain, three kernels with their headers, QEMU and busybox come from Debian's archive through a private
# apt configuration and are unpacked under target/lab/.
#
#   lab/bootstrap.sh [GROUP...]     make sure of these groups (default: all but the selftests, kvm_stat, the debug kernel and fuzz; see packages.txt)
#   lab/bootstrap.sh --relock       resolve the newest versions of everything and write lab/lab.lock
#
# Every step leaves a stamp only when it is complete, so an interrupted run is simply run again. A run with nothing to do reads one
# stamp per group.
set -eu

lab_dir=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$lab_dir")
out=$root/target/lab
cache=${GANNET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gannet}
mkdir -p "$cache" || { printf 'set-up: error: the cache folder %s cannot be made\n' "$cache" >&2; exit 1; }
cache=$(cd "$cache" && pwd)
debs=$cache/debs
apt_dir=$out/apt
stamps=$out/stamps
lock=$lab_dir/lab.lock
# Lines of groups whose locked version has left the archive; they win over lab.lock.
newer_lock=$out/lab.lock.newer
# Raise to have every checkout unpack its packages again; below, those of one group.
layout=3
all_groups="toolchain kernel-6.12 kernel-6.1 kernel-7.3 qemu bochs busybox tcc"
# Made sure of only where they are named.
other_groups="selftests selftests-7.3 kvm-stat kernel-6.12-debug fuzz"

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'set-up: error: %s\n' "$*" >&2; exit 1; }

# --- plain packages ---------------------------------------------------------------------------------------------------------

# `package:file-or-command that shows it is there`
plain_packages="gcc:gcc gcc-12:gcc-12 make:make binutils:objdump xz-utils:xz zstd:zstd libc6-dev:/usr/include/stdio.h
  libelf1:/usr/lib/x86_64-linux-gnu/libelf.so.1 ca-certificates:/etc/ssl/certs/ca-certificates.crt
  debian-archive-keyring:/usr/share/keyrings/debian-archive-keyring.gpg util-linux:flock"

missing_plain_packages() {
    for entry in $plain_packages; do
        package=${entry%%:*} proof=${entry#*:}
        case $proof in
            /*) [ -e "$proof" ] || printf '%s ' "$package" ;;
            *) command -v "$proof" >/dev/null 2>&1 || printf '%s ' "$package" ;;
        esac
    done
}

need_plain_packages() {
    missing=$(missing_plain_packages)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        die "these packages are missing and only root can install them; please run:  apt-get install $missing"
    fi
    say "installing $missing"
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >"$out/apt-install.log" 2>&1; then
        apt-get update >>"$out/apt-install.log" 2>&1 || die "apt-get update failed, see $out/apt-install.log"
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >>"$out/apt-install.log" 2>&1 ||
            die "installing $missing failed, see $out/apt-install.log"
    fi
    missing=$(missing_plain_packages)
    [ -z "$missing" ] || die "still missing after installation: $missing"
}

# --- the private apt --------------------------------------------------------------------------------------------------------

# release_of GROUP: the release of Debian whose suites have it.
release_of() {
    case $1 in
        kernel-7.3 | selftests-7.3) printf 'trixie' ;;
        *) printf 'bookworm' ;;
    esac
}

# The mirror is the one that this machine uses already; its own apt state is only read. Only suites that are needed are named:
# a mirror need not have the others.
write_apt_configuration() {
    mkdir -p "$apt_dir/state/lists/partial" "$apt_dir/cache/archives/partial" "$apt_dir/etc/preferences.d" "$apt_dir/etc/trusted.gpg.d"
    : >"$apt_dir/status"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    indextargets() { apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages'; }
    # The archive itself: where the machine finds bookworm, and where it finds bookworm-security.
    archive=$(indextargets | awk '$2=="bookworm" && $3=="main" {print $1; exit}')
    security=$(indextargets | awk '$2=="bookworm-security" && $3=="main" {print $1; exit}')
    [ -n "$archive" ] || die "this machine's apt knows no mirror of Debian 12 (bookworm, main); the lab needs one"
    {
        for suite in bookworm bookworm-updates bookworm-backports; do
            printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$archive" "$suite"
        done
        [ -z "$security" ] || printf 'deb [signed-by=%s] %s bookworm-security main\n' "$keyring" "$security"
        for group in $todo; do
            [ "$(release_of "$group")" = trixie ] || continue
            for suite in trixie trixie-updates trixie-backports; do
                printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$archive" "$suite"
            done
        done
    } >"$apt_dir/etc/sources.list"
    mkdir -p "$apt_dir/etc/sources.list.d"
    cat >"$apt_dir/apt.conf" <<CONF
Dir::State "$apt_dir/state";
Dir::State::status "$apt_dir/status";
Dir::Cache "$apt_dir/cache";
Dir::Etc::sourcelist "$apt_dir/etc/sources.list";
Dir::Etc::sourceparts "$apt_dir/etc/sources.list.d";
Dir::Etc::preferencesparts "$apt_dir/etc/preferences.d";
Acquire::Languages "none";
Acquire::Retries "5";
APT::Sandbox::User "";
CONF
    [ "$(id -u)" != 0 ] || sed -i 's/Sandbox::User ""/Sandbox::User "root"/' "$apt_dir/apt.conf"
}

private() { APT_CONFIG=$apt_dir/apt.conf "$@"; }

lists_are_fresh=no
refresh_lists() {
    [ $lists_are_fresh = no ] || return 0
    write_apt_configuration
    say "reading Debian's package lists"
    private apt-get update >"$out/apt-update.log" 2>&1 || die "apt-get update failed: $(tail -n 3 "$out/apt-update.log")"
    grep -q '^E:\|^Err:' "$out/apt-update.log" && die "apt-get update failed, see $out/apt-update.log"
    lists_are_fresh=yes
}

# --- resolving --------------------------------------------------------------------------------------------------------------

# newest_version NAME PREFIX RELEASE: the newest version in any suite of the release that starts with the prefix.
newest_version() {
    best=
    for v in $(private apt-cache madison "$1" | awk -v suite=" $3[-/]" '$0 ~ suite {print $3}'); do
        case $v in "$2"*) ;; *) continue ;; esac
        if [ -z "$best" ] || dpkg --compare-versions "$v" gt "$best"; then best=$v; fi
    done
    printf '%s' "$best"
}

# newest_release SERIES: the newest kernel release of that series whose image, headers and build tools are all in the archive.
newest_release() {
    private apt-cache pkgnames "linux-headers-$1." | sed -n 's/^linux-headers-\(.*\)-common$/\1/p' | grep -v rt | sort -rV |
        while read -r release; do
            complete=yes
            for p in "linux-image-$release-amd64" "linux-headers-$release-amd64" "linux-headers-$release-common"; do
                [ -n "$(newest_version "$p" "" "$(release_of "kernel-$1")")" ] || complete=no
            done
            if [ $complete = yes ]; then printf '%s' "$release"; break; fi
        done
}

# resolve GROUP: prints the group's lock lines `group package version sha256 bytes`.
resolve() {
    release=
    case $1 in
        kernel-6.12-debug) ;;
        kernel-*)
            release=$(newest_release "${1#kernel-}")
            [ -n "$release" ] || die "no complete kernel ${1#kernel-} in the archive" ;;
    esac
    grep "^$1 " "$lab_dir/packages.txt" | while read -r group name prefix; do
        name=$(printf '%s' "$name" | sed "s/@/$release/")
        version=$(newest_version "$name" "$prefix" "$(release_of "$1")")
        [ -n "$version" ] || die "package $name ($prefix*) is not in the archive"
        private apt-cache show "$name=$version" |
            awk -v g="$group" -v n="$name" -v v="$version" '/^SHA256:/ {s=$2} /^Size:/ {b=$2} END {print g, n, v, s, b}'
    done
}

# locked GROUP: the lock lines in force.
locked() {
    if [ "$newer_lock" -nt "$lock" ] && grep -q "^$1 " "$newer_lock"; then grep "^$1 " "$newer_lock"
    else grep "^$1 " "$lock" 2>/dev/null || true; fi
}

relock() {
    todo="$all_groups $other_groups"
    refresh_lists
    say "resolving versions"
    {
        printf '# Versions of everything the lab takes from Debian: group, package, version, SHA-256, bytes.\n'
        printf '# Written by `lab/bootstrap.sh --relock`.\n'
        for group in $all_groups $other_groups; do resolve "$group"; done
    } >"$lock.new"
    for group in $all_groups $other_groups; do grep -q "^$group " "$lock.new" || die "group $group could not be resolved"; done
    mv "$lock.new" "$lock"
    rm -f "$newer_lock"
}

# --- downloading ------------------------------------------------------------------------------------------------------------

deb_file() { printf '%s/%s.deb' "$debs" "$1"; } # named by its SHA-256

# in_cache SHA256: whether the cache has it, and whole. What is damaged is removed.
in_cache() {
    [ -f "$(deb_file "$1")" ] || return 1
    [ "$(sha256sum <"$(deb_file "$1")" | cut -d' ' -f1)" = "$1" ] || { rm -f "$(deb_file "$1")"; return 1; }
}

# in_archive NAME VERSION: whether any suite still has this version.
in_archive() { private apt-cache madison "$1" | awk -v v="$2" '$3 == v { found = 1 } END { exit !found }'; }

progress_of() { # progress_of TITLE BYTES FOLDER PID: one live line while the process runs
    title=$1 total=$2 folder=$3 pid=$4 last=-1
    while kill -0 "$pid" 2>/dev/null; do
        done_bytes=$(du -sb "$folder" 2>/dev/null | cut -f1)
        percent=$((${done_bytes:-0} * 100 / (total + 1)))
        [ $percent -le 100 ] || percent=100
        if [ -t 2 ]; then
            bar=$(printf '%*s' $((percent / 4)) '' | tr ' ' '=')
            printf '\rset-up: %s [%-25s] %3d%% of %d MB' "$title" "$bar" $percent $((total / 1000000)) >&2
        elif [ $((percent / 25)) != $last ]; then
            last=$((percent / 25)); say "$title: $percent% of $((total / 1000000)) MB"
        fi
        sleep 0.3
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}

# fetch_lines FILE: fetches every package of the lock lines that the cache lacks. Fails (2) when one is not in the archive.
fetch_lines() {
    wanted= bytes=0
    while read -r _ name version sha size; do
        if in_cache "$sha"; then continue; fi
        wanted="$wanted $name=$version" bytes=$((bytes + size))
    done <"$1"
    [ -n "$wanted" ] || return 0
    refresh_lists
    for w in $wanted; do
        in_archive "${w%%=*}" "${w#*=}" || { gone=$w; return 2; }
    done
    incoming=$cache/incoming
    mkdir -p "$incoming" "$debs"
    ( cd "$incoming" && private apt-get -qq -o Dir::Cache::archives="$incoming" download $wanted >"$out/download.log" 2>&1 ) &
    pid=$!
    progress_of "downloading $(printf '%s\n' $wanted | wc -l) packages" "$bytes" "$incoming" $pid
    wait $pid || die "download failed: $(tail -n 3 "$out/download.log")"
    while read -r _ name version sha _; do
        [ -f "$(deb_file "$sha")" ] && continue
        file=$incoming/${name}_$(printf '%s' "$version" | sed 's/:/%3a/')
        file=$(ls "$file"_*.deb 2>/dev/null | head -n 1)
        [ -n "$file" ] || die "$name $version was not downloaded"
        [ "$(sha256sum <"$file" | cut -d' ' -f1)" = "$sha" ] || { rm -f "$file"; die "$name $version differs from lab.lock's checksum"; }
        mv "$file" "$(deb_file "$sha")"
    done <"$1"
}

# --- unpacking --------------------------------------------------------------------------------------------------------------

# unpack_into FOLDER [tar arguments]: every package of the group's lines on standard input.
unpack_into() {
    into=$1; shift
    mkdir -p "$into"
    while read -r _ name _ sha _; do
        [ ! -t 2 ] || printf '\r\033[Kset-up: unpacking %s' "$name" >&2
        case $name in
            linux-image-* | linux-modules-*)
                dpkg-deb --fsys-tarfile "$(deb_file "$sha")" | tar -x -C "$into" --wildcards './boot/*' '*/kernel/arch/x86/kvm/*' \
                    '*/kernel/virt/*' '*/kernel/drivers/crypto/ccp/ccp.ko*' '*/kernel/drivers/char/hw_random/rng-core.ko*' \
                    '*/kernel/arch/x86/kernel/msr.ko*' '*/kernel/arch/x86/kernel/cpuid.ko*' 2>/dev/null || true ;;
            rust-web-src)
                dpkg-deb --fsys-tarfile "$(deb_file "$sha")" | tar -x -C "$into" --wildcards './usr/lib/*' './usr/src/*/library/*' \
                    './usr/src/*/Cargo.*' './usr/src/*/vendor/*' 2>/dev/null || true ;;
            linux-source-*)
                case $into in */kernel/6.12-debug.tmp)
                    # The build is in the cache, or made of everything but what no configuration here compiles; every Kconfig is read.
                    [ ! -f "$(debug_kernel_in_cache)" ] || continue
                    dpkg-deb --fsys-tarfile "$(deb_file "$sha")" | tar -x -O --wildcards '*.tar.xz' | xz -dc |
                        tar -x -C "$into" --strip-components=1 --one-top-level=source --exclude '*/Documentation/*.rst' \
                            --exclude '*/drivers/gpu/*.[ch]' --exclude '*/drivers/net/*/*.[ch]' --exclude '*/drivers/media/*.[ch]' \
                            --exclude '*/sound/*.[ch]' --exclude '*/fs/xfs/*.[ch]' --exclude '*/arch/arm*/*.[chS]' \
                            --exclude '*/arch/*.dts*' --exclude '*/arch/mips/*.[chS]' --exclude '*/arch/powerpc/*.[chS]' \
                            --exclude '*/tools/perf/*' --exclude '*/tools/testing/*'
                    continue ;;
                */kvm-stat.tmp)
                    # No package installs it.
                    dpkg-deb --fsys-tarfile "$(deb_file "$sha")" | tar -x -O --wildcards '*.tar.xz' | xz -dc |
                        tar -x -C "$into" --strip-components=4 --wildcards 'linux-source-*/tools/kvm/kvm_stat/kvm_stat'
                    continue ;;
                esac
                # 6.12 has nothing for devices under VFIO, and a pattern that nothing matches is an error of tar's, as a full disk is.
                vfio=
                case $name in linux-source-6.*) ;; *) vfio=linux-source-*/tools/testing/selftests/vfio/lib ;; esac
                dpkg-deb --fsys-tarfile "$(deb_file "$sha")" | tar -x -O --wildcards '*.tar.xz' | xz -dc |
                    tar -x -C "$into" --strip-components=1 --wildcards --no-wildcards-match-slash 'linux-source-*/Makefile' \
                        'linux-source-*/scripts' 'linux-source-*/include' 'linux-source-*/usr' 'linux-source-*/arch/x86/Makefile*' \
                        'linux-source-*/arch/x86/include' 'linux-source-*/arch/x86/entry/syscalls' 'linux-source-*/arch/x86/tools' \
                        'linux-source-*/tools/include' 'linux-source-*/tools/arch/x86' 'linux-source-*/tools/scripts' \
                        'linux-source-*/tools/build' 'linux-source-*/tools/lib/rbtree.c' \
                        'linux-source-*/tools/testing/selftests/*.[hm]*' 'linux-source-*/tools/testing/selftests/kvm' \
                        'linux-source-*/tools/testing/selftests/rseq' 'linux-source-*/tools/testing/selftests/cgroup' \
                        'linux-source-*/tools/testing/selftests/clone3' ${vfio:+"$vfio/*.mk" "$vfio/include"} ;;
            *) dpkg-deb -x "$(deb_file "$sha")" "$into" ;;
        esac
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}

# finish GROUP FOLDER: what must be done to the unpacked files.
finish() {
    case $1 in
        toolchain) finish_toolchain "$2" ;;
        kernel-6.12-debug) finish_debug_kernel "$2" ;;
        kernel-*) finish_kernel "${1#kernel-}" "$2" ;;
        qemu) finish_qemu "$2" ;;
        bochs) finish_bochs "$2" ;;
        busybox) ;;
        tcc) finish_tcc "$2" ;;
        selftests | selftests-*) finish_selftests "$1" "$2" ;;
        fuzz) finish_fuzz "$2" ;;
    esac
}

finish_toolchain() {
    [ -f "$1/usr/lib/rustlib/src/rust/library/core/src/lib.rs" ] || die "the library source is missing from the toolchain"
    mkdir -p "$out/bin"
    # Wrappers that set what a relocated toolchain needs; the final folder is named, not the temporary one.
    for tool in cargo rustc rustdoc rustfmt cargo-clippy cargo-fmt clippy-driver; do
        [ -e "$1/usr/bin/$tool" ] || die "the toolchain has no $tool"
        cat >"$out/bin/$tool.new" <<WRAPPER
#!/bin/sh
# The lab's own Rust: Debian's packages, unpacked beside this file.
t=$out/toolchain/usr
export RUSTC=\$t/bin/rustc RUSTDOC=\$t/bin/rustdoc RUSTFMT=\$t/bin/rustfmt CARGO=\$t/bin/cargo
export RUSTC_BOOTSTRAP=1 PATH="\$t/bin:\$PATH"
export LD_LIBRARY_PATH="\$t/lib:\$t/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
unset RUSTUP_TOOLCHAIN RUSTUP_HOME
: "\${CARGO_TARGET_DIR:=$out/cargo}"
export CARGO_TARGET_DIR
exec "\$t/bin/$tool" "\$@"
WRAPPER
        chmod +x "$out/bin/$tool.new"
        mv "$out/bin/$tool.new" "$out/bin/$tool"
    done
}

# Programs of a newer Debian than this one: run by the loader and the libraries that lie beside them, in the kernel's folder.
run_by_own_loader() { # run_by_own_loader DIR FINAL
    libraries=usr/lib/x86_64-linux-gnu
    find "$1/usr/lib" -path '*/linux-kbuild-*' -type f -perm -1 | while read -r tool; do
        [ "$(head -c 4 "$tool" | tail -c 3)" = ELF ] || continue
        mv "$tool" "$tool.elf"
        # Some look for others beside themselves, by the name that they were called by.
        printf '#!/bin/sh\nexec %s --library-path %s --argv0 "$0" "$0.elf" "$@"\n' \
            "$2/$libraries/ld-linux-x86-64.so.2" "$2/$libraries" >"$tool"
        chmod +x "$tool"
    done
}

# The pattern list of an image names what some kernels have built in, so tar's complaint is ignored there and checked here.
finish_kernel() ( # a subshell, for its own variables
    series=$1 dir=$2 final=$out/kernel/$1
    # Newer packages have the image beside the modules.
    if [ ! -d "$dir/boot" ]; then
        mkdir "$dir/boot"
        for image in "$dir"/usr/lib/modules/*/vmlinuz; do
            mv "$image" "$dir/boot/vmlinuz-$(basename "$(dirname "$image")")"
        done
    fi
    [ "$(release_of "kernel-$series")" = bookworm ] || run_by_own_loader "$dir" "$final"
    release=$(ls "$dir/boot" | sed -n 's/^vmlinuz-//p')
    [ -n "$release" ] || die "no kernel image for $series"
    printf '%s\n' "$release" >"$dir/release"
    ln -sf "boot/vmlinuz-$release" "$dir/vmlinuz"
    # vmlinux: the payload that the boot protocol's header names (offset at 0x248, length at 0x24c, its last four bytes are a size).
    [ ! -t 2 ] || printf '\r\033[Kset-up: extracting vmlinux %s' "$release" >&2
    image=$dir/boot/vmlinuz-$release
    field() { od -An -tu"$2" -j"$(($1))" -N"$2" "$image" | tr -d ' '; }
    start=$((($(field 0x1f1 1) + 1) * 512 + $(field 0x248 4)))
    case $(od -An -tx1 -j$start -N4 "$image" | tr -d ' ') in
        fd377a58) expand="xz -dc --single-stream" ;;
        28b52ffd) expand="zstd -dc" ;;
        *) die "vmlinuz $release is compressed in a way this script does not know" ;;
    esac
    tail -c +$((start + 1)) "$image" | head -c $(($(field 0x24c 4) - 4)) | $expand >"$dir/vmlinux"
    [ "$(head -c 4 "$dir/vmlinux" | tail -c 3)" = ELF ] || die "could not extract vmlinux $release"
    mkdir -p "$dir/modules"
    find "$dir/lib/modules" "$dir/usr/lib/modules" -name '*.ko*' 2>/dev/null | while read -r ko; do
        case $ko in
            *.xz) xz -dc "$ko" >"$dir/modules/$(basename "$ko" .xz)" ;;
            *.zst) zstd -qdc "$ko" >"$dir/modules/$(basename "$ko" .zst)" ;;
            *) cp "$ko" "$dir/modules/" ;;
        esac
    done
    for ko in kvm kvm-amd kvm-intel; do [ -f "$dir/modules/$ko.ko" ] || die "$release has no $ko.ko"; done
    rm -rf "$dir/lib/modules/$release/kernel" "$dir/usr/lib/modules/$release/kernel"
    # The headers' Makefile and kbuild name each other by absolute paths under /usr.
    headers=$dir/usr/src/linux-headers-$release
    sed -i "s#/usr/src/#$final/usr/src/#g; s#/usr/lib/linux-kbuild#$final/usr/lib/linux-kbuild#g" "$headers/Makefile"
    ln -sfn "usr/src/linux-headers-$release" "$dir/headers"
    for tool in scripts/basic/fixdep scripts/mod/modpost tools/objtool/objtool; do
        [ -x "$headers/$tool" ] || die "the headers of $release lack $tool"
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
)

# The debug kernel, once built, lies in the cache, named by what it is made of.
debug_kernel_in_cache() {
    printf '%s/kernels/debug-%s.tar.zst' "$cache" "$( (locked kernel-6.12-debug; gcc --version | head -n 1
        cat "$lab_dir/debug.config"; sed -n '/^finish_debug_kernel/,/^}/p; /^strip_debug_kernel/,/^}/p' "$lab_dir/bootstrap.sh") |
        sha256sum | cut -c1-32)"
}

# 6.12 with everything on that finds faults: 15 to 25 minutes, once. Kept are the image, its modules, and what modules are built with.
finish_debug_kernel() {
    kept=$(debug_kernel_in_cache)
    if [ ! -f "$kept" ]; then
        usr=$1/usr libraries=$1/usr/lib/x86_64-linux-gnu
        # Where these tools look for themselves; the libraries are those of this machine.
        ln -sf /usr/lib/x86_64-linux-gnu/libelf.so.1 "$libraries/libelf.so"
        ln -sf /lib/x86_64-linux-gnu/libz.so.1 "$libraries/libz.so"
        tree=$1/source
        debug_make() {
            PATH=$usr/bin:$PATH M4=$usr/bin/m4 BISON_PKGDATADIR=$usr/share/bison C_INCLUDE_PATH=$usr/include LIBRARY_PATH=$libraries \
                MAKEFLAGS= make -s -C "$tree" ARCH=x86 "$@" >>"$out/debug-kernel.log" 2>&1
        }
        say "building the debug kernel: 15 to 25 minutes, once"
        : >"$out/debug-kernel.log"
        debug_make KCONFIG_ALLCONFIG="$lab_dir/debug.config" allnoconfig || die "no configuration, see $out/debug-kernel.log"
        debug_kernel_has_all "$tree/.config"
        debug_make -j"$(nproc)" vmlinux modules || die "the debug kernel does not build, see $out/debug-kernel.log"
        strip_debug_kernel "$tree" "$1/kept"
        mkdir -p "$cache/kernels"
        tar -C "$1/kept" -cf "$1/kept.tar" .
        zstd -q -f -T0 -3 "$1/kept.tar" -o "$kept.new"
        mv "$kept.new" "$kept"
    fi
    find "$1" -mindepth 1 -delete
    zstd -qdc "$kept" | tar -x -C "$1"
}

# Kconfig drops without a word what depends on something that is not there: every line of debug.config has to be in what came of it.
debug_kernel_has_all() { # debug_kernel_has_all CONFIG
    dropped=$(grep '^CONFIG_' "$lab_dir/debug.config" | while read -r line; do
        case $line in
        *=n) ! grep -q "^${line%=n}=" "$1" ;;
        *) grep -qxF "$line" "$1" ;;
        esac || printf '%s ' "$line"
    done)
    [ -z "$dropped" ] || die "the debug kernel does not have what lab/debug.config asks for: $dropped"
}

strip_debug_kernel() { # strip_debug_kernel SOURCE TO
    mkdir -p "$2/modules" "$2/headers" "$2/boot"
    release=$(cat "$1/include/config/kernel.release")
    printf '%s\n' "$release" >"$2/release"
    cp "$1/vmlinux" "$2/vmlinux"
    cp "$1/.config" "$2/boot/config-$release"
    find "$1" -name '*.ko' -exec cp {} "$2/modules/" \;
    for ko in kvm kvm-amd kvm-intel; do [ -f "$2/modules/$ko.ko" ] || die "the debug kernel has no $ko.ko"; done
    (cd "$1"; { find . -name '*.h' -o -name 'Makefile*' -o -name 'Kbuild*' -o -name '*.include'
        find scripts include/config include/generated arch/x86/include -type f ! -name '*.o' ! -name '.*.cmd'
        printf '%s\n' ./.config ./Module.symvers ./tools/objtool/objtool; } | sort -u >"$2.list"
        tar -cf "$2.tar" -T "$2.list")
    tar -xf "$2.tar" -C "$2/headers"
}

# QEMU 10 checks a guest's reads of CR3, CR4 and CR8 against the intercept of reads of CR0: its translator takes the exit code 0
# for "none" and does not add the register's number. A guest under shadow paging then reads the host's CR3, on either module. The
# jump over the addition becomes a no-op.
mend_reads_of_cr3() {
    perl -0777 -i -e '
        $_ = <>;
        $mended = s/(\x41\x0f\xb6\x44\x24\x18\x84\xc0)\x0f\x84..\xff\xff(\x01\xd0\x41\x88\x44\x24\x18)/$1\x66\x0f\x1f\x44\x00\x00$2/gs;
        print; exit($mended != 1);' "$1"
}

finish_qemu() {
    mkdir -p "$out/bin"
    if mend_reads_of_cr3 "$1/usr/bin/qemu-system-x86_64"; then : >"$1/reads-of-cr3-are-mended"
    else say "this QEMU is not the one whose reads of CR3 can be mended: expect failures with npt=0"; fi
    cat >"$out/bin/qemu.new" <<WRAPPER
#!/bin/sh
# The lab's own QEMU: Debian's packages, unpacked beside this file.
q=$out/qemu/usr
export LD_LIBRARY_PATH="\$q/lib/x86_64-linux-gnu:$out/qemu/lib/x86_64-linux-gnu"
exec "\$q/bin/qemu-system-x86_64" -L "\$q/share/qemu" -L "\$q/share/seabios" "\$@"
WRAPPER
    chmod +x "$out/bin/qemu.new"
    mv "$out/bin/qemu.new" "$out/bin/qemu"
}

# Debian's Bochs links the graphical debugger's libraries, a hundred packages, and calls none of them unless it is opened: functions
# that abort stand in for theirs.
finish_bochs() {
    libraries=$1/usr/lib/x86_64-linux-gnu
    readelf -W --dyn-syms "$1/usr/bin/bochs-bin" |
        awk '$7 == "UND" && $8 ~ /^(gtk|gdk|pango|g)_[a-z0-9_]+$/ { print "void " $8 "(void) { abort(); }" }' >"$1/absent.c"
    grep -q gtk_main "$1/absent.c" || die "this Bochs is not as expected: it does not use GTK"
    cc -O2 -Wall -Werror -shared -fPIC -include "$lab_dir/intel/shim.c" -o "$1/shim.so" "$1/absent.c" || die "lab/intel/shim.c does not build"
    : >"$1/empty.c"
    for name in $(readelf -d "$1/usr/bin/bochs-bin" | sed -n 's/.*NEEDED.*\[\(lib\(gtk\|gdk\|pango\|gobject\|glib\)-.*\)\]/\1/p'); do
        cc -shared -fPIC -Wl,-soname,"$name" -o "$libraries/$name" "$1/empty.c"
    done
    cc -O2 -Wall -Werror -static -o "$1/debug-port" "$lab_dir/intel/debug-port.c" || die "lab/intel/debug-port.c does not build"
    as --32 -o "$1/boot.o" "$lab_dir/intel/boot.S" && ld -m elf_i386 -Ttext 0 --oformat binary -o "$1/boot.rom" "$1/boot.o" ||
        die "lab/intel/boot.S does not build"
    mkdir -p "$out/bin"
    cat >"$out/bin/bochs.new" <<WRAPPER
#!/bin/sh
# The lab's own Bochs: Debian's packages, unpacked beside this file.
b=$out/bochs
export LD_LIBRARY_PATH="\$b/usr/lib/x86_64-linux-gnu:\$b/lib/x86_64-linux-gnu" LD_PRELOAD="\$b/shim.so"
export BXSHARE="\$b/usr/share/bochs" LTDL_LIBRARY_PATH="\$b/usr/lib/x86_64-linux-gnu/bochs/plugins"
exec "\$b/usr/bin/bochs-bin" "\$@"
WRAPPER
    chmod +x "$out/bin/bochs.new"
    mv "$out/bin/bochs.new" "$out/bin/bochs"
}

# The C compiler of the Linux guest: what it takes to build and run a program, and no more.
finish_tcc() {
    libraries=$1/usr/lib/x86_64-linux-gnu
    rm -rf "$1/usr/share" "$1/etc" "$1/usr/bin/i386-tcc" "$libraries"/lib*.a "$libraries/audit" "$libraries/gconv"
    rm -rf "$1/usr/include/linux"/*/ "$1/usr/include/scsi" "$1/usr/include/sound" "$1/usr/include/rdma" "$1/usr/include/drm"
    dpkg-deb --fsys-tarfile "$(deb_file "$(locked tcc | awk '$2 == "libc6-dev" { print $4 }')")" |
        tar -x -C "$1" ./usr/lib/x86_64-linux-gnu/libc_nonshared.a
    find "$1/lib/x86_64-linux-gnu" "$1/usr/lib/x86_64-linux-gnu" -maxdepth 1 -name 'lib*.so*' ! -name 'libc.so*' ! -name 'libm.so*' \
        ! -name 'libdl.so*' ! -name 'libpthread.so*' -delete
    [ -x "$1/usr/bin/tcc" ] && [ -e "$libraries/crt1.o" ] && [ -e "$1/lib/x86_64-linux-gnu/libc.so.6" ] || die "tcc is incomplete"
}

# The kernel's selftests of KVM, linked statically, in bin/; their source goes again.
finish_selftests() { # finish_selftests GROUP FOLDER
    tests=$2/tools/testing/selftests/kvm log=$out/$1.log
    # A device under VFIO is given to one test, where it is asked for one. What that takes wants libuuid and drivers' headers.
    vfio=$2/tools/testing/selftests/vfio/lib/libvfio.mk
    [ ! -f "$vfio" ] || printf '%s\n' 'CFLAGS += -I../vfio/lib/include' \
        '$(OUTPUT)/irq_test: LDLIBS += -Wl,--unresolved-symbols=ignore-all' >"$vfio"
    # Beneath a make the suite's Makefiles take theirs for who says where to build.
    unset MAKELEVEL MAKEFLAGS MFLAGS
    make -s -C "$2" headers ARCH=x86 >"$log" 2>&1 || die "the kernel's headers cannot be made, see $log"
    make -s -C "$tests" -j"$(nproc)" ARCH=x86_64 KHDR_INCLUDES="-isystem $2/usr/include" LDFLAGS='-static -pthread' \
        >>"$log" 2>&1 || die "the selftests do not build, see $log"
    mkdir "$2/bin"
    find "$tests" -maxdepth 2 -type f -perm -1 ! -name '*.*' | while read -r test; do strip -o "$2/bin/$(basename "$test")" "$test"; done
    [ -x "$2/bin/state_test" ] || die "the selftests are incomplete"
    find "$2" -mindepth 1 -maxdepth 1 ! -name bin -exec rm -rf {} +
}

# libFuzzer and the runtimes of the sanitizers, of the LLVM that the compiler has, in one folder.
finish_fuzz() {
    mkdir "$1/lib"
    for name in fuzzer-x86_64.a asan-x86_64.so tsan-x86_64.so; do
        cp "$1"/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.$name "$1/lib/" || die "the sanitizers' package has no $name"
    done
    rm -rf "$1/usr"
}

group_dir() {
    case $1 in
        kernel-*) printf '%s/kernel/%s' "$out" "${1#kernel-}" ;;
        *) printf '%s/%s' "$out" "$1" ;;
    esac
}

stamp_text() {
    printf 'layout %s in %s\n' $layout "$out"
    [ "$1" != qemu ] || printf 'mended 1\n'
    [ "$1" != bochs ] || (cd "$lab_dir/intel" && sha256sum boot.S debug-port.c shim.c)
    # Built here: another configuration, compiler or way to build is another kernel.
    [ "$1" != kernel-6.12-debug ] || basename "$(debug_kernel_in_cache)"
    locked "$1"
}

group_is_ready() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$(stamp_text "$1")" ]; }

set_up() {
    group=$1 dir=$(group_dir "$1")
    say "unpacking $group"
    rm -rf "$dir.tmp" "$stamps/$group"
    locked "$group" | unpack_into "$dir.tmp"
    finish "$group" "$dir.tmp"
    rm -rf "$dir"
    mkdir -p "$(dirname "$dir")"
    mv "$dir.tmp" "$dir"
    stamp_text "$group" >"$stamps/$group.new"
    mv "$stamps/$group.new" "$stamps/$group"
}

# --- main -------------------------------------------------------------------------------------------------------------------

mkdir -p "$stamps"
if [ "${1:-}" = --relock ]; then
    need_plain_packages
    relock
    exit 0
fi
groups=${*:-$all_groups}
todo=
for group in $groups; do
    grep -q "^$group " "$lab_dir/packages.txt" || die "no such group: $group (there are: $all_groups $other_groups)"
    group_is_ready "$group" || todo="$todo $group"
done
need_plain_packages
[ -n "$todo" ] || exit 0

[ "$(uname -m)" = x86_64 ] || die "Gannet is for x86-64"
mkdir -p "$debs"
exec 9>"$out/set-up.lock" 8>"$cache/set-up.lock"
flock -n 9 || { say "another set-up is running in this checkout; waiting for it"; flock 9; }
flock -n 8 || { say "another set-up is filling the cache; waiting for it"; flock 8; }

[ -f "$lock" ] || relock
# Everything still to be fetched goes in one download.
fetch_all() {
    : >"$out/wanted"
    for group in $todo; do locked "$group" >>"$out/wanted"; done
    fetch_lines "$out/wanted"
}
gone=
if ! fetch_all; then
    [ -n "$gone" ] || die "download failed"
    refresh_lists
    for group in $todo; do
        locked "$group" >"$out/group-lines"
        changed=no
        while read -r _ name version sha _; do
            [ -f "$(deb_file "$sha")" ] || in_archive "$name" "$version" || { changed=yes; gone="$name $version"; }
        done <"$out/group-lines"
        [ $changed = yes ] || continue
        say "$gone has left the archive: taking the newest versions for $group instead of lab.lock's"
        resolve "$group" >"$out/group-lines"
        [ -s "$out/group-lines" ] || die "group $group could not be resolved"
        { [ ! -f "$newer_lock" ] || grep -v "^$group " "$newer_lock" || true; cat "$out/group-lines"; } >"$newer_lock.new"
        mv "$newer_lock.new" "$newer_lock"
    done
    fetch_all || die "packages are missing from the archive: $gone"
fi
for group in $todo; do
    group_is_ready "$group" || set_up "$group"
done
