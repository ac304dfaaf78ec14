//! The kernel's services exercised in the kernel, by the same calls that the crates make.
//!
//! Only with the feature `selftest`: the command [`OPEN`] on `/dev/kvm` then gives a file whose
//! ioctls are the checks below; `linux/selftest/selftest.c` is the program that calls them. What
//! fails is a line number, as the ioctl's value.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use host::event::{EventFd, EventHandler, Watch};
use host::file::{FileObject, NewFile};
use host::fpu::{self, GuestFpu};
use host::gup::{GupError, Patience, fault_in, hva_level};
use host::notifier::{InvalidateHandler, WithNotifier};
use host::page::{Page, Pages};
use host::srcu::Srcu;
use host::sync::{Mutex, RwSpinLock, SpinLock};
use host::task::{Blocked, Waiter};
use host::timer::{TimerHandler, WithTimer};
use host::{Arc, KBox, NoMemory, clock, irq, smp, task, user};
use x86::{Hpa, Hva};

/// Gives a test file.
pub(crate) const OPEN: u32 = 0xaef0;

/// The test file's commands begin here; lower numbers are taken by the kernel for every file.
const FIRST: u32 = 0xaf00;

const ENOTTY: i64 = -25;
const ENOMEM: i64 = -12;

/// Ends the check with the line at which it failed.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            return Err(line!());
        }
    };
}
/// Unwraps, or ends the check.
macro_rules! get {
    ($value:expr) => {
        match $value {
            Ok(value) => value,
            Err(_) => return Err(line!()),
        }
    };
}

type Outcome = Result<(), u32>;

#[derive(Default)]
struct Seen {
    started: AtomicU64,
    ended: AtomicU64,
    released: AtomicU32,
}

impl InvalidateHandler for Seen {
    fn invalidate_start(&self, start: Hva, end: Hva, _: bool) {
        self.started.fetch_add(end.0.wrapping_sub(start.0), Relaxed);
    }
    fn invalidate_end(&self, start: Hva, end: Hva) {
        self.ended.fetch_add(end.0.wrapping_sub(start.0), Relaxed);
    }
    fn clear_young(&self, _: Hva, _: Hva) -> bool {
        false
    }
    fn test_young(&self, _: Hva, _: Hva) -> bool {
        false
    }
    fn release(&self) {
        self.released.fetch_add(1, Relaxed);
    }
}

#[derive(Default)]
struct Heard {
    fired: AtomicU32,
    hung_up: AtomicU32,
}

impl EventHandler for Heard {
    fn fired(&self) {
        self.fired.fetch_add(1, Relaxed);
    }
    fn hung_up(&self) {
        self.hung_up.fetch_add(1, Relaxed);
    }
}

struct Ticker {
    fired: AtomicU32,
    period: u64,
    rounds: u32,
    waiter: Waiter,
}

impl TimerHandler for Ticker {
    fn expired(&self) -> Option<u64> {
        let fired = self.fired.fetch_add(1, Relaxed).wrapping_add(1);
        self.waiter.wake();
        (fired < self.rounds).then(|| clock::monotonic_ns().wrapping_add(self.period))
    }
}

struct Counters {
    mutex: Mutex<[u64; 2]>,
    spin: SpinLock<[u64; 2]>,
    rw: RwSpinLock<[u64; 2]>,
    srcu: Srcu<[u64; 64]>,
    writer: Mutex<()>,
}

/// The object behind the test file.
struct Bench {
    seen: Arc<WithNotifier<Seen>>,
    counters: Counters,
    page: Page,
    watch: Mutex<Option<Arc<Watch<Heard>>>>,
    event: Mutex<Option<EventFd>>,
}

impl FileObject for Bench {
    const NAME: &'static core::ffi::CStr = c"gannet-selftest";
    const MAPPABLE: bool = true;

