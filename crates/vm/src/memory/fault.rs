//! TDP faults: from a guest-physical address that is not mapped to one that is.
//!
//! The first touch of a page is the commonest slow exit, so this path is short: one slot lookup,
//! one look at the host's page table, one walk of ours under the lock held for reading; memory is
//! allocated only when a table is missing. The notifier's protocol: note the count of ended
//! invalidations, ask the host, take the lock, and install only if no invalidation of the page is
//! under way and none ended since.
//!
//! Why both the count and the range are asked: an invalidation that began and ended between the look at the host's
//! table and the lock shows in the count alone, one that still runs shows in the range alone. Leave one out, and
//! this happens: the notifier withdraws, finds nothing yet, the host gives the frame to somebody else, and then
//! the fault installs it.
//!
//! Why a fault that lost is not tried again here: the guest takes it again by itself, with signals and requests
//! looked at in between. A VMM that invalidates without end then stops its own guest and nobody's CPU.

use host::gup::{GupError, HostPage, Patience, fault_in, signal_poisoned};
use mmu::tdp::{FlushRemote, LEVEL_4K, MapOutcome, Mapper, Mapping, Thoroughness, pages_per};
use mmu::{MemSlot, TableCache, Wanted};
use x86::{Direction, Gfn, Gpa, Hva};

use super::under_way::Invalidations;
use super::{MemoryError, VmMemory};

/// A TDP fault, as the hardware tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAccess {
    /// The guest-physical address of the access.
    pub gpa: Gpa,
    /// The access is a write.
    pub write: bool,
    /// An instruction fetch.
    pub exec: bool,
    /// The TDP entry was present and a permission was missing.
    pub present: bool,
}

/// What became of a TDP fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOutcome {
    /// Mapped: the guest goes on.
    Mapped,
    /// No slot there: emulate the access.
    Mmio,
    /// A write to a read-only slot: emulate the access as MMIO.
    ReadonlyWrite,
    /// The host was changing its mind: let the guest fault again.
    Retry,
    /// Not to be mapped: `Fault`, `Interrupted` or `NoMemory`.
    Error(MemoryError),
}

impl VmMemory {
    /// Resolves a TDP fault. `cache` is the vCPU's own. `find_page` asks the host for the page behind an address, as
    /// [`fault_in`] does: it sleeps when the page is not there, and runs in the VMM's address space.
    #[inline]
    pub fn fault(
        &self,
        cache: &mut TableCache,
        access: &FaultAccess,
        flush: &(impl FlushRemote + ?Sized),
        find_page: impl FnOnce(Hva, Direction, Patience) -> Result<HostPage, GupError>,
    ) -> FaultOutcome {
        let gfn = access.gpa.gfn();
        // Held through the sleep below: a slot that goes waits for this fault, and withdraws what
        // it has mapped.
        let slots = self.slots();
        let Some(slot) = slots.find(gfn) else { return FaultOutcome::Mmio };
        if slot.leaving {
            // No device is there yet, and no memory any more.
            return FaultOutcome::Retry;
        }
        if access.write && slot.is_readonly() {
            return FaultOutcome::ReadonlyWrite;
        }
        // Something is mapped: then mostly only the dirty log stands in the way.
        // No look at the host: the leaf is still there, and any change of the host's would have
        // withdrawn it.
        if access.present && self.restore(slot, gfn, access) {
            return FaultOutcome::Mapped;
        }
        let hva = slot.hva_of(gfn);
        // Before the host's page table is read: what changes there later shows in the count.
        let ended = self.ended.now();
        let fresh = cache.run().is_fresh(gfn);
        let patience = if fresh { Patience::InterruptibleFresh } else { Patience::Interruptible };
        match find_page(hva, Direction::write_if(access.write), patience) {
            Ok(page) => {
                // Before the guest can reach it: what such memory leaks is cleared before entries alone.
                if !page.frame().is_memory() {
                    flush.note_device();
                }
                self.install(cache, access, (slot, hva), ended, &page, flush)
            }
            Err(GupError::Again) => FaultOutcome::Retry,
            Err(GupError::Fault) => FaultOutcome::Error(MemoryError::Fault),
            Err(GupError::HwPoison) => {
                // The thread learns of it by a signal, as if it had touched the memory itself.
                signal_poisoned(hva);
                FaultOutcome::Retry
            }
            Err(GupError::Interrupted) => FaultOutcome::Error(MemoryError::Interrupted),
        }
    }

    fn restore(&self, slot: &MemSlot, gfn: Gfn, access: &FaultAccess) -> bool {
        let mapper = self.tdp.mapper();
        let wanted = Wanted { write: access.write, fetch: access.exec };
        let restored = mapper.restore_access(gfn, wanted);
        // With the lock still held for reading: who takes the log holds it for writing, so bit and
        // right go together.
        if restored && access.write {
            slot.mark_dirty(gfn);
        }
        restored
    }

