//! L2's task priority in L1's virtual-APIC page, by CR8 (the TPR shadow) and by an MSR of the x2APIC, and what of that
//! page L2 reads by others of its MSRs (SDM vol. 3C §25.6.8, §27.2.1.1, §30.3, §30.5).
//!
//! The hardware is never given that page: each such access by L2 exits, and is carried out here on L1's memory.

use x86::vmcs::{ProcControls, ProcControls2, field};
use x86::{Direction, Exception, Gpa, apic::reg};

use crate::checks::controls::Broken;
use crate::virtual_interrupts::{self, Ended};
use crate::{GuestMemory, Vmcs12};

/// An access that L1 leaves to its virtual-APIC page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// MOV from CR8 into a general register.
    Read {
        /// Its number.
        gpr: u8,
    },
    /// MOV to CR8.
    Write {
        /// What is moved.
        value: u64,
    },
    /// RDMSR of an x2APIC register.
    ReadMsr {
        /// Where the page has it.
        offset: u16,
    },
    /// WRMSR of the x2APIC's task priority, its end of interrupt or its IPI to itself.
    WriteMsr {
        /// Where the page has it.
        offset: u16,
        /// EDX and EAX.
        value: u64,
    },
}

/// What a write to the page came to, a MOV to CR8 among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// L2 goes on.
    On,
    /// L2 goes on, and nothing has been looked at: what waits for it waits on.
    Stored,
    /// The priority is below L1's threshold now: L1 sees an exit behind the instruction.
    Fell,
    /// L1 sees an exit for the write, behind the instruction.
    Written(u16),
    /// L2 goes on, and a virtual interrupt waits for it.
    Waits,
    /// L1 sees an exit for the end of that interrupt, behind the instruction.
    Ended(u8),
}

impl Moved {
    /// What follows where virtual interrupts are delivered.
    pub(crate) fn evaluated(waits: bool) -> Self {
        if waits { Self::Waits } else { Self::On }
    }

    pub(crate) fn ended(ended: Ended) -> Self {
        match ended {
            Ended::On(waits) => Self::evaluated(waits),
            Ended::Exit(vector) => Self::Ended(vector),
        }
    }
}

/// The access that an exit for CR8 with this qualification is, if L1 has a TPR shadow and does not want the exit.
pub fn access(v: &Vmcs12, qualification: u64, gprs: &[u64; 16]) -> Option<Access> {
    use x86::vmcs::cr;
    let primary = v.primary();
    // An access to another control register, or one that L1 wants to see, is not for the page.
    if qualification & cr::NUMBER != 8 || !primary.contains(ProcControls::TPR_SHADOW) {
        return None;
    }
    // The qualification has four bits for the register.
    let gpr = (qualification >> cr::GPR_SHIFT) as u8 & 15;
    // LMSW and CLTS have no CR8: anything but the two moves is L1's, or L0's.
    match qualification & cr::ACCESS {
        cr::MOV_TO if !primary.contains(ProcControls::CR8_LOAD) => {
            Some(Access::Write { value: gprs[usize::from(gpr & 15)] })
        }
        cr::MOV_FROM if !primary.contains(ProcControls::CR8_STORE) => Some(Access::Read { gpr }),
        _ => None,
    }
}

/// MSRs of the x2APIC, and that of the task priority.
const X2APIC: u32 = 0x800;
const X2APIC_PRIORITY: u32 = X2APIC + reg::TPR / 16;
const X2APIC_END: u32 = X2APIC + reg::EOI / 16;
const X2APIC_SELF: u32 = X2APIC + reg::SELF_IPI / 16;

/// The access that RDMSR or WRMSR with these registers is, if L1 virtualizes the x2APIC of L2 that far, and does not
/// want the exit, which was asked before.
pub fn msr_access(v: &Vmcs12, direction: Direction, gprs: &[u64; 16]) -> Option<Access> {
    // An MSR's number is ECX, whatever RCX has above.
    let [rax, rcx, rdx, ..] = *gprs;
    let index = rcx as u32;
    let second = v.secondary();
    // 800h to 8FFh. Without that control they are L1's own local APIC's, to which L2 has no way.
    if index >> 8 != X2APIC >> 8 || !second.contains(ProcControls2::VIRTUALIZE_X2APIC) {
        return None;
    }
    match direction {
        Direction::Read
            // With register virtualization every read is of the page; whether there is such a register L1's page answers.
            if index == X2APIC_PRIORITY || second.contains(ProcControls2::APIC_REGISTERS) =>
        {
            Some(Access::ReadMsr { offset: (index as u16 & 0xff) << 4 })
        }
        Direction::Write
            // Three writes are the CPU's; every other goes to whoever owns the MSR (§30.5).
            if index == X2APIC_PRIORITY
                || matches!(index, X2APIC_END | X2APIC_SELF) && virtual_interrupts::are_on(v) =>
        {
            let offset = (index as u16 & 0xff) << 4;
            Some(Access::WriteMsr { offset, value: rax & 0xffff_ffff | rdx << 32 })
        }
        Direction::Read | Direction::Write => None,
    }
}

