//! The model: the instructions as their pseudo-code in SDM vol. 3C chapter 31 has them, over regions that are dictionaries of fields.

use std::collections::BTreeMap;

use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::machine::{Address, Cpu, Instruction, Place};
use gannet_nested_vmx::{Capabilities, GuestMemory, Vmcs12};
use x86::{Exception, Gpa};

use super::Wrong;
use super::fields::{self, Fields, is_field, is_read_only};
use super::oracle::{self, End, Processor};
use super::rig::Memory;

/// How an instruction ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Value(u8, u64),
    Invalidates(String),
    /// An entry: as the oracle says.
    Enters,
    Invalid,
    Valid(u32),
    Fault(Exception),
}

use Outcome::{Done, Fault, Invalid};

/// What stores are to be seen in L1's memory.
pub type Stored = Option<(u64, Vec<u8>)>;

/// A region in memory.
#[derive(Clone)]
pub struct Region {
    pub header: u32,
    pub launched: bool,
    pub fields: Fields,
}

pub const REVISION: u32 = 0x11e5_7ed0;

pub struct Model {
    pub regions: BTreeMap<u64, Region>,
    pub vmxon: Option<u64>,
    pub current: Option<u64>,
    pub capabilities: Capabilities,
    /// L2 runs, with this state.
    pub l2: Option<Fields>,
    /// An error that a test makes.
    pub wrong: Option<Wrong>,
    /// What the last instruction has stored.
    pub stored: Stored,
}

impl Model {
    pub fn is(&self, wrong: Wrong) -> bool {
        self.wrong == Some(wrong)
    }

    pub fn now(&self) -> &Region {
        &self.regions[&self.current.unwrap()]
    }

    pub fn now_mut(&mut self) -> &mut Region {
        self.regions.get_mut(&self.current.unwrap()).unwrap()
    }

    pub fn get(&self, encoding: u16) -> u64 {
        self.now().fields.get(encoding)
    }

    pub fn set(&mut self, encoding: u16, value: u64) {
        self.now_mut().fields.set(encoding, value);
    }

    /// VMfail (§31.2).
    fn fail(&mut self, error: u32) -> Outcome {
        if self.current.is_none() {
            return Invalid;
        }
        self.set(0x4400, error.into());
        Outcome::Valid(error)
    }

    pub fn execute(
        &mut self,
        i: &Instruction,
        cpu: &Cpu,
        limits: &Limits,
        memory: &Memory,
    ) -> Outcome {
        self.stored = None;
        let wrong_mode = cpu.cr0 & 1 == 0 || cpu.vm86 || cpu.long_mode && !cpu.is_64_bit;
        if let Instruction::Vmxon { pointer } = *i {
            return self.vmxon(pointer, cpu, limits, memory, wrong_mode);
        }
        if wrong_mode || self.vmxon.is_none() {
            return Fault(Exception::ud());
        }
        // Bits of IA32_VMX_EPT_VPID_CAP.
        let can = self.capabilities.ept_vpid.0;
        let offered = match i {
            Instruction::Invept { .. } => can >> 20 & 1 != 0,
            Instruction::Invvpid { .. } => can >> 32 & 1 != 0,
            _ => true,
        };
        if !offered {
            return Fault(Exception::ud());
        }
        if cpu.cpl > 0 {
            return Fault(Exception::gp(0));
        }
        match *i {
            Instruction::Vmxon { .. } => unreachable!(),
            Instruction::Vmxoff => {
                (self.vmxon, self.current) = (None, None);
                Done
            }
            Instruction::Vmclear { pointer } => self.vmclear(pointer, limits, memory),
            Instruction::Vmptrld { pointer } => self.vmptrld(pointer, limits, memory),
            Instruction::Vmptrst { to } => {
                let nowhere = if self.is(Wrong::NoPointer) { 0 } else { u64::MAX };
                let pointer = self.current.unwrap_or(nowhere);
                self.store(to, &pointer.to_le_bytes(), memory)
            }
            Instruction::Vmread { field, to } => self.vmread(field, to, cpu, memory),
            Instruction::Vmwrite { field, from, value } => {
                self.vmwrite(field, from, value, cpu, memory)
            }
            Instruction::Vmlaunch => self.entry(true, cpu),
            Instruction::Vmresume => self.entry(false, cpu),
            Instruction::Invept { kind, descriptor } => {
                self.invept(kind, descriptor, limits, memory)
            }
            Instruction::Invvpid { kind, descriptor } => self.invvpid(kind, descriptor, memory),
        }
    }

    /// An operand in memory: linear addresses are physical ones, and where there is no memory a page is not present.
    fn load(at: Address, into: &mut [u8], memory: &Memory) -> Result<(), Outcome> {
        let at = at.map_err(Fault)?;
        memory.read(Gpa(at), into).map_err(|_| Fault(Exception::pf(at, 0)))
    }

