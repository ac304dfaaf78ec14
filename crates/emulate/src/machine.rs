//! What the emulator asks of a vCPU: registers, segments, guest memory by linear address, ports.
//!
//! The implementor walks the guest's page tables and tells RAM from MMIO; the emulator does
//! segmentation, effective addresses and the splitting of accesses at page borders.

use crate::port::PortAccess;
use x86::segment::DescriptorTable;
use x86::{Cr0, Cr4, Exception, Gva, Rflags};

/// The mode that instructions are decoded in: CS.L and CS.D under EFER.LMA; real and
/// virtual-8086 mode are 16-bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CodeSize {
    /// Real mode, virtual-8086 mode, CS.D = 0.
    Bits16 = 0,
    /// CS.D = 1 outside 64-bit mode.
    Bits32 = 1,
    /// 64-bit mode, CS.L set.
    Bits64 = 2,
}

/// Why emulation ended before the instruction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The guest gets this exception; RIP stays at the instruction.
    Fault(Exception),
    /// User space must answer an access; call again with the answer in the replay log.
    NeedUser,
    /// The host must do something first (fault a page in, retry a race); call again.
    Retry,
    /// The emulator does not know this instruction or form of it.
    Unsupported,
}

/// How a memory access is made; it becomes the W bit of a page fault's error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain read.
    Load,
    /// A plain write.
    Store,
    /// The read or write half of a read-modify-write; both fault as writes.
    Modify,
}

/// A segment register, numbered as in instruction encodings; then the two that hold system segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SegReg {
    /// The segment register ES.
    Es = 0,
    /// The segment register CS.
    Cs = 1,
    /// The segment register SS.
    Ss = 2,
    /// The segment register DS.
    Ds = 3,
    /// The segment register FS.
    Fs = 4,
    /// The segment register GS.
    Gs = 5,
    /// LDTR, the local descriptor table's.
    Ldtr = 6,
    /// TR, the task register.
    Tr = 7,
}

/// One of the two tables that registers of their own describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// GDTR, the global descriptor table's.
    Global,
    /// IDTR, the interrupt descriptor table's.
    Interrupt,
}

/// A segment register with its hidden part, in the form of the VMCB's state-save area
/// (APM vol. 2 §15.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Segment {
    /// The selector that software sees.
    pub selector: u16,
    /// Type (bits 3:0), S (4), DPL (6:5), P (7), AVL (8), L (9), D/B (10), G (11).
    pub attributes: u16,
    /// Limit in bytes, granularity already applied.
    pub limit: u32,
    /// The linear address where it begins.
    pub base: u64,
}

impl Segment {
    pub(crate) const ACCESSIBLE_TYPE: u16 = 1 << 1;
    pub(crate) const EXPAND_DOWN: u16 = 1 << 2;
    pub(crate) const CODE: u16 = 1 << 3;
    pub(crate) const PRESENT: u16 = 1 << 7;
    /// Code or data, as against a system segment.
    pub(crate) const S: u16 = 1 << 4;
    pub(crate) const CONFORMING: u16 = 1 << 2;
    pub(crate) const ACCESSED: u16 = 1 << 0;
    pub(crate) const LONG: u16 = 1 << 9;
    pub(crate) const BIG: u16 = 1 << 10;

    pub(crate) const fn has(&self, bit: u16) -> bool {
        self.attributes & bit != 0
    }

    /// Type, 0 to 15.
    pub(crate) const fn kind(&self) -> u8 {
        (self.attributes & 0xf) as u8
    }

    /// Descriptor privilege level.
    pub(crate) const fn dpl(&self) -> u8 {
        (self.attributes >> 5 & 3) as u8
    }

    /// The segment with another privilege level.
    pub(crate) const fn with_dpl(mut self, dpl: u8) -> Self {
        // Cut: a level beyond 3 would change its neighbours.
        self.attributes = (self.attributes & !(3 << 5)) | ((dpl as u16 & 3) << 5);
        self
    }

    /// The segment that a descriptor's 8 bytes say.
    pub(crate) const fn of(selector: u16, descriptor: u64) -> Self {
        let x86::segment::Segment { base, limit, selector, attr } =
            x86::segment::Segment::from_descriptor(selector, descriptor);
        Self { selector, attributes: attr, limit, base }
    }
}

/// The vCPU as the emulator sees it.
///
/// Addresses are linear. Accesses are 1 to 8 bytes (16 for [`Machine::cmpxchg`]) and lie within
/// one page; only where [`Machine::port_run`] allowed it do longer ones come, up to
/// [`crate::STRING_RUN_BYTES`]. CPL decides user or supervisor: all accesses are explicit ones.
pub trait Machine {
    /// General register `index` (0 = RAX … 15 = R15), whole.
    fn gpr(&self, index: usize) -> u64;
    /// Sets general register `index`, whole.
    fn set_gpr(&mut self, index: usize, value: u64);
    /// RIP of the instruction being emulated.
    fn rip(&self) -> u64;
    /// RFLAGS before the instruction.
    fn rflags(&self) -> Rflags;
    /// A segment register with its hidden part; asked only when needed.
    fn segment(&self, segment: SegReg) -> Segment;
    /// CS.L, CS.D and EFER.LMA as one value.
    fn code_size(&self) -> CodeSize;
    /// Current privilege level, 0 to 3.
    fn cpl(&self) -> u8;
    /// The guest's CR0.
    fn cr0(&self) -> Cr0;
    /// The guest's CR4.
    fn cr4(&self) -> Cr4;

