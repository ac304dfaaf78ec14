use super::*;
use crate::testing::{Vmcs02, good, set};

fn l0() -> L0 {
    L0 {
        pin: PinControls::from_bits_retain(0x16 | 1 | 8 | 0x20),
        primary: ProcControls::HLT
            | ProcControls::UNCONDITIONAL_IO
            | ProcControls::MSR_BITMAPS
            | ProcControls::TPR_SHADOW
            | ProcControls::SECONDARY,
        secondary: ProcControls2::EPT
            | ProcControls2::VPID
            | ProcControls2::UNRESTRICTED_GUEST
            | ProcControls2::RDTSCP
            | ProcControls2::PML
            | ProcControls2::WBINVD,
        exit: ExitControls::HOST_64 | ExitControls::LOAD_EFER,
        entry: EntryControls::LOAD_EFER | EntryControls::IA32E_GUEST,
        exceptions: 1 << 18,
        page_faults: false,
        cr0_ones: 0x20,
        cr0_mask: 0x6000_0020,
        cr4_ones: 0x2000,
        cr4_mask: 0x2000,
        tsc: time::Tsc { multiplier: time::ONE, offset: 1000 },
        preemption_timer: None,
        vpid: 9,
        pages: Pages { msr_bitmap: Some(Hpa(0x7000)), ..Pages::default() },
        efer: 0xd01,
        dr7: 0x401,
        debugctl: 1,
        pat: 0x0606,
    }
}

fn composed(l0: &L0, v: &Vmcs12, dirty: Groups) -> Vmcs02 {
    let mut vmcs = Vmcs02::new();
    compose(l0, v, dirty, &mut vmcs);
    vmcs
}

#[test]
fn nothing_dirty_is_nothing_written() {
    assert!(composed(&l0(), &good(), Groups::NONE).written.is_empty());
    let flow = composed(&l0(), &good(), Groups::of(Group::Flow));
    assert_eq!(flow.written.len(), 5);
}

/// An L1 without virtual NMIs injects an NMI into an L2 that NMIs are blocked for, be it L2's flow that it has changed or not.
#[test]
fn an_nmi_that_l1_injects_finds_no_blocking_of_l0s() {
    let mut v = good();
    set!(v, GUEST_INTERRUPTIBILITY = 8, ENTRY_INTERRUPTION = 0x8000_0202);
    for flow in [Groups::NONE, Groups::of(Group::Flow)] {
        for (virtual_nmis, blocked) in [(0x20, !flow.is_empty()), (0, false)] {
            set!(v, PIN_CONTROLS = v.get(field::PIN_CONTROLS) & !0x20 | virtual_nmis);
            let vmcs = composed(&l0(), &v, flow);
            let written = vmcs.written.contains(&field::GUEST_INTERRUPTIBILITY.encoding());
            assert_eq!(written, virtual_nmis == 0 || !flow.is_empty());
            if written {
                assert_eq!(vmcs.has(field::GUEST_INTERRUPTIBILITY) == 8, blocked);
            }
        }
    }
    set!(v, ENTRY_INTERRUPTION = 0x8000_0031);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Flow));
    assert_eq!(vmcs.has(field::GUEST_INTERRUPTIBILITY), 8, "of an interrupt it stays");
}

#[test]
fn every_group_writes_only_its_own() {
    let whole = composed(&l0(), &good(), Groups::ALL);
    assert!(whole.written.len() > 70, "{}", whole.written.len());
    let host = composed(&l0(), &good(), Groups::of(Group::Host).union(Groups::of(Group::Exit)));
    assert!(host.written.is_empty(), "the hardware's host is L0");
}

#[test]
fn host_fields_of_vmcs02_are_never_l1s() {
    let whole = composed(&l0(), &good(), Groups::ALL);
    assert!(whole.written.iter().all(|encoding| encoding >> 10 & 3 != 3));
}

#[test]
fn control_registers_show_l1s_shadow_to_l2() {
    let mut v = good();
    set!(v, GUEST_CR0 = 0x8005_0011, CR0_MASK = 0x8, CR0_SHADOW = 0x8, GUEST_CR4 = 0x20);
    let vmcs = composed(&l0(), &v, Groups::of(Group::ControlRegisters));
    assert_eq!(vmcs.has(field::GUEST_CR0), 0x8005_0031);
    assert_eq!(vmcs.has(field::CR0_SHADOW), 0x8005_0019);
    assert_eq!(vmcs.has(field::CR0_MASK), 0x6000_0028);
    assert_eq!((vmcs.has(field::GUEST_CR4), vmcs.has(field::CR4_SHADOW)), (0x2020, 0x20));
    assert!(!vmcs.wrote(field::GUEST_PDPTE0));
}

