//! L1's control block, as a private copy.

use core::{mem::offset_of, sync::atomic::Ordering};

use x86::{
    Direction, Gpa,
    addr::PAGE_SIZE,
    vmcb::{
        Clean, Control, NP_ENABLE, SEG_DS, SEG_ES, SEG_GDTR, SEG_IDTR, Save, VIRTUAL_LBR, Vmcb,
        VmcbSegment,
    },
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{L1Memory, Outside, Words};

/// Where the save area begins.
const SAVE_AT: usize = offset_of!(Vmcb, save);

/// A piece of a block: its first byte, and the one behind it.
type Piece = (usize, usize);

/// What of the control area means something to L0: not what a VMEXIT writes, and not what is not offered.
const CONTROL: [Piece; 4] = [
    (offset_of!(Control, intercepts), offset_of!(Control, intercepts) + 24),
    (offset_of!(Control, pause_filter_thresh) - 4, offset_of!(Control, exit_code)),
    (offset_of!(Control, np_ctl), offset_of!(Control, np_ctl) + 8),
    (offset_of!(Control, event_inj), offset_of!(Control, insn_len)),
];
/// What VMRUN loads whatever is clean: RFLAGS and RIP, with the control and debug registers before them; RSP; RAX.
const ALWAYS: [Piece; 3] = [
    (SAVE_AT + offset_of!(Save, cr4), SAVE_AT + offset_of!(Save, rip) + 8),
    (SAVE_AT + offset_of!(Save, rsp), SAVE_AT + offset_of!(Save, rsp) + 8),
    (SAVE_AT + offset_of!(Save, rax), SAVE_AT + offset_of!(Save, rax) + 8),
];
/// ES to DS, and CPL.
const SEGMENTS: [Piece; 2] = [
    (SAVE_AT, SAVE_AT + 4 * SEGMENT),
    (SAVE_AT + offset_of!(Save, cpl) - 3, SAVE_AT + offset_of!(Save, cpl) + 5),
];
/// GDTR and IDTR.
const TABLES: [Piece; 2] = [
    (SAVE_AT + SEG_GDTR * SEGMENT, SAVE_AT + (SEG_GDTR + 1) * SEGMENT),
    (SAVE_AT + SEG_IDTR * SEGMENT, SAVE_AT + (SEG_IDTR + 1) * SEGMENT),
];
const EFER: [Piece; 1] = [(SAVE_AT + offset_of!(Save, efer), SAVE_AT + offset_of!(Save, efer) + 8)];
const CR2: [Piece; 1] = [(SAVE_AT + offset_of!(Save, cr2), SAVE_AT + offset_of!(Save, cr2) + 8)];
/// PAT, which is L2's own with nested paging alone, and the branch records.
const RARE: [Piece; 1] =
    [(SAVE_AT + offset_of!(Save, g_pat), SAVE_AT + offset_of!(Save, last_excp_to) + 8)];
/// What makes those L2's own: nested paging, and records of its own.
const OWN_RARE: u64 = NP_ENABLE | VIRTUAL_LBR;
/// Bytes of a segment.
const SEGMENT: usize = size_of::<VmcbSegment>();

/// L1's control block: where it lies, and the copy that was made of it.
#[derive(Debug, FromZeros)]
pub struct Vmcb12 {
    at: u64,
    page: Vmcb,
}

impl Vmcb12 {
    /// Room for a VMCB12 of which nothing was read yet.
    pub fn new() -> Self {
        // An address at which no block can lie: the first load takes all.
        Self { at: u64::MAX, page: Vmcb::new_zeroed() }
    }

    /// Where the block lies in L1's memory.
    #[inline]
    pub const fn at(&self) -> Gpa {
        Gpa(self.at)
    }

    /// The private copy of L1's VMCB.
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
        // Clean bits say what has not changed since this very block was run.
        let same = self.at == at.0;
        // A load that ends half way leaves a copy that is of no block.
        self.at = u64::MAX;
        let from = Source { memory, at, page: memory.page(at, Direction::Read) };
        // Controls first: the clean bits are among them.
        from.read(&mut self.page, CONTROL)?;
        let clean =
            if same { Clean::from_bits_truncate(self.page.control.clean) } else { Clean::empty() };
        // What L1 says of a block that was not the last one means nothing here.
        let dirty = Clean::ALL - clean;
        // Read whatever L1 calls clean: L1 changes RIP and its like at each exit, and the words lie together.
        from.read(&mut self.page, ALWAYS)?;
        // EFER is checked against the code segment.
        if dirty.intersects(Clean::CR | Clean::SEG) {
            from.read(&mut self.page, SEGMENTS)?;
            from.read(&mut self.page, EFER)?;
        }
        if dirty.contains(Clean::DT) {
            from.read(&mut self.page, TABLES)?;
        }
        if dirty.contains(Clean::CR2) {
            from.read(&mut self.page, CR2)?;
        }
        // Branch records go where L1's lie while L2 has none of its own: what is clean may not be in block 02.
        let control = &self.page.control;
        if dirty.contains(Clean::LBR) || (control.np_ctl | control.virt_ext) & OWN_RARE != 0 {
            from.read(&mut self.page, RARE)?;
        }
        // Last: the copy is whole.
        self.at = at.0;
        Ok(dirty)
    }

    /// The block is not the one that block 02 was made from any more: the next load takes all anew.
    pub fn forget(&mut self) {
        // For a run that did not come about: what L1 calls clean was never put into block 02.
        self.at = u64::MAX;
    }

    /// Puts the copy's place and contents together from saved state and from L2's registers.
    pub(crate) fn restore(&mut self, at: Gpa, page: &Vmcb, registers: &Save) {
        // The controls are the saved block's, the registers the vCPU's: the page's own save area is L1's.
        self.page.as_mut_bytes().copy_from_slice(page.as_bytes());
        self.page.save.as_mut_bytes().copy_from_slice(registers.as_bytes());
        self.at = at.0;
    }

    /// L2's registers in the copy.
    pub fn registers(&mut self) -> &mut Save {
        &mut self.page.save
    }
}

