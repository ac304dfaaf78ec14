//! Hyper-V's enlightened VMCS in the model: a page is a dictionary of fields, an entry reads it whole and an exit writes
//! it whole. Where a field lies and what makes it clean is written down here once more, from the specification: no table
//! of the code's is used.

use std::collections::BTreeMap;

use gannet_nested_vmx::{GuestMemory, Machine};
use x86::Gpa;

use super::world::{self, GOOD, Memory};

/// The VP assist page, and the pages that it may name.
pub const ASSIST: u64 = 0x8000;
pub const PAGES: [u64; 3] = [0x9000, 0xa000, 0xb000];
/// No memory.
const NOWHERE: u64 = 0x8_0000;

const BYTES: usize = 1024;
const CLEAN: usize = 824;
const CONTROL: usize = 836;
/// Of a field that an entry always reads, and of one that it never does.
const ALWAYS: u8 = 16;
const REPORT: u8 = 17;

/// The fields that the world uses: encoding, byte of the page, bit of the clean fields, whether an exit writes it.
#[rustfmt::skip] // A table.
const FIELDS: &[(u16, usize, u8, bool)] = &[
    (0x0c02, 10, 14, false), (0x0c04, 12, 14, false), (0x0c0c, 20, 14, false), (0x2c02, 32, 14, false),
    (0x6c00, 40, 14, false), (0x6c02, 48, 14, false), (0x6c04, 56, 14, false), (0x6c16, 80, 14, false),
    (0x4000, 92, 3, false), (0x400c, 96, 3, false), (0x401e, 100, 3, false),
    (0x0802, 130, 12, true), (0x0804, 132, 12, true), (0x080e, 142, 12, true),
    (0x4802, 148, 12, true), (0x4804, 152, 12, true), (0x480e, 172, 12, true),
    (0x4810, 176, 12, true), (0x4812, 180, 12, true),
    (0x4814, 184, 12, true), (0x4816, 188, 12, true), (0x4818, 192, 12, true), (0x481a, 196, 12, true),
    (0x481c, 200, 12, true), (0x481e, 204, 12, true), (0x4820, 208, 12, true), (0x4822, 212, 12, true),
    (0x680e, 248, 12, true), (0x2010, 400, 2, false), (0x2800, 416, 11, false),
    (0x2802, 424, 11, true), (0x2804, 432, 11, true), (0x2806, 440, 11, true),
    (0x6822, 480, 11, true), (0x6824, 488, 11, true), (0x4826, 504, 11, true), (0x482a, 508, 11, true),
    (0x6000, 512, 8, false), (0x6004, 528, 8, false),
    (0x6800, 544, 8, true), (0x6802, 552, 8, true), (0x6804, 560, 8, true), (0x681a, 568, 8, true),
    (0x6c14, 616, 13, false), (0x201a, 624, 9, false), (0x0000, 632, 9, false),
    (0x2400, 680, REPORT, true), (0x4400, 688, REPORT, true), (0x4402, 692, REPORT, true),
    (0x4404, 696, REPORT, true), (0x4406, 700, REPORT, true), (0x4408, 704, REPORT, true),
    (0x440c, 712, REPORT, true), (0x440e, 716, REPORT, true), (0x6400, 720, REPORT, true),
    (0x640a, 760, REPORT, true),
    (0x681c, 768, 10, true), (0x6820, 776, 10, true), (0x4824, 784, 10, true), (0x4002, 788, 4, false),
    (0x4004, 792, 7, false), (0x4012, 796, 6, true), (0x4016, 800, 5, true), (0x681e, 816, ALWAYS, true),
];

fn width(encoding: u16) -> usize {
    [2, 8, 4, 8][usize::from(encoding >> 13 & 3)]
}

fn cut(encoding: u16, value: u64) -> u64 {
    value & u64::MAX >> (64 - 8 * width(encoding))
}

#[derive(Clone, Default)]
struct Page {
    version: u32,
    clean: u32,
    control: u32,
    fields: BTreeMap<u16, u64>,
}

impl Page {
    fn good() -> Self {
        Self { version: 1, fields: GOOD.iter().copied().collect(), ..Self::default() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        let mut put = |at: usize, value: u64, width: usize| {
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        };
        put(0, self.version.into(), 4);
        put(CLEAN, self.clean.into(), 4);
        put(CONTROL, self.control.into(), 4);
        for (encoding, at, _, _) in FIELDS {
            put(*at, self.fields.get(encoding).copied().unwrap_or(0), width(*encoding));
        }
        bytes
    }
}

/// What VMLAUNCH and VMRESUME find.
pub enum Found {
    Page,
    None,
    Nowhere,
    WrongVersion,
}

/// The VP assist page, the pages, and which of them is current.
pub struct Enlightened {
    /// The MSR. `None`: off.
    msr: Option<u64>,
    direct_flush: bool,
    names: bool,
    pointer: u64,
    pages: BTreeMap<u64, Page>,
    pub current: Option<u64>,
    /// The VMCS that the current page stands for.
    pub fields: BTreeMap<u16, u64>,
    /// The clean fields as the last entry read them.
    clean: u32,
    /// Whether the MSR bitmap is as it was, and whether L0 flushes for L2: as of that entry.
    pub told: (bool, bool),
}

impl Enlightened {
    /// Switched on, in memory too.
    pub fn new(memory: &Memory, machine: &mut Machine) -> Self {
        let mut this = Self::off();
        for page in PAGES {
            this.pages.insert(page, Page::good());
        }
        (this.names, this.pointer) = (true, PAGES[0]);
        this.set_msr(machine, Some(ASSIST));
        this.write_all(memory);
        this
    }

