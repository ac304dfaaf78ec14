//! VMCB12 against plain rules, written apart from the code: what is read, what is merged, whose an exit is.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicU64, Ordering},
};

use gannet_nested_svm::{
    L1Memory, Offered, Outside, Words, leave, merge,
    reflect::{self, Claim, Exit},
    vmcb12::Vmcb12,
};
use proptest::prelude::*;
use x86::{
    Direction, Gpa, Hpa,
    vmcb::{Clean, ExitCode, Vmcb},
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const AT: u64 = 0x3000;

/// A page that another vCPU of L1's rewrites after every read, and that counts how often each byte was read.
struct Rewritten {
    page: RefCell<Vec<u8>>,
    reads: RefCell<Vec<u32>>,
}

impl Rewritten {
    fn new(seed: u8) -> Self {
        let page =
            (0..4096usize).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        Self { page: RefCell::new(page), reads: RefCell::new(vec![0; 4096]) }
    }
}

impl L1Memory for Rewritten {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let from = at.0.checked_sub(AT).ok_or(Outside)? as usize;
        let mut page = self.page.borrow_mut();
        into.copy_from_slice(page.get(from..from + into.len()).ok_or(Outside)?);
        for seen in &mut self.reads.borrow_mut()[from..from + into.len()] {
            *seen += 1;
        }
        page.iter_mut().for_each(|byte| *byte = byte.wrapping_add(101));
        Ok(())
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let to = at.0.checked_sub(AT).ok_or(Outside)? as usize;
        self.page.borrow_mut().get_mut(to..to + from.len()).ok_or(Outside)?.copy_from_slice(from);
        Ok(())
    }
}

/// L1's memory: one page, and it stays as it is.
struct Page(RefCell<Vec<u8>>);

impl L1Memory for Page {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let from = at.0.checked_sub(AT).ok_or(Outside)? as usize;
        into.copy_from_slice(self.0.borrow().get(from..from + into.len()).ok_or(Outside)?);
        Ok(())
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let to = at.0.checked_sub(AT).ok_or(Outside)? as usize;
        self.0.borrow_mut().get_mut(to..to + from.len()).ok_or(Outside)?.copy_from_slice(from);
        Ok(())
    }
}

/// L1's memory: one page, which is given in place.
struct InPlace(Page, Words);

impl InPlace {
    fn new(page: Vec<u8>) -> Self {
        let word = |n: usize| u64::from_le_bytes(page[8 * n..8 * n + 8].try_into().unwrap());
        let words = std::array::from_fn(|n| AtomicU64::new(word(n)));
        Self(Page(RefCell::new(page)), words)
    }
    fn bytes(&self) -> Vec<u8> {
        self.1.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }
}

impl L1Memory for InPlace {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.0.read(at, into)
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.0.write(at, from)
    }
    fn page(&self, at: Gpa, _: Direction) -> Option<&Words> {
        (at.0 == AT).then_some(&self.1)
    }
}

const OFFERED: Offered = Offered {
    physical_bits: 48,
    flush_by_asid: true,
    npt: true,
    nrip_save: true,
    decode_assists: true,
    pause_filter: true,
    pause_threshold: true,
    vgif: false,
    virtual_vmload: false,
    wide_sysenter: false,
    lbr: true,
    vnmi: false,
    cr4: u64::MAX,
    efer: u64::MAX,
};

fn l0(intercepts: [u32; 6]) -> merge::L0 {
    merge::L0 {
        intercepts,
        tsc_offset: 1000,
        iopm: Hpa(0x10_0000),
        msrpm: Hpa(0x20_0000),
        root: Some(Hpa(0x30_0000)),
        pat: 0x0007_0406_0007_0406,
        pause: (0, 3000),
        l1_interrupts: true,
    }
}

#[test]
fn no_byte_of_the_block_is_read_twice() {
    let memory = Rewritten::new(3);
    let mut v12 = Vmcb12::new();
    v12.load(&memory, Gpa(AT)).unwrap();
    let copy = v12.get().as_bytes().to_vec();
    assert!(memory.reads.borrow().iter().all(|seen| *seen <= 1));
    // What is done with it afterwards looks at the copy.
    let mut b02 = Vmcb::new_zeroed();
    let _ = gannet_nested_svm::checks::controls(v12.control(), Some(&v12.get().save), &OFFERED);
    merge::enter(&mut b02, v12.get(), Clean::ALL, &l0([0; 6]), &OFFERED);
    assert_eq!(v12.get().as_bytes(), copy);
    assert!(memory.reads.borrow().iter().all(|seen| *seen <= 1));
}

