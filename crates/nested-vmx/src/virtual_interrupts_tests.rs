use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::testing::{Memory, good, set};

const PAGE: u64 = 0x7000;
const DESCRIPTOR: u64 = 0x9040;

fn with(primary: u32) -> Vmcs12 {
    let mut v = good();
    let base = v.get(field::PROC_CONTROLS);
    set!(
        v,
        PROC_CONTROLS = base | primary | 1 << 21 | 1 << 31,
        PROC_CONTROLS2 = 1 << 9,
        PIN_CONTROLS = 0x97,
        VIRTUAL_APIC_ADDR = PAGE,
        POSTED_INTR_DESC = DESCRIPTOR,
        POSTED_INTR_VECTOR = 0xf2
    );
    v
}

fn put(memory: &Memory, base: u64, vectors: &[u8]) {
    for vector in vectors {
        let at = PAGE + base + u64::from(vector >> 5) * 16;
        let word = memory.read_u32(Gpa(at)).unwrap() | 1 << (vector & 31);
        memory.put(at, &word.to_le_bytes());
    }
}

fn has(memory: &Memory, base: u64) -> Vec<u8> {
    (0..=255u8)
        .filter(|n| {
            let word = memory.read_u32(Gpa(PAGE + base + u64::from(n >> 5) * 16)).unwrap();
            word >> (n & 31) & 1 != 0
        })
        .collect()
}

fn status(v: &Vmcs12) -> (u8, u8) {
    (requested(v), in_service(v))
}

#[test]
fn an_interrupt_waits_if_its_class_is_above_the_priority() {
    let memory = Memory::new();
    for (own, served, asked, waits) in [
        (0x00, 0x00, 0x31, true),
        (0x30, 0x00, 0x31, false),
        (0x2f, 0x00, 0x31, true),
        (0x00, 0x31, 0x3f, false),
        (0x00, 0x31, 0x40, true),
        (0x45, 0x31, 0x40, false),
        (0x00, 0x00, 0x0f, false),
    ] {
        memory.put(PAGE + 0x80, &[own]);
        let mut v = with(0);
        set_status(&mut v, asked, served);
        assert_eq!(evaluate(&v, &memory), waits, "{own:x} {served:x} {asked:x}");
        let priority = if own >> 4 >= served >> 4 { own } else { served & 0xf0 };
        assert_eq!(memory.read_u32(Gpa(PAGE + 0xa0)), Ok(priority.into()));
        // L1 waits for the window itself.
        let mut v = with(1 << 2);
        set_status(&mut v, asked, served);
        assert!(!evaluate(&v, &memory));
    }
}

#[test]
fn an_interrupt_is_delivered_and_ended() {
    let memory = Memory::new();
    put(&memory, 0x200, &[0x31, 0x52, 0xfe]);
    let mut v = with(0);
    set!(v, EOI_EXIT_1 = 1 << (0x52 - 64));
    set_status(&mut v, 0xfe, 0);
    assert_eq!(deliver(&mut v, &memory), Ok(Some(0xfe)));
    assert_eq!((status(&v), has(&memory, 0x100)), ((0x52, 0xfe), Vec::from([0xfe])));
    assert_eq!(has(&memory, 0x200), [0x31, 0x52]);
    assert!(!evaluate(&v, &memory));
    assert_eq!(end(&mut v, &memory), Ended::On(true));
    assert_eq!(deliver(&mut v, &memory), Ok(Some(0x52)));
    assert_eq!(status(&v), (0x31, 0x52));
    // One that came within another.
    assert!(send_self(&mut v, 0x61, &memory));
    assert_eq!(deliver(&mut v, &memory), Ok(Some(0x61)));
    assert_eq!((status(&v), has(&memory, 0x100)), ((0x31, 0x61), Vec::from([0x52, 0x61])));
    assert_eq!(deliver(&mut v, &memory), Ok(None));
    assert_eq!(end(&mut v, &memory), Ended::On(false));
    assert_eq!(end(&mut v, &memory), Ended::Exit(0x52));
    assert_eq!((status(&v), has(&memory, 0x100)), ((0x31, 0), Vec::new()));
    assert_eq!(deliver(&mut v, &memory), Ok(Some(0x31)));
    assert_eq!(end(&mut v, &memory), Ended::On(false));
    assert_eq!((status(&v), has(&memory, 0x200)), ((0, 0), Vec::new()));
}

#[test]
fn an_ipi_to_oneself_is_fixed_and_edge_triggered() {
    assert_eq!(self_ipi(0x4_0041), Some(0x41));
    assert_eq!(self_ipi(0x4_4841), Some(0x41), "logical destination, and assertion");
    for other in [0x4_000f, 0x41, 0x8_0041, 0xc_0041, 0x4_8041, 0x4_0441, 0x4_1041, 1 << 20] {
        assert_eq!(self_ipi(other), None, "{other:x}");
    }
}

