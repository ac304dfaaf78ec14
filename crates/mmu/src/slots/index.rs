//! An ordered index of memslots that is never changed: a change makes a new one that shares all but the
//! path to the change.
//!
//! So readers hold a whole table without a lock, a change costs the logarithm of the number of slots, and
//! one that fails for want of memory leaves nothing behind. A balanced binary tree (AVL): its depth is at
//! most 1.44 times the logarithm, so walking it needs no allocation and bounded stack.

use host::arc::Arc;
use host::error::NoMemory;

use super::MemSlot;

/// Where a slot stands: a number, and the slot's id where numbers may be equal.
pub(super) type Key = (u64, u16);

/// One above the deepest tree of 2^16 slots.
const DEPTH: usize = 24;

#[derive(Clone, Debug)]
struct Entry {
    key: Key,
    /// One past the last number that the slot covers.
    end: u64,
    slot: Arc<MemSlot>,
}

#[derive(Debug)]
struct Node {
    entry: Entry,
    /// The greatest `end` here and below.
    most: u64,
    height: u8,
    left: Link,
    right: Link,
}

type Link = Option<Arc<Node>>;

/// Slots by some key.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    root: Link,
}

fn height(link: &Link) -> u8 {
    link.as_ref().map_or(0, |node| node.height)
}

fn most(link: &Link) -> u64 {
    link.as_ref().map_or(0, |node| node.most)
}

// Out of line: `balanced` alone would have it seven times, and a change of memory is rare.
#[inline(never)]
fn node(left: Link, entry: Entry, right: Link) -> Result<Arc<Node>, NoMemory> {
    // Kept in the node, since a change asks for it at every step and a walk for it would be linear.
    let height = height(&left).max(height(&right)).saturating_add(1);
    let most = entry.end.max(most(&left)).max(most(&right));
    Arc::new(Node { entry, most, height, left, right })
}

/// A node of two trees whose heights differ by at most two.
fn balanced(left: Link, entry: Entry, right: Link) -> Result<Arc<Node>, NoMemory> {
    // A change below makes one side higher by one at most: two rotations are enough here.
    let (l, r) = (height(&left), height(&right));
    if l > r.saturating_add(1)
        && let Some(high) = &left
    {
        let Node { entry: top, left: outer, right: inner, .. } = &**high;
        // The inner part is the higher one: one rotation would only move the overhang across.
        if height(outer) < height(inner)
            && let Some(middle) = inner
        {
            let low = node(outer.clone(), top.clone(), middle.left.clone())?;
            let other = node(middle.right.clone(), entry, right)?;
            return node(Some(low), middle.entry.clone(), Some(other));
        }
        let other = node(inner.clone(), entry, right)?;
        return node(outer.clone(), top.clone(), Some(other));
    }
    if r > l.saturating_add(1)
        && let Some(high) = &right
    {
        let Node { entry: top, left: inner, right: outer, .. } = &**high;
        if height(outer) < height(inner)
            && let Some(middle) = inner
        {
            let low = node(left, entry, middle.left.clone())?;
            let other = node(middle.right.clone(), top.clone(), outer.clone())?;
            return node(Some(low), middle.entry.clone(), Some(other));
        }
        let other = node(left, entry, inner.clone())?;
        return node(Some(other), top.clone(), outer.clone());
    }
    node(left, entry, right)
}

fn insert(link: &Link, new: Entry) -> Result<Arc<Node>, NoMemory> {
    let Some(here) = link else { return node(None, new, None) };
    let Node { entry, left, right, .. } = &**here;
    if new.key < entry.key {
        balanced(Some(insert(left, new)?), entry.clone(), right.clone())
    } else if new.key > entry.key {
        balanced(left.clone(), entry.clone(), Some(insert(right, new)?))
    } else {
        node(left.clone(), new, right.clone())
    }
}

/// The tree without its first entry, and that.
fn without_first(here: &Arc<Node>) -> Result<(Entry, Link), NoMemory> {
    let Node { entry, left, right, .. } = &**here;
    match left {
        None => Ok((entry.clone(), right.clone())),
        Some(below) => {
            let (first, rest) = without_first(below)?;
            Ok((first, Some(balanced(rest, entry.clone(), right.clone())?)))
        }
    }
}

fn remove(link: &Link, key: Key) -> Result<Link, NoMemory> {
    let Some(here) = link else { return Ok(None) };
    let Node { entry, left, right, .. } = &**here;
    Ok(if key < entry.key {
        Some(balanced(remove(left, key)?, entry.clone(), right.clone())?)
    } else if key > entry.key {
        Some(balanced(left.clone(), entry.clone(), remove(right, key)?)?)
    } else {
        match (left, right) {
            (None, other) | (other, None) => other.clone(),
            (Some(_), Some(below)) => {
                // The next one in order takes the place: nothing else keeps both sides in order.
                let (first, rest) = without_first(below)?;
                Some(balanced(left.clone(), first, rest)?)
            }
        }
    })
}

fn overlapping(link: &Link, start: u64, end: u64, each: &mut impl FnMut(&MemSlot)) {
    let Some(here) = link else { return };
    // Host ranges overlap, so that the order alone says nothing of their ends: this spares the
    // branches that end too early.
    if here.most <= start {
        return;
    }
    overlapping(&here.left, start, end, each);
    // What lies to the right begins later still.
    if here.entry.key.0 < end {
        if here.entry.end > start {
            each(&here.entry.slot);
        }
        overlapping(&here.right, start, end, each);
    }
}

impl Index {
    /// With `slot` at `key`, where there may be one already, covering numbers up to `end`.
    pub(super) fn with(&self, key: Key, end: u64, slot: &Arc<MemSlot>) -> Result<Self, NoMemory> {
        Ok(Self { root: Some(insert(&self.root, Entry { key, end, slot: slot.clone() })?) })
    }

