//! Whether an instruction can have led to an exit. The bytes at RIP are read after the exit, and may no
//! longer be those that made it: another CPU of the guest may have changed them. An instruction that
//! could not have made this exit is not emulated; the guest runs on, and the CPU executes it.
//!
//! An instruction that the emulator does not know may have done anything, so that it is reported and
//! not tried for ever.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

use crate::decode::Decoded;
use crate::register::{RegRef, segment_of};
use crate::string::{Kind, kind_and_size};

/// What an exit says of the instruction that led to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Nothing: the access may have been one to the guest's paging entries or of its code, or one for
    /// an event on its way.
    Any,
    /// A data access to guest-physical memory.
    Memory {
        /// The access was a write.
        write: bool,
    },
    /// A port access.
    Port {
        /// The port that was accessed.
        port: u16,
        /// 1, 2 or 4 bytes.
        size: u8,
        /// IN or INS.
        input: bool,
    },
    /// A read or write of a control register.
    Control {
        /// The control register's number, as the exit tells it.
        cr: u8,
        /// The access was a write.
        write: bool,
    },
    /// A read or write of a debug register.
    Debug {
        /// The debug register's number, as the exit tells it.
        dr: u8,
        /// The access was a write.
        write: bool,
    },
    /// INVLPG was to be executed.
    Invlpg,
    /// INVPCID was to be executed.
    Invpcid,
    /// LGDT, LIDT, SGDT or SIDT.
    GdtrIdtr,
    /// LLDT, LTR, SLDT or STR.
    LdtrTr,
}

/// The data accesses of an instruction, those to the stack and to descriptors included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Accesses {
    read: bool,
    write: bool,
}

impl Accesses {
    const NONE: Self = Self { read: false, write: false };
    const READ: Self = Self { read: true, write: false };
    const WRITE: Self = Self { read: false, write: true };
    const BOTH: Self = Self { read: true, write: true };

    const fn and(self, other: Self) -> Self {
        Self { read: self.read || other.read, write: self.write || other.write }
    }
}

impl Decoded {
    /// Whether the instruction can have led to an exit of this cause. `dx` is the guest's DX.
    pub fn can_cause(&self, cause: Cause, dx: u16) -> bool {
        let insn = &self.insn;
        match cause {
            Cause::Any => true,
            Cause::Memory { write } => {
                // By direction alone: which address it has is found when it is executed.
                let accesses = accesses(insn);
                if write { accesses.write } else { accesses.read }
            }
            Cause::Port { port, size, input } => port_access(insn, dx) == Some((port, size, input)),
            Cause::Control { write, .. } => match insn.mnemonic() {
                Mnemonic::Mov if write => is_control(insn.op0_register()),
                Mnemonic::Mov => is_control(insn.op1_register()),
                Mnemonic::Clts | Mnemonic::Lmsw => write,
                Mnemonic::Smsw => !write,
                _ => false,
            },
            Cause::Debug { dr, write } => {
                let at = if write { insn.op0_register() } else { insn.op1_register() };
                insn.mnemonic() == Mnemonic::Mov
                    && is_debug(at)
                    && same_debug(at as u32 - Register::DR0 as u32, dr.into())
            }
            Cause::Invlpg => insn.mnemonic() == Mnemonic::Invlpg,
            Cause::Invpcid => insn.mnemonic() == Mnemonic::Invpcid,
            Cause::GdtrIdtr => matches!(
                insn.mnemonic(),
                Mnemonic::Lgdt | Mnemonic::Lidt | Mnemonic::Sgdt | Mnemonic::Sidt
            ),
            Cause::LdtrTr => matches!(
                insn.mnemonic(),
                Mnemonic::Lldt | Mnemonic::Ltr | Mnemonic::Sldt | Mnemonic::Str
            ),
        }
    }
}

/// Whether two numbers are those of one debug register: DR4 is DR6 and DR5 is DR7, where they are not #UD.
fn same_debug(one: u32, other: u32) -> bool {
    let of = |n| if matches!(n, 4 | 5) { n + 2 } else { n };
    of(one) == of(other)
}

