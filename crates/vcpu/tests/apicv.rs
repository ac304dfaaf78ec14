//! A local APIC that the CPU serves: the same deliveries, ends and registers as one that software
//! serves, and what an exit and an entry cost.

mod rig;

use backend::{Gprs, Injection, RAX, RCX, RDX, ServedApic};
use cpu::{ModelVmcs, Op};
use gannet_vcpu::{By, RunInput, UserExit};
use irqchip::Trigger;
use irqchip::lapic::{BaseRules, CpuRole, Lapic, LapicEffect, REGISTER_PAGE, base};
use mmu::Format;
use proptest::prelude::*;
use rig::vmx::{VmxVcpu, cost_on, exit, features, reads_and_writes, shutdown, vcpu_of};
use vmx::{Features, apic_page::ApicPage};
use x86::{
    Directions, Vector,
    apic::{Interrupts, VectorWords, highest, reg},
    vmcs::{ExitReason, ProcControls2, event, field},
};

const TPR: u32 = 0x808;
const EOI: u32 = 0x80b;
const SVR: u32 = 0x80f;
const ICR: u32 = 0x830;
const SELF_IPI: u32 = 0x83f;
const X2APIC: u64 = 0xfee0_0d00;
const SERVED: ProcControls2 = ProcControls2::VIRTUALIZE_X2APIC
    .union(ProcControls2::APIC_REGISTERS)
    .union(ProcControls2::VIRTUAL_INTERRUPTS);

fn contains(words: &VectorWords, vector: u8) -> bool {
    words[usize::from(vector >> 6)] & 1 << (vector & 63) != 0
}

fn without(mut words: VectorWords, vector: u8) -> VectorWords {
    words[usize::from(vector >> 6)] &= !(1 << (vector & 63));
    words
}

/// An APIC in x2APIC mode, switched on.
fn lapic() -> Lapic {
    let lapic = Lapic::new(0, CpuRole::Bootstrap);
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: true };
    lapic.set_base(lapic.base() | base::EXTD, rules).unwrap();
    assert_eq!(lapic.write_x2(SVR, 0x1ff), Ok(LapicEffect::EnableChanged));
    lapic
}

/// What the CPU does with the page (SDM vol. 3C §30.1, §30.2).
struct Hardware {
    page: ApicPage,
    reported: VectorWords,
    rvi: u8,
    svi: u8,
}

impl Hardware {
    fn state(&self) -> Interrupts {
        Interrupts {
            requested: self.page.requested(),
            in_service: self.page.in_service(),
            tpr: self.page.tpr(),
        }
    }

    fn write_status(&mut self, status: u16) {
        [self.rvi, self.svi] = status.to_le_bytes();
    }

    fn ppr(&self) -> u8 {
        let tpr = self.page.tpr();
        if tpr >> 4 >= self.svi >> 4 { tpr } else { self.svi & 0xf0 }
    }

    fn deliver(&mut self) -> Option<u8> {
        if self.rvi >> 4 <= self.ppr() >> 4 {
            return None;
        }
        let vector = self.rvi;
        let mut state = self.state();
        state.in_service[usize::from(vector >> 6)] |= 1 << (vector & 63);
        state.requested = without(state.requested, vector);
        self.page.fill(&state);
        self.svi = vector;
        self.rvi = highest(&state.requested);
        Some(vector)
    }

    /// The vector, if its end exits.
    fn eoi(&mut self) -> Option<u8> {
        let vector = self.svi;
        let mut state = self.state();
        state.in_service = without(state.in_service, vector);
        self.page.fill(&state);
        self.svi = highest(&state.in_service);
        contains(&self.reported, vector).then_some(vector)
    }

    fn self_ipi(&mut self, vector: u8) {
        let mut more = [0; 4];
        more[usize::from(vector >> 6)] = 1 << (vector & 63);
        self.page.request(&more);
        self.rvi = self.rvi.max(vector);
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send(u8, bool),
    Tpr(u8),
    Eoi,
    SelfIpi(u8),
    Interrupts(bool),
    /// KVM_GET_LAPIC, or a register that is written with an exit.
    TakeBack,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (16u8..=255, any::<bool>()).prop_map(|(v, level)| Step::Send(v, level && v & 1 != 0)),
        3 => any::<u8>().prop_map(Step::Tpr),
        3 => Just(Step::Tpr(0)),
        6 => Just(Step::Eoi),
        // Level-triggered ones have odd vectors: the CPU leaves the trigger mode alone.
        3 => (8u8..=127).prop_map(|v| Step::SelfIpi(v * 2)),
        3 => any::<bool>().prop_map(Step::Interrupts),
        1 => Just(Step::TakeBack),
    ]
}

fn saved(lapic: &Lapic) -> [u8; REGISTER_PAGE] {
    let mut page = [0; REGISTER_PAGE];
    lapic.save(&mut page, false, 0);
    page
}

