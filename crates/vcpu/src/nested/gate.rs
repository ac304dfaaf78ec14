//! Where an event goes while L2 runs, or while L1 holds events back: asked of the instruction set.

use backend::{Gate, Nested, Nesting, Waiting};

/// Where an event goes: to the level that runs, to L1, or nowhere yet.
pub(crate) fn gate_of(b: &impl Nesting, waiting: Waiting) -> Gate {
    b.nested().map_or(Gate::Deliver, |nested| nested.gate(&waiting))
}

/// Whether an event goes to the level that runs.
pub(super) fn passes(b: &impl Nesting, waiting: Waiting) -> bool {
    gate_of(b, waiting) == Gate::Deliver
}

/// Whether an interrupt would be taken by L2, or end its run.
pub(crate) fn interrupt_goes_somewhere(b: &impl Nesting) -> bool {
    !matches!(gate_of(b, Waiting::Interrupt(None)), Gate::Hold | Gate::Window)
}