impl Decoded {
    /// Whether the instruction accesses this control register.
    pub fn accesses_control(&self, cr: u8) -> bool {
        let insn = &self.insn;
        match insn.mnemonic() {
            Mnemonic::Clts | Mnemonic::Lmsw | Mnemonic::Smsw => cr == 0,
            Mnemonic::Mov => [insn.op0_register(), insn.op1_register()]
                .iter()
                .any(|at| is_control(*at) && *at as u32 - Register::CR0 as u32 == u32::from(cr)),
            _ => false,
        }
    }

    /// VMLOAD or VMSAVE, whose operand is a control block: not for a device to answer.
    pub fn moves_control_block(&self) -> bool {
        matches!(self.insn.mnemonic(), Mnemonic::Vmload | Mnemonic::Vmsave)
    }

    /// Whether all that it does, beside arithmetic, is to access memory as data: nothing of it is for a hypervisor
    /// to intercept.
    pub fn is_data_access(&self) -> bool {
        use Mnemonic as I;
        let insn = &self.insn;
        if let Some((kind, _)) = kind_and_size(insn.code()) {
            return !matches!(kind, Kind::Ins | Kind::Outs);
        }
        match insn.mnemonic() {
            I::Mov => ![insn.op0_register(), insn.op1_register()]
                .into_iter()
                .any(|register| is_control(register) || is_debug(register)),
            I::Movnti | I::Movzx | I::Movsx | I::Movsxd | I::Movbe | I::Xlatb => true,
            I::Movups | I::Movupd | I::Movdqu | I::Lddqu | I::Movaps | I::Movapd | I::Movdqa => {
                true
            }
            I::Movntps | I::Movntpd | I::Movntdq | I::Movntdqa | I::Movntq | I::Movd | I::Movq => {
                true
            }
            I::Add | I::Adc | I::Sub | I::Sbb | I::And | I::Or | I::Xor => true,
            I::Inc | I::Dec | I::Neg | I::Not => true,
            I::Rol | I::Ror | I::Rcl | I::Rcr | I::Shl | I::Sal | I::Shr | I::Sar => true,
            I::Shld | I::Shrd | I::Bts | I::Btr | I::Btc | I::Bt => true,
            I::Xchg | I::Xadd | I::Cmpxchg | I::Cmpxchg8b | I::Cmpxchg16b => true,
            I::Cmp | I::Test | I::Bsf | I::Bsr | I::Tzcnt | I::Lzcnt | I::Popcnt => true,
            I::Mul | I::Imul | I::Div | I::Idiv | I::Push | I::Pop | I::Leave | I::Enter => true,
            I::Ret => true,
            I::Jmp => is_near_jump(insn.code()),
            // SETcc and CMOVcc.
            _ => {
                insn.condition_code() != iced_x86::ConditionCode::None
                    && !insn.is_jcc_short_or_near()
            }
        }
    }
}

fn in_run(register: Register, first: Register) -> bool {
    (register as u32).checked_sub(first as u32).is_some_and(|n| n < 16)
}

fn is_control(register: Register) -> bool {
    in_run(register, Register::CR0)
}

fn is_debug(register: Register) -> bool {
    in_run(register, Register::DR0)
}

/// Port, size and whether it is an input.
fn port_access(insn: &Instruction, dx: u16) -> Option<(u16, u8, bool)> {
    let (input, register, port) = match insn.mnemonic() {
        Mnemonic::In => (true, insn.op0_register(), 1),
        Mnemonic::Out => (false, insn.op1_register(), 0),
        _ => {
            return match kind_and_size(insn.code())? {
                (Kind::Ins, size) => Some((dx, size, true)),
                (Kind::Outs, size) => Some((dx, size, false)),
                _ => None,
            };
        }
    };
    let port = match insn.op_kind(port) {
        OpKind::Immediate8 => insn.immediate8().into(),
        // DX is the guest's still: nothing has run since the exit.
        _ => dx,
    };
    Some((port, RegRef::of(register)?.size, input))
}