fn register(v: &Vmcs12, offset: u16) -> Gpa {
    Gpa(v.get(field::VIRTUAL_APIC_ADDR).wrapping_add(u64::from(offset)))
}

fn place(v: &Vmcs12) -> Gpa {
    register(v, reg::TPR as u16)
}

/// What RDMSR of the register there gives: eight bytes of the page.
pub fn read_msr(v: &Vmcs12, offset: u16, memory: &impl GuestMemory) -> u64 {
    // All ones as for CR8: nothing drives the bus.
    memory.read_u64(register(v, offset)).unwrap_or(u64::MAX)
}

/// WRMSR of one of the three registers.
///
/// # Errors
/// The value has reserved bits: #GP, and nothing has changed.
pub fn write_msr(
    v: &mut Vmcs12,
    offset: u16,
    value: u64,
    memory: &impl GuestMemory,
) -> Result<Moved, Exception> {
    let index = X2APIC + u32::from(offset >> 4);
    let fits = match index {
        // Reserved bits are #GP, as in a local APIC (§30.5).
        X2APIC_END => value == 0,
        _ => value >> 8 == 0,
    };
    if !fits {
        return Err(Exception::gp(0));
    }
    // All eight bytes: the CPU stores EDX and EAX there.
    let _ = memory.write(register(v, offset), &value.to_le_bytes());
    Ok(match index {
        X2APIC_END => Moved::ended(virtual_interrupts::end(v, memory)),
        // Such a vector is an error of the APIC's, which is L1's (§30.5).
        X2APIC_SELF if value >> 4 == 0 => Moved::Written(offset),
        X2APIC_SELF => Moved::evaluated(virtual_interrupts::send_self(v, value as u8, memory)),
        _ => moved(v, value >> 4, memory),
    })
}

/// What a priority that has been written comes to.
pub(crate) fn moved(v: &Vmcs12, priority: u64, memory: &impl GuestMemory) -> Moved {
    // With virtual interrupts a priority wakes what waits; else it falls below L1's threshold, or it does nothing.
    if virtual_interrupts::are_on(v) {
        Moved::evaluated(virtual_interrupts::evaluate(v, memory))
    } else if falls(v, priority) {
        Moved::Fell
    } else {
        Moved::On
    }
}

/// What MOV from CR8 gives. Where no memory is nothing drives the bus, and all bits are ones.
pub fn read(v: &Vmcs12, memory: &impl GuestMemory) -> u64 {
    memory.read_u8(place(v)).map_or(0xf, |priority| u64::from(priority >> 4))
}

/// Whether MOV to CR8 with this value ends L2's run. Asked before anything is written.
pub fn falls(v: &Vmcs12, value: u64) -> bool {
    // By L2's new priority alone: the page is not read again, since L1's other vCPUs may write there.
    !virtual_interrupts::are_on(v) && value < u64::from(v.get(field::TPR_THRESHOLD) & 0xf)
}

/// MOV to CR8: the priority's own four bits are the value, all others of the register are cleared. Where no memory is
/// the store is lost.
///
/// # Errors
/// The value has reserved bits: #GP, and nothing has changed.
pub fn write(v: &Vmcs12, value: u64, memory: &impl GuestMemory) -> Result<Moved, Exception> {
    // CR8 has four bits. #GP before anything is written.
    if value >> 4 != 0 {
        return Err(Exception::gp(0));
    }
    // All of the register but its class is cleared (§30.3).
    let _ = memory.write(place(v), &((value as u32) << 4).to_le_bytes());
    Ok(moved(v, value, memory))
}

