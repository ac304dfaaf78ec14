//! Whose exit an exit of L2 is.
//!
//! Asked before the exit is decoded for L1, and answered from the exit code, the intercepts of the copy of VMCB12
//! and L1's permission maps. An exit that both asked for is L1's, but for those that are the machine's: physical
//! interrupts, NMIs, SMIs and INITs end L2's run for L0, and reach L1 as events of its own virtual machine
//! ([`crate::gif`]). A fault of nested paging is L0's to look at first: whether NPT12 has the page only a walk
//! tells.

use x86::{
    Cr0, Cr0Write, Direction, Exception,
    vmcb::{Control, ExitCode, Intercept3, InterceptCr},
};

use crate::{L1Memory, Offered, merge::has_virtual_vmload, permission};

/// An exit as a control block tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// EXITCODE.
    pub code: ExitCode,
    /// EXITINFO1.
    pub info_1: u64,
    /// EXITINFO2.
    pub info_2: u64,
}

impl Exit {
    /// An exit that says nothing beside its code.
    pub const fn plain(code: ExitCode) -> Self {
        Self { code, info_1: 0, info_2: 0 }
    }

    /// The exit that an exception makes which L1 intercepts (APM vol. 2 §15.12).
    pub fn of_exception(e: &Exception) -> Self {
        const PF: u8 = 14;
        Self {
            code: ExitCode(ExitCode::Excp0.0 + u64::from(e.vector.0 & 31)),
            // Where the vector pushes none EXITINFO1 is 0 (§15.12).
            info_1: e.error_code.unwrap_or(0).into(),
            // EXITINFO2 has CR2 for #PF; the debug registers show what #DB is for.
            info_2: if e.vector.0 == PF { e.payload.unwrap_or(0) } else { 0 },
        }
    }

    /// Whether NRIP is saved: intercepted instructions, but not those whose next address nobody knows, and exceptions of
    /// INT3, INTO and BOUND (APM vol. 2 §15.7.1).
    pub const fn tells_next_rip(&self) -> bool {
        matches!(self.code.0, 0x000..=0x03f | 0x043..=0x045 | 0x065..=0x07c | 0x080..=0x0a4)
    }

    /// Whether instruction bytes are saved: intercepted #PF and faults of nested paging (APM vol. 2 §15.8.4).
    pub const fn tells_bytes(&self) -> bool {
        matches!(self.code.0, 0x04e | 0x400)
    }
}

/// Whose an exit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// L0 answers it; L2 goes on.
    L0,
    /// A write of CR0: what it changes decides ([`cr0_write`]).
    ByValue,
    /// L1 asked for it.
    L1,
}

/// Whether L1 intercepts what `code` names. The intercept words are laid out as the codes below 0xc0 are.
pub fn intercepts(control: &Control, code: ExitCode) -> bool {
    // Codes beyond the words have no intercept bit: nested page faults, and what later CPUs add.
    // The word is looked up with `get`: an exit code is the CPU's, and may be newer than this table.
    let word = usize::try_from(code.0 / 32).ok().and_then(|at| control.intercepts.get(at));
    word.is_some_and(|word| word >> (code.0 % 32) & 1 != 0)
}

/// Whether L1's mask of virtual NMIs stays in block 01 while L2 runs: L1 intercepts NMIs. Those of L2 are what L1 injects then,
/// and their mask is L2's own, or in L1's mind: an NMI masks none of L1's, which would find the next one masked for ever. As on
/// stock KVM.
pub fn keeps_nmi_mask(v12: &Control) -> bool {
    intercepts(v12, ExitCode::Nmi)
}

