//! An L1 with several VMCSs on one vCPU: each has a vmcs02 of its own, and what L1 and the host do meanwhile reaches it.

use backend::{
    Executed, Level, Nested as _, NestedPaging as _, Translation as _, WorldSwitch as _,
};
use cpu::{Counts, ModelVmcs, Op};
use nested_vmx::{Vmcs12, set};
use x86::vmcs::place::VMCS12_REVISION;
use x86::vmcs::{EntryControls, ExitControls, ExitReason, ProcControls2, field};
use x86::{Gpa, Hpa};
use zerocopy::IntoBytes as _;

use super::round_trip_tests::{Rig, features, good};
use crate::features::Features;
use crate::fields;

extern crate std;
use std::collections::HashSet;

/// The regions, of which the rig has made the first current.
const REGIONS: [u64; 6] = [0x1_1000, 0x1_2000, 0x1_3000, 0x1_4000, 0x1_5000, 0x1_6000];
const EPT: u64 = 0x3000;
/// Where INVEPT and INVVPID have their descriptors.
const OPERAND: u64 = 0x100;

/// The VMCS of an L2 whose registers differ from those of the others, as those of a guest's CPUs do: the bases of the kernel
/// and of the user, the task, the address space.
fn of(n: u64) -> Vmcs12 {
    let mut v = good();
    let own = 0x10_0000 * (n + 1);
    set!(
        v,
        HOST_DS_SELECTOR = 0,
        HOST_ES_SELECTOR = 0,
        HOST_FS_SELECTOR = 0,
        HOST_GS_SELECTOR = 0,
        PROC_CONTROLS2 = ProcControls2::VPID.bits(),
        VPID = n as u16 + 1,
        GUEST_FS_BASE = own,
        GUEST_GS_BASE = own + 0x1000,
        GUEST_TR_BASE = own + 0x2000,
        GUEST_GDTR_BASE = own + 0x3000,
        GUEST_CR3 = own + 0x4000,
        GUEST_SYSENTER_ESP = own + 0x5000,
        GUEST_RSP = own + 0x6000,
        GUEST_RIP = 0x4000
    );
    v
}

/// VMCS12 `n` of an L2 with MSRs of its own, of which its entry composes none.
fn with_msrs(n: u64) -> Vmcs12 {
    let mut v = of(n);
    let loads = EntryControls::LOAD_PAT | EntryControls::LOAD_DEBUG | EntryControls::LOAD_EFER;
    let saves = ExitControls::SAVE_PAT | ExitControls::SAVE_DEBUG | ExitControls::SAVE_EFER;
    let entry = v.get(field::ENTRY_CONTROLS) | loads.bits();
    let exit = v.get(field::EXIT_CONTROLS) | saves.bits();
    set!(v, ENTRY_CONTROLS = entry, EXIT_CONTROLS = exit, HOST_EFER = 0xd01);
    v
}

/// VMCS12 `n` of an L2 with tables of its own.
fn with_ept(n: u64) -> Vmcs12 {
    let mut v = of(n);
    set!(v, PROC_CONTROLS2 = (ProcControls2::VPID | ProcControls2::EPT).bits());
    v.set(field::EPT_POINTER, (EPT + (n << 12)) | 3 << 3 | 6);
    v
}

impl Rig {
    /// An L1 with these VMCSs, of which each has been entered. The last is current.
    fn with_vmcss(count: usize, of: fn(u64) -> Vmcs12) -> Self {
        let mut r = Self::on(Features { table_exits: true, ..features() }, &of(0), 0xd01);
        for (n, region) in REGIONS.into_iter().enumerate().take(count) {
            r.fill(region, &of(n as u64));
            r.load(region);
            r.turn(ExitReason::Vmlaunch, |_| {});
            // It has its VPID, by which the entry behind composes once more.
            r.turn(ExitReason::Vmresume, |_| {});
        }
        r
    }