proptest! {
    /// The CPU with what it is given delivers and ends as the software does, in whatever order
    /// things happen, and what it gives back is the software's state.
    #[test]
    fn the_hardware_delivers_what_the_software_would(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let (plain, served) = (lapic(), lapic());
        let page = ApicPage::new().unwrap();
        page.fill(&served.hand_over());
        let mut hardware = Hardware { page, reported: served.reported(), rvi: 0, svi: 0 };
        let mut open = true;
        let (mut wanted, mut got) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Send(vector, level) => {
                    let trigger = if level { Trigger::Level } else { Trigger::Edge };
                    let _ = plain.accept_fixed(Vector(vector), trigger);
                    let _ = served.accept_fixed(Vector(vector), trigger);
                    // The kick, and the entry.
                    let more = served.drain();
                    hardware.reported = served.reported();
                    if hardware.page.request(&more).is_some() {
                        hardware.write_status(hardware.page.status());
                    }
                }
                Step::Tpr(value) => {
                    let _ = plain.write_x2(TPR, value.into());
                    hardware.page.set_tpr(value);
                }
                Step::Eoi => {
                    match plain.eoi() {
                        LapicEffect::Eoi { vector, level: true } => wanted.push((vector.0, true)),
                        LapicEffect::Eoi { .. } | LapicEffect::None => {}
                        effect => prop_assert!(false, "{effect:?}"),
                    }
                    if let Some(vector) = hardware.eoi()
                        && let LapicEffect::Eoi { level: true, .. } = served.ended(Vector(vector))
                    {
                        got.push((vector, true));
                    }
                }
                Step::SelfIpi(vector) => {
                    let _ = plain.accept_fixed(Vector(vector), Trigger::Edge);
                    hardware.self_ipi(vector);
                }
                Step::Interrupts(on) => open = on,
                Step::TakeBack => {
                    served.take_back(&hardware.page.take());
                    prop_assert_eq!(saved(&plain), saved(&served));
                    prop_assert_eq!(plain.highest_pending(), served.highest_pending());
                    hardware.page.fill(&served.hand_over());
                    hardware.reported = served.reported();
                    hardware.write_status(hardware.page.status());
                }
            }
            let waits = plain.highest_pending().is_some();
            prop_assert_eq!(waits, hardware.page.delivers(0));
            prop_assert_eq!(hardware.page.status(), u16::from_le_bytes([hardware.rvi, hardware.svi]));
            while open && let Some(vector) = plain.highest_pending() {
                plain.ack(vector);
                wanted.push((vector.0, false));
            }
            while open && let Some(vector) = hardware.deliver() {
                got.push((vector, false));
            }
            prop_assert_eq!(&wanted, &got);
        }
    }
}

fn with_apicv() -> Features {
    Features { apicv: true, ..features() }
}

/// A vCPU whose APIC is on, in x2APIC mode.
fn vcpu() -> VmxVcpu {
    let (mut v, _) = vcpu_of(with_apicv(), Format::npt(4, 0));
    v.write_msr(0x1b, X2APIC, By::Vmm).unwrap();
    v.write_msr(SVR, 0x1ff, By::Vmm).unwrap();
    v
}

fn wrmsr(msr: u32, value: u64) -> impl Fn(&mut ModelVmcs, &mut Gprs) + Send + Sync + Clone {
    move |vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX], gprs.0[RDX]) = (value, msr.into(), 0);
        vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
        exit(ExitReason::Wrmsr)(vmcs, gprs);
    }
}

#[test]
fn an_exit_that_concerns_no_interrupt_costs_what_it_did() {
    let cpuid = cost_on(vcpu, |vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX]) = (0x8000_0008, 0);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    assert_eq!(reads_and_writes(&cpuid), (4, 1));
}

#[test]
fn an_end_that_is_reported_costs_two_reads() {
    let eoi = cost_on(vcpu, |vmcs, gprs| {
        exit(ExitReason::VirtualizedEoi)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 0x41);
    });
    assert_eq!(reads_and_writes(&eoi), (2, 0));
}

#[test]
fn the_end_of_an_interrupt_and_one_to_oneself_do_not_exit() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        let controls = ProcControls2::from_bits_retain(vmcs.get(field::PROC_CONTROLS2));
        assert!(controls.contains(SERVED));
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    for msr in 0x800..=0x8ff {
        let exits = v.backend().msr_exits(msr);
        assert_eq!(
            exits.contains(Directions::WRITES),
            !matches!(msr, TPR | EOI | SELF_IPI),
            "WRMSR {msr:#x}"
        );
        let plain = matches!(msr, 0x802 | 0x803 | 0x808 | 0x80a | 0x80d | 0x80f | 0x810..=0x817
            | 0x820..=0x827 | 0x832..=0x837);
        assert_eq!(exits.contains(Directions::READS), !plain, "RDMSR {msr:#x}");
    }
}

