//! Lists of MSRs that an entry of L2 loads and an exit stores, and entries that fail at one.

extern crate std;
use super::round_trip_tests::{Rig, good};
use super::*;
use backend::{Clock as _, Msrs as _, Nested as _, Permissions, RAX, RCX};
use nested_vmx::set;
use x86::vmcs::{ExitReason, field};
use x86::{Directions, Gpa, msr};

/// A list of MSRs at 0x3000, each with its number and value.
fn put_list(r: &Rig, list: &[(u32, u64)]) {
    for (at, (index, value)) in (0x3000_u64..).step_by(16).zip(list) {
        r.m.write(Gpa(at), &index.to_le_bytes()).unwrap();
        r.m.write(Gpa(at + 8), &value.to_le_bytes()).unwrap();
    }
}

fn loads(index: u32, value: u64) -> Option<ListMsr> {
    Some(ListMsr { index, act: backend::ListAct::Load(value) })
}

/// IA32_TSC in a list is L1's: loading moves it whoever runs, with what L2 is offset by, and the vCPU hears of it.
#[test]
fn the_tsc_in_a_list_of_msrs_is_l1s() {
    const TSC: u32 = 0x10;
    const OFFSET: u64 = 1 << 40;
    let mut v12 = good();
    let controls = v12.get(field::PROC_CONTROLS) | 1 << 3;
    set!(
        v12,
        PROC_CONTROLS = controls,
        TSC_OFFSET = OFFSET,
        EXIT_MSR_STORE_COUNT = 1,
        EXIT_MSR_STORE_ADDR = 0x3800,
        ENTRY_MSR_LOAD_COUNT = 1,
        ENTRY_MSR_LOAD_ADDR = 0x3000
    );
    let mut r = Rig::new(&v12, 0xd01);
    r.m.write(Gpa(0x3800), &TSC.to_le_bytes()).unwrap();
    put_list(&r, &[(TSC, 1 << 50)]);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    assert!(r.v.has_list_msrs());
    assert_eq!(r.next(), loads(TSC, 1 << 50));
    // As the vCPU does it.
    let moved = (1_u64 << 50) - r.v.guest_tsc_now();
    r.v.set_tsc(moved, backend::TSC_RATIO_ONE);
    assert_eq!(r.next(), None);
    assert!(!r.v.has_list_msrs());
    r.come_to(0);
    r.enter(ExitReason::Cpuid, move |vmcs| {
        assert_eq!(vmcs.get(field::TSC_OFFSET), moved.wrapping_add(OFFSET));
    });
    r.leave_loop();
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    let mut stored = [0; 8];
    r.m.read(Gpa(0x3808), &mut stored).unwrap();
    assert_eq!(u64::from_le_bytes(stored) >> 32, 1 << 18, "without L2's offset");
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, move |vmcs| {
        assert_eq!(vmcs.get(field::TSC_OFFSET), moved);
    });
}

/// An exit's list has the TSC of the exit, and not of the time at which L1's memory can be had for it.
#[test]
fn the_tsc_in_a_list_is_that_of_the_exit() {
    const TSC: u32 = 0x10;
    const LATER: u64 = 1 << 30;
    let mut v12 = good();
    set!(v12, EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_STORE_ADDR = 0x3000);
    let mut r = Rig::new(&v12, 0xd01);
    put_list(&r, &[(TSC, 0)]);
    // What the hardware stores, as far behind what software reads first, and what counts.
    let mut by = ExitReason::Vmlaunch;
    for behind in [None, Some(700), Some(LATER)] {
        assert_eq!(r.go(by), Executed::Entered);
        let list = r.v.nested.as_ref().unwrap().exit_tsc.hpa();
        r.enter(ExitReason::Cpuid, move |vmcs| {
            assert_eq!(vmcs.get(field::EXIT_MSR_STORE_COUNT), 1);
            assert_eq!(vmcs.get(field::EXIT_MSR_STORE_ADDR), list.0);
        });
        r.v.cpu().inner().tsc += LATER;
        let now = r.v.cpu().inner().tsc;
        let hardware = behind.map_or(0, |behind| now - behind);
        r.v.nested.as_mut().unwrap().exit_tsc.store(hardware);
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Outside);
        r.leave_loop();
        r.v.cpu().inner().tsc += LATER;
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        let mut stored = [0; 8];
        r.m.read(Gpa(0x3008), &mut stored).unwrap();
        let stored = u64::from_le_bytes(stored).wrapping_sub(r.v.tsc_offset);
        if behind == Some(700) {
            assert_eq!(stored, hardware);
        } else {
            assert!((now..now + 100).contains(&stored), "{stored:#x} {now:#x}");
        }
        r.come_to(0);
        by = ExitReason::Vmresume;
    }
    // Without such a list an exit stores nothing.
    r.vmwrite(field::EXIT_MSR_STORE_COUNT.encoding(), 0);
    assert_eq!(r.go(by), Executed::Entered);
    r.enter(ExitReason::Cpuid, |vmcs| assert_eq!(vmcs.get(field::EXIT_MSR_STORE_COUNT), 0));
}