    /// L1 writes a VMCS region, as nobody may whose VMCS it is.
    fn fill(&self, region: u64, vmcs12: &Vmcs12) {
        use backend::L1Memory as _;
        self.m.write(Gpa(region), vmcs12.as_bytes()).unwrap();
        self.m.write(Gpa(region), &VMCS12_REVISION.to_le_bytes()).unwrap();
    }

    /// L1 executes VMWRITE, with an exit or without.
    fn l1_writes(&mut self, encoding: u32, value: u64) {
        if self.v.nested.as_ref().unwrap().is_served() && self.is_written_without_exit(encoding) {
            return self.l1_vmwrite(encoding, value);
        }
        (self.g.0[0], self.g.0[2]) = (value, encoding.into());
        self.enter(ExitReason::Vmwrite, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 2 << 28));
        assert_eq!(self.v.execute(&mut self.g, 0, &self.m), Executed::Retired);
    }

    fn load(&mut self, region: u64) {
        assert_eq!(self.with_pointer(ExitReason::Vmptrld, region), Executed::Retired);
    }

    /// L1 enters its current L2, which finds its root.
    fn enter_l2(&mut self, by: ExitReason) {
        assert_eq!(self.go(by), Executed::Entered);
        let v12 = self.v.nested.as_ref().unwrap().machine.vmcs12();
        if v12.has_ept() {
            let root = Hpa((0x9000 + v12.get(field::EPT_POINTER)) & !0xfff);
            self.v.set_nested_root(root, false);
        }
    }

    /// L2 exits by CPUID, which L1 passes.
    fn leave_l2(&mut self, in_l2: impl Fn(&mut ModelVmcs) + Send + 'static) {
        self.enter(ExitReason::Cpuid, in_l2);
        assert_eq!(self.v.reflect(&mut self.g, &self.m), Executed::Left);
        let rip = self.v.nested.as_ref().unwrap().machine.vmcs12().get(field::GUEST_RIP);
        self.l1_writes(field::GUEST_RIP.encoding(), rip + 2);
    }

    fn turn(&mut self, by: ExitReason, in_l2: impl Fn(&mut ModelVmcs) + Send + 'static) {
        self.enter_l2(by);
        self.leave_l2(in_l2);
    }

    /// What a turn of another VMCS's L2 takes.
    fn switch_to(&mut self, region: u64) -> Counts {
        let before = self.v.cpu().counts();
        self.load(region);
        self.turn(ExitReason::Vmresume, |_| {});
        self.v.cpu().counts().since(&before)
    }

    /// L1 executes INVEPT or INVVPID of one context.
    fn invalidate(&mut self, reason: ExitReason, context: u64) {
        use backend::L1Memory as _;
        self.m.write(Gpa(OPERAND), &u128::from(context).to_le_bytes()).unwrap();
        self.g.0[0] = 1;
        self.enter(reason, |v| {
            v.set(field::EXIT_QUALIFICATION, OPERAND);
            v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
        });
        self.leave_loop();
        assert_eq!(self.v.execute(&mut self.g, 0, &self.m), Executed::Retired);
        self.come_to(0);
    }

    /// The host takes a page of the VM, and the vCPU hears of it between L1's VMPTRLD and what comes of that.
    fn flush_then_load(&mut self, region: u64) {
        use backend::L1Memory as _;
        self.m.write(Gpa(OPERAND), &region.to_le_bytes()).unwrap();
        self.enter(ExitReason::Vmptrld, |v| {
            v.set(field::EXIT_QUALIFICATION, OPERAND);
            v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
        });
        self.leave_loop();
        self.v.flush_tdp();
        assert_eq!(self.v.execute(&mut self.g, 0, &self.m), Executed::Retired);
        self.come_to(0);
    }

    /// The vmcs02 that L2 is entered with, while L1 runs.
    fn second(&self) -> Hpa {
        assert_eq!(self.v.level(), Level::L1);
        self.v.nested.as_ref().unwrap().other.hpa()
    }

    /// Enters L2 and looks at a field there; how many INVEPTs and INVVPIDs that took.
    fn flushes_of_entry(&mut self, by: ExitReason) -> (u64, u64) {
        let before = self.v.cpu().counts();
        self.enter_l2(by);
        self.enter(ExitReason::ExternalInterrupt, |_| {});
        let counts = self.v.cpu().counts().since(&before);
        (counts.of(Op::Invept), counts.of(Op::Invvpid))
    }

    fn vpid(&self) -> u16 {
        self.v.get(fields::VPID)
    }
}

