//! Accepting, prioritising, ending and addressing. SDM vol. 3A §10.6, §10.8.

use x86::Vector;

use super::*;
use crate::message::{DeliveryMode, Shorthand, Trigger};

#[test]
fn the_highest_vector_goes_first_and_classes_nest() {
    let lapic = xapic(0);
    assert_eq!(pend(&lapic, 0x41), Accepted::Pending);
    assert_eq!(pend(&lapic, 0x41), Accepted::Coalesced);
    assert_eq!(pend(&lapic, 0x35), Accepted::Pending);
    assert_eq!(take(&lapic), Some(0x41));
    // 0x45 is of the class in service, 0x51 above it.
    let _ = pend(&lapic, 0x45);
    assert_eq!(take(&lapic), None);
    let _ = pend(&lapic, 0x51);
    assert_eq!(take(&lapic), Some(0x51));
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x51), level: false });
    assert_eq!(take(&lapic), None);
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x41), level: false });
    assert_eq!(take(&lapic), Some(0x45));
    let _ = lapic.eoi();
    assert_eq!(take(&lapic), Some(0x35));
    let _ = lapic.eoi();
    assert_eq!(lapic.eoi(), LapicEffect::None);
    assert!(!lapic.maybe_pending());
}

#[test]
fn the_task_priority_holds_back_its_class_and_below() {
    let lapic = xapic(0);
    lapic.set_tpr(0x41);
    let _ = pend(&lapic, 0x4f);
    assert_eq!(lapic.highest_pending(), None);
    assert_eq!(lapic.highest_requested(), Some(Vector(0x4f)));
    let _ = pend(&lapic, 0x50);
    assert_eq!(take(&lapic), Some(0x50));
    assert_eq!(lapic.ppr(), 0x50);
    let _ = lapic.eoi();
    // Lower bits of the TPR count in the PPR when its class wins.
    assert_eq!(lapic.ppr(), 0x41);
    assert!(lapic.set_cr8(3));
    assert_eq!((lapic.tpr(), lapic.cr8()), (0x30, 3));
    assert_eq!(take(&lapic), Some(0x4f));
}

#[test]
fn level_interrupts_report_their_end_and_edge_ones_do_not() {
    let lapic = xapic(0);
    let _ = lapic.accept_fixed(Vector(0x60), Trigger::Level);
    assert_eq!(take(&lapic), Some(0x60));
    assert_eq!(lapic.write(EOI, 0), LapicEffect::Eoi { vector: Vector(0x60), level: true });
    // The same vector, now edge: the trigger mode follows the message.
    let _ = lapic.accept_fixed(Vector(0x60), Trigger::Edge);
    assert_eq!(take(&lapic), Some(0x60));
    assert_eq!(lapic.write(EOI, 0), LapicEffect::Eoi { vector: Vector(0x60), level: false });
}

#[test]
fn an_edge_message_can_ask_for_a_report_of_its_end() {
    let lapic = xapic(0);
    let msg = IrqMessage { notify_eoi: true, ..IrqMessage::fixed(Vector(0x60), 0) };
    let _ = lapic.accept(&msg);
    assert_eq!(take(&lapic), Some(0x60));
    assert_eq!(lapic.pv_eoi_candidate(), None);
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x60), level: true });
    lapic.forget_notify(Vector(0x60));
    let _ = pend(&lapic, 0x60);
    assert_eq!(take(&lapic), Some(0x60));
    assert_eq!(lapic.pv_eoi_candidate(), Some(Vector(0x60)));
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x60), level: false });
}

#[test]
fn an_end_that_the_vmm_waits_for_is_reported_whatever_its_trigger_mode() {
    let lapic = xapic(0);
    let mut awaited = [0; 4];
    awaited[1] = 1 << (0x60 - 0x40);
    lapic.await_ends(&awaited);
    assert_eq!(lapic.reported(), awaited);
    let _ = pend(&lapic, 0x60);
    assert!(lapic.has_not_ended(Vector(0x60)) && !lapic.has_not_ended(Vector(0x61)));
    assert_eq!(take(&lapic), Some(0x60));
    assert!(lapic.has_not_ended(Vector(0x60)));
    assert_eq!(lapic.pv_eoi_candidate(), None);
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x60), level: true });
    assert!(!lapic.has_not_ended(Vector(0x60)));
    lapic.await_ends(&[0; 4]);
    let _ = pend(&lapic, 0x60);
    assert_eq!(take(&lapic), Some(0x60));
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x60), level: false });
}