/// What an entry's list loads is L2's; a list whose last entry cannot be loaded fails the entry behind L2's state, as the
/// lists of L1's CPU do.
#[test]
fn a_list_of_msrs_is_loaded_behind_l2s_state() {
    let mut v12 = good();
    set!(v12, ENTRY_MSR_LOAD_COUNT = 2, ENTRY_MSR_LOAD_ADDR = 0x3000);
    for (last, goes) in [((msr::SYSENTER_EIP, 0x1234), true), ((msr::FS_BASE, 0), false)] {
        let mut r = Rig::new(&v12, 0xd01);
        put_list(&r, &[(msr::PAT, 0x0606_0606_0606_0606), last]);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
        r.leave_loop();
        let done = r.v.execute(&mut r.g, 0, &r.m);
        if goes {
            assert_eq!(done, Executed::Entered);
            r.come_to(0);
            r.enter(ExitReason::ExternalInterrupt, |vmcs| {
                assert_eq!(vmcs.get(field::GUEST_PAT), 0x0606_0606_0606_0606);
                assert_eq!(vmcs.get(field::GUEST_SYSENTER_EIP), 0x1234);
            });
            continue;
        }
        assert_eq!(done, Executed::Left);
        r.come_to(0);
        r.enter(ExitReason::ExternalInterrupt, |vmcs| {
            assert_ne!(vmcs.get(field::GUEST_PAT), 0x0606_0606_0606_0606);
        });
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::EXIT_REASON), v.get(field::EXIT_QUALIFICATION)), (0x8000_0022, 2));
    }
}

/// What the VMM's filter denies is in no list: loads and stores.
#[test]
fn a_list_names_no_msr_that_the_vmm_denies() {
    const TSC: u32 = 0x10;
    for (denied, done) in
        [(Directions::WRITES, Executed::Left), (Directions::READS, Executed::Entered)]
    {
        let mut v12 = good();
        set!(v12, ENTRY_MSR_LOAD_COUNT = 1, ENTRY_MSR_LOAD_ADDR = 0x3000);
        let mut r = Rig::new(&v12, 0xd01);
        r.v.set_msr_filter(|index| denied.when(index == TSC));
        put_list(&r, &[(TSC, 1 << 50)]);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
        r.leave_loop();
        assert_eq!(r.v.execute(&mut r.g, 0, &r.m), done);
        assert_eq!(r.v.has_list_msrs(), denied == Directions::READS);
    }
}

impl Rig {
    /// What lists have for the vCPU next.
    fn next(&mut self) -> Option<ListMsr> {
        self.v.next_list_msr(&self.m)
    }

    /// L1 executes VMWRITE, from RAX by RCX.
    fn vmwrite(&mut self, encoding: u32, value: u64) {
        (self.g.0[RAX], self.g.0[RCX]) = (value, encoding.into());
        self.enter(ExitReason::Vmwrite, |vmcs| {
            let operands = 1 << 10 | (RAX as u32) << 3 | (RCX as u32) << 28;
            vmcs.set(field::INSTRUCTION_INFO, operands);
        });
        assert_eq!(self.v.execute(&mut self.g, 0, &self.m), Executed::Retired);
    }
}