    fn ioctl(this: &Arc<Self>, command: u32, argument: u64, _: bool) -> i64 {
        let outcome = match command.wrapping_sub(FIRST) {
            1 => memory(),
            2 => heap(),
            3 => this.counters.hammer(argument),
            4 => this.counters.total(argument),
            5 => timers(),
            6 => waiter(),
            7 => user_memory(argument),
            8 => frames(argument),
            9 => return this.invalidated(argument),
            10 => this.watch(argument),
            11 => return this.heard(argument),
            12 => clocks(),
            13 => floating_point(),
            14 => cpus(),
            15 => signals(),
            16 => this.show_page(argument),
            17 => block(argument),
            18 => crate::selftest_switch::run(argument),
            _ => return ENOTTY,
        };
        outcome.map_or_else(i64::from, |()| 0)
    }

    fn mmap_page(&self, offset: u64) -> Option<Hpa> {
        (offset == 0).then(|| self.page.hpa())
    }
}

/// Makes a test file; its descriptor or a negative errno.
pub(crate) fn open() -> i64 {
    let made = || -> Result<Arc<Bench>, NoMemory> {
        Arc::new(Bench {
            seen: WithNotifier::new(Seen::default())?,
            counters: Counters {
                mutex: Mutex::new([0; 2]),
                spin: SpinLock::new([0; 2]),
                rw: RwSpinLock::new([0; 2]),
                srcu: Srcu::new(KBox::new([0; 64])?)?,
                writer: Mutex::new(()),
            },
            page: Page::zeroed()?,
            watch: Mutex::new(None),
            event: Mutex::new(None),
        })
    };
    let Ok(bench) = made() else { return ENOMEM };
    match NewFile::new(bench, Some(7)) {
        Ok(file) => i64::from(file.install()),
        Err(errno) => -i64::from(errno),
    }
}

fn memory() -> Outcome {
    let page = get!(Page::zeroed());
    check!(page.hpa().0 % 4096 == 0 && page.hpa().0 != 0);
    check!(page.table().iter().all(|w| w.load(Relaxed) == 0));
    page.table()[511].store(u64::MAX, Relaxed);
    check!(page.bytes()[4095].load(Relaxed) == 255);
    let pages = get!(Pages::zeroed(3));
    check!(pages.words().len() == 4096 && pages.words().iter().all(|w| w.load(Relaxed) == 0));
    Ok(())
}

#[repr(align(64))]
struct Line([u8; 72]);
#[repr(align(4096))]
struct Sheet([u8; 5000]);

fn heap() -> Outcome {
    let mut v: Vec<u64> = Vec::new();
    check!(v.try_reserve_exact(1 << 20).is_ok());
    v.resize(1 << 20, 7);
    check!(v.iter().all(|w| *w == 7));
    check!(Vec::<u64>::new().try_reserve_exact(1 << 50).is_err());
    for _ in 0..8 {
        let line = get!(KBox::new(Line([1; 72])));
        let sheet = get!(KBox::new(Sheet([2; 5000])));
        check!((&raw const *line).addr() % 64 == 0 && line.0[71] == 1);
        check!((&raw const *sheet).addr() % 4096 == 0 && sheet.0[4999] == 2);
        let zero = get!(KBox::<[u64; 3000]>::zeroed());
        check!(zero.iter().all(|w| *w == 0));
    }
    Ok(())
}

impl Counters {
    /// Several threads do this at once.
    fn hammer(&self, rounds: u64) -> Outcome {
        for i in 0..rounds {
            {
                let mut m = get!(self.mutex.lock_killable());
                check!(m[0] == m[1]);
                m[0] += 1;
                if i % 64 == 0 {
                    task::cond_resched();
                }
                m[1] += 1;
            }
            {
                let mut s = self.spin.lock();
                check!(s[0] == s[1] && !irq::enabled());
                s[0] += 1;
                s[1] += 1;
            }
            if i % 4 == 0 {
                let mut w = self.rw.write();
                check!(w[0] == w[1]);
                w[0] += 1;
                w[1] += 1;
            } else {
                let r = self.rw.read();
                check!(r[0] == r[1]);
            }
            let seen = self.srcu.read();
            check!(seen.iter().all(|w| *w == seen[0]));
            drop(seen);
            if i % 256 == 0 {
                let _one = self.writer.lock();
                let next = self.srcu.read()[0] + 1;
                let mut old = self.srcu.replace(get!(KBox::new([next; 64])));
                old.fill(u64::MAX);
            }
        }
        check!(irq::enabled());
        Ok(())
    }

