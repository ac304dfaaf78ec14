//! The enlightened VMCS: L1 names a page by its VP assist page, and executes neither VMPTRLD nor VMREAD nor VMWRITE
//! (Hypervisor Top-Level Functional Specification, "Nested virtualization").
//!
//! VMCS12 stays what everything else acts on. An entry takes the fields over from the page, each byte of it read once,
//! and of those as few groups as L1's clean fields let it; an exit writes the page. Between the two nothing of the page
//! counts, so that L1 may rewrite it as it likes.
//!
//! Such a VMCS has no launch state: VMLAUNCH and VMRESUME differ in that the former takes no clean field for granted.

use x86::vmcs::enlightened::{self as page, ALL_CLEAN, BYTES, Clean, at, control};
use x86::vmcs::place::VMCS12_REVISION;
use x86::vmcs::{Groups, field};
use x86::{Exception, Gpa};
use zerocopy::IntoBytes;

use super::{Cpu, EntryBy, L1, Level, Machine, Place, Then};
use crate::checks::Limits;
use crate::memory::is_page;
use crate::merge::follows;
use crate::{Fail, GuestMemory, Outside};

/// Where the VP assist page has what concerns nesting, and how much of it is read.
const ASSIST: u64 = 32;
/// Bit of the first byte there: L0 is to carry out L2's hypercalls that flush translations.
const DIRECT_FLUSH: u8 = 1;

/// What of the page an entry always looks at; the rest only if a group of it is not clean.
const HOT: core::ops::Range<usize> = 768..864;
const HOT_GROUPS: u32 = Clean::Basic.bit()
    | Clean::Proc.bit()
    | Clean::Exceptions.bit()
    | Clean::Entry.bit()
    | Clean::Event.bit()
    | Clean::Control.bit();

const WORDS: usize = BYTES / 8;

/// Exit reason behind a flush that L0 has carried out for L2.
const FLUSHED: u32 = 0x1000_0031;

/// What the end of L2's run writes to L1's memory.
pub(super) mod owes {
    /// The shadow VMCS that serves L2, which L2 has changed.
    pub const SHADOW: u8 = 1;
    /// The enlightened VMCS.
    pub const PAGE: u8 = 2;
}

/// Which enlightened VMCS is current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Current {
    None,
    /// A state was restored with one: L1's pages may not be there yet.
    Unsettled,
    At(Gpa),
}

/// What L1 has told with the VMCS that is no field of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// L0 carries out L2's hypercalls that flush translations.
    pub direct_flush: bool,
    /// The number of the VM that L2 is, and of the vCPU.
    pub guest: (u64, u32),
    /// Where L1 says whether it wants to hear of such a flush.
    pub partition_assist: u64,
}

/// What an entry has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// An enlightened VMCS, which VMCS12 has now.
    Page,
    /// L1 names none.
    None,
    /// The VP assist page cannot be had; nothing has changed.
    NoAssist,
}

/// L1's use of enlightened VMCSs.
#[derive(Clone, Debug)]
pub(super) struct Enlightened {
    /// The VMM has switched them on.
    enabled: bool,
    /// L1 knows of them.
    offered: bool,
    /// L1 may have L0 carry out L2's hypercalls that flush translations.
    flushes: bool,
    /// The VP assist page, where they are offered.
    assist: Option<Gpa>,
    current: Current,
    keeps_msr_bitmap: bool,
    told: Told,
    page: [u64; WORDS],
}

impl Enlightened {
    pub(super) const NONE: Self = Self {
        enabled: false,
        offered: false,
        flushes: false,
        assist: None,
        current: Current::None,
        keeps_msr_bitmap: false,
        told: Told { direct_flush: false, guest: (0, 0), partition_assist: 0 },
        page: [0; WORDS],
    };

    fn u32(&self, at: usize) -> u32 {
        // Fields lie at multiples of their size: none spans two words.
        (self.page[(at / 8) & (WORDS - 1)] >> (at % 8 * 8)) as u32
    }

    fn u64(&self, at: usize) -> u64 {
        self.page[(at / 8) & (WORDS - 1)]
    }

    /// Reads a part of the page into the copy of it.
    fn read(
        &mut self,
        from: Gpa,
        part: core::ops::Range<usize>,
        l1: &impl GuestMemory,
    ) -> Result<(), Fail> {
        // Each part into its place of the copy: what is not read now is what was read last.
        let at = Gpa(from.0.wrapping_add(part.start as u64));
        let into = self.page.as_mut_bytes().get_mut(part).ok_or(Fail::Outside)?;
        Ok(l1.read(at, into)?)
    }

