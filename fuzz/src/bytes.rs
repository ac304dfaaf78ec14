//! A fuzzer's bytes as values. What is beyond their end is zero.

pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `N` bytes.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let there = N.min(self.0.len());
        taken[..there].copy_from_slice(&self.0[..there]);
        self.0 = &self.0[there..];
        taken
    }

    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    pub fn bool(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// One of a list.
    pub fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.u8()) % from.len()]
    }

    /// A number, mostly one at which something turns.
    pub fn value(&mut self) -> u64 {
        match self.u8() {
            0..64 => u64::from(self.u8()),
            n @ 64..128 => 1 << (n & 63),
            n @ 128..160 => (1 << (n & 31)) - 1,
            160..200 => u64::from(self.u32()),
            n @ 200..216 => !(1 << ((n - 200) * 4)),
            _ => self.u64(),
        }
    }
}
