//! The instructions of VMX that L1 executes: their operands, and what they do to L1.

use backend::{
    ControlRegisters, Executed, Gprs, L1Memory, RSP, Registers, SegmentName, WorldSwitch,
};
use cpu::Cpu;
use nested_vmx::machine::{self, Address, EntryBy, Instruction, Place, Then};
use nested_vmx::operand::{self, Context, Information};
use nested_vmx::{Fail, Machine, checks::Limits};
use x86::msr::debugctl;
use x86::segment::attr;
use x86::vmcs::{ExitReason, interruptibility};
use x86::{Cr4, Direction, Efer, Rflags, Segment};

use super::{access::Memory, kept::Nested, shadow::Taken};
use crate::{fields, state::Vmx};

/// Bit of the instruction information: the first operand of VMREAD and VMWRITE is a register.
const IS_REGISTER: u32 = 1 << 10;
/// Linear addresses with four levels of tables and with five.
const LINEAR_BITS: (u32, u32) = (48, 57);

/// The exit that an instruction which enters L2 has caused.
pub(super) const fn reason_of(by: EntryBy) -> ExitReason {
    match by {
        EntryBy::Vmlaunch => ExitReason::Vmlaunch,
        EntryBy::Vmresume => ExitReason::Vmresume,
    }
}

const fn name_of(segment: u8) -> SegmentName {
    match segment {
        0 => SegmentName::Es,
        1 => SegmentName::Cs,
        2 => SegmentName::Ss,
        // 6 and 7 are no segments: the CPU reports neither.
        4 => SegmentName::Fs,
        5 => SegmentName::Gs,
        _ => SegmentName::Ds,
    }
}

impl<C: Cpu> Vmx<C> {
    pub(crate) fn is_long(&self) -> bool {
        self.efer.contains(Efer::LMA)
    }

    pub(crate) fn exit_reason(&self) -> ExitReason {
        ExitReason::of(self.get(fields::EXIT_REASON))
    }

    /// Whether the instruction that exited has an operand in memory.
    pub(crate) fn has_operand_in_memory(&self) -> bool {
        match self.exit_reason() {
            ExitReason::Vmread | ExitReason::Vmwrite => {
                self.get(fields::INSTRUCTION_INFO) & IS_REGISTER == 0
            }
            // These have no operand at all.
            ExitReason::Vmlaunch | ExitReason::Vmresume | ExitReason::Vmxoff => false,
            _ => true,
        }
    }

    /// What the vCPU's CPUID and state say about values.
    pub(crate) fn nested_limits(&self) -> Limits {
        // What a CPU checks of addresses in a VMCS goes by what it can do, whatever CR4 says.
        let wide = self.cold.limits.cr4_allowed.contains(Cr4::LA57);
        Limits {
            physical_bits: self.cold.limits.maxphyaddr,
            linear_bits: if wide { LINEAR_BITS.1 } else { LINEAR_BITS.0 },
            efer: self.cold.limits.efer_allowed,
            // Not offered: the entry and the exit do not load it.
            perf_global_ctrl: 0,
            // What stock KVM lets a guest name, though nothing of it is carried out.
            debugctl: debugctl::LBR
                | debugctl::BTF
                | if self.cold.limits.rtm { debugctl::RTM } else { 0 },
            long_mode: self.is_long(),
            // VMX operation is put aside in SMM, and lists of local-APIC MSRs end at the vCPU.
            smm: false,
            x2apic: false,
        }
    }

    /// Registers that decide whether an instruction may be executed. In virtual-8086 mode, and in code of 32 bits
    /// in long mode, none of them exits.
    pub(super) fn nested_cpu(&self, n: &Nested, reason: ExitReason) -> machine::Cpu {
        let enters = matches!(reason, ExitReason::Vmlaunch | ExitReason::Vmresume);
        // STI's shadow does not hold an entry off (§27.1).
        let shadow = interruptibility::MOV_SS;
        // What L1 owns decides for VMXON alone.
        let whole = reason == ExitReason::Vmxon;
        machine::Cpu {
            cr0: if whole { ControlRegisters::cr0(self) } else { self.cr0 }.bits(),
            cr4: if whole { ControlRegisters::cr4(self) } else { self.cr4 }.bits(),
            long_mode: self.is_long(),
            // A 32-bit program in IA-32e mode gets #UD from the CPU, without an exit.
            is_64_bit: self.is_long(),
            vm86: false,
            cpl: self.cpl(),
            blocked_by_mov_ss: enters
                // What is noted comes before what the field says: a shadow may be over.
                && !self.shadow_over.get()
                && self.get(fields::GUEST_INTERRUPTIBILITY) & shadow != 0,
            feature_control: n.feature_control,
        }
    }