    /// Without what stands at `key`.
    pub(super) fn without(&self, key: Key) -> Result<Self, NoMemory> {
        Ok(Self { root: remove(&self.root, key)? })
    }

    /// The slot that covers a number, where slots do not overlap.
    #[inline]
    pub(super) fn covering(&self, number: u64) -> Option<&MemSlot> {
        // Slots do not overlap in guest memory, so that order alone finds the one slot.
        let mut link = &self.root;
        while let Some(here) = link {
            link = if number < here.entry.key.0 {
                &here.left
            } else if number < here.entry.end {
                return Some(&here.entry.slot);
            } else {
                &here.right
            };
        }
        None
    }

    /// The slot at `key`.
    pub(super) fn at(&self, key: Key) -> Option<&Arc<MemSlot>> {
        let mut link = &self.root;
        while let Some(here) = link {
            link = if key < here.entry.key {
                &here.left
            } else if key == here.entry.key {
                return Some(&here.entry.slot);
            } else {
                &here.right
            };
        }
        None
    }

    /// Calls `each` for every slot that covers a number of `start..end`, in order.
    pub(super) fn overlapping(&self, start: u64, end: u64, mut each: impl FnMut(&MemSlot)) {
        overlapping(&self.root, start, end, &mut each);
    }

    /// All slots in order.
    pub(super) fn iter(&self) -> Iter<'_> {
        let mut iter = Iter { path: [None; DEPTH], depth: 0 };
        iter.descend(&self.root);
        iter
    }

    /// The depth, if every node keeps the rules.
    #[cfg(test)]
    pub(super) fn audit(&self) -> Option<u8> {
        fn check(link: &Link) -> Option<u8> {
            let Some(here) = link else { return Some(0) };
            let (l, r) = (check(&here.left)?, check(&here.right)?);
            let ordered = here.left.as_ref().is_none_or(|n| n.entry.key < here.entry.key)
                && here.right.as_ref().is_none_or(|n| n.entry.key > here.entry.key);
            let end = here.entry.end.max(most(&here.left)).max(most(&here.right));
            let right = ordered && l.abs_diff(r) <= 1 && end == here.most;
            (right && here.height == l.max(r) + 1).then_some(here.height)
        }
        check(&self.root)
    }
}

/// Slots in order.
#[derive(Debug)]
pub struct Iter<'a> {
    /// Nodes whose turn comes after what is below their left.
    path: [Option<&'a Node>; DEPTH],
    depth: usize,
}

impl<'a> Iter<'a> {
    fn descend(&mut self, link: &'a Link) {
        let mut link = link;
        while let Some(here) = link {
            // A tree too deep for the path would be walked in part; no write goes beyond the array.
            if let Some(place) = self.path.get_mut(self.depth) {
                *place = Some(here);
                self.depth += 1;
            }
            link = &here.left;
        }
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = &'a MemSlot;

    fn next(&mut self) -> Option<&'a MemSlot> {
        self.depth = self.depth.checked_sub(1)?;
        let here = self.path.get(self.depth).copied().flatten()?;
        self.descend(&here.right);
        Some(&here.entry.slot)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use proptest::prelude::*;
    use x86::{Gfn, Hva};

    use super::*;
    use crate::slots::SlotFlags;

    fn slot(id: u16) -> Arc<MemSlot> {
        let (flags, base, hva) = (SlotFlags::default(), Gfn(0), Hva(0));
        let slot = MemSlot { id, flags, base, npages: 1, hva, leaving: false, dirty: None };
        Arc::new(slot).unwrap()
    }

    #[test]
    fn as_many_slots_as_there_can_be_are_walked_within_the_depth() {
        // Rising, falling and mixed order: the shapes that unbalanced trees suffer from.
        let orders: [fn(u64) -> u64; 3] =
            [|n: u64| n, |n: u64| 40_000 - n, |n: u64| n.wrapping_mul(0x9e37) & 0xffff];
        for order in orders {
            let mut index = Index::default();
            for n in 0..40_000 {
                index = index.with((order(n), 0), order(n) + 1, &slot(n as u16)).unwrap();
            }
            assert!(usize::from(index.audit().unwrap()) < DEPTH);
            let keys = (0..40_000).map(order).collect::<std::collections::BTreeSet<_>>();
            assert_eq!(index.iter().count(), keys.len());
        }
    }

    proptest! {
        #[test]
        fn random_changes_agree_with_a_map(
            changes in prop::collection::vec((0u64..64, 1u64..16, any::<bool>()), 1..200)
        ) {
            let (mut index, mut map) = (Index::default(), BTreeMap::new());
            for (n, (start, length, add)) in (0..).zip(changes) {
                let key = (start, 0);
                if add {
                    index = index.with(key, start + length, &slot(n)).unwrap();
                    map.insert(start, (start + length, n));
                } else {
                    index = index.without(key).unwrap();
                    map.remove(&start);
                }
                prop_assert!(index.audit().is_some());
                let ids: Vec<u16> = index.iter().map(|s| s.id).collect();
                prop_assert_eq!(&ids, &map.values().map(|v| v.1).collect::<Vec<_>>());
                for (from, to) in [(0, 80), (start, start + 1), (start / 2, start), (7, 9)] {
                    let mut met = Vec::new();
                    index.overlapping(from, to, |s| met.push(s.id));
                    let wanted = map.iter().filter(|(s, (e, _))| **s < to && *e > from);
                    prop_assert_eq!(met, wanted.map(|(_, v)| v.1).collect::<Vec<_>>());
                }
                prop_assert_eq!(index.at(key).map(|s| s.id), map.get(&start).map(|v| v.1));
            }
        }
    }
}