#[test]
fn a_change_of_the_address_is_told() {
    let lapic = xapic(0);
    for register in [0x20, 0xd0, 0xe0] {
        assert_eq!(lapic.write(register, 1 << 24), LapicEffect::AddressChanged, "{register:#x}");
    }
}

#[test]
fn a_pv_eoi_is_offered_only_when_nothing_waits_for_it() {
    let lapic = xapic(0);
    assert_eq!(lapic.pv_eoi_candidate(), None);
    let _ = pend(&lapic, 0x50);
    assert_eq!(take(&lapic), Some(0x50));
    assert_eq!(lapic.pv_eoi_candidate(), Some(Vector(0x50)));
    let _ = pend(&lapic, 0x40);
    assert_eq!(lapic.pv_eoi_candidate(), None);
}

#[test]
fn a_cancelled_injection_is_pending_again() {
    let lapic = xapic(0);
    let _ = pend(&lapic, 0x50);
    let _ = pend(&lapic, 0x40);
    assert_eq!(take(&lapic), Some(0x50));
    lapic.unack(Vector(0x50));
    assert_eq!(lapic.in_service(), None);
    assert_eq!(lapic.ppr(), 0);
    assert_eq!(take(&lapic), Some(0x50));
}

#[test]
fn a_self_ipi_goes_straight_into_service_when_nothing_is_in_its_way() {
    let lapic = xapic(0);
    assert!(lapic.self_ipi_direct(Vector(0x50)));
    assert_eq!(lapic.in_service(), Some(Vector(0x50)));
    assert!(!lapic.maybe_pending());
    assert!(!lapic.self_ipi_direct(Vector(0x51)), "the class is in service");
    assert!(lapic.self_ipi_direct(Vector(0x61)));
    let _ = pend(&lapic, 0x80);
    assert!(!lapic.self_ipi_direct(Vector(0x70)), "something higher is pending");
    assert!(!lapic.self_ipi_direct(Vector(15)));
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: Vector(0x61), level: false });
    let _ = lapic.write(SVR, 0xff);
    assert!(!lapic.self_ipi_direct(Vector(0xf0)), "disabled");
}

#[test]
fn a_disabled_apic_takes_no_fixed_interrupt_but_nmi_and_init() {
    let lapic = Lapic::new(0, CpuRole::Bootstrap);
    assert_eq!(pend(&lapic, 0x50), Accepted::Ignored);
    let mut msg = IrqMessage::fixed(Vector(0), 0);
    for (delivery, wanted) in [
        (DeliveryMode::Nmi, Accepted::Nmi),
        (DeliveryMode::Smi, Accepted::Smi),
        (DeliveryMode::Init, Accepted::Init),
        (DeliveryMode::ExtInt, Accepted::Ignored),
    ] {
        msg.delivery = delivery;
        assert_eq!(lapic.accept(&msg), wanted);
    }
    let sipi = IrqMessage { delivery: DeliveryMode::Startup, vector: Vector(0x9a), ..msg };
    assert_eq!(lapic.accept(&sipi), Accepted::Sipi(Vector(0x9a)));
    let deassert =
        IrqMessage { delivery: DeliveryMode::Init, trigger: Trigger::Level, assert: false, ..msg };
    assert_eq!(lapic.accept(&deassert), Accepted::Ignored);
}

#[test]
fn what_is_pending_survives_software_disable_and_is_not_lost_by_mode_changes() {
    let lapic = xapic(0);
    let _ = pend(&lapic, 0x50);
    let _ = lapic.write(SVR, 0xff);
    assert_eq!(take(&lapic), Some(0x50));
    let _ = pend(&lapic, 0x60);
    let _ = lapic.write(SVR, 0x1ff);
    let _ = pend(&lapic, 0x61);
    lapic.set_base(DEFAULT_BASE, RULES).unwrap();
    assert_eq!(lapic.highest_pending(), None);
    lapic.set_base(DEFAULT_BASE | base::ENABLE, RULES).unwrap();
    assert_eq!(take(&lapic), Some(0x61));
}

