//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE with the format of SVM (KVM API §4.114).
//!
//! The header tells where VMCB12 lies. The data, a page, is laid out as a VMCB: its control area is that of VMCB12,
//! its save area is L1's as of VMRUN. L2's registers are the vCPU's own, and travel by KVM_GET_SREGS and the like.

use core::mem::size_of;

use x86::{
    Cr0, Dr6, Gpa, Rflags,
    addr::PAGE_SIZE,
    vmcb::{Clean, Control, NP_ENABLE, Save, Vmcb, event, vintr},
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{Level, Offered, checks, gif::Gif, leave::live, vmcb12::Vmcb12};

/// Format number of SVM.
pub const FORMAT: u16 = 1;
/// Bytes of the header.
pub const HEADER: usize = 128;
/// Bytes of the largest state.
pub const LARGEST: usize = HEADER + PAGE_SIZE as usize;

/// `KVM_STATE_NESTED_GUEST_MODE`: L2 runs.
pub const GUEST_MODE: u16 = 1 << 0;
/// `KVM_STATE_NESTED_RUN_PENDING`: VMRUN was carried out, and L2 has not been entered yet.
pub const RUN_PENDING: u16 = 1 << 1;
/// `KVM_STATE_NESTED_GIF_SET`: GIF is set.
pub const GIF_SET: u16 = 1 << 8;
/// Flags that this format knows.
pub const FLAGS: u16 = GUEST_MODE | RUN_PENDING | GIF_SET;

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The flags.
    pub flags: u16,
    /// Where VMCB12 lies; 0 while L1 runs.
    pub vmcb: u64,
}

/// `struct kvm_nested_state` without its data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    flags: u16,
    format: u16,
    size: u32,
    vmcb: u64,
    reserved: [u64; 14],
}

const _: () = assert!(size_of::<Head>() == HEADER);

impl Header {
    /// Reads the header, and how many bytes the state has by it.
    ///
    /// # Errors
    /// It is not whole, or of another format.
    pub fn read(bytes: &[u8]) -> Result<(Self, usize), Refused> {
        let (head, _) = Head::read_from_prefix(bytes).map_err(|_| Refused::Data)?;
        // VMX's is 0.
        // Formats are numbered for both vendors: a state of the other one is refused before its fields are read.
        if head.format != FORMAT {
            return Err(Refused::Flags);
        }
        Ok((Self { flags: head.flags, vmcb: head.vmcb }, head.size as usize))
    }

    /// Bytes of the state.
    pub const fn size(&self) -> usize {
        // L1 alone needs no page: its registers are the vCPU's.
        if self.flags & GUEST_MODE != 0 { LARGEST } else { HEADER }
    }

    /// Writes the header to the beginning of `into`; false if it has no room there.
    pub fn write(&self, into: &mut [u8]) -> bool {
        let size = self.size() as u32;
        let (flags, vmcb) = (self.flags, self.vmcb);
        // What is reserved is zero, as user space expects it.
        let head = Head { flags, format: FORMAT, size, vmcb, reserved: [0; 14] };
        head.write_to_prefix(into).is_ok()
    }
}

/// What there is to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Which level runs.
    pub level: Level,
    /// GIF.
    pub gif: Gif,
    /// VMRUN was carried out, and L2 has not been entered yet.
    pub entry_pending: bool,
}

/// The header of a vCPU that does this with `v12`.
pub fn header(running: Running, v12: &Vmcb12) -> Header {
    let mut flags = if running.gif.is_set() { GIF_SET } else { 0 };
    // With L1 running no field but GIF means anything.
    if running.level == Level::L1 {
        return Header { flags, vmcb: 0 };
    }
    flags |= GUEST_MODE;
    if running.entry_pending {
        flags |= RUN_PENDING;
    }
    Header { flags, vmcb: v12.at().0 }
}

