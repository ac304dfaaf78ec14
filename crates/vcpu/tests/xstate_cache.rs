//! CPUID instructions that the host executes for its guests: none with the layout table, whatever the
//! guest does; without it, one for each component and format whenever an input changes.

mod rig;

use backend::{Gprs, RCX, RDX, Registers};
use cpu::Op;
use cpuid::{Entry, Error};
use gannet_vcpu::{By, RunInput, UserExit};
use proptest::prelude::*;
use rig::{Machine, TestVcpu, exit, features, shutdown, vcpu_of};
use svm::Features;
use x86::vmcb::{ExitCode, Vmcb};

const OSXSAVE: u64 = x86::Cr4::OSXSAVE.bits();
const EBX: usize = 1;

fn machine(xstate_cache: bool) -> Machine {
    // As on the first CPUs with SVM, CR4 is never the guest's own: every write exits.
    let features =
        Features { nrip_save: true, cr4_known: x86::Cr4::from_bits_retain(u64::MAX), ..features() };
    Machine { features, xstate_cache, ..Machine::default() }
}

fn xsetbv(value: u64) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static {
    move |vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (0, 0);
        vmcb.save.rax = value;
        exit(ExitCode::Xsetbv)(vmcb, gprs);
    }
}

fn toggle_cr4(bit: u64) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static {
    move |vmcb, gprs| {
        gprs.0[RDX] = vmcb.save.cr4 ^ bit;
        exit(ExitCode::WriteCr4)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    }
}

fn cpuid(leaf: u64, subleaf: u64) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static {
    move |vmcb, gprs| {
        gprs.0[RCX] = subleaf;
        vmcb.save.rax = leaf;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    }
}

/// Plays what `script` puts there and counts the CPUID instructions of the host.
fn cpuids(v: &mut TestVcpu, script: impl FnOnce(&mut cpu::Model) -> &mut cpu::Model) -> u64 {
    let before = v.backend().cpu().counts();
    script(v.backend().cpu().inner()).then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    v.backend().cpu().counts().since(&before).of(Op::Cpuid)
}

fn entry(entries: &[Entry], leaf: u32, index: u32) -> Entry {
    *entries.iter().find(|e| e.is_for(leaf, index)).unwrap()
}

/// A guest that owns CR4 clears OSXSAVE without an exit; the loop is left and entered, whereupon it runs with the
/// host's XCR0, which it cannot see. Its next write of CR4 may set the bit, and has to be seen.
#[test]
fn a_guest_without_osxsave_does_not_own_cr4() {
    const WRITES_CR4: u32 = 1 << (16 + 4);
    let features = Features { nrip_save: true, cr4_known: x86::Cr4::OSXSAVE, ..features() };
    let mut v = vcpu_of(&Machine { features, ..Machine::default() });
    let mut sregs = v.sregs();
    sregs.cr4 |= x86::Cr4::OSXSAVE;
    v.set_sregs(&sregs, None).unwrap();
    v.set_xcr0(3).unwrap();
    let script = v.backend().cpu().inner();
    script.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.intercepts[0] & WRITES_CR4, 0, "the guest owns it");
        vmcb.save.cr4 &= !OSXSAVE;
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    script.then(|vmcb, gprs| {
        assert_ne!(vmcb.control.intercepts[0] & WRITES_CR4, 0, "its write would not be seen");
        gprs.0[RDX] = vmcb.save.cr4 | OSXSAVE;
        exit(ExitCode::WriteCr4)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    });
    script.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.intercepts[0] & WRITES_CR4, 0, "it owns it again");
        shutdown(vmcb, gprs);
    });
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    // The guest's and the host's, twice each.
    assert_eq!(v.backend().cpu().counts().since(&before).of(Op::Xsetbv), 4);
    assert_eq!(v.backend().cpu().inner().xcr0, 7, "the host has its own");
}

/// The VMM takes XSAVE from a guest that has set CR4.OSXSAVE already: the CPU still lets it look at XCR0, and use what
/// is in there, so it runs with its own and not with the host's.
#[test]
fn a_guest_that_loses_xsave_keeps_its_own_xcr0() {
    let mut v = vcpu_of(&Machine::default());
    let mut sregs = v.sregs();
    sregs.cr4 |= x86::Cr4::OSXSAVE;
    v.set_sregs(&sregs, None).unwrap();
    v.set_xcr0(3).unwrap();
    let mut table = v.cpuid_entries().to_vec();
    for e in table.iter_mut().filter(|e| e.leaf == 1) {
        e.ecx &= !(1 << 26);
    }
    v.set_cpuid(&table).unwrap();
    assert!(v.sregs().cr4.contains(x86::Cr4::OSXSAVE));
    v.backend().cpu().inner().then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(
        v.backend().cpu().counts().since(&before).of(Op::Xsetbv),
        2,
        "the guest's, the host's"
    );
}

