//! The code and the model side by side: L1's instructions, each with what is to be seen of it behind.

use std::collections::BTreeMap;

use gannet_nested_vmx::capabilities::{Offer, ept_vpid, misc};
use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::leave::{self, Known};
use gannet_nested_vmx::machine::{
    Address, Cpu, Entered, EntryBy, Instruction, Level, PendingEntry, Place, Then,
};
use gannet_nested_vmx::{Capabilities, Fail, GuestMemory, Machine, Vmcs12, events, merge};
use x86::vmcs::{Groups, ProcControls2, place};
use x86::{Exception, Gpa, Rflags};
use zerocopy::IntoBytes;

use super::Wrong;
use super::bases::{self, Base};
use super::drive::{APIC_PAGE, REGION, SHADOW};
use super::example::EVERYTHING;
use super::fields::{self, Fields};
use super::oracle::End;
use super::random::Random;
use super::reference::{Model, Outcome, REVISION, Region};
use super::rig::{CPU, KNOWN, L0, LIMITS, Memory, Vmcs02};

/// L1 begins anew behind so many steps, with other capabilities.
const STEPS: u64 = 1000;
/// Regions beside those of [`super::drive`]: an ordinary one, a shadow VMCS, and one of a wrong revision.
const THIRD: u64 = 0x7000;
const SECOND_SHADOW: u64 = 0x8000;
const WRONG_REVISION: u64 = 0x9000;
const VMXON: u64 = 0x1000;
const OTHER: u64 = 0x4000;
/// Bitmaps of the bases, and their list of EPT pointers.
const BITMAPS: [u64; 4] = [0xb000, 0xc000, 0xd000, 0xe000];
/// A page of operands, and what lies behind all memory.
const OPERANDS: u64 = 0xf000;
const END: u64 = 0x1_0000;

/// What was done, so that a run that does nothing is seen.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub instructions: BTreeMap<&'static str, u64>,
    /// VMfailValid by error, and VMfailInvalid as 0.
    pub failed: BTreeMap<u32, u64>,
    /// Faults by vector.
    pub faults: BTreeMap<u8, u64>,
    pub runs: u64,
    /// Entries that failed, by reason and qualification.
    pub failures: BTreeMap<(u32, u64), u64>,
    /// Exits that L1 saw, and those that L0 kept, by reason.
    pub reflected: BTreeMap<u64, u64>,
    pub kept: BTreeMap<u64, u64>,
    /// VMREAD and VMWRITE that a shadow VMCS has served, accesses to CR8, VM functions, events of L0's.
    pub served: u64,
    pub priority: u64,
    pub functions: u64,
    pub events: u64,
    /// How often all fields were compared.
    pub compared: u64,
}

/// Who differs, and how.
pub type Checked = Result<(), String>;

pub fn same<T: PartialEq + core::fmt::Debug>(what: &str, code: T, model: T) -> Checked {
    if code == model {
        Ok(())
    } else {
        Err(format!("{what}: {code:x?}, and by the manual {model:x?}"))
    }
}

pub struct Run {
    pub machine: Machine,
    pub memory: Memory,
    pub hardware: Vmcs02,
    pub model: Model,
    pub random: Random,
    pub known: Known,
    pub counts: Counts,
    /// What L2 does that was entered halted, or waiting for a SIPI.
    pub asleep: u64,
    /// An event whose delivery an exit of L0's has interrupted.
    pub interrupted: Option<events::Injection>,
    limits: Limits,
    /// What L1 mends its VMCS by.
    base: Base,
    image: Fields,
    broken: bool,
    steps: u64,
}

fn fields_of(v: &Vmcs12) -> Fields {
    let mut values = Fields::new();
    for encoding in fields::all() {
        values.set(encoding, v.read(place::find(encoding.into()).unwrap()));
    }
    values
}

