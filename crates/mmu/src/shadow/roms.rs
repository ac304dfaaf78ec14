//! Guest tables in memory that the guest cannot write, as a vCPU met them: their accessed and dirty bits stay
//! as they are.

use x86::Gfn;

/// Tables that are remembered: those of one walk.
const MOST: usize = 5;

/// Tables whose bits cannot be set, under which generation of the tree.
#[derive(Debug)]
pub(super) struct Roms {
    gfns: [Gfn; MOST],
    generation: u64,
}

impl Roms {
    /// A list that names no frame.
    pub(super) const NONE: Self = Self { gfns: [Gfn(u64::MAX); MOST], generation: 0 };

    /// Remembers one. `generation`: the tree's, before that was found out.
    pub(super) fn note(&mut self, gfn: Gfn, generation: u64) {
        // Another generation: a frame may be writable since, or another one.
        if self.generation != generation {
            *self = Self { generation, ..Self::NONE };
        }
        self.gfns.rotate_right(1);
        let [first, ..] = &mut self.gfns;
        *first = gfn;
    }

    #[inline]
    pub(super) fn has(&self, generation: u64, gfn: Gfn) -> bool {
        self.generation == generation && self.gfns.contains(&gfn)
    }
}
