//! Empty pages held ready, so that a fault allocates before it takes the MMU lock.

use host::error::NoMemory;
use host::page::Page;

/// An empty page that can become a table.
#[derive(Debug)]
pub struct TablePage(pub(super) Page);

/// Pages for tables, kept per vCPU. One fault needs at most four.
#[derive(Debug, Default)]
pub struct TableCache {
    pages: [Option<TablePage>; TableCache::MOST],
    count: usize,
}

impl TableCache {
    /// Levels below the root at most.
    pub const MOST: usize = 4;

    /// Holds nothing.
    pub const fn new() -> Self {
        Self { pages: [const { None }; Self::MOST], count: 0 }
    }

    /// Number of pages held.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Allocates until at least `count` pages (at most [`TableCache::MOST`]) are held. May sleep.
    pub fn top_up(&mut self, count: usize) -> Result<(), NoMemory> {
        while self.count < count.min(Self::MOST) {
            let page = TablePage(Page::zeroed()?);
            self.put(page);
        }
        Ok(())
    }

    /// Takes a page out.
    pub fn take(&mut self) -> Option<TablePage> {
        self.count = self.count.checked_sub(1)?;
        self.pages.get_mut(self.count)?.take()
    }

    /// Puts an unused page back.
    pub fn put(&mut self, page: TablePage) {
        if let Some(place) = self.pages.get_mut(self.count) {
            *place = Some(page);
            self.count += 1;
        }
    }
}