    fn write(&self, to: Gpa, offset: usize, bytes: usize, l1: &impl GuestMemory) {
        if let Some(from) =
            offset.checked_add(bytes).and_then(|end| self.page.as_bytes().get(offset..end))
        {
            // A page that L1 has taken away, or made read-only, keeps what it had: the entry has looked whether it could be written.
            let _ = l1.write(Gpa(to.0.wrapping_add(offset as u64)), from);
        }
    }
}

impl Machine {
    /// Says whether the VMM has switched enlightened VMCSs on, whether L1 may use them, and where its VP assist page is.
    pub fn enlighten(
        &mut self,
        enabled: bool,
        offered: bool,
        direct_flush: bool,
        assist: Option<Gpa>,
    ) {
        // Without the VMM's switch L1's CPUID does not count: a feature is on where both say so.
        let offered = enabled && offered;
        // L1 is offered other controls now, and what it set was checked by the ones of before.
        if offered != self.enlightened.offered {
            // Which controls there are.
            self.touch_all();
        }
        self.enlightened.enabled = enabled;
        self.enlightened.offered = offered;
        self.enlightened.flushes = direct_flush;
        self.enlightened.assist = assist.filter(|_| offered);
        // A VMCS that is current goes with the feature, as it goes with the VP assist page.
        if !offered {
            self.release_enlightened();
        }
    }

    /// Whether the VMM has switched enlightened VMCSs on.
    pub fn is_enlightenment_enabled(&self) -> bool {
        self.enlightened.enabled
    }

    /// Whether L1 may use enlightened VMCSs: it is not offered then what they do not carry.
    pub fn may_be_enlightened(&self) -> bool {
        self.enlightened.offered
    }

    /// Whether an entry has to look whether L1 names an enlightened VMCS ([`Self::load_enlightened`]): one that is current
    /// is that no more if the VP assist page was taken away.
    #[inline]
    pub fn asks_assist_page(&self) -> bool {
        // One that is current is asked for, too: the page may have been taken away.
        self.enlightened.assist.is_some() || self.is_enlightened()
    }

    /// The VP assist page.
    pub fn assist_page(&self) -> Option<Gpa> {
        self.enlightened.assist
    }

    /// Whether an enlightened VMCS is current.
    #[inline]
    pub fn is_enlightened(&self) -> bool {
        self.enlightened.current != Current::None
    }

    /// Whether a restored state waits for L1's pages ([`Self::settle_enlightened`]).
    pub fn is_unsettled(&self) -> bool {
        self.enlightened.current == Current::Unsettled
    }

    /// Whether L1 says that its MSR bitmap is as it was at the entry before.
    pub fn keeps_msr_bitmap(&self) -> bool {
        self.enlightened.keeps_msr_bitmap
    }

    /// What L1 has told beside, at the last entry.
    pub fn told(&self) -> Option<Told> {
        self.is_enlightened().then_some(self.enlightened.told)
    }

    /// No enlightened VMCS is current any more. All that an exit leaves is in the page.
    pub(super) fn release_enlightened(&mut self) {
        if self.is_enlightened() {
            self.enlightened.current = Current::None;
            self.owes &= !owes::PAGE;
        }
    }

    /// What the VP assist page names, and whether it lets L0 flush for L2.
    fn named_by_assist(&self, l1: &impl GuestMemory) -> Result<Option<(u64, bool)>, Outside> {
        // Each entry asks: L1 names another VMCS by writing to its page, which nobody sees.
        let Some(assist) = self.enlightened.assist else { return Ok(None) };
        let mut bytes = [0; 24];
        l1.read(Gpa(assist.0.wrapping_add(ASSIST)), &mut bytes)?;
        let [features, _, _, _, _, _, _, _, enlightens, _, _, _, _, _, _, _, pointer @ ..] = bytes;
        let pointer = u64::from_le_bytes(pointer);
        // The two highest are no addresses for stock KVM.
        let named = enlightens != 0 && pointer < u64::MAX - 1;
        Ok(named.then_some((pointer, features & DIRECT_FLUSH != 0)))
    }