fn told(counts: &Counts) -> [u64; 5] {
    [Op::Vmread, Op::Vmwrite, Op::Vmptrld, Op::Invvpid, Op::Invept].map(|op| counts.of(op))
}

/// A turn of either takes no more VMWRITEs than one of an L1 that has one VMCS, but for RIP, of which the shadow VMCS has the
/// other's. Their reads are what VMCS12 has not heard of yet, since it goes into L1's memory.
#[test]
fn a_switch_between_two_vmcss_writes_what_a_turn_writes() {
    for of in [of, with_ept] {
        let mut r = Rig::with_vmcss(2, of);
        // Until what L1 does not use of the shadow VMCS is closed.
        for n in 0..300 {
            r.switch_to(REGIONS[n % 2]);
        }
        let before = r.v.cpu().counts();
        r.turn(ExitReason::Vmresume, |_| {});
        let alone = r.v.cpu().counts().since(&before);
        for n in 0..4 {
            let counts = r.switch_to(REGIONS[n % 2]);
            assert!(counts.of(Op::Vmwrite) <= alone.of(Op::Vmwrite) + 2);
            assert!(counts.of(Op::Vmread) <= 66);
            assert_eq!((counts.of(Op::Invvpid), counts.of(Op::Invept)), (0, 0));
            assert_eq!(counts.of(Op::Vmclear), 0);
        }
    }
}

/// The honest before, and how much it is.
#[test]
fn without_tracking_one_vmcs02_serves_all() {
    let mut r = Rig::with_vmcss(1, of);
    r.v.nested.as_mut().unwrap().without_tracking = true;
    let only = r.second();
    r.fill(REGIONS[1], &of(1));
    r.load(REGIONS[1]);
    r.turn(ExitReason::Vmlaunch, |_| {});
    assert_eq!(r.second(), only);
    let counts = r.switch_to(REGIONS[0]);
    assert!(counts.of(Op::Vmwrite) > 80 && counts.of(Op::Invvpid) == 1, "{:?}", told(&counts));
}

/// An L1 with one VMCS, which it also takes from the CPU and gives back.
#[test]
fn an_l1_with_one_vmcs_has_one_vmcs02() {
    let mut r = Rig::new(&of(0), 0xd01);
    r.turn(ExitReason::Vmlaunch, |_| {});
    for reason in [ExitReason::Vmclear, ExitReason::Vmptrld] {
        assert_eq!(r.with_pointer(reason, REGIONS[0]), Executed::Retired);
    }
    r.turn(ExitReason::Vmlaunch, |_| {});
    assert_eq!(r.v.nested.as_ref().unwrap().seconds.count(), (0, false));
}

/// As many as there may be, and each has its own as long as it was current of late.
#[test]
fn the_one_that_was_left_longest_ago_is_used_again() {
    let mut r = Rig::with_vmcss(4, of);
    let mut seconds = [Hpa(0); 4];
    for (second, region) in seconds.iter_mut().zip(REGIONS) {
        r.switch_to(region);
        *second = r.second();
    }
    let all: HashSet<u64> = seconds.iter().map(|second| second.0).collect();
    assert_eq!((all.len(), r.v.nested.as_ref().unwrap().seconds.count()), (4, (3, true)));
    for (second, region) in seconds.iter().zip(REGIONS) {
        r.switch_to(region);
        assert_eq!(r.second(), *second);
    }
    // The first was left longest ago.
    r.fill(REGIONS[4], &of(4));
    r.load(REGIONS[4]);
    r.turn(ExitReason::Vmlaunch, |_| {});
    assert_eq!(r.second(), seconds[0]);
    r.switch_to(REGIONS[2]);
    assert_eq!(r.second(), seconds[2]);
    r.switch_to(REGIONS[0]);
    assert_eq!(r.second(), seconds[1]);
    // It is L2's own state that was recomposed.
    r.enter_l2(ExitReason::Vmresume);
    assert_eq!(r.v.get(fields::GUEST_FS_BASE), of(0).get(field::GUEST_FS_BASE));
}

