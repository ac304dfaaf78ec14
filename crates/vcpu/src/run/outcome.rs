//! What handlers come to: inside the inner loop ([`Next`]), the loop itself ([`Left`]), and outside of it, from
//! there to KVM_RUN ([`Outcome`]).

use backend::Exit;

use crate::run::user_exit::UserExit;

/// What became of an exit.
#[must_use = "the loop is left when it says so"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Answered: enter again.
    Again,
    /// Answered, but something outside waits: leave the loop.
    Done,
    /// Not here: leave the loop, to be handled outside.
    Leave,
}

impl Next {
    /// What the loop is left for.
    #[inline(always)]
    pub(crate) fn left(self, exit: Exit) -> Option<Left> {
        match self {
            Self::Again => None,
            Self::Done => Some(Left::Other(Other::Quietly)),
            Self::Leave => Some(Left::Exit(exit)),
        }
    }

    /// What the loop is left for after an exit of a guest's guest that is not ours.
    #[inline(always)]
    pub(crate) fn left_reflecting(self) -> Option<Left> {
        match self {
            Self::Again => None,
            Self::Done => Some(Left::Other(Other::Quietly)),
            Self::Leave => Some(Left::Other(Other::Reflect)),
        }
    }
}

/// Why the inner loop was left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Left {
    /// An exit that has to be handled outside.
    Exit(Exit),
    /// Something else. It is one case, and which one is looked at when there is no exit, because on the way
    /// out the exit is looked for again and again.
    Other(Other),
}

/// Why the inner loop was left, if not for an exit of the guest's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// The last exit was answered, and something else waits outside.
    Quietly,
    /// The exit of a guest's guest is to be offered to the guest's hypervisor outside.
    Reflect,
}

impl Left {
    /// Whether there is nothing to handle but what comes with interrupts turned on again.
    #[inline(always)]
    pub(crate) fn is_handled(&self) -> bool {
        // An NMI is not among them: it was the host's, and has been taken by now.
        matches!(self, Self::Exit(Exit::Interrupt) | Self::Other(Other::Quietly))
    }
}

/// Why a handler goes no further, and whoever called it neither.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// KVM_RUN returns.
    ToUser(UserExit),
    /// The guest is entered: what it asked for ends so, by a fault of its own or by another try.
    ToGuest,
}

/// The result of a handler outside the inner loop. `Ok`: it did what it is for. It has the size of a
/// [`UserExit`], whose tag holds the other cases.
pub(crate) type Outcome<T = ()> = Result<T, Break>;

impl From<UserExit> for Break {
    #[inline(always)]
    fn from(exit: UserExit) -> Self {
        Self::ToUser(exit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_costs_no_more_room_than_an_exit() {
        assert_eq!(size_of::<UserExit>(), 32);
        assert_eq!(size_of::<Outcome>(), 32);
        assert_eq!(size_of::<Outcome<u64>>(), 32);
    }
}
