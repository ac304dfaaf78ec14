#!/bin/sh
# Inside the lab's machine: runs the kernel's KVM selftests that are named, each for at most LIMIT seconds of that machine's, and prints
# `ok`, `skip` or `not ok` for each.

# The suite asks the stock modules' parameters before anything else, and skips every test without them: they are laid over
# /sys/module, as they are where Gannet is loaded.
if [ ! -d /sys/module/kvm ]; then
    mkdir -p /tmp/modules
    mount --bind /sys/module /tmp/modules
    mount -t tmpfs none /sys/module
    ln -s /tmp/modules/* /sys/module
    mkdir -p /sys/module/kvm/parameters
    echo 0 >/sys/module/kvm/parameters/force_emulation_prefix
    for parameter in enable_pmu eager_page_split ignore_msrs tdp_mmu; do echo N >/sys/module/kvm/parameters/$parameter; done
    ln -s gannet /sys/module/kvm_intel
    ln -s gannet /sys/module/kvm_amd
    mkdir /tmp/gannet
    cp -r /tmp/modules/gannet/parameters /tmp/gannet
    for parameter in unrestricted_guest:Y avic:N; do echo ${parameter#*:} >/tmp/gannet/parameters/${parameter%:*}; done
    rm /sys/module/gannet
    ln -s /tmp/gannet /sys/module/gannet
fi

passed=0 failed=0 skipped=0
for test in "$@"; do
    timeout -s KILL "${LIMIT:-60}" "/bin/$test" >/tmp/selftest 2>&1
    status=$?
    said=$(grep -vE '^$|Random seed|=== Test Assertion|pid=|addr2line|^ *[0-9]+.0x' /tmp/selftest | tail -n 4 | tr -s '\n ' ' ' | cut -c 1-300)
    case $status in
        0) echo "ok $test"; passed=$((passed + 1)) ;;
        4) echo "skip $test: $said"; skipped=$((skipped + 1)) ;;
        137) echo "not ok $test: more than ${LIMIT:-60} s"; failed=$((failed + 1)) ;;
        *) echo "not ok $test: status $status: $said"; failed=$((failed + 1)); [ -z "$VERBOSE" ] || cat /tmp/selftest ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
