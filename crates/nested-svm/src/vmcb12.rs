//! L1's control block, as a private copy.

use core::mem::offset_of;

use x86::{
    Gpa,
    addr::PAGE_SIZE,
    vmcb::{Clean, Control, Save, Vmcb},
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{L1Memory, Outside};

/// Bytes of the control area that L0 reads: up to the address of the SEV-ES save area, which is not offered.
const CONTROL_BYTES: usize = offset_of!(Control, vmsa_pa);
/// Where the save area begins.
const SAVE_AT: usize = offset_of!(Vmcb, save);
/// Bytes of the save area that L0 reads: up to SPEC_CTRL.
const SAVE_BYTES: usize = offset_of!(Save, spec_ctrl) + size_of::<u64>();

/// L1's control block: where it lies, and the copy that was made of it.
#[derive(Debug, FromZeros)]
pub struct Vmcb12 {
    at: u64,
    page: Vmcb,
}

impl Vmcb12 {
    /// No block.
    pub fn new() -> Self {
        Self { at: u64::MAX, page: Vmcb::new_zeroed() }
    }

    /// Where the block lies in L1's memory.
    #[inline]
    pub const fn at(&self) -> Gpa {
        Gpa(self.at)
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
        let same = self.at == at.0;
        self.at = u64::MAX;
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
        self.at = at.0;
        Ok(Clean::ALL - clean)
    }

    /// The block is not the one that block 02 was made from any more: the next load takes all anew.
    pub fn forget(&mut self) {
        self.at = u64::MAX;
    }

    /// Puts the copy's place and contents together from saved state.
    pub(crate) fn restore(&mut self, at: Gpa, page: &Vmcb) {
        self.page.as_mut_bytes().copy_from_slice(page.as_bytes());
        self.at = at.0;
    }
}

impl Default for Vmcb12 {
    fn default() -> Self {
        Self::new()
    }
}

const _: () = {
    assert!(size_of::<Vmcb>() as u64 == PAGE_SIZE);
    assert!(CONTROL_BYTES <= SAVE_AT && SAVE_AT + SAVE_BYTES <= size_of::<Vmcb>());
};
