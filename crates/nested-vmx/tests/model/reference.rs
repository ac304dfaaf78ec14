//! The model: what the manual says, as plainly as possible (SDM vol. 3C §31.3). It knows the rules that the
//! values of `world` can break, and no others.

use std::collections::BTreeMap;

use gannet_nested_vmx::GuestMemory;
use gannet_nested_vmx::machine::{Cpu, Instruction, Place};
use x86::Gpa;

use super::enlightened::{Enlightened, Found};
use super::world::{self, GOOD, Memory, OPERAND, Vmcs02};

/// How an instruction ends.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Value(u64),
    Invalidates(String),
    Enters,
    Invalid,
    Valid(u32),
    Fault(u8),
}

/// A region in memory.
#[derive(Clone)]
struct Region {
    header: u32,
    launched: bool,
    fields: BTreeMap<u16, u64>,
}

pub struct Model {
    regions: BTreeMap<u64, Region>,
    vmxon: Option<u64>,
    current: Option<u64>,
    /// L1's enlightened VMCSs. While one is current, no other is.
    pub enlightened: Enlightened,
}

const REVISION: u32 = 0x11e5_7ed0;
/// Encodings that the VMCS12 does not have although the CPU may.
const ABSENT: &[u64] = &[0x200c];

fn mask(encoding: u64) -> u64 {
    match encoding >> 13 & 3 {
        0 => 0xffff,
        2 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

fn is_field(encoding: u64) -> bool {
    let base = encoding & !1;
    let known = x86::vmcs::field::ALL.iter().any(|(_, e)| u64::from(*e) == base);
    let half = encoding & 1 == 0 || encoding >> 13 & 3 == 1;
    encoding < 0x8000 && known && half && !ABSENT.contains(&base)
}

impl Model {
    pub fn new() -> Self {
        let fields: BTreeMap<u16, u64> = GOOD.iter().copied().collect();
        let region = Region { header: REVISION, launched: false, fields };
        let mut regions: BTreeMap<u64, Region> =
            (1..=5).map(|page| (page << 12, region.clone())).collect();
        let wrong = Region { header: 0x0403_0201, launched: false, fields: BTreeMap::new() };
        regions.insert(0x6000, wrong);
        Self { regions, vmxon: None, current: None, enlightened: Enlightened::off() }
    }

    pub fn current(&self) -> Option<u64> {
        self.current
    }

    /// Whether a VMCS of either kind is current.
    pub fn has_vmcs(&self) -> bool {
        self.current.is_some() || self.enlightened.current.is_some()
    }

    pub fn poke(&mut self, at: u64, word: u32) {
        if let Some(region) = self.regions.get_mut(&at) {
            region.header = word;
        }
    }

    fn now(&mut self) -> &mut Region {
        let at = self.current.unwrap();
        self.regions.get_mut(&at).unwrap()
    }

    fn fields(&self) -> &BTreeMap<u16, u64> {
        match self.current {
            Some(at) => &self.regions[&at].fields,
            None => &self.enlightened.fields,
        }
    }

    /// A field of the current VMCS.
    pub fn field(&self, encoding: u16) -> u64 {
        self.fields().get(&encoding).copied().unwrap_or(0)
    }

    fn set(&mut self, encoding: u16, value: u64) {
        let value = value & mask(u64::from(encoding));
        let fields = match self.current {
            Some(_) => &mut self.now().fields,
            None => &mut self.enlightened.fields,
        };
        fields.insert(encoding, value);
    }

    fn fail(&mut self, error: u32) -> Outcome {
        if !self.has_vmcs() {
            return Outcome::Invalid;
        }
        self.set(0x4400, u64::from(error));
        self.enlightened.store_error(error);
        Outcome::Valid(error)
    }

    pub fn execute(&mut self, i: &Instruction, cpu: &Cpu, memory: &Memory) -> Outcome {
        let wrong_mode = cpu.cr0 & 1 == 0 || cpu.vm86 || cpu.long_mode && !cpu.is_64_bit;
        if let Instruction::Vmxon { pointer } = i {
            if wrong_mode || cpu.cr4 & 0x2000 == 0 {
                return Outcome::Fault(6);
            }
            return self.vmxon(*pointer, cpu, memory);
        }
        if wrong_mode || self.vmxon.is_none() {
            return Outcome::Fault(6);
        }
        if cpu.cpl > 0 {
            return Outcome::Fault(13);
        }
        match *i {
            Instruction::Vmxon { .. } => unreachable!(),
            Instruction::Vmxoff => {
                self.vmxon = None;
                self.current = None;
                self.enlightened.current = None;
                Outcome::Done
            }
            Instruction::Vmclear { pointer } => self.vmclear(pointer, memory),
            Instruction::Vmptrld { pointer } => self.vmptrld(pointer, memory),
            Instruction::Vmptrst { to } => match to {
                Ok(_) => Outcome::Done,
                Err(fault) => Outcome::Fault(fault.vector.0),
            },
            Instruction::Vmread { field, to } => self.vmread(field, to, cpu),
            Instruction::Vmwrite { field, from, value } => {
                self.vmwrite(field, from, value, cpu, memory)
            }
            Instruction::Vmlaunch => self.entry(true, cpu),
            Instruction::Vmresume => self.entry(false, cpu),
            Instruction::Invept { kind, descriptor } => self.invept(kind, descriptor, memory),
            Instruction::Invvpid { kind, descriptor } => self.invvpid(kind, descriptor, memory),
        }
    }

    fn vmxon(
        &mut self,
        pointer: Result<u64, x86::Exception>,
        cpu: &Cpu,
        memory: &Memory,
    ) -> Outcome {
        if cpu.cpl > 0 {
            return Outcome::Fault(13);
        }
        if self.vmxon.is_some() {
            return self.fail(15);
        }
        let needed = 0x8000_0021;
        if cpu.cr0 & needed != needed || cpu.feature_control & 5 != 5 {
            return Outcome::Fault(13);
        }
        if let Err(fault) = pointer {
            return Outcome::Fault(fault.vector.0);
        }
        let at = memory.read_u64(Gpa(OPERAND)).unwrap();
        if !at.is_multiple_of(4096) || at >= 1 << 40 {
            return Outcome::Invalid;
        }
        match self.regions.get(&at) {
            Some(region) if region.header == REVISION => {
                self.vmxon = Some(at);
                self.current = None;
                Outcome::Done
            }
            _ => Outcome::Invalid,
        }
    }

    fn vmclear(&mut self, pointer: Result<u64, x86::Exception>, memory: &Memory) -> Outcome {
        if let Err(fault) = pointer {
            return Outcome::Fault(fault.vector.0);
        }
        let at = memory.read_u64(Gpa(OPERAND)).unwrap();
        if !at.is_multiple_of(4096) || at >= 1 << 40 {
            return self.fail(2);
        }
        if self.vmxon == Some(at) {
            return self.fail(3);
        }
        if self.enlightened.named().is_some() {
            // L1 has no other VMCSs: one is given up, and nothing is written to it.
            if self.enlightened.current == Some(at) {
                self.enlightened.current = None;
            }
            return Outcome::Done;
        }
        if let Some(region) = self.regions.get_mut(&at) {
            region.launched = false;
        }
        if self.current == Some(at) {
            self.current = None;
        }
        Outcome::Done
    }

    fn vmptrld(&mut self, pointer: Result<u64, x86::Exception>, memory: &Memory) -> Outcome {
        if let Err(fault) = pointer {
            return Outcome::Fault(fault.vector.0);
        }
        let at = memory.read_u64(Gpa(OPERAND)).unwrap();
        if !at.is_multiple_of(4096) || at >= 1 << 40 {
            return self.fail(9);
        }
        if self.vmxon == Some(at) {
            return self.fail(10);
        }
        let good = self.regions.get(&at).is_some_and(|r| r.header & 0x7fff_ffff == REVISION);
        if !good {
            return self.fail(11);
        }
        self.current = Some(at);
        self.enlightened.current = None;
        Outcome::Done
    }

    fn vmread(&mut self, field: u64, to: Place, cpu: &Cpu) -> Outcome {
        if !self.has_vmcs() {
            return Outcome::Invalid;
        }
        let field = if cpu.is_64_bit { field } else { field & 0xffff_ffff };
        let value = if self.current.is_none() {
            let Some(value) = self.enlightened.read(field) else { return self.fail(12) };
            value
        } else if is_field(field) {
            let whole = self.field(field as u16 & !1);
            if field & 1 != 0 { whole >> 32 } else { whole }
        } else {
            return self.fail(12);
        };
        let value = if cpu.is_64_bit { value } else { value & 0xffff_ffff };
        match to {
            Place::Register(_) => Outcome::Value(value),
            Place::Memory(Err(fault)) => Outcome::Fault(fault.vector.0),
            Place::Memory(Ok(_)) => Outcome::Done,
        }
    }

    fn vmwrite(
        &mut self,
        field: u64,
        from: Place,
        register: u64,
        cpu: &Cpu,
        memory: &Memory,
    ) -> Outcome {
        if self.current.is_none() {
            return Outcome::Invalid;
        }
        let value = match from {
            Place::Register(_) => register,
            Place::Memory(Err(fault)) => return Outcome::Fault(fault.vector.0),
            Place::Memory(Ok(at)) => memory.read_u64(Gpa(at)).unwrap(),
        };
        let value = if cpu.is_64_bit { value } else { value & 0xffff_ffff };
        let field = if cpu.is_64_bit { field } else { field & 0xffff_ffff };
        if !is_field(field) {
            return self.fail(12);
        }
        let base = field as u16 & !1;
        let value = if (0x4814..=0x4822).contains(&base) { value & 0x1_f0ff } else { value };
        if field & 1 != 0 {
            let low = self.field(base) & 0xffff_ffff;
            self.set(base, low | value << 32);
        } else {
            self.set(base, value);
        }
        Outcome::Done
    }

    fn entry(&mut self, launch: bool, cpu: &Cpu) -> Outcome {
        let by_page = match self.enlightened.load(launch) {
            Found::Page => true,
            Found::None => false,
            Found::Nowhere => {
                self.current = None;
                return Outcome::Fault(6);
            }
            Found::WrongVersion => {
                self.current = None;
                return Outcome::Invalid;
            }
        };
        if by_page {
            self.current = None;
        } else if self.current.is_none() || self.now().header >> 31 != 0 {
            return Outcome::Invalid;
        }
        if cpu.blocked_by_mov_ss {
            return self.fail(26);
        }
        // There is no launch state of a page.
        if !by_page && launch && self.now().launched {
            return self.fail(4);
        }
        if !by_page && !launch && !self.now().launched {
            return self.fail(5);
        }
        // The values of `world` break these rules of controls and host state.
        let pin = self.field(0x4000);
        let injection = self.field(0x4016);
        if pin & 0x16 != 0x16 || injection == 0x8000_0100 {
            return self.fail(7);
        }
        if self.field(0x6c02) >> 40 != 0 {
            return self.fail(8);
        }
        Outcome::Enters
    }

    /// The rule of the guest's state that is broken: reason and qualification of the exit.
    pub fn guest_failure(&self) -> Option<(u16, u64)> {
        let canonical = |v: u64| ((v << 16) as i64 >> 16) as u64 == v;
        let wrong = (33, 0);
        if !canonical(self.field(0x680e)) {
            return Some(wrong);
        }
        // CS must be granular with its limit, and RIP fits its mode. Bit 16, which makes other registers unusable, has no rule in CS.
        if self.field(0x4816) & !0x1_0000 != 0xa09b {
            return Some(wrong);
        }
        if !canonical(self.field(0x681e)) {
            return Some(wrong);
        }
        if self.field(0x6820) & 2 == 0 {
            return Some(wrong);
        }
        if self.field(0x2800) != u64::MAX {
            return Some((33, 4));
        }
        None
    }

    pub fn entry_failed(&mut self, reason: u16, qualification: u64) {
        self.set(0x4402, u64::from(reason) | 1 << 31);
        self.set(0x6400, qualification);
        self.enlightened.store(false);
    }

    pub fn entered(&mut self, launch: bool) {
        if launch && self.current.is_some() {
            self.now().launched = true;
        }
    }

    /// L2 has run on this hardware VMCS and exits to L1.
    pub fn left(&mut self, hardware: &Vmcs02) {
        for (encoding, _) in world::CHANGED_BY_L2 {
            self.set(*encoding, hardware.values[usize::from(*encoding)]);
        }
        // CR0.TS: L1's if it owns the bit, else L2's.
        let owned = self.field(0x6000);
        let old = self.field(0x6800);
        let new = old & owned | hardware.values[0x6800] & !owned;
        let l0 = world::L0.cr0_mask & !owned;
        self.set(0x6800, new & !l0 | old & l0);
        let reason = hardware.values[0x4402];
        self.set(0x4402, reason);
        let qualified = matches!(reason, 30 | 48);
        let qualification = hardware.values[0x6400];
        self.set(0x6400, if qualified { qualification } else { 0 });
        self.set(0x4404, 0);
        self.set(0x4408, 0);
        self.set(0x440c, hardware.values[0x440c]);
        // Strings: INS and OUTS.
        let informed = reason == 30 && qualification >> 4 & 1 == 1;
        self.set(0x440e, if informed { hardware.values[0x440e] } else { 0 });
        if reason == 48 {
            self.set(0x2400, hardware.values[0x2400]);
        }
        let linear =
            reason == 48 && qualification & 0x80 != 0 || reason == 30 && qualification & 0x10 != 0;
        if linear {
            self.set(0x640a, hardware.values[0x640a]);
        }
        let injected = self.field(0x4016);
        self.set(0x4016, injected & 0x7fff_ffff);
        let exit = self.field(0x400c);
        if exit & 4 != 0 {
            self.set(0x681a, hardware.values[0x681a]);
            self.set(0x2802, 0);
        }
        if exit & 1 << 18 != 0 {
            self.set(0x2804, world::L0.pat);
        }
        if exit & 1 << 20 != 0 {
            self.set(0x2806, 0xd01);
        }
        self.set(0x4824, hardware.values[0x4824]);
        self.set(0x6822, hardware.values[0x6822]);
        self.set(0x4826, 0);
        self.enlightened.store(true);
    }

    fn invept(
        &mut self,
        kind: u64,
        operand: Result<u64, x86::Exception>,
        memory: &Memory,
    ) -> Outcome {
        if kind != 1 && kind != 2 {
            return self.fail(28);
        }
        if let Err(fault) = operand {
            return Outcome::Fault(fault.vector.0);
        }
        let pointer = memory.read_u64(Gpa(OPERAND)).unwrap();
        match kind {
            2 => Outcome::Invalidates("AllEpt".into()),
            // Of the values of `world` these two are EPT pointers.
            _ if pointer == 0x5e || pointer == 0x1e => {
                Outcome::Invalidates(format!("Ept({pointer})"))
            }
            _ => self.fail(28),
        }
    }

    fn invvpid(
        &mut self,
        kind: u64,
        operand: Result<u64, x86::Exception>,
        memory: &Memory,
    ) -> Outcome {
        if kind > 3 {
            return self.fail(28);
        }
        if let Err(fault) = operand {
            return Outcome::Fault(fault.vector.0);
        }
        let vpid = memory.read_u64(Gpa(OPERAND)).unwrap();
        let address = memory.read_u64(Gpa(OPERAND + 8)).unwrap();
        if vpid > 0xffff || kind != 2 && vpid == 0 || kind == 0 && address >> 47 != 0 {
            return self.fail(28);
        }
        Outcome::Invalidates(match kind {
            0 => format!("Address {{ vpid: {vpid}, address: {address} }}"),
            1 => format!("Vpid({vpid})"),
            2 => "AllVpids".into(),
            _ => format!("NonGlobal({vpid})"),
        })
    }
}