#[test]
fn registers_that_the_entry_does_not_load_are_l1s() {
    let mut v = good();
    set!(v, GUEST_DR7 = 0x455, GUEST_DEBUGCTL = 2, GUEST_PAT = 7, GUEST_EFER = 0xd00);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Msrs));
    assert_eq!((vmcs.has(field::GUEST_DR7), vmcs.has(field::GUEST_DEBUGCTL)), (0x401, 1));
    assert_eq!((vmcs.has(field::GUEST_PAT), vmcs.has(field::GUEST_EFER)), (0x0606, 0xd00));
    set!(v, ENTRY_CONTROLS = 1 << 2 | 1 << 14);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Msrs));
    assert_eq!((vmcs.has(field::GUEST_DR7), vmcs.has(field::GUEST_DEBUGCTL)), (0x455, 2));
    assert_eq!((vmcs.has(field::GUEST_PAT), vmcs.has(field::GUEST_EFER)), (7, 0x801));
}

#[test]
fn efer_follows_the_mode_where_it_is_not_loaded() {
    let mut v = good();
    set!(v, ENTRY_CONTROLS = 1 << 9);
    assert_eq!(efer(&L0 { efer: 0x801, ..l0() }, &v), 0xd01);
    set!(v, ENTRY_CONTROLS = 0);
    assert_eq!(efer(&l0(), &v), 0x801);
    set!(v, GUEST_CR0 = 0x31);
    assert_eq!(efer(&l0(), &v), 0x901, "LME stays without paging");
}

#[test]
fn words_are_of_both() {
    let mut v = good();
    set!(v, PROC_CONTROLS = 1 << 31 | 1 << 21 | 1 << 25 | 1 << 28 | 1 << 15, PIN_CONTROLS = 0xd6);
    set!(v, PROC_CONTROLS2 = 1 << 6 | 1 << 14 | 1 << 17 | 1 << 9 | 1 << 16);
    let word = words::primary(&l0(), &v);
    assert!(word.contains(ProcControls::HLT | ProcControls::CR3_LOAD | ProcControls::MSR_BITMAPS));
    assert!(word.contains(ProcControls::CR8_LOAD | ProcControls::UNCONDITIONAL_IO));
    assert!(!word.intersects(ProcControls::IO_BITMAPS | ProcControls::TPR_SHADOW));
    let second = words::secondary(&l0(), &v);
    assert!(second.contains(ProcControls2::EPT | ProcControls2::VPID | ProcControls2::WBINVD));
    assert!(second.contains(ProcControls2::RDSEED));
    let never = ProcControls2::PML
        | ProcControls2::SHADOW_VMCS
        | ProcControls2::RDTSCP
        | ProcControls2::UNRESTRICTED_GUEST
        | ProcControls2::VIRTUAL_INTERRUPTS;
    assert!(!second.intersects(never), "{second:?}");
    let pin = words::pin(&l0(), &v);
    assert!(!pin.intersects(PinControls::PREEMPTION_TIMER | PinControls::POSTED_INTERRUPTS));

    let pages = Pages {
        virtual_apic: Some(Hpa(0x1000)),
        apic_access: None,
        posted_interrupts: Some(Hpa(0x2000)),
        ..Pages::default()
    };
    let mapped = L0 { pages, preemption_timer: Some(5), ..l0() };
    let word = words::primary(&mapped, &v);
    assert!(word.contains(ProcControls::TPR_SHADOW) && !word.contains(ProcControls::CR8_LOAD));
    assert!(!word.contains(ProcControls::MSR_BITMAPS));
    assert!(words::secondary(&mapped, &v).contains(ProcControls2::VIRTUAL_INTERRUPTS));
    let pin = words::pin(&mapped, &v);
    assert!(pin.contains(PinControls::PREEMPTION_TIMER | PinControls::POSTED_INTERRUPTS));
}

/// The hardware has no list of L1's. Of L0's own there is one while L1 has its exits store MSRs.
#[test]
fn an_exit_stores_its_tsc_for_a_list_of_l1s() {
    let all = Groups::of(Group::MsrLists);
    let page = Pages { exit_tsc: Some(Hpa(0x5000)), ..Pages::default() };
    for (page, count, stored) in [(page, 3, 1), (page, 0, 0), (Pages::default(), 3, 0)] {
        let mut v = good();
        set!(v, EXIT_MSR_STORE_COUNT = count, EXIT_MSR_STORE_ADDR = 0x9000);
        set!(v, EXIT_MSR_LOAD_COUNT = 2, ENTRY_MSR_LOAD_COUNT = 2);
        let vmcs = composed(&L0 { pages: page, ..l0() }, &v, all);
        assert_eq!(vmcs.has(field::EXIT_MSR_STORE_COUNT), stored);
        assert_eq!(vmcs.has(field::EXIT_MSR_STORE_ADDR), stored * 0x5000);
        assert_eq!(vmcs.has(field::EXIT_MSR_LOAD_COUNT), 0);
        assert_eq!(vmcs.has(field::ENTRY_MSR_LOAD_COUNT), 0);
    }
}