    /// The linear address of the operand of an instruction that exited, by what the CPU tells of it. In long mode it is
    /// one of 64-bit code.
    pub(crate) fn operand(&self, gprs: &Gprs, length: u32, using: Direction) -> Address {
        let information = Information(self.get(fields::INSTRUCTION_INFO));
        let number = information.segment();
        // In 64-bit code only FS and GS have a base.
        // Neither limit nor rights count there: the register is not read.
        let segment = if self.is_long() && !matches!(number, 4 | 5) {
            Segment { base: 0, limit: u32::MAX, selector: 0, attr: attr::P }
        } else {
            self.segment(name_of(number))
        };
        // By CR4, unlike the fields: an operand's address is translated now.
        let wide = self.cr4.contains(Cr4::LA57);
        let context = Context {
            gprs: &gprs.0,
            segment,
            is_64_bit: self.is_long(),
            linear_bits: if wide { LINEAR_BITS.1 } else { LINEAR_BITS.0 },
        };
        // The qualification is the displacement (§28.2.1).
        operand::linear(information, self.get(fields::EXIT_QUALIFICATION), &context, length, using)
    }

    /// Decodes the instruction that exited. `None`: it is none of VMX.
    fn decode_instruction(&self, gprs: &Gprs, reason: ExitReason) -> Option<Instruction> {
        let register = |number: u8| {
            let at = usize::from(number);
            // The number comes from the instruction: sixteen registers.
            gprs.0[at & 15]
        };
        // An operand that is no value: a field's encoding, or what is to be invalidated. Outside 64-bit mode it has 32 bits.
        let choice = |number| match self.is_long() {
            true => register(number),
            false => u64::from(register(number) as u32),
        };
        Some(match reason {
            ExitReason::Vmread | ExitReason::Vmwrite => {
                let information = Information(self.get(fields::INSTRUCTION_INFO));
                let writes = reason == ExitReason::Vmwrite;
                // VMWRITE reads its operand, VMREAD writes it.
                let using = if writes { Direction::Read } else { Direction::Write };
                // 64-bit operands in 64-bit mode, whatever a field's width.
                let length = if self.is_long() { 8 } else { 4 };
                let place = if information.is_register() {
                    Place::Register(information.register1())
                } else {
                    Place::Memory(self.operand(gprs, length, using))
                };
                let field = choice(information.register2());
                if writes {
                    // Kept as a whole: which part counts follows from the mode.
                    let value = register(information.register1());
                    Instruction::Vmwrite { field, from: place, value }
                } else {
                    Instruction::Vmread { field, to: place }
                }
            }
            ExitReason::Vmresume => Instruction::Vmresume,
            ExitReason::Vmlaunch => Instruction::Vmlaunch,
            ExitReason::Vmptrld => {
                Instruction::Vmptrld { pointer: self.operand(gprs, 8, Direction::Read) }
            }
            ExitReason::Vmclear => {
                Instruction::Vmclear { pointer: self.operand(gprs, 8, Direction::Read) }
            }
            ExitReason::Vmxon => {
                Instruction::Vmxon { pointer: self.operand(gprs, 8, Direction::Read) }
            }
            ExitReason::Vmptrst => {
                Instruction::Vmptrst { to: self.operand(gprs, 8, Direction::Write) }
            }
            ExitReason::Vmxoff => Instruction::Vmxoff,
            ExitReason::Invept | ExitReason::Invvpid => {
                let information = Information(self.get(fields::INSTRUCTION_INFO));
                // The register has the kind, memory the descriptor.
                let kind = choice(information.register2());
                let descriptor = self.operand(gprs, 16, Direction::Read);
                if reason == ExitReason::Invept {
                    Instruction::Invept { kind, descriptor }
                } else {
                    Instruction::Invvpid { kind, descriptor }
                }
            }
            _ => return None,
        })
    }

