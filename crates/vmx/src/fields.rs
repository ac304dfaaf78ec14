//! The VMCS as a cache that knows what the hardware holds: no field is read twice between two
//! exits, none is written with the value that it has.
//!
//! Two groups. What an entry and exit may change is forgotten at every exit by one store; what only
//! the hypervisor changes is known for ever. A field is read when it is first asked for. A value
//! that is set while the loop runs is written at once; outside it is noted, and written when the
//! loop is entered. So nothing above says what is stale or dirty: it follows from the field.

use core::cell::Cell;

use x86::vmcs::{
    Field, Natural, ReadOnly, ReadWrite, Tagging,
    field::{self, Width},
};

use crate::cpus::Cpus;

/// A VMCS field with its place in the cache.
#[derive(Debug)]
pub(crate) struct Slot<W, A> {
    at: u8,
    field: Field<W, A>,
}

impl<W, A> Clone for Slot<W, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W, A> Copy for Slot<W, A> {}

/// Places of the first group: a bit of one word each.
const GROUP: usize = 64;
const PLACES: usize = 2 * GROUP;

macro_rules! slots {
    ($places:ident from $first:literal { $($access:ident $width:ty: $($name:ident),* $(,)?;)* }) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(u8)]
        enum $places { $($($name),*),* }

        // Some are reached by their fields alone.
        $($(#[allow(dead_code)]
        pub(crate) const $name: Slot<$width, $access> =
            Slot { at: $places::$name as u8 + $first, field: field::$name };)*)*

        impl $places {
            /// Encodings by place.
            const ENCODINGS: &'static [u32] = &[$($(field::$name.encoding()),*),*];
        }
    };
}

slots! { Changing from 0 {
    ReadWrite Natural:
        GUEST_RIP, GUEST_RSP, GUEST_RFLAGS, GUEST_CR0, GUEST_CR3, GUEST_CR4, GUEST_DR7,
        GUEST_ES_BASE, GUEST_CS_BASE, GUEST_SS_BASE, GUEST_DS_BASE, GUEST_FS_BASE, GUEST_GS_BASE,
        GUEST_LDTR_BASE, GUEST_TR_BASE, GUEST_GDTR_BASE, GUEST_IDTR_BASE, GUEST_PENDING_DEBUG,
        GUEST_SYSENTER_ESP, GUEST_SYSENTER_EIP;
    ReadWrite u32:
        GUEST_ES_LIMIT, GUEST_CS_LIMIT, GUEST_SS_LIMIT, GUEST_DS_LIMIT, GUEST_FS_LIMIT,
        GUEST_GS_LIMIT, GUEST_LDTR_LIMIT, GUEST_TR_LIMIT, GUEST_GDTR_LIMIT, GUEST_IDTR_LIMIT,
        GUEST_ES_RIGHTS, GUEST_CS_RIGHTS, GUEST_SS_RIGHTS, GUEST_DS_RIGHTS, GUEST_FS_RIGHTS,
        GUEST_GS_RIGHTS, GUEST_LDTR_RIGHTS, GUEST_TR_RIGHTS, GUEST_INTERRUPTIBILITY,
        GUEST_SYSENTER_CS, GUEST_ACTIVITY;
    ReadWrite u16:
        GUEST_ES_SELECTOR, GUEST_CS_SELECTOR, GUEST_SS_SELECTOR, GUEST_DS_SELECTOR,
        GUEST_FS_SELECTOR, GUEST_GS_SELECTOR, GUEST_LDTR_SELECTOR, GUEST_TR_SELECTOR, PML_INDEX,
        GUEST_INTERRUPT_STATUS;
    ReadWrite u64:
        GUEST_PDPTE0, GUEST_PDPTE1, GUEST_PDPTE2, GUEST_PDPTE3;
    ReadOnly u32:
        EXIT_REASON, EXIT_INTERRUPTION, EXIT_ERROR_CODE, IDT_VECTORING, IDT_VECTORING_ERROR,
        INSTRUCTION_LENGTH, INSTRUCTION_INFO;
    ReadOnly Natural:
        EXIT_QUALIFICATION;
    ReadOnly u64:
        GUEST_PHYSICAL_ADDRESS;
} }