    /// Before VMLAUNCH or VMRESUME of an L1 that may name an enlightened VMCS: takes it over. What the current VMCS had and VMCS12 has not yet must have been fetched.
    ///
    /// # Errors
    /// The instruction ends so. [`Fail::Outside`]: what L1 names is no memory of its; nothing has changed.
    pub fn load_enlightened(
        &mut self,
        by: EntryBy,
        cpu: &Cpu,
        limits: &Limits,
        l1: &impl GuestMemory,
    ) -> Result<Loaded, Fail> {
        // The instruction says so itself, right behind: nothing of the page may be taken over by one that faults.
        if !self.is_in_operation() || !cpu.is_mode_right() || cpu.cpl > 0 {
            // The instruction faults.
            return Ok(Loaded::None);
        }
        // What the VP assist page says is read once: whether it names a VMCS, which, and whether L0 flushes.
        let Ok(named) = self.named_by_assist(l1) else { return Ok(Loaded::NoAssist) };
        let Some((pointer, direct_flush)) = named else {
            self.release_enlightened();
            return Ok(Loaded::None);
        };
        // The specification wants a page; an address beyond L1's width is no memory.
        if !is_page(pointer, limits.physical_bits) {
            return Err(Fail::Outside);
        }
        let to = Gpa(pointer);
        // By address alone: a page that was rewritten behind the same address says so by its clean fields.
        let changed = self.enlightened.current != Current::At(to);
        let clean = if changed { self.point_at(to, l1)? } else { self.read_changed(to, by, l1)? };
        // Behind the page's own copy: none of these is read from L1's memory again.
        let e = &mut self.enlightened;
        let control = e.u32(at::CONTROL);
        // L1 promises it by two words: the feature is on, and the bitmap is clean.
        e.keeps_msr_bitmap =
            control & control::MSR_BITMAP != 0 && clean & Clean::MsrBitmap.bit() != 0;
        e.told = Told {
            // Three have to agree: L1's CPUID, its VP assist page and the VMCS.
            direct_flush: e.flushes && direct_flush && control & control::DIRECT_FLUSH != 0,
            guest: (e.u64(at::VM_ID), e.u32(at::VP_ID)),
            partition_assist: e.u64(at::PARTITION_ASSIST),
        };
        self.take_page(clean);
        // There is no launch state: the check of VMLAUNCH and VMRESUME is to find what the instruction wants.
        self.vmcs12.set_launched(by == EntryBy::Vmresume);
        Ok(Loaded::Page)
    }

    /// Where the VP assist page is no memory, no enlightened VMCS is current.
    pub fn give_up_enlightened(&mut self, gone: bool) {
        if gone {
            self.release_enlightened();
        }
    }

    /// What L1 names is no memory: nothing is current. What L1 has written to the VMCS that was is in its region.
    pub fn refuse_enlightened(&mut self, l1: &impl GuestMemory) {
        // None is current behind it: VMREAD and the next entry find nothing, rather than a VMCS that was half changed.
        self.write_back(l1);
        self.set_regions(self.vmxon, None);
        self.touch_all();
    }

    /// Another page is current from now on: all of it is read, and nothing is clean.
    fn point_at(&mut self, to: Gpa, l1: &impl GuestMemory) -> Result<u32, Fail> {
        // All of it is read before anything changes: a page that is not there leaves L1 where it was.
        self.enlightened.read(to, 0..BYTES, l1)?;
        // Stock KVM takes its own revision there, too: hypervisors on it had written that.
        let good = [page::VERSION, VMCS12_REVISION].contains(&self.enlightened.u32(0));
        // The VMCS that was current by VMPTRLD is given up, with what it has.
        self.write_back(l1);
        self.set_regions(self.vmxon, None);
        // What is composed of the page is composed of no VMCS12 that VMPTRLD could bring back.
        self.touch_all();
        if !good {
            return Err(Fail::Invalid);
        }
        // What the page does not carry is nobody's.
        self.vmcs12.clear();
        self.enlightened.current = Current::At(to);
        // From here on the end of L2's run writes the page.
        self.owes |= owes::PAGE;
        Ok(0)
    }

    /// Reads what L1 may have changed. What is clean has to be what VMCS12 has.
    fn read_changed(&mut self, from: Gpa, by: EntryBy, l1: &impl GuestMemory) -> Result<u32, Fail> {
        let e = &mut self.enlightened;
        // These 96 bytes change at nearly every entry: they are read whatever the clean fields say.
        e.read(from, HOT, l1)?;
        // VMLAUNCH takes no word of L1's for granted.
        let clean = if by == EntryBy::Vmlaunch { 0 } else { e.u32(at::CLEAN) & ALL_CLEAN };
        // With all others clean the rest of the page is not read: nothing of it would be used.
        if (clean | HOT_GROUPS) & ALL_CLEAN != ALL_CLEAN {
            e.read(from, 0..HOT.start, l1)?;
            e.read(from, HOT.end..BYTES, l1)?;
        }
        Ok(clean)
    }

