#!/bin/bash
# all.sh: real VMMs and the tools that come with KVM, on stock KVM and on Gannet in the emulated AMD machine: QEMU by itself (run.sh),
# guests that are moved while a guest of theirs runs (moves.sh), the kernel's selftests for guests of guests (selftests.sh), perf, trace-cmd,
# virt-host-validate and libvirt (tests/tools). A test that fails on both modules is the machine's or its own; one that fails on Gannet
# alone counts. ONLY='qemu tools' runs these parts alone. Two are run only if they are named: `migrate`, in which two hosts take part, and
# `intel`, which is `moves` on the emulated Intel machine.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=target/vmms/all
mkdir -p "$out"
declare -A wanted
for part in ${ONLY:-qemu moves selftests tools}; do wanted[$part]=yes; done
make try MACHINE=amd COMMAND=true >"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log"; exit 1; }

run() { # run PART MODULE COMMAND...: its lines are kept and shown
    part=$1 module=$2
    shift 2
    echo "# $part, $module"
    "$@" 2>&1 | tr -d '\r' | tee "$out/$part.$module.log" | grep --line-buffered -E '^(ok|not ok|FAIL|skip) ' || true
}
moves="l2_moves_from_vmm_to_vmm l2_is_saved_and_put_back"
[ -z "${wanted[migrate]:-}" ] || ROUNDS=${ROUNDS:-25} bash tests/vmms/migrate.sh | tee "$out/migrate.log"
migrated=$?
unset "wanted[migrate]"
for module in stock gannet; do
    # From module to module, which is no test of stock KVM's.
    [ $module = stock ] || moves="$moves l2_moves_from_stock_to_gannet_and_back l2_without_npt_moves_from_stock_to_gannet_and_back"
    [ -z "${wanted[moves]:-}" ] || run moves $module sh tests/vmms/machine.sh 6.12 $module $moves
    [ -z "${wanted[intel]:-}" ] || run intel $module sh tests/vmms/intel.sh $module ${moves/l2_without_npt_*/}
    [ -z "${wanted[qemu]:-}" ] || run qemu $module sh tests/vmms/machine.sh 6.12 $module
    [ -z "${wanted[selftests]:-}" ] || run selftests $module sh tests/vmms/public.sh selftests amd $module
    [ -z "${wanted[tools]:-}" ] || run tools $module bash tests/tools/run.sh $module
done

names() { # names PART MODULE WORDS: the tests of which the log says so
    grep -E "^($3) " "$out/$1.$2.log" | sed -E "s/^($3) +([^ :]+).*/\2/" | sort -u
}
passed=0 failed=$migrated
for part in "${!wanted[@]}"; do
    for test in $(names "$part" gannet 'ok'); do passed=$((passed + 1)); done
    for module in stock gannet; do
        # A host that dies within a part leaves the tests that passed, and neither its last word nor a total.
        case $part in
            qemu | moves) grep -q 'machine: done' "$out/$part.$module.log" || { echo "not ok: $part did not come to its end on $module"; failed=$((failed + 1)); } ;;
        esac
        [ -n "$(names "$part" $module ok)" ] || { echo "not ok: nothing of $part ran on $module"; failed=$((failed + 1)); }
    done
    for test in $(comm -23 <(names "$part" gannet 'not ok|FAIL') <(names "$part" stock 'not ok|FAIL')); do
        echo "not ok $part: $test fails on Gannet alone"
        failed=$((failed + 1))
    done
    for test in $(comm -12 <(names "$part" gannet 'not ok|FAIL') <(names "$part" stock 'not ok|FAIL')); do
        echo "skip $part: $test fails on stock KVM too"
    done
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
