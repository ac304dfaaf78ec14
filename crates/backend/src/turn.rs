//! One turn of the inner loop: what is paid at every exit.

use crate::{Exit, Exits, Gprs};

/// Who answers exits. Its methods are inlined into [`Turn::dispatch`]. `S`: what proves to it that it is
/// inside the loop.
pub trait Answer<B, S: Copy> {
    /// What the loop is left with.
    type Left;
    /// The backend whose exits it answers.
    fn backend(&self) -> &B;
    /// Answers an exit of a frequent kind. `Some`: the loop is to be left for this.
    fn frequent(&mut self, section: S, exit: Exit) -> Option<Self::Left>;
    /// Answers any exit.
    fn rare(&mut self, section: S, exit: Exit) -> Option<Self::Left>;
}

/// Into the guest, to whoever answers what it was left for, and past the instruction that it was left at.
pub trait Turn: Exits {
    /// Runs the guest until its next exit: the world switch.
    fn enter(&mut self, gprs: &mut Gprs);
    /// Has `answer` answer the exit: a frequent kind from a place of its own, so that the exit itself is
    /// never put together there.
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<A::Left>;
    /// RIP after the exiting instruction where the CPU tells, else `None`.
    fn next_rip(&self) -> Option<u64>;
    /// Moves RIP past an instruction that was handled and ends the interrupt shadow.
    fn retire(&mut self, next_rip: u64);
}
