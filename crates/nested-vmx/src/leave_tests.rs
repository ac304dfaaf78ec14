use x86::Rflags;
use x86::segment::attr;

use super::*;
use crate::testing::{Vmcs02, capabilities, good, set};

const KNOWN: Known = Known {
    activity: 0,
    cr0_mask: 0x6000_0028,
    cr4_mask: 0x2000,
    preemption_timer: 77,
    pat: 0x0606,
    efer: 0xd01,
    debugctl: 2,
};

/// Another than L2's.
const L1_EFER: u64 = 0xd00;

fn after_cpuid() -> Vmcs02 {
    let mut vmcs = Vmcs02::new();
    set!(
        VmcsPut(&mut vmcs),
        GUEST_RIP = 0x1234,
        GUEST_RSP = 0x5678,
        GUEST_RFLAGS = 0x246,
        GUEST_CS_RIGHTS = 0xa09b,
        GUEST_SS_RIGHTS = 0xc093,
        GUEST_DR7 = 0x402,
    );
    vmcs.put(field::EXIT_REASON, 10);
    vmcs.put(field::INSTRUCTION_LENGTH, 2);
    vmcs.put(field::EXIT_QUALIFICATION, 99);
    vmcs
}

/// Lets the table macro fill the hardware's VMCS.
struct VmcsPut<'a>(&'a mut Vmcs02);

impl VmcsPut<'_> {
    fn set<W: Width, A>(&mut self, field: Field<W, A>, value: W::Value) {
        self.0.put(field, value);
    }
}

#[test]
fn a_frequent_exit_reads_few_fields() {
    let exit = after_cpuid();
    let mut v = good();
    set!(v, ENTRY_INTERRUPTION = 0x8000_0030, EXIT_QUALIFICATION = 5);
    let report = Report::of(&exit);
    let known = Known { pat: v.get(field::GUEST_PAT), ..KNOWN };
    let differ = save(&mut v, &exit, &report, &known, (L1_EFER, true));
    assert_eq!(exit.reads.get(), 9);
    assert_eq!((v.get(field::EXIT_REASON), v.get(field::INSTRUCTION_LENGTH)), (10, 2));
    assert_eq!(v.get(field::EXIT_QUALIFICATION), 0);
    assert_eq!((v.get(field::GUEST_RIP), v.get(field::GUEST_RSP)), (0x1234, 0x5678));
    assert_eq!(v.get(field::ENTRY_INTERRUPTION), 0x30, "no longer valid");
    assert_eq!(differ, Groups::of(Group::Msrs), "the debug registers were not saved");
}

#[test]
fn what_the_controls_ask_for_is_saved() {
    let mut v = good();
    let all = 1 << 2 | 1 << 18 | 1 << 20 | 1 << 22;
    set!(v, EXIT_CONTROLS = all, ENTRY_CONTROLS = 1 << 2 | 1 << 14 | 1 << 15 | 1 << 9);
    let exit = after_cpuid();
    let differ = save(&mut v, &exit, &Report::of(&exit), &KNOWN, (L1_EFER, true));
    assert_eq!((v.get(field::GUEST_DR7), v.get(field::GUEST_DEBUGCTL)), (0x402, 2));
    assert_eq!((v.get(field::GUEST_PAT), v.get(field::GUEST_EFER)), (0x0606, 0xd01));
    assert_eq!(v.get(field::PREEMPTION_TIMER), 77);
    assert!(differ.is_empty());
    let left_long_mode = Known { efer: 0x801, activity: 1, ..KNOWN };
    let differ = save(&mut v, &exit, &Report::of(&exit), &left_long_mode, (L1_EFER, true));
    assert!(!v.entry().contains(EntryControls::IA32E_GUEST));
    assert_eq!(v.get(field::GUEST_ACTIVITY), 1);
    assert_eq!(differ, Groups::of(Group::Flow).union(Groups::of(Group::ControlRegisters)));
}