    /// Reads guest memory or a device. `how` is `Load` or `Modify`.
    fn read(&mut self, at: Gva, into: &mut [u8], how: Access) -> Result<(), Stop>;
    /// Writes guest memory or a device. `how` is `Store` or `Modify`.
    fn write(&mut self, at: Gva, data: &[u8], how: Access) -> Result<(), Stop>;
    /// Faults as a write of `len` bytes would, and does nothing else. Devices and read-only
    /// slots (where writes are MMIO) answer `Ok`.
    fn probe_write(&mut self, at: Gva, len: usize) -> Result<(), Stop>;
    /// Atomically replaces `old` by `new` in RAM, false when memory held something else.
    /// Lengths are equal: 1, 2, 4, 8 or 16. On a device it is a plain write and true.
    fn cmpxchg(&mut self, at: Gva, old: &[u8], new: &[u8]) -> Result<bool, Stop>;

    /// Whether `len` bytes (within one page) are RAM that can be accessed without a fault and
    /// without user space, for writing. Asked where a write crosses into another page: RAM is written last
    /// then, so that a replay does not read back its own result. False is always allowed.
    fn is_writable_ram(&mut self, _at: Gva, _len: usize) -> Result<bool, Stop> {
        Ok(false)
    }
    /// Whether something happens behind each instruction, and each iteration of a REP string instruction: one is carried
    /// out at a time, as under RFLAGS.TF.
    fn steps(&self) -> bool {
        false
    }
    /// All accesses so far are complete: the replay log restarts empty here. Called between the
    /// iterations of a REP string instruction, after their registers were set. Whatever comes now comes within the
    /// instruction: RF is set, and a shadow that it began in is over.
    fn commit(&mut self);

    /// How many of `elements` one access of the port may bring, if INS puts them at `at` and behind, within one page: more than
    /// one only if that is RAM that can be written to without a fault. One is always allowed.
    fn port_run(&mut self, _access: &PortAccess, _at: Gva, _elements: u64) -> Result<u64, Stop> {
        Ok(1)
    }
    /// Whether the port has given more elements than were read yet.
    fn has_port_items(&self) -> bool {
        false
    }
    /// Reads `into.len() / size` elements of the access's size from one port.
    fn port_in(&mut self, access: &PortAccess, into: &mut [u8]) -> Result<(), Stop>;
    /// Writes one element of the access's size to one port.
    fn port_out(&mut self, access: &PortAccess, data: &[u8]) -> Result<(), Stop>;

    /// EFER.LMA: long mode is active.
    fn long_mode(&self) -> bool;
    /// GDTR or IDTR.
    fn table(&self, table: Table) -> DescriptorTable;
    /// Sets GDTR or IDTR, privilege and address already checked.
    fn set_table(&mut self, table: Table, value: DescriptorTable);
    /// Sets a segment register with its hidden part, all checks made; the DPL of SS is the CPL.
    fn set_segment(&mut self, segment: SegReg, value: Segment);
    /// Reads a descriptor table or a TSS in RAM, within one page, as the processor does for itself:
    /// a supervisor's access whatever the CPL. In device memory it is [`Stop::Unsupported`].
    fn read_system(&mut self, at: Gva, into: &mut [u8]) -> Result<(), Stop>;
    /// Writes to a descriptor table or a TSS in RAM, within one page, with the same rights.
    fn write_system(&mut self, at: Gva, data: &[u8]) -> Result<(), Stop>;
    /// Faults as a write of a byte of such a table would, and does nothing else.
    fn probe_system(&mut self, at: Gva) -> Result<(), Stop>;
    /// Reads control register `n`, privilege already checked.
    fn read_cr(&mut self, _n: u8) -> Result<u64, Stop> {
        Err(Stop::Unsupported)
    }
    /// Writes control register `n` with the checks of a MOV to it, privilege already checked.
    fn write_cr(&mut self, _n: u8, _value: u64) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// Writes CR0 for LMSW: `value` is all of CR0, privilege already checked.
    // A body for those to whom LMSW is a write like any other.
    fn lmsw(&mut self, value: u64) -> Result<(), Stop> {
        self.write_cr(0, value)
    }
    /// Reads debug register `n`, privilege already checked.
    fn read_dr(&mut self, _n: u8) -> Result<u64, Stop> {
        Err(Stop::Unsupported)
    }
    /// Writes debug register `n`, privilege already checked.
    fn write_dr(&mut self, _n: u8, _value: u64) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// Flushes the translation of `at`, privilege already checked.
    fn invlpg(&mut self, _at: Gva) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// INVPCID of type `kind` (0 to 3), privilege already checked.
    fn invpcid(&mut self, _kind: u8, _pcid: u16, _at: Gva) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// The x87 unit's control word and its status word.
    fn x87_words(&mut self) -> Result<[u16; 2], Stop> {
        Err(Stop::Unsupported)
    }
    /// Puts the x87 unit into the state that FNINIT leaves.
    fn x87_init(&mut self) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// MMX register `n` (0 to 7), with a pending x87 exception already raised; the unit is in MMX's
    /// state afterwards.
    fn mm(&mut self, _n: u8) -> Result<u64, Stop> {
        Err(Stop::Unsupported)
    }
    /// Sets MMX register `n` (0 to 7).
    fn set_mm(&mut self, _n: u8, _value: u64) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
    /// XMM register `n` (0 to 15), its low 128 bits.
    fn xmm(&mut self, _n: u8) -> Result<u128, Stop> {
        Err(Stop::Unsupported)
    }
    /// Sets the low 128 bits of XMM register `n` and keeps the upper parts.
    fn set_xmm(&mut self, _n: u8, _value: u128) -> Result<(), Stop> {
        Err(Stop::Unsupported)
    }
}
