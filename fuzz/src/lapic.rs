//! The local APIC against a plain model of it: sets of numbers, nothing cached, everything derived when it is asked for
//! (SDM vol. 3A §10.4 to §10.8, §10.12).

use gannet_irqchip::lapic::{BaseRules, CpuRole, Features, Lapic, LapicEffect, LapicMode, Lint0};
use gannet_irqchip::{IrqMessage, Trigger};
use std::collections::BTreeSet;
use x86::Vector;

use crate::bytes::Bytes;

/// The registers that have an entry of the local vector table, and what can be written of each.
const LVT: [(u32, u32); 7] = [
    (0x320, 0x7_00ff),
    (0x330, 0x1_07ff),
    (0x340, 0x1_07ff),
    (0x350, 0x1_a7ff),
    (0x360, 0x1_a7ff),
    (0x370, 0x1_00ff),
    (0x2f0, 0x1_07ff),
];
const ERROR: usize = 5;
const MASKED: u32 = 1 << 16;
const WIDTH: u8 = 40;

#[derive(Clone, Debug, PartialEq)]
struct Model {
    vcpu_id: u32,
    features: [bool; 3],
    base: u64,
    id: u32,
    ldr: u32,
    dfr: u32,
    tpr: u32,
    svr: u32,
    lvt: [u32; 7],
    esr: u32,
    errors: u32,
    irr: BTreeSet<u8>,
    isr: BTreeSet<u8>,
    tmr: BTreeSet<u8>,
    /// Ends that somebody waits for though they are of edges.
    awaited: BTreeSet<u8>,
}

impl Model {
    fn new(vcpu_id: u32) -> Self {
        let mut model = Self {
            vcpu_id,
            features: [true, false, false],
            base: 0xfee0_0800 | if vcpu_id == 0 { 0x100 } else { 0 },
            id: vcpu_id & 0xff,
            ldr: 0,
            dfr: 0,
            tpr: 0,
            svr: 0,
            lvt: [0; 7],
            esr: 0,
            errors: 0,
            irr: BTreeSet::new(),
            isr: BTreeSet::new(),
            tmr: BTreeSet::new(),
            awaited: BTreeSet::new(),
        };
        model.init();
        model
    }

    fn is_on(&self) -> bool {
        self.base >> 11 & 1 == 1
    }

    fn is_x2(&self) -> bool {
        self.base >> 10 & 3 == 3
    }

    fn software_enabled(&self) -> bool {
        self.svr >> 8 & 1 == 1
    }

    fn init(&mut self) {
        if !self.is_x2() {
            self.ldr = 0;
        }
        (self.dfr, self.tpr, self.svr) = (u32::MAX, 0, 0xff);
        self.lvt = [MASKED; 7];
        (self.esr, self.errors) = (0, 0);
        for set in [&mut self.irr, &mut self.isr, &mut self.tmr, &mut self.awaited] {
            set.clear();
        }
    }

    fn in_service(&self) -> u8 {
        self.isr.last().copied().unwrap_or(0)
    }

    fn ppr(&self) -> u32 {
        let class = u32::from(self.in_service()) & 0xf0;
        if self.tpr & 0xf0 >= class { self.tpr } else { class }
    }

    fn pending(&self) -> Option<u8> {
        let highest = *self.irr.last()?;
        (self.is_on() && u32::from(highest) & 0xf0 > self.ppr() & 0xf0).then_some(highest)
    }

    fn error(&mut self, bit: u32) {
        self.errors |= 1 << bit;
        let entry = self.lvt[ERROR];
        if entry & MASKED == 0 && entry & 0xff >= 16 {
            self.request(entry as u8, false);
        }
    }

    fn request(&mut self, vector: u8, level: bool) {
        if !self.is_on() || !self.software_enabled() {
            return;
        }
        if vector < 16 {
            return self.error(6);
        }
        if level {
            self.tmr.insert(vector)
        } else {
            self.tmr.remove(&vector)
        };
        self.irr.insert(vector);
    }

    /// The vector that ended, and whether somebody is told.
    fn end(&mut self) -> Option<(u8, bool)> {
        let vector = self.isr.pop_last()?;
        let suppressed = self.features[1] && self.svr >> 12 & 1 == 1;
        let broadcast = self.tmr.contains(&vector) && !suppressed;
        Some((vector, broadcast || self.awaited.contains(&vector)))
    }

