//! From L2 to L1: what a VMEXIT writes into VMCB12, and what L1 goes on with (APM vol. 2 §15.6).
//!
//! What changes is written into L1's memory straight from block 02, piece by piece: a block is a page, of which an
//! exit changes a twelfth.

use core::{mem::offset_of, sync::atomic::Ordering};

use x86::{
    Cr0, Direction, Gpa,
    vmcb::{
        Control, ExitCode, NP_ENABLE, SEG_ES, SEG_GDTR, SEG_IDTR, Save, Vmcb, VmcbSegment, event,
        vintr,
    },
};
use zerocopy::{IntoBytes, transmute};

use crate::{L1Memory, Offered, Outside, Words, merge, reflect::Exit, vmcb12::Vmcb12};

/// What of `int_ctl` the processor changes while L2 runs on block 02 with this one: V_TPR, V_IRQ, and V_GIF and the
/// virtual NMI if those are L2's, by `v12`.
pub(crate) const fn live(int_ctl: u32, v12: &Control) -> u32 {
    // V_IRQ goes when L2 has taken the interrupt, V_TPR with each MOV to CR8 of L2's.
    const ALWAYS: u32 = vintr::TPR_MASK | vintr::IRQ;
    // The usual guest has neither: one test for both.
    if int_ctl & (vintr::GIF_ENABLE | vintr::NMI_ENABLE) == 0 {
        return ALWAYS;
    }
    // By block 02, where the merge has put it: a GIF that L1 was not offered is not there.
    let gif = if int_ctl & vintr::GIF_ENABLE != 0 { vintr::GIF } else { 0 };
    let nmi = if merge::has_virtual_nmi(v12) { vintr::NMI | vintr::NMI_MASK } else { 0 };
    ALWAYS | gif | nmi
}

/// Where the save area begins.
const SAVE_AT: usize = offset_of!(Vmcb, save);

/// How an event that L0 was to inject into L2, and that the processor did not deliver any more, is told to L1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Undelivered {
    /// In the format of EXITINTINFO; 0: none.
    pub info: u64,
}

/// The end of L2's run.
#[derive(Clone, Copy, Debug)]
pub struct Left<'a> {
    /// Block 02, with L2's registers as they are now.
    pub from: &'a Vmcb,
    /// Bits of L2's CR0 that block 02 does not show.
    pub cr0_hidden: u64,
    /// The exit that L1 is told of.
    pub exit: &'a Exit,
    /// The event that L2 was to take first.
    pub undelivered: Undelivered,
    /// What L1 injected was taken over: the exit is none that says that the CPU refuses the entry.
    pub entered: bool,
}

/// L1's block in its memory.
struct Place<'a, M> {
    memory: &'a M,
    at: Gpa,
    /// The block's page, where it can be written in place.
    page: Option<&'a Words>,
}

impl<'a, M: L1Memory> Place<'a, M> {
    fn new(memory: &'a M, at: Gpa) -> Self {
        // Words are written in place: a block that did not begin at a page would be torn.
        // Through `memory` a page that is not there for a store yet is found again outside the loop.
        let page = if at.page_offset() == 0 { memory.page(at, Direction::Write) } else { None };
        Self { memory, at, page }
    }

