//! SVM for guests that are hypervisors themselves, as pure logic.
//!
//! L0 is this hypervisor, L1 its guest, L2 the guest of that one. L1 describes L2 by a control block in its own
//! memory, VMCB12; L0 runs L1 on a block 01 and L2 on a block 02. What is here says what an instruction of L1
//! does ([`instructions`]), whether VMCB12 may be run ([`checks`]), what block 02 has to hold ([`merge`]), whose
//! exit an exit is ([`reflect`]), where an event goes ([`gif`]), and what L1 sees after an exit ([`leave`]). It
//! knows no CPU and no kernel: only types, and L1's memory behind [`L1Memory`].
//!
//! **Why VMCB12 is read once.** L1 has other vCPUs, which rewrite VMCB12 while it is read. So what is needed is
//! copied first ([`vmcb12::Vmcb12::load`]), and checks and merge see the copy alone. What is written back goes to
//! the same page and is never read again.
//!
//! **Why clean bits are believed for the save area only.** L1 says by them what it has not changed since the last
//! VMEXIT (APM vol. 2 §15.15). Where that is a lie, L2 runs with values that L1 gave before, that were checked
//! then, and that are L2's own: no harm to L0. Controls are another matter, since `reflect` looks at the copy: they
//! are always read, always checked, and compared with what block 02 has.
//!
//! APM vol. 2 chapter 15; KVM API §4.114 for the saved state.
#![no_std]
#![forbid(unsafe_code)]

pub mod checks;
pub mod gif;
pub mod instructions;
pub mod leave;
pub mod merge;
pub mod permission;
pub mod reflect;
pub mod saved;
pub mod vmcb12;

use core::sync::atomic::AtomicU64;

use x86::{Direction, Gpa};

/// An address of L1 is outside of its memory, or its memory cannot be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside;

/// L1's memory, by its guest-physical addresses.
pub trait L1Memory {
    /// Reads `into.len()` bytes at `at`, each byte once.
    ///
    /// # Errors
    /// Not all of it is memory; `into` then holds anything.
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside>;
    /// Writes `from` at `at`.
    ///
    /// # Errors
    /// Not all of it is memory that may be written; any part of it may have been written.
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside>;
    /// The page that begins at `at`, to be read in place, and to be written too if that is the direction. `None`: it can be had by
    /// copies alone.
    fn page(&self, _at: Gpa, _direction: Direction) -> Option<&Words> {
        None
    }
}

/// A page of L1's, word by word: L1 writes too.
pub type Words = [AtomicU64; 512];

/// Which of the two a vCPU runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// The guest.
    #[default]
    L1,
    /// The guest's guest.
    L2,
}

/// What L1's processor offers, as far as nesting asks: from L1's CPUID, never more than L0's processor has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// Bits of a guest-physical address of L1's.
    pub physical_bits: u8,
    /// Flush by address-space id (CPUID Fn8000_000A EDX\[6\]).
    pub flush_by_asid: bool,
    /// Nested paging (EDX\[0\]).
    pub npt: bool,
    /// NRIP save (EDX\[3\]).
    pub nrip_save: bool,
    /// Decode assists (EDX\[7\]).
    pub decode_assists: bool,
    /// PAUSE filter (EDX\[10\]).
    pub pause_filter: bool,
    /// Threshold of the PAUSE filter (EDX\[12\]).
    pub pause_threshold: bool,
    /// Virtual GIF (EDX\[16\]).
    pub vgif: bool,
    /// Virtualised VMLOAD and VMSAVE (EDX\[15\]).
    pub virtual_vmload: bool,
    /// SYSENTER_ESP and SYSENTER_EIP have 64 bits, of which the CPU moves 32.
    pub wide_sysenter: bool,
    /// LBR virtualisation (EDX\[1\]).
    pub lbr: bool,
    /// Virtual NMIs (EDX\[25\]).
    pub vnmi: bool,
    /// CR4 bits that L1's CPUID offers.
    pub cr4: u64,
    /// EFER bits that L1's CPUID offers.
    pub efer: u64,
}

impl Offered {
    /// Whether `at` is an address that L1's processor can form.
    #[inline]
    pub const fn is_address(&self, at: u64) -> bool {
        // 52 bits is what page tables can name: a VMM's CPUID may claim more.
        let bits = if self.physical_bits > 52 { 52 } else { self.physical_bits };
        at >> bits == 0
    }
}