fn capabilities(random: &mut Random) -> Capabilities {
    let mut offer = Offer::WHOLE;
    for (control, bits) in [
        (ProcControls2::SHADOW_VMCS, 0),
        (ProcControls2::EPT, 0),
        (ProcControls2::VPID, 0),
        (ProcControls2::empty(), ept_vpid::INVEPT_SINGLE),
        (ProcControls2::empty(), ept_vpid::ACCESSED_DIRTY),
        (ProcControls2::empty(), 1 << 41),
        (ProcControls2::empty(), 1 << 43),
    ] {
        if random.one_in(8) {
            offer.secondary.remove(control);
            offer.ept_vpid &= !bits;
        }
    }
    let mut c = Capabilities::compute(&EVERYTHING, &offer);
    if random.one_in(4) {
        c.misc &= !misc::WRITE_ALL;
    }
    c
}

fn base(random: &mut Random, bits: u8) -> Base {
    let event = if random.one_in(3) { random.of(&bases::EVENTS) } else { bases::EVENTS[0] };
    let host = random.one_in(6);
    Base::new(random.of(&bases::MODES), random.of(&bases::CONTROLS), event, host, bits)
}

impl Run {
    pub fn new(seed: u64, wrong: Option<Wrong>) -> Self {
        let mut random = Random(seed);
        let capabilities = capabilities(&mut random);
        let bits = random.of(&[40, 36, 46, 52]);
        let base = base(&mut random, bits);
        let image = base.image(&capabilities);
        let memory = Memory::new(&image);
        let mut bytes = [0; 0x1000];
        for page in BITMAPS {
            bytes.fill_with(|| (random.next() & random.next()) as u8);
            memory.put(page, &bytes);
        }
        // The list of EPT pointers is one of these pages: every other entry is a good one.
        for at in (0..0x1000).step_by(16) {
            memory.put(BITMAPS[2] + at, &(0x501e | (at & 0xf0) << 12).to_le_bytes());
        }
        // And so is what lies behind its last one.
        memory.put(BITMAPS[3], &0x701e_u64.to_le_bytes());
        let model = Model {
            regions: BTreeMap::new(),
            vmxon: None,
            current: None,
            capabilities,
            l2: None,
            wrong,
            stored: None,
        };
        let mut run = Self {
            machine: Machine::new(capabilities),
            memory,
            hardware: Vmcs02::new(),
            model,
            random,
            known: KNOWN,
            counts: Counts::default(),
            asleep: 0,
            interrupted: None,
            limits: Limits { physical_bits: bits, ..LIMITS },
            base,
            image: fields_of(&image),
            broken: false,
            steps: 0,
        };
        let nothing = Fields::new();
        for (at, header) in [
            (VMXON, REVISION),
            (REGION, REVISION),
            (OTHER, REVISION),
            (THIRD, REVISION),
            (SHADOW, REVISION | 1 << 31),
            (SECOND_SHADOW, REVISION | 1 << 31),
            (WRONG_REVISION, 1),
        ] {
            let fields = if at == VMXON { nothing.clone() } else { run.image.clone() };
            run.put(at, header, fields);
        }
        run
    }

    /// L1 writes a whole region.
    fn put(&mut self, at: u64, header: u32, fields: Fields) {
        let mut image = Vmcs12::new();
        for encoding in fields::all() {
            image.write(0, place::find(encoding.into()).unwrap(), fields.get(encoding));
        }
        self.memory.put(at, image.as_bytes());
        self.memory.put(at, &header.to_le_bytes());
        self.model.regions.insert(at, Region { header, launched: false, fields });
    }