    /// Writes words at `offset`, which is a multiple of their size.
    #[inline(always)]
    fn put<const N: usize>(&self, offset: usize, words: [u64; N]) -> Result<(), Outside> {
        // Word by word: a longer copy could be seen half done by a vCPU of L1's that looks.
        let Some(page) = self.page else { return self.copy(offset, words.as_bytes()) };
        let place = page.get(offset / 8..offset / 8 + N).ok_or(Outside)?;
        for (to, word) in place.iter().zip(words) {
            // Other vCPUs of L1's may look meanwhile, as on a machine: each word is whole.
            to.store(word.to_le(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Writes a byte.
    #[inline(always)]
    fn put_byte(&self, offset: usize, byte: u8) -> Result<(), Outside> {
        let Some(page) = self.page else { return self.copy(offset, &[byte]) };
        let to = page.get(offset / 8).ok_or(Outside)?;
        // Its neighbours are reserved, so that nobody writes there meanwhile.
        let mut bytes = to.load(Ordering::Relaxed).to_ne_bytes();
        if let Some(place) = bytes.get_mut(offset % 8) {
            *place = byte;
        }
        to.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        Ok(())
    }

    #[inline(never)]
    fn copy(&self, offset: usize, bytes: &[u8]) -> Result<(), Outside> {
        self.memory.write(Gpa(self.at.0 + offset as u64), bytes)
    }
}

/// Writes into L1's block what a VMEXIT changes. `v12`: the copy from which L2 was entered.
///
/// # Errors
/// L1's block is not memory any more: its slot went while L2 ran. L1 cannot go on. Any part may have been written.
pub fn write(
    memory: &impl L1Memory,
    v12: &Vmcb12,
    left: &Left<'_>,
    offered: &Offered,
) -> Result<(), Outside> {
    // Controls first: they have the exit code, by which L1 sees that there is something to read.
    let place = Place::new(memory, v12.at());
    controls(&place, v12.control(), left, offered)?;
    // Registers next, each of which VMRUN has loaded: what it does not load is no part of an exit either.
    registers(&place, left)?;
    let save = &left.from.save;
    // Else the PAT is L1's own, which no exit saves. One that L2 has not changed stays as L1 has it: behind a restore the copy
    // has what the VMM set, and stock KVM knows no PAT of L2's.
    if v12.control().np_ctl & NP_ENABLE != 0 && save.g_pat != v12.get().save.g_pat {
        place.put(SAVE_AT + offset_of!(Save, g_pat), [save.g_pat])?;
    }
    // Records that are L2's own go back where L1 put them; else they are in block 01.
    if merge::has_branch_records(v12.control(), offered) {
        let records =
            [save.dbgctl, save.br_from, save.br_to, save.last_excp_from, save.last_excp_to];
        place.put(SAVE_AT + offset_of!(Save, dbgctl), records)?;
    }
    Ok(())
}

/// The control area. The virtual interrupt: what L2 has changed of it, the rest as L1 set it.
fn controls(
    place: &Place<'_, impl L1Memory>,
    v12: &Control,
    left: &Left<'_>,
    offered: &Offered,
) -> Result<(), Outside> {
    let (from, exit) = (&left.from.control, left.exit);
    // What L1 set and the processor never changes is as L1 set it.
    // Of block 02: its bits say what the CPU was allowed to change.
    let live = live(from.int_ctl, v12);
    let int_ctl = (v12.int_ctl & !live) | (from.int_ctl & live);
    let told = [
        u64::from(int_ctl) | u64::from(v12.int_vector) << 32,
        // One run of six words, in the order of the block: the assertions at the end of this file hold it together.
        from.int_state,
        // int_vector is as L1 set it: the CPU changes V_IRQ alone when the interrupt is taken.
        exit.code.0,
        exit.info_1,
        exit.info_2,
        left.undelivered.info,
    ];
    place.put(offset_of!(Control, int_ctl), told)?;
    // Its valid bit goes when the event was taken over (APM vol. 2 §15.20).
    // With VMEXIT_INVALID the CPU has not looked at EVENTINJ: L1 may enter with it again. Whatever the copy says of it: that of a
    // state that was saved behind the entry has the bit clear, and L1's memory has it set still.
    if left.entered {
        let event_inj = v12.event_inj & !event::VALID;
        place.put(offset_of!(Control, event_inj), [event_inj])?;
    }
    if offered.nrip_save {
        // For other exits a CPU writes 0, and L1 may decode by that.
        // L1 that was not told of NRIP reads nothing there, and may have a value of its own in the place.
        let next_rip = if exit.tells_next_rip() { from.next_rip } else { 0 };
        place.put(offset_of!(Control, next_rip), [next_rip])?;
    }
    if offered.decode_assists {
        // Zeros where the exit tells no bytes: the ones of an exit before would be decoded for this one.
        let mut fetched = [0; 16];
        if exit.tells_bytes() {
            let [len, bytes @ ..] = &mut fetched;
            (*len, *bytes) = (from.insn_len, from.insn_bytes);
        }
        place.put::<2>(offset_of!(Control, insn_len), transmute!(fetched))?;
    }
    Ok(())
}

/// The save area: what a VMEXIT saves (APM vol. 2 §15.6).
fn registers(place: &Place<'_, impl L1Memory>, left: &Left<'_>) -> Result<(), Outside> {
    let save = &left.from.save;
    let segment =
        |index: usize| SAVE_AT + offset_of!(Save, segments) + index * size_of::<VmcbSegment>();
    // FS, GS, TR and LDTR are VMSAVE's to save, not an exit's.
    let [es, cs, ss, ds, _, _, gdtr, _, idtr, _] = save.segments;
    place.put::<8>(segment(SEG_ES), transmute!([es, cs, ss, ds]))?;
    place.put::<2>(segment(SEG_GDTR), transmute!(gdtr))?;
    place.put::<2>(segment(SEG_IDTR), transmute!(idtr))?;
    // CPL has a byte of its own in a word that is reserved otherwise.
    place.put_byte(SAVE_AT + offset_of!(Save, cpl), save.cpl)?;
    place.put(SAVE_AT + offset_of!(Save, efer), [save.efer])?;
    // CD and NW are L2's to see, and not in block 02: memory types of the machine do not follow them.
    let cr0 = save.cr0 | left.cr0_hidden;
    let block = [save.cr4, save.cr3, cr0, save.dr7, save.dr6, save.rflags, save.rip];
    // Seven words that lie side by side, in the block's order.
    place.put(SAVE_AT + offset_of!(Save, cr4), block)?;
    place.put(SAVE_AT + offset_of!(Save, rsp), [save.rsp])?;
    place.put(SAVE_AT + offset_of!(Save, rax), [save.rax])?;
    // CR2 last: L2's, as the exit has found it. It stays in the register, too.
    place.put(SAVE_AT + offset_of!(Save, cr2), [save.cr2])
}

/// Writes into L1's block at `at` that it was not run: VMEXIT_INVALID, and nothing else.
///
/// # Errors
/// It is not memory that may be written.
pub fn write_refused(memory: &impl L1Memory, at: Gpa) -> Result<(), Outside> {
    // Three words of information are zero with it: there was no exit that they could be of.
    let told = [ExitCode::Invalid.0, 0, 0, 0];
    // Rare, and the page may be read-only for the dirty log: by copies, which find that out.
    Place { memory, at, page: None }.put(offset_of!(Control, exit_code), told)
}

/// What L1 goes on with after a VMEXIT, in block 01, where its registers stood since VMRUN. GIF is clear then
/// ([`crate::gif::Gif::clear`]).
pub fn to_l1(block: &mut Vmcb) {
    // "Clears V_IRQ and V_INTR_MASKING ... DR7 disabled, CR0.PE set, CPL 0" (APM vol. 2 §15.6). V_INTR_MASKING of
    // block 01 is L0's.
    // The offer to L1 is made again by whoever enters it: L0's V_IRQ is no state of L1's.
    block.control.int_ctl &= !vintr::IRQ;
    block.control.int_state = 0;
    block.control.event_inj = 0;
    block.control.exit_int_info = 0;
    // Behind an exit L1 is in protected mode, at CPL 0, and no breakpoint of L2's is set.
    block.save.cr0 |= Cr0::PE.bits();
    block.save.dr7 = 0x400;
    block.save.cpl = 0;
}

const _: () = {
    assert!(SEG_ES == 0 && SEG_GDTR == 6 && SEG_IDTR == 8);
    assert!(offset_of!(Control, insn_bytes) == offset_of!(Control, insn_len) + 1);
    assert!(offset_of!(Control, int_vector) == offset_of!(Control, int_ctl) + 4);
    assert!(offset_of!(Control, exit_int_info) == offset_of!(Control, int_ctl) + 40);
    assert!(offset_of!(Control, exit_int_info) == offset_of!(Control, exit_code) + 24);
    assert!(offset_of!(Save, rip) == offset_of!(Save, cr4) + 6 * 8);
    assert!(offset_of!(Save, last_excp_to) == offset_of!(Save, dbgctl) + 4 * 8);
};

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use core::cell::RefCell;
    use x86::vmcb::{Clean, INT_SHADOW};
    use zerocopy::FromZeros;

    const OFFERED: Offered = Offered {
        physical_bits: 48,
        flush_by_asid: false,
        npt: true,
        nrip_save: true,
        decode_assists: true,
        pause_filter: false,
        pause_threshold: false,
        vgif: false,
        virtual_vmload: false,
        wide_sysenter: false,
        lbr: false,
        vnmi: false,
        cr4: u64::MAX,
        efer: u64::MAX,
    };
    const AT: Gpa = Gpa(0x7000);

    /// L1's memory: one block.
    struct Block(RefCell<Vmcb>);

    impl L1Memory for Block {
        fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
            let from = at.0.checked_sub(AT.0).ok_or(Outside)? as usize;
            let block = self.0.borrow();
            into.copy_from_slice(block.as_bytes().get(from..from + into.len()).ok_or(Outside)?);
            Ok(())
        }
        fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
            let to = at.0.checked_sub(AT.0).ok_or(Outside)? as usize;
            let mut block = self.0.borrow_mut();
            let to = block.as_mut_bytes().get_mut(to..to + from.len()).ok_or(Outside)?;
            to.copy_from_slice(from);
            Ok(())
        }
    }

    fn left(v12: Vmcb, from: &Vmcb, exit: &Exit) -> Vmcb {
        let memory = Block(RefCell::new(v12));
        let mut copy = Vmcb12::new();
        assert_eq!(copy.load(&memory, AT), Ok(Clean::ALL));
        let undelivered = Undelivered::default();
        let left = Left { from, cr0_hidden: 0, exit, undelivered, entered: true };
        assert_eq!(write(&memory, &copy, &left, &OFFERED), Ok(()));
        memory.0.into_inner()
    }

    #[test]
    fn l1_finds_its_own_controls_and_l2s_registers() {
        let (mut v12, mut b02) = (Vmcb::new_zeroed(), Vmcb::new_zeroed());
        v12.control.int_ctl = vintr::INTR_MASKING | (3 << vintr::PRIO_SHIFT) | vintr::IRQ | 5;
        v12.control.int_vector = 0x40;
        v12.control.event_inj = event::VALID | event::EXCEPTION | 13;
        v12.save.star = 7;
        b02.control.int_ctl = vintr::INTR_MASKING | 7;
        b02.control.int_state = INT_SHADOW;
        b02.save.rip = 0x1234;
        b02.save.cpl = 3;
        b02.save.segments[SEG_IDTR].base = 0x55;
        b02.control.next_rip = 0x1236;
        b02.control.insn_len = 2;
        let exit = Exit { code: ExitCode::Cpuid, info_1: 1, info_2: 2 };
        let to = left(v12, &b02, &exit);
        assert_eq!(to.control.int_ctl, vintr::INTR_MASKING | (3 << vintr::PRIO_SHIFT) | 7);
        assert_eq!((to.control.int_vector, to.control.int_state), (0x40, INT_SHADOW));
        assert_eq!(to.control.event_inj, event::EXCEPTION | 13);
        assert_eq!((to.save.rip, to.control.next_rip), (0x1234, 0x1236));
        assert_eq!((to.save.cpl, to.save.segments[SEG_IDTR].base, to.save.star), (3, 0x55, 7));
        assert_eq!(to.control.insn_len, 0, "CPUID tells no bytes");
        let told = (to.control.exit_code, to.control.exit_info_1, to.control.exit_info_2);
        assert_eq!(told, (ExitCode::Cpuid.0, 1, 2));
    }

    #[test]
    fn a_refused_block_keeps_what_was_to_be_injected() {
        let mut v12 = Vmcb::new_zeroed();
        v12.control.event_inj = event::VALID | event::NMI;
        v12.save.rip = 5;
        let memory = Block(RefCell::new(v12));
        assert_eq!(write_refused(&memory, AT), Ok(()));
        let to = memory.0.into_inner();
        assert_eq!(to.control.exit_code, ExitCode::Invalid.0);
        assert_eq!((to.control.event_inj, to.save.rip), (event::VALID | event::NMI, 5));
    }

    #[test]
    fn l1_goes_on_without_breakpoints_and_at_level_0() {
        let mut b01 = Vmcb::new_zeroed();
        b01.control.int_ctl = vintr::INTR_MASKING | vintr::IRQ;
        b01.save.cpl = 3;
        b01.save.dr7 = 0x455;
        to_l1(&mut b01);
        assert_eq!(b01.control.int_ctl, vintr::INTR_MASKING);
        assert_eq!((b01.save.cpl, b01.save.dr7, b01.save.cr0), (0, 0x400, 1));
    }
}