slots! { Constant from 64 {
    ReadWrite u32:
        PIN_CONTROLS, PROC_CONTROLS, PROC_CONTROLS2, EXIT_CONTROLS, ENTRY_CONTROLS,
        EXCEPTION_BITMAP, TPR_THRESHOLD, ENTRY_INTERRUPTION, ENTRY_ERROR_CODE,
        ENTRY_INSTRUCTION_LENGTH, HOST_SYSENTER_CS, PAGE_FAULT_MASK, PAGE_FAULT_MATCH,
        EXIT_MSR_STORE_COUNT;
    ReadWrite u64:
        TSC_OFFSET, TSC_MULTIPLIER, GUEST_DEBUGCTL, GUEST_PAT, GUEST_EFER, HOST_PAT,
        HOST_EFER, GUEST_PERF_GLOBAL_CTRL, EOI_EXIT_0, EOI_EXIT_1, EOI_EXIT_2, EOI_EXIT_3, VMCS_LINK,
        VMREAD_BITMAP, VMWRITE_BITMAP, XSS_EXIT_BITMAP, EXIT_MSR_STORE_ADDR;
    Tagging u64:
        EPT_POINTER;
    ReadWrite Natural:
        CR0_MASK, CR0_SHADOW, CR4_MASK, CR4_SHADOW, HOST_CR0, HOST_CR3, HOST_CR4, HOST_FS_BASE,
        HOST_GS_BASE, HOST_TR_BASE, HOST_GDTR_BASE, HOST_IDTR_BASE, HOST_SYSENTER_ESP,
        HOST_SYSENTER_EIP;
    ReadWrite u16:
        VPID, HOST_CS_SELECTOR, HOST_SS_SELECTOR, HOST_TR_SELECTOR;
} }

// A group is the bits of one word: that is what makes forgetting it one store.
const _: () = assert!(Changing::ENCODINGS.len() <= GROUP && Constant::ENCODINGS.len() <= GROUP);

/// Values of [`key`].
const KEYS: usize = 512;
/// The field has no place.
const NOWHERE: u8 = u8::MAX;

/// Width, area and the lowest five bits of the index of a field: no two of ours have the same.
const fn key(encoding: u32) -> usize {
    ((encoding >> 13 & 3) << 7 | (encoding >> 10 & 3) << 5 | encoding >> 1 & 31) as usize
}

/// The place of every field, by its encoding.
static BY_FIELD: [u8; KEYS] = {
    let mut places = [NOWHERE; KEYS];
    let mut at = 0;
    while at < Changing::ENCODINGS.len() {
        places[key(Changing::ENCODINGS[at])] = at as u8;
        at += 1;
    }
    at = 0;
    while at < Constant::ENCODINGS.len() {
        // A collision is an error when this is compiled, and no field that is read in another's place.
        assert!(places[key(Constant::ENCODINGS[at])] == NOWHERE);
        places[key(Constant::ENCODINGS[at])] = (at + GROUP) as u8;
        at += 1;
    }
    places
};

/// The slot of a field, if it is one of the cache's.
#[inline(always)]
pub(crate) fn slot<W, A>(field: Field<W, A>) -> Option<Slot<W, A>> {
    // The mask is for the compiler: a key is below its bound by how it is made.
    let at = BY_FIELD[key(field.encoding()) & (KEYS - 1)];
    (at != NOWHERE).then_some(Slot { at, field })
}

/// The encoding of the field at a place.
fn encoding(at: usize) -> u32 {
    let found = match at.checked_sub(GROUP) {
        None => Changing::ENCODINGS.get(at),
        Some(at) => Constant::ENCODINGS.get(at),
    };
    found.copied().unwrap_or(0)
}

