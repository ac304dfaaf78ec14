//! KVM_GET_DIRTY_LOG and KVM_CLEAR_DIRTY_LOG (KVM API §4.8, §4.117).
//!
//! A page's bit is taken and its write access withdrawn in one go under the MMU lock, so no write
//! falls between; the flush comes before the bits are handed out.
//!
//! Where the CPU logs pages (PML), its dirty bit takes the place of write access. Every vCPU that is
//! not in the guest has handed over what its CPU logged; those that are, are made to leave first.
//! What is written after that and before the flush is logged, and belongs to the next call; or its
//! bit is among those taken here, and the reader of the bitmap finds the page as it is then.
//!
//! Why the flush may come after the lock but never after the bits: a CPU with the old translation can still write. Such a
//! write before the flush belongs to a page whose bit is handed out now, and the reader copies the page after that. Were
//! the bits handed out first, a write after the copy would be in no log.
//!
//! Why in stretches, and with the lock given up in between: every vCPU that faults waits meanwhile, and a VM with
//! a terabyte has 256 million pages.
//!
//! Why the bits are copied with the slots' lock held, and room for them is kept with the slot: see [`DirtyLog`]; and a slot that is
//! replaced by a larger one between a look at its size and the taking would lose the bits beyond. A copy may wait for the owner
//! of the memory, and other changes of slots with it, as on stock KVM. No handler of the MMU notifier takes that lock.

use core::sync::atomic::Ordering;

use host::error::Fault;
use host::task;
use mmu::tdp::{FlushRemote, Zapper};
use mmu::{DirtyLog, MemSlot, begin_anew};
use x86::{Gfn, Gpa};

use super::VmMemory;
use super::under_way::Invalidations;

/// Why there is no dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyLogError {
    /// The slot number or the range is not valid (`-EINVAL`).
    Invalid,
    /// No such slot, or it does not log (`-ENOENT`).
    NoLog,
    /// The caller's memory for the bits is not there (`-EFAULT`).
    Fault,
}

impl From<Fault> for DirtyLogError {
    fn from(_: Fault) -> Self {
        Self::Fault
    }
}

/// Words of the bitmap handled with the lock held once: 32,768 pages.
const STRETCH: usize = 512;

impl VmMemory {
    /// Gives `out` the pages written since the last call, one bit per page of the slot, in 64-bit words, all of them; and with
    /// `protect` the log starts anew (without it: manual protection, KVM API §7.16). `out` may fault user memory in. Where it
    /// fails, the bits are lost, as on stock KVM.
    #[inline(never)]
    pub fn dirty_log<R>(
        &self,
        slot: u32,
        protect: bool,
        flush: &(impl FlushRemote + ?Sized),
        out: impl FnOnce(&[u64]) -> Result<R, Fault>,
    ) -> Result<R, DirtyLogError> {
        // Held until the bits are out, so that the slot whose they are is the one that the caller hears of: its size, too.
        let _held = self.slots_lock.lock();
        let slots = self.slots();
        let (slot, log) = logging(&slots, slot)?;
        let mut taken = log.copy();
        if !protect {
            // What a CPU has logged until now must be among the bits.
            self.gather_log(flush);
            // In stretches, as below: a terabyte's log has four million words.
            for (first, part) in stretches(&mut taken) {
                for (n, to) in (first..).zip(part) {
                    *to = log.peek(n);
                }
                task::cond_resched();
            }
            return Ok(out(&taken)?);
        }
        let take = || {
            let mut any = false;
            for (first, part) in stretches(&mut taken) {
                // For writing: a fault marks a page and gives it write access with this lock held
                // for reading, so both are seen or neither.
                let mut zapper = self.tdp.zapper();
                for (n, to) in (first..).zip(part) {
                    let bits = log.take(n);
                    any |= bits != 0 && self.protect(&mut zapper, word_base(slot, n), bits);
                    *to = bits;
                }
                drop(zapper);
                task::cond_resched();
            }
            any
        };
        // One flush for all: the generation and the IPIs cost the same for one page and for a
        // terabyte.
        begin_anew(|| self.gather_log(flush), take, || self.tdp.zapper().flush(flush));
        Ok(out(&taken)?)
    }

