//! A port that the program may access.

/// The proof that the program may access a port: IOPL and the bitmap were looked at.
#[derive(Debug, PartialEq, Eq)]
pub struct PortAccess {
    port: u16,
    size: u8,
}

impl PortAccess {
    /// The proof, where IOPL allows the access or, asked only if it does not, the TSS's bitmap.
    pub(crate) fn check<E>(
        port: u16,
        size: u8,
        by_level: bool,
        bitmap_allows: impl FnOnce() -> Result<bool, E>,
    ) -> Result<Option<Self>, E> {
        let allowed = by_level || bitmap_allows()?;
        Ok(allowed.then_some(Self { port, size }))
    }

    /// The first port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Bytes of an element: 1, 2 or 4, that many ports.
    pub const fn size(&self) -> u8 {
        self.size
    }
}