#[test]
fn an_efer_of_l1s_is_composed_again_where_it_differs() {
    let mut v = good();
    // The debug registers and PAT are loaded and saved; EFER is not loaded.
    let (loads, mode) = (1 << 2 | 1 << 14, 1 << 9);
    let mut differ = |controls: u32, efer: u64, l1_efer: u64, timer: bool| {
        let exits = 1 << 2 | 1 << 18;
        set!(
            v,
            EXIT_CONTROLS = exits,
            ENTRY_CONTROLS = controls,
            PIN_CONTROLS = u32::from(timer) << 6
        );
        let exit = after_cpuid();
        let known = Known { efer, ..KNOWN };
        save(&mut v, &exit, &Report::of(&exit), &known, (l1_efer, true))
    };
    let msrs = Groups::of(Group::Msrs);
    // Of a timer that starts anew nothing is composed.
    for timer in [false, true] {
        assert_eq!(differ(loads | mode, 0xd01, 0xd01, timer), Groups::NONE);
        assert_eq!(
            differ(loads | mode, 0xd01, 0x801, timer),
            Groups::NONE,
            "the mode's bits are the entry's"
        );
        assert_eq!(differ(loads | mode, 0xd01, 0xd00, timer), msrs);
        assert_eq!(differ(loads | mode, 0xd00, 0xd01, timer), msrs, "L2 has changed it");
        // Without the mode it follows from CR0.
        assert_eq!(differ(loads, 0x801, 0x801, timer), msrs);
        assert_eq!(differ(loads, 0x1, 0x1, timer), msrs);
    }
}

#[test]
fn a_register_comes_from_its_owner() {
    let mut v = good();
    set!(v, CR0_MASK = 0x8, GUEST_CR0 = 0x8005_0039);
    let mut exit = after_cpuid();
    // TS is L1's, NE (0x20) and CD are L0's, MP (0x2) is L2's own.
    exit.put(field::GUEST_CR0, 0x8005_0033);
    exit.put(field::CR0_SHADOW, 0x4000_0000);
    exit.put(field::GUEST_CR4, 0x20a0);
    save_rest(&mut v, &exit, &KNOWN, REST);
    assert_eq!(v.get(field::GUEST_CR0), 0xc005_001b);
    assert_eq!(v.get(field::GUEST_CR4), 0xa0);
}

#[test]
fn segments_stay_until_they_are_asked_for() {
    let mut v = good();
    let mut exit = after_cpuid();
    exit.put(field::GUEST_FS_BASE, 0x7777);
    exit.put(field::GUEST_SYSENTER_EIP, 0x8888);
    save_rest(&mut v, &exit, &KNOWN, Groups::of(Group::Sysenter));
    assert_eq!((v.get(field::GUEST_FS_BASE), v.get(field::GUEST_SYSENTER_EIP)), (0, 0x8888));
    save_rest(&mut v, &exit, &KNOWN, Groups::of(Group::Segments));
    assert_eq!(v.get(field::GUEST_FS_BASE), 0x7777);
}

#[test]
fn addresses_are_read_where_the_reason_has_them() {
    let mut exit = after_cpuid();
    exit.put(field::EXIT_REASON, 48);
    exit.put(field::EXIT_QUALIFICATION, 1 << 7);
    exit.put(field::GUEST_LINEAR_ADDRESS, 0x111);
    exit.put(field::GUEST_PHYSICAL_ADDRESS, 0x222);
    let report = Report::of(&exit);
    assert_eq!((report.linear, report.physical), (Some(0x111), Some(0x222)));
    exit.put(field::EXIT_QUALIFICATION, 1);
    assert_eq!(Report::of(&exit).linear, None);
    exit.put(field::EXIT_REASON, 30);
    exit.put(field::EXIT_QUALIFICATION, 1 << 4);
    assert_eq!((Report::of(&exit).linear, Report::of(&exit).physical), (Some(0x111), None));
}

#[test]
fn a_delivery_that_was_interrupted_is_told() {
    let mut exit = after_cpuid();
    exit.put(field::EXIT_REASON, 48);
    exit.put(field::IDT_VECTORING, 0x8000_0b0e);
    exit.put(field::IDT_VECTORING_ERROR, 6);
    let mut v = good();
    save(&mut v, &exit, &Report::of(&exit), &KNOWN, (L1_EFER, true));
    assert_eq!(v.get(field::IDT_VECTORING), 0x8000_0b0e);
    assert_eq!(v.get(field::IDT_VECTORING_ERROR), 6);
    exit.put(field::IDT_VECTORING, 0xb0e);
    save(&mut v, &exit, &Report::of(&exit), &KNOWN, (L1_EFER, true));
    assert_eq!(v.get(field::IDT_VECTORING), 0);
}