#[test]
fn a_block_that_is_no_memory_leaves_no_trust_in_the_copy() {
    let memory = Page(RefCell::new(vec![0xff; 4096]));
    let mut v12 = Vmcb12::new();
    assert_eq!(v12.load(&memory, Gpa(AT)), Ok(Clean::ALL));
    assert_eq!(v12.load(&memory, Gpa(AT)), Ok(Clean::empty()), "all clean bits are set");
    assert_eq!(v12.load(&memory, Gpa(0)), Err(Outside));
    assert_eq!(v12.load(&memory, Gpa(AT)), Ok(Clean::ALL));
    v12.forget();
    assert_eq!(v12.load(&memory, Gpa(AT)), Ok(Clean::ALL));
}

/// Bytes of the save area that block 02 shares with VMCB12, by clean group.
fn groups() -> Vec<(Clean, std::ops::Range<usize>)> {
    vec![
        (Clean::SEG, 0x400..0x440),
        (Clean::SEG, 0x4cb..0x4cc),
        (Clean::DT, 0x460..0x470),
        (Clean::DT, 0x480..0x490),
        (Clean::CR, 0x4d0..0x4d8),
        (Clean::CR, 0x548..0x560),
        (Clean::DR, 0x560..0x570),
        (Clean::CR2, 0x640..0x648),
        (Clean::LBR, 0x670..0x698),
    ]
}

