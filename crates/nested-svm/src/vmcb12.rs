//! L1's control block, as a private copy.

use core::mem::offset_of;

use x86::{
    Gpa,
    addr::PAGE_SIZE,
    vmcb::{self, Clean, Control, Save, Vmcb},
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{L1Memory, Outside};

/// Bytes of the control area that L0 reads: up to the address of the SEV-ES save area, which is not offered.
const CONTROL_BYTES: usize = offset_of!(Control, vmsa_pa);
/// Where the save area begins.
const SAVE_AT: usize = offset_of!(Vmcb, save);
/// Bytes of the save area that L0 reads: up to SPEC_CTRL.
const SAVE_BYTES: usize = offset_of!(Save, spec_ctrl) + size_of::<u64>();

const fn of_control(at: usize, len: usize) -> (usize, usize) {
    (at, len)
}

const fn of_save(at: usize, len: usize) -> (usize, usize) {
    (SAVE_AT + at, len)
}

/// What a VMEXIT writes into VMCB12: offset and length. Segments in the order of `Save::segments`.
const WRITTEN: [(usize, usize); 11] = [
    // V_INTR fields, interrupt shadow, exit code and information, interrupted event.
    of_control(offset_of!(Control, int_ctl), 0x30),
    of_control(offset_of!(Control, event_inj), 8),
    // NRIP, the number of instruction bytes, and the bytes.
    of_control(offset_of!(Control, next_rip), 0x18),
    // ES, CS, SS, DS.
    of_save(0, 4 * 16),
    of_save(vmcb::SEG_GDTR * 16, 16),
    of_save(vmcb::SEG_IDTR * 16, 16),
    // CPL up to EFER.
    of_save(offset_of!(Save, cpl), 1),
    of_save(offset_of!(Save, efer), 8),
    // CR4, CR3, CR0, DR7, DR6, RFLAGS, RIP.
    of_save(offset_of!(Save, cr4), 7 * 8),
    of_save(offset_of!(Save, rsp), 8),
    of_save(offset_of!(Save, rax), 8),
];

/// What a VMEXIT writes besides where it applies.
const CR2: (usize, usize) = of_save(offset_of!(Save, cr2), 8);
const G_PAT: (usize, usize) = of_save(offset_of!(Save, g_pat), 8);
const LBR: (usize, usize) = of_save(offset_of!(Save, dbgctl), 5 * 8);

/// L1's control block: where it lies, and the copy that was made of it.
#[derive(Debug)]
pub struct Vmcb12 {
    at: Gpa,
    page: Vmcb,
}

impl Vmcb12 {
    /// No block.
    pub fn new() -> Self {
        Self { at: Gpa(u64::MAX), page: Vmcb::new_zeroed() }
    }

    /// Where the block lies in L1's memory.
    #[inline]
    pub const fn at(&self) -> Gpa {
        self.at
    }

    /// The copy.
    #[inline]
    pub const fn get(&self) -> &Vmcb {
        &self.page
    }

    /// The control area of the copy.
    #[inline]
    pub const fn control(&self) -> &Control {
        &self.page.control
    }

    /// Copies the block at `at`, which is aligned to a page. The result says what of the save area may differ from
    /// the copy of the last load: all of it if that was of another block.
    ///
    /// # Errors
    /// It is not all memory. Nothing is to be done with the copy then; the next load takes all anew.
    pub fn load(&mut self, memory: &impl L1Memory, at: Gpa) -> Result<Clean, Outside> {
        let same = self.at == at;
        self.at = Gpa(u64::MAX);
        let bytes = self.page.as_mut_bytes();
        if let Some(control) = bytes.get_mut(..CONTROL_BYTES) {
            memory.read(at, control)?;
        }
        let clean =
            if same { Clean::from_bits_truncate(self.page.control.clean) } else { Clean::empty() };
        let bytes = self.page.as_mut_bytes();
        if let Some(save) = bytes.get_mut(SAVE_AT..SAVE_AT + SAVE_BYTES) {
            memory.read(Gpa(at.0 + SAVE_AT as u64), save)?;
        }
        self.at = at;
        Ok(Clean::ALL - clean)
    }

    /// The block is not the one that block 02 was made from any more: the next load takes all anew.
    pub fn forget(&mut self) {
        self.at = Gpa(u64::MAX);
    }

    /// Puts the copy's place and contents together from saved state.
    pub(crate) fn restore(&mut self, at: Gpa, page: &Vmcb) {
        self.page.as_mut_bytes().copy_from_slice(page.as_bytes());
        self.at = at;
    }

    /// Writes what a VMEXIT changes of `page` into L1's block at `at`: `npt` also the guest's PAT, `lbr` also the branch
    /// records.
    ///
    /// # Errors
    /// L1's block is not all memory any more.
    pub fn write_back(
        memory: &impl L1Memory,
        at: Gpa,
        page: &Vmcb,
        beside: Beside,
    ) -> Result<(), Outside> {
        let bytes = page.as_bytes();
        let also = [
            Some(CR2),
            beside.contains(Beside::PAT).then_some(G_PAT),
            beside.contains(Beside::LBR).then_some(LBR),
        ];
        for (offset, len) in WRITTEN.into_iter().chain(also.into_iter().flatten()) {
            let Some(part) = bytes.get(offset..offset + len) else { continue };
            memory.write(Gpa(at.0 + offset as u64), part)?;
        }
        Ok(())
    }
}

impl Default for Vmcb12 {
    fn default() -> Self {
        Self::new()
    }
}

bitflags::bitflags! {
    /// What a VMEXIT writes beside the rest.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Beside: u8 {
        /// The guest's PAT: L2 ran with nested paging.
        const PAT = 1 << 0;
        /// DEBUGCTL and the branch records: LBR virtualisation was on.
        const LBR = 1 << 1;
    }
}

const _: () = {
    assert!(size_of::<Vmcb>() as u64 == PAGE_SIZE);
    assert!(CONTROL_BYTES <= SAVE_AT && SAVE_AT + SAVE_BYTES <= size_of::<Vmcb>());
    assert!(offset_of!(Control, int_ctl) + 0x30 == offset_of!(Control, np_ctl));
    assert!(offset_of!(Control, next_rip) + 0x18 == offset_of!(Control, avic_backing_page));
    assert!(offset_of!(Save, cr4) + 7 * 8 == offset_of!(Save, rip) + 8);
    assert!(offset_of!(Save, dbgctl) + 5 * 8 == offset_of!(Save, last_excp_to) + 8);
};