    /// Takes over the groups that are not clean, as VMWRITE would.
    fn take_page(&mut self, clean: u32) {
        let mut left = !clean & ((1 << page::GROUPS) - 1);
        while left != 0 {
            let group = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            // Lines are in the order of the groups: each has a first and an end.
            let Some([from, to]) = page::STARTS.get(group..=group.wrapping_add(1)) else { return };
            for line in
                page::READ_LINES.get(usize::from(*from)..usize::from(*to)).unwrap_or_default()
            {
                let at = usize::from(line.offset);
                let value = self.enlightened.page[(at / 8) & (WORDS - 1)] >> (at % 8 * 8);
                // As VMWRITE would: what is the same leaves the group composed and checked.
                if self.vmcs12.take_served(&line.field, value) {
                    self.change(line.field.place.group);
                    self.dirty = self.dirty.union(follows(line.field.encoding.into()));
                }
            }
        }
    }

    /// Brings VMCS12 up to date with what L1 may have written into the page since the last exit, to be saved.
    pub fn refresh_enlightened(&mut self, l1: &impl GuestMemory) {
        // An L2 that system-management mode has put aside is VMCS12 alone, and RSM enters it without a check.
        // A VMCS that waits for L1's pages has nothing newer there; while L2 runs the page does not count.
        if let Current::At(from) = self.enlightened.current
            && self.level == Level::L1
            && !self.smm.guest_mode
            && self.enlightened.read(from, 0..BYTES, l1).is_ok()
        {
            // Clean fields are not asked: L1 may have written since it set them.
            self.take_page(0);
        }
    }

    /// A state was restored, and L1's pages are there now: what VMCS12 has goes into the one that L1 names. Where L1 names
    /// none, or no memory, an L2 that runs waits on.
    pub fn settle_enlightened(&mut self, limits: &Limits, l1: &impl GuestMemory) {
        if !self.is_unsettled() {
            return;
        }
        if !self.find_enlightened(limits, l1) && self.level == Level::L1 {
            // L1's next entry names one or fails.
            self.release_enlightened();
        }
    }

    fn find_enlightened(&mut self, limits: &Limits, l1: &impl GuestMemory) -> bool {
        let named = self.named_by_assist(l1).unwrap_or(None).map(|(pointer, _)| pointer);
        let named = named.filter(|pointer| is_page(*pointer, limits.physical_bits)).map(Gpa);
        // What can only be read would lose what the next exit leaves. The same exchange is asked for before an exit.
        let named = named.filter(|to| l1.exchange(*to, 0, 0).is_ok());
        let Some(to) = named.filter(|to| self.enlightened.read(*to, 0..BYTES, l1).is_ok()) else {
            return false;
        };
        if ![page::VERSION, VMCS12_REVISION].contains(&self.enlightened.u32(0)) {
            return false;
        }
        self.enlightened.current = Current::At(to);
        // The state counts, and not what memory has: the page may be older.
        self.store_enlightened(l1);
        true
    }

    /// A state with an enlightened VMCS was restored.
    pub(crate) fn unsettle_enlightened(&mut self) {
        self.enlightened.current = Current::Unsettled;
        self.enlightened.keeps_msr_bitmap = false;
        // What L1 has told is not saved: its next entry tells it again.
        self.enlightened.told = Told::default();
        self.owes |= owes::PAGE;
    }

    /// Whether the end of L2's run writes to nothing but the enlightened VMCS, and that can be written.
    pub fn reaches_enlightened(&self, l1: &impl GuestMemory) -> bool {
        match self.enlightened.current {
            // An exchange of 0 for 0 changes nothing, and fails where a store would.
            Current::At(to) if self.owes & owes::SHADOW == 0 => l1.exchange(to, 0, 0).is_ok(),
            Current::At(_) | Current::None | Current::Unsettled => false,
        }
    }

    /// Whether the enlightened VMCS that is current can be written.
    pub fn keeps_enlightened(&self, l1: &impl GuestMemory) -> bool {
        matches!(self.enlightened.current, Current::At(to) if l1.exchange(to, 0, 0).is_ok())
    }