    fn total(&self, expected: u64) -> Outcome {
        check!(*self.mutex.lock() == [expected; 2]);
        check!(*self.spin.lock() == [expected; 2]);
        check!(self.rw.read()[0] == expected / 4);
        check!(self.srcu.read()[0] == expected / 256);
        Ok(())
    }
}

fn ticker(period: u64, rounds: u32) -> Result<Arc<WithTimer<Ticker>>, NoMemory> {
    WithTimer::new(Ticker { fired: AtomicU32::new(0), period, rounds, waiter: Waiter::new()? })
}

fn spin_ns(ns: u64) {
    let until = clock::monotonic_ns().wrapping_add(ns);
    while clock::monotonic_ns() < until {
        core::hint::spin_loop();
    }
}

fn timers() -> Outcome {
    let one = get!(ticker(0, 1));
    one.start(clock::monotonic_ns() + 2_000_000);
    check!(one.fired.load(Relaxed) == 0);
    spin_ns(10_000_000);
    check!(one.fired.load(Relaxed) == 1 && !one.cancel());
    let many = get!(ticker(1_000_000, 5));
    many.start(clock::monotonic_ns());
    spin_ns(30_000_000);
    check!(many.fired.load(Relaxed) == 5);
    let far = get!(ticker(0, 1));
    far.start(u64::MAX);
    far.start(clock::monotonic_ns() + 50_000_000);
    check!(far.cancel() && far.try_cancel() == Some(false));
    far.start(clock::monotonic_ns() + 1_000_000);
    drop(far);
    spin_ns(5_000_000);
    Ok(())
}

fn waiter() -> Outcome {
    let t = get!(ticker(0, 1));
    check!(!t.waiter.wake());
    check!(t.waiter.block(|| true, 0) == Blocked::AtOnce);
    t.start(clock::monotonic_ns() + 5_000_000);
    check!(t.waiter.block(|| t.fired.load(Relaxed) != 0, 0) == Blocked::Slept);
    t.start(clock::monotonic_ns() + 1_000_000);
    // On one CPU with nothing else to run this polls; anything else sleeps.
    let how = t.waiter.block(|| t.fired.load(Relaxed) == 2, 500_000_000);
    check!(matches!(how, Blocked::Polled | Blocked::Slept));
    Ok(())
}

/// Sleeps until a signal comes.
fn block(_: u64) -> Outcome {
    let w = get!(Waiter::new());
    check!(w.block(|| false, 0) == Blocked::Signal);
    check!(task::signal_pending());
    irq::disable();
    let pending = task::work_pending();
    irq::enable();
    check!(pending && task::handle_work().is_err());
    Ok(())
}

