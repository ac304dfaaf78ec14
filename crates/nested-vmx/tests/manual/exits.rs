//! Whose an exit of L2 is: SDM vol. 3C §26.1 to §26.3 for what L1 has asked for, and what L0 keeps for itself.

use gannet_nested_vmx::reflect::{Claim, Wants};
use gannet_nested_vmx::{GuestMemory, priority::Access};
use x86::Gpa;

use super::Wrong;
use super::fields::Fields;
use super::reference::Model;
use super::rig::Memory;

/// What the hardware tells of an exit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exit {
    pub reason: u64,
    pub qualification: u64,
    pub interruption: u64,
    pub error_code: u64,
    pub vectoring: u64,
    pub vectoring_error: u64,
    pub length: u64,
    pub information: u64,
    pub linear: u64,
    pub physical: u64,
}

/// L2's registers.
pub type Gprs = [u64; 16];

fn bit(word: u64, number: u32) -> bool {
    word >> number & 1 != 0
}

fn by_l1(wants: bool) -> Claim {
    if wants { Claim::L1 } else { Claim::L0 }
}

/// A bit of one of L1's bitmaps. Where there is no memory L1 hears of everything.
fn mapped(memory: &Memory, page: u64, number: u64) -> bool {
    memory
        .read_u8(Gpa(page.wrapping_add(number / 8)))
        .map_or(true, |byte| byte >> (number % 8) & 1 != 0)
}

impl Model {
    pub fn whose(&self, x: &Exit, gprs: &Gprs, wants: &Wants, memory: &Memory) -> Claim {
        let v = &self.now().fields;
        let l2 = self.l2.as_ref().unwrap();
        let (first, second) = (|number| v.primary(number), |number| v.secondary(number));
        match x.reason {
            0 => self.exception(v, x, wants),
            // The host's interrupts; INIT, SIPI and SMI, which L0 keeps; RSM, machine checks, L0's own timer.
            1 | 3..=6 | 17 | 41 | 52 => Claim::L0,
            7 => by_l1(first(2)),
            8 => by_l1(first(22)),
            12 => by_l1(first(7)),
            14 => by_l1(first(9)),
            15 => by_l1(first(11)),
            16 | 51 => by_l1(first(12)),
            23 => by_l1(self.field_exits(v, l2, 0x2026, x, gprs, memory)),
            25 => by_l1(self.field_exits(v, l2, 0x2028, x, gprs, memory)),
            28 => self.control_register(v, l2, x.qualification, gprs),
            29 => by_l1(first(23)),
            30 => by_l1(self.port_exits(v, x.qualification, memory)),
            31 => self.msr(v, gprs, false, memory),
            32 => self.msr(v, gprs, true, memory),
            36 => by_l1(first(10)),
            // By the control, or as an event that was injected.
            37 => by_l1(first(27) || v.get(0x4016) == 0x8000_0700),
            39 => by_l1(first(29)),
            40 => by_l1(first(30) || second(10)),
            43 => by_l1(first(21)),
            46 | 47 => by_l1(second(2)),
            // The walk of L1's tables says whose these are.
            48 | 49 | 62 => Claim::L0,
            54 => by_l1(second(6)),
            57 => by_l1(second(11)),
            58 => by_l1(second(12) && first(9)),
            59 => Claim::Function,
            // Not offered: ENCLS, bus locks, notifications.
            60 | 74 | 75 => Claim::L0,
            61 => by_l1(second(16)),
            63 | 64 => {
                by_l1(second(20) && v.get(0x202c) & (gprs[0] & 0xffff_ffff | gprs[2] << 32) != 0)
            }
            67 | 68 => by_l1(second(26) && first(12)),
            // Instructions that always exit, and what only L1 can have asked for.
            _ => Claim::L1,
        }
    }

    /// §26.2.
    fn exception(&self, v: &Fields, x: &Exit, wants: &Wants) -> Claim {
        let (kind, vector) = (x.interruption >> 8 & 7, x.interruption & 31);
        if kind == 2 || vector == 18 {
            return Claim::L0;
        }
        let asked = bit(v.get(0x4004), vector as u32);
        if vector == 14 {
            // Shadow tables of L0's: each page fault is looked at first.
            if wants.page_faults {
                return Claim::L0;
            }
            let matches =
                x.error_code & v.get(0x4006) == v.get(0x4008) || self.is(Wrong::PageFaultMask);
            return by_l1(asked == matches);
        }
        by_l1(asked && wants.debug >> vector & 1 == 0)
    }

