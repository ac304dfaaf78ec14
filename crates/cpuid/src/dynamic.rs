//! The few bits of a CPUID table that follow the machine state instead of the VMM.
//!
//! SDM vol. 2A "CPUID": OSXSAVE and the APIC flag in leaf 1, OSPKE in leaf 7, the current sizes in
//! leaf 0xD. KVM adds two of its own: MONITOR after MISC_ENABLE, and PV_UNHALT.

use xstate::Form;

use crate::entry::{Entry, NONE};
use x86::cpuid::feature;

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
    /// IA32_XSS, on which the compacted size of leaf 0xD depends.
    pub xss: u64,
}

/// Where the entries with such bits stand in the table, and which of the bits apply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dynamic {
    // Positions and not pointers: the table is moved as a whole when it is set.
    pub(crate) features: u16,
    pub(crate) extended: u16,
    pub(crate) xsave: u16,
    pub(crate) xsave_compacted: u16,
    pub(crate) pv: u16,
    pub(crate) host_xsave: bool,
    pub(crate) host_pku: bool,
    /// MONITOR follows MISC_ENABLE bit 18, if it follows anything.
    pub(crate) mwait: Option<bool>,
    /// HLT does not exit: PV_UNHALT must not be offered.
    pub(crate) hlt_in_guest: bool,
}

/// Bits of one entry and the values they have now.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bits {
    mask: [u32; 4],
    value: [u32; 4],
}

impl Bits {
    const EAX: usize = 0;
    const EBX: usize = 1;
    const ECX: usize = 2;
    const EDX: usize = 3;

    fn with<const REG: usize>(mut self, mask: u32, value: u32) -> Self {
        self.mask[REG] |= mask;
        // Cut, so that a value can never reach beyond its bits.
        self.value[REG] |= value & mask;
        self
    }

    fn flag<const REG: usize>(self, mask: u32, on: bool) -> Self {
        self.with::<REG>(mask, if on { mask } else { 0 })
    }

    /// Writes the bits into the entry.
    pub(crate) fn apply(&self, entry: &mut Entry) {
        let registers = [&mut entry.eax, &mut entry.ebx, &mut entry.ecx, &mut entry.edx];
        for ((register, mask), value) in registers.into_iter().zip(self.mask).zip(self.value) {
            // All else stays the VMM's.
            *register = *register & !mask | value;
        }
    }

    /// The entry without the bits.
    pub(crate) fn cleared(&self, entry: &Entry) -> Entry {
        let mut entry = *entry;
        Self { mask: self.mask, value: [0; 4] }.apply(&mut entry);
        entry
    }
}

impl Dynamic {
    pub(crate) const NONE: Self = Self {
        features: NONE,
        extended: NONE,
        xsave: NONE,
        xsave_compacted: NONE,
        pv: NONE,
        host_xsave: false,
        host_pku: false,
        mwait: None,
        hlt_in_guest: false,
    };

    /// The entries concerned; [`NONE`] among them names no entry.
    pub(crate) const fn positions(&self) -> [u16; 5] {
        [self.features, self.extended, self.xsave, self.xsave_compacted, self.pv]
    }

    /// Whether the answer at `position` can change without a new table.
    pub(crate) fn includes(&self, position: u16) -> bool {
        // NONE first: an answer of no entry would else be found among entries that are not there.
        position != NONE && self.positions().contains(&position)
    }

    /// The bits of `entry`, which stands at `position`; `size` computes that of the XSAVE area for a
    /// set of components, in the standard format or compacted. An entry may play two parts only
    /// when a VMM leaves the index of leaf 0xD insignificant; the later one wins then.
    pub(crate) fn bits_at(
        &self,
        position: u16,
        entry: &Entry,
        inputs: &DynamicInputs,
        mut size: impl FnMut(u64, Form) -> u32,
    ) -> Bits {
        let bits = Bits::default();
        if position == NONE {
            return bits;
        }
        if position == self.features {
            // A guest that switches its APIC off must not find it in CPUID (SDM vol. 3A §10.4.3).
            let mut bits = bits.flag::<{ Bits::EDX }>(feature::APIC.mask(), inputs.apic_enabled);
            // Where the host lacks the feature the VMM's bit is left alone, here and with PKU, as
            // in stock KVM.
            if self.host_xsave {
                bits = bits.flag::<{ Bits::ECX }>(feature::OSXSAVE.mask(), inputs.cr4_osxsave);
            }
            if let Some(mwait) = self.mwait {
                bits = bits.flag::<{ Bits::ECX }>(feature::MONITOR.mask(), mwait);
            }
            return bits;
        }
        if position == self.extended && self.host_pku {
            // Programs look at this bit before they execute RDPKRU, which is #UD without CR4.PKE.
            return bits.flag::<{ Bits::ECX }>(feature::OSPKE.mask(), inputs.cr4_pke);
        }
        let compacts = feature::XSAVEC.mask() | feature::XSAVES.mask();
        if position == self.xsave_compacted && entry.eax & compacts != 0 {
            // XSAVES stores the supervisor components, too (SDM vol. 2A "CPUID", leaf 0DH, subleaf
            // 1).
            let size = size(inputs.xcr0 | inputs.xss, Form::Compacted);
            return bits.with::<{ Bits::EBX }>(u32::MAX, size);
        }
        if position == self.xsave {
            // By what XCR0 has now: a program allocates its area by this number.
            let size = size(inputs.xcr0, Form::Standard);
            return bits.with::<{ Bits::EBX }>(u32::MAX, size);
        }
        // A vCPU that halts without an exit could not be kicked awake by another.
        if position == self.pv && self.hlt_in_guest {
            return bits.flag::<{ Bits::EAX }>(feature::KVM_PV_UNHALT.mask(), false);
        }
        bits
    }
}
