//! The private copy of a VMCS that L1 has made.

use x86::Gpa;
use x86::vmcs::controls::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2};
use x86::vmcs::field::{self, Field, Width};
use x86::vmcs::place::{self, Named, Served, VMCS12_BYTES, VMCS12_REVISION};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Words of eight bytes in the image.
const WORDS: usize = VMCS12_BYTES / 8;

/// Access rights that VMWRITE keeps; it drops the reserved ones, as some CPUs and stock KVM do.
const RIGHTS: u64 = 0x1_f0ff;

/// A VMCS12: the image of KVM's `struct vmcs12`, byte for byte.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Vmcs12 {
    words: [u64; WORDS],
}

impl Default for Vmcs12 {
    fn default() -> Self {
        Self::ZERO
    }
}

/// The word at whose place a field begins, and how many bits above the word's bit 0.
const fn position(offset: u16) -> (usize, u32) {
    // The index is masked: a constant table cannot lead out of the image, and the compiler sees that.
    ((offset >> 3) as usize & (WORDS - 1), (offset & 7) as u32 * 8)
}

impl Vmcs12 {
    /// All bytes zero.
    pub(crate) const ZERO: Self = Self { words: [0; WORDS] };
    /// The link pointer, and any other pointer, that points nowhere.
    pub const NOWHERE: u64 = u64::MAX;

    /// An image with the right revision and all fields zero.
    pub fn new() -> Self {
        let mut new = Self::default();
        // Only the revision: launch state and abort indicator are zero.
        new.words[0] = u64::from(VMCS12_REVISION);
        new
    }