/// What an entry asks of the page. L1 changes it without VMWRITE: this is asked at each entry, and `changed` says
/// whether L1 has changed control fields. With a threshold of 0, and nothing changed, the page is not looked at.
///
/// # Errors
/// The priority is below the threshold, or there is no page for a register that L2 reaches. No CPU tells the second;
/// stock KVM fails the entry, too.
pub fn check(v: &Vmcs12, changed: bool, memory: &impl GuestMemory) -> Result<(), Broken> {
    let primary = v.primary();
    let exits = ProcControls::CR8_LOAD | ProcControls::CR8_STORE;
    // No shadow, no page: what L2 moves to CR8 is L0's to look at.
    if !primary.contains(ProcControls::TPR_SHADOW) {
        return Ok(());
    }
    let second = v.secondary();
    let pages = ProcControls2::VIRTUALIZE_APIC_ACCESSES;
    // With virtual interrupts the CPU compares by itself.
    let asked = if second.contains(ProcControls2::VIRTUAL_INTERRUPTS) {
        0
    } else {
        v.get(field::TPR_THRESHOLD) & 0xf
    };
    // With an APIC-access page it is asked behind the entry ([`crate::apic_page::falls_at_entry`]).
    let threshold = if second.contains(pages) { 0 } else { asked };
    let otherwise = second.intersects(ProcControls2::VIRTUALIZE_X2APIC | pages);
    // Nothing to compare, and the page's place is what it was: most entries read no memory here.
    if asked == 0 && !changed {
        return Ok(());
    }
    match memory.read_u8(place(v)) {
        // A priority below the threshold would exit at once: such an entry is refused (§27.2.1.1).
        Ok(priority) if threshold > u32::from(priority >> 4) => Err(Broken::TprThreshold),
        // Where both moves exit nothing needs the page, unless L2 reaches it otherwise.
        Err(crate::Outside) if !primary.contains(exits) || otherwise => Err(Broken::VirtualApic),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Memory, good, set};

    const PAGE: u64 = 0x7000;
    const SHADOW: u32 = 1 << 21;
    const LOAD: u32 = 1 << 19;
    const STORE: u32 = 1 << 20;

    fn with(primary: u32, threshold: u32) -> Vmcs12 {
        let mut v = good();
        let base = v.get(field::PROC_CONTROLS);
        set!(
            v,
            PROC_CONTROLS = base | primary,
            VIRTUAL_APIC_ADDR = PAGE,
            TPR_THRESHOLD = threshold
        );
        v
    }

    #[test]
    fn a_mov_of_cr8_is_l1s_or_the_pages_as_the_controls_say() {
        let mut gprs = [0; 16];
        gprs[9] = 0x1234;
        let (to, from) = (8 | 9 << 8, 8 | 1 << 4 | 9 << 8);
        assert_eq!(access(&with(0, 0), to, &gprs), None);
        let v = with(SHADOW, 0);
        assert_eq!(access(&v, to, &gprs), Some(Access::Write { value: 0x1234 }));
        assert_eq!(access(&v, from, &gprs), Some(Access::Read { gpr: 9 }));
        assert_eq!(access(&v, to & !8 | 3, &gprs), None);
        assert_eq!(access(&with(SHADOW | LOAD, 0), to, &gprs), None);
        assert_eq!(access(&with(SHADOW | LOAD, 0), from, &gprs), Some(Access::Read { gpr: 9 }));
        assert_eq!(access(&with(SHADOW | STORE, 0), from, &gprs), None);
    }

    #[test]
    fn the_priority_has_four_bits_of_a_register() {
        let memory = Memory::new();
        memory.put(PAGE + 0x7c, &[0xff; 12]);
        let v = with(SHADOW, 6);
        assert_eq!(read(&v, &memory), 15);
        assert_eq!(write(&v, 7, &memory), Ok(Moved::On));
        assert_eq!(memory.read_u64(Gpa(PAGE + 0x80)), Ok(0xffff_ffff_0000_0070));
        assert_eq!(memory.read_u32(Gpa(PAGE + 0x7c)), Ok(u32::MAX));
        assert_eq!(read(&v, &memory), 7);
        assert_eq!(write(&v, 6, &memory), Ok(Moved::On));
        assert_eq!(write(&v, 5, &memory), Ok(Moved::Fell));
        assert_eq!(read(&v, &memory), 5);
        for bad in [16, 1 << 32, u64::MAX] {
            assert_eq!(write(&v, bad, &memory), Err(Exception::gp(0)));
        }
        assert_eq!(read(&v, &memory), 5);
    }

    #[test]
    fn an_msr_of_the_x2apic_is_the_pages_as_the_controls_say() {
        let with_second = |second: u32| {
            let mut v = with(SHADOW | 1 << 31, 6);
            set!(v, PROC_CONTROLS2 = second);
            v
        };
        let gprs = |index: u64| {
            let mut gprs = [0; 16];
            (gprs[0], gprs[1], gprs[2]) = (0xffff_ffff_0000_0060, index, 1);
            gprs
        };
        let (read, write) = (Direction::Read, Direction::Write);
        let (x2apic, both) = (with_second(1 << 4), with_second(1 << 4 | 1 << 8));
        assert_eq!(msr_access(&with_second(1 << 8), read, &gprs(0x808)), None);
        let priority = Some(Access::ReadMsr { offset: 0x80 });
        assert_eq!(msr_access(&x2apic, read, &gprs(0x808)), priority);
        assert_eq!(msr_access(&x2apic, read, &gprs(0x802)), None);
        assert_eq!(msr_access(&both, read, &gprs(0x8ff)), Some(Access::ReadMsr { offset: 0xff0 }));
        for beyond in [0x7ff, 0x900, 0xc000_0808] {
            assert_eq!(msr_access(&both, read, &gprs(beyond)), None);
        }
        let written = Some(Access::WriteMsr { offset: 0x80, value: 0x1_0000_0060 });
        assert_eq!(msr_access(&x2apic, write, &gprs(0x808)), written);
        assert_eq!(msr_access(&both, write, &gprs(0x80b)), None);

        let memory = Memory::new();
        memory.put(PAGE + 0x80, &[0xff; 16]);
        let write_msr = |value| write_msr(&mut x2apic.clone(), 0x80, value, &memory);
        assert_eq!(write_msr(0x65), Ok(Moved::On));
        assert_eq!(read_msr(&x2apic, 0x80, &memory), 0x65);
        assert_eq!(write_msr(0x5f), Ok(Moved::Fell));
        assert_eq!(write_msr(0x100), Err(Exception::gp(0)));
        assert_eq!(read_msr(&x2apic, 0x80, &memory), 0x5f);
        assert_eq!(read_msr(&x2apic, 0x88, &memory), u64::MAX, "no more than eight bytes");
        // Without memory the entry fails, though CR8 exits.
        let mut v = with(SHADOW | LOAD | STORE | 1 << 31, 0);
        set!(v, PROC_CONTROLS2 = 1 << 4, VIRTUAL_APIC_ADDR = 1 << 39);
        assert_eq!(check(&v, true, &memory), Err(Broken::VirtualApic));
        assert_eq!(read_msr(&v, 0x80, &memory), u64::MAX);
    }

    #[test]
    fn an_ipi_of_the_x2apic_to_oneself_has_a_vector_from_16_on() {
        let memory = Memory::new();
        let mut v = with(SHADOW | 1 << 31, 0);
        set!(v, PROC_CONTROLS2 = 1 << 4 | 1 << 9);
        let mut write = |value| write_msr(&mut v, 0x3f0, value, &memory);
        assert_eq!(write(0x10), Ok(Moved::Waits));
        assert_eq!(write(0xf), Ok(Moved::Written(0x3f0)));
        assert_eq!(memory.read_u64(Gpa(PAGE + 0x3f0)), Ok(0xf));
        assert_eq!(write(0x100), Err(Exception::gp(0)));
        assert_eq!(memory.read_u32(Gpa(PAGE + 0x200)), Ok(1 << 16));
    }

    #[test]
    fn without_memory_ones_are_read_and_stores_are_lost() {
        let memory = Memory::new();
        let mut v = with(SHADOW, 6);
        set!(v, VIRTUAL_APIC_ADDR = 1 << 39);
        assert_eq!(read(&v, &memory), 15);
        assert_eq!(write(&v, 7, &memory), Ok(Moved::On));
        assert_eq!(write(&v, 5, &memory), Ok(Moved::Fell));
        assert_eq!(read(&v, &memory), 15);
    }

    #[test]
    fn an_entry_looks_at_the_page_where_it_can_matter() {
        let memory = Memory::new();
        memory.put(PAGE + 0x80, &[0x5f]);
        for (threshold, fits) in [(0, true), (5, true), (6, false), (15, false)] {
            for changed in [false, true] {
                let checked = check(&with(SHADOW, threshold), changed, &memory);
                assert_eq!(checked.is_ok(), fits, "{threshold} {changed}");
            }
        }
        assert_eq!(check(&with(0, 15), true, &memory), Ok(()));
        // An APIC-access page leaves it to an exit right after the entry.
        let mut v = with(SHADOW, 15);
        set!(v, PROC_CONTROLS2 = 1);
        assert_eq!(check(&v, true, &memory), Ok(()));
        let mut v = with(SHADOW, 0);
        set!(v, VIRTUAL_APIC_ADDR = 1 << 39);
        assert_eq!(check(&v, true, &memory), Err(Broken::VirtualApic));
        assert_eq!(check(&v, false, &memory), Ok(()));
        let mut v = with(SHADOW | LOAD | STORE, 9);
        set!(v, VIRTUAL_APIC_ADDR = 1 << 39);
        assert_eq!(check(&v, true, &memory), Ok(()));
    }
}