#[test]
fn with_the_table_no_exit_makes_the_host_execute_cpuid() {
    let mut v = vcpu_of(&machine(true));
    let count = cpuids(&mut v, |script| {
        script.then(toggle_cr4(OSXSAVE));
        for _ in 0..4 {
            script.then(xsetbv(7)).then(cpuid(0xd, 0)).then(cpuid(0xd, 1)).then(xsetbv(3));
            script.then(toggle_cr4(OSXSAVE)).then(cpuid(1, 0)).then(cpuid(7, 0));
            script.then(toggle_cr4(OSXSAVE)).then(cpuid(0xd, 0));
        }
        script
    });
    assert_eq!(count, 0);
    v.write_msr(0x1b, 0xfee0_0900, By::Vmm).unwrap();
    v.set_xcr0(7).unwrap();
    let _ = v.cpuid_entries();
    assert_eq!(v.backend().cpu().counts().of(Op::Cpuid), 0);
}

#[test]
fn without_it_each_change_costs_one_cpuid_per_component_and_format() {
    let mut v = vcpu_of(&machine(false));
    // With x87 and SSE alone there is no component behind the header.
    assert_eq!(cpuids(&mut v, |s| s.then(toggle_cr4(OSXSAVE)).then(xsetbv(3))), 0);
    // After a shutdown the vCPU is as after INIT, which leaves XCR0 alone.
    assert_eq!(cpuids(&mut v, |s| s.then(toggle_cr4(OSXSAVE)).then(xsetbv(7))), 2 + 2);
    assert_eq!(cpuids(&mut v, |s| s.then(toggle_cr4(OSXSAVE))), 2 + 2);
    assert_eq!(cpuids(&mut v, |s| s.then(toggle_cr4(1 << 4))), 0);
    // What is up to date is not computed again, and neither is it when nothing changes.
    assert_eq!(cpuids(&mut v, |s| s.then(cpuid(0xd, 0)).then(cpuid(1, 0))), 0);
    assert_eq!(cpuids(&mut v, |s| s.then(toggle_cr4(OSXSAVE)).then(xsetbv(7))), 2 + 2);
    let _ = v.cpuid_entries();
    assert_eq!(cpuids(&mut v, |s| s), 0);
}

#[test]
fn a_cpuid_exit_sees_what_the_guest_has_just_changed() {
    for cache in [true, false] {
        let mut v = vcpu_of(&machine(cache));
        cpuids(&mut v, |s| {
            s.then(cpuid(0xd, 0)).then(toggle_cr4(OSXSAVE));
            for (xcr0, size) in [(3, 576), (7, 832), (1, 576)] {
                s.then(xsetbv(xcr0)).then(cpuid(0xd, 0));
                s.then(move |vmcb, gprs| {
                    assert_eq!(gprs.0[backend::RBX], size, "XCR0 {xcr0:#x}");
                    cpuid(0xd, 1)(vmcb, gprs);
                });
                s.then(move |vmcb, gprs| {
                    assert_eq!(gprs.0[backend::RBX], size, "compacted, XCR0 {xcr0:#x}");
                    cpuid(1, 0)(vmcb, gprs);
                });
                s.then(move |vmcb, gprs| {
                    let shown = gprs.0[RCX] & (1 << 27) != 0;
                    assert_eq!(shown, vmcb.save.cr4 & OSXSAVE != 0);
                    toggle_cr4(OSXSAVE)(vmcb, gprs);
                });
                s.then(cpuid(1, 0)).then(move |vmcb, gprs| {
                    let shown = gprs.0[RCX] & (1 << 27) != 0;
                    assert_eq!(shown, vmcb.save.cr4 & OSXSAVE != 0);
                    toggle_cr4(OSXSAVE)(vmcb, gprs);
                });
            }
            s
        });
    }
}

#[test]
fn every_ioctl_that_reads_or_compares_the_table_has_it_up_to_date() {
    for cache in [true, false] {
        let mut v = vcpu_of(&machine(cache));
        let set = rig::offered(cache).cpuid.entries().to_vec();
        cpuids(&mut v, |s| s.then(toggle_cr4(OSXSAVE)).then(xsetbv(7)));
        // The shutdown has put CR4 back; XCR0 is still what the guest set.
        let read = v.cpuid_entries().to_vec();
        assert_eq!(entry(&read, 0xd, 0).ebx, 832);
        v.set_xcr0(1).unwrap();
        // Neither what was read before the change nor what the VMM gave is another table.
        assert_eq!(v.set_cpuid(&read), Ok(()));
        assert_eq!(v.set_cpuid(&set), Ok(()));
        assert_eq!(entry(v.cpuid_entries(), 0xd, 0).ebx, 576);
        let mut other = read;
        other[1].eax ^= 1;
        assert_eq!(v.set_cpuid(&other), Err(Error::Invalid));
        assert_eq!(entry(v.cpuid_entries(), 1, 0).eax, entry(&set, 1, 0).eax);
    }
}