#[test]
fn illegal_vectors_are_errors_and_raise_the_error_interrupt() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_ERROR, 0xe0);
    assert_eq!(pend(&lapic, 15), Accepted::Pending);
    assert_eq!(take(&lapic), Some(0xe0));
    assert_eq!(read(&lapic, 0x280), 0, "not before the guest asks");
    let _ = lapic.write(0x280, 0);
    assert_eq!(read(&lapic, 0x280), 1 << 6);
    let _ = lapic.write(0x280, 0);
    assert_eq!(read(&lapic, 0x280), 0);
    assert_eq!(lapic.write(ICR, 0x4000 | 7), LapicEffect::None);
    let _ = lapic.write(0x280, 0);
    // Its own id is 0, so the illegal IPI was to itself.
    assert_eq!(read(&lapic, 0x280), 1 << 5);
}

fn physical(dest: u32) -> IrqMessage {
    IrqMessage::fixed(Vector(0x50), dest)
}

fn logical(dest: u32) -> IrqMessage {
    IrqMessage { dest_mode: DestMode::Logical, ..physical(dest) }
}

#[test]
fn physical_destinations_are_ids_and_the_broadcast() {
    let lapic = xapic(3);
    assert!(lapic.matches(&physical(3)) && !lapic.matches(&physical(2)));
    assert!(lapic.matches(&physical(BROADCAST)));
    let _ = lapic.write(0x20, 9 << 24);
    assert!(lapic.matches(&physical(9)) && !lapic.matches(&physical(3)));
    let wide = x2apic(0x1_0003);
    assert!(wide.matches(&physical(0x1_0003)) && !wide.matches(&physical(3)));
    lapic.set_base(DEFAULT_BASE, RULES).unwrap();
    assert!(!lapic.matches(&physical(BROADCAST)));
}

#[test]
fn flat_logical_destinations_are_masks() {
    let lapic = xapic(0);
    assert!(!lapic.matches(&logical(1)), "no logical id yet");
    let _ = lapic.write(0xd0, 0x0400_0000);
    assert!(lapic.matches(&logical(0x06)) && !lapic.matches(&logical(0x03)));
    assert!(lapic.matches(&logical(0xff)));
    assert!(!lapic.matches(&logical(0x104)));
}

#[test]
fn cluster_logical_destinations_have_a_cluster_and_a_mask() {
    let lapic = xapic(0);
    let _ = lapic.write(0xe0, 0x0fff_ffff);
    let _ = lapic.write(0xd0, 0x2200_0000);
    assert!(lapic.matches(&logical(0x22)) && lapic.matches(&logical(0x2f)));
    assert!(!lapic.matches(&logical(0x21)) && !lapic.matches(&logical(0x32)));
    assert!(lapic.matches(&logical(0xf2)), "all clusters");
    let _ = lapic.write(0xe0, 0x5fff_ffff);
    assert!(!lapic.matches(&logical(0x22)), "a model that does not exist");
}

#[test]
fn x2apic_logical_ids_follow_from_the_id() {
    let lapic = x2apic(0x25);
    assert_eq!(lapic.read_x2(0x80d, || 0), Ok(0x2_0020));
    assert!(lapic.matches(&logical(0x2_0021)));
    assert!(!lapic.matches(&logical(0x2_0010)) && !lapic.matches(&logical(0x3_0020)));
    assert!(lapic.matches(&logical(BROADCAST)));
}

