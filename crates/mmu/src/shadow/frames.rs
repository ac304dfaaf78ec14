//! Per guest frame: where its leaf entries are, and whether the guest may write it.
//!
//! Heads of lists in chunks of 512 frames, found by slot. Spans and chunks are made outside the inner
//! loop, by the fault that brings a frame into the tree; so making an entry allocates nothing.
//!
//! Why frames are known here beside the tree: a withdrawal names frames, and has to find all shadow leaves of each
//! without looking at every shadow page. Why spans go by slot: guest memory has holes of many gigabytes, and an array from
//! zero on would be mostly nothing.

use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use host::GuestIndex;
use host::boxed::KBox;
use host::error::NoMemory;
use host::page::Page;
use x86::Gfn;

use crate::source::PS;

/// Frames of a chunk: those of a large page.
pub(super) const CHUNK: u64 = 512;

/// 512 frames that a large page could hold.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Bits 31:0 the first of the frame's small leaves, bit 32 [`PROTECTED`].
    words: Page,
    /// What the tree says of each frame, as far as it was asked: an entry of the hardware's without
    /// the guest's part. 0: ask.
    known: Page,
    /// Some of those say that the frame is in a large page.
    known_large: Cell<bool>,
    /// The first of the large leaves.
    pub(super) large: Cell<u32>,
    /// Frames that the guest must not write.
    pub(super) protected: Cell<u32>,
}

/// The frame holds a guest table that shadow pages rely on not being written unnoticed.
const PROTECTED: u64 = 1 << 32;

impl Chunk {
    /// Of no leaves.
    pub(super) fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            words: Page::zeroed()?,
            known: Page::zeroed()?,
            known_large: Cell::new(false),
            large: Cell::new(0),
            protected: Cell::new(0),
        })
    }

    #[inline]
    fn word(&self, gfn: Gfn) -> &AtomicU64 {
        &self.words.table()[(gfn.0 & (CHUNK - 1)) as usize]
    }

    /// The first leaf of a frame, 0 for none.
    #[inline]
    pub(super) fn head(&self, gfn: Gfn) -> u32 {
        // Relaxed: the shadow lock orders all who come here.
        self.word(gfn).load(Ordering::Relaxed) as u32
    }

    /// Makes a node the first, and returns the one that was.
    #[inline]
    pub(super) fn replace_head(&self, gfn: Gfn, node: u32) -> u32 {
        let word = self.word(gfn);
        let old = word.load(Ordering::Relaxed);
        word.store(old & PROTECTED | u64::from(node), Ordering::Relaxed);
        old as u32
    }

    #[inline]
    pub(super) fn set_head(&self, gfn: Gfn, node: u32) {
        let word = self.word(gfn);
        // The mark is the frame's and not the list's: it outlives the leaves.
        let flags = word.load(Ordering::Relaxed) & PROTECTED;
        word.store(flags | u64::from(node), Ordering::Relaxed);
    }

    #[inline]
    fn known_word(&self, gfn: Gfn) -> &AtomicU64 {
        &self.known.table()[(gfn.0 & (CHUNK - 1)) as usize]
    }

    /// What the tree says of a frame: address, P, W, and PS if it is part of a large page.
    /// 0: not known.
    #[inline]
    pub(super) fn known(&self, gfn: Gfn) -> u64 {
        self.known_word(gfn).load(Ordering::Relaxed)
    }

    /// Remembers what the tree says. With the shadow lock held since it was asked.
    pub(super) fn learn(&self, gfn: Gfn, entry: u64) {
        self.known_word(gfn).store(entry, Ordering::Relaxed);
        if entry & PS != 0 {
            self.known_large.set(true);
        }
    }

    /// Forgets what the tree said of the frames `first..end`, and of the large pages they lie in.
    pub(super) fn unlearn(&self, first: u64, end: u64) {
        // A large page is the whole chunk: with one of its frames all of them are gone.
        let whole = self.known_large.replace(false);
        let (first, end) = if whole { (0, CHUNK) } else { (first, end) };
        for gfn in first..end {
            self.known_word(Gfn(gfn)).store(0, Ordering::Relaxed);
        }
    }

    /// Whether the guest must not write a frame.
    #[inline]
    pub(super) fn is_protected(&self, gfn: Gfn) -> bool {
        self.word(gfn).load(Ordering::Relaxed) & PROTECTED != 0
    }

    pub(super) fn set_protected(&self, gfn: Gfn, protected: bool) {
        if self.is_protected(gfn) == protected {
            return;
        }
        let word = self.word(gfn);
        word.store(word.load(Ordering::Relaxed) ^ PROTECTED, Ordering::Relaxed);
        // A count, so that a large page asks one word and not 512.
        let one = if protected { 1 } else { u32::MAX };
        self.protected.set(self.protected.get().wrapping_add(one));
    }

    /// Whether nothing is known of a frame.
    #[inline]
    pub(super) fn is_blank(&self, gfn: Gfn) -> bool {
        self.word(gfn).load(Ordering::Relaxed) == 0
    }
}