/// Whose exit it is. `control`: of the copy of VMCB12.
pub fn claims(control: &Control, offered: &Offered, exit: &Exit, memory: &impl L1Memory) -> Claim {
    let theirs = match exit.code {
        // The exit came for L0's intercept of all writes; L1 asked for some.
        // L1 asked for writes that change something: whether this one does only its value tells.
        ExitCode::WriteCr0 if is_selective(control) => return Claim::ByValue,
        // The machine's.
        ExitCode::Intr | ExitCode::Nmi | ExitCode::Smi | ExitCode::Init => false,
        // Only L0 makes the host take them.
        ExitCode::FerrFreeze => false,
        // NPT12 is asked by a walk.
        ExitCode::Npf => false,
        // L0 has entered what L1 asked for: what the CPU does not take of it is L1's to hear of.
        ExitCode::Invalid => true,
        // Both: without the intercept no map is looked at.
        ExitCode::Msr => intercepts(control, exit.code) && msr(control, exit, memory),
        ExitCode::Ioio => {
            intercepts(control, exit.code)
                && permission::port_exits(memory, control.iopm_base_pa, exit.info_1)
        }
        // Where the CPU takes their addresses through L1's tables, and exits nonetheless, nobody but L1 can.
        ExitCode::Vmload | ExitCode::Vmsave => {
            // Beside L1's intercept: the CPU takes the address itself, and has failed at it.
            intercepts(control, exit.code) || has_virtual_vmload(control, offered)
        }
        // A machine check is the host's.
        code if code.0 == ExitCode::Excp0.0 + 18 => false,
        code => intercepts(control, code),
    };
    if theirs { Claim::L1 } else { Claim::L0 }
}

/// An MSR that L0 left to L1 is the one that RCX names at the exit; the caller put it into EXITINFO2 of the exit,
/// which an MSR exit does not use (APM vol. 2 §15.11).
fn msr(control: &Control, exit: &Exit, memory: &impl L1Memory) -> bool {
    // Bit 0 is set for WRMSR.
    let direction = Direction::write_if(exit.info_1 & 1 != 0);
    permission::msr_exits(memory, control.msrpm_base_pa, exit.info_2 as u32, direction)
}

/// Whether L1 wants to hear of some writes of CR0, and not of all.
fn is_selective(control: &Control) -> bool {
    // Where L1 hears of all writes the selective intercept adds nothing.
    let [cr, _, _, third, ..] = control.intercepts;
    third & Intercept3::CR0_SEL_WRITE.bits() != 0 && cr & InterceptCr::WRITE_CR0.bits() == 0
}

