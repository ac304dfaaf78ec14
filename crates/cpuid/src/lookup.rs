//! The answer to a CPUID exit.
//!
//! The most recent answers stand in a small direct-mapped table, so that the usual exit is one
//! compare and one copy. A few answers follow the machine state (CR4, APIC base, XCR0, XSS); they
//! are computed anew only when one of these inputs differs from last time, and never with CPUID.

use crate::Entry;
use crate::guest::{GuestCpuid, NONE, find, position};
use x86::cpuid::leaf;
use xstate::Layout;

/// Lines of the answer table: few guests ask for more than a handful of leaves in a row, and a
/// vCPU is made on the kernel's small stack.
pub(crate) const LINES: usize = 8;

/// Machine state that CPUID answers depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DynamicInputs {
    /// CR4.OSXSAVE, shown in leaf 1.
    pub cr4_osxsave: bool,
    /// CR4.PKE, shown in leaf 7.
    pub cr4_pke: bool,
    /// The local APIC is globally enabled, shown in leaf 1.
    pub apic_enabled: bool,
    /// XCR0, on which the sizes of leaf 0xD depend.
    pub xcr0: u64,
    /// IA32_XSS, likewise.
    pub xss: u64,
}

/// A cached answer.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Line {
    /// Leaf in the low half, subleaf in the high half.
    key: u64,
    answer: [u32; 4],
    /// The answer depends on [`DynamicInputs`].
    dynamic: bool,
}

/// Every line holds a key that belongs to another line, and so never hits.
pub(crate) const INVALID: [Line; LINES] = {
    let mut lines = [Line { key: 0, answer: [0; 4], dynamic: false }; LINES];
    let mut i = 0;
    while i < LINES {
        lines[i].key = ((i + 1) % LINES) as u64;
        i += 1;
    }
    lines
};

#[inline]
const fn key(leaf: u32, subleaf: u32) -> u64 {
    leaf as u64 | (subleaf as u64) << 32
}

/// Spreads the leaves that guests ask for: basic, hypervisor and extended ones start at different
/// lines, subleaves follow each other.
#[inline]
const fn line_of(leaf: u32, subleaf: u32) -> usize {
    (leaf.wrapping_add(leaf >> 28).wrapping_add(subleaf) as usize) % LINES
}

impl GuestCpuid {
    /// EAX, EBX, ECX, EDX for a guest that executed CPUID with these inputs.
    #[inline]
    pub fn lookup(&mut self, leaf: u32, subleaf: u32, inputs: &DynamicInputs) -> [u32; 4] {
        match self.hit(leaf, subleaf, || *inputs) {
            Some(answer) => answer,
            None => self.lookup_in_table(leaf, subleaf, inputs),
        }
    }

    /// The answer, if it stands in the small table and is up to date. The machine state is gathered
    /// only where the answer depends on it: most leaves do not.
    #[inline]
    pub fn hit(
        &self,
        leaf: u32,
        subleaf: u32,
        inputs: impl FnOnce() -> DynamicInputs,
    ) -> Option<[u32; 4]> {
        let line = self.lines.get(line_of(leaf, subleaf))?;
        let hit = line.key == key(leaf, subleaf) && (!line.dynamic || self.inputs == inputs());
        hit.then_some(line.answer)
    }

    #[cold]
    fn lookup_in_table(&mut self, leaf: u32, subleaf: u32, inputs: &DynamicInputs) -> [u32; 4] {
        self.refresh(inputs);
        let (answer, at) = self.search(leaf, subleaf);
        if let Some(line) = self.lines.get_mut(line_of(leaf, subleaf)) {
            *line = Line { key: key(leaf, subleaf), answer, dynamic: self.dynamic.includes(at) };
        }
        answer
    }

    /// The answer and where its entry stands ([`NONE`] for an answer of no entry).
    fn search(&self, leaf: u32, subleaf: u32) -> ([u32; 4], u16) {
        let entries = &self.entries;
        let mut effective = leaf;
        let mut found = position(entries, leaf, subleaf);
        if found.is_none()
            && let Some(last) = self.out_of_range(leaf)
        {
            effective = last;
            found = position(entries, last, subleaf);
        }
        if let Some(at) = found {
            let answer = entries.get(usize::from(at)).map_or([0; 4], Entry::answer);
            return (answer, at);
        }
        // The topology leaves pass CL through and give the x2APIC id in EDX even for a level that
        // does not exist, as long as the leaf does (SDM vol. 2A "CPUID", leaf 0BH).
        if matches!(effective, leaf::TOPOLOGY | leaf::TOPOLOGY_V2)
            && let Some(level) = find(entries, effective, 1)
        {
            return ([0, 0, subleaf & 0xff, level.edx], NONE);
        }
        ([0; 4], NONE)
    }

    /// The leaf that answers for `leaf` when that lies beyond the end of its class: the highest
    /// basic leaf (SDM vol. 2A "CPUID"). `None` where the answer is zeros: within the class, on
    /// AMD (APM vol. 3 §E.2), and without leaf 0.
    fn out_of_range(&self, leaf: u32) -> Option<u32> {
        let entries = &self.entries;
        let basic = find(entries, leaf::VENDOR, 0)?;
        if self.vendor.is_amd_like() {
            return None;
        }
        let class = match leaf {
            0x4000_0000..=0x4fff_ffff => leaf & 0xffff_ff00,
            leaf::CENTAUR.. => leaf::CENTAUR,
            _ => leaf & 0x8000_0000,
        };
        match find(entries, class, 0) {
            Some(first) if leaf <= first.eax => None,
            _ => Some(basic.eax),
        }
    }

    /// Brings the dynamic bits up to date with `inputs`, if they are not.
    pub(crate) fn refresh(&mut self, inputs: &DynamicInputs) {
        let layout = self.layout;
        self.refresh_by(inputs, |components, compacted| {
            layout.required_size(components, compacted)
        });
    }

    /// The same with sizes that are computed by executing CPUID for each component of each format:
    /// what `xstate_cache=0` measures against.
    #[cold]
    pub fn refresh_with(
        &mut self,
        inputs: &DynamicInputs,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
    ) {
        self.refresh_by(inputs, |components, compacted| {
            Layout::required_size_uncached(components, compacted, &mut cpuid)
        });
    }

    fn refresh_by(&mut self, inputs: &DynamicInputs, mut size: impl FnMut(u64, bool) -> u32) {
        if self.fresh && self.inputs == *inputs {
            return;
        }
        self.inputs = *inputs;
        self.fresh = true;
        self.updates = self.updates.wrapping_add(1);
        // Cached answers of dynamic entries are those of other inputs now.
        for (line, invalid) in self.lines.iter_mut().zip(INVALID) {
            if line.dynamic {
                *line = invalid;
            }
        }
        for at in self.dynamic.positions() {
            let Some(entry) = self.entries.get_mut(usize::from(at)) else { continue };
            let bits = self.dynamic.bits_at(at, entry, inputs, &mut size);
            bits.apply(entry);
        }
    }
}