/// The chunks of a slot.
#[derive(Debug)]
pub(super) struct Span {
    base: u64,
    end: u64,
    chunks: Vec<Option<KBox<Chunk>>>,
}

impl Span {
    /// For the frames `base..end`, without chunks.
    pub(super) fn new(base: Gfn, end: Gfn) -> Result<Self, NoMemory> {
        // A slot may begin and end within a chunk: either part takes a chunk of its own.
        let count = (end.0.div_ceil(CHUNK)).saturating_sub(base.0 / CHUNK);
        let count = usize::try_from(count).map_err(|_| NoMemory)?;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count)?;
        chunks.resize_with(count, || None);
        Ok(Self { base: base.0, end: end.0, chunks })
    }

    #[inline]
    fn place(&self, gfn: Gfn) -> usize {
        // By chunks and not by frames, since a slot need not begin at a chunk's first.
        (gfn.0 / CHUNK).wrapping_sub(self.base / CHUNK) as usize
    }

    #[inline]
    fn contains(&self, gfn: Gfn) -> bool {
        self.base <= gfn.0 && gfn.0 < self.end
    }
}

/// What [`Frames::lacks`] finds missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Nothing is missing.
    Nothing,
    /// The slot's span, and room for so many.
    Span(usize),
    /// A chunk of the span.
    Chunk,
}

/// All spans, by rising frame.
#[derive(Debug, Default)]
pub(super) struct Frames {
    spans: Vec<Span>,
    hint: Cell<usize>,
}

impl Frames {
    /// The chunk of a frame, if anything was ever known of one near it.
    #[inline]
    pub(super) fn chunk(&self, gfn: Gfn) -> Option<&Chunk> {
        // Guests stay in one slot for long. A wrong hint costs the search, and nothing else.
        let span = match self.spans.get(self.hint.get()) {
            Some(span) if span.contains(gfn) => span,
            _ => self.search(gfn)?,
        };
        GuestIndex::from(span.place(gfn)).of(&span.chunks)?.as_deref()
    }

    #[inline(never)]
    fn search(&self, gfn: Gfn) -> Option<&Span> {
        // By the last span that begins at or before the frame: spans do not overlap.
        let at = self.spans.partition_point(|span| span.base <= gfn.0).checked_sub(1)?;
        let span = self.spans.get(at).filter(|span| span.contains(gfn))?;
        self.hint.set(at);
        Some(span)
    }

    /// What must be made before leaves of a frame can be noted.
    pub(super) fn lacks(&self, gfn: Gfn) -> Lack {
        match self.search(gfn) {
            None => Lack::Span(self.spans.len().saturating_add(1)),
            Some(span) => match GuestIndex::from(span.place(gfn)).of(&span.chunks) {
                Some(Some(_)) => Lack::Nothing,
                _ => Lack::Chunk,
            },
        }
    }

    /// Adds a span; `room` is an empty vector with place for all of them, and the old one comes back
    /// in it, for the caller to free. The span comes back if it would overlap another.
    pub(super) fn add_span(&mut self, span: Span, room: &mut Vec<Span>) -> Option<Span> {
        // The room was counted before the lock was taken: a span that came meanwhile makes it too
        // small. The fault comes again.
        if room.capacity() <= self.spans.len() {
            return Some(span);
        }
        let at = self.spans.partition_point(|other| other.base < span.base);
        let before = at.checked_sub(1).and_then(|n| self.spans.get(n));
        let clear = before.is_none_or(|other| other.end <= span.base)
            && self.spans.get(at).is_none_or(|other| span.end <= other.base);
        if !clear {
            return Some(span);
        }
        // Moved, not grown: nothing is allocated with the lock held.
        room.append(&mut self.spans);
        room.insert(at, span);
        core::mem::swap(room, &mut self.spans);
        None
    }

