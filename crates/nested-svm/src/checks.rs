//! Whether a VMCB12 may be run: the consistency checks of VMRUN (APM vol. 2 §15.5.1, §15.20, §15.25.4).
//!
//! VMRUN of a block that fails one ends with VMEXIT_INVALID. Which check it was the architecture does not tell;
//! [`Inconsistent`] does, for tests and reports.

use x86::{
    Cr0, Cr4, Efer, Rflags,
    addr::PAGE_SIZE,
    vmcb::{Clean, Control, ExitCode, Intercept4, NP_ENABLE, SEG_CS, Save, event},
};

use crate::{Offered, merge, reflect::intercepts};

/// Bytes of the I/O permission map.
pub const IOPM_BYTES: u64 = 3 * PAGE_SIZE;
/// Bytes of the MSR permission map.
pub const MSRPM_BYTES: u64 = 2 * PAGE_SIZE;

/// CS.D and CS.L as a block holds them.
const ATTRIB_L: u16 = 1 << 9;
const ATTRIB_D: u16 = 1 << 10;

/// The check that a block fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inconsistent {
    /// VMRUN is not intercepted.
    Vmrun,
    /// The address-space id is 0, which is the host's.
    Asid,
    /// A permission map reaches out of the physical addresses.
    Map,
    /// Nested paging, which is not offered.
    Npt,
    /// The root of nested paging is no address.
    Ncr3,
    /// TLB_CONTROL holds what does not exist.
    TlbControl,
    /// Virtual NMIs without an intercept of NMI, or not offered.
    VirtualNmi,
    /// EVENTINJ names an event that does not exist.
    Event,
    /// EFER: SVME clear, or a bit that does not exist.
    Efer,
    /// CR0: NW without CD, a bit of the upper half.
    Cr0,
    /// CR4: a bit that does not exist.
    Cr4,
    /// CR3: a bit beyond the physical addresses in long mode.
    Cr3,
    /// DR6 or DR7: a bit of the upper half.
    Debug,
    /// Long mode with paging, and without PAE or protection.
    LongMode,
    /// CS is of 64 bits and of 32 at once.
    CodeSegment,
    /// The PAT of nested paging names a type that does not exist.
    Pat,
}

/// Checks a control area, as it was copied. `guest`: the save area of the same block, where it is known.
///
/// # Errors
/// The first check that fails.
pub fn controls(
    control: &Control,
    guest: Option<&Save>,
    offered: &Offered,
) -> Result<(), Inconsistent> {
    // An intercept of VMRUN is not optional: without it L2 would be a hypervisor beside L1 (§15.5.1).
    let [.., fourth, _] = control.intercepts;
    if fourth & Intercept4::VMRUN.bits() == 0 {
        return Err(Inconsistent::Vmrun);
    }
    // It would flush, or find, what is the host's.
    if control.asid == 0 {
        return Err(Inconsistent::Asid);
    }
    // The CPU refuses a map that ends beyond its addresses, whether or not an intercept would look at it.
    map(control.iopm_base_pa, IOPM_BYTES, offered)?;
    map(control.msrpm_base_pa, MSRPM_BYTES, offered)?;
    nested_paging(control, offered)?;
    // 0: nothing; 1: all; 3: this guest's; 7: this guest's that are not global (APM vol. 2 §15.16).
    // By L1's CPUID: a command that it was not offered is one that does not exist.
    let known = match control.tlb_ctl {
        0 | 1 => true,
        3 | 7 => offered.flush_by_asid,
        _ => false,
    };
    if !known {
        return Err(Inconsistent::TlbControl);
    }
    // Without the intercept an NMI of L1's and the one that waits for L2 could not be told apart.
    if merge::has_virtual_nmi(control) && !(offered.vnmi && intercepts(control, ExitCode::Nmi)) {
        return Err(Inconsistent::VirtualNmi);
    }
    injected(control.event_inj, guest)
}

/// A permission map begins at a page; the low bits of its address are ignored (APM vol. 2 §15.10.1).
fn map(base: u64, bytes: u64, offered: &Offered) -> Result<(), Inconsistent> {
    // The low bits are dropped before the end is computed, as the CPU computes it.
    let base = base & !(PAGE_SIZE - 1);
    // L1 names any address: one at the very top wraps.
    let last = base.checked_add(bytes - 1).ok_or(Inconsistent::Map)?;
    if offered.is_address(base) && offered.is_address(last) {
        Ok(())
    } else {
        Err(Inconsistent::Map)
    }
}