/// L1 rewrites a region, as it may behind VMCLEAR, or as it may not: what it has written counts, and is checked.
#[test]
fn what_l1s_memory_has_is_what_l2_is_entered_with() {
    for cleared in [true, false] {
        let mut r = Rig::with_vmcss(2, of);
        if cleared {
            assert_eq!(r.with_pointer(ExitReason::Vmclear, REGIONS[0]), Executed::Retired);
        }
        let mut new = of(0);
        set!(new, GUEST_FS_BASE = 0x7777_0000, HOST_RSP = 0x8888, GUEST_RIP = 0x4004);
        new.set_launched(!cleared);
        r.fill(REGIONS[0], &new);
        r.load(REGIONS[0]);
        r.enter_l2(if cleared { ExitReason::Vmlaunch } else { ExitReason::Vmresume });
        assert_eq!(r.v.get(fields::GUEST_FS_BASE), 0x7777_0000);
        assert_eq!(r.v.get(fields::GUEST_TR_BASE), of(0).get(field::GUEST_TR_BASE));
        r.leave_l2(|_| {});
        assert_eq!(r.g.0[backend::RSP], 0x8888);
        // A host state that is none.
        r.switch_to(REGIONS[1]);
        set!(new, HOST_CR3 = 1 << 60);
        new.set_launched(true);
        r.fill(REGIONS[0], &new);
        r.load(REGIONS[0]);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired);
        // Guest state that is none: L1 hears of it, and vmcs02 is not entered with it.
        set!(new, HOST_CR3 = 0x3000, GUEST_TR_RIGHTS = 0);
        r.load(REGIONS[1]);
        r.fill(REGIONS[0], &new);
        r.load(REGIONS[0]);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Left);
    }
}

/// L1 goes on with the host state of the VMCS that was left by an exit, also where the one before had another.
#[test]
fn each_vmcs_has_its_own_host_state() {
    let mut r = Rig::with_vmcss(2, of);
    r.load(REGIONS[0]);
    r.l1_writes(field::HOST_FS_BASE.encoding(), 0x5555_0000);
    r.turn(ExitReason::Vmresume, |_| {});
    for _ in 0..2 {
        for (region, base) in
            [(REGIONS[1], of(1).get(field::HOST_FS_BASE)), (REGIONS[0], 0x5555_0000)]
        {
            r.switch_to(region);
            assert_eq!(r.v.get(fields::GUEST_FS_BASE), base);
        }
    }
}

/// L1 flushes its tables, or the host takes a page of the VM, while the L2 whose tables they are is not the one that runs:
/// what the CPU has of them is forgotten before that is entered again.
#[test]
fn what_is_flushed_meanwhile_is_flushed_behind_the_root_of_the_other() {
    for (by_l1, waits) in [(true, false), (false, false), (false, true)] {
        let mut r = Rig::with_vmcss(2, with_ept);
        r.switch_to(REGIONS[0]);
        r.switch_to(REGIONS[1]);
        // Nothing is flushed for nothing.
        r.load(REGIONS[0]);
        assert_eq!(r.flushes_of_entry(ExitReason::Vmresume), (0, 0));
        r.leave_l2(|_| {});
        r.switch_to(REGIONS[1]);
        if waits {
            r.load(REGIONS[0]);
            r.enter(ExitReason::ExternalInterrupt, |_| {});
            // Told before it is known that L1 has executed VMPTRLD.
            r.flush_then_load(REGIONS[1]);
        } else if by_l1 {
            r.invalidate(ExitReason::Invept, with_ept(0).get(field::EPT_POINTER));
        } else {
            r.v.flush_tdp();
        }
        // The other L2 runs, and with it goes what was to be flushed.
        r.turn(ExitReason::Vmresume, |_| {});
        let before = r.invepts();
        r.turn(ExitReason::Vmresume, |_| {});
        assert_eq!(r.invepts(), before);
        r.load(REGIONS[0]);
        // Behind the root, which is brought in order first.
        let before = r.invepts();
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        assert_eq!(r.invepts(), before, "L1 alone runs");
        let (invepts, _) = r.flushes_of_entry(ExitReason::Vmresume);
        assert!(invepts > 0, "by L1: {by_l1}, waits: {waits}");
    }
}