    /// `None` for what is not modelled.
    fn read(&mut self, offset: u32) -> Option<u32> {
        let word = |set: &BTreeSet<u8>| {
            let first = (offset >> 4 & 7) as u8 * 32;
            (0..32).filter(|n| set.contains(&(first + n))).fold(0, |word, n| word | 1 << n)
        };
        Some(match offset {
            0x20 => {
                if self.is_x2() {
                    self.id
                } else {
                    self.id << 24
                }
            }
            0x80 => self.tpr,
            0xa0 => self.ppr(),
            0x90 | 0xb0 | 0xc0 => 0,
            0xd0 => self.ldr,
            0xe0 => self.dfr,
            0xf0 => self.svr,
            0x100..=0x170 => word(&self.isr),
            0x180..=0x1f0 => word(&self.tmr),
            0x200..=0x270 => word(&self.irr),
            0x280 => self.esr,
            0x320..=0x370 => self.lvt[(offset as usize - 0x320) >> 4],
            0x2f0 if self.features[2] => self.lvt[6],
            0x30 | 0x300 | 0x310 | 0x380 | 0x390 | 0x3e0 => return None,
            _ => {
                self.error(7);
                0
            }
        })
    }

    fn write(&mut self, offset: u32, value: u32) {
        match offset {
            0x20 => self.id = value >> 24,
            0x80 => self.tpr = value & 0xff,
            0xd0 => self.ldr = value & 0xff00_0000,
            0xe0 => self.dfr = value | 0x0fff_ffff,
            0xf0 => {
                self.svr = value & if self.features[1] { 0x13ff } else { 0x3ff };
                if !self.software_enabled() {
                    self.lvt.iter_mut().for_each(|entry| *entry |= MASKED);
                }
            }
            0x280 => (self.esr, self.errors) = (self.errors, 0),
            0x30 | 0x90 | 0xa0 | 0xc0 | 0x380 | 0x390 | 0x3e0 | 0x310 => {}
            0x100..=0x270 => {}
            _ => match LVT.iter().position(|(at, _)| *at == offset) {
                Some(n) if n < 6 || self.features[2] => {
                    let deadline = if n == 0 && !self.features[0] { 1 << 18 } else { 0 };
                    let mask = if self.software_enabled() { 0 } else { MASKED };
                    self.lvt[n] = value & LVT[n].1 & !deadline | mask;
                }
                _ => self.error(7),
            },
        }
    }

    /// Whether a write of the base is taken.
    fn set_base(&mut self, value: u64, x2apic: bool, host: bool) -> bool {
        let (on, x2) = (value >> 11 & 1 == 1, value >> 10 & 1 == 1);
        let reserved = value >> WIDTH != 0 || value & 0x2ff != 0;
        let leaves_x2 = self.is_x2() && on && !x2;
        let jumps = !self.is_on() && on && x2;
        if reserved || x2 && (!on || !x2apic) || !host && (leaves_x2 || jumps) {
            return false;
        }
        self.base = value;
        true
    }
}

fn compare(lapic: &Lapic, model: &mut Model) {
    assert_eq!(lapic.base(), model.base);
    assert_eq!(lapic.tpr(), model.tpr as u8);
    assert_eq!(lapic.ppr(), model.ppr() as u8, "{model:x?}");
    assert_eq!(lapic.in_service().map(|v| v.0), model.isr.last().copied());
    assert_eq!(lapic.highest_pending().map(|v| v.0), model.pending(), "{model:x?}");
    assert_eq!(lapic.software_enabled(), model.is_on() && model.software_enabled());
    assert!(lapic.maybe_pending() || model.irr.is_empty(), "pending, and nobody would look");
    for offset in (0x20..0x400).step_by(16) {
        // Looking at what is not there is an error of its own.
        let there = matches!(offset, 0x20 | 0x80..=0xa0 | 0xd0..=0x280 | 0x320..=0x370);
        if there && let Some(expected) = model.read(offset) {
            assert_eq!(lapic.read(offset, || 0), expected, "{offset:#x} {model:x?}");
        }
    }
}

fn base_of(bytes: &mut Bytes<'_>) -> u64 {
    let plain = 0xfee0_0000 | bytes.of(&[0x800, 0xc00, 0, 0x400, 0x900, 0x801, 0xa00]);
    if bytes.u8() < 200 { plain } else { plain ^ bytes.value() }
}