    /// Makes it an image with the right revision and all fields zero, in place.
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
        self.words[0] = u64::from(VMCS12_REVISION);
    }

    /// The image, by words.
    pub(crate) fn words(&self) -> &[u64; WORDS] {
        &self.words
    }

    /// Bits 31:0 of the region: revision, and bit 31, which makes it a shadow VMCS.
    #[inline]
    // The abort indicator lies above.
    pub fn header(&self) -> u32 {
        self.words[0] as u32
    }

    /// Whether the region is a shadow VMCS.
    #[inline]
    pub fn is_shadow(&self) -> bool {
        self.header() & 1 << 31 != 0
    }

    /// Sets the VMX-abort indicator (SDM vol. 3C §28.7).
    pub fn set_abort(&mut self, indicator: u32) {
        // The revision stays.
        self.words[0] = self.words[0] as u32 as u64 | u64::from(indicator) << 32;
    }

    /// Whether VMLAUNCH has entered a guest with it since VMCLEAR.
    #[inline]
    pub fn is_launched(&self) -> bool {
        // Any value but 0 is launched: L1 may have written the region by itself.
        self.words[1] as u32 != 0
    }

    /// Sets the launch state.
    pub fn set_launched(&mut self, launched: bool) {
        // The word's upper half is of KVM's own padding, and is kept.
        self.words[1] = self.words[1] & !0xffff_ffff | u64::from(launched);
    }

    /// The value of a field; 0 if the VMCS12 does not have it.
    #[inline]
    pub fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        // The compiler knows the place of a constant field: no look-up is left.
        match place::place(field.encoding()) {
            Some(place) => {
                let (word, bit) = position(place.offset);
                W::from_raw(self.words[word & (WORDS - 1)] >> bit)
            }
            // Fields that newer CPUs have and the image has not: nobody has set them.
            None => W::from_raw(0),
        }
    }

    /// Sets a field. Nothing happens if the VMCS12 does not have it.
    #[inline]
    pub fn set<W: Width, A>(&mut self, field: Field<W, A>, value: W::Value) {
        if let Some(named) = place::find(u64::from(field.encoding())) {
            self.store(named, value.into());
        }
    }

    // Mask, then shift: the upper half of a 64-bit field is asked for by an encoding of its own.
    /// What VMREAD of a field gives.
    #[inline]
    pub fn read(&self, named: Named) -> u64 {
        let (word, bit) = position(named.place.offset);
        (self.words[word & (WORDS - 1)] >> bit & named.mask) >> (named.shift & 63)
    }

    /// What VMWRITE of a field does. True: the field has another value now.
    #[inline]
    pub fn write(&mut self, encoding: u64, named: Named, value: u64) -> bool {
        // By number: access rights lie side by side, two apart.
        let first = u64::from(field::GUEST_ES_RIGHTS.encoding());
        let last = u64::from(field::GUEST_TR_RIGHTS.encoding());
        let kept = if (first..=last).contains(&encoding) { value & RIGHTS } else { value };
        self.store(named, kept)
    }

    /// The value of a field that a shadow VMCS holds.
    #[inline]
    pub(crate) fn served(&self, served: &Served) -> u64 {
        let (word, bit) = position(served.place.offset);
        self.words[word & (WORDS - 1)] >> bit & served.mask
    }

    /// Sets a field to what a shadow VMCS holds. True: the field has another value now.
    #[inline]
    // Masked and shifted within one word: no field lies in two.
    pub(crate) fn take_served(&mut self, served: &Served, value: u64) -> bool {
        let (word, bit) = position(served.place.offset);
        let word = &mut self.words[word & (WORDS - 1)];
        let new = *word & !(served.mask << bit) | (value & served.mask) << bit;
        let differs = *word != new;
        *word = new;
        differs
    }

    /// Sets a field to what the hardware's VMCS has.
    pub(crate) fn put(&mut self, named: Named, value: u64) {
        // Of a field that L0 composed L1 is told what the hardware says, whatever it was.
        self.store(named, value);
    }

    fn store(&mut self, named: Named, value: u64) -> bool {
        let (word, bit) = position(named.place.offset);
        let word = &mut self.words[word & (WORDS - 1)];
        let mask = named.mask << bit;
        let new = *word & !mask | (value << (named.shift & 63) & named.mask) << bit;
        let differs = *word != new;
        *word = new;
        differs
    }

    /// VMCS12's pin-based controls.
    #[inline]
    pub fn pin(&self) -> PinControls {
        PinControls::from_bits_retain(self.get(field::PIN_CONTROLS))
    }

    /// Primary processor-based controls.
    #[inline]
    pub fn primary(&self) -> ProcControls {
        ProcControls::from_bits_retain(self.get(field::PROC_CONTROLS))
    }

    /// Secondary processor-based controls; none if the primary ones do not activate them.
    #[inline]
    pub fn secondary(&self) -> ProcControls2 {
        // What stands in the field without its activation counts for nothing (§25.6.2).
        if !self.primary().contains(ProcControls::SECONDARY) {
            return ProcControls2::empty();
        }
        ProcControls2::from_bits_retain(self.get(field::PROC_CONTROLS2))
    }

    /// VMCS12's VM-exit controls.
    #[inline]
    pub fn exit(&self) -> ExitControls {
        ExitControls::from_bits_retain(self.get(field::EXIT_CONTROLS))
    }

    /// VMCS12's VM-entry controls.
    #[inline]
    pub fn entry(&self) -> EntryControls {
        EntryControls::from_bits_retain(self.get(field::ENTRY_CONTROLS))
    }

    /// Where the shadow VMCS lies that serves L2's VMREAD and VMWRITE, if L1 has given one.
    pub fn shadow_pointer(&self) -> Option<Gpa> {
        // All ones is nowhere; 0 is a page like any other.
        let link = self.get(field::VMCS_LINK);
        let used = self.secondary().contains(ProcControls2::SHADOW_VMCS) && link != Self::NOWHERE;
        used.then_some(Gpa(link))
    }

    /// The APIC-access page, if L2's accesses to it are not those to memory.
    pub fn apic_access_page(&self) -> Option<Gpa> {
        let used = self.secondary().contains(ProcControls2::VIRTUALIZE_APIC_ACCESSES);
        used.then(|| Gpa(self.get(field::APIC_ACCESS_ADDR)))
    }

    /// Whether L2's physical addresses lead elsewhere than L1's.
    #[inline]
    pub fn has_own_root(&self) -> bool {
        self.secondary()
            .intersects(ProcControls2::EPT.union(ProcControls2::VIRTUALIZE_APIC_ACCESSES))
    }

    /// Whether L2 runs with EPT of L1's.
    #[inline]
    pub fn has_ept(&self) -> bool {
        self.secondary().contains(ProcControls2::EPT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_lies_where_kvm_has_it_and_nowhere_else() {
        let mut image = Vmcs12::new();
        image.set(field::GUEST_RIP, 0x1122_3344_5566_7788);
        image.set(field::PROC_CONTROLS, 0xaabb_ccdd);
        image.set(field::HOST_TR_SELECTOR, 0x40);
        image.set(field::EXIT_REASON, 10);
        image.set_launched(true);
        let bytes = image.as_bytes();
        assert_eq!(bytes[..4], 0x11e5_7ed0u32.to_le_bytes());
        assert_eq!(bytes[8..12], 1u32.to_le_bytes());
        assert_eq!(bytes[544..552], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(bytes[748..752], 0xaabb_ccddu32.to_le_bytes());
        assert_eq!(bytes[994..996], 0x40u16.to_le_bytes());
        assert_eq!(bytes[812..816], 10u32.to_le_bytes());
        assert_eq!(bytes.iter().filter(|b| **b != 0).count(), 4 + 1 + 8 + 4 + 1 + 1);
    }

    #[test]
    fn halves_of_a_64_bit_field_are_apart() {
        let mut image = Vmcs12::new();
        let at = |e| place::find(e).unwrap();
        image.write(0x2010, at(0x2010), 0x1111_2222_3333_4444);
        image.write(0x2011, at(0x2011), 0xdead_5555_6666);
        assert_eq!(image.get(field::TSC_OFFSET), 0x5555_6666_3333_4444);
        assert_eq!(image.read(at(0x2011)), 0x5555_6666);
    }

    #[test]
    fn reserved_access_rights_are_dropped() {
        let mut image = Vmcs12::new();
        let encoding = u64::from(field::GUEST_CS_RIGHTS.encoding());
        image.write(encoding, place::find(encoding).unwrap(), u64::MAX);
        assert_eq!(image.get(field::GUEST_CS_RIGHTS), 0x1_f0ff);
    }

    #[test]
    fn secondary_controls_need_their_activation() {
        let mut image = Vmcs12::new();
        image.set(field::PROC_CONTROLS2, 2);
        assert!(!image.has_ept());
        image.set(field::PROC_CONTROLS, 1 << 31);
        assert!(image.has_ept());
    }
}
