//! The clock's page under loom: a guest, which reads the page of another vCPU, beside that vCPU's thread, which publishes it
//! anew. The code of the product publishes; only the memory is the model's.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gannet_pv::{ClockPage, ClockSample, Scale, Shared};
use loom::{
    model::Builder,
    sync::{
        Arc,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{self, Acquire, Relaxed, Release},
        },
    },
    thread,
};

/// The words of the page that a guest computes with.
#[derive(Default)]
struct Page {
    version: AtomicU32,
    tsc_timestamp: AtomicU64,
    system_time: AtomicU64,
}

/// The page as the vCPU's thread reaches it: each store after those before it, as `Shared` demands, or not.
struct Stores<'a>(&'a Page, Ordering);

impl Shared for Stores<'_> {
    type Error = ();

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), ()> {
        if offset == 0 {
            data.copy_from_slice(&self.0.version.load(Relaxed).to_le_bytes());
        }
        Ok(())
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), ()> {
        let Self(page, order) = *self;
        match data {
            [a, b, c, d] if offset == 0 => {
                page.version.store(u32::from_le_bytes([*a, *b, *c, *d]), order);
            }
            _ if offset == 4 => {
                let word = |at: usize| {
                    let bytes = data.get(at - 4..at + 4).and_then(|b| b.try_into().ok());
                    bytes.map(u64::from_le_bytes).ok_or(())
                };
                page.tsc_timestamp.store(word(8)?, order);
                page.system_time.store(word(16)?, order);
            }
            _ => return Err(()),
        }
        Ok(())
    }
}

fn sample(n: u64) -> ClockSample {
    ClockSample { guest_tsc: n, system_time: n, scale: Scale::from_khz(1_000_000), stable: true }
}

/// What a guest reads, if the page was whole: as `pvclock_read_begin` and `pvclock_read_retry` do it.
fn read(page: &Page, asks_again: bool) -> Option<(u64, u64)> {
    let version = page.version.load(Acquire);
    let read = (page.tsc_timestamp.load(Acquire), page.system_time.load(Acquire));
    let whole = version & 1 == 0 && (!asks_again || page.version.load(Acquire) == version);
    whole.then_some(read)
}

fn read_beside_updates(order: Ordering, asks_again: bool) {
    Builder::new().check(move || {
        let page = Arc::new(Page::default());
        let thread = {
            let page = page.clone();
            thread::spawn(move || {
                for n in 1..=2 {
                    ClockPage::publish(&Stores(&page, order), &sample(n), false).unwrap();
                }
            })
        };
        if let Some((tsc, time)) = read(&page, asks_again) {
            assert_eq!(tsc, time, "torn");
        }
        thread.join().unwrap();
        assert_eq!(read(&page, true), Some((2, 2)));
    });
}

#[test]
fn a_page_that_reads_whole_is_of_one_instant() {
    read_beside_updates(Release, true);
}

fn tears(order: Ordering, asks_again: bool) -> bool {
    catch_unwind(AssertUnwindSafe(|| read_beside_updates(order, asks_again))).is_err()
}

#[test]
fn stores_out_of_order_and_a_version_that_is_read_once_are_found_out() {
    assert!(tears(Relaxed, true));
    assert!(tears(Release, false));
}
