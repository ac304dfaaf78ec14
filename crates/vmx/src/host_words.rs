//! L1's segments after an exit of L2, as vmcs01 takes them: made when L1 changes its VMCS's host state, and written at
//! each exit. What they were before is not known: L1 loads segments without an exit.

use backend::SegmentName;
use cpu::Cpu;
use nested_vmx::leave::host::Segments;
use x86::Segment;

use crate::{fields, segments};

/// Fields of eight segments and two tables.
const FIELDS: usize = 8 * 4 + 2 * 2;

/// Encodings and values.
#[derive(Debug)]
pub(crate) struct HostWords {
    words: [(u32, u64); FIELDS],
    used: usize,
}

impl HostWords {
    pub(crate) const NONE: Self = Self { words: [(0, 0); FIELDS], used: 0 };

    /// Makes the words anew.
    #[cold]
    #[inline(never)]
    pub(crate) fn make(&mut self, s: &Segments, long: bool) {
        self.used = 0;
        for (name, segment) in [
            (SegmentName::Es, &s.es),
            (SegmentName::Cs, &s.cs),
            (SegmentName::Ss, &s.ss),
            (SegmentName::Ds, &s.ds),
            (SegmentName::Fs, &s.fs),
            (SegmentName::Gs, &s.gs),
            (SegmentName::Ldtr, &s.ldtr),
            (SegmentName::Tr, &s.tr),
        ] {
            self.add_segment(name, segment, long);
        }
        for (base, limit, table) in [
            (fields::GUEST_GDTR_BASE, fields::GUEST_GDTR_LIMIT, s.gdtr),
            (fields::GUEST_IDTR_BASE, fields::GUEST_IDTR_LIMIT, s.idtr),
        ] {
            self.add(base.encoding(), table.base);
            self.add(limit.encoding(), table.limit.into());
        }
    }

    /// Base and limit of a register that cannot be used are undefined after an exit, but for the bases of FS and GS
    /// (SDM vol. 3C §28.5.2).
    fn add_segment(&mut self, name: SegmentName, segment: &Segment, long: bool) {
        let places = segments::places(name);
        let usable = segment.is_present();
        self.add(places.selector.encoding(), segment.selector.into());
        self.add(places.rights.encoding(), segments::rights_for(name, segment, long).into());
        if usable || matches!(name, SegmentName::Fs | SegmentName::Gs) {
            self.add(places.base.encoding(), segment.base);
        }
        if usable {
            self.add(places.limit.encoding(), segment.limit.into());
        }
    }

    fn add(&mut self, encoding: u32, value: u64) {
        if let Some(word) = self.words.get_mut(self.used) {
            *word = (encoding, value);
            self.used = self.used.wrapping_add(1);
        }
    }

    /// Writes the words into the VMCS that is current.
    #[inline]
    pub(crate) fn write(&self, cpu: &impl Cpu) {
        for (encoding, value) in self.words.iter().take(self.used) {
            cpu.vmwrite(*encoding, *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use x86::{DescriptorTable, segment::attr};

    use super::*;

    #[test]
    fn an_unusable_segment_has_no_base_and_limit_to_be_written() {
        let flat =
            Segment { base: 0, limit: u32::MAX, selector: 0x18, attr: attr::P | attr::S | 3 };
        let null = Segment { base: 0x77, limit: 1, selector: 0, attr: 0 };
        let table = DescriptorTable { base: 0x5000, limit: 0xffff };
        let mut s = Segments {
            es: flat,
            cs: flat,
            ss: flat,
            ds: flat,
            fs: flat,
            gs: flat,
            tr: flat,
            ldtr: null,
            gdtr: table,
            idtr: table,
        };
        let mut words = HostWords::NONE;
        words.make(&s, true);
        assert_eq!(words.used, FIELDS - 2);
        (s.ds, s.fs) = (null, null);
        words.make(&s, true);
        assert_eq!(words.used, FIELDS - 5);
        let has = |encoding: u32| words.words[..words.used].iter().find(|w| w.0 == encoding);
        assert_eq!(has(fields::GUEST_FS_BASE.encoding()), Some(&(0x680e, 0x77)));
        assert_eq!(has(fields::GUEST_DS_BASE.encoding()), None);
        assert_eq!(has(fields::GUEST_DS_RIGHTS.encoding()), Some(&(0x481a, 0x1_0001)));
    }
}