#[test]
fn posted_interrupts_are_requested_ones() {
    let memory = Memory::new();
    let mut v = with(0);
    memory.put(DESCRIPTOR + 4, &[2]);
    memory.put(DESCRIPTOR + 31, &[0x80]);
    memory.put(DESCRIPTOR + 32, &[3, 0xf2]);
    put(&memory, 0x200, &[0x41]);
    set_status(&mut v, 0x41, 0);
    assert_eq!(post(&mut v, 0xf1, &memory), Ok(None));
    assert_eq!(post(&mut v, 0xf2, &memory), Ok(Some(true)));
    assert_eq!(has(&memory, 0x200), [33, 0x41, 0xff]);
    assert_eq!(status(&v), (0xff, 0));
    // The bit beside, and the vector that L1 keeps there, stay.
    assert_eq!(memory.read_u64(Gpa(DESCRIPTOR + 32)), Ok(0xf202));
    assert_eq!(memory.read_u64(Gpa(DESCRIPTOR)), Ok(0));
    // Nothing more.
    assert_eq!(post(&mut v, 0xf2, &memory), Ok(Some(true)));
    assert_eq!(status(&v), (0xff, 0));
    set!(v, POSTED_INTR_DESC = 1 << 39);
    assert_eq!(post(&mut v, 0xf2, &memory), Err(Outside));
    set!(v, POSTED_INTR_DESC = DESCRIPTOR, PIN_CONTROLS = 0x17);
    assert_eq!(post(&mut v, 0xf2, &memory), Ok(None));
}

/// Memory of which the host takes a word away, once it was used so many times.
struct Going<'a> {
    memory: &'a Memory,
    word: u64,
    left: std::cell::Cell<u32>,
}

impl Going<'_> {
    fn use_at(&self, at: Gpa) -> Result<(), Outside> {
        if at.0 & !0xfff != self.word & !0xfff {
            return Ok(());
        }
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        if left == 0 { Err(Outside) } else { Ok(()) }
    }
}

impl GuestMemory for Going<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.use_at(at).and_then(|()| self.memory.read(at, into))
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.use_at(at).and_then(|()| self.memory.write(at, from))
    }
    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        self.use_at(at).and_then(|()| self.memory.exchange(at, old, new))
    }
}

/// Wherever posting stops for want of a page, done again it requests all that was posted.
#[test]
fn nothing_posted_is_lost_with_a_page_that_goes() {
    for page in [PAGE, DESCRIPTOR] {
        let mut stopped = 0;
        for left in 0.. {
            let (memory, mut v) = (Memory::new(), with(0));
            memory.put(DESCRIPTOR + 4, &[2]);
            memory.put(DESCRIPTOR + 31, &[0x80]);
            memory.put(DESCRIPTOR + 32, &[1]);
            let going = Going { memory: &memory, word: page, left: left.into() };
            let done = post(&mut v, 0xf2, &going);
            if done.is_err() {
                stopped += 1;
                // L1 does not look for what is posted without it, nor sends another notification.
                let in_descriptor = memory.read_u64(Gpa(DESCRIPTOR + 24)) != Ok(0);
                if page == PAGE && in_descriptor {
                    assert_eq!(memory.read_u64(Gpa(DESCRIPTOR + 32)), Ok(1), "{left}");
                }
                assert_eq!(post(&mut v, 0xf2, &memory), Ok(Some(true)), "{page:x} {left}");
            }
            assert_eq!(has(&memory, 0x200), [33, 0xff], "{page:x} {left}");
            assert_eq!(status(&v), (0xff, 0));
            assert_eq!(memory.read_u64(Gpa(DESCRIPTOR + 24)), Ok(0));
            if done.is_ok() {
                break;
            }
        }
        assert!(stopped > 4);
    }
}

/// Memory in which another vCPU of L1's posts a vector, by one step before each of two accesses of ours: it sets the bit, and
/// then ON, and notifies us if ON was clear (as KVM does, and the SDM asks, §30.6).
struct Shared<'a> {
    memory: &'a Memory,
    steps: [u32; 2],
    at: std::cell::Cell<u32>,
    notifies: std::cell::Cell<bool>,
}

const SENT: u8 = 0x51;

impl Shared<'_> {
    fn advance(&self) {
        let now = self.at.get();
        self.at.set(now + 1);
        if now == self.steps[0] {
            self.set(DESCRIPTOR + u64::from(SENT >> 6) * 8, 1 << (SENT & 63));
        }
        if now == self.steps[1] && self.set(DESCRIPTOR + 32, 1) & 1 == 0 {
            self.notifies.set(true);
        }
    }

    fn set(&self, at: u64, bits: u64) -> u64 {
        let word = self.memory.read_u64(Gpa(at)).unwrap();
        self.memory.put(at, &(word | bits).to_le_bytes());
        word
    }
}