    /// Starts the log anew for the pages `first..first + count` of a slot whose bit in the mask (one
    /// bit per page, in 64-bit words) is set. `read` fills the mask in and may fault user memory in; where it fails nothing is cleared.
    #[inline(never)]
    pub fn clear_dirty_log(
        &self,
        slot: u32,
        first: u64,
        count: u64,
        flush: &(impl FlushRemote + ?Sized),
        read: impl FnOnce(&mut [u64]) -> Result<(), Fault>,
    ) -> Result<(), DirtyLogError> {
        let _held = self.slots_lock.lock();
        let slots = self.slots();
        let (slot, log) = logging(&slots, slot)?;
        let behind = slot.npages.checked_sub(first).ok_or(DirtyLogError::Invalid)?;
        // KVM's rule: a range is whole words, but for the slot's end.
        if first & 63 != 0 || count > behind || (count < behind && count & 63 != 0) {
            return Err(DirtyLogError::Invalid);
        }
        let (from, words) = ((first >> 6) as usize, count.div_ceil(64) as usize);
        let mut copy = log.copy();
        // There are as many: the range lies in the slot.
        let mask = copy.get_mut(..words).ok_or(DirtyLogError::Invalid)?;
        read(mask)?;
        let take = || {
            let mut any = false;
            for (at, part) in stretches(mask) {
                let mut zapper = self.tdp.zapper();
                for (n, wanted) in (from + at..).zip(part) {
                    // Only what was set: a page whose bit is clear has been watched since it was taken.
                    let bits = log.take_masked(n, *wanted);
                    any |= bits != 0 && self.protect(&mut zapper, word_base(slot, n), bits);
                }
                drop(zapper);
                task::cond_resched();
            }
            any
        };
        begin_anew(|| self.gather_log(flush), take, || self.tdp.zapper().flush(flush));
        Ok(())
    }

    /// Watches for writes to the pages `base + n` for every bit `n` of `bits`.
    /// Whether there was anything to do.
    fn protect(&self, zapper: &mut Zapper<'_, Invalidations>, base: Gfn, bits: u64) -> bool {
        let any = zapper.watch_writes_masked(base, bits);
        // Shadow leaves are no leaves of the tree, so its walk does not meet them.
        if self.derived().is_some() {
            let mut rest = bits;
            while rest != 0 {
                let gfn = base.0.wrapping_add(rest.trailing_zeros().into());
                self.protect_shadow(Gfn(gfn), Gfn(gfn.wrapping_add(1)));
                rest &= rest - 1;
            }
        }
        any
    }

    /// Has the vCPUs log pages, or not, if that changed. Under the slots' lock.
    pub(super) fn log_pages(&self, on: bool, flush: &(impl FlushRemote + ?Sized)) {
        // Swapped under the slots' lock, so that on and off reach the vCPUs in the order of the
        // slots.
        if self.tdp.format().logs() && self.logs_pages.swap(on, Ordering::Relaxed) != on {
            flush.log_pages(on);
        }
    }

    fn gather_log(&self, flush: &(impl FlushRemote + ?Sized)) {
        if self.tdp.format().logs() {
            flush.gather_log();
        }
    }

    /// A vCPU's CPU has made this page dirty. With interrupts off, too.
    pub fn note_logged(&self, gpa: Gpa) {
        // By the slots of now: a page that moved has no other place to be noted at.
        if let Some(slot) = self.slots().find(gpa.gfn()) {
            slot.mark_dirty(gpa.gfn());
        }
    }
}

/// Stretches of the words of a bitmap, each with the index of its first.
fn stretches(words: &mut [u64]) -> impl Iterator<Item = (usize, &mut [u64])> {
    words.chunks_mut(STRETCH).enumerate().map(|(n, part)| (n.wrapping_mul(STRETCH), part))
}

fn logging(slots: &mmu::MemSlots, slot: u32) -> Result<(&MemSlot, &DirtyLog), DirtyLogError> {
    // Stock KVM tells a number that cannot be (EINVAL) from a slot that is not there (ENOENT).
    if slot >= mmu::slots::USER_SLOTS {
        return Err(DirtyLogError::Invalid);
    }
    let slot = slots.by_id(slot as u16).ok_or(DirtyLogError::NoLog)?;
    Ok((slot, slot.dirty.as_deref().ok_or(DirtyLogError::NoLog)?))
}

fn word_base(slot: &MemSlot, word: usize) -> Gfn {
    Gfn(slot.base.0.wrapping_add((word as u64) << 6))
}