/// Fields of segment and table registers, as bits of the first group.
const SEGMENTS: u64 = {
    let (mut bits, mut at) = (0, 0);
    while at < Changing::ENCODINGS.len() {
        let encoding = Changing::ENCODINGS[at];
        // Selectors, limits with rights, and bases are three runs of encodings (SDM vol. 3D appendix B).
        let selector = encoding >= field::GUEST_ES_SELECTOR.encoding()
            && encoding <= field::GUEST_TR_SELECTOR.encoding();
        let other = encoding >= field::GUEST_ES_LIMIT.encoding()
            && encoding <= field::GUEST_TR_RIGHTS.encoding();
        let base = encoding >= field::GUEST_ES_BASE.encoding()
            && encoding <= field::GUEST_IDTR_BASE.encoding();
        if selector || other || base {
            bits |= 1 << at;
        }
        at += 1;
    }
    bits
};
const _: () = assert!(SEGMENTS.count_ones() == 36);

/// A field whose new values are counted ([`Fields::changes`]).
#[derive(Debug)]
pub(crate) struct Counted<W>(Slot<W, ReadWrite>);

macro_rules! counted {
    ($($width:ty: $($name:ident),*;)*) => {
        /// As bits of the second group.
        const COUNTED: u64 = 0 $($(| 1 << ($name.at as usize - GROUP))*)*;

        /// The fields of vmcs01 that L0's part of vmcs02 follows from. What it is made from has a type that no other field gives.
        pub(crate) mod counted {
            use super::{Counted, Natural};

            $($(pub(crate) const $name: Counted<$width> = Counted(super::$name);)*)*
        }
    };
}

counted! {
    u32: PROC_CONTROLS, PROC_CONTROLS2, EXIT_CONTROLS, ENTRY_CONTROLS, EXCEPTION_BITMAP;
    Natural: CR0_MASK, CR4_MASK;
}

impl<W> Counted<W> {
    /// Its place in the cache.
    #[inline(always)]
    pub(crate) const fn slot(self) -> Slot<W, ReadWrite> {
        self.0
    }
}

/// What is known of a VMCS. It lies behind one pointer, so that two VMCSs change places cheaply.
#[derive(Debug)]
pub(crate) struct Fields {
    /// The place's value is what the VMCS holds, or will hold.
    known: [Cell<u64>; 2],
    /// It has to be written yet.
    unwritten: [Cell<u64>; 2],
    values: [Cell<u64>; PLACES],
    /// How often one of [`counted`] got another value, or was read for the first time.
    changes: Cell<u64>,
    /// Where the VMCS is active, and where it ran.
    pub(crate) cpus: Cpus,
}

/// What is to be done with a field's new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// Nothing: the VMCS has it.
    Unchanged,
    /// It is to be written: now, or when the VMCS is current.
    Changed,
}

impl Fields {
    /// Nothing is known.
    pub(crate) const fn new() -> Self {
        Self {
            known: [const { Cell::new(0) }; 2],
            unwritten: [const { Cell::new(0) }; 2],
            values: [const { Cell::new(0) }; PLACES],
            changes: Cell::new(0),
            cpus: Cpus::NONE,
        }
    }

    #[inline(always)]
    fn place<W, A>(slot: Slot<W, A>) -> (usize, u64, usize) {
        let at = usize::from(slot.at) % PLACES;
        (at / GROUP, 1 << (at % GROUP), at)
    }

    /// The value where it is known.
    #[inline(always)]
    pub(crate) fn get<W: Width, A>(&self, slot: Slot<W, A>) -> Option<W::Value> {
        let (group, bit, at) = Self::place(slot);
        // Known in either sense: read since the last exit, or set since then.
        (self.known[group].get() & bit != 0).then(|| W::from_raw(self.values[at].get()))
    }

    /// The value that was kept last, of a field that is read at every exit.
    #[inline(always)]
    pub(crate) fn last<W: Width, A>(&self, slot: Slot<W, A>) -> W::Value {
        let (_, _, at) = Self::place(slot);
        // Right behind an exit it is that exit's: the turn keeps the reason before anything else happens.
        W::from_raw(self.values[at].get())
    }