    pub(super) fn execute_instruction<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        l1: &M,
    ) -> Executed {
        // From now on the other VMCSs may be active: who moves the vCPU asks for them too.
        self.beside = true;
        let reason = self.exit_reason();
        // SMM has put VMX operation aside: CR4 is SMM's own then.
        let is_aside = n.machine.smm != nested_vmx::machine::Smm::default();
        if !self.cr4.contains(Cr4::VMXE) && !self.cold.of_l1.runs && !is_aside {
            // The VMM has ended VMX operation with the registers that it set.
            n.machine.reset();
            n.timer = None;
        }
        let memory = Memory::new(l1);
        match reason {
            ExitReason::Vmresume => self.execute_entry(n, gprs, EntryBy::Vmresume, &memory),
            ExitReason::Vmlaunch => self.execute_entry(n, gprs, EntryBy::Vmlaunch, &memory),
            ExitReason::Vmread | ExitReason::Vmwrite
                if self.access_register(n, gprs, reason == ExitReason::Vmwrite).is_some() =>
            {
                Executed::Retired
            }
            _ => self.execute_other(n, gprs, reason, memory),
        }
    }

    /// VMLAUNCH and VMRESUME.
    #[inline]
    fn execute_entry<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        by: EntryBy,
        memory: &Memory<'_, M>,
    ) -> Executed {
        // One or the other: the hardware does not serve an L1 with an enlightened VMCS.
        if n.is_served() {
            // What L1 wrote by VMWRITE since the last exit is not in VMCS12 yet.
            self.take_shadow(n, Taken::ForEntry);
        } else if n.machine.asks_assist_page()
            && let Err(done) = self.load_enlightened(n, gprs, by, memory)
        {
            return done;
        }
        // Behind the shadow: what L1 wrote there makes groups dirty, which decides what has to be fetched.
        let needs = n.machine.needs_to_enter();
        if !needs.is_empty() {
            // Checks look at registers of L2's that the last exit left in vmcs02.
            self.fetch(n, needs);
        }
        let cpu = self.nested_cpu(n, reason_of(by));
        let limits = self.nested_limits();
        let done = match n.machine.execute_entry(by, &cpu, &limits, memory) {
            // First: what came of checks on missing pages means nothing.
            _ if memory.has_missed() => Executed::Outside,
            Ok(entry) => self.enter_l2(n, entry, gprs, &limits, memory),
            Err(fail) => {
                let fail = n.machine.refuse_entry(fail, memory);
                // The page of an enlightened VMCS may have been protected since it was read.
                if memory.has_missed() {
                    Executed::Outside
                } else {
                    self.conclude(n, gprs, Err(fail), memory)
                }
            }
        };
        // Also behind an entry that failed: L1 reads the error there.
        // Nothing is given to an L2 that runs: it is the VMCS of L1.
        self.give_shadow(n);
        // Whatever came of it: the loop goes on with the vCPU's VMCS.
        self.bring_back(n);
        done
    }

    /// VMREAD and VMWRITE as they mostly are: by L1, in 64-bit mode, with a register, of a field that there is. `None`: it is
    /// one that may fail, and is executed as all other instructions; nothing was done.
    fn access_register(&mut self, n: &mut Nested, gprs: &mut Gprs, writes: bool) -> Option<()> {
        let information = Information(self.get(fields::INSTRUCTION_INFO));
        let (value, name) = (information.register1(), information.register2());
        let (at, name) = (usize::from(value) & 15, usize::from(name) & 15);
        // RSP is the VMCS's.
        let is_plain = information.is_register() && at != RSP && name != RSP;
        if !is_plain || self.cold.of_l1.runs || !n.machine.is_in_operation() {
            return None;
        }
        // Code of 32 bits in long mode gets #UD from the CPU, without an exit.
        if !self.is_long() || self.cpl() != 0 {
            return None;
        }
        let field = gprs.0[name];
        let instruction = if writes {
            Instruction::Vmwrite { field, from: Place::Register(value), value: gprs.0[at] }
        } else {
            Instruction::Vmread { field, to: Place::Register(value) }
        };
        let needs = n.machine.needs(&instruction);
        if !needs.is_empty() {
            let one = n.machine.asks_one(&instruction, needs);
            self.fetch_for(n, &instruction, one, needs);
        }
        if writes {
            n.machine.write_quickly(field, gprs.0[at])?;
        } else {
            gprs.0[at] = n.machine.read_quickly(field)?;
        }
        let before = Rflags::from_bits_retain(self.get(fields::GUEST_RFLAGS));
        self.set(fields::GUEST_RFLAGS, nested_vmx::outcome::success(before).bits());
        self.give_shadow(n);
        self.bring_back(n);
        Some(())
    }

    /// All other instructions.
    #[inline(never)]
    fn execute_other<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        reason: ExitReason,
        memory: Memory<'_, M>,
    ) -> Executed {
        let leaves_current = matches!(
            reason,
            ExitReason::Vmptrld | ExitReason::Vmclear | ExitReason::Vmxoff | ExitReason::Vmxon
        );
        // The current VMCS is written back to L1's memory.
        // Before the operand is read: what fails then must not have changed anything.
        if leaves_current && !memory.is_whole() {
            return Executed::Outside;
        }
        // An operand may be RSP, or lie where it points.
        self.complete(gprs);
        let Some(instruction) = self.decode_instruction(gprs, reason) else {
            return Executed::Fault(x86::Exception::ud());
        };
        // What L1 wrote goes into its memory along with the rest.
        if leaves_current {
            self.take_shadow(n, Taken::Whole);
        }
        let done = self.perform(n, gprs, (reason, instruction), memory);
        // Before L1 goes on: it reads there what this instruction has changed.
        self.give_shadow(n);
        self.bring_back(n);
        done
    }

    /// Executes an instruction that was decoded. The shadow VMCS may be current in the place of the vCPU's.
    fn perform<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        (reason, instruction): (ExitReason, Instruction),
        mut memory: Memory<'_, M>,
    ) -> Executed {
        // By the instruction: VMREAD of a field that an exit has saved fetches nothing.
        let needs = n.machine.needs(&instruction);
        if !needs.is_empty() {
            let one = n.machine.asks_one(&instruction, needs);
            self.fetch_for(n, &instruction, one, needs);
        }
        let cpu = self.nested_cpu(n, reason);
        let limits = self.nested_limits();
        let before = n.machine.current();
        if matches!(instruction, Instruction::Vmptrld { .. } | Instruction::Vmclear { .. }) {
            n.set_down(matches!(instruction, Instruction::Vmptrld { .. }));
        }
        let result = n.machine.execute(instruction, &cpu, &limits, &mut memory);
        // An operand that was found, and a region that was not: the whole is done again.
        if memory.has_missed() {
            return Executed::Outside;
        }
        n.take_up(before, self.features.revision, self.attention);
        let done = self.conclude(n, gprs, result, &memory);
        // An INIT may have waited for the end of VMX operation.
        let ends = reason == ExitReason::Vmxoff && done == Executed::Retired;
        if ends { Executed::Opened } else { done }
    }

    /// What becomes of L1 after an instruction.
    #[inline(never)]
    pub(super) fn conclude<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        result: Result<Then, Fail>,
        memory: &Memory<'_, M>,
    ) -> Executed {
        // By the field: VMX instructions change neither IF nor a shadow.
        let before = Rflags::from_bits_retain(self.get(fields::GUEST_RFLAGS));
        if let Some(flags) = Machine::rflags(&result, before) {
            self.set(fields::GUEST_RFLAGS, flags.bits());
        }
        match result {
            // VMREAD alone. In 32-bit code the value was cut before.
            Ok(Then::Register(number, value)) => {
                let at = usize::from(number);
                gprs.0[at & 15] = value;
                // RSP is the VMCS's: the world switch does not load it.
                if at == RSP {
                    self.set(fields::GUEST_RSP, value);
                }
                Executed::Retired
            }
            Ok(Then::Invalidate(what)) => {
                // Whatever it names, it lies under the one tag of L2's.
                // By a new tag, which has nothing: INVVPID would have to be done on this CPU, now.
                n.drop_vpids();
                n.note_flush(what);
                Executed::Retired
            }
            Ok(Then::Next | Then::Enter(_)) | Err(Fail::Invalid | Fail::Valid(_)) => {
                // VMfail retires the instruction as success does.
                Executed::Retired
            }
            Err(Fail::Fault(exception)) => Executed::Fault(exception),
            // The operand's page is no memory, wherever it is looked for.
            // A device of the VMM's, or nothing at all: stock KVM has the VMM deal with it.
            Err(Fail::Outside) if memory.is_whole() => Executed::Fault(x86::Exception::gp(0)),
            Err(Fail::Outside) => Executed::Outside,
        }
    }
}