#[test]
fn a_failed_entry_tells_only_why() {
    let mut v = good();
    set!(v, ENTRY_INTERRUPTION = 0x8000_0030);
    let before = v.clone();
    entry_failed(&mut v, EntryFailure::msr(3));
    assert_eq!(v.get(field::EXIT_REASON), 0x8000_0022);
    assert_eq!(v.get(field::EXIT_QUALIFICATION), 3);
    v.set(field::EXIT_REASON, 0);
    v.set(field::EXIT_QUALIFICATION, 0);
    assert_eq!(v, before);
}

#[test]
fn l1_goes_on_with_its_host_state() {
    let mut v = good();
    set!(v, HOST_FS_BASE = 0x77, HOST_FS_SELECTOR = 0x28, HOST_DS_SELECTOR = 0, HOST_PAT = 5);
    let kept = host::Kept { cr0: 0x6000_0010, efer: 0 };
    let (r, s) = (host::registers(&v, kept, ExitReason::Cpuid, false), host::segments(&v));
    assert_eq!((r.cr0, r.cr3, r.cr4), (0xe005_0033, 0x1000, 0x2020));
    assert_eq!((r.rip, r.rsp, r.rflags), (0x8000, 0x9000, Rflags::FIXED.bits()));
    assert_eq!((r.dr7, r.debugctl, r.efer, r.pat), (0x400, 0, 0xd01, None));
    assert_eq!((s.cs.attr, s.cs.limit), (0xa9b, u32::MAX));
    assert_eq!((s.fs.base, s.fs.attr), (0x77, 0xc93));
    assert!(!s.ds.is_present() && !s.ldtr.is_present());
    assert_eq!((s.tr.limit, s.tr.attr), (0x67, attr::P | 11));
    assert_eq!((s.gdtr.limit, s.idtr.limit), (0xffff, 0xffff));
    assert!(!r.loads_pdptes && !r.blocks_nmis);
    assert!(host::registers(&v, kept, ExitReason::ExceptionOrNmi, true).blocks_nmis);

    set!(v, EXIT_CONTROLS = 1 << 19, HOST_CR4 = 0x2_2020);
    let r = host::registers(&v, host::Kept { cr0: 0, efer: 0xd01 }, ExitReason::Cpuid, false);
    assert_eq!((r.efer, r.pat, r.cr4), (0x801, Some(5), 0x2020));
    let cs = host::segments(&v).cs;
    assert!(r.loads_pdptes && !cs.is_long() && cs.is_default_big());
}

/// The check of CR0 lets them pass, for IA32_VMX_CR0_FIXED1 has all bits of the lower half.
#[test]
fn bits_of_cr0_that_are_none_are_not_loaded() {
    let mut v = good();
    set!(v, HOST_CR0 = 0xffff_ffff);
    let kept = host::Kept { cr0: 0x4005_0033, efer: 0xd01 };
    let r = host::registers(&v, kept, ExitReason::Cpuid, false);
    assert_eq!(r.cr0, 0xc005_003f);
}

#[test]
fn lists_are_those_of_the_vmcs() {
    let mut v = good();
    set!(v, EXIT_MSR_STORE_ADDR = 0x10, EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_LOAD_ADDR = 0x20);
    set!(v, EXIT_MSR_LOAD_COUNT = 2, ENTRY_MSR_LOAD_ADDR = 0x30, ENTRY_MSR_LOAD_COUNT = 3);
    let c = capabilities();
    let lists = [host::stores(&v, &c), host::loads(&v, &c), host::entry_loads(&v, &c)];
    assert_eq!(lists.map(|l| (l.at, l.count, l.limit)), [(16, 1, 512), (32, 2, 512), (48, 3, 512)]);
}