proptest! {
    /// In place the same is read and written as by copies.
    #[test]
    fn in_place_or_by_copies_is_the_same(
        first in prop::collection::vec(any::<u8>(), 4096),
        second in prop::collection::vec(any::<u8>(), 4096),
        b02 in prop::collection::vec(any::<u8>(), 4096),
        code in prop::sample::select(vec![0x4e_u64, 0x400, 0x72, u64::MAX, 0x60]),
    ) {
        let (mut copied, mut in_place) = (Vmcb12::new(), Vmcb12::new());
        for page in [first, second] {
            let (by_copy, there) = (Page(RefCell::new(page.clone())), InPlace::new(page));
            prop_assert_eq!(copied.load(&by_copy, Gpa(AT)), in_place.load(&there, Gpa(AT)));
            prop_assert_eq!(copied.get().as_bytes(), in_place.get().as_bytes());
            let (from, exit) = (
                Vmcb::read_from_bytes(&b02).unwrap(),
                Exit { code: ExitCode(code), info_1: 7, info_2: 9 },
            );
            let left = leave::Left {
                from: &from,
                cr0_hidden: 0x4000_0000,
                exit: &exit,
                undelivered: leave::Undelivered { info: 0x8000_0b0e },
                entered: true,
            };
            prop_assert_eq!(leave::write(&by_copy, &copied, &left, &OFFERED), Ok(()));
            prop_assert_eq!(leave::write(&there, &in_place, &left, &OFFERED), Ok(()));
            prop_assert_eq!(&*by_copy.0.borrow(), &there.bytes());
        }
    }

    /// L1 tells the truth: to take over only what it calls dirty gives the block that taking over all gives.
    #[test]
    fn truthful_clean_bits_change_nothing(
        first in prop::collection::vec(any::<u8>(), 4096),
        second in prop::collection::vec(any::<u8>(), 4096),
        clean in any::<u32>(),
        wanted in any::<[u32; 6]>(),
    ) {
        let clean = Clean::from_bits_truncate(clean);
        let (mut first, mut second) = (first, second);
        // With records of its own: else block 02 has L1's, which are another's to put there.
        first[0xb8] |= 1;
        second[0xb8] |= 1;
        for (group, range) in groups() {
            if clean.contains(group) {
                second[range.clone()].copy_from_slice(&first[range]);
            }
        }
        second[0xc0..0xc4].copy_from_slice(&clean.bits().to_le_bytes());
        let memory = Page(RefCell::new(first));
        let (mut v12, mut tracked) = (Vmcb12::new(), Vmcb::new_zeroed());
        let all = v12.load(&memory, Gpa(AT)).unwrap();
        merge::enter(&mut tracked, v12.get(), all, &l0(wanted), &OFFERED);
        memory.0.replace(second);
        let dirty = v12.load(&memory, Gpa(AT)).unwrap();
        prop_assert_eq!(dirty, Clean::ALL - clean);
        merge::enter(&mut tracked, v12.get(), dirty, &l0(wanted), &OFFERED);
        let mut whole = Vmcb::new_zeroed();
        merge::enter(&mut whole, v12.get(), Clean::ALL, &l0(wanted), &OFFERED);
        prop_assert_eq!(tracked.as_bytes(), whole.as_bytes());
    }

    /// Whatever L1 writes, L0 keeps what it must have, and gives no bit away that it does not know.
    #[test]
    fn l0_keeps_what_is_its_own(
        page in prop::collection::vec(any::<u8>(), 4096),
        wanted in any::<[u32; 6]>(),
        interrupts in any::<bool>(),
    ) {
        let memory = Page(RefCell::new(page));
        let mut v12 = Vmcb12::new();
        let all = v12.load(&memory, Gpa(AT)).unwrap();
        let l0 = merge::L0 { l1_interrupts: interrupts, ..l0(wanted) };
        let mut b02 = Vmcb::new_zeroed();
        merge::enter(&mut b02, v12.get(), all, &l0, &OFFERED);
        let c = &b02.control;
        for (at, (has, needs)) in c.intercepts.iter().zip(wanted).enumerate() {
            // Writes of CR8, the window, VMMCALL.
            let may_go = [1 << 24, 0, 0, 1 << 4, 1 << 1, 0][at];
            prop_assert_eq!(needs & !has & !may_go, 0);
        }
        prop_assert_eq!(c.intercepts[4] & 0b1101, 0b1101, "VMRUN, VMLOAD, VMSAVE");
        prop_assert_eq!(c.int_ctl & !0x001f_010f, 1 << 24);
        prop_assert_eq!((c.iopm_base_pa, c.msrpm_base_pa, c.ncr3), (0x10_0000, 0x20_0000, 0x30_0000));
        prop_assert_eq!((c.np_ctl, c.tlb_ctl, c.virt_ext & !1), (1, 0, 0));
        prop_assert_eq!((c.avic_vapic_bar, c.ghcb_gpa, c.vmsa_pa, c.avic_backing_page), (0, 0, 0, 0));
        prop_assert_eq!(b02.save.cpl & !3, 0);
        // What VMRUN does not load stays L1's.
        prop_assert_eq!((b02.save.star, b02.save.kernel_gs_base, b02.save.sysenter_eip), (0, 0, 0));
    }

    /// Two entries in a row with the same VMCB12 change no group the second time.
    #[test]
    fn nothing_changed_is_nothing_stale(page in prop::collection::vec(any::<u8>(), 4096)) {
        let memory = Page(RefCell::new(page));
        let mut v12 = Vmcb12::new();
        let all = v12.load(&memory, Gpa(AT)).unwrap();
        let mut b02 = Vmcb::new_zeroed();
        merge::enter(&mut b02, v12.get(), all, &l0([0; 6]), &OFFERED);
        prop_assert_eq!(merge::enter(&mut b02, v12.get(), all, &l0([0; 6]), &OFFERED), Clean::empty());
    }

    /// Whose an exit is, by the manual's tables alone.
    #[test]
    fn exits_are_claimed_as_the_manual_says(
        intercepts in any::<[u32; 6]>(),
        code in prop_oneof![0u64..0xc0, Just(0x400), Just(u64::MAX), any::<u64>()],
        info_1 in any::<u64>(),
        msr in any::<u32>(),
        map in any::<u8>(),
    ) {
        let memory = Page(RefCell::new(vec![map; 4096]));
        let mut block = Vmcb::new_zeroed();
        block.control.intercepts = intercepts;
        // Neither map is memory but for their first page.
        block.control.msrpm_base_pa = AT;
        block.control.iopm_base_pa = AT;
        let exit = Exit { code: ExitCode(code), info_1, info_2: msr.into() };
        let asked = |word: usize, bit: u64| intercepts[word] >> bit & 1 == 1;
        let expected = match code {
            0x00..=0x1f => asked(0, code),
            0x20..=0x3f => asked(1, code - 0x20),
            0x52 => false,
            0x40..=0x5f => asked(2, code - 0x40),
            0x60..=0x63 | 0x7e => false,
            0x7b => {
                let port = info_1 >> 16 & 0xffff;
                let bits = match info_1 >> 4 & 7 { 1 => 1u32, 2 => 3, _ => 15 };
                let both = u32::from(map) | u32::from(map) << 8;
                let outside = port / 8 + 2 > 4096;
                asked(3, 27) && (outside || both >> (port % 8) & bits != 0)
            }
            0x7c => {
                let index = match msr {
                    0..=0x1fff => Some(msr),
                    0xc000_0000..=0xc000_1fff => Some(0x2000 + msr - 0xc000_0000),
                    _ => None,
                };
                let closed = index.is_none_or(|at| map >> (at % 4 * 2 + (info_1 & 1) as u32) & 1 == 1);
                asked(3, 28) && closed
            }
            0x64..=0x7f => asked(3, code - 0x60),
            0x80..=0x9f => asked(4, code - 0x80),
            0xa0..=0xbf => asked(5, code - 0xa0),
            u64::MAX => true,
            _ => false,
        };
        let claim = reflect::claims(&block.control, &Offered::default(), &exit, &memory);
        prop_assert_eq!(claim == Claim::L1, expected);
    }
}