    #[inline]
    fn install(
        &self,
        cache: &mut TableCache,
        access: &FaultAccess,
        (slot, hva): (&MemSlot, Hva),
        ended: u64,
        page: &HostPage,
        flush: &(impl FlushRemote + ?Sized),
    ) -> FaultOutcome {
        let gfn = access.gpa.gfn();
        let logging = slot.dirty.is_some();
        // An entry that is present was touched before; only its right to write was missing.
        let becomes_dirty = access.write || !access.present;
        // A read-only slot stays so whatever the VMM's own mapping allows.
        let host_writable = page.is_writable() && !slot.is_readonly();
        // The log is by 4 KiB, and a large leaf could not tell which page was written.
        let possible = if logging || page.level() <= LEVEL_4K {
            LEVEL_4K
        } else {
            self.large_level(slot, gfn, page)
        };
        // Only a fetch pays for the flaw of the iTLB: data keeps its large pages (ADR 35).
        let refused = access.exec && possible > LEVEL_4K && self.tdp.format().splits_at_fetch();
        let level = if refused { LEVEL_4K } else { possible };
        let mapping = Mapping {
            frame: page.frame(),
            level,
            // While the log is on, a page becomes writable by being touched first, and counts as
            // written then, as in stock KVM; or by being written; or the CPU logs.
            writable: host_writable && (becomes_dirty || !logging || self.tdp.format().logs()),
            host_writable,
            exec: true,
            fetch: access.exec,
            refused: if refused { possible } else { 0 },
            fault: Some(Direction::write_if(access.write)),
        };
        // The range of the whole leaf, not of the page that faulted: an invalidation of any part of
        // it forbids the large page.
        let span = pages_per(level) << 12;
        let first = hva.0 & !(span - 1);
        loop {
            let mapper = self.tdp.mapper();
            let end = Hva(first.wrapping_add(span));
            // Under the lock: nothing that is looked at here can change before the leaf is in.
            if mapper.state().refuse(Hva(first), end, &self.ended, ended) {
                return FaultOutcome::Retry;
            }
            match mapper.map(gfn, &mapping, cache) {
                MapOutcome::Mapped(_) => {
                    if host_writable {
                        if becomes_dirty {
                            slot.mark_dirty(gfn);
                        }
                        // Under the lock: an invalidation waits, so the page is still the host's
                        // page there, and write-back of it begins with an invalidation. Also for
                        // a page that only the log protects: restore() does not ask the host.
                        page.set_dirty();
                    }
                    // Not while the log is on: what is mapped ahead can be written, and its first
                    // write would be in no log.
                    if level == LEVEL_4K && !logging {
                        let wish = cache.run().wish(gfn);
                        if wish != 0 {
                            self.map_ahead(&mapper, slot, gfn, wish, cache);
                        }
                    }
                    return FaultOutcome::Mapped;
                }
                MapOutcome::NeedTables(count) => {
                    drop(mapper);
                    // What was found stays valid: the count is looked at again with the lock.
                    if cache.top_up(count).is_err() {
                        return FaultOutcome::Error(MemoryError::NoMemory);
                    }
                }
                MapOutcome::Conflict => {
                    // A slot moved, and its old translations are still being withdrawn.
                    // The lock for reading is given up: it cannot be made one for writing.
                    drop(mapper);
                    let end = Gfn(gfn.0.wrapping_add(1));
                    let mut zapper = self.tdp.zapper();
                    let flush = self.before(&zapper, gfn, end, flush);
                    zapper.zap(gfn, end, Thoroughness::Leaves, &flush);
                    return FaultOutcome::Retry;
                }
                MapOutcome::Retry => return FaultOutcome::Retry,
            }
        }
    }
}

impl VmMemory {
    /// Maps up to `wish` frames behind `gfn`, as far as the host has them mapped and the same table
    /// reaches.
    ///
    /// Asking the host needs no sequence count here: the lock is held already, no invalidation of
    /// these frames is under way, and none can begin before the lock is let go.
    #[inline(never)]
    fn map_ahead(
        &self,
        mapper: &Mapper<'_, Invalidations>,
        slot: &MemSlot,
        gfn: Gfn,
        wish: u32,
        cache: &mut TableCache,
    ) {
        let first = gfn.0.wrapping_add(1);
        // Not beyond the table at hand: another would have to be linked, and this is a bonus.
        let room = slot.end().0.saturating_sub(first).min(511 - (gfn.0 & 511));
        let count = room.min(u64::from(wish)) as u32;
        let (start, bytes) = (slot.hva_of(Gfn(first)), u64::from(count) << 12);
        if count == 0 || mapper.state().touch(start, Hva(start.0.wrapping_add(bytes))) {
            return;
        }
        let mut mapped = 0;
        while mapped < count {
            let gfn = Gfn(first.wrapping_add(u64::from(mapped)));
            // Without sleeping and under the lock: only what the host has in its table already.
            let Ok(page) = fault_in(slot.hva_of(gfn), Direction::Read, Patience::Never) else {
                break;
            };
            let host_writable = page.is_writable() && !slot.is_readonly();
            let mapping = Mapping {
                frame: page.frame(),
                level: LEVEL_4K,
                writable: host_writable,
                host_writable,
                exec: true,
                fetch: false,
                refused: 0,
                fault: None,
            };
            if !matches!(mapper.map(gfn, &mapping, cache), MapOutcome::Mapped(_)) {
                break;
            }
            // As for the page that faulted: the guest writes through the leaf without another
            // fault.
            if host_writable {
                page.set_dirty();
            }
            mapped += 1;
        }
        cache.run().mapped(gfn, mapped);
    }

    /// The level at which a large host page can be mapped whole.
    #[inline(never)]
    fn large_level(&self, slot: &MemSlot, gfn: Gfn, page: &HostPage) -> u8 {
        let level = slot.max_level(gfn, page.level().min(self.tdp.format().largest()));
        // The host's frame is aligned like its address; what is not (device memory) stays small.
        if (page.frame().pfn().0 ^ gfn.0) & (pages_per(level) - 1) == 0 { level } else { LEVEL_4K }
    }
}
