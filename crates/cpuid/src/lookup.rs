//! The answer to a CPUID exit.
//!
//! The most recent answers stand in a small direct-mapped table, so that the usual exit is one
//! compare and one copy. A few answers follow the machine state (CR4, APIC base, XCR0, XSS); they
//! are computed anew only when one of these inputs differs from last time, and never with CPUID.
//!
//! Why the CPU's own CPUID is never asked here: it serialises, a few hundred cycles, and where the host is a guest itself
//! it is an exit, many thousands. Everything was read once, when the module was loaded.
//!
//! Why answers are kept by leaf at all: the table that the VMM gave is a list of up to 256 entries, and guests ask for the
//! same few leaves, one of them in every loop that serialises by CPUID.

use crate::dynamic::DynamicInputs;
use crate::entry::{Entry, NONE, find, position};
use crate::guest::GuestCpuid;
use crate::lines::{INVALID, Line};
use x86::cpuid::leaf;
use xstate::{Form, Layout};

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
        let line = self.lines.get(Line::place(leaf, subleaf))?;
        // The key first: state is gathered for a line that would answer, and for no other.
        let hit = line.is_for(leaf, subleaf) && (!line.dynamic || self.inputs == inputs());
        hit.then_some(line.answer)
    }

    #[cold]
    fn lookup_in_table(&mut self, leaf: u32, subleaf: u32, inputs: &DynamicInputs) -> [u32; 4] {
        // Before the search: the entry that is found has to be of these inputs.
        self.refresh(inputs);
        let (answer, at) = self.search(leaf, subleaf);
        if let Some(line) = self.lines.get_mut(Line::place(leaf, subleaf)) {
            // What stood there goes: the guest asks again for what it asked last.
            *line = Line::new(leaf, subleaf, answer, self.dynamic.includes(at));
        }
        answer
    }

    /// The answer and where its entry stands ([`NONE`] for an answer of no entry).
    fn search(&self, leaf: u32, subleaf: u32) -> ([u32; 4], u16) {
        let entries = &self.entries;
        let mut effective = leaf;
        let mut found = position(entries, leaf, subleaf);
        if found.is_none()
            // Only where there is no entry: a VMM may give leaves beyond the last one it names.
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
        // By the vendor that the guest sees: it expects that vendor's answer.
        if self.vendor.is_amd_like() {
            return None;
        }
        let class = match leaf {
            // Hypervisors may stand one behind the other, 0x100 apart: each is a class with an end
            // of its own.
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
        self.refresh_by(inputs, |components, form| layout.required_size(components, form));
    }

    /// Brings the dynamic bits up to date with sizes that are computed by executing CPUID for each
    /// component of each format: what `xstate_cache=0` measures against.
    #[cold]
    pub fn refresh_with(
        &mut self,
        inputs: &DynamicInputs,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
    ) {
        self.refresh_by(inputs, |components, form| {
            Layout::required_size_uncached(components, form, &mut cpuid)
        });
    }

    fn refresh_by(&mut self, inputs: &DynamicInputs, mut size: impl FnMut(u64, Form) -> u32) {
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
            // What the table does not have stands at NONE, which is behind its end.
            let Some(entry) = self.entries.get_mut(usize::from(at)) else { continue };
            let bits = self.dynamic.bits_at(at, entry, inputs, &mut size);
            // Into the table itself: the next look-up is a plain copy.
            bits.apply(entry);
        }
    }
}
