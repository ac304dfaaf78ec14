//! What of a guest is live in the CPU beside its control block: XCR0, IA32_XSS and PKRU, the debug
//! registers, and the MSRs that neither a VM entry nor an exit exchanges. One of each per vCPU, whatever
//! number of control blocks it has, and the same for both vendors.
//!
//! Each part is a value that knows what the guest is to have, what the hardware holds, and what the
//! host had. It writes a register only where the hardware holds another value (`write-only-what-differs`):
//! such a write costs more than the rest of a short exit. The vendor says when: what a guest may see
//! follows from its control block, and the loop's two ends are the vendor's.
//!
//! There are two ways to keep an MSR. One that the host's kernel itself uses is [`Exchanged`] at the
//! loop's ends. One that matters to user space alone may be [lent](user_return): the guest's value stays
//! until the CPU goes back to user space.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod debug;
mod exchanged;
mod extended;
mod user_return;

pub use debug::{DebugRegs, LiveDr6};
pub use exchanged::Exchanged;
pub use extended::{Extended, Has};
pub use user_return::{SyscallMsrs, UserReturn};