#[test]
fn an_entry_with_an_interrupt_costs_one_write_more() {
    let run = |msr, value| {
        let mut v = vcpu();
        v.backend().cpu().inner().vmx.then(|vmcs, gprs| exit(ExitReason::Cpuid)(vmcs, gprs));
        v.backend().cpu().inner().vmx.then(wrmsr(msr, value));
        v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
            shutdown(vmcs, gprs);
        });
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let counts = v.backend().cpu().counts().since(&before);
        let status =
            v.backend().cpu().inner().vmx.current().unwrap().get(field::GUEST_INTERRUPT_STATUS);
        (counts, status)
    };
    let (plain, none) = run(0x200, 6);
    // To oneself, vector 0x51, by the shorthand.
    let (ipi, status) = run(ICR, 0x4_0051);
    assert_eq!((none, status), (0, 0x51));
    assert_eq!(ipi.of(Op::Vmwrite), plain.of(Op::Vmwrite) + 1);
    // Whether STI's shadow is over.
    assert_eq!(ipi.of(Op::Vmread), plain.of(Op::Vmread) + 1);
}

#[test]
fn what_waits_in_the_hardware_is_in_the_saved_registers_and_in_the_next_run() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(wrmsr(ICR, 0x4_0051));
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let mut page = [0; REGISTER_PAGE];
    v.lapic_page(&mut page);
    assert_eq!(page[(reg::IRR + 0x20) as usize + 2], 1 << 1);
    v.set_lapic_page(&page).unwrap();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPT_STATUS), 0x51);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn an_apic_that_leaves_x2apic_mode_or_is_switched_off_is_softwares_again() {
    let served = |v: &mut VmxVcpu| {
        v.backend().cpu().inner().vmx.then(shutdown);
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let vmcs = v.backend().cpu().inner().vmx.current().unwrap();
        let controls = ProcControls2::from_bits_retain(vmcs.get(field::PROC_CONTROLS2));
        assert_eq!(controls.intersects(SERVED), controls.contains(SERVED));
        assert_eq!(
            v.backend().msr_exits(EOI).contains(Directions::WRITES),
            !controls.contains(SERVED)
        );
        controls.contains(SERVED)
    };
    let mut v = vcpu();
    assert!(served(&mut v));
    v.write_msr(SVR, 0xff, By::Vmm).unwrap();
    assert!(!served(&mut v));
    v.write_msr(SVR, 0x1ff, By::Vmm).unwrap();
    assert!(served(&mut v));
    v.write_msr(0x1b, 0xfee0_0900, By::Vmm).unwrap();
    assert!(!served(&mut v));
    v.write_msr(0x1b, X2APIC, By::Vmm).unwrap();
    assert!(served(&mut v));
    v.write_msr(0x1b, 0xfee0_0000, By::Vmm).unwrap();
    assert!(!served(&mut v));
    // A CPU without it, or a module that was told not to.
    let (mut v, _) = vcpu_of(features(), Format::npt(4, 0));
    v.write_msr(0x1b, X2APIC, By::Vmm).unwrap();
    v.write_msr(SVR, 0x1ff, By::Vmm).unwrap();
    assert!(!served(&mut v));
}

#[test]
fn stis_shadow_does_not_outlive_an_instruction_that_was_emulated() {
    const BY_STI: u32 = 1;
    let run = |requested: bool| {
        let mut v = vcpu();
        if requested {
            v.backend().cpu().inner().vmx.then(wrmsr(ICR, 0x4_0051));
        }
        v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
            vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
            vmcs.set(field::GUEST_INTERRUPTIBILITY, BY_STI);
            exit(ExitReason::Cpuid)(vmcs, gprs);
        });
        v.backend().cpu().inner().vmx.then(shutdown);
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        v.backend().cpu().inner().vmx.current().unwrap().get(field::GUEST_INTERRUPTIBILITY)
    };
    assert_eq!(run(true), 0);
    // Nothing to hold back: nothing is looked at.
    assert_eq!(run(false), BY_STI);
}

#[test]
fn an_interrupt_to_oneself_with_a_vector_that_is_none_is_an_error_of_the_apics() {
    let mut v = vcpu();
    v.write_msr(0x837, 0x61, By::Vmm).unwrap();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::ApicWrite)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 0x3f0);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPT_STATUS), 0x61);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    v.write_msr(0x828, 0, By::Vmm).unwrap();
    assert_eq!(v.read_msr(0x828, By::Vmm), Ok(1 << 5));
}

#[test]
fn an_interrupt_whose_task_cannot_be_begun_is_requested_again() {
    let mut v = vcpu();
    let mut s = v.sregs();
    s.cr0 |= x86::Cr0::PE;
    s.gdt.limit = 0;
    v.set_sregs(&s, None).unwrap();
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let mut in_service = [0; 4];
    in_service[1] = 1 << 0x11;
    let apic = v.backend().served_apic_mut().unwrap();
    apic.serve(&Interrupts { requested: [0; 4], in_service, tpr: 0 }, &[0; 4]);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::TaskSwitch)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 3 << 30 | 0x20);
        vmcs.set(field::IDT_VECTORING, event::VALID | event::INTR | 0x51);
    });
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let mut page = [0; REGISTER_PAGE];
    v.lapic_page(&mut page);
    let word = |at: u32| page[(at + 0x20) as usize + 2];
    assert_eq!((word(reg::IRR), word(reg::ISR)), (1 << 1, 0));
}