impl GuestMemory for Shared<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.advance();
        self.memory.read(at, into)
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.advance();
        self.memory.write(at, from)
    }
    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        self.advance();
        self.memory.exchange(at, old, new)
    }
}

/// Posting that looks at the vectors first and gives ON up behind them.
fn post_the_wrong_way(v: &mut Vmcs12, memory: &impl GuestMemory) {
    for quarter in 0..4 {
        let at = Gpa(DESCRIPTOR + u64::from(quarter) * 8);
        request(v, quarter, at, memory).unwrap();
    }
    change_bits(Gpa(DESCRIPTOR + 32), 0, 1, memory).unwrap();
}

/// Vectors that were sent, are not requested, and of which no notification tells, over all orders of the steps of two vCPUs.
fn lost(post_once: impl Fn(&mut Vmcs12, &Shared<'_>)) -> u32 {
    const MOST: u32 = 60;
    let mut lost = 0;
    for first in 0..MOST {
        for second in first..MOST {
            let (memory, mut v) = (Memory::new(), with(0));
            // One came before, and is what we are notified of.
            memory.put(DESCRIPTOR + 4, &[2]);
            memory.put(DESCRIPTOR + 32, &[1]);
            let shared = Shared {
                memory: &memory,
                steps: [first, second],
                at: 0.into(),
                notifies: false.into(),
            };
            post_once(&mut v, &shared);
            // What we did not get to see comes behind us.
            while shared.at.get() < MOST {
                shared.advance();
            }
            if shared.notifies.get() {
                post_once(&mut v, &shared);
            }
            lost += u32::from(has(&memory, 0x200) != [33, SENT]);
        }
    }
    lost
}

#[test]
fn whenever_a_vector_is_sent_it_is_requested_or_notified() {
    assert_eq!(lost(|v, memory| assert!(post(v, 0xf2, memory).is_ok())), 0);
}

#[test]
fn the_order_of_on_and_the_vectors_is_what_keeps_them() {
    assert_ne!(lost(|v, memory| post_the_wrong_way(v, memory)), 0);
}

#[test]
fn without_memory_nothing_is_delivered() {
    let memory = Memory::new();
    let mut v = with(0);
    set!(v, VIRTUAL_APIC_ADDR = 1 << 39);
    set_status(&mut v, 0x41, 0);
    assert!(!evaluate(&v, &memory));
    assert_eq!(deliver(&mut v, &memory), Err(Outside));
    assert_eq!(status(&v), (0x41, 0));
    memory.put(DESCRIPTOR, &[0xff]);
    assert_eq!(post(&mut v, 0xf2, &memory), Err(Outside));
    assert_eq!(memory.read_u8(Gpa(DESCRIPTOR)), Ok(0xff));
    assert_eq!(end(&mut v, &memory), Ended::On(false));
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Send(u8),
    End,
    Priority(u8),
    Post(u8),
}

proptest! {
    /// Against sets of vectors: each is delivered once, the highest first, and only above what is served.
    #[test]
    fn vectors_come_in_their_order(
        ops in prop::collection::vec(prop_oneof![
            3 => (16u8..=255).prop_map(Op::Send),
            3 => Just(Op::End),
            2 => any::<u8>().prop_map(Op::Priority),
            2 => (16u8..=255).prop_map(Op::Post),
        ], 1..200),
    ) {
        use std::collections::BTreeSet;
        let (memory, mut v) = (Memory::new(), with(0));
        let (mut asked, mut served, mut own) = (BTreeSet::new(), BTreeSet::new(), 0u8);
        for op in ops {
            let waits = match op {
                Op::Send(vector) => { asked.insert(vector); send_self(&mut v, vector, &memory) }
                Op::End => {
                    served.pop_last();
                    match end(&mut v, &memory) { Ended::On(waits) => waits, Ended::Exit(_) => unreachable!() }
                }
                Op::Priority(new) => {
                    own = new;
                    memory.put(PAGE + 0x80, &[new]);
                    evaluate(&v, &memory)
                }
                Op::Post(vector) => {
                    asked.insert(vector);
                    memory.put(DESCRIPTOR + u64::from(vector / 8), &[1 << (vector & 7)]);
                    post(&mut v, 0xf2, &memory).unwrap().unwrap()
                }
            };
            let above = (own >> 4).max(served.last().map_or(0, |n: &u8| n >> 4));
            let next = asked.last().copied().filter(|n| n >> 4 > above);
            prop_assert_eq!(waits, next.is_some());
            if let Some(next) = next {
                prop_assert_eq!(deliver(&mut v, &memory), Ok(Some(next)));
                asked.remove(&next);
                served.insert(next);
            }
            prop_assert_eq!(has(&memory, 0x200), asked.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(has(&memory, 0x100), served.iter().copied().collect::<Vec<_>>());
            let top = |set: &BTreeSet<u8>| set.last().copied().unwrap_or(0);
            prop_assert_eq!(status(&v), (top(&asked), top(&served)));
        }
    }
}