    fn pointer(at: Address, memory: &Memory) -> Result<u64, Outcome> {
        let mut bytes = [0; 8];
        Self::load(at, &mut bytes, memory)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn store(&mut self, at: Address, bytes: &[u8], memory: &Memory) -> Outcome {
        let at = match at {
            Ok(at) => at,
            Err(fault) => return Fault(fault),
        };
        let mut old = vec![0; bytes.len()];
        if memory.read(Gpa(at), &mut old).is_err() {
            return Fault(Exception::pf(at, 2));
        }
        self.stored = Some((at, bytes.to_vec()));
        Done
    }

    fn is_page(at: u64, limits: &Limits) -> bool {
        at & 0xfff == 0 && at >> limits.physical_bits == 0
    }

    fn vmxon(
        &mut self,
        pointer: Address,
        cpu: &Cpu,
        limits: &Limits,
        memory: &Memory,
        wrong_mode: bool,
    ) -> Outcome {
        let extensions = cpu.cr4 & 0x2000 != 0;
        if wrong_mode || !extensions {
            return Fault(Exception::ud());
        }
        if self.vmxon.is_some() && self.is(Wrong::VmxonPrivilege) {
            return self.fail(15);
        }
        if cpu.cpl > 0 {
            return Fault(Exception::gp(0));
        }
        if self.vmxon.is_some() {
            return self.fail(15);
        }
        let c = &self.capabilities;
        let supported = |value: u64, ones: u64, may: u64| ones & !value == 0 && value & !may == 0;
        let registers = supported(cpu.cr0, c.cr0_fixed0, c.cr0_fixed1)
            && supported(cpu.cr4, c.cr4_fixed0, c.cr4_fixed1);
        if !registers || cpu.feature_control & 5 != 5 {
            return Fault(Exception::gp(0));
        }
        let at = match Self::pointer(pointer, memory) {
            Ok(at) => at,
            Err(end) => return end,
        };
        let good = self.regions.get(&at).is_some_and(|region| region.header == REVISION);
        if !Self::is_page(at, limits) || !good {
            return Invalid;
        }
        (self.vmxon, self.current) = (Some(at), None);
        Done
    }

    fn vmclear(&mut self, pointer: Address, limits: &Limits, memory: &Memory) -> Outcome {
        let at = match Self::pointer(pointer, memory) {
            Ok(at) => at,
            Err(end) => return end,
        };
        if !Self::is_page(at, limits) {
            return self.fail(2);
        }
        if self.vmxon == Some(at) {
            return self.fail(3);
        }
        let stays = self.is(Wrong::StaysLaunched);
        if let Some(region) = self.regions.get_mut(&at) {
            region.launched &= stays;
        }
        if self.current == Some(at) {
            self.current = None;
        }
        Done
    }

    fn vmptrld(&mut self, pointer: Address, limits: &Limits, memory: &Memory) -> Outcome {
        let at = match Self::pointer(pointer, memory) {
            Ok(at) => at,
            Err(end) => return end,
        };
        if !Self::is_page(at, limits) {
            return self.fail(9);
        }
        if self.vmxon == Some(at) {
            return self.fail(10);
        }
        // "Or (31st bit is set and the processor does not support the 1-setting of VMCS shadowing)."
        let shadows = self.capabilities.secondary.may() >> 14 & 1 != 0 && !self.is(Wrong::NoShadow);
        let good = self.regions.get(&at).is_some_and(|region| {
            region.header & 0x7fff_ffff == REVISION && (region.header >> 31 == 0 || shadows)
        });
        // The current one is not read again (§25.11.1).
        if !good && self.current != Some(at) {
            return self.fail(11);
        }
        self.current = Some(at);
        Done
    }

    /// Of L2 the VMCS that VMREAD and VMWRITE reach is the one that the link pointer names.
    fn target(&self) -> Option<u64> {
        let current = self.current?;
        match self.l2 {
            None => Some(current),
            Some(_) => Some(self.get(0x2800)).filter(|link| *link != u64::MAX),
        }
    }

    fn vmread(&mut self, field: u64, to: Place, cpu: &Cpu, memory: &Memory) -> Outcome {
        let Some(target) = self.target() else { return Invalid };
        let field = if cpu.is_64_bit { field } else { field & 0xffff_ffff };
        if !is_field(field) {
            return self.fail(12);
        }
        let values = &self.regions[&target].fields;
        let value = match self.is(Wrong::UpperHalf) {
            false => values.read(field),
            true => values.get(field as u16 & !1),
        };
        let value = if cpu.is_64_bit { value } else { value & 0xffff_ffff };
        match to {
            Place::Register(number) => Outcome::Value(number, value),
            Place::Memory(at) => {
                let bytes = value.to_le_bytes();
                self.store(at, &bytes[..if cpu.is_64_bit { 8 } else { 4 }], memory)
            }
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
        let Some(target) = self.target() else { return Invalid };
        let field = if cpu.is_64_bit { field } else { field & 0xffff_ffff };
        let mut value = if cpu.is_64_bit { register } else { register & 0xffff_ffff };
        if let Place::Memory(at) = from {
            let mut bytes = [0; 8];
            let length = if cpu.is_64_bit { 8 } else { 4 };
            if let Err(end) = Self::load(at, &mut bytes[..length], memory) {
                return end;
            }
            value = u64::from_le_bytes(bytes);
        }
        if !is_field(field) {
            return self.fail(12);
        }
        // Bit 29 of IA32_VMX_MISC.
        let all = self.capabilities.misc >> 29 & 1 != 0 || self.is(Wrong::ReadOnly);
        if is_read_only(field) && !all {
            return self.fail(13);
        }
        if self.l2.is_some() && self.is(Wrong::LostShadow) {
            return Done;
        }
        self.regions.get_mut(&target).unwrap().fields.write(field, value);
        Done
    }

    fn entry(&mut self, launch: bool, cpu: &Cpu) -> Outcome {
        // A shadow VMCS cannot be entered (§25.10).
        let Some(at) = self.current else { return Invalid };
        if self.regions[&at].header >> 31 != 0 && !self.is(Wrong::EntersShadow) {
            return Invalid;
        }
        let launched = self.now().launched;
        if launched == launch && self.is(Wrong::EntryOrder) {
            return self.fail(if launch { 4 } else { 5 });
        }
        if cpu.blocked_by_mov_ss {
            return self.fail(26);
        }
        if launched == launch {
            return self.fail(if launch { 4 } else { 5 });
        }
        Outcome::Enters
    }

    /// What the entry may come to, by the oracle of the checks.
    pub fn judge(&self, limits: &Limits, memory: &Memory) -> Vec<End> {
        let mut image = Vmcs12::new();
        for encoding in fields::all() {
            let named = x86::vmcs::place::find(encoding.into()).unwrap();
            // By no encoding that drops bits.
            image.write(0, named, self.get(encoding));
        }
        let dr7_zeros = if self.is(Wrong::Dr7) { 0 } else { 0xffff_ffff << 32 };
        let processor = Processor {
            capabilities: &self.capabilities,
            limits,
            memory,
            current: self.current.unwrap(),
            dr7_zeros,
        };
        oracle::ends(&oracle::judge(&image, processor)).into_iter().collect()
    }

    /// The entry has come to this.
    pub fn ended(&mut self, end: End, launch: bool) {
        match end {
            End::Error(error) => {
                self.fail(error);
            }
            // Nothing but these two is told, and nothing is saved (§27.8).
            End::Failed(reason, qualification) => {
                self.set(0x4402, reason.into());
                self.set(0x6400, qualification);
                if self.is(Wrong::FailedEntryClears) {
                    self.set(0x4016, self.get(0x4016) & 0x7fff_ffff);
                }
            }
            End::Runs => {
                self.now_mut().launched |= launch;
                self.l2 = Some(super::left::entered(self));
            }
        }
    }

    fn invept(
        &mut self,
        kind: u64,
        descriptor: Address,
        limits: &Limits,
        memory: &Memory,
    ) -> Outcome {
        let can = self.capabilities.ept_vpid.0;
        let offered = matches!(kind, 1 | 2) && can >> (24 + kind) & 1 != 0;
        if !offered && !self.is(Wrong::KindBehindOperand) {
            return self.fail(28);
        }
        let mut bytes = [0; 16];
        if let Err(end) = Self::load(descriptor, &mut bytes, memory) {
            return end;
        }
        if !offered {
            return self.fail(28);
        }
        let pointer = u128::from_le_bytes(bytes) as u64;
        if kind == 2 {
            return Outcome::Invalidates("AllEpt".into());
        }
        if !is_ept_pointer(pointer, can, limits.physical_bits) {
            return self.fail(28);
        }
        Outcome::Invalidates(format!("Ept({pointer})"))
    }

    fn invvpid(&mut self, kind: u64, descriptor: Address, memory: &Memory) -> Outcome {
        let offered = kind <= 3 && self.capabilities.ept_vpid.0 >> (40 + kind) & 1 != 0;
        if !offered {
            return self.fail(28);
        }
        let mut bytes = [0; 16];
        if let Err(end) = Self::load(descriptor, &mut bytes, memory) {
            return end;
        }
        let both = u128::from_le_bytes(bytes);
        let (vpid, address) = (both as u64, (both >> 64) as u64);
        if vpid >> 16 != 0 || kind != 2 && vpid == 0 {
            return self.fail(28);
        }
        let canonical = (address << 16) as i64 >> 16 == address as i64;
        if kind == 0 && !canonical && !self.is(Wrong::NotCanonical) {
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

/// An EPT pointer with which an entry does not fail (§27.2.1.1), by IA32_VMX_EPT_VPID_CAP.
pub fn is_ept_pointer(pointer: u64, can: u64, physical_bits: u8) -> bool {
    let bit = |number: u32| can >> number & 1 != 0;
    let kind = pointer & 7 == 0 && bit(8) || pointer & 7 == 6 && bit(14);
    let levels = pointer >> 3 & 7 == 3 && bit(6) || pointer >> 3 & 7 == 4 && bit(7);
    let flags = pointer >> 6 & 1 == 0 || bit(21);
    let shadow_stacks = pointer >> 7 & 1 == 0 || bit(23);
    kind && levels
        && flags
        && shadow_stacks
        && pointer >> 8 & 15 == 0
        && pointer >> physical_bits == 0
}
