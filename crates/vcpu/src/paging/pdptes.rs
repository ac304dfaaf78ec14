//! The page-directory-pointer entries (PDPTEs) that PAE paging loads with CR3 and keeps, whatever memory says
//! afterwards (SDM vol. 3A §4.4.1). Under shadow paging they are kept here; under EPT they are registers of
//! the backend's. SVM with NPT reads them from memory at every walk.

use backend::{Backend, PdpteRegisters};
use mmu::nested::{Tables, walk::SecondStage};
use mmu::source::reserved_in_pdpte;
use mmu::{GuestMemory as _, PagingContext, Section};
use x86::{Cr0, Cr4, Efer, Exception, Gpa};

use super::Mmu;
use crate::{Vcpu, nested::paging::has_pdptes_of_l1};

const PRESENT: u64 = 1;

/// The four entries.
pub(super) type Pdptes = [u64; 4];

fn decode_pdptes(bytes: &[u8; 32]) -> Pdptes {
    let (words, _) = bytes.as_chunks::<8>();
    let mut entries = [0; 4];
    for (entry, word) in entries.iter_mut().zip(words) {
        *entry = u64::from_le_bytes(*word);
    }
    entries
}

/// Whether registers mean PAE paging, which loads PDPTEs.
pub(crate) fn is_pae(cr0: Cr0, cr4: Cr4, efer: Efer) -> bool {
    cr0.contains(Cr0::PG) && cr4.contains(Cr4::PAE) && !efer.is_long()
}

impl Mmu {
    /// Inside the loop, before a write to control register `cr`: reads the PDPTEs that it will load.
    /// `false`: not to be had here.
    pub(crate) fn fetch_pdptes(
        &mut self,
        b: &impl Backend,
        s: Section<'_>,
        cr: u8,
        value: u64,
    ) -> bool {
        let c = b.control();
        // The value that is about to be written decides.
        let cr4 = if cr == 4 { Cr4::from_bits_retain(value) } else { c.cr4 };
        if b.pdptes().is_some() && self.shadow.is_none() {
            // Where they are to be loaded, guest memory is read outside.
            return !cr4.contains(Cr4::PAE) || c.efer.is_long() || !matches!(cr, 0 | 3 | 4);
        }
        let Some((shadow, memory, _)) = self.shadowed() else { return true };
        // One that an earlier write left unused is of another CR3.
        shadow.fetched = None;
        if !cr4.contains(Cr4::PAE) || c.efer.is_long() || !matches!(cr, 0 | 3 | 4) {
            return true;
        }
        let base = pdptes_at(if cr == 3 { value } else { c.cr3 });
        let mut bytes = [0; 32];
        // The write is done again outside, where memory may be waited for.
        if !memory.read_irqs_off(&memory.view(s), Gpa(base), &mut bytes) {
            return false;
        }
        shadow.fetched = Some((base, decode_pdptes(&bytes)));
        true
    }

    /// The write that PDPTEs were read for is over: a later load reads its own.
    pub(crate) fn forget_fetched_pdptes(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.fetched = None;
        }
    }

    /// Sets the PDPTEs that were read from memory: of a guest with addresses of so many bits.
    #[inline(never)]
    fn set_pdptes(
        &mut self,
        b: &mut impl Backend,
        entries: Pdptes,
        maxphyaddr: u8,
    ) -> Result<(), Exception> {
        let reserved = reserved_in_pdpte(maxphyaddr);
        // Of an entry that is not present the other bits are ignored (SDM vol. 3A §4.4.1).
        if entries.iter().any(|e| e & PRESENT != 0 && e & reserved != 0) {
            return Err(Exception::gp(0));
        }
        match &mut self.shadow {
            Some(shadow) => shadow.pdptes = entries,
            None => {
                if let Some(pdptes) = b.pdptes_mut() {
                    pdptes.set_entries(entries);
                }
            }
        }
        Ok(())
    }

    /// The PDPTEs where they are registers of the backend and in use.
    pub(crate) fn own_pdptes(&self, b: &impl Backend) -> Option<[u64; 4]> {
        let pdptes = b.pdptes()?;
        let c = b.control();
        let own = self.shadow.is_none() && is_pae(c.cr0, c.cr4, c.efer);
        own.then(|| pdptes.entries())
    }
}

/// Sets the PDPTEs where they are registers of the backend.
fn set_own_pdptes(b: &mut impl Backend, entries: Pdptes) {
    if let Some(pdptes) = b.pdptes_mut() {
        pdptes.set_entries(entries);
    }
}