fn nested_paging(control: &Control, offered: &Offered) -> Result<(), Inconsistent> {
    // Without nested paging nCR3 is not looked at: it may hold anything.
    if control.np_ctl & NP_ENABLE == 0 {
        return Ok(());
    }
    if !offered.npt {
        return Err(Inconsistent::Npt);
    }
    // Low bits are no part of the address, and not asked.
    if !offered.is_address(control.ncr3) {
        return Err(Inconsistent::Ncr3);
    }
    Ok(())
}

/// EVENTINJ (APM vol. 2 §15.20): a type that does not exist, a vector of no exception, or of one that there is not in the
/// guest's mode.
fn injected(event_inj: u64, guest: Option<&Save>) -> Result<(), Inconsistent> {
    /// APM vol. 2 table 8-1, without NMI, which has a type of its own, and what needs features that are not offered: shadow
    /// stacks and encrypted guests.
    const EXCEPTIONS: u32 = 0x400f_7dfb;
    /// #OF and #BR: INTO and BOUND are no instructions of 64-bit mode.
    const NOT_IN_64_BIT_MODE: u32 = 1 << 4 | 1 << 5;
    // The other fields of an event that is not valid mean nothing.
    if event_inj & event::VALID == 0 {
        return Ok(());
    }
    let is_exception = |vector: u64| {
        let lacks = if guest.is_some_and(is_64_bit) { NOT_IN_64_BIT_MODE } else { 0 };
        // Above 31 there are none.
        vector < 32 && (EXCEPTIONS & !lacks) >> vector & 1 != 0
    };
    // What the CPU would find wrong at VMRUN of block 02 is refused before anything of L1 changes.
    match event_inj & event::TYPE {
        // The vector of an interrupt or INT n may be any.
        event::INTR | event::NMI | event::SOFT => Ok(()),
        event::EXCEPTION if is_exception(event_inj & event::VECTOR) => Ok(()),
        _ => Err(Inconsistent::Event),
    }
}

/// Whether a guest with these registers is in 64-bit mode.
fn is_64_bit(save: &Save) -> bool {
    let long = Efer::from_bits_retain(save.efer).contains(Efer::LME)
        && Cr0::from_bits_retain(save.cr0).contains(Cr0::PG);
    long && save.segments.get(SEG_CS).is_some_and(|cs| cs.attrib & ATTRIB_L != 0)
}

/// Checks of a save area what is not known to be as it was: `dirty`, from [`crate::vmcb12::Vmcb12::load`].
///
/// # Errors
/// The first check that fails.
pub fn save(save: &Save, offered: &Offered, dirty: Clean) -> Result<(), Inconsistent> {
    // Registers that are clean were checked when they were not.
    // Either group: CS has to fit EFER and the control registers, so that one alone may break what both were.
    if dirty.intersects(Clean::CR | Clean::SEG) {
        registers(save, offered)?;
    }
    // Upper halves alone: what else of DR6 and DR7 is fixed the merge puts in.
    if dirty.contains(Clean::DR) && (save.dr6 >> 32 != 0 || save.dr7 >> 32 != 0) {
        return Err(Inconsistent::Debug);
    }
    Ok(())
}

/// Control registers and EFER, and the code segment that has to fit them.
fn registers(save: &Save, offered: &Offered) -> Result<(), Inconsistent> {
    let cr0 = Cr0::from_bits_retain(save.cr0);
    let cr4 = Cr4::from_bits_retain(save.cr4);
    let efer = Efer::from_bits_retain(save.efer);
    // LMA is no bit that software offers: L1 hands back what a VMEXIT has saved there.
    if !efer.contains(Efer::SVME) || efer.bits() & !(offered.efer | Efer::LMA.bits()) != 0 {
        return Err(Inconsistent::Efer);
    }
    // NW without CD is a state that no CPU has; all other combinations of the two are L1's.
    if cr0.bits() & Cr0::HIGH != 0 || (cr0.contains(Cr0::NW) && !cr0.contains(Cr0::CD)) {
        return Err(Inconsistent::Cr0);
    }
    // By what L1's CPUID offers, not by what the CPU can: reserved is what L1 was not told of.
    if cr4.bits() & !offered.cr4 != 0 {
        return Err(Inconsistent::Cr4);
    }
    // Only then are the mode's conditions checked: LME alone is no mode yet (APM vol. 2 §15.5.1).
    if efer.contains(Efer::LME) && cr0.contains(Cr0::PG) {
        if !cr4.contains(Cr4::PAE) || !cr0.contains(Cr0::PE) {
            return Err(Inconsistent::LongMode);
        }
        // Outside long mode the upper half of CR3 is ignored: only there a bit beyond the addresses is wrong.
        if !offered.is_address(save.cr3) {
            return Err(Inconsistent::Cr3);
        }
        let both = ATTRIB_L | ATTRIB_D;
        if save.segments.get(SEG_CS).is_some_and(|cs| cs.attrib & both == both) {
            return Err(Inconsistent::CodeSegment);
        }
    }
    Ok(())
}