/// An entry fails at its list, or in the hardware, behind a run of L2's that VMCS12 has not heard all of: what L2 has left
/// is there for L1, and for the next entry.
#[test]
fn what_l2_has_left_survives_an_entry_that_fails() {
    const LEFT: u64 = 0x7000;
    for by_list in [true, false] {
        let mut r = Rig::new(&good(), 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        r.enter(ExitReason::Cpuid, |vmcs| vmcs.set(field::GUEST_FS_BASE, LEFT));
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        let behind = r.v.nested.as_ref().unwrap().machine.needs_to_enter();
        assert!(behind.is_empty(), "nothing is fetched for the entry");
        if by_list {
            put_list(&r, &[(msr::FS_BASE, 0)]);
            r.vmwrite(field::ENTRY_MSR_LOAD_COUNT.encoding(), 1);
            r.vmwrite(field::ENTRY_MSR_LOAD_ADDR.encoding(), 0x3000);
            assert_eq!(r.go(ExitReason::Vmresume), Executed::Outside);
            r.leave_loop();
            assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Left);
            r.come_to(0);
            r.vmwrite(field::ENTRY_MSR_LOAD_COUNT.encoding(), 0);
        } else {
            assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
            r.enter(ExitReason::ExternalInterrupt, |vmcs| {
                vmcs.set(field::EXIT_REASON, 1 << 31 | 33);
            });
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        }
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, |vmcs| {
            assert_eq!(vmcs.get(field::GUEST_FS_BASE), LEFT);
        });
    }
}

/// What each guest has is stored with L2's value; what RDMSR of L1's might refuse the vCPU is asked for, or is a VMX abort.
#[test]
fn an_exit_stores_no_msr_that_l1_may_not_read() {
    let asked = |index| ListMsr { index, act: backend::ListAct::Store(Gpa(0x3008)) };
    for (index, vcpus) in [
        (msr::XSS, true),
        (msr::SPEC_CTRL, true),
        (x86::vmcs::capability::FEATURE_CONTROL, true),
        (x86::vmcs::capability::VMX_PROCBASED_CTLS2, true),
        (msr::SYSENTER_EIP, false),
        (msr::TSC_AUX, false),
    ] {
        let mut v12 = good();
        set!(v12, EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_STORE_ADDR = 0x3000);
        let mut r = Rig::new(&v12, 0xd01);
        put_list(&r, &[(index, 0)]);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::Cpuid, |_| {});
        r.leave_loop();
        r.v.cold.limits.tsc_aux = false;
        let is_abort = index == msr::TSC_AUX;
        let done = if is_abort { Executed::Shutdown } else { Executed::Left };
        assert_eq!(r.v.reflect(&mut r.g, &r.m), done, "{index:#x}");
        assert_eq!(r.next(), vcpus.then(|| asked(index)));
    }
}

/// A list is loaded in its order, whoever has an MSR of it: TSC_ADJUST moves the TSC that was loaded before, and not the one
/// that is loaded behind. What comes behind one that is refused is not loaded.
#[test]
fn a_list_is_loaded_in_its_order() {
    const TSC: u32 = 0x10;
    const EIP: u64 = 0x1234;
    let mut v12 = good();
    set!(v12, ENTRY_MSR_LOAD_COUNT = 4, ENTRY_MSR_LOAD_ADDR = 0x3000);
    let list = [(msr::TSC_ADJUST, 5), (TSC, 1 << 50), (msr::SYSENTER_EIP, EIP), (msr::EFER, 0xd01)];
    for refused in [false, true] {
        let mut r = Rig::new(&v12, 0xd01);
        put_list(&r, &list);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
        r.leave_loop();
        assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
        assert_eq!(r.next(), loads(msr::TSC_ADJUST, 5));
        assert_eq!(r.next(), loads(TSC, 1 << 50));
        let eip = |r: &Rig| r.v.msr(msr::SYSENTER_EIP).unwrap();
        assert_ne!(eip(&r), EIP);
        if !refused {
            assert_eq!(r.next(), loads(msr::EFER, 0xd01));
            assert_eq!(eip(&r), EIP);
            assert_eq!(r.next(), None);
            continue;
        }
        assert!(r.v.refuse_list_msr(), "the entry fails");
        assert_eq!(r.next(), None);
        assert_eq!(r.v.fail_at_list(&mut r.g, &r.m), Some(Executed::Left));
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::EXIT_REASON), v.get(field::EXIT_QUALIFICATION)), (0x8000_0022, 2));
    }
}

