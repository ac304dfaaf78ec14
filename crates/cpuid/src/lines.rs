//! The small table of recent answers to CPUID exits, with one place for each leaf and subleaf.

/// Lines of the answer table: few guests ask for more than a handful of leaves in a row, and a
/// vCPU is made on the kernel's small stack.
pub(crate) const LINES: usize = 8;

/// A cached answer.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Line {
    /// Leaf in the low half, subleaf in the high half.
    key: u64,
    pub(crate) answer: [u32; 4],
    /// The answer depends on [`crate::DynamicInputs`].
    pub(crate) dynamic: bool,
}

/// Every line holds a key that belongs to another line, and so never hits.
pub(crate) const INVALID: [Line; LINES] = {
    let mut lines = [Line { key: 0, answer: [0; 4], dynamic: false }; LINES];
    let mut i = 0;
    while i < LINES {
        // A small number is a basic leaf, whose place is its number: line i never holds leaf i + 1.
        lines[i].key = ((i + 1) % LINES) as u64;
        i += 1;
    }
    lines
};

impl Line {
    /// The line that holds an answer.
    pub(crate) const fn new(leaf: u32, subleaf: u32, answer: [u32; 4], dynamic: bool) -> Self {
        Self { key: Self::key(leaf, subleaf), answer, dynamic }
    }

    #[inline]
    const fn key(leaf: u32, subleaf: u32) -> u64 {
        leaf as u64 | (subleaf as u64) << 32
    }

    /// Whether the line holds the answer to this leaf and subleaf.
    #[inline]
    pub(crate) const fn is_for(&self, leaf: u32, subleaf: u32) -> bool {
        // Both halves in one comparison.
        self.key == Self::key(leaf, subleaf)
    }

    /// The only place in the table where the answer can stand. Spreads the leaves that guests ask for:
    /// basic, hypervisor and extended ones start at different lines, subleaves follow each other.
    #[inline]
    pub(crate) const fn place(leaf: u32, subleaf: u32) -> usize {
        (leaf.wrapping_add(leaf >> 28).wrapping_add(subleaf) as usize) % LINES
    }
}