fn accesses(insn: &Instruction) -> Accesses {
    use Mnemonic as I;
    if let Some((kind, _)) = kind_and_size(insn.code()) {
        return match kind {
            Kind::Movs => Accesses::BOTH,
            Kind::Stos | Kind::Ins => Accesses::WRITE,
            Kind::Lods | Kind::Outs | Kind::Cmps | Kind::Scas => Accesses::READ,
        };
    }
    // Only the first operand of these can be written.
    let (first, second) = (insn.op0_kind() == OpKind::Memory, insn.op1_kind() == OpKind::Memory);
    // What is done to the first operand; the others are read.
    let with_first = |how| {
        let source = if second { Accesses::READ } else { Accesses::NONE };
        source.and(if first { how } else { Accesses::NONE })
    };
    match insn.mnemonic() {
        // Loads of segment registers read a descriptor and mark it.
        I::Mov
            if insn.op0_kind() == OpKind::Register && segment_of(insn.op0_register()).is_some() =>
        {
            Accesses::BOTH
        }
        I::Mov | I::Movnti | I::Movzx | I::Movsx | I::Movsxd | I::Movbe => {
            with_first(Accesses::WRITE)
        }
        I::Movups | I::Movupd | I::Movdqu | I::Lddqu | I::Movaps | I::Movapd | I::Movdqa => {
            with_first(Accesses::WRITE)
        }
        I::Movntps | I::Movntpd | I::Movntdq | I::Movntdqa | I::Movntq | I::Movd | I::Movq => {
            with_first(Accesses::WRITE)
        }
        I::Add | I::Adc | I::Sub | I::Sbb | I::And | I::Or | I::Xor => with_first(Accesses::BOTH),
        I::Inc | I::Dec | I::Neg | I::Not => with_first(Accesses::BOTH),
        I::Rol
        | I::Ror
        | I::Rcl
        | I::Rcr
        | I::Shl
        | I::Sal
        | I::Shr
        | I::Sar
        | I::Shld
        | I::Shrd => with_first(Accesses::BOTH),
        I::Bts | I::Btr | I::Btc => with_first(Accesses::BOTH),
        I::Xchg | I::Xadd | I::Cmpxchg | I::Cmpxchg8b | I::Cmpxchg16b => with_first(Accesses::BOTH),
        I::Cmp | I::Test | I::Bt | I::Bsf | I::Bsr | I::Tzcnt | I::Lzcnt | I::Popcnt => {
            with_first(Accesses::READ)
        }
        I::Mul | I::Imul | I::Div | I::Idiv | I::Lmsw | I::Invpcid => with_first(Accesses::READ),
        I::Xlatb => Accesses::READ,
        I::Smsw | I::Sgdt | I::Sidt | I::Sldt | I::Str => with_first(Accesses::WRITE),
        I::Lgdt | I::Lidt => with_first(Accesses::READ),
        // The descriptor that is read and marked may be what faulted, beside the operand.
        I::Lldt | I::Ltr => Accesses::BOTH,
        I::Lea | I::In | I::Out | I::Clts | I::Invlpg => Accesses::NONE,
        // The stack is an access of its own.
        I::Push => with_first(Accesses::READ).and(Accesses::WRITE),
        I::Pop if first => Accesses::BOTH,
        I::Pop if segment_of(insn.op0_register()).is_some() => Accesses::BOTH,
        I::Pop | I::Leave => Accesses::READ,
        I::Enter => Accesses::BOTH,
        I::Ret => Accesses::READ,
        I::Jmp if is_near_jump(insn.code()) => with_first(Accesses::READ),
        // Not for what is not emulated either: it is reported.
        _ => match insn.condition_code() {
            iced_x86::ConditionCode::None => Accesses::BOTH,
            _ => with_first(Accesses::WRITE),
        },
    }
}

fn is_near_jump(code: Code) -> bool {
    matches!(code, Code::Jmp_rm16 | Code::Jmp_rm32 | Code::Jmp_rm64)
}