/// One that is bad fails the entry behind what waits before it, with its own number.
#[test]
fn what_comes_before_a_bad_one_is_loaded() {
    let mut v12 = good();
    set!(v12, ENTRY_MSR_LOAD_COUNT = 2, ENTRY_MSR_LOAD_ADDR = 0x3000);
    let mut r = Rig::new(&v12, 0xd01);
    put_list(&r, &[(msr::TSC_ADJUST, 5), (msr::FS_BASE, 0)]);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    assert_eq!(r.next(), loads(msr::TSC_ADJUST, 5));
    assert_eq!(r.next().map(|msr| msr.act), Some(backend::ListAct::Fail));
    assert!(r.v.refuse_list_msr());
    assert_eq!(r.v.fail_at_list(&mut r.g, &r.m), Some(Executed::Left));
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v.get(field::EXIT_QUALIFICATION), 2);
}

/// An exit loads behind all that it stores, which may lie in one place.
#[test]
fn an_exit_loads_what_it_has_stored() {
    let mut v12 = good();
    set!(
        v12,
        EXIT_MSR_STORE_COUNT = 1,
        EXIT_MSR_STORE_ADDR = 0x3000,
        EXIT_MSR_LOAD_COUNT = 1,
        EXIT_MSR_LOAD_ADDR = 0x3000
    );
    let mut r = Rig::new(&v12, 0xd01);
    put_list(&r, &[(msr::TSC_ADJUST, 1)]);
    r.leave_loop();
    r.come_to(0);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    r.come_to(0);
    r.enter(ExitReason::Cpuid, |_| {});
    r.leave_loop();
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    let act = backend::ListAct::Store(Gpa(0x3008));
    assert_eq!(r.next(), Some(ListMsr { index: msr::TSC_ADJUST, act }));
    r.m.write(Gpa(0x3008), &7_u64.to_le_bytes()).unwrap();
    assert_eq!(r.next(), loads(msr::TSC_ADJUST, 7));
    assert_eq!(r.next(), None);
}

/// The list of an entry that ends at once, for a priority below L1's threshold, is loaded all the same.
#[test]
fn an_entry_that_falls_loads_its_list() {
    use backend::{Asleep as _, Gate, MonitorTrap as _, Waiting};
    for halted in [0, 1] {
        let mut v12 = good();
        let controls = v12.get(field::PROC_CONTROLS) | 1 << 21 | 1 << 31;
        set!(
            v12,
            PROC_CONTROLS = controls,
            PROC_CONTROLS2 = 1,
            VIRTUAL_APIC_ADDR = 0x1_8000,
            APIC_ACCESS_ADDR = 0x1_9000,
            TPR_THRESHOLD = 5,
            ENTRY_MSR_LOAD_COUNT = 1,
            ENTRY_MSR_LOAD_ADDR = 0x3000,
            GUEST_ACTIVITY = halted
        );
        let mut r = Rig::new(&v12, 0xd01);
        put_list(&r, &[(msr::TSC_ADJUST, 5)]);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
        r.leave_loop();
        assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::EnteredOwing);
        assert_eq!(r.next(), loads(msr::TSC_ADJUST, 5));
        assert_eq!(r.next(), None);
        assert!(r.v.owes_trap());
        assert_eq!(r.v.gate(&Waiting::MonitorTrap), Gate::ExitToL1);
        // The vCPU does not sleep, and says so.
        r.v.set_activity(None);
        let done = r.v.exit_to_l1(&mut r.g, &Waiting::MonitorTrap, None, &r.m);
        assert_eq!(done, Executed::Left);
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::EXIT_REASON), v.get(field::GUEST_ACTIVITY)), (43, halted));
    }
}

/// It is told in the place of the exit that the entry injects, which comes behind it.
#[test]
fn an_entry_that_falls_injects_no_monitor_trap() {
    let mut v12 = good();
    let controls = v12.get(field::PROC_CONTROLS) | 1 << 21 | 1 << 31;
    set!(
        v12,
        PROC_CONTROLS = controls,
        PROC_CONTROLS2 = 1,
        VIRTUAL_APIC_ADDR = 0x1_8000,
        APIC_ACCESS_ADDR = 0x1_9000,
        TPR_THRESHOLD = 5,
        ENTRY_INTERRUPTION = 0x8000_0700
    );
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Left);
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!((v.get(field::EXIT_REASON), v.get(field::ENTRY_INTERRUPTION)), (43, 0x700));
    r.enter(ExitReason::ExternalInterrupt, |vmcs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) >> 31, 0);
    });
}