    pub fn step(&mut self) -> Checked {
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS) {
            let (counts, wrong, seed) =
                (core::mem::take(&mut self.counts), self.model.wrong, self.random.next());
            *self = Self { counts, ..Self::new(seed, wrong) };
        }
        match self.model.l2 {
            Some(_) => self.l2(),
            None => self.l1(),
        }
    }

    /// L1's registers: nearly always such that it may use VMX.
    fn cpu(&mut self) -> Cpu {
        let legacy = self.base.legacy_host;
        let cpu = Cpu { long_mode: !legacy, is_64_bit: !legacy, ..CPU };
        if !self.random.one_in(12) {
            return cpu;
        }
        match self.random.below(12) {
            0 => Cpu { cpl: 3, ..cpu },
            1 => Cpu { is_64_bit: false, ..cpu },
            2 => Cpu { vm86: true, long_mode: false, is_64_bit: false, ..cpu },
            3 => Cpu { cr4: 0x20, ..cpu },
            4 => Cpu { cr0: 0x32, ..cpu },
            5 => Cpu { feature_control: self.random.of(&[0, 1, 4]), ..cpu },
            6 => Cpu { cr0: 0x8005_0013, ..cpu },
            7 => Cpu { long_mode: legacy, is_64_bit: legacy, ..cpu },
            8 => Cpu { cr4: 0x2020 | 1 << 23, ..cpu },
            9 => Cpu { cpl: 3, cr4: 0x20, ..cpu },
            _ => Cpu { blocked_by_mov_ss: true, ..cpu },
        }
    }

    /// An operand's address, nearly always one of memory.
    fn operand(&mut self) -> Address {
        let r = &mut self.random;
        match r.below(64) {
            0 => Err(r.of(&[Exception::ss(0), Exception::gp(0)])),
            1 => Ok(r.of(&[END, END - 4, 1 << 33])),
            _ => Ok(OPERANDS + r.below(0xff0)),
        }
    }

    /// An operand in memory that holds these bytes.
    fn holding(&mut self, bytes: &[u8]) -> Address {
        let at = self.operand();
        if let Ok(at) = at {
            let _ = self.memory.write(Gpa(at), bytes);
        }
        at
    }

    fn pointer(&mut self) -> Address {
        let wide = 1 << self.limits.physical_bits;
        let all = [
            VMXON,
            REGION,
            REGION,
            OTHER,
            OTHER,
            THIRD,
            THIRD,
            SHADOW,
            SECOND_SHADOW,
            WRONG_REVISION,
            REGION + 8,
            wide,
            wide | REGION,
            BITMAPS[0],
            0x50_0000,
            0,
        ];
        let good = [REGION, OTHER, THIRD];
        let at = if self.random.one_in(2) { self.random.of(&good) } else { self.random.of(&all) };
        self.holding(&at.to_le_bytes())
    }

    /// A field's encoding, as software may have it in a register.
    fn encoding(&mut self) -> u64 {
        let r = &mut self.random;
        let field = u64::from(r.field());
        match r.below(12) {
            0 => field | 1,
            1 => r.next() & 0x7fff,
            2 => field | 1 << r.below(64),
            3 => r.next(),
            _ => field,
        }
    }

    fn l1(&mut self) -> Checked {
        if self.random.one_in(64) {
            self.store_region();
            return Ok(());
        }
        if self.broken && self.random.one_in(2) {
            return self.mend();
        }
        let cpu = self.cpu();
        let kind = match (self.model.vmxon, self.model.current) {
            (None, _) if !self.random.one_in(4) => 0,
            (Some(_), None) if self.random.one_in(2) => 4,
            _ => self.random.below(64),
        };
        let instruction = match kind {
            0 => Instruction::Vmxon { pointer: self.pointer() },
            1 if self.random.one_in(4) => Instruction::Vmxoff,
            2 | 3 => Instruction::Vmclear { pointer: self.pointer() },
            4..=6 => Instruction::Vmptrld { pointer: self.pointer() },
            7 => Instruction::Vmptrst { to: self.operand() },
            8..=15 => self.vmread(),
            16..=29 => self.vmwrite(),
            30..=32 => self.invept(),
            33..=35 => self.invvpid(),
            _ => self.entry(),
        };
        self.execute(instruction, &cpu)
    }

    fn place(&mut self, number: u64) -> Place {
        match number % 4 {
            0 => Place::Memory(self.operand()),
            _ => Place::Register(number as u8 & 15),
        }
    }

    pub fn vmread(&mut self) -> Instruction {
        let (field, number) = (self.encoding(), self.random.next());
        Instruction::Vmread { field, to: self.place(number) }
    }

    pub fn vmwrite(&mut self) -> Instruction {
        // Mostly what leaves the VMCS enterable.
        let (field, value) = match self.random.below(4) {
            0 => {
                let field = self.encoding();
                let here = self.model.current.map_or(0, |_| self.model.get(field as u16));
                (field, self.random.value(here, self.limits.physical_bits))
            }
            _ => {
                let here = |field| self.model.current.map_or(0, |_| self.model.get(field));
                self.random.harmless(here)
            }
        };
        let number = self.random.next();
        let from = match number % 4 {
            0 => Place::Memory(self.holding(&value.to_le_bytes())),
            _ => Place::Register(number as u8 & 15),
        };
        Instruction::Vmwrite { field, from, value }
    }

    fn invept(&mut self) -> Instruction {
        let r = &mut self.random;
        let eptp = r.of(&[
            0x501e_u64,
            0x505e,
            0x18,
            0x501d,
            0x507e,
            0x509e,
            0x511e,
            0x16,
            0x26,
            0x1e | 1 << 52,
        ]);
        let kind = r.of(&[0, 1, 1, 2, 2, 3, 1 << 32, u64::MAX]);
        Instruction::Invept { kind, descriptor: self.holding(&u128::from(eptp).to_le_bytes()) }
    }

    fn invvpid(&mut self) -> Instruction {
        let r = &mut self.random;
        let vpid = r.of(&[0u64, 1, 2, 0xffff, 0x1_0000, 1 << 63]);
        let address = r.of(&[
            0u64,
            0x1000,
            1 << 46,
            1 << 47,
            0xffff_8000_0000_0000,
            0xffff_7fff_ffff_ffff,
            1 << 63,
        ]);
        let kind = r.of(&[0, 0, 1, 2, 3, 4, 1 << 32, u64::MAX]);
        let both = u128::from(vpid) | u128::from(address) << 64;
        Instruction::Invvpid { kind, descriptor: self.holding(&both.to_le_bytes()) }
    }

    fn entry(&mut self) -> Instruction {
        let launched = self.model.current.is_some_and(|_| self.model.now().launched);
        let launch = launched == self.random.one_in(12);
        if launch { Instruction::Vmlaunch } else { Instruction::Vmresume }
    }

    /// L1 stores into a region that is not current: another VMCS, or another header.
    fn store_region(&mut self) {
        let at =
            self.random.of(&[REGION, OTHER, THIRD, SHADOW, SECOND_SHADOW, WRONG_REVISION, VMXON]);
        if self.model.current == Some(at) {
            return;
        }
        let is_shadow = matches!(at, SHADOW | SECOND_SHADOW);
        let header = match self.random.below(8) {
            0 => self.random.of(&[1, REVISION, REVISION | 1 << 31]),
            _ => REVISION | u32::from(is_shadow) << 31,
        };
        if at == WRONG_REVISION || at == VMXON || self.random.one_in(4) {
            self.memory.put(at, &header.to_le_bytes());
            self.model.regions.get_mut(&at).unwrap().header = header;
            return;
        }
        let mut fields = fields_of(
            &base(&mut self.random, self.limits.physical_bits).image(&self.model.capabilities),
        );
        if self.random.one_in(4) {
            // By itself L1 sets reserved bits of access rights, too.
            let field = self.random.field();
            fields.set(field, self.random.value(fields.get(field), self.limits.physical_bits));
        }
        self.put(at, header, fields);
    }

    /// L1 writes all fields that are not as it wants them.
    fn mend(&mut self) -> Checked {
        self.broken = false;
        if self.random.one_in(2) {
            self.base = base(&mut self.random, self.limits.physical_bits);
            self.image = fields_of(&self.base.image(&self.model.capabilities));
        }
        if self.model.current.is_none() {
            return Ok(());
        }
        let differs = |encoding: &u16| self.model.get(*encoding) != self.image.get(*encoding);
        let wrong: Vec<u16> = fields::all().filter(differs).collect();
        for encoding in
            wrong.into_iter().filter(|encoding| !fields::is_read_only(u64::from(*encoding)))
        {
            let (from, value) = (Place::Register(0), self.image.get(encoding));
            self.execute(Instruction::Vmwrite { field: encoding.into(), from, value }, &CPU)?;
        }
        Ok(())
    }

    /// What the quick way makes of VMREAD and VMWRITE, where it may be gone.
    fn quickly(&self, instruction: &Instruction, cpu: &Cpu) -> Option<(Then, Vmcs12)> {
        if !cpu.is_64_bit || cpu.cpl != 0 || cpu.vm86 || cpu.cr0 & 1 == 0 {
            return None;
        }
        let mut machine = self.machine.clone();
        if !machine.is_in_operation() {
            return None;
        }
        let then = match *instruction {
            Instruction::Vmread { field, to: Place::Register(number) } => {
                Then::Register(number, machine.read_quickly(field)?)
            }
            Instruction::Vmwrite { field, from: Place::Register(_), value } => {
                machine.write_quickly(field, value)?;
                Then::Next
            }
            _ => return None,
        };
        Some((then, machine.vmcs12().clone()))
    }

    fn outcome(result: &Result<Then, Fail>) -> Outcome {
        match result {
            Ok(Then::Next) => Outcome::Done,
            Ok(Then::Register(number, value)) => Outcome::Value(*number, *value),
            Ok(Then::Invalidate(what)) => Outcome::Invalidates(format!("{what:?}")),
            Ok(Then::Enter(_)) => Outcome::Enters,
            Err(Fail::Invalid) => Outcome::Invalid,
            Err(Fail::Valid(error)) => Outcome::Valid(error.number()),
            Err(Fail::Fault(exception)) => Outcome::Fault(*exception),
            Err(Fail::Outside) => panic!("all of memory is there"),
        }
    }

    /// RFLAGS behind an instruction (§31.2).
    fn flags(outcome: &Outcome, before: u64) -> Option<u64> {
        let cleared = before & !0x8d5;
        match outcome {
            Outcome::Done | Outcome::Value(..) | Outcome::Invalidates(_) => Some(cleared),
            Outcome::Invalid => Some(cleared | 1),
            Outcome::Valid(_) => Some(cleared | 0x40),
            Outcome::Enters | Outcome::Fault(_) => None,
        }
    }

    fn count(&mut self, instruction: &Instruction, outcome: &Outcome) {
        let name = match instruction {
            Instruction::Vmxon { .. } => "VMXON",
            Instruction::Vmxoff => "VMXOFF",
            Instruction::Vmclear { .. } => "VMCLEAR",
            Instruction::Vmptrld { .. } => "VMPTRLD",
            Instruction::Vmptrst { .. } => "VMPTRST",
            Instruction::Vmread { .. } => "VMREAD",
            Instruction::Vmwrite { .. } => "VMWRITE",
            Instruction::Vmlaunch => "VMLAUNCH",
            Instruction::Vmresume => "VMRESUME",
            Instruction::Invept { .. } => "INVEPT",
            Instruction::Invvpid { .. } => "INVVPID",
        };
        *self.counts.instructions.entry(name).or_default() += 1;
        match outcome {
            Outcome::Invalid => *self.counts.failed.entry(0).or_default() += 1,
            Outcome::Valid(error) => *self.counts.failed.entry(*error).or_default() += 1,
            Outcome::Fault(fault) => *self.counts.faults.entry(fault.vector.0).or_default() += 1,
            _ => {}
        }
    }

    /// Executes an instruction of either level in both.
    pub fn execute(&mut self, instruction: Instruction, cpu: &Cpu) -> Checked {
        let told = |why| format!("{instruction:x?} with {cpu:x?}: {why}");
        let limits = Limits { long_mode: cpu.long_mode, ..self.limits };
        let destination = match instruction {
            Instruction::Vmptrst { to: Ok(to) } => Some(to),
            Instruction::Vmread { to: Place::Memory(Ok(to)), .. } => Some(to),
            _ => None,
        };
        let mut expected = [0; 24];
        let seen = destination.filter(|at| self.memory.read(Gpa(*at), &mut expected).is_ok());
        let outcome = self.model.execute(&instruction, cpu, &limits, &self.memory);
        self.count(&instruction, &outcome);
        if let (Some((_, bytes)), Some(_)) = (&self.model.stored, seen) {
            expected[..bytes.len()].copy_from_slice(bytes);
        }
        let ends = match outcome {
            Outcome::Enters => self.model.judge(&limits, &self.memory),
            _ => Vec::new(),
        };
        let mut needs = self.machine.needs(&instruction);
        if let Some(one) = self.machine.asks_one(&instruction, needs) {
            self.machine.put_alone(one, self.hardware.of(one));
            needs = self.machine.needs(&instruction);
        }
        self.machine.fetch(&self.hardware, &self.known, needs);
        let quick = self.quickly(&instruction, cpu);
        let result = self.machine.execute(instruction, cpu, &limits, &mut self.memory);
        if let Some((then, vmcs12)) = quick {
            same("the quick way ends with", &result, &Ok(then)).map_err(told)?;
            same("the quick way leaves", self.machine.vmcs12(), &vmcs12).map_err(told)?;
        }
        let got = Self::outcome(&result);
        if outcome == Outcome::Enters {
            self.enter(&result, &ends, &limits).map_err(told)?;
        } else {
            same("it ends with", &got, &outcome).map_err(told)?;
            let before = Rflags::from_bits_retain(0x8d7 | 0x200);
            let flags = Machine::rflags(&result, before).map(|flags| flags.bits());
            same("RFLAGS", flags, Self::flags(&outcome, before.bits())).map_err(told)?;
        }
        if let Some(at) = seen {
            let mut stored = [0; 24];
            self.memory.read(Gpa(at), &mut stored).unwrap();
            same("stored", stored, expected).map_err(told)?;
        }
        same("current", self.machine.current().map(|at| at.0), self.model.current).map_err(told)?;
        same("VMXON", self.machine.vmxon().map(|at| at.0), self.model.vmxon).map_err(told)?;
        let level = if self.model.l2.is_some() { Level::L2 } else { Level::L1 };
        same("level", self.machine.level(), level).map_err(told)?;
        if self.model.l2.is_none() && self.random.one_in(16) {
            self.compare().map_err(told)?;
        }
        if self.model.vmxon.is_none() {
            self.hardware = Vmcs02::new();
        }
        Ok(())
    }

    /// The entry goes on, to one of the ends that there may be.
    fn enter(&mut self, result: &Result<Then, Fail>, ends: &[End], limits: &Limits) -> Checked {
        let mut groups = Groups::NONE;
        let mut entered = None;
        let end = match result {
            Ok(Then::Enter(pending)) => {
                let mut how = self.machine.finish_entry(limits, &self.memory);
                if let Entered::Fetch(needed) = how {
                    self.machine.fetch(&self.hardware, &self.known, needed);
                    how = self.machine.finish_entry(limits, &self.memory);
                }
                match how {
                    Entered::Fetch(groups) => panic!("{groups:?} were fetched"),
                    Entered::Failed(failure) => {
                        End::Failed(u32::from(failure.reason.0) | 1 << 31, failure.qualification)
                    }
                    Entered::L2(dirty) => {
                        (groups, entered) = (dirty, Some(*pending));
                        End::Runs
                    }
                }
            }
            Err(Fail::Valid(error)) => End::Error(error.number()),
            other => return Err(format!("an entry ends with {other:?}")),
        };
        if !ends.contains(&end) {
            return Err(format!("{end:x?}, and by the manual {ends:x?}"));
        }
        let launch = match result {
            Ok(Then::Enter(pending)) => pending.by == EntryBy::Vmlaunch,
            _ => false,
        };
        self.model.ended(end, launch);
        self.broken = end != End::Runs;
        match end {
            End::Error(error) => *self.counts.failed.entry(error).or_default() += 1,
            End::Failed(reason, qualification) => {
                *self.counts.failures.entry((reason & 0xffff, qualification)).or_default() += 1;
                let reason = x86::vmcs::ExitReason(reason as u16);
                self.machine.fail_entry(gannet_nested_vmx::EntryFailure { reason, qualification });
                self.goes_on(LIMITS.efer, CPU.cr0, reason, false)?;
                self.compare()?;
            }
            End::Runs => self.runs(entered.unwrap(), groups)?,
        }
        Ok(())
    }

    /// L2 is entered: the hardware has its state.
    fn runs(&mut self, entry: PendingEntry, dirty: Groups) -> Checked {
        self.counts.runs += 1;
        merge::compose(&L0, self.machine.vmcs12(), dirty, &mut self.hardware);
        self.machine.entered(entry);
        if !self.model.now().fields.secondary(1) {
            self.adopt_page_directories();
        }
        self.is_composed()?;
        let info = self.model.get(0x4016);
        if info >> 31 != 0 && info >> 8 & 7 == 2 {
            // The hardware delivers it before anything else, and it blocks those that follow.
            self.change(0x4824, self.model.l2.as_ref().unwrap().get(0x4824) | 8);
        }
        self.asleep = self.model.sleeps();
        let asleep = events::sleeps(self.machine.vmcs12());
        same("sleeps", asleep.is_some(), self.asleep != 0)?;
        self.interrupted = None;
        Ok(())
    }

    /// The hardware holds L2's registers, and the event that is injected.
    fn is_composed(&self) -> Checked {
        let (v, l2) = (&self.model.now().fields, self.model.l2.as_ref().unwrap());
        let hardware = |encoding: u16| self.hardware.values[usize::from(encoding)];
        let paging = l2.bit(0x6800, 31) && l2.bit(0x6804, 5) && !l2.bit(0x2806, 10);
        let info = v.get(0x4016);
        let unblocks = info >> 31 != 0 && info >> 8 & 7 == 2 && !v.bit(0x4000, 5);
        for encoding in fields::all().filter(|encoding| fields::is_guest(*encoding)) {
            let not = match encoding {
                // L0's own: the link, the timer, interrupts and the log; not virtualized: counters and bounds; L0 waits for L2.
                0x2800 | 0x482e | 0x0810 | 0x0812 | 0x2808 | 0x2812 | 0x4826 => u64::MAX,
                0x280a..=0x2810 if !paging => u64::MAX,
                0x6800 => L0.cr0_mask | L0.cr0_ones,
                0x6804 => L0.cr4_mask | L0.cr4_ones,
                // An NMI is injected whatever blocks, and blocks anew.
                0x4824 if unblocks => 8,
                _ => 0,
            };
            let (code, model) = (hardware(encoding) & !not, l2.get(encoding) & !not);
            same(&format!("vmcs02 has as {encoding:#x}"), code, model)?;
        }
        // What L2 reads: L1's bits as L1 says, all others as they are (§26.3).
        for (register, mask, shadow) in [(0x6800, 0x6000, 0x6004), (0x6804, 0x6002, 0x6006)] {
            let owned = hardware(mask);
            let reads = hardware(register) & !owned | hardware(shadow) & owned;
            let of_l1 = v.get(mask);
            let expected = l2.get(register) & !of_l1 | v.get(shadow) & of_l1;
            same(&format!("L2 reads as {register:#x}"), reads, expected)?;
            same("L1's bits exit", owned & of_l1, of_l1)?;
        }
        if info >> 31 != 0 {
            same("injected", hardware(0x4016), info)?;
            if info >> 11 & 1 != 0 {
                same("its error code", hardware(0x4018), v.get(0x4018))?;
            }
            if matches!(info >> 8 & 7, 4..=6) {
                same("its length", hardware(0x401a), v.get(0x401a))?;
            }
        }
        Ok(())
    }

    /// The current VMCS with all that the last exit has left in the hardware's.
    fn whole(&self) -> Vmcs12 {
        let mut whole = self.machine.vmcs12().clone();
        leave::save_rest(&mut whole, &self.hardware, &self.known, self.machine.behind());
        whole
    }

    /// PDPTEs of an L2 without EPT, or without PAE paging, are undefined (§28.3.4).
    pub fn adopt_page_directories(&mut self) {
        let whole = self.whole();
        for encoding in (0x280a..=0x2810).step_by(2) {
            let value = whole.read(place::find(encoding).unwrap());
            self.model.set(encoding as u16, value);
            if let Some(l2) = &mut self.model.l2 {
                l2.set(encoding as u16, value);
            }
        }
    }

    /// Every field of the current VMCS.
    pub fn compare(&mut self) -> Checked {
        if self.model.current.is_none() {
            return Ok(());
        }
        self.counts.compared += 1;
        let whole = self.whole();
        same("launched", whole.is_launched(), self.model.now().launched)?;
        for encoding in fields::all() {
            let code = whole.read(place::find(encoding.into()).unwrap());
            same(&format!("field {encoding:#x}"), code, self.model.get(encoding))?;
        }
        Ok(())
    }

    /// L2's virtual-APIC page, if it is where the bases have it.
    pub fn has_apic_page(&self) -> bool {
        self.model.get(0x2012) == APIC_PAGE
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }
}