/// Makes the page of data: `to` has any contents. `b01`: block 01, which shows L1 CR0 with `hidden` as well; `b02`:
/// the control area of block 02. `virq`: V_IRQ of L2, if that of block 02 stands for something else.
pub fn data(
    to: &mut Vmcb,
    v12: &Vmcb12,
    (b01, hidden): (&Vmcb, u64),
    b02: &Control,
    virq: Option<bool>,
) {
    let control = &mut to.control;
    // The copy, not L1's memory: L2 runs by what was checked.
    control.as_mut_bytes().copy_from_slice(v12.control().as_bytes());
    // What the processor has changed since VMRUN: it is not to happen again.
    let changed = live(b02.int_ctl, v12.control());
    control.int_ctl = (control.int_ctl & !changed) | (b02.int_ctl & changed);
    if let Some(on) = virq {
        control.int_ctl = (control.int_ctl & !vintr::IRQ) | if on { vintr::IRQ } else { 0 };
    }
    // Of block 02: what was injected already must not be injected again.
    // Of what is still to be injected the valid bit says so.
    control.event_inj = b02.event_inj;
    control.int_state = b02.int_state;
    // Where the last exit's instruction ends. What is still to be injected comes with VMRUN's own.
    if control.event_inj & event::VALID == 0 {
        control.next_rip = b02.next_rip;
    }
    // A restored L2 is flushed anyway.
    control.tlb_ctl = 0;
    // Block 01 has L1's registers as VMRUN found them: an exit brings them back from there.
    to.save.as_mut_bytes().copy_from_slice(b01.save.as_bytes());
    // CD and NW of L1 are not in its block.
    to.save.cr0 |= hidden;
}

/// Why saved state is refused: EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A flag that does not exist.
    Flags,
    /// L2 runs on a vCPU without SVM.
    Disabled,
    /// L2 runs in system-management mode, which suspends it.
    Smm,
    /// VMCB12 lies at no page.
    Address,
    /// There is no page of data.
    Data,
    /// VMCB12 could not have been run.
    Controls,
    /// L1's registers could not have executed VMRUN.
    Host,
}

/// What the vCPU is that the state is set on.
#[derive(Clone, Copy, Debug)]
pub struct Onto {
    /// EFER.SVME of the vCPU as set before.
    pub enabled: bool,
    /// It is in system-management mode.
    pub smm: bool,
}

/// Checks saved state as a whole; nothing has been changed then.
///
/// # Errors
/// Why it is refused.
pub fn check(
    header: Header,
    data: Option<&Vmcb>,
    onto: Onto,
    offered: &Offered,
) -> Result<Running, Refused> {
    // The same flags as stock KVM's, unknown ones are EINVAL.
    if header.flags & !FLAGS != 0 {
        return Err(Refused::Flags);
    }
    let gif = Gif::new(header.flags & GIF_SET != 0);
    let in_l2 = header.flags & GUEST_MODE != 0;
    // L2 runs with SVM alone. GIF may be clear without it: L1 can take SVM away behind CLGI.
    if !onto.enabled && in_l2 {
        return Err(Refused::Disabled);
    }
    // SMM puts L2 aside: it is RSM that enters it again.
    if in_l2 && onto.smm {
        return Err(Refused::Smm);
    }
    if !in_l2 {
        return Ok(Running { level: Level::L1, gif, entry_pending: false });
    }
    // Like VMRUN's operand: L1 named the address, and an exit will write there.
    if header.vmcb & (PAGE_SIZE - 1) != 0 || !offered.is_address(header.vmcb) {
        return Err(Refused::Address);
    }
    let data = data.ok_or(Refused::Data)?;
    // The controls are checked as VMRUN checks them, by what L1 is offered here: another host may offer less.
    checks::controls(&data.control, None, offered).map_err(|_| Refused::Controls)?;
    // L1's part of the page: registers that no CPU could have had would be run when L2 exits.
    if !checks::is_host(&data.save) {
        return Err(Refused::Host);
    }
    // As if all had changed: the VMM gives any bytes.
    checks::save(&data.save, offered, Clean::ALL).map_err(|_| Refused::Host)?;
    let entry_pending = header.flags & RUN_PENDING != 0;
    Ok(Running { level: Level::L2, gif, entry_pending })
}

/// Takes over state that [`check`] let pass while L1 runs: the copy of VMCB12, and L1's registers in block 01. The
/// registers that were set before were L2's: they are what VMRUN of that copy would load. `hidden`: bits of CR0
/// beside those in block 01.
pub fn take_over(header: Header, data: &Vmcb, v12: &mut Vmcb12, b01: &mut Vmcb, hidden: Cr0) {
    // The vCPU's registers are L2's already: the copy takes them, so that a run that is pending loads the same.
    v12.restore(Gpa(header.vmcb), data, &b01.save);
    v12.registers().cr0 |= hidden.bits();
    // With nested paging of L1's the PAT that was set before is L2's own.
    // Else the vCPU's PAT is L1's, and stays.
    if data.control.np_ctl & NP_ENABLE != 0 && checks::pat(data.save.g_pat).is_ok() {
        b01.save.g_pat = data.save.g_pat;
    }
    take_host(&data.save, b01);
}