/// INVVPID of whatever context reaches each.
#[test]
fn invvpid_costs_each_its_vpid() {
    let mut r = Rig::with_vmcss(2, of);
    r.load(REGIONS[0]);
    r.enter_l2(ExitReason::Vmresume);
    let vpid = r.vpid();
    r.leave_l2(|_| {});
    r.switch_to(REGIONS[1]);
    r.load(REGIONS[0]);
    r.enter_l2(ExitReason::Vmresume);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_eq!(r.vpid(), vpid);
    r.leave_l2(|_| {});
    r.switch_to(REGIONS[1]);
    r.invalidate(ExitReason::Invvpid, 1);
    r.load(REGIONS[0]);
    r.enter_l2(ExitReason::Vmresume);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_ne!(r.vpid(), vpid);
}

/// Two VMCSs with one VPID of L1's: what an L2 flushes under it by itself is to be seen by the other.
#[test]
fn two_tags_do_not_stand_for_one_vpid() {
    let mut r = Rig::with_vmcss(2, of);
    r.l1_writes(field::VPID.encoding(), 1);
    r.turn(ExitReason::Vmresume, |_| {});
    r.load(REGIONS[0]);
    assert_eq!(r.flushes_of_entry(ExitReason::Vmresume).1, 1);
    r.leave_l2(|_| {});
    r.load(REGIONS[1]);
    assert_eq!(r.flushes_of_entry(ExitReason::Vmresume).1, 1);
}

/// The vCPU moves: no CPU keeps anything of a VMCS that nobody enters there, and what it left is not found again.
#[test]
fn all_of_them_move_with_the_vcpu() {
    let mut r = Rig::with_vmcss(4, of);
    r.load(REGIONS[0]);
    r.enter_l2(ExitReason::Vmresume);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    let vpid = r.vpid();
    r.leave_l2(|_| {});
    r.switch_to(REGIONS[1]);
    r.leave_loop();
    assert!(r.v.nested.as_ref().unwrap().beside().all(|vmcs| !vmcs.may_run_on(1)));
    assert!(!r.v.may_run_on(1));
    r.come_to(1);
    r.turn(ExitReason::Vmresume, |_| {});
    r.leave_loop();
    let n = r.v.nested.as_ref().unwrap();
    assert_eq!(n.beside().filter(|vmcs| !vmcs.may_run_on(0)).count(), 2, "vmcs02 and the shadow");
    r.come_to(0);
    // Loaded by VMLAUNCH, as what was cleared is: the model CPU refuses VMRESUME.
    r.load(REGIONS[0]);
    r.enter_l2(ExitReason::Vmresume);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_ne!(r.vpid(), vpid);
}

/// One that lies aside keeps the rest waiting on a CPU that the vCPU has left.
#[test]
fn one_that_lies_aside_is_cleared_before_the_vcpu_runs_elsewhere() {
    let mut r = Rig::with_vmcss(2, of);
    r.leave_loop();
    let n = r.v.nested.as_ref().unwrap();
    r.v.vmcs.clear_elsewhere();
    n.other.clear_elsewhere();
    n.shadow.as_ref().unwrap().vmcs.clear_elsewhere();
    assert!(!r.v.may_run_on(1));
    r.v.release_elsewhere();
    assert!(r.v.may_run_on(1));
    r.v.cpu().inner().vmx.come_to_another_cpu();
    r.come_to(0);
}

