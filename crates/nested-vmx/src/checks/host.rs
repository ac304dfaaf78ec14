//! Host-state fields (SDM vol. 3C §27.2.2 to §27.2.4). What is broken here is VM-instruction error 8.

use x86::Cr4;
use x86::vmcs::controls::{EntryControls, ExitControls};
use x86::vmcs::{Field, Natural, ReadWrite, field};

use super::{Limits, is_efer, is_fixed, is_pat, rule};
use crate::memory::is_physical;
use crate::{Capabilities, Vmcs12};

/// The broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named by what the rule is about.
pub enum Broken {
    Cr0,
    Cr4,
    Cr3,
    Sysenter,
    PerfGlobalCtrl,
    Pat,
    Efer,
    Selectors,
    Bases,
    AddressSpace,
}

type Checked = Result<(), Broken>;

/// Checks all host-state fields.
pub fn check(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    // In any order, as with the controls: each ends in the same error.
    registers(v, c, limits)?;
    msrs(v, limits)?;
    segments(v, limits)?;
    address_space(v, limits)
}

fn canonical(v: &Vmcs12, at: Field<Natural, ReadWrite>, limits: &Limits) -> bool {
    limits.is_canonical(v.get(at))
}

fn registers(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    // Unlike the guest's, the host's CR0 has no exceptions: root operation is never without paging.
    rule(is_fixed(v.get(field::HOST_CR0), c.cr0_fixed0, c.cr0_fixed1), Broken::Cr0)?;
    rule(is_fixed(v.get(field::HOST_CR4), c.cr4_fixed0, c.cr4_fixed1), Broken::Cr4)?;
    rule(is_physical(v.get(field::HOST_CR3), limits.physical_bits), Broken::Cr3)?;
    let both = canonical(v, field::HOST_SYSENTER_ESP, limits)
        && canonical(v, field::HOST_SYSENTER_EIP, limits);
    rule(both, Broken::Sysenter)
}

fn msrs(v: &Vmcs12, limits: &Limits) -> Checked {
    // What an exit does not load is not looked at.
    let exit = v.exit();
    if exit.contains(ExitControls::LOAD_PERF_GLOBAL_CTRL) {
        let value = v.get(field::HOST_PERF_GLOBAL_CTRL);
        rule(value & !limits.perf_global_ctrl == 0, Broken::PerfGlobalCtrl)?;
    }
    if exit.contains(ExitControls::LOAD_PAT) {
        rule(is_pat(v.get(field::HOST_PAT)), Broken::Pat)?;
    }
    if exit.contains(ExitControls::LOAD_EFER) {
        // LMA and LME alike: L1 has paging on, so that it is in the mode that it enables.
        let long = exit.contains(ExitControls::HOST_64);
        rule(is_efer(v.get(field::HOST_EFER), limits, long, Some(long)), Broken::Efer)?;
    }
    Ok(())
}

fn segments(v: &Vmcs12, limits: &Limits) -> Checked {
    let all = [
        v.get(field::HOST_ES_SELECTOR),
        v.get(field::HOST_CS_SELECTOR),
        v.get(field::HOST_SS_SELECTOR),
        v.get(field::HOST_DS_SELECTOR),
        v.get(field::HOST_FS_SELECTOR),
        v.get(field::HOST_GS_SELECTOR),
        v.get(field::HOST_TR_SELECTOR),
    ];
    let long = v.exit().contains(ExitControls::HOST_64);
    // An exit makes LDTR unusable and CPL 0: neither TI nor an RPL would fit.
    let good = all.iter().all(|selector| selector & 7 == 0)
        // CS and TR have to be usable behind an exit; SS need not in 64-bit mode.
        && v.get(field::HOST_CS_SELECTOR) != 0
        && v.get(field::HOST_TR_SELECTOR) != 0
        && (long || v.get(field::HOST_SS_SELECTOR) != 0);
    rule(good, Broken::Selectors)?;
    // ES, CS, SS and DS get a base of 0 by the exit: they have no field.
    let bases = canonical(v, field::HOST_FS_BASE, limits)
        && canonical(v, field::HOST_GS_BASE, limits)
        && canonical(v, field::HOST_GDTR_BASE, limits)
        && canonical(v, field::HOST_IDTR_BASE, limits)
        && canonical(v, field::HOST_TR_BASE, limits);
    rule(bases, Broken::Bases)
}

/// Checks that the mode of L1 is that which the exit controls say.
pub fn address_space(v: &Vmcs12, limits: &Limits) -> Checked {
    // By L1's mode of now, which is no field: it is asked at each entry, since L1 changes it without VMWRITE.
    let to_long = v.exit().contains(ExitControls::HOST_64);
    let from_long = v.entry().contains(EntryControls::IA32E_GUEST);
    let cr4 = v.get(field::HOST_CR4);
    let rip = v.get(field::HOST_RIP);
    let good = limits.long_mode == to_long
        && if to_long {
            cr4 & Cr4::PAE.bits() != 0 && limits.is_canonical(rip)
        } else {
            // A host of 32 bits could not go on behind a guest of 64.
            !from_long && cr4 & Cr4::PCIDE.bits() == 0 && rip >> 32 == 0
        };
    rule(good, Broken::AddressSpace)
}
