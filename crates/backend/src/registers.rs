//! The guest's registers that every instruction may use: RIP, RFLAGS, segments and tables.

use x86::{
    Cr0, Cr4, Efer, Reset, Rflags,
    segment::{DescriptorTable, Segment},
};

use crate::{ControlRegisters, LiveRegisters};

/// Which instruction has made an interrupt shadow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShadowBy {
    /// The CPU does not say, or nobody did.
    #[default]
    Unknown,
    /// STI.
    Sti,
    /// MOV SS or POP SS, which hold off NMIs and debug exceptions as well.
    MovSs,
}

// Sixteen registers are two cache lines. Aligned, the world switch touches no third.
/// The general registers in encoding order: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Gprs(pub [u64; 16]);

impl Gprs {
    /// The register of a number, of which the lowest four bits count.
    #[inline(always)]
    pub const fn get(&self, index: usize) -> u64 {
        self.0[index & 15]
    }

    /// EDX:EAX, where WRMSR and XSETBV have their value.
    #[inline]
    pub const fn edx_eax(&self) -> u64 {
        self.0[RDX] << 32 | self.0[RAX] & 0xffff_ffff
    }

    /// Sets EDX and EAX, as RDMSR does. The upper halves are cleared.
    #[inline]
    pub const fn set_edx_eax(&mut self, value: u64) {
        self.0[RAX] = value & 0xffff_ffff;
        self.0[RDX] = value >> 32;
    }
}

/// Index of RAX in [`Gprs`].
pub const RAX: usize = 0;
/// Index of RCX in [`Gprs`].
pub const RCX: usize = 1;
/// Index of RDX in [`Gprs`].
pub const RDX: usize = 2;
/// Index of RBX in [`Gprs`].
pub const RBX: usize = 3;
/// Index of RSP in [`Gprs`].
pub const RSP: usize = 4;
/// Index of RSI in [`Gprs`].
pub const RSI: usize = 6;
/// Index of RDI in [`Gprs`].
pub const RDI: usize = 7;

/// A segment register, in encoding order, then LDTR and TR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum SegmentName {
    Es,
    Cs,
    Ss,
    Ds,
    Fs,
    Gs,
    Ldtr,
    Tr,
}

/// RIP, RFLAGS, segments and descriptor tables.
pub trait Registers {
    /// The guest's RIP.
    fn rip(&self) -> u64;
    /// Sets the guest's RIP and leaves the interrupt shadow alone.
    fn set_rip(&mut self, rip: u64);
    /// Instruction bytes where the CPU gives them (decode assists), else empty.
    fn insn_bytes(&self) -> &[u8];
    /// The guest's RFLAGS.
    fn rflags(&self) -> Rflags;
    /// Sets the guest's RFLAGS.
    fn set_rflags(&mut self, rflags: Rflags);
    /// Whether STI or MOV SS holds interrupts off for one instruction.
    fn interrupt_shadow(&self) -> bool;
    /// Sets or clears the interrupt shadow.
    fn set_interrupt_shadow(&mut self, on: bool);
    /// Which instruction has made the interrupt shadow that there is.
    fn shadow_by(&self) -> ShadowBy {
        ShadowBy::Unknown
    }
    /// Sets the interrupt shadow of an instruction, where the CPU tells them apart.
    fn set_interrupt_shadow_by(&mut self, _by: ShadowBy) {
        // SVM has one bit for both instructions (APM vol. 2 §15.21.5).
        self.set_interrupt_shadow(true);
    }
    /// The guest's current privilege level.
    fn cpl(&self) -> u8;

    /// A segment register.
    fn segment(&self, name: SegmentName) -> Segment;
    /// Sets a segment register; with SS, also the CPL.
    fn set_segment(&mut self, name: SegmentName, value: Segment);
    /// Attributes of CS alone.
    fn code_attributes(&self) -> u16;
    /// The guest's GDTR.
    fn gdtr(&self) -> DescriptorTable;
    /// Sets the guest's GDTR.
    fn set_gdtr(&mut self, value: DescriptorTable);
    /// The guest's IDTR.
    fn idtr(&self) -> DescriptorTable;
    /// Sets the guest's IDTR.
    fn set_idtr(&mut self, value: DescriptorTable);
}

/// Sets what INIT and power-up set everywhere: segments, tables, control and debug registers.
pub fn reset_registers<B: Registers + ControlRegisters + LiveRegisters>(b: &mut B, reset: Reset) {
    // INIT keeps them (APM vol. 2 table 14-1, SDM vol. 3A table 10-1).
    let caching = match reset {
        Reset::Init => b.cr0() & Cr0::CD_NW,
        Reset::PowerUp => Cr0::CD_NW,
    };
    for name in
        [SegmentName::Es, SegmentName::Ss, SegmentName::Ds, SegmentName::Fs, SegmentName::Gs]
    {
        b.set_segment(name, Segment::RESET_DATA);
    }
    b.set_segment(SegmentName::Cs, Segment::RESET_CS);
    b.set_segment(SegmentName::Ldtr, Segment::RESET_LDTR);
    b.set_segment(SegmentName::Tr, Segment::RESET_TR);
    b.set_gdtr(DescriptorTable::RESET);
    b.set_idtr(DescriptorTable::RESET);
    b.set_cr0(Cr0::ET | caching);
    b.set_cr2(0);
    b.set_cr3(0);
    b.set_cr4(Cr4::empty());
    b.set_efer(Efer::empty());
    // DR6 and DR7 with the bits that are always one (SDM vol. 3A table 10-1).
    b.set_debug_regs([0, 0, 0, 0, 0xffff_0ff0, 0x400]);
}