/// `at`: a touched page, an untouched page, a read-only page, a hole.
fn user_memory(at: u64) -> Outcome {
    let [touched, fresh, read_only, hole] = [0, 1, 2, 3].map(|i| Hva(at + i * 4096));
    let mut b = [0u8; 8];
    get!(user::write(touched, b"gannet!!"));
    get!(user::read(touched, &mut b));
    check!(&b == b"gannet!!");
    irq::disable();
    let quick = (
        user::read_nofault(touched, &mut b).is_ok(),
        user::write_nofault(touched, b"GANNET!!").is_ok(),
        user::write_nofault(fresh, &b).is_err(),
        user::write_nofault(read_only, &b).is_err(),
    );
    irq::enable();
    check!(quick == (true, true, true, true));
    check!(user::read(hole, &mut b).is_err() && user::write(read_only, &b).is_err());
    check!(user::read(Hva(0), &mut b).is_err() && user::read(Hva(u64::MAX - 3), &mut b).is_err());
    let kernel = Hva(host::page::direct_map(Hpa(0)).addr() as u64);
    check!(user::read(kernel, &mut b).is_err() && user::write(kernel, &b).is_err());
    check!(user::read_nofault(kernel, &mut b).is_err() && !user::range_ok(kernel, 8));
    get!(user::write(touched, &5u64.to_le_bytes()));
    check!(user::cmpxchg(touched, 8, 5, 1 << 40) == Ok(true));
    check!(user::cmpxchg(touched, 8, 5, 6) == Ok(false));
    check!(user::cmpxchg(touched, 4, 0, 6) == Ok(true));
    check!(user::cmpxchg(touched, 2, 6, 7) == Ok(true));
    check!(user::cmpxchg(touched, 1, 7, 8) == Ok(true));
    check!(user::cmpxchg(read_only, 4, 0, 6).is_err() && user::cmpxchg(hole, 4, 0, 6).is_err());
    get!(user::read(touched, &mut b));
    check!(u64::from_le_bytes(b) == (1 << 40) + 8);
    get!(user::clear(touched, 4096));
    check!(user::clear(read_only, 8).is_err());
    Ok(())
}

/// `at`: as in [`user_memory`], then another fresh page; 2 MiB further, a huge page.
fn frames(at: u64) -> Outcome {
    let [touched, _, read_only, hole, fresh] = [0, 1, 2, 3, 4].map(|i| Hva(at + i * 4096));
    let page = get!(fault_in(touched, true, Patience::Never));
    check!(page.writable && page.refcounted && page.level == 1);
    get!(user::write(touched, b"direct"));
    // SAFETY: the frame is the mapping of a page that this test holds mapped, in the direct map.
    let first = unsafe { host::page::direct_map(page.pfn.hpa()).read_volatile() };
    check!(first == b'd');
    page.set_dirty();
    page.set_accessed();
    check!(fault_in(fresh, true, Patience::Never).err() == Some(GupError::Again));
    let zero = get!(fault_in(fresh, false, Patience::Killable));
    check!(!zero.writable);
    let own = get!(fault_in(fresh, true, Patience::Interruptible));
    check!(own.writable && own.pfn != zero.pfn);
    check!(fault_in(read_only, true, Patience::Killable).err() == Some(GupError::Fault));
    check!(!get!(fault_in(read_only, false, Patience::Killable)).writable);
    check!(fault_in(hole, false, Patience::Killable).err() == Some(GupError::Fault));
    check!(fault_in(Hva(0), false, Patience::Killable).err() == Some(GupError::Fault));
    check!(fault_in(Hva(u64::MAX), false, Patience::Never).is_err());
    let huge = Hva(at + (2 << 20) + 8192);
    check!(hva_level(huge) == 2 && get!(fault_in(huge, true, Patience::Killable)).level == 2);
    check!(hva_level(hole) == 1);
    Ok(())
}

fn clocks() -> Outcome {
    let before = clock::monotonic_ns();
    let s = clock::snapshot();
    let after = clock::monotonic_ns();
    check!(before <= s.monotonic_ns && s.monotonic_ns <= after);
    check!(s.boot_ns >= s.monotonic_ns && s.real_ns > 1_600_000_000_000_000_000);
    check!(clock::realtime_ns() >= s.real_ns && clock::boottime_ns() >= s.boot_ns);
    check!(s.raw_ns != 0 && clock::tsc_khz() > 100_000);
    check!(!s.tsc_based() || s.tsc != 0);
    check!(task::run_delay_ns() > 0 || clock::source_generation() < 100);
    Ok(())
}

