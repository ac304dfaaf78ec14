//! Register access and the APIC base. SDM vol. 3A §10.4, §10.12.

use super::*;

#[test]
fn reset_values_are_the_manuals() {
    let lapic = Lapic::new(2, CpuRole::Application);
    assert_eq!(read(&lapic, 0x20), 2 << 24);
    assert_eq!(read(&lapic, 0x30), 0x5_0014);
    assert_eq!(read(&lapic, 0xe0), u32::MAX);
    assert_eq!(read(&lapic, SVR), 0xff);
    for offset in (LVT_TIMER..=LVT_ERROR).step_by(16) {
        assert_eq!(read(&lapic, offset), 1 << 16);
    }
    for offset in [TPR, 0xa0, 0xd0, 0x280, ICR, ICR2, TMICT, TMCCT, TDCR] {
        assert_eq!(read(&lapic, offset), 0, "{offset:#x}");
    }
    assert_eq!(lapic.base(), DEFAULT_BASE | base::ENABLE);
    assert_eq!(Lapic::new(0, CpuRole::Bootstrap).base(), DEFAULT_BASE | base::ENABLE | base::BSP);
}

#[test]
fn lvt_entries_stay_masked_while_disabled_by_software() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_ERROR, 0xe0);
    assert_eq!(read(&lapic, LVT_ERROR), 0xe0);
    assert_eq!(lapic.write(SVR, 0xff), LapicEffect::EnableChanged);
    assert_eq!(read(&lapic, LVT_ERROR), 0x1_00e0);
    let _ = lapic.write(LVT_ERROR, 0xe1);
    assert_eq!(read(&lapic, LVT_ERROR), 0x1_00e1);
    assert_eq!(lapic.write(SVR, 0x1ff), LapicEffect::EnableChanged);
    assert_eq!(read(&lapic, LVT_ERROR), 0x1_00e1, "unmasking is the guest's");
    assert_eq!(lapic.write(SVR, 0x1fe), LapicEffect::None);
}

#[test]
fn read_only_and_reserved_bits_are_not_written() {
    let lapic = xapic(0);
    for (offset, kept) in [
        (LVT_TIMER, 0x7_00ff),
        (0x330, 0x1_07ff),
        (0x340, 0x1_07ff),
        (LVT_LINT0, 0x1_a7ff),
        (0x360, 0x1_a7ff),
        (LVT_ERROR, 0x1_00ff),
        (0x20, 0xff00_0000),
        (0xd0, 0xff00_0000),
        (TPR, 0xff),
        (TDCR, 0xb),
        (ICR2, 0xff00_0000),
    ] {
        let _ = lapic.write(offset, u32::MAX);
        assert_eq!(read(&lapic, offset), kept, "{offset:#x}");
    }
    let _ = lapic.write(0xe0, 0);
    assert_eq!(read(&lapic, 0xe0), 0x0fff_ffff);
    let _ = lapic.write(0x30, 0);
    assert_eq!(read(&lapic, 0x30), 0x5_0014);
}

#[test]
fn page_access_takes_parts_of_a_register_but_stores_only_whole_ones() {
    let lapic = xapic(0x12);
    let mut byte = [0];
    assert!(lapic.mmio_read(0x23, &mut byte, || NOW));
    assert_eq!(byte, [0x12]);
    let mut wide = [0xaa; 8];
    assert!(lapic.mmio_read(0x20, &mut wide, || NOW));
    assert_eq!(wide, [0; 8]);
    assert_eq!(lapic.mmio_write(TPR, &[0x20]), Some(LapicEffect::None));
    assert_eq!(lapic.mmio_write(TPR + 4, &[0x20, 0, 0, 0]), Some(LapicEffect::None));
    assert_eq!(lapic.tpr(), 0);
    assert_eq!(lapic.mmio_write(TPR, &[0x20, 0, 0, 0]), Some(LapicEffect::TprChanged));
    assert_eq!(lapic.tpr(), 0x20);
    let x2 = x2apic(0);
    assert_eq!(x2.mmio_write(TPR, &[0; 4]), None);
    assert!(!x2.mmio_read(TPR, &mut byte, || NOW));
}

#[test]
fn mode_transitions_are_the_legal_ones() {
    let lapic = Lapic::new(0, CpuRole::Bootstrap);
    let addr = DEFAULT_BASE | base::BSP;
    let set = |bits: u64, host| lapic.set_base(addr | bits, BaseRules { host, ..RULES });
    assert_eq!(set(base::EXTD, false), Err(Gp), "invalid state");
    assert_eq!(set(base::EXTD, true), Err(Gp), "invalid for the VMM too");
    let changed = Ok(BaseChange { mode: true, address: false });
    assert_eq!(set(base::ENABLE | base::EXTD, false), changed);
    assert_eq!(set(base::ENABLE, false), Err(Gp), "x2APIC to xAPIC");
    assert_eq!(lapic.mode(), LapicMode::X2Apic);
    assert_eq!(set(0, false), changed);
    assert_eq!(set(base::ENABLE | base::EXTD, false), Err(Gp), "disabled to x2APIC");
    assert_eq!(set(base::ENABLE | base::EXTD, true), changed);
    assert_eq!(set(base::ENABLE, true), changed);
    assert_eq!(set(base::ENABLE, false), Ok(BaseChange::default()));
}

#[test]
fn base_has_reserved_bits_and_a_page_that_can_move() {
    let lapic = Lapic::new(0, CpuRole::Application);
    let rules = BaseRules { maxphyaddr: 40, x2apic: false, host: false };
    for bad in [1, 1 << 9, 1 << 40, base::EXTD] {
        assert_eq!(lapic.set_base(DEFAULT_BASE | base::ENABLE | bad, rules), Err(Gp));
    }
    let moved = lapic.set_base(0xfed0_0000 | base::ENABLE, rules);
    assert_eq!(moved, Ok(BaseChange { mode: false, address: true }));
    assert_eq!(lapic.mmio_base(), Some(0xfed0_0000));
}

