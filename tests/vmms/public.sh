#!/bin/sh
# public.sh kvm-ioctls|gvisor|selftests amd|intel stock|gannet: builds a public program from its own source, and runs it in the lab's
# machine with that module. Needs cargo or go (selftests: gcc), and a network the first time. KERNEL=6.1 for the other kernel.
# TESTS='state_test smm_test' runs those of the kernel's selftests (default: those for guests of guests; all: every one),
# LIMIT=60 is how many seconds of the machine's each may take, SELFTESTS=7.3 takes those of that kernel's source.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
program=$1 machine=$2 module=$3
shift 3
folder=$root/target/vmms/public
mkdir -p "$folder"

case $program in
    kvm-ioctls)
        # The crate's own tests of /dev/kvm, of the version that the lab tests use.
        if [ ! -x "$folder/kvm-ioctls" ]; then
            manifest=$(cd "$root" && cargo metadata --locked --format-version 1 |
                grep -o '"manifest_path":"[^"]*/kvm-ioctls-[0-9.]*/Cargo.toml"' | cut -d'"' -f4)
            rm -rf "$folder/source"
            cp -r "$(dirname "$manifest")" "$folder/source"
            rm -f "$folder/source/Cargo.lock"
            echo '[workspace]' >> "$folder/source/Cargo.toml"
            (cd "$folder/source" && RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR="$folder/cargo" \
                cargo test --no-run --lib --target x86_64-unknown-linux-gnu)
            cp "$(find "$folder/cargo" -path '*/deps/kvm_ioctls-*' -type f -perm -1 | head -n 1)" "$folder/kvm-ioctls"
        fi
        programs=$folder/kvm-ioctls
        command='kvm-ioctls --test-threads=1' ;;
    gvisor)
        # A sandbox whose kernel runs in ring 0 of a guest that shares its address space: runsc with the platform KVM.
        [ -x "$folder/runsc" ] || GOBIN=$folder CGO_ENABLED=0 go install \
            "gvisor.dev/gvisor/runsc@${GVISOR:-v0.0.0-20260905035102-160fafc42237}"
        cat > "$folder/gvisor.sh" <<'INSIDE'
# The sandbox wants to pivot away from a root that has a parent: a tmpfs over the initial one.
mkdir -p /new
mount -t tmpfs none /new
cd /new
cp -a /bin .
mkdir proc sys dev tmp root
mount -t proc none proc
mount -t sysfs none sys
mount --bind /dev dev
mount --move . /
exec chroot . runsc --platform=kvm --network=none --ignore-cgroups --root=/tmp do -force-overlay=false busybox sh -c '
    busybox uname -a
    for i in 1 2 3 4 5 6 7 8; do busybox echo process $i; done
    busybox seq 1 3000 | busybox md5sum
    busybox find /bin | busybox wc -l
    busybox dmesg | busybox head -n 1'
INSIDE
        programs="$folder/runsc $folder/gvisor.sh"
        command='sh /bin/gvisor.sh' ;;
    selftests)
        # The kernel's own selftests of KVM, from Debian's source of a kernel that the lab runs.
        case ${SELFTESTS:-6.12} in
            6.12) group=selftests ;;
            *) group=selftests-$SELFTESTS ;;
        esac
        "$root/lab/bootstrap.sh" "$group"
        tests=$root/target/lab/$group/bin
        nested='state_test smm_test triple_fault_event_test hyperv_evmcs hyperv_svm_test'
        runs=20
        case ${TESTS:-nested} in
            nested) TESTS="$nested $(cd "$tests" && echo nested_* svm_* vmx_*)" ;;
            all) TESTS=$(cd "$tests" && echo *) runs=60 ;;
        esac
        programs=$root/tests/vmms/selftests.sh
        for test in $TESTS; do programs="$programs $tests/$test"; done
        set -- PARAMETERS="${PARAMETERS-nested=1}" SECONDS="$((${LIMIT:-60} * runs))"
        command="LIMIT=${LIMIT:-60} VERBOSE=${VERBOSE:-} sh /bin/selftests.sh $(echo $TESTS)" ;;
    *) echo "no such program: $program" >&2; exit 2 ;;
esac

exec make -C "$root" try MACHINE="$machine" MODULE="$module" KERNEL="${KERNEL:-6.12}" PROGRAMS="$programs" \
    COMMAND="$command" "$@"