    /// Keeps what was read.
    #[inline(always)]
    pub(crate) fn learn<W: Width, A>(&self, slot: Slot<W, A>, raw: u64) {
        let (group, bit, at) = Self::place(slot);
        self.values[at].set(raw);
        // Both words are the thread's own: no store here needs an order.
        self.known[group].set(self.known[group].get() | bit);
        // Here, where every new value comes by: who changes a word need not know that something follows from it.
        if group == 1 && bit & COUNTED != 0 {
            self.changes.set(self.changes.get().wrapping_add(1));
        }
    }

    /// How often a field that L0's part of vmcs02 follows from has got another value: while it is the same, so are they.
    #[inline(always)]
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Keeps a new value.
    #[inline(always)]
    pub(crate) fn set<W: Width>(&self, slot: Slot<W, ReadWrite>, value: W::Value) -> Set {
        self.put(slot, value)
    }

    /// Keeps a new tag. Changed: the CPU may hold old translations under it.
    #[inline]
    #[must_use]
    pub(crate) fn set_tag(&self, slot: Slot<u64, Tagging>, value: u64) -> Set {
        self.put(slot, value)
    }

    #[inline(always)]
    fn put<W: Width, A>(&self, slot: Slot<W, A>, value: W::Value) -> Set {
        let raw = value.into();
        let (group, bit, at) = Self::place(slot);
        // The comparison is cheaper than a VMWRITE.
        if self.known[group].get() & bit != 0 && self.values[at].get() == raw {
            return Set::Unchanged;
        }
        // What is known from here on is what will be in the VMCS, written or not.
        self.learn(slot, raw);
        Set::Changed
    }

    /// A new value could not be written yet.
    pub(crate) fn defer<W, A>(&self, slot: Slot<W, A>) {
        let (group, bit, _) = Self::place(slot);
        self.unwritten[group].set(self.unwritten[group].get() | bit);
    }

    /// The guest ran: of the changing fields nothing is known.
    #[inline(always)]
    pub(crate) fn forget(&self) {
        // Nothing is lost that was to be written: before an entry `load` has written it all, and behind it a field is
        // written when it is set.
        self.known[0].set(0);
    }

    /// The segments were written without the cache, but for the rights of SS: of them nothing is known, and nothing
    /// waits.
    pub(crate) fn forget_segments(&self) {
        // The rights of SS were set by the cache, along with the others: only these are known.
        const WITHOUT: u64 = SEGMENTS & !(1 << GUEST_SS_RIGHTS.at);
        self.known[0].set(self.known[0].get() & !WITHOUT);
        // Of all of them: what waited would overwrite what was written.
        self.unwritten[0].set(self.unwritten[0].get() & !SEGMENTS);
    }

    /// Whether something waits to be written.
    #[inline]
    pub(crate) fn has_unwritten(&self) -> bool {
        (self.unwritten[0].get() | self.unwritten[1].get()) != 0
    }

    /// Hands out what waits to be written, as encodings and values.
    pub(crate) fn write_all(&self, mut write: impl FnMut(u32, u64)) {
        for (group, bits) in self.unwritten.iter().enumerate() {
            // Taken before it is written: what is set meanwhile waits for the next time.
            let mut left = bits.replace(0);
            while left != 0 {
                let at = group * GROUP + left.trailing_zeros() as usize;
                left &= left - 1;
                if let Some(value) = self.values.get(at) {
                    write(encoding(at), value.get());
                }
            }
        }
    }
}