    /// Adds a chunk. It comes back if it is not wanted.
    pub(super) fn add_chunk(&mut self, gfn: Gfn, chunk: KBox<Chunk>) -> Option<KBox<Chunk>> {
        let at = self.spans.partition_point(|span| span.base <= gfn.0).checked_sub(1);
        let span = at.and_then(|n| self.spans.get_mut(n)).filter(|span| span.contains(gfn));
        let Some(span) = span else { return Some(chunk) };
        let place = span.place(gfn);
        match GuestIndex::from(place).of_mut(&mut span.chunks) {
            Some(free @ None) => {
                *free = Some(chunk);
                None
            }
            _ => Some(chunk),
        }
    }

    /// Takes out the span of a slot that is gone, for the caller to free.
    pub(super) fn remove_span(&mut self, base: Gfn) -> Option<Span> {
        let at = self.spans.iter().position(|span| span.base == base.0)?;
        // Spans behind it move down, so that the hint may name another, or none.
        self.hint.set(0);
        Some(self.spans.remove(at))
    }

    /// Calls `each(chunk, first, behind)` for every chunk with frames of `first..end`.
    pub(super) fn for_chunks(&self, first: Gfn, end: Gfn, mut each: impl FnMut(&Chunk, u64, u64)) {
        // Sorted and disjoint: one frame is not looked for in every slot.
        let begin = self.spans.partition_point(|span| span.end <= first.0);
        let spans = self.spans.iter().skip(begin);
        for span in spans.take_while(|span| span.base < end.0) {
            let (from, to) = (first.0.max(span.base), end.0.min(span.end));
            let mut at = from;
            while at < to {
                let next = (at | (CHUNK - 1)).wrapping_add(1).min(to);
                if let Some(Some(chunk)) = span.chunks.get(span.place(Gfn(at))) {
                    each(chunk, at, next);
                }
                at = next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_found_by_slot_and_chunk() {
        let mut frames = Frames::default();
        assert_eq!(frames.lacks(Gfn(700)), Lack::Span(1));
        for (base, end) in [(600, 1500), (10, 600), (1500, 1501)] {
            let mut room = Vec::with_capacity(8);
            frames.add_span(Span::new(Gfn(base), Gfn(end)).unwrap(), &mut room);
        }
        assert_eq!(frames.lacks(Gfn(700)), Lack::Chunk);
        let chunk = || KBox::new(Chunk::new().unwrap()).unwrap();
        assert!(frames.add_chunk(Gfn(700), chunk()).is_none());
        assert!(frames.add_chunk(Gfn(700), chunk()).is_some());
        assert!(frames.add_chunk(Gfn(1501), chunk()).is_some());
        frames.chunk(Gfn(1000)).unwrap().set_head(Gfn(1000), 7);
        frames.chunk(Gfn(1000)).unwrap().set_protected(Gfn(1000), true);
        frames.chunk(Gfn(1000)).unwrap().set_head(Gfn(1000), 8);
        let chunk = frames.chunk(Gfn(700)).unwrap();
        assert_eq!((chunk.head(Gfn(1000)), chunk.head(Gfn(700)), chunk.protected.get()), (8, 0, 1));
        assert!(chunk.is_protected(Gfn(1000)) && frames.chunk(Gfn(599)).is_none());
        let mut seen = Vec::new();
        frames.for_chunks(Gfn(0), Gfn(1 << 40), |_, first, end| seen.push((first, end)));
        assert_eq!(seen, [(600, 1024)]);
        assert!(frames.remove_span(Gfn(600)).is_some() && frames.chunk(Gfn(700)).is_none());
    }

    #[test]
    fn overlapping_spans_are_not_added() {
        let mut frames = Frames::default();
        for (base, end) in [(100, 200), (150, 160), (50, 101), (199, 300), (200, 201)] {
            let mut room = Vec::with_capacity(8);
            frames.add_span(Span::new(Gfn(base), Gfn(end)).unwrap(), &mut room);
        }
        assert_eq!(frames.spans.len(), 2);
    }
}
