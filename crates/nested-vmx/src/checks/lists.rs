//! Lists of MSRs that an entry loads, and that an exit stores and loads (SDM vol. 3C §27.4, §28.4, §28.6).
//! A list is read entry by entry, each once, and nothing of it is kept: the caller does one step, then asks
//! for the next.

use x86::{Gpa, msr};

use super::Limits;
use crate::GuestMemory;

/// Bytes of an entry: number, reserved, value.
const ENTRY: u64 = 16;

/// A list in L1's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    /// Where the list begins; it was checked to lie below the guest's physical-address width.
    pub at: u64,
    /// How many entries it has.
    pub count: u32,
    /// How many entries it may have (IA32_VMX_MISC).
    pub limit: u32,
}

/// What an entry asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The entry's number, from 1, as an exit qualification has it.
    pub number: u32,
    /// The MSR.
    pub msr: u32,
    /// The value to load; of no meaning for a store.
    pub value: u64,
    /// Where a store puts the value.
    pub slot: Gpa,
}

/// The entry of this number, from 1, cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad(pub u32);

/// IA32_SMM_MONITOR_CTL.
const SMM_MONITOR_CTL: u32 = 0x9b;

impl List {
    fn entry(&self, index: u32, limits: &Limits, memory: &impl GuestMemory) -> Result<Step, Bad> {
        // L1 names up to 2^32 entries: the number saturates where the limit has refused it long before.
        let number = index.saturating_add(1);
        let bad = Bad(number);
        // Beyond the limit a CPU may do anything (§A.6). It is a failure here, as in stock KVM, so that L0's work is bounded.
        if index >= self.limit {
            return Err(bad);
        }
        let at = self.at.wrapping_add(u64::from(index) * ENTRY);
        let mut bytes = [0; 16];
        // Number and value by one read: what is checked is what is loaded.
        memory.read(Gpa(at), &mut bytes).map_err(|_| bad)?;
        let both = u128::from_le_bytes(bytes);
        let number_of_msr = both as u32;
        let reserved = (both >> 32) as u32;
        let x2apic = limits.x2apic && number_of_msr >> 8 == 8;
        // In x2APIC mode its registers are no MSRs of a list, and microcode is no list's to load (§27.4).
        let microcode = matches!(number_of_msr, msr::UCODE_WRITE | msr::UCODE_REV);
        if reserved != 0 || x2apic || microcode {
            return Err(bad);
        }
        // The list was checked to begin at a multiple of 16.
        Ok(Step { number, msr: number_of_msr, value: (both >> 64) as u64, slot: Gpa(at | 8) })
    }

    /// The entry to be loaded next, after `done` of them; `None` at the list's end.
    pub fn load(
        &self,
        done: u32,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Option<Result<Step, Bad>> {
        // FS and GS have fields of their own; the last is of the dual-monitor treatment.
        let unloadable = [msr::FS_BASE, msr::GS_BASE, SMM_MONITOR_CTL];
        self.next(done, limits, memory, &unloadable)
    }

    /// The entry to be stored next, after `done` of them; `None` at the list's end.
    pub fn store(
        &self,
        done: u32,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Option<Result<Step, Bad>> {
        // SMBASE is not to be read outside SMM.
        self.next(done, limits, memory, &[msr::SMBASE])
    }

    fn next(
        &self,
        done: u32,
        limits: &Limits,
        memory: &impl GuestMemory,
        refused: &[u32],
    ) -> Option<Result<Step, Bad>> {
        if done >= self.count {
            return None;
        }
        let step = self.entry(done, limits, memory);
        // Whether there is such an MSR is not asked here: whoever loads it knows.
        Some(step.and_then(|s| if refused.contains(&s.msr) { Err(Bad(s.number)) } else { Ok(s) }))
    }
}