fn sent(effect: LapicEffect) -> IrqMessage {
    match effect {
        LapicEffect::SendIpi(message) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn icr_writes_become_messages() {
    let lapic = xapic(0);
    let _ = lapic.write(ICR2, 5 << 24);
    let msg = sent(lapic.write(ICR, 0x40f3));
    assert_eq!(msg, physical(5).with_vector(0xf3));
    let msg = sent(lapic.write(ICR, 0x000c_4600 | 0x9a));
    assert_eq!(msg.delivery, DeliveryMode::Startup);
    assert_eq!(msg.shorthand, Shorthand::AllButSelf);
    let msg = sent(lapic.write(ICR, 0x4900 | 0x50));
    assert_eq!((msg.delivery, msg.dest_mode), (DeliveryMode::LowestPriority, DestMode::Logical));
    let init = sent(lapic.write(ICR, 0xc500));
    assert_eq!(
        (init.delivery, init.trigger, init.assert),
        (DeliveryMode::Init, Trigger::Level, true)
    );
    assert_eq!(lapic.write(ICR, 0x8500), LapicEffect::None, "INIT level de-assert");
    assert_eq!(lapic.write(ICR, 0x4350), LapicEffect::None, "reserved delivery mode");
    let _ = lapic.write(ICR2, 0xff00_0000);
    let to_all = sent(lapic.write(ICR, 0x4050));
    assert_eq!(to_all.dest, 0xff);
    assert!(lapic.matches(&to_all) && xapic(7).matches(&to_all));
    assert!(!x2apic(7).matches(&to_all) && x2apic(0xff).matches(&to_all));
    assert_eq!(read(&lapic, ICR), 0x4050, "delivery status reads as idle");
}

#[test]
fn self_ipis_are_told_apart() {
    let lapic = xapic(4);
    let to_self = LapicEffect::SelfIpi(Vector(0x50));
    assert_eq!(lapic.write(ICR, 0x4_4050), to_self);
    let _ = lapic.write(ICR2, 4 << 24);
    assert_eq!(lapic.write(ICR, 0x4050), to_self);
    let lapic = x2apic(0x104);
    assert_eq!(lapic.write_x2(SELF_IPI_MSR, 0x50), Ok(to_self));
    assert_eq!(lapic.write_x2(ICR_MSR, 0x104 << 32 | 0x4050), Ok(to_self));
    assert_eq!(lapic.write_x2(SELF_IPI_MSR, 0x150), Err(Gp));
    assert_eq!(lapic.write_x2(SELF_IPI_MSR, 5), Ok(LapicEffect::None));
}

/// kvm-unit-tests looks for an ESR of 0 behind a vector that cannot be sent and an APIC that was off meanwhile.
#[test]
fn errors_end_with_the_apic_that_made_them() {
    let lapic = x2apic(1);
    let esr_once_more = |between: &[u64]| {
        assert_eq!(lapic.write_x2(SELF_IPI_MSR, 0), Ok(LapicEffect::None));
        for bits in between {
            lapic.set_base(DEFAULT_BASE | bits, RULES).unwrap();
        }
        let _ = lapic.write_x2(0x828, 0).unwrap();
        lapic.read_x2(0x828, || 0).unwrap()
    };
    assert_eq!(esr_once_more(&[]), 0x20, "an illegal vector was sent");
    let off_and_on = [0, base::ENABLE, base::ENABLE | base::EXTD];
    assert_eq!(esr_once_more(&off_and_on), 0);
}

#[test]
fn lint0_lets_the_pic_through_as_its_entry_says() {
    let lapic = xapic(0);
    assert!(!lapic.accepts_pic());
    assert_eq!(lapic.write(LVT_LINT0, 0x700), LapicEffect::Lint0Changed);
    assert!(lapic.accepts_pic());
    assert_eq!(lapic.deliver_local(LocalVector::Lint0), Accepted::ExtInt);
    assert_eq!(lapic.write(LVT_LINT0, 0x700), LapicEffect::None, "nothing changed");
    let _ = lapic.write(LVT_LINT0, 0x1_0700);
    assert!(!lapic.accepts_pic());
    assert_eq!(lapic.deliver_local(LocalVector::Lint0), Accepted::Ignored);
    let _ = lapic.write(LVT_LINT0, 0x400);
    assert!(lapic.lint0_is_nmi() && !lapic.accepts_pic());
    assert_eq!(lapic.deliver_local(LocalVector::Lint0), Accepted::Nmi);
    lapic.set_base(DEFAULT_BASE, RULES).unwrap();
    assert!(lapic.accepts_pic(), "without an APIC the PIC is wired to the CPU");
    let reset = Lapic::new(0, CpuRole::Bootstrap);
    reset.reset(CpuRole::Bootstrap, Lint0::ExtInt);
    assert!(reset.accepts_pic());
}

trait WithVector {
    fn with_vector(self, vector: u8) -> Self;
}

impl WithVector for IrqMessage {
    fn with_vector(self, vector: u8) -> Self {
        Self { vector: Vector(vector), ..self }
    }
}

#[test]
fn nobody_arbitrates_for_a_physical_broadcast() {
    let mode = |icr, dest: u32| {
        let lapic = xapic(0);
        let _ = lapic.write(ICR2, dest << 24);
        match lapic.write(ICR, icr) {
            LapicEffect::SendIpi(message) => message.delivery,
            effect => panic!("{effect:?}"),
        }
    };
    assert_eq!(mode(0x141, 0xff), DeliveryMode::Fixed);
    assert_eq!(mode(0x141, 0xfe), DeliveryMode::LowestPriority);
    assert_eq!(mode(0x941, 0xff), DeliveryMode::LowestPriority, "logical");
    assert_eq!(mode(0xc_0141, 0xff), DeliveryMode::LowestPriority, "all but itself");
}