    pub fn off() -> Self {
        Self {
            msr: None,
            direct_flush: false,
            names: false,
            pointer: 0,
            pages: BTreeMap::new(),
            current: None,
            fields: BTreeMap::new(),
            clean: 0,
            told: (false, false),
        }
    }

    fn set_msr(&mut self, machine: &mut Machine, msr: Option<u64>) {
        self.msr = msr;
        machine.enlighten(true, true, true, msr.map(Gpa));
    }

    /// L1's memory holds what the model has.
    fn write_all(&self, memory: &Memory) {
        let mut assist = [0; 24];
        assist[0] = self.direct_flush.into();
        assist[8] = self.names.into();
        assist[16..].copy_from_slice(&self.pointer.to_le_bytes());
        memory.write(Gpa(ASSIST + 32), &assist).unwrap();
        for (at, page) in &self.pages {
            memory.write(Gpa(*at), &page.bytes()).unwrap();
        }
    }

    /// Every byte of the pages is what the model has.
    pub fn compare(&self, memory: &Memory) {
        for (at, page) in &self.pages {
            let mut bytes = [0; BYTES];
            memory.read(Gpa(*at), &mut bytes).unwrap();
            let expected = page.bytes();
            let differs = bytes.iter().zip(&expected).position(|(one, other)| one != other);
            assert_eq!(differs, None, "byte of page {at:#x}");
        }
    }

    /// What the VP assist page names. `None`: nothing, or it is no memory.
    pub fn named(&self) -> Option<u64> {
        let names = self.msr == Some(ASSIST) && self.names && self.pointer < u64::MAX - 1;
        names.then_some(self.pointer)
    }

    pub fn load(&mut self, launch: bool) -> Found {
        let Some(pointer) = self.named() else {
            self.current = None;
            return Found::None;
        };
        let Some(page) = self.pages.get(&pointer) else {
            self.current = None;
            return Found::Nowhere;
        };
        let changed = self.current != Some(pointer);
        if changed && ![1, 0x11e5_7ed0].contains(&page.version) {
            self.current = None;
            return Found::WrongVersion;
        }
        let clean = if changed || launch { 0 } else { page.clean };
        if changed {
            self.fields.clear();
        }
        for (encoding, _, group, _) in FIELDS {
            if *group != REPORT && (*group == ALWAYS || clean >> group & 1 == 0) {
                let value = page.fields.get(encoding).copied().unwrap_or(0);
                // VMWRITE cuts access rights; a store into the page is taken as it is.
                self.fields.insert(*encoding, value);
            }
        }
        self.current = Some(pointer);
        self.clean = page.clean;
        let flushes = self.direct_flush && page.control & 1 != 0;
        self.told = (page.control & 2 != 0 && clean & 2 != 0, flushes);
        Found::Page
    }

    /// A field of the current page as VMREAD gives it. `None`: the page has none such.
    pub fn read(&self, encoding: u64) -> Option<u64> {
        let (encoding, ..) = FIELDS.iter().find(|(e, ..)| u64::from(*e) == encoding)?;
        let page = &self.pages[&self.current?];
        Some(page.fields.get(encoding).copied().unwrap_or(0))
    }

    /// What an exit or a failed entry leaves goes into the page. `ran`: L2 has.
    pub fn store(&mut self, ran: bool) {
        let Some(page) = self.current.and_then(|at| self.pages.get_mut(&at)) else { return };
        for (encoding, _, _, written) in FIELDS {
            if *written {
                let value = self.fields.get(encoding).copied().unwrap_or(0);
                page.fields.insert(*encoding, value);
            }
        }
        if ran {
            page.clean = self.clean | 0xffff;
        }
    }

    /// Why an instruction failed.
    pub fn store_error(&mut self, error: u32) {
        if let Some(page) = self.current.and_then(|at| self.pages.get_mut(&at)) {
            page.fields.insert(0x4400, error.into());
        }
    }

    /// L1 writes to the pages that it names, or to what names them: on whichever of its CPUs, whatever runs here.
    pub fn poke(&mut self, number: u64, memory: &Memory, machine: &mut Machine) {
        let pick = (number >> 8) as usize;
        let at = PAGES[[0, 0, 0, 0, 0, 0, 1, 2][(number >> 32) as usize & 7]];
        let page = self.pages.get_mut(&at).unwrap();
        match number & 15 {
            0..=6 => {
                let (field, value) = world::write_of(number);
                let Some((encoding, _, group, _)) =
                    FIELDS.iter().find(|(e, ..)| u64::from(*e) == field)
                else {
                    return;
                };
                page.fields.insert(*encoding, cut(*encoding, value));
                // L1 may forget to say so.
                if *group < ALWAYS && number >> 36 & 7 != 0 {
                    page.clean &= !(1 << group);
                }
            }
            7 => page.clean = (number >> 24) as u32 | (number >> 12) as u32,
            8..=10 => *page = Page { control: page.control, ..Page::good() },
            11 => page.version = [1, 1, 0x11e5_7ed0, 2][pick & 3],
            12 => {
                page.control = (number >> 16) as u32 & 3;
                self.direct_flush = pick & 1 != 0;
            }
            13 => self.names = pick & 7 != 0,
            14 => {
                let [a, b, c] = PAGES;
                let wrong = [a + 8, 1 << 40, NOWHERE, u64::MAX];
                let all = [a, a, a, a, b, b, c, wrong[pick >> 3 & 3]];
                self.pointer = all[pick & 7];
            }
            _ => {
                let msr = [Some(ASSIST), Some(ASSIST), None, Some(NOWHERE)];
                let msr = if pick >> 2 & 3 == 0 { msr[pick & 3] } else { Some(ASSIST) };
                self.set_msr(machine, msr);
            }
        }
        self.write_all(memory);
    }
}
