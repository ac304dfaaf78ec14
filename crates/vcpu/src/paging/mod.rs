//! What the hardware walks: the root that fits the guest's registers, and shadow paging.

pub(crate) mod pdptes;
pub(crate) mod roots;
pub(crate) mod shadow;
