//! Time: the lazy TSC deadline, and deadlines that the hardware watches.

pub(crate) mod lazy_deadline;
pub(crate) mod watch;
