//! SYSCALL where this CPU has none and the guest's make has: outside 64-bit code on Intel, for a guest that was told of an
//! AMD CPU (APM vol. 3 "SYSCALL").
//!
//! A 64-bit kernel of such a guest takes its 32-bit programs' system calls by SYSCALL, and returns by SYSRET in 64-bit code, which
//! every CPU has. Without this they would end by SIGILL after a move from one make of hosts to the other.

use backend::{Backend, RCX, SegmentName};
use x86::{
    Cr0, Efer, Rflags, msr,
    segment::{Segment, attr},
};

use super::code::CodeState;
use crate::Vcpu;

/// The instruction's bytes.
pub(super) const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Number of R11.
const R11: usize = 11;
/// Present, of code or data, of privilege level 0, counted in pages.
const FLAT: u16 = attr::P | attr::S | attr::G;
/// Execute, read, accessed.
const CODE: u16 = 0xb;
/// Read, write, accessed.
const DATA: u16 = 0x3;

impl<B: Backend> Vcpu<B> {
    /// #UD of SYSCALL: does it, if the guest's make of CPU would have. `false`: #UD it is.
    #[cold]
    pub(super) fn do_syscall(&mut self) -> bool {
        let c = self.b.control();
        let flags = self.rare.debug.rflags(&self.b);
        // In 64-bit code the CPU has it: its #UD has another reason.
        if !self.cpuid.vendor().is_amd_like()
            || !c.efer.contains(Efer::SCE)
            || !c.cr0.contains(Cr0::PE)
            || flags.contains(Rflags::VM)
            || self.b.is_64bit_code()
        {
            return false;
        }
        let register = |index| self.b.msr(index).unwrap_or(0);
        let (star, entry, mask) =
            (register(msr::STAR), register(msr::CSTAR), register(msr::SYSCALL_MASK));
        let next = self.b.wrap_rip(self.b.rip().wrapping_add(SYSCALL.len() as u64));
        // RPL is 0, whatever the selector in STAR says.
        let selector = (star >> 32) as u16 & !3;
        let long = c.efer.contains(Efer::LMA);
        let segment =
            |selector, attr| Segment { base: 0, limit: u32::MAX, selector, attr: FLAT | attr };
        let code = if long { CODE | attr::L } else { CODE | attr::DB };
        self.b.set_segment(SegmentName::Cs, segment(selector, code));
        self.b.set_segment(SegmentName::Ss, segment(selector.wrapping_add(8), DATA | attr::DB));
        self.gprs.0[RCX] = next;
        let (to, kept) = if long {
            self.gprs.0[R11] = (flags - Rflags::RF).bits();
            (entry, Rflags::from_bits_retain(flags.bits() & !mask) | Rflags::FIXED)
        } else {
            // Outside long mode there is no mask and nothing is saved: IF goes, and RF below (APM
            // vol. 3 "SYSCALL").
            (star & u64::from(u32::MAX), flags - Rflags::IF)
        };
        self.rare.debug.set_rflags(&mut self.b, kept - Rflags::RF);
        // By the flags that it has made: with TF masked there is no step.
        self.retire(to);
        true
    }
}