#[test]
fn page_faults_are_l1s_unless_l0_needs_them() {
    let mut v = good();
    set!(v, EXCEPTION_BITMAP = 2, PAGE_FAULT_MASK = 3, PAGE_FAULT_MATCH = 1);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Controls));
    assert_eq!(vmcs.has(field::EXCEPTION_BITMAP), 1 << 18 | 2);
    assert_eq!((vmcs.has(field::PAGE_FAULT_MASK), vmcs.has(field::PAGE_FAULT_MATCH)), (3, 1));
    let needs = L0 { page_faults: true, ..l0() };
    let vmcs = composed(&needs, &v, Groups::of(Group::Controls));
    assert_eq!(vmcs.has(field::EXCEPTION_BITMAP), 1 << 18 | 1 << 14 | 2);
    assert_eq!((vmcs.has(field::PAGE_FAULT_MASK), vmcs.has(field::PAGE_FAULT_MATCH)), (0, 0));
}

#[test]
fn an_injection_is_written_at_every_entry_that_has_one() {
    let mut v = good();
    set!(v, ENTRY_INTERRUPTION = 0x8000_0b0e, ENTRY_ERROR_CODE = 4, ENTRY_INSTRUCTION_LENGTH = 3);
    let vmcs = composed(&l0(), &v, Groups::NONE);
    let expected = [field::ENTRY_ERROR_CODE.encoding(), field::ENTRY_INTERRUPTION.encoding()];
    assert_eq!(vmcs.written, expected);
    set!(v, ENTRY_INTERRUPTION = 0x8000_0480);
    assert!(composed(&l0(), &v, Groups::NONE).wrote(field::ENTRY_INSTRUCTION_LENGTH));
    set!(v, ENTRY_INTERRUPTION = 0x0000_0480);
    assert!(composed(&l0(), &v, Groups::NONE).written.is_empty());
}

#[test]
fn translations_follow_ept_and_vpid() {
    let mut v = good();
    assert_eq!((tables(&v), flush(&v, 0, Transition::Entry)), (Tables::OfL1, Flush::Both));
    set!(v, PROC_CONTROLS2 = 0x22, EPT_POINTER = 0x501e, VPID = 3);
    assert_eq!(tables(&v), Tables::Shadow(0x501e));
    assert_eq!(flush(&v, 2, Transition::Entry), Flush::L2);
    assert_eq!(flush(&v, 3, Transition::Entry), Flush::None);
    assert_eq!(flush(&v, 2, Transition::Exit), Flush::None);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Translation));
    assert_eq!(vmcs.has(field::VPID), 9);
}

#[test]
fn activity_is_l0s_to_wait_in() {
    let mut v = good();
    set!(v, GUEST_ACTIVITY = 1);
    let flow = Groups::of(Group::Flow);
    let active =
        |vmcs: &Vmcs02| vmcs.wrote(field::GUEST_ACTIVITY) && vmcs.has(field::GUEST_ACTIVITY) == 0;
    // An HLT that exits leaves an active guest.
    assert!(!composed(&l0(), &v, flow).wrote(field::GUEST_ACTIVITY));
    // One that does not, or did not under the controls before, leaves another.
    assert!(active(&composed(&l0(), &v, flow.union(Groups::of(Group::Controls)))));
    // Whatever flow L1 sets later: that comes with an HLT that exits.
    assert!(active(&composed(&l0(), &v, Groups::of(Group::Controls))));
    let mut idle = l0();
    idle.primary.remove(ProcControls::HLT);
    set!(v, PROC_CONTROLS = 0);
    assert!(active(&composed(&idle, &v, flow)));
}

#[test]
fn times_add_up() {
    let mut v = good();
    set!(v, PROC_CONTROLS = 1 << 31 | 8, TSC_OFFSET = 5);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Time));
    assert_eq!(vmcs.has(field::TSC_OFFSET), 1005);
    assert!(!vmcs.wrote(field::TSC_MULTIPLIER));
    set!(v, PROC_CONTROLS2 = 1 << 25, TSC_MULTIPLIER = time::ONE * 2);
    let vmcs = composed(&l0(), &v, Groups::of(Group::Time));
    assert_eq!((vmcs.has(field::TSC_OFFSET), vmcs.has(field::TSC_MULTIPLIER)), (2005, 2 << 48));
}