/// Whether L1 wants to hear of a write of CR0 that L0 carries out for L2: it intercepts writes, or selectively those
/// that change more than TS and MP (APM vol. 2 §15.8.1), and any LMSW (table 15-7).
pub fn cr0_write(control: &Control, old: Cr0, new: Cr0, by: Cr0Write) -> Option<Exit> {
    // A write that is intercepted as such is told so, selectively asked for or not.
    if intercepts(control, ExitCode::WriteCr0) {
        return Some(Exit::plain(ExitCode::WriteCr0));
    }
    let [_, _, _, third, ..] = control.intercepts;
    let changed = (old ^ new) - (Cr0::TS | Cr0::MP);
    let selective = third & Intercept3::CR0_SEL_WRITE.bits() != 0
        // LMSW exits even where it changes nothing: the CPU does not compare for it.
        && (by == Cr0Write::Lmsw || !changed.is_empty());
    selective.then_some(Exit::plain(ExitCode::Cr0SelWrite))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outside;
    use x86::{
        Gpa, Vector,
        vmcb::{Intercept4, Vmcb},
    };
    use zerocopy::FromZeros;

    struct Maps {
        closed: Option<u64>,
    }

    impl L1Memory for Maps {
        fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
            into.fill(0);
            if self.closed == Some(at.0) {
                into.fill(0xff);
            }
            Ok(())
        }
        fn write(&self, _: Gpa, _: &[u8]) -> Result<(), Outside> {
            Err(Outside)
        }
    }

    const OPEN: Maps = Maps { closed: None };

    #[test]
    fn an_exit_is_whose_intercept_it_is() {
        let mut block = Vmcb::new_zeroed();
        let exit = Exit::plain(ExitCode::Cpuid);
        assert_eq!(claims(&block.control, &Offered::default(), &exit, &OPEN), Claim::L0);
        block.control.intercepts[3] = Intercept3::CPUID.bits();
        assert_eq!(claims(&block.control, &Offered::default(), &exit, &OPEN), Claim::L1);
        block.control.intercepts[4] = Intercept4::VMMCALL.bits();
        assert_eq!(
            claims(&block.control, &Offered::default(), &Exit::plain(ExitCode::Vmmcall), &OPEN),
            Claim::L1
        );
    }

    #[test]
    fn a_write_of_cr0_that_some_are_asked_for_is_whose_it_shows_later() {
        let mut block = Vmcb::new_zeroed();
        let exit = Exit::plain(ExitCode::WriteCr0);
        block.control.intercepts[3] = Intercept3::CR0_SEL_WRITE.bits();
        assert_eq!(claims(&block.control, &Offered::default(), &exit, &OPEN), Claim::ByValue);
        block.control.intercepts[0] = InterceptCr::WRITE_CR0.bits();
        assert_eq!(claims(&block.control, &Offered::default(), &exit, &OPEN), Claim::L1);
        block.control.intercepts[3] = 0;
        block.control.intercepts[0] = 0;
        assert_eq!(claims(&block.control, &Offered::default(), &exit, &OPEN), Claim::L0);
    }

    #[test]
    fn the_machines_exits_stay_l0s() {
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts = [u32::MAX; 6];
        let mc = ExitCode(ExitCode::Excp0.0 + 18);
        for code in
            [ExitCode::Intr, ExitCode::Nmi, ExitCode::Smi, ExitCode::Init, ExitCode::Npf, mc]
        {
            assert_eq!(
                claims(&block.control, &Offered::default(), &Exit::plain(code), &OPEN),
                Claim::L0
            );
        }
        assert_eq!(
            claims(&block.control, &Offered::default(), &Exit::plain(ExitCode::Invalid), &OPEN),
            Claim::L1
        );
    }

    #[test]
    fn maps_are_asked_for_msrs_and_ports() {
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts = [u32::MAX; 6];
        block.control.msrpm_base_pa = 0x1000;
        let write = Exit { code: ExitCode::Msr, info_1: 1, info_2: 0xc000_0102 };
        assert_eq!(claims(&block.control, &Offered::default(), &write, &OPEN), Claim::L0);
        let closed = Maps { closed: Some(0x1840) };
        assert_eq!(claims(&block.control, &Offered::default(), &write, &closed), Claim::L1);
        block.control.intercepts[3] &= !Intercept3::MSR.bits();
        assert_eq!(claims(&block.control, &Offered::default(), &write, &closed), Claim::L0);
    }

    /// With virtual VMLOAD their addresses are L2's own: nobody below L1 can carry them out, where the CPU does not.
    #[test]
    fn moves_of_an_l2_whose_addresses_go_through_l1s_tables_are_l1s() {
        let mut block = Vmcb::new_zeroed();
        let offered = Offered { virtual_vmload: true, ..Offered::default() };
        for (np, virt_ext, claim) in [(1, 2, Claim::L1), (0, 2, Claim::L0), (1, 0, Claim::L0)] {
            (block.control.np_ctl, block.control.virt_ext) = (np, virt_ext);
            for code in [ExitCode::Vmload, ExitCode::Vmsave] {
                assert_eq!(claims(&block.control, &offered, &Exit::plain(code), &OPEN), claim);
                let without = Offered::default();
                assert_eq!(claims(&block.control, &without, &Exit::plain(code), &OPEN), Claim::L0);
            }
        }
    }

    #[test]
    fn codes_that_are_no_intercepts_are_nobodys() {
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts = [u32::MAX; 6];
        for code in [0xc0, 0x400, 0x403, u64::MAX - 1] {
            assert!(!intercepts(&block.control, ExitCode(code)));
        }
        assert!(intercepts(&block.control, ExitCode(0xbf)));
    }

    #[test]
    fn selective_writes_of_cr0_are_those_that_change_more() {
        let mut block = Vmcb::new_zeroed();
        let (old, ts) = (Cr0::PE | Cr0::PG, Cr0::PE | Cr0::PG | Cr0::TS);
        block.control.intercepts[3] = Intercept3::CR0_SEL_WRITE.bits();
        assert_eq!(cr0_write(&block.control, old, ts, Cr0Write::Other), None);
        let cd = old | Cr0::CD;
        assert_eq!(
            cr0_write(&block.control, old, cd, Cr0Write::Other),
            Some(Exit::plain(ExitCode::Cr0SelWrite))
        );
        block.control.intercepts[0] = 1 << 16;
        assert_eq!(
            cr0_write(&block.control, old, ts, Cr0Write::Other),
            Some(Exit::plain(ExitCode::WriteCr0))
        );
    }

    #[test]
    fn a_page_fault_tells_its_address() {
        let fault = Exception { vector: Vector(14), error_code: Some(6), payload: Some(0x5000) };
        let exit = Exit::of_exception(&fault);
        assert_eq!((exit.code.0, exit.info_1, exit.info_2), (0x4e, 6, 0x5000));
        assert!(exit.tells_bytes() && !exit.tells_next_rip());
    }
}