impl<B: Backend> Vcpu<B> {
    /// Loads the PDPTEs behind `cr3` as a write of a control register does: #GP for one with
    /// reserved bits.
    pub(crate) fn load_pdptes(&mut self, cr3: u64) -> Result<(), Exception> {
        let base = pdptes_at(cr3);
        if let Some(tables) = self.mmu.l1_tables()
            && self.b.pdptes().is_some()
        {
            // Loaded only when all four were read and are good: a refused write leaves those of before.
            let mut entries = [0; 4];
            self.read_of_l2(&tables, base, &mut entries).ok_or(Exception::gp(0))?;
            return self.mmu.set_pdptes(&mut self.b, entries, self.cpuid.maxphyaddr());
        }
        self.load_own_pdptes(cr3)
    }

    /// Loads the PDPTEs that lie in the machine's memory behind `cr3`, as an entry of L2 without tables of L1's does.
    pub(crate) fn load_own_pdptes(&mut self, cr3: u64) -> Result<(), Exception> {
        let base = pdptes_at(cr3);
        if self.mmu.shadow.is_none() && self.b.pdptes().is_none() {
            return Ok(());
        }
        let mmu = &mut self.mmu;
        let entries = match mmu.shadow.as_mut().and_then(|shadow| shadow.fetched.take()) {
            Some((at, entries)) if at == base => entries,
            _ => {
                let mut bytes = [0; 32];
                mmu.memory.read(Gpa(base), &mut bytes).map_err(|_| Exception::gp(0))?;
                decode_pdptes(&bytes)
            }
        };
        self.mmu.set_pdptes(&mut self.b, entries, self.cpuid.maxphyaddr())
    }

    /// The registers are another's now: the PDPTEs are loaded as they say. Entries that cannot be
    /// loaded are not present.
    #[cold]
    #[inline(never)]
    pub(crate) fn replace_pdptes(&mut self) {
        let c = self.b.control();
        if !is_pae(c.cr0, c.cr4, c.efer) {
            return;
        }
        if let Some(tables) = self.mmu.l1_tables() {
            return self.replace_pdptes_of_l2(&tables, c.cr3);
        }
        if self.load_pdptes(c.cr3).is_err() {
            set_own_pdptes(&mut self.b, [0; 4]);
        }
    }

    /// As [`replace_pdptes`](Self::replace_pdptes), of what has no tables of L1's: from the machine's memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn replace_own_pdptes(&mut self) {
        let c = self.b.control();
        if !has_pdptes_of_l1(&self.b)
            && is_pae(c.cr0, c.cr4, c.efer)
            && self.load_own_pdptes(c.cr3).is_err()
        {
            set_own_pdptes(&mut self.b, [0; 4]);
        }
    }

    /// L2's, by tables of L1's: L2 has made no access of which L1 could hear, and those that L1's state has stay where
    /// L1's tables lead nowhere now.
    #[cold]
    #[inline(never)]
    fn replace_pdptes_of_l2(&mut self, tables: &Tables, cr3: u64) {
        let stage = SecondStage::probing(&*self.mmu.memory, *tables);
        let mut entries = [0; 4];
        for (n, entry) in entries.iter_mut().enumerate() {
            let Ok(found) = stage.read_u64(Gpa(pdptes_at(cr3) + n as u64 * 8)) else { return };
            *entry = found;
        }
        let _ = self.mmu.set_pdptes(&mut self.b, entries, self.cpuid.maxphyaddr());
    }

    /// User space gives the PDPTEs, after the registers. Those with reserved bits, with which no entry
    /// would succeed, are not present.
    #[cold]
    #[inline(never)]
    pub(crate) fn give_pdptes(&mut self, entries: [u64; 4]) {
        if self.mmu.own_pdptes(&self.b).is_some() {
            let reserved = reserved_in_pdpte(self.cpuid.maxphyaddr());
            let bad = |e: u64| e & PRESENT != 0 && e & reserved != 0;
            set_own_pdptes(&mut self.b, entries.map(|e| if bad(e) { 0 } else { e }));
        }
    }

    /// After user space set the registers. Entries that cannot be loaded are not present.
    pub(super) fn reload_pdptes(&mut self, context: &PagingContext) {
        let pae = is_pae(context.cr0, context.cr4, context.efer);
        self.mmu.forget_fetched_pdptes();
        if (!pae || self.load_pdptes(context.cr3).is_err())
            && let Some(shadow) = &mut self.mmu.shadow
        {
            shadow.pdptes = [0; 4];
        }
    }
}

fn pdptes_at(cr3: u64) -> u64 {
    cr3 & 0xffff_ffe0
}