#[test]
fn x2apic_registers_fault_where_there_is_none() {
    let lapic = x2apic(7);
    let get = |msr| lapic.read_x2(msr, || NOW);
    assert_eq!(get(0x802), Ok(7));
    assert_eq!(get(0x803), Ok(0x5_0014));
    for msr in [0x800, 0x801, 0x809, 0x80b, 0x80e, 0x80c, 0x831, 0x83f, 0x82f, 0x8ff] {
        assert_eq!(get(msr), Err(Gp), "{msr:#x}");
    }
    for msr in [0x802, 0x803, 0x80a, 0x80d, 0x80e, 0x810, 0x820, 0x831, 0x839, 0x8ff] {
        assert_eq!(lapic.write_x2(msr, 0), Err(Gp), "{msr:#x}");
    }
    assert_eq!(lapic.write_x2(0x80b, 1), Err(Gp));
    assert_eq!(lapic.write_x2(0x828, 1), Err(Gp));
    assert_eq!(lapic.write_x2(0x808, 0x100), Err(Gp));
    assert_eq!(lapic.write_x2(0x808, 1 << 32), Err(Gp));
    assert_eq!(lapic.write_x2(ICR_MSR, 1 << 20), Err(Gp));
    assert_eq!(lapic.write_x2(ICR_MSR, 1 << 13), Err(Gp));
    assert_eq!(lapic.write_x2(0x808, 0x20), Ok(LapicEffect::TprChanged));
    assert_eq!(get(0x808), Ok(0x20));
    let _ = lapic.write_x2(ICR_MSR, 0x1234 << 32 | 0x40f1).unwrap();
    assert_eq!(get(0x830), Ok(0x1234 << 32 | 0x40f1));
    let x1 = xapic(0);
    assert_eq!(x1.read_x2(0x802, || NOW), Err(Gp));
    assert_eq!(x1.write_x2(0x80b, 0), Err(Gp));
}

#[test]
fn init_keeps_the_id_and_the_mode() {
    let lapic = x2apic(0x21);
    let _ = pend(&lapic, 0x50);
    lapic.init(Lint0::Masked);
    assert_eq!(lapic.mode(), LapicMode::X2Apic);
    assert_eq!(lapic.read_x2(0x802, || 0), Ok(0x21));
    assert_eq!(lapic.read_x2(0x80d, || 0), Ok(0x2_0002));
    assert!(!lapic.software_enabled() && !lapic.maybe_pending());
}

#[test]
fn corrected_machine_checks_have_a_vector_only_where_offered() {
    use crate::lapic::{LocalVector, REGISTER_PAGE};
    let with = Features { cmci: true, ..Features::default() };
    let lapic = xapic(0);
    let _ = lapic.write(SVR, 0x1ff);
    assert_eq!(read(&lapic, 0x30), 0x5_0014);
    let _ = lapic.write(0x2f0, 0x45);
    assert_eq!(lapic.deliver_local(LocalVector::Cmci), Accepted::Ignored);
    lapic.set_features(with);
    assert_eq!((read(&lapic, 0x30), read(&lapic, 0x2f0)), (0x6_0014, 0x1_0000));
    let _ = lapic.write(0x2f0, u32::MAX);
    assert_eq!(read(&lapic, 0x2f0), 0x1_07ff);
    let _ = lapic.write(0x2f0, 0x45);
    assert_eq!(lapic.deliver_local(LocalVector::Cmci), Accepted::Pending);
    assert_eq!(take(&lapic), Some(0x45));
    // It is saved and restored, and lost with the feature.
    let mut page = [0; REGISTER_PAGE];
    lapic.save(&mut page, false, 0);
    assert_eq!(page[0x2f0], 0x45);
    let other = xapic(0);
    let _ = other.restore(&page, false, 0);
    lapic.set_features(Features::default());
    assert_eq!(lapic.deliver_local(LocalVector::Cmci), Accepted::Ignored);
    other.set_features(with);
    assert_eq!(read(&other, 0x2f0), 0x1_0000);
    let _ = other.restore(&page, false, 0);
    assert_eq!(read(&other, 0x2f0), 0x45);
}

#[test]
fn eoi_broadcasts_can_be_suppressed_only_where_offered() {
    let lapic = xapic(0);
    let _ = lapic.write(SVR, 0x11ff);
    assert_eq!(read(&lapic, SVR), 0x1ff);
    lapic.set_features(Features { tsc_deadline: true, directed_eoi: true, cmci: false });
    assert_eq!(read(&lapic, 0x30), 0x105_0014);
    let _ = lapic.write(SVR, 0x11ff);
    let _ = lapic.accept_fixed(x86::Vector(0x50), Trigger::Level);
    assert_eq!(take(&lapic), Some(0x50));
    assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: x86::Vector(0x50), level: false });
}

/// Found by the fuzzer: the logical id of x2APIC mode was still there in xAPIC mode, where its bits do not exist.
#[test]
fn the_logical_id_of_x2apic_mode_does_not_outlive_it() {
    let lapic = x2apic(10);
    assert_eq!(read(&lapic, 0xd0), 1 << 10);
    let plain = lapic.base() & !(base::ENABLE | base::EXTD);
    lapic.set_base(plain, RULES).unwrap();
    lapic.set_base(plain | base::ENABLE, RULES).unwrap();
    assert_eq!((lapic.mode(), read(&lapic, 0xd0)), (LapicMode::XApic, 0));
    assert_eq!(read(&lapic, 0xe0), u32::MAX);
}