/// Registers, mostly those that are there.
fn offset(bytes: &mut Bytes<'_>) -> u32 {
    let n = u32::from(bytes.u8());
    if n < 0x40 { n << 4 } else { LVT[n as usize % 7].0.min(0x370 + (n >> 6 << 4)) }
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let vcpu_id = u32::from(bytes.u8() % 3) * 5;
    let lapic = Lapic::new(vcpu_id, CpuRole::bootstrap_if(vcpu_id == 0));
    let mut model = Model::new(vcpu_id);
    compare(&lapic, &mut model);
    let bits = bytes.u8();
    let features = [0, 1, 2].map(|n| bits >> n & 1 == 1);
    let [tsc_deadline, directed_eoi, cmci] = features;
    lapic.set_features(Features { tsc_deadline, directed_eoi, cmci });
    model.features = features;
    let _ = lapic.write(0xf0, 0x1ff);
    model.write(0xf0, 0x1ff);
    let mut steps = 0;
    while !bytes.is_empty() && steps < 300 {
        steps += 1;
        match bytes.u8() % 24 {
            0..6 => {
                let (offset, value) = (offset(bytes), bytes.value() as u32);
                // Who asks to be told is told; interrupts that it sends are another's business.
                if offset == 0x300 || model.base >> 10 & 3 != 2 {
                    continue;
                }
                let effect = lapic.write(offset, value);
                if offset == 0xb0 {
                    let ended = model.end();
                    let expected = ended.map_or(LapicEffect::None, |(vector, level)| {
                        LapicEffect::Eoi { vector: Vector(vector), level }
                    });
                    assert_eq!(effect, expected);
                } else {
                    model.write(offset, value);
                }
            }
            6 | 7 => {
                let offset = offset(bytes);
                let expected = model.read(offset);
                let read = lapic.read(offset, || 0);
                assert_eq!(expected.unwrap_or(read), read, "{offset:#x}");
            }
            8..12 => {
                let [vector, kind] = bytes.take();
                let trigger = if kind & 1 == 0 { Trigger::Edge } else { Trigger::Level };
                if kind & 6 == 6 {
                    let message = IrqMessage {
                        trigger,
                        notify_eoi: kind & 8 != 0,
                        ..IrqMessage::fixed(Vector(vector), vcpu_id)
                    };
                    if message.notify_eoi {
                        model.awaited.insert(vector);
                    }
                    let _ = lapic.accept(&message);
                } else {
                    let _ = lapic.accept_fixed(Vector(vector), trigger);
                }
                model.request(vector, kind & 1 == 1);
            }
            12..15 => {
                if let Some(vector) = lapic.highest_pending() {
                    assert_eq!(Some(vector.0), model.pending());
                    lapic.ack(vector);
                    model.irr.remove(&vector.0);
                    model.isr.insert(vector.0);
                }
            }
            15..18 => {
                let ended = model.end();
                let expected = ended.map_or(LapicEffect::None, |(vector, level)| {
                    LapicEffect::Eoi { vector: Vector(vector), level }
                });
                assert_eq!(lapic.eoi(), expected, "{model:x?}");
            }
            18 => {
                let value = base_of(bytes);
                let bits = bytes.u8();
                let (x2apic, host) = (bits & 1 == 0, bits & 2 != 0);
                let before = (model.is_on(), model.is_x2());
                let rules = BaseRules { maxphyaddr: WIDTH, x2apic, host };
                assert_eq!(
                    lapic.set_base(value, rules).is_ok(),
                    model.set_base(value, x2apic, host)
                );
                if before != (model.is_on(), model.is_x2()) {
                    enter(&lapic, &mut model, before);
                }
            }
            19 => {
                let (msr, value) = (0x800 + (offset(bytes) >> 4), bytes.value());
                if msr != 0x830 && msr != 0x83f {
                    x2apic(&lapic, &mut model, msr, value);
                }
            }
            20 => {
                let vector = bytes.u8();
                let free = model.irr.is_empty() && vector >= 16 && lapic.software_enabled();
                let above = u32::from(vector) & 0xf0 > model.ppr() & 0xf0;
                // It may decline where a hint says that something may be pending.
                if lapic.self_ipi_direct(Vector(vector)) {
                    assert!(free && above, "{vector} {model:x?}");
                    model.isr.insert(vector);
                    model.tmr.remove(&vector);
                }
            }
            21 => {
                lapic.forget_notify(Vector(bytes.u8()));
                // The model's is that of the vector that was forgotten.
                for vector in 0..=255 {
                    if !lapic.awaits_end(Vector(vector)) {
                        model.awaited.remove(&vector);
                    }
                }
            }
            // One that is off shows its registers to nobody, and its logical id may be that of the mode before.
            22 if model.is_on() => {
                // What is saved comes back the same in another one.
                let mut page = [0; 1024];
                lapic.save(&mut page, true, 0);
                let other = Lapic::new(vcpu_id, CpuRole::bootstrap_if(vcpu_id == 0));
                other.set_features(Features { tsc_deadline, directed_eoi, cmci });
                let rules = BaseRules { maxphyaddr: WIDTH, x2apic: true, host: true };
                other.set_base(lapic.base(), rules).unwrap();
                if other.restore(&page, true, 0).is_ok() {
                    let mut again = [0; 1024];
                    other.save(&mut again, true, 0);
                    // The current count starts anew when its owner says so.
                    for page in [&mut page, &mut again] {
                        page[0x390..0x394].fill(0);
                    }
                    if model.is_x2() {
                        // There is no such register in x2APIC mode.
                        for page in [&mut page, &mut again] {
                            page[0xe0..0xe4].fill(0);
                        }
                    }
                    let differ = page.iter().zip(&again).position(|(a, b)| a != b);
                    assert_eq!(differ, None, "{model:x?}");
                    assert_eq!(other.highest_pending(), lapic.highest_pending(), "{model:x?}");
                }
            }
            _ => {
                lapic.init(Lint0::Masked);
                model.init();
            }
        }
        compare(&lapic, &mut model);
    }
}

