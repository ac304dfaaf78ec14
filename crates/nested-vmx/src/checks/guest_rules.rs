//! The rules of the guest state that an entry can break, and the exit that each makes.

use crate::outcome::EntryFailure;

/// The broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named by what the rule is about.
pub enum Broken {
    Cr0,
    Cr4,
    Cr3,
    Debug,
    LongMode,
    Sysenter,
    PerfGlobalCtrl,
    Pat,
    Efer,
    Bndcfgs,
    Selectors,
    Bases,
    Limits,
    Rights,
    Tables,
    Rip,
    Rflags,
    Activity,
    Interruptibility,
    PendingDebug,
    Link,
    Pdptes,
}

impl Broken {
    /// The exit that L1 sees.
    pub const fn exit(self) -> EntryFailure {
        // Two have a qualification of their own, all others 0 (§27.8). No wildcard: a new rule has to say which it is.
        match self {
            Self::Link => EntryFailure::LINK,
            Self::Pdptes => EntryFailure::PDPTE,
            Self::Cr0
            | Self::Cr4
            | Self::Cr3
            | Self::Debug
            | Self::LongMode
            | Self::Sysenter
            | Self::PerfGlobalCtrl
            | Self::Pat
            | Self::Efer
            | Self::Bndcfgs
            | Self::Selectors
            | Self::Bases
            | Self::Limits
            | Self::Rights
            | Self::Tables
            | Self::Rip
            | Self::Rflags
            | Self::Activity
            | Self::Interruptibility
            | Self::PendingDebug => EntryFailure::GUEST,
        }
    }
}