    /// §26.1.3, "VMREAD" and "VMWRITE".
    fn field_exits(
        &self,
        v: &Fields,
        l2: &Fields,
        bitmap: u16,
        x: &Exit,
        gprs: &Gprs,
        memory: &Memory,
    ) -> bool {
        let mut encoding = gprs[(x.information >> 28 & 15) as usize];
        if !bit(l2.get(0x2806), 10) {
            encoding &= 0xffff_ffff;
        }
        !v.secondary(14) || encoding >> 15 != 0 || mapped(memory, v.get(bitmap), encoding)
    }

    /// §26.1.3, "CLTS", "LMSW" and "MOV to CR0" to "MOV from CR8"; table 28-3.
    fn control_register(&self, v: &Fields, l2: &Fields, qualification: u64, gprs: &Gprs) -> Claim {
        let first = |number| v.primary(number);
        let (number, kind) = (qualification & 15, qualification >> 4 & 3);
        let register = (qualification >> 8 & 15) as usize;
        let long = bit(l2.get(0x2806), 10) && bit(l2.get(0x4816), 13);
        let operand = if long { gprs[register] } else { gprs[register] & 0xffff_ffff };
        let (mask, shadow) = (v.get(0x6000), v.get(0x6004));
        match (kind, number) {
            (0, 8) if first(21) && !first(19) => {
                Claim::Priority(Access::Write { value: gprs[register] })
            }
            (1, 8) if first(21) && !first(20) => {
                Claim::Priority(Access::Read { gpr: register as u8 })
            }
            (0, 0) => by_l1(mask & (operand ^ shadow) != 0),
            (0, 4) => by_l1(v.get(0x6002) & (operand ^ v.get(0x6006)) != 0),
            (0, 3) => by_l1(first(15)),
            (1, 3) => by_l1(first(16)),
            (0, 8) => by_l1(first(19)),
            (1, 8) => by_l1(first(20)),
            (2, _) => by_l1(bit(mask & shadow, 3) || self.is(Wrong::Clts) && bit(mask, 3)),
            (3, _) => {
                let source = qualification >> 16;
                let pe = bit(mask, 0) && bit(source, 0) && !bit(shadow, 0);
                let clears = self.is(Wrong::LmswClears) && bit(mask & (source ^ shadow), 0);
                by_l1(pe || clears || mask & 0xe & (source ^ shadow) != 0)
            }
            _ => Claim::L0,
        }
    }

    /// §26.1.3, "IN, INS, OUT, OUTS"; §25.6.4.
    fn port_exits(&self, v: &Fields, qualification: u64, memory: &Memory) -> bool {
        if !v.primary(25) {
            return v.primary(24);
        }
        let (port, bytes) = (qualification >> 16 & 0xffff, (qualification & 7) + 1);
        (port..port + bytes).any(|port| match port {
            0..=0x7fff => mapped(memory, v.get(0x2000), port),
            0x8000..=0xffff => mapped(memory, v.get(0x2002), port - 0x8000),
            _ => !self.is(Wrong::PortWraps),
        })
    }

    /// §26.1.3, "RDMSR" and "WRMSR"; §25.6.9; §30.5.
    fn msr(&self, v: &Fields, gprs: &Gprs, write: bool, memory: &Memory) -> Claim {
        let index = gprs[1] & 0xffff_ffff;
        let high = index >> 30 == 3;
        let within = index & !0xc000_0000 <= 0x1fff && (high || index <= 0x1fff);
        let half = if write && !self.is(Wrong::MsrQuarter) { 2048 * 8 } else { 0 };
        let number = half + u64::from(high) * 1024 * 8 + (index & 0x1fff);
        if !v.primary(28) || !within || mapped(memory, v.get(0x2004), number) {
            return Claim::L1;
        }
        if index >> 8 != 8 || !v.secondary(4) {
            return Claim::L0;
        }
        let offset = ((index & 0xff) << 4) as u16;
        match (write, index) {
            (false, 0x808) => Claim::Priority(Access::ReadMsr { offset }),
            (false, _) if v.secondary(8) => Claim::Priority(Access::ReadMsr { offset }),
            (true, 0x80b | 0x83f) if !v.secondary(9) => Claim::L0,
            (true, 0x808 | 0x80b | 0x83f) => {
                let value = gprs[0] & 0xffff_ffff | gprs[2] << 32;
                Claim::Priority(Access::WriteMsr { offset, value })
            }
            _ => Claim::L0,
        }
    }
}