/// What an entry loads for the host's counters is exchanged in each that may be entered.
#[test]
fn counters_that_run_again_are_stopped_by_no_vmcs_that_lay_aside() {
    const LOAD: u32 = EntryControls::LOAD_PERF_GLOBAL_CTRL.bits();
    let mut r = Rig::with_vmcss(2, with_msrs);
    r.v.features.entry.may |= EntryControls::LOAD_PERF_GLOBAL_CTRL;
    let run = |r: &mut Rig, value: Option<u64>| {
        r.leave_loop();
        host::std_port::test::set_perf_guest(value);
        r.come_to(0);
    };
    run(&mut r, Some(5));
    // Not entered since: what it was composed of has no such bit.
    r.load(REGIONS[0]);
    run(&mut r, None);
    r.switch_to(REGIONS[1]);
    for region in [REGIONS[0], REGIONS[1]] {
        r.load(region);
        r.enter_l2(ExitReason::Vmresume);
        assert_eq!(r.v.get(fields::ENTRY_CONTROLS) & LOAD, 0, "{region:x}");
        r.leave_l2(|_| {});
    }
}

/// L1 disables caching for itself, which its L2s have from it.
#[test]
fn what_each_l2_has_from_l1_is_composed_anew_for_each() {
    use backend::{ControlRegisters, Registers as _};
    let mut r = Rig::with_vmcss(2, of);
    let cr0 = ControlRegisters::cr0(&r.v) ^ x86::Cr0::CD_NW;
    r.v.set_cr0(cr0);
    for region in [REGIONS[1], REGIONS[0]] {
        r.load(region);
        r.enter_l2(ExitReason::Vmresume);
        assert_eq!(ControlRegisters::cr0(&r.v) & x86::Cr0::CD_NW, cr0 & x86::Cr0::CD_NW);
        let _ = r.v.rflags();
        r.leave_l2(|_| {});
    }
}

/// Behind VMXOFF the VMM may take capabilities away: what was checked by those of before is checked again.
#[test]
fn nothing_that_was_checked_outlasts_vmx_operation() {
    let mut r = Rig::with_vmcss(2, of);
    r.enter(ExitReason::Vmxoff, |_| {});
    r.leave_loop();
    let _ = r.v.execute(&mut r.g, 0, &r.m);
    let n = r.v.nested.as_mut().unwrap();
    assert!(!n.machine.is_in_operation());
    n.machine.capabilities.secondary.0 &= !(u64::from(ProcControls2::VPID.bits()) << 32);
    r.come_to(0);
    assert_eq!(r.with_pointer(ExitReason::Vmxon, 0x1_0000), Executed::Retired);
    for region in [REGIONS[0], REGIONS[1]] {
        r.load(region);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired);
        let v12 = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!(v12.get(field::INSTRUCTION_ERROR), 7);
    }
}

/// L1 loads a shadow VMCS for a moment, as one does that has guests with guests.
#[test]
fn a_shadow_vmcs_has_no_vmcs02_and_costs_no_other_its_own() {
    use backend::L1Memory as _;
    let mut r = Rig::with_vmcss(2, of);
    let n = r.v.nested.as_mut().unwrap();
    n.machine.capabilities.secondary.0 |= u64::from(ProcControls2::SHADOW_VMCS.bits()) << 32;
    r.fill(REGIONS[2], &Vmcs12::new());
    let revision = VMCS12_REVISION | 1 << 31;
    r.m.write(Gpa(REGIONS[2]), &revision.to_le_bytes()).unwrap();
    r.switch_to(REGIONS[0]);
    let (own, alone) = (r.second(), r.switch_to(REGIONS[1]).of(Op::Vmwrite));
    r.load(REGIONS[2]);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired, "it cannot be entered");
    let counts = r.switch_to(REGIONS[1]);
    assert!(counts.of(Op::Vmwrite) <= alone + 30, "{:?}, {alone}", told(&counts));
    assert_eq!(r.v.nested.as_ref().unwrap().seconds.count().0, 1);
    r.switch_to(REGIONS[0]);
    assert_eq!(r.second(), own);
}