/// Takes over L1's registers into its block.
pub fn take_host(from: &Save, b01: &mut Vmcb) {
    // Only what VMRUN saves: FS, GS, TR, LDTR and the SYSCALL MSRs are shared by both levels.
    let to = &mut b01.save;
    // What VMRUN saves of its host (APM vol. 2 §15.5.1); the rest of block 01 is L1's as it is.
    use x86::vmcb::{SEG_CS, SEG_DS, SEG_ES, SEG_GDTR, SEG_IDTR, SEG_SS};
    for at in [SEG_ES, SEG_CS, SEG_SS, SEG_DS, SEG_GDTR, SEG_IDTR] {
        if let (Some(to), Some(from)) = (to.segments.get_mut(at), from.segments.get(at)) {
            *to = *from;
        }
    }
    to.rflags = from.rflags | Rflags::FIXED.bits();
    (to.efer, to.cr0, to.cr3, to.cr4) = (from.efer, from.cr0, from.cr3, from.cr4);
    (to.rax, to.rsp, to.rip) = (from.rax, from.rsp, from.rip);
    // What was set before is L2's.
    (to.cr2, to.dr6) = (from.cr2, Dr6::new(from.dr6).bits());
    // VMRUN is executed at CPL 0.
    to.cpl = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::{
        Cr0, Cr4, Efer,
        vmcb::{Intercept4, SEG_CS},
    };
    use zerocopy::FromZeros;

    const OFFERED: Offered = Offered {
        physical_bits: 48,
        flush_by_asid: false,
        npt: true,
        nrip_save: true,
        decode_assists: false,
        pause_filter: false,
        pause_threshold: false,
        vgif: false,
        virtual_vmload: false,
        wide_sysenter: false,
        lbr: false,
        vnmi: false,
        cr4: 0xff,
        efer: 0xd01 | (1 << 12),
    };
    const ENABLED: Onto = Onto { enabled: true, smm: false };
    const IN_L2: Header = Header { flags: GUEST_MODE | GIF_SET, vmcb: 0x7000 };

    fn data() -> Vmcb {
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts[4] = Intercept4::VMRUN.bits();
        block.control.asid = 1;
        block.save.cr0 = (Cr0::PE | Cr0::PG).bits();
        block.save.cr4 = Cr4::PAE.bits();
        block.save.efer = (Efer::SVME | Efer::LME | Efer::LMA).bits();
        block.save.rip = 0x1234;
        block
    }

    #[test]
    fn what_was_saved_is_what_is_taken_over() {
        let mut page = data();
        assert_eq!(
            check(IN_L2, Some(&page), ENABLED, &OFFERED),
            Ok(Running { level: Level::L2, gif: Gif::new(true), entry_pending: false })
        );
        let (mut v12, mut b01) = (Vmcb12::new(), Vmcb::new_zeroed());
        b01.save.rip = 0x9000;
        page.save.segments[SEG_CS].selector = 0x10;
        page.control.int_ctl = vintr::IRQ | vintr::INTR_MASKING;
        (page.save.cr2, page.save.dr6) = (0xc0de, 0xffff_0ff1);
        (b01.save.cr2, b01.save.dr6) = (0x2222, 0xffff_0ff2);
        take_over(IN_L2, &page, &mut v12, &mut b01, Cr0::CD);
        assert_eq!((v12.get().save.cr2, v12.get().save.dr6), (0x2222, 0xffff_0ff2));
        assert_eq!((b01.save.cr2, b01.save.dr6), (0xc0de, 0xffff_0ff1), "L1's own");
        assert_eq!(v12.get().save.rip, 0x9000, "what was set before was L2's");
        assert_eq!(v12.get().save.cr0, Cr0::CD.bits());
        assert_eq!((v12.at(), b01.save.rip), (Gpa(0x7000), 0x1234));
        let mut again = Vmcb::new_zeroed();
        super::data(&mut again, &v12, (&b01, 0), v12.control(), None);
        assert_eq!(again.control.as_bytes(), page.control.as_bytes());
        assert_eq!(again.save.segments, page.save.segments);
        let running = Running { level: Level::L2, gif: Gif::new(true), entry_pending: false };
        assert_eq!(header(running, &v12), IN_L2);
    }

    #[test]
    fn what_the_processor_has_done_since_vmrun_is_not_saved_to_be_done_again() {
        let mut page = data();
        page.control.event_inj = 0x8000_0306;
        page.control.int_ctl = vintr::IRQ;
        let (mut v12, mut b01) = (Vmcb12::new(), Vmcb::new_zeroed());
        take_over(IN_L2, &page, &mut v12, &mut b01, Cr0::empty());
        let mut b02 = Control::new_zeroed();
        b02.next_rip = 0x1236;
        let mut saved = Vmcb::new_zeroed();
        super::data(&mut saved, &v12, (&b01, Cr0::NW.bits()), &b02, None);
        assert_eq!((saved.control.event_inj, saved.control.int_ctl), (0, 0));
        assert_eq!(saved.control.next_rip, 0x1236, "of the last exit");
        assert_eq!(saved.save.cr0, page.save.cr0 | Cr0::NW.bits());
        super::data(&mut saved, &v12, (&b01, 0), &b02, Some(true));
        assert_eq!(saved.control.int_ctl, vintr::IRQ, "a window of L0's hides it");
        // Not injected yet: VMRUN's own says where the instruction ends that INT n is.
        (b02.event_inj, page.control.next_rip) = (page.control.event_inj, 0x1238);
        take_over(IN_L2, &page, &mut v12, &mut b01, Cr0::empty());
        super::data(&mut saved, &v12, (&b01, 0), &b02, None);
        assert_eq!(saved.control.next_rip, 0x1238);
    }

    #[test]
    fn a_header_is_bytes() {
        let mut bytes = [0; HEADER];
        assert!(IN_L2.write(&mut bytes) && !IN_L2.write(&mut [0; 100]));
        assert_eq!(bytes[..12], [1, 1, 1, 0, 0x80, 0x10, 0, 0, 0, 0x70, 0, 0]);
        assert_eq!(Header::read(&bytes), Ok((IN_L2, LARGEST)));
        bytes[2] = 0;
        assert_eq!(Header::read(&bytes), Err(Refused::Flags));
        assert_eq!(Header::read(&bytes[1..]), Err(Refused::Data));
        assert_eq!(Header { flags: GIF_SET, vmcb: 0 }.size(), HEADER);
    }

    #[test]
    fn each_inconsistency_is_refused() {
        let page = data();
        let off = Onto { enabled: false, smm: false };
        let smm = Onto { enabled: true, smm: true };
        let with = |flags, vmcb| Header { flags, vmcb };
        let host = {
            let mut page = data();
            page.save.cr0 = Cr0::PE.bits();
            page
        };
        let controls = {
            let mut page = data();
            page.control.asid = 0;
            page
        };
        let cases = [
            (with(1 << 2, 0), Some(&page), ENABLED, Refused::Flags),
            (IN_L2, Some(&page), off, Refused::Disabled),
            (IN_L2, Some(&page), smm, Refused::Smm),
            (with(GUEST_MODE, 0x7001), Some(&page), ENABLED, Refused::Address),
            (with(GUEST_MODE, !0xfff), Some(&page), ENABLED, Refused::Address),
            (IN_L2, None, ENABLED, Refused::Data),
            (IN_L2, Some(&controls), ENABLED, Refused::Controls),
            (IN_L2, Some(&host), ENABLED, Refused::Host),
        ];
        for (header, data, onto, wanted) in cases {
            assert_eq!(check(header, data, onto, &OFFERED), Err(wanted));
        }
    }

    #[test]
    fn a_vcpu_without_svm_takes_the_state_of_one_that_runs_its_guest() {
        let off = Onto { enabled: false, smm: false };
        let plain = Header { flags: GIF_SET, vmcb: u64::MAX };
        assert!(check(plain, None, off, &OFFERED).is_ok());
        // L1 may have taken SVM away behind CLGI.
        assert!(
            check(Header { flags: 0, vmcb: 0 }, None, off, &OFFERED).is_ok_and(|r| !r.gif.is_set())
        );
    }
}
