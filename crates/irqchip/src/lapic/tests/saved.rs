//! KVM_GET_LAPIC and KVM_SET_LAPIC.

use super::*;
use crate::lapic::{REGISTER_PAGE, RestoreError};

fn word(page: &[u8; REGISTER_PAGE], offset: usize) -> u32 {
    u32::from_le_bytes(page[offset..offset + 4].try_into().unwrap())
}

fn save(lapic: &Lapic, wide: bool, now: u64) -> [u8; REGISTER_PAGE] {
    let mut page = [0xcc; REGISTER_PAGE];
    lapic.save(&mut page, wide, now);
    page
}

#[test]
fn a_restored_apic_goes_on_where_the_saved_one_stood() {
    let a = xapic(3);
    let _ = a.write(LVT_TIMER, 0x2_00ec);
    let _ = a.write(LVT_LINT0, 0x700);
    let _ = a.write(TDCR, 0b1011);
    let LapicEffect::TimerChanged(change) = a.write(TMICT, 1_000_000) else { panic!() };
    let _ = a.timer_update(change, NOW);
    let _ = a.write(0xd0, 0x0400_0000);
    let _ = a.accept_fixed(x86::Vector(0x60), Trigger::Level);
    let _ = take(&a);
    let _ = pend(&a, 0x41);
    let _ = pend(&a, 0xf1);
    a.set_tpr(0x20);
    let page = save(&a, false, NOW + 300_000);

    let b = Lapic::new(3, CpuRole::Application);
    let op = b.restore(&page, false, 77).unwrap();
    assert_eq!(op, TimerOp::Arm { ns: 77 + 700_000 });
    assert_eq!(save(&b, false, 77), page);
    assert_eq!(take(&b), Some(0xf1));
    let _ = b.eoi();
    assert_eq!(b.eoi(), LapicEffect::Eoi { vector: x86::Vector(0x60), level: true });
    assert_eq!(take(&b), Some(0x41));
    assert_eq!(b.sw_timer_expired(77 + 700_000).rearm, Some(77 + 1_700_000));
}

#[test]
fn the_id_of_an_x2apic_is_narrow_unless_asked_for_wide() {
    let lapic = x2apic(0x105);
    assert_eq!(word(&save(&lapic, true, 0), 0x20), 0x105);
    assert_eq!(word(&save(&lapic, false, 0), 0x20), 0x0500_0000);
    assert_eq!(word(&save(&xapic(5), true, 0), 0x20), 0x0500_0000);
}

#[test]
fn a_foreign_id_is_refused_in_the_wide_form_and_changes_nothing() {
    let page = save(&x2apic(6), true, 0);
    let lapic = x2apic(5);
    lapic.set_tpr(0x33);
    assert_eq!(lapic.restore(&page, true, 0), Err(RestoreError));
    assert_eq!(lapic.tpr(), 0x33);
    let narrow = save(&x2apic(6), false, 0);
    assert!(lapic.restore(&narrow, false, 0).is_ok());
    assert_eq!(lapic.id(), 5);
}

#[test]
fn an_x2apics_logical_id_and_wide_icr_survive() {
    let lapic = x2apic(0x105);
    let _ = lapic.write_x2(ICR_MSR, 0x1234 << 32 | 0x40f1).unwrap();
    let page = save(&lapic, true, 0);
    assert_eq!(word(&page, 0xd0), 0x10_0020);
    assert_eq!(word(&page, 0x310), 0x1234);
    let other = x2apic(0x105);
    assert_eq!(other.restore(&page, true, 0), Ok(TimerOp::Leave));
    assert_eq!(other.read_x2(0x830, || 0), Ok(0x1234 << 32 | 0x40f1));
    assert_eq!(other.read_x2(0x80d, || 0), Ok(0x10_0020));
}

#[test]
fn an_expiry_whose_host_timer_has_not_fired_is_not_lost() {
    let a = xapic(0);
    let _ = a.write(LVT_TIMER, 0xec);
    let _ = a.write(TDCR, 0b1011);
    let LapicEffect::TimerChanged(change) = a.write(TMICT, 1_000) else { panic!() };
    let _ = a.timer_update(change, NOW);
    let b = xapic(0);
    let op = b.restore(&save(&a, false, NOW + 5_000), false, 100).unwrap();
    assert_eq!(op, TimerOp::Arm { ns: 101 });
    // One that has fired stays quiet.
    assert_eq!(a.sw_timer_expired(NOW + 5_000).accepted, Accepted::Pending);
    let c = xapic(0);
    assert_eq!(c.restore(&save(&a, false, NOW + 5_000), false, 100), Ok(TimerOp::Leave));
}

/// The deadline is no register of the page: what is restored in its mode leaves it running.
#[test]
fn a_deadline_that_runs_outlasts_a_restore_in_its_mode() {
    const DEADLINE: u32 = 2 << 17 | 0xec;
    let clock = |now_ns| TimerClock { now_ns, guest_tsc: now_ns, tsc_khz: 1_000_000 };
    for hv in [false, true] {
        let lapic = xapic(0);
        let _ = lapic.write(LVT_TIMER, DEADLINE);
        if hv {
            assert_eq!(lapic.switch_to_hv_timer(), Expiry::Never);
        }
        let _ = lapic.set_tsc_deadline(NOW + 500, &clock(NOW));
        let expiry = lapic.next_expiry();
        let page = save(&lapic, false, NOW);
        assert_eq!(lapic.restore(&page, false, NOW), Ok(TimerOp::Leave));
        assert_eq!((lapic.tsc_deadline(), lapic.next_expiry()), (NOW + 500, expiry));
        // In another mode it is over, in both directions.
        let mut other = page;
        other[LVT_TIMER as usize..][..4].copy_from_slice(&0xecu32.to_le_bytes());
        assert_eq!(lapic.restore(&other, false, NOW), Ok(TimerOp::Leave));
        assert_eq!((lapic.tsc_deadline(), lapic.next_expiry()), (0, Expiry::Never));
        assert_eq!(lapic.restore(&page, false, NOW), Ok(TimerOp::Leave));
        assert_eq!((lapic.tsc_deadline(), lapic.next_expiry()), (0, Expiry::Never));
    }
}