fn floating_point() -> Outcome {
    let mut f = get!(GuestFpu::alloc());
    let size = f.uabi_size();
    check!((4096..65536).contains(&size) && fpu::host_xcr0() & 3 == 3);
    let features = fpu::guest_xfeatures();
    check!(features & 3 == 3 && features & !fpu::host_xcr0() == 0);
    let mut image = Vec::new();
    check!(image.try_reserve_exact(size).is_ok());
    image.resize(size, 0u8);
    f.to_uabi(&mut image, features, 0);
    check!(image[0] == 0x7f && image[1] == 3 && image[24..28] == 0x1f80u32.to_le_bytes());
    image[160] = 0x5a;
    image[512] = 3;
    let mut pkru = 0;
    get!(f.from_uabi(&image, features, &mut pkru));
    image[160] = 0;
    f.to_uabi(&mut image, features, 0);
    check!(image[160] == 0x5a);
    image[519] = 0x40;
    check!(f.from_uabi(&image, features, &mut pkru).is_err());
    for _ in 0..100 {
        f.load();
        task::cond_resched();
        irq::disable();
        fpu::ensure_in_registers();
        irq::enable();
        f.put();
    }
    f.to_uabi(&mut image, features, 0);
    check!(image[160] == 0x5a);
    Ok(())
}

static RAN: AtomicU32 = AtomicU32::new(0);
extern "C" fn count_cpu() {
    RAN.fetch_add(1, Relaxed);
}

fn cpus() -> Outcome {
    RAN.store(0, Relaxed);
    smp::run_on_all(count_cpu);
    check!(RAN.load(Relaxed) >= 1 && RAN.load(Relaxed) as usize <= smp::max_cpus());
    for _ in 0..100 {
        smp::sync_cpus(0..smp::max_cpus() + 5);
        smp::sync_cpus([]);
        smp::kick(0);
        smp::kick(1);
        smp::kick(usize::MAX);
    }
    for _ in 0..1000 {
        irq::disable();
        check!(smp::cpu_id() < smp::max_cpus() && !irq::enabled());
        irq::guest_enter();
        irq::guest_exit();
        irq::enable();
    }
    Ok(())
}

fn signals() -> Outcome {
    check!(task::current_tid() > 0 && !task::signal_pending());
    drop(task::with_sigmask(Some(1 << 9)));
    drop(task::with_sigmask(None));
    task::cond_resched();
    irq::disable();
    let pending = task::work_pending();
    irq::enable();
    if pending {
        get!(task::handle_work());
    }
    Ok(())
}

impl Bench {
    /// How many KiB were invalidated so far; -1 unless starts and ends match.
    fn invalidated(&self, _: u64) -> i64 {
        if !self.seen.is_current_mm() {
            return -1;
        }
        let (s, e) = (self.seen.started.load(Relaxed), self.seen.ended.load(Relaxed));
        if s == e { (s >> 10) as i64 } else { -1 }
    }

    fn watch(&self, fd: u64) -> Outcome {
        check!(EventFd::get(-1).is_err() && EventFd::get(0).is_err());
        check!(Watch::new(0, Heard::default()).is_err());
        *self.event.lock() = Some(get!(EventFd::get(fd as i32)));
        let watch = get!(Watch::new(fd as i32, Heard::default()));
        check!(self.event.lock().as_ref().is_some_and(|e| watch.watches(e)));
        *self.watch.lock() = Some(watch);
        Ok(())
    }

    /// How often the watch fired plus 1000 per hang-up. `then` 1: signals first; 2: ends it.
    fn heard(&self, then: u64) -> i64 {
        if then == 1
            && let Some(event) = &*self.event.lock()
        {
            event.signal(3);
        }
        let mut watch = self.watch.lock();
        let Some(heard) = &*watch else { return -1 };
        let count = heard.fired.load(Relaxed) + 1000 * heard.hung_up.load(Relaxed);
        if then == 2 {
            *watch = None;
        }
        i64::from(count)
    }

    fn show_page(&self, value: u64) -> Outcome {
        check!(self.page.table()[0].load(Relaxed) == value);
        self.page.table()[1].store(value.wrapping_add(1), Relaxed);
        Ok(())
    }
}