/// Another mode: ids follow from it.
fn enter(lapic: &Lapic, model: &mut Model, before: (bool, bool)) {
    let mode = match (model.is_on(), model.is_x2()) {
        (false, _) => LapicMode::Disabled,
        (true, false) => LapicMode::XApic,
        (true, true) => LapicMode::X2Apic,
    };
    assert_eq!(lapic.mode(), mode);
    match mode {
        LapicMode::X2Apic => {
            model.id = model.vcpu_id;
            model.ldr = (model.vcpu_id >> 4) << 16 | 1 << (model.vcpu_id & 15);
        }
        // Which registers a mode that is left takes along is the code's own decision.
        LapicMode::XApic | LapicMode::Disabled => {
            model.id = lapic.id();
            model.ldr = if before.1 { 0 } else { lapic.read(0xd0, || 0) };
            for (offset, n) in [(0xe0, 0), (0xf0, 1), (0x80, 2), (0x280, 3)] {
                let value = lapic.read(offset, || 0);
                *[&mut model.dfr, &mut model.svr, &mut model.tpr, &mut model.esr][n] = value;
            }
            (0..6).for_each(|n| model.lvt[n] = lapic.read(LVT[n].0, || 0));
            if !lapic.maybe_pending() {
                model.irr.clear();
            }
            for (set, at) in
                [(&mut model.isr, 0x100), (&mut model.tmr, 0x180), (&mut model.irr, 0x200)]
            {
                let bit = |vector: u8| {
                    let word = lapic.read(at + u32::from(vector >> 5) * 16, || 0);
                    word >> (vector & 31) & 1 == 1
                };
                set.retain(|vector| bit(*vector));
            }
            model.awaited.retain(|vector| lapic.awaits_end(Vector(*vector)));
            if before.0 && !model.is_on() {
                model.errors = 0;
                let _ = lapic.write(0x280, 0);
                model.esr = lapic.read(0x280, || 0);
            }
        }
    }
}

fn x2apic(lapic: &Lapic, model: &mut Model, msr: u32, value: u64) {
    let offset = (msr - 0x800) << 4;
    let entry = LVT.iter().position(|(at, _)| *at == offset);
    let entry = entry.is_some_and(|n| n < 6 || model.features[2]);
    let fits = match offset {
        0x80 => value <= 0xff,
        0xb0 | 0x280 => value == 0,
        0xf0 | 0x380 | 0x3e0 => value <= 0xffff_ffff,
        _ => entry && value <= 0xffff_ffff,
    };
    let allowed = model.is_x2() && fits;
    let effect = lapic.write_x2(msr, value);
    assert_eq!(effect.is_ok(), allowed, "{msr:#x} {value:#x} {model:x?}");
    if allowed && offset == 0xb0 {
        model.end();
    } else if allowed {
        model.write(offset, value as u32);
    }
    let readable = model.is_x2()
        && (matches!(offset, 0x20 | 0x30 | 0x80 | 0xa0 | 0xd0 | 0xf0 | 0x100..=0x280)
            || matches!(offset, 0x300 | 0x380 | 0x390 | 0x3e0)
            || entry);
    assert_eq!(lapic.read_x2(msr, || 0).is_ok(), readable, "{msr:#x} {model:x?}");
}
