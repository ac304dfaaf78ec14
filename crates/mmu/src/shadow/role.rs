//! What, beside the guest frame, decides what a shadow page holds.
//!
//! Two roles that differ in any bit never share a page: each bit changes what a guest entry means
//! or which address of the guest table an entry stands for.

use crate::walk::PagingContext;

/// A role, as bits of a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Role(u32);

impl Role {
    /// The role of the root for `context`.
    pub fn of(context: &PagingContext, smm: bool) -> Self {
        let _ = (context, smm);
        Self(0)
    }

    /// The bits, for comparing and tracing.
    pub fn bits(self) -> u32 {
        self.0
    }
}
