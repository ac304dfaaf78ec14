//! Accesses to the APIC-access page.

/// An access to the page that stands for the local APIC of a hypervisor's guest (SDM vol. 3C §30.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApicAccess {
    /// Where in the page.
    pub offset: u16,
    /// Data are written.
    pub write: bool,
    /// Instructions are fetched.
    pub fetch: bool,
    /// It is one to what a linear address leads to, not to a paging entry on its way.
    pub linear: bool,
}