/// A block in L1's memory, to be copied from.
struct Source<'a, M> {
    memory: &'a M,
    at: Gpa,
    /// The block's page, where it can be read in place.
    page: Option<&'a Words>,
}

impl<M: L1Memory> Source<'_, M> {
    /// Copies pieces, each word once.
    #[inline(always)]
    fn read<const N: usize>(&self, to: &mut Vmcb, pieces: [Piece; N]) -> Result<(), Outside> {
        // Where the page cannot be had in place the copy goes through the memory slots.
        let Some(page) = self.page else { return self.copy(to, &pieces) };
        for (first, end) in pieces {
            // Pieces are constants: the bounds hold, and are asked all the same.
            let to = to.as_mut_bytes().get_mut(first..end).ok_or(Outside)?;
            let from = page.get(first / 8..end / 8).ok_or(Outside)?;
            // Each word once: what is checked is what was read, whatever L1's other vCPUs write meanwhile.
            for (to, from) in to.as_chunks_mut::<8>().0.iter_mut().zip(from) {
                *to = from.load(Ordering::Relaxed).to_ne_bytes();
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn copy(&self, to: &mut Vmcb, pieces: &[Piece]) -> Result<(), Outside> {
        for &(first, end) in pieces {
            let to = to.as_mut_bytes().get_mut(first..end).ok_or(Outside)?;
            self.memory.read(Gpa(self.at.0 + first as u64), to)?;
        }
        Ok(())
    }
}

impl Default for Vmcb12 {
    fn default() -> Self {
        Self::new()
    }
}

const _: () = {
    assert!(size_of::<Vmcb>() as u64 == PAGE_SIZE);
    assert!(NP_ENABLE == VIRTUAL_LBR, "each bit means something in both words");
    assert!(offset_of!(Save, segments) == 0 && SEG_ES == 0 && SEG_DS == 3);
    assert!(offset_of!(Control, insn_len) == offset_of!(Control, next_rip) + 8);
    assert!(offset_of!(Save, rip) == offset_of!(Save, cr4) + 6 * 8);
    let pieces =
        [CONTROL[0], CONTROL[1], CONTROL[2], CONTROL[3], ALWAYS[0], SEGMENTS[1], EFER[0], RARE[0]];
    let mut n = 0;
    while n < pieces.len() {
        assert!((pieces[n].0 | pieces[n].1) & 7 == 0 && pieces[n].0 < pieces[n].1);
        n += 1;
    }
};
