//! From L2 to L1: what a VMEXIT writes into VMCB12, and what L1 goes on with (APM vol. 2 §15.6).

use x86::{
    Cr0, Gpa,
    vmcb::{Control, ExitCode, NP_ENABLE, Vmcb, event, vintr},
};

use zerocopy::IntoBytes;

use crate::{
    L1Memory, Offered, Outside,
    reflect::Exit,
    vmcb12::{Beside, Vmcb12},
};

/// What of `int_ctl` the processor changes while L2 runs: V_TPR and V_IRQ.
const INT_CTL_LIVE: u32 = vintr::TPR_MASK | vintr::IRQ;

/// How an event that L0 was to inject into L2, and that the processor did not deliver any more, is told to L1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Undelivered {
    /// In the format of EXITINTINFO; 0: none.
    pub info: u64,
}

/// Makes the image of what L1 finds in VMCB12 after `exit`. `image`: where it is made, any contents. `v12`: the copy
/// from which L2 was entered. `from`: block 02, with L2's registers as they are now.
pub fn image(
    image: &mut Vmcb,
    v12: &Vmcb,
    from: &Vmcb,
    exit: &Exit,
    undelivered: Undelivered,
    offered: &Offered,
) {
    copy(image, from);
    let to = &mut image.control;
    controls(to, &v12.control, &from.control);
    to.exit_code = exit.code.0;
    to.exit_info_1 = exit.info_1;
    to.exit_info_2 = exit.info_2;
    to.exit_int_info = undelivered.info;
    to.event_inj = if exit.code == ExitCode::Invalid {
        v12.control.event_inj
    } else {
        // Its valid bit goes when the event was taken over (APM vol. 2 §15.20).
        v12.control.event_inj & !event::VALID
    };
    if !offered.nrip_save || !exit.tells_next_rip() {
        to.next_rip = 0;
    }
    if !offered.decode_assists || !exit.tells_bytes() {
        to.insn_len = 0;
        to.insn_bytes = [0; 15];
    }
}

/// A block is a page: it is copied in its place, never by way of the stack.
fn copy(to: &mut Vmcb, from: &Vmcb) {
    to.as_mut_bytes().copy_from_slice(from.as_bytes());
}

/// The virtual interrupt: what L2 has changed of it, the rest as L1 set it.
fn controls(to: &mut Control, v12: &Control, from: &Control) {
    to.int_ctl = (v12.int_ctl & !INT_CTL_LIVE) | (from.int_ctl & INT_CTL_LIVE);
    to.int_vector = v12.int_vector;
}

/// Makes the image of a VMCB12 that was not run: its fields as L1 wrote them, and VMEXIT_INVALID.
pub fn refused(image: &mut Vmcb, v12: &Vmcb) {
    copy(image, v12);
    let to = &mut image.control;
    to.exit_code = ExitCode::Invalid.0;
    to.exit_info_1 = 0;
    to.exit_info_2 = 0;
    to.exit_int_info = 0;
}

/// Writes an image into L1's block at `at`.
///
/// # Errors
/// L1's block is not memory any more: its slot went while L2 ran. L1 cannot go on.
pub fn write(
    memory: &impl L1Memory,
    at: Gpa,
    image: &Vmcb,
    v12: &Control,
    offered: &Offered,
) -> Result<(), Outside> {
    let mut beside = Beside::empty();
    beside.set(Beside::PAT, v12.np_ctl & NP_ENABLE != 0);
    beside.set(Beside::LBR, offered.lbr && v12.virt_ext & 1 != 0);
    Vmcb12::write_back(memory, at, image, beside)
}

/// What L1 goes on with after a VMEXIT, in block 01, where its registers stood since VMRUN. GIF is clear then
/// ([`crate::gif::Gif::clear`]).
pub fn to_l1(block: &mut Vmcb) {
    // "Clears V_IRQ and V_INTR_MASKING ... DR7 disabled, CR0.PE set, CPL 0" (APM vol. 2 §15.6). V_INTR_MASKING of
    // block 01 is L0's.
    block.control.int_ctl &= !vintr::IRQ;
    block.control.int_state = 0;
    block.control.event_inj = 0;
    block.control.exit_int_info = 0;
    block.save.cr0 |= Cr0::PE.bits();
    block.save.dr7 = 0x400;
    block.save.cpl = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::vmcb::INT_SHADOW;
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
        lbr: false,
        cr4: u64::MAX,
        efer: u64::MAX,
    };

    fn blocks() -> (Vmcb, Vmcb, Vmcb) {
        (Vmcb::new_zeroed(), Vmcb::new_zeroed(), Vmcb::new_zeroed())
    }

    #[test]
    fn l1_finds_its_own_controls_and_l2s_registers() {
        let (mut to, mut v12, mut b02) = blocks();
        v12.control.int_ctl = vintr::INTR_MASKING | (3 << vintr::PRIO_SHIFT) | vintr::IRQ | 5;
        v12.control.int_vector = 0x40;
        v12.control.event_inj = event::VALID | event::EXCEPTION | 13;
        b02.control.int_ctl = vintr::INTR_MASKING | 7;
        b02.control.int_state = INT_SHADOW;
        b02.save.rip = 0x1234;
        b02.control.next_rip = 0x1236;
        b02.control.insn_len = 2;
        let exit = Exit { code: ExitCode::Cpuid, info_1: 1, info_2: 2 };
        image(&mut to, &v12, &b02, &exit, Undelivered::default(), &OFFERED);
        assert_eq!(to.control.int_ctl, vintr::INTR_MASKING | (3 << vintr::PRIO_SHIFT) | 7);
        assert_eq!((to.control.int_vector, to.control.int_state), (0x40, INT_SHADOW));
        assert_eq!(to.control.event_inj, event::EXCEPTION | 13);
        assert_eq!((to.save.rip, to.control.next_rip), (0x1234, 0x1236));
        assert_eq!(to.control.insn_len, 0, "CPUID tells no bytes");
        let told = (to.control.exit_code, to.control.exit_info_1, to.control.exit_info_2);
        assert_eq!(told, (ExitCode::Cpuid.0, 1, 2));
    }

    #[test]
    fn a_refused_block_keeps_what_was_to_be_injected() {
        let (mut to, mut v12, _) = blocks();
        v12.control.event_inj = event::VALID | event::NMI;
        v12.save.rip = 5;
        refused(&mut to, &v12);
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
