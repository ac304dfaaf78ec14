//! What Bochs's numbers for the forms of instructions mean. Several places in the emulator's cache of decoded instructions may hold the
//! same instruction, and it copies them; but the number, with the flags beside it, tells all that `classify` looks at: operation, LOCK,
//! and whether the operand is memory. It is learnt from the bytes whenever an instruction is decoded, of 64-bit code only, as what is
//! measured is nothing else.

use gannet_lab::classify::{KINDS, Kind, Marker, classify, marker};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};

/// The number of the operation is 16 bits, and there are 8 flags.
const NUMBERS: usize = 1 << 24;

/// What is known of a number: 0 for nothing; else one more than its kind's place in [`KINDS`], or [`PLAIN`]; and [`LOCKED`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Form(u8);

const PLAIN: u8 = 0x3f;
const LOCKED: u8 = 0x40;

impl Form {
    /// A NOP that is a marker if its displacement is one's.
    pub const MAY_MARK: Self = Self(0x80);

    fn new(bytes: &[u8]) -> Self {
        let mut form = 0;
        for kind in classify(bytes).into_iter().flatten() {
            form |= if kind == Kind::Locked { LOCKED } else { kind as u8 + 1 };
        }
        Self(if form & !LOCKED == 0 { form | PLAIN } else { form })
    }

    /// As `classify` gives them.
    pub fn kinds(self) -> [Option<Kind>; 2] {
        let locked = (self.0 & LOCKED != 0).then_some(Kind::Locked);
        let kind = usize::from(self.0 & PLAIN).checked_sub(1).and_then(|i| KINDS.get(i)).copied();
        if self == Self::MAY_MARK { [None; 2] } else { [kind, locked] }
    }
}

const _: () = assert!(KINDS.len() < PLAIN as usize);

/// Everything learnt.
pub struct Forms {
    of: [AtomicU8; NUMBERS],
    /// Where in a decoded instruction its displacement lies.
    displacement: AtomicUsize,
    confused: OnceLock<String>,
}

/// The displacement of each marker.
const MARKERS: [(u32, Marker); 2] = [(0x0154_4e47, Marker::Start), (0x0254_4e47, Marker::Stop)];

impl Forms {
    pub const fn new() -> Self {
        let of = [const { AtomicU8::new(0) }; NUMBERS];
        Self { of, displacement: AtomicUsize::new(usize::MAX), confused: OnceLock::new() }
    }

    /// What is executed under this number. `number` is less than 2^24.
    #[inline]
    pub fn of(&self, number: usize) -> Form {
        Form(self.of.get(number).map_or(0, |form| form.load(Relaxed)))
    }

    /// An instruction with this number has these bytes.
    pub fn learn(&self, number: usize, instruction: &[u8], bytes: &[u8]) {
        let Some(known) = self.of.get(number) else { return };
        let mut form = Form::new(bytes);
        if let Some(found) = marker(bytes) {
            form = Form::MAY_MARK;
            let wanted = MARKERS.iter().find(|(_, m)| *m == found).map(|(d, _)| d.to_le_bytes());
            let at = instruction
                .windows(4)
                .position(|part| Some(part) == wanted.as_ref().map(|w| &w[..]));
            self.displacement.store(at.unwrap_or(usize::MAX), Relaxed);
        }
        let before = Form(known.load(Relaxed));
        // Other NOPs of the marker's form are plain.
        if before == Form::MAY_MARK || before == form {
            return;
        }
        if before.0 != 0 && form != Form::MAY_MARK {
            let _ =
                self.confused.set(format!("{number:#x}: {before:?} and {form:?}, {bytes:02x?}"));
        }
        known.store(form.0, Relaxed);
    }

    /// Which marker an instruction of that form is.
    pub fn marker(&self, instruction: &[u8]) -> Option<Marker> {
        let at = self.displacement.load(Relaxed);
        let found = instruction.get(at..at.checked_add(4)?)?;
        let found = u32::from_le_bytes(found.try_into().ok()?);
        MARKERS.iter().find(|(displacement, _)| *displacement == found).map(|(_, marker)| *marker)
    }

    /// Two instructions of different kinds that had the same number.
    pub fn confused(&self) -> Option<&str> {
        self.confused.get().map(String::as_str)
    }
}
