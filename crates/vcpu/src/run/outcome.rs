//! What a handler outside the inner loop comes to, from there to KVM_RUN.

use crate::run::user_exit::UserExit;

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