/// The PAT that L2 has under nested paging: each of its eight types exists (APM vol. 2 §15.25.4).
///
/// # Errors
/// One does not.
pub fn pat(g_pat: u64) -> Result<(), Inconsistent> {
    // 2 and 3 are reserved types.
    let exists = |type_: u8| matches!(type_, 0 | 1 | 4 | 5 | 6 | 7);
    if g_pat.to_le_bytes().into_iter().all(exists) { Ok(()) } else { Err(Inconsistent::Pat) }
}

/// Whether saved state that claims to be L1's can have run VMRUN (KVM_SET_NESTED_STATE): protected mode with
/// paging, as SVM's host has to be.
pub fn is_host(save: &Save) -> bool {
    // LMA and PAE are not asked: a hypervisor of 32 bits may run VMRUN, too.
    save.cr0 & Cr0::PG.bits() != 0 && can_run_vmrun(save)
}

/// Whether what RSM finds as L1's state can have run VMRUN. It asks for protected mode, and not for paging.
pub fn can_run_vmrun(save: &Save) -> bool {
    let flags = Rflags::from_bits_retain(save.rflags);
    save.cr0 & Cr0::PE.bits() != 0 && !flags.contains(Rflags::VM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::vmcb::{Vmcb, vintr};
    use zerocopy::FromZeros;

    const OFFERED: Offered = Offered {
        physical_bits: 48,
        flush_by_asid: true,
        npt: true,
        nrip_save: true,
        decode_assists: false,
        pause_filter: true,
        pause_threshold: true,
        vgif: false,
        virtual_vmload: false,
        wide_sysenter: false,
        lbr: false,
        vnmi: false,
        cr4: 0x7ff,
        efer: Efer::SCE.bits() | Efer::LME.bits() | Efer::NXE.bits() | Efer::SVME.bits(),
    };

    fn runnable() -> Vmcb {
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts[4] = Intercept4::VMRUN.bits();
        block.control.asid = 1;
        block.save.efer = (Efer::SVME | Efer::LME | Efer::LMA).bits();
        block.save.cr0 = (Cr0::PE | Cr0::PG | Cr0::ET).bits();
        block.save.cr4 = Cr4::PAE.bits();
        block.save.segments[SEG_CS].attrib = ATTRIB_L;
        block
    }

    fn verdict(change: impl FnOnce(&mut Vmcb)) -> Result<(), Inconsistent> {
        let mut block = runnable();
        change(&mut block);
        controls(&block.control, Some(&block.save), &OFFERED)?;
        save(&block.save, &OFFERED, Clean::ALL)?;
        pat(block.save.g_pat)
    }

    #[test]
    fn a_plain_block_may_be_run() {
        assert_eq!(verdict(|_| {}), Ok(()));
    }

    /// Interrupts have all vectors; exceptions those that the manual gives one, as far as the guest's mode has it.
    #[test]
    fn an_injected_exception_has_a_vector_of_one() {
        let legacy = |b: &mut Vmcb| b.save.segments[SEG_CS].attrib = ATTRIB_D;
        let anywhere = [0, 1, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 30];
        for vector in 0..256 {
            let taken = |kind, mode: fn(&mut Vmcb)| {
                let inject = |b: &mut Vmcb| {
                    b.control.event_inj = event::VALID | kind | vector;
                    mode(b);
                };
                verdict(inject).is_ok()
            };
            let there = anywhere.contains(&vector);
            assert_eq!(taken(event::EXCEPTION, |_| {}), there, "{vector}");
            let there = there || [4, 5].contains(&vector);
            assert_eq!(taken(event::EXCEPTION, legacy), there, "{vector} outside of 64-bit mode");
            assert!(taken(event::INTR, |_| {}) && taken(event::SOFT, |_| {}), "{vector}");
        }
    }

    #[test]
    fn each_rule_of_vmrun_is_checked() {
        type Change = fn(&mut Vmcb);
        let cases: &[(Inconsistent, Change)] = &[
            (Inconsistent::Vmrun, |b| b.control.intercepts[4] = 0),
            (Inconsistent::Asid, |b| b.control.asid = 0),
            (Inconsistent::Map, |b| b.control.iopm_base_pa = (1 << 48) - 0x2000),
            (Inconsistent::Map, |b| b.control.msrpm_base_pa = u64::MAX),
            (Inconsistent::Ncr3, |b| {
                b.control.np_ctl = NP_ENABLE;
                b.control.ncr3 = 1 << 48;
            }),
            (Inconsistent::TlbControl, |b| b.control.tlb_ctl = 2),
            (Inconsistent::VirtualNmi, |b| b.control.int_ctl = vintr::NMI_ENABLE),
            (Inconsistent::Event, |b| b.control.event_inj = event::VALID | (1 << 8)),
            (Inconsistent::Event, |b| b.control.event_inj = event::VALID | event::EXCEPTION | 2),
            (Inconsistent::Event, |b| b.control.event_inj = event::VALID | event::EXCEPTION | 32),
            (Inconsistent::Event, |b| b.control.event_inj = event::VALID | event::EXCEPTION | 15),
            (Inconsistent::Efer, |b| b.save.efer &= !Efer::SVME.bits()),
            (Inconsistent::Efer, |b| b.save.efer |= 1 << 40),
            (Inconsistent::Cr0, |b| b.save.cr0 |= Cr0::NW.bits()),
            (Inconsistent::Cr0, |b| b.save.cr0 |= 1 << 32),
            (Inconsistent::Cr4, |b| b.save.cr4 |= 1 << 63),
            (Inconsistent::LongMode, |b| b.save.cr4 = 0),
            (Inconsistent::LongMode, |b| b.save.cr0 &= !Cr0::PE.bits()),
            (Inconsistent::Cr3, |b| b.save.cr3 = 1 << 50),
            (Inconsistent::CodeSegment, |b| {
                b.save.segments[SEG_CS].attrib = ATTRIB_L | ATTRIB_D;
            }),
            (Inconsistent::Debug, |b| b.save.dr6 = 1 << 32),
            (Inconsistent::Debug, |b| b.save.dr7 = 1 << 63),
            (Inconsistent::Pat, |b| b.save.g_pat = 2),
        ];
        for (wanted, change) in cases {
            assert_eq!(verdict(change), Err(*wanted));
        }
    }

    #[test]
    fn the_last_page_of_the_addresses_may_hold_a_map() {
        assert_eq!(verdict(|b| b.control.iopm_base_pa = (1 << 48) - 0x3000), Ok(()));
        // The low bits are no part of the address.
        assert_eq!(verdict(|b| b.control.msrpm_base_pa = 0x1fff), Ok(()));
    }

    #[test]
    fn what_is_clean_is_not_checked_again() {
        let mut block = runnable();
        block.save.cr4 = u64::MAX;
        block.save.dr7 = u64::MAX;
        assert_eq!(save(&block.save, &OFFERED, Clean::CR2), Ok(()));
        assert_eq!(save(&block.save, &OFFERED, Clean::DR), Err(Inconsistent::Debug));
        assert_eq!(save(&block.save, &OFFERED, Clean::CR), Err(Inconsistent::Cr4));
    }

    #[test]
    fn without_npt_a_block_cannot_have_it() {
        let mut block = runnable();
        block.control.np_ctl = NP_ENABLE;
        let without = Offered { npt: false, flush_by_asid: false, ..OFFERED };
        assert_eq!(controls(&block.control, None, &without), Err(Inconsistent::Npt));
        block.control.np_ctl = 0;
        block.control.tlb_ctl = 1;
        assert_eq!(controls(&block.control, None, &without), Ok(()));
        block.control.tlb_ctl = 3;
        assert_eq!(controls(&block.control, None, &without), Err(Inconsistent::TlbControl));
    }
}