#[test]
fn a_new_table_takes_the_machine_state_at_once() {
    for cache in [true, false] {
        let mut v = vcpu_of(&machine(cache));
        v.set_xcr0(7).unwrap();
        let mut table = rig::offered(cache).cpuid.entries().to_vec();
        for e in &mut table {
            e.ebx = if e.leaf == 0xd { 1 } else { e.ebx };
        }
        v.set_cpuid(&table).unwrap();
        assert_eq!(entry(v.cpuid_entries(), 0xd, 0).ebx, 832);
        assert_eq!(entry(v.cpuid_entries(), 0xd, 1).ebx, 832);
        // A component's own size is no dynamic bit.
        assert_eq!(entry(v.cpuid_entries(), 0xd, 2).ebx, 1);
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Xsetbv(u64),
    Cr4(u64),
    SetXcr0(u64),
    ApicBase(bool),
    Read,
    Table,
    Cpuid(u32, u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..9u64).prop_map(Act::Xsetbv),
        prop_oneof![Just(OSXSAVE), Just(1 << 4), Just(1 << 22)].prop_map(Act::Cr4),
        (0..9u64).prop_map(Act::SetXcr0),
        any::<bool>().prop_map(Act::ApicBase),
        Just(Act::Read),
        Just(Act::Table),
        (prop_oneof![Just(1u32), Just(7), Just(0xd), Just(0x8000_0001)], 0..3u32)
            .prop_map(|(leaf, index)| Act::Cpuid(leaf, index)),
    ]
}

/// What a guest sees after each act, played on a vCPU of its own.
fn play(cache: bool, acts: &[Act]) -> Vec<Vec<Entry>> {
    let mut v = vcpu_of(&machine(cache));
    let table = rig::offered(cache).cpuid.entries().to_vec();
    let mut seen = Vec::new();
    for act in acts {
        match *act {
            Act::Xsetbv(value) => {
                let mut sregs = v.sregs();
                sregs.cr4 |= x86::Cr4::OSXSAVE;
                let _ = v.set_sregs(&sregs, None);
                cpuids(&mut v, |s| s.then(xsetbv(value)));
            }
            Act::Cr4(bit) => {
                let mut sregs = v.sregs();
                sregs.cr4 ^= x86::Cr4::from_bits_retain(bit);
                let _ = v.set_sregs(&sregs, None);
            }
            Act::SetXcr0(value) => drop(v.set_xcr0(value)),
            Act::ApicBase(on) => {
                let base = 0xfee0_0100 | u64::from(on) << 11;
                let _ = v.write_msr(0x1b, base, By::Vmm);
            }
            Act::Read => seen.push(v.cpuid_entries().to_vec()),
            Act::Table => drop(v.set_cpuid(&table)),
            Act::Cpuid(leaf, index) => {
                let answer = std::sync::Arc::new(std::sync::Mutex::new([0; 4]));
                let told = answer.clone();
                cpuids(&mut v, |s| {
                    s.then(cpuid(leaf.into(), index.into())).then(move |vmcb, gprs| {
                        *told.lock().unwrap() =
                            [vmcb.save.rax, gprs.0[3], gprs.0[1], gprs.0[2]].map(|r| r as u32);
                        exit(ExitCode::Intr)(vmcb, gprs);
                    })
                });
                seen.push(vec![Entry::new(leaf, index, *answer.lock().unwrap())]);
            }
        }
    }
    seen.push(v.cpuid_entries().to_vec());
    let sizes: Vec<u32> =
        seen.iter().flatten().filter(|e| e.leaf == 0xd).map(|e| e.answer()[EBX]).collect();
    assert!(sizes.iter().all(|s| matches!(s, 0 | 576 | 832)), "{sizes:?}");
    seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn the_switch_changes_nothing_that_can_be_seen(
        acts in proptest::collection::vec(act(), 1..24),
    ) {
        prop_assert_eq!(play(true, &acts), play(false, &acts));
    }
}

#[test]
fn xsetbv_without_osxsave_is_undefined() {
    let mut v = vcpu_of(&machine(true));
    let rip = v.backend().rip();
    v.backend().cpu().inner().then(xsetbv(7)).then(move |vmcb, gprs| {
        assert_eq!(vmcb.save.rip, rip, "an exception");
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.xcr0(), 1);
}
