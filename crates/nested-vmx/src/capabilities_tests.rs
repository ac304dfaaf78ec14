use super::*;

pub(crate) use crate::example::EVERYTHING;

fn whole() -> Capabilities {
    Capabilities::compute(&EVERYTHING, &Offer::WHOLE)
}

#[test]
fn values_are_those_that_stock_kvm_shows() {
    let c = whole();
    assert_eq!(c.basic.0, 0x00d8_1000_11e5_7ed0);
    assert_eq!(c.read(0x48d), Some(0x0000_00ff_0000_0016));
    assert_eq!(c.read(0x48e).map(|v| v as u32), Some(0x0400_6172));
    assert_eq!(c.read(0x482).map(|v| v as u32), Some(0x0401_e172));
    assert_eq!(c.read(0x48f).map(|v| v as u32), Some(0x0003_6dfb));
    assert_eq!(c.read(0x490).map(|v| v as u32), Some(0x0000_11fb));
    assert_eq!(c.misc, 0x2000_0165);
    assert_eq!((c.cr0_fixed0, c.cr4_fixed0), (0x8000_0021, 0x2000));
    assert_eq!(c.msr_list_limit(), 512);
    assert_eq!(c.read(0x492), None);
}

#[test]
fn a_poor_cpu_offers_less() {
    let poor = Host { secondary: 0, ept_vpid: 0, ..EVERYTHING };
    let c = Capabilities::compute(&poor, &Offer::WHOLE);
    let by_l0 = ProcControls2::SHADOW_VMCS
        | ProcControls2::VIRTUALIZE_APIC_ACCESSES
        | ProcControls2::VIRTUALIZE_X2APIC
        | ProcControls2::APIC_REGISTERS
        | ProcControls2::VIRTUAL_INTERRUPTS;
    assert_eq!(c.secondary.0 >> 32, u64::from(by_l0.bits()));
    assert_eq!((c.ept_vpid.0, c.vmfunc), (0, 0));
    let none = Host { primary: 0, ..poor };
    assert_eq!(Capabilities::compute(&none, &Offer::WHOLE).secondary.0, 0);
}

#[test]
fn dirty_logging_needs_dirty_bits() {
    let offer =
        Offer { ept_vpid: Offer::WHOLE.ept_vpid & !ept_vpid::ACCESSED_DIRTY, ..Offer::WHOLE };
    let c = Capabilities::compute(&EVERYTHING, &offer);
    assert!(!c.has_secondary(ProcControls2::PML) && c.has_secondary(ProcControls2::EPT));
}

#[test]
fn a_vmm_narrows_and_never_widens() {
    let whole = whole();
    for msr in 0x480..=0x491 {
        let mut c = whole;
        let value = whole.read(msr).unwrap();
        let derived = matches!(msr, 0x481..=0x484 | 0x487 | 0x489);
        assert_eq!(c.restrict(&whole, msr, value, false).is_ok(), !derived, "{msr:#x}");
        assert_eq!(c, whole);
        assert_eq!(c.restrict(&whole, msr, value, true), Err(Refused::InVmxOperation));
    }
    let mut c = whole;
    let ept = ProcControls2::EPT.bits();
    assert_eq!(c.restrict(&whole, 0x48b, u64::from(ept) << 32, false), Ok(()));
    assert_eq!(c.restrict(&whole, 0x48b, 1 << 63, false), Err(Refused::NotNarrower));
    // Less than the whole is allowed again after less still.
    assert_eq!(c.restrict(&whole, 0x48b, 0, false), Ok(()));
    assert_eq!(c.restrict(&whole, 0x48b, u64::from(ept) << 32, false), Ok(()));
    assert_eq!(c.restrict(&whole, 0x48d, whole.pin.0 & !2, false), Err(Refused::NotNarrower));
    assert_eq!(c.restrict(&whole, 0x486, 0, false), Err(Refused::NotNarrower));
    assert_eq!(c.restrict(&whole, 0x485, whole.misc | 1 << 30, false), Err(Refused::NotNarrower));
    assert_eq!(c.restrict(&whole, 0x485, whole.misc ^ 1, false), Err(Refused::NotNarrower));
    assert_eq!(
        c.restrict(&whole, 0x480, whole.basic.0 | 1 << 48, false),
        Err(Refused::NotNarrower)
    );
    assert_eq!(c.restrict(&whole, 0x480, whole.basic.0 ^ 1, false), Err(Refused::NotNarrower));
    assert_eq!(c.restrict(&whole, 0x491, 2, false), Err(Refused::NotNarrower));
    assert_eq!(c.restrict(&whole, 0x492, 0, false), Err(Refused::Unknown));
}

#[test]
fn what_comes_and_goes_with_cpuid_leaves_what_the_vmm_took() {
    use x86::vmcs::ProcControls2;
    let with = Capabilities::compute(&crate::example::EVERYTHING, &Offer::WHOLE);
    let offer = Offer {
        secondary: Offer::WHOLE.secondary.difference(ProcControls2::XSAVES),
        ..Offer::WHOLE
    };
    let without = Capabilities::compute(&crate::example::EVERYTHING, &offer);
    let has = |c: &Capabilities, what: ProcControls2| c.secondary.may() & what.bits() != 0;
    let mut c = without;
    let less = c.secondary.0 & !(u64::from(ProcControls2::RDSEED.bits()) << 32);
    c.restrict(&without, x86::vmcs::capability::VMX_PROCBASED_CTLS2, less, false).unwrap();
    c.follow_secondary(&without, &with);
    assert!(has(&c, ProcControls2::XSAVES) && !has(&c, ProcControls2::RDSEED));
    c.follow_secondary(&with, &with);
    assert!(has(&c, ProcControls2::XSAVES) && !has(&c, ProcControls2::RDSEED));
    c.follow_secondary(&with, &without);
    assert!(!has(&c, ProcControls2::XSAVES) && has(&c, ProcControls2::RDRAND));
}
