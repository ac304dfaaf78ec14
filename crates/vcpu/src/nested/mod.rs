//! The guest is a hypervisor: its instructions, the exits of its guest, and who gets an event.
//!
//! L1 is the guest, L2 its guest. The backend has a control block for each and knows the rules of its instruction
//! set ([`backend::Nested`]); here is what is the same for both. There are three places where the rest of the
//! vCPU comes by, and no fourth:
//!
//! - an exit for an instruction of L1's ([`transition`]), answered inside the loop as any other;
//! - after an exit of L2, before it is answered, it is asked whose it is. "L2 runs" is one bit of the word that is
//!   tested after every exit anyway, so that it costs a guest without guests nothing. What is ours is answered as
//!   an exit of L1's is, since everything that acts on the current control block acts on L2's;
//! - before an event is injected it is asked where it goes ([`events`]).
//!
//! All three are done inside the loop as far as the pages of L1's that they need can be had through the TDP
//! tables ([`memory`]). Where L1 has tables of its own for L2 is in [`paging`]. Else the loop is left and the same is done again outside, where a page may be waited for.

pub(crate) mod events;
pub(crate) mod gate;
mod lists;
mod memory;
pub(crate) mod paging;
mod saved;
mod smm;
pub(crate) mod transition;
pub(crate) mod wake;