impl<W, A> Slot<W, A> {
    /// What VMREAD and VMWRITE take.
    #[inline(always)]
    pub(crate) const fn encoding(self) -> u32 {
        self.field.encoding()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_exit_forgets_what_the_guest_changes_and_nothing_else() {
        let fields = Fields::new();
        fields.learn(GUEST_RIP, 5);
        fields.learn(PROC_CONTROLS, 6);
        fields.forget();
        assert_eq!((fields.get(GUEST_RIP), fields.get(PROC_CONTROLS)), (None, Some(6)));
    }

    #[test]
    fn each_new_value_of_a_counted_field_is_a_change_and_no_other() {
        let fields = Fields::new();
        let words =
            [PROC_CONTROLS, PROC_CONTROLS2, EXIT_CONTROLS, ENTRY_CONTROLS, EXCEPTION_BITMAP];
        for (at, slot) in words.into_iter().enumerate() {
            let before = fields.changes();
            let _ = fields.set(slot, 7);
            assert_eq!(fields.changes(), before + 1, "set: {at}");
            let _ = fields.set(slot, 7);
            assert_eq!(fields.changes(), before + 1, "the same: {at}");
            fields.learn(slot, 8);
            assert_eq!(fields.changes(), before + 2, "read: {at}");
        }
        for (at, slot) in [CR0_MASK, CR4_MASK].into_iter().enumerate() {
            let before = fields.changes();
            let _ = fields.set(slot, 7);
            assert_eq!(fields.changes(), before + 1, "mask: {at}");
        }
        let before = fields.changes();
        // Their places are other groups' as well: those of the guest's registers change at each exit.
        for slot in [GUEST_RIP, GUEST_RSP, GUEST_RFLAGS, GUEST_CR0, GUEST_CR3, GUEST_CR4] {
            let _ = fields.set(slot, 1);
        }
        let _ = (fields.set(TSC_OFFSET, 1), fields.set(HOST_CR3, 1));
        assert_eq!(fields.changes(), before);
    }

    #[test]
    fn the_same_value_is_no_write() {
        let fields = Fields::new();
        assert_eq!(fields.set(GUEST_RIP, 0), Set::Changed);
        assert_eq!(fields.set(GUEST_RIP, 0), Set::Unchanged);
        fields.forget();
        assert_eq!(fields.set(GUEST_RIP, 0), Set::Changed);
    }

    #[test]
    fn a_place_is_written_to_the_field_that_it_stands_for() {
        let fields = Fields::new();
        for n in 0..PLACES {
            fields.values[n].set(n as u64);
        }
        for slot in [GUEST_RIP, GUEST_DR7, CR0_MASK, HOST_CR3] {
            fields.defer(slot);
        }
        fields.defer(GUEST_TR_SELECTOR);
        fields.defer(VPID);
        let mut written = std::vec::Vec::new();
        fields.write_all(|encoding, value| written.push((encoding, value)));
        let of = |encoding: u32, at: u8| (encoding, u64::from(at));
        let expected = [
            of(field::GUEST_RIP.encoding(), GUEST_RIP.at),
            of(field::GUEST_DR7.encoding(), GUEST_DR7.at),
            of(field::GUEST_TR_SELECTOR.encoding(), GUEST_TR_SELECTOR.at),
            of(field::CR0_MASK.encoding(), CR0_MASK.at),
            of(field::HOST_CR3.encoding(), HOST_CR3.at),
            of(field::VPID.encoding(), VPID.at),
        ];
        assert_eq!(written, expected);
        assert!(!fields.has_unwritten());
    }

    proptest! {
        /// A VMCS that is written only as the cache says holds what was set last.
        #[test]
        fn the_cache_and_the_vmcs_never_disagree(
            steps in proptest::collection::vec((0u8..6, any::<u64>()), 1..60),
        ) {
            let fields = Fields::new();
            let (mut stored, mut meant) = (0u64, 0u64);
            fields.learn(GUEST_CR3, 0);
            let mut current = false;
            for (step, value) in steps {
                match step {
                    // Set to something that is often the same.
                    0..=2 => {
                        meant = value % 3;
                        if fields.set(GUEST_CR3, meant) == Set::Changed {
                            if current { stored = meant } else { fields.defer(GUEST_CR3) }
                        }
                    }
                    // The loop is entered, the guest runs, the loop is left.
                    3 => {
                        fields.write_all(|_, v| stored = v);
                        prop_assert_eq!(stored, meant);
                        current = true;
                    }
                    4 if current => {
                        (stored, meant) = (value, value);
                        fields.forget();
                    }
                    _ => current = false,
                }
                if let Some(known) = fields.get(GUEST_CR3) {
                    prop_assert_eq!(known, meant);
                }
            }
        }
    }
}