    /// Writes what an exit leaves into the enlightened VMCS.
    pub fn store_enlightened(&mut self, l1: &impl GuestMemory) {
        let Current::At(to) = self.enlightened.current else { return };
        let e = &mut self.enlightened;
        for line in &page::WRITTEN_LINES {
            // Only what an exit leaves: L1's own fields in the page are not touched, and may be newer there.
            let at = usize::from(line.offset);
            let (word, bit) = (&mut e.page[(at / 8) & (WORDS - 1)], at % 8 * 8);
            let value = self.vmcs12.served(&line.field);
            *word = *word & !(line.field.mask << bit) | value << bit;
        }
        for run in &page::RUNS {
            // Runs of lines that lie side by side: fewer stores, none of which covers a field of L1's.
            e.write(to, run.offset.into(), run.bytes.into(), l1);
        }
    }

    /// L2 has run: L1's fields are those that VMCS12 has until L1 says otherwise.
    pub(super) fn store_left(&mut self, l1: &impl GuestMemory) {
        // All was fetched for the page: nothing of L2 waits in vmcs02.
        self.behind = Groups::NONE;
        self.store_enlightened(l1);
        if let Current::At(to) = self.enlightened.current {
            let e = &mut self.enlightened;
            // All clean, as the specification has it behind an exit: L1 clears what it changes.
            let word = &mut e.page[at::CLEAN / 8];
            *word |= u64::from(ALL_CLEAN);
            e.write(to, at::CLEAN, 4, l1);
        }
    }

    /// Whether L1 wants to hear that translations were flushed for L2. `None`: where it says so is no memory.
    pub fn wants_flush_told(&self, l1: &impl GuestMemory) -> Option<bool> {
        l1.read_u32(Gpa(self.enlightened.told.partition_assist)).ok().map(|locks| locks != 0)
    }

    /// The exit that L1 sees is the one behind a flush for L2, which no CPU knows.
    pub fn tell_flush(&mut self, l1: &impl GuestMemory) {
        self.vmcs12.set(field::EXIT_REASON, FLUSHED);
        // VMCS12 has it for a saved state, the page for L1.
        if let Current::At(to) = self.enlightened.current
            && let Some((offset, _)) = page::find(field::EXIT_REASON.encoding().into())
        {
            let _ = l1.write(Gpa(to.0.wrapping_add(offset.into())), &FLUSHED.to_le_bytes());
        }
    }

    /// The number of the error of an instruction that failed.
    pub(super) fn store_error(&mut self, l1: &impl GuestMemory) {
        if let Current::At(to) = self.enlightened.current
            && let Some((offset, _)) = page::find(field::INSTRUCTION_ERROR.encoding().into())
        {
            // The page is where L1 looks for it; a failed instruction has no exit that would write the whole.
            let number = self.vmcs12.get(field::INSTRUCTION_ERROR);
            let _ = l1.write(Gpa(to.0.wrapping_add(offset.into())), &number.to_le_bytes());
        }
    }

    /// VMCLEAR of an L1 that uses enlightened VMCSs is of one, which nothing is written to. False: it does not.
    pub(super) fn clear_enlightened(&mut self, at: Gpa, l1: &impl GuestMemory) -> bool {
        // An L1 that names none has its VMCLEAR mean a region, as ever.
        if self.named_by_assist(l1).unwrap_or(None).is_none() {
            return false;
        }
        // Its memory is left alone: what an exit leaves there is there already.
        if self.enlightened.current == Current::At(at) {
            self.release_enlightened();
        }
        true
    }

    /// Whether VMREAD reads the page: stock KVM lets L1 do so, against the specification, and not write.
    pub(super) fn reads_page(&self) -> bool {
        self.level == Level::L1 && self.is_enlightened()
    }

    /// VMREAD while an enlightened VMCS is current.
    pub(super) fn vmread_page(
        &mut self,
        encoding: u64,
        to: Place,
        cpu: &Cpu,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        let unsupported = Fail::Valid(x86::vmcs::InstructionError::UnsupportedField);
        let Current::At(from) = self.enlightened.current else { return Err(Fail::Invalid) };
        // By the page's own table: it has no halves of 64-bit fields.
        let (offset, bytes) = page::find(encoding).ok_or(unsupported)?;
        let mut value = [0; 8];
        let (low, _) = value.split_at_mut_checked(bytes).ok_or(unsupported)?;
        l1.read(Gpa(from.0.wrapping_add(offset.into())), low)?;
        self.give(u64::from_le_bytes(value), to, cpu, l1)
    }
}

/// How VMLAUNCH and VMRESUME end if L1 names what is no page of memory; nothing is current then.
pub const UNDEFINED: Fail = Fail::Fault(Exception::ud());

#[cfg(test)]
#[path = "enlightened_tests.rs"]
mod tests;
