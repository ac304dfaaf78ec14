//! What the manuals leave undefined, instruction by instruction: a processor may do anything there, and
//! two of them do not agree. There is no entry for "all others": an instruction that has none panics,
//! so that a new group of tests has to say what of it can be compared.
//!
//! Source of each entry: SDM vol. 2, "Flags Affected" (and "Operation" for masked counts) of the
//! instruction named; SDM vol. 1 appendix A (EFLAGS cross-reference) agrees. APM vol. 3 appendix F
//! leaves undefined no flag that the SDM defines.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86::Rflags;

const NONE: Rflags = Rflags::empty();

/// What of an instruction's results means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undefined {
    /// Status flags.
    pub flags: Rflags,
    /// The destination, a general register.
    pub destination: bool,
    /// Everything: the case cannot be compared.
    pub all: bool,
}

const fn flags(flags: Rflags) -> Undefined {
    Undefined { flags, destination: false, all: false }
}

/// Bytes of operand 0.
fn operand_bytes(insn: &Instruction) -> u32 {
    match insn.op0_kind() {
        OpKind::Register => insn.op0_register().size() as u32,
        _ => insn.memory_size().size() as u32,
    }
}

/// The count of a shift or rotation, masked as the processor masks it (SDM vol. 2B, RCL and SAL:
/// "the count is masked to 5 bits, or 6 bits with a 64-bit operand").
fn masked_count(insn: &Instruction, n: u32, cl: u8) -> u32 {
    let count = match insn.op_kind(n) {
        OpKind::Immediate8 => insn.immediate8(),
        OpKind::Register if insn.op_register(n) == Register::CL => cl,
        kind => panic!("{:?}: a count in {kind:?}", insn.code()),
    };
    u32::from(count) & if operand_bytes(insn) == 8 { 0x3f } else { 0x1f }
}

/// What is undefined after `insn` with this count in CL. `source_is_zero`: of the source of BSF and BSR.
pub fn after(insn: &Instruction, cl: u8, source_is_zero: bool) -> Undefined {
    use Mnemonic as I;
    match insn.mnemonic() {
        // "The OF, SF, ZF, AF, PF, and CF flags are set according to the result."
        I::Add | I::Adc | I::Sub | I::Sbb | I::Cmp | I::Neg | I::Xadd | I::Cmpxchg => flags(NONE),
        I::Cmpsb | I::Cmpsw | I::Cmpsd | I::Cmpsq => flags(NONE),
        I::Scasb | I::Scasw | I::Scasd | I::Scasq => flags(NONE),
        // "The CF flag is not affected. The OF, SF, ZF, AF, and PF flags are set".
        I::Inc | I::Dec => flags(NONE),
        // "The OF and CF flags are cleared; the SF, ZF, and PF flags are set according to the result.
        // The state of the AF flag is undefined."
        I::And | I::Or | I::Xor | I::Test => flags(Rflags::AF),
        // "If the masked count is 0, the flags are not affected. If the masked count is 1, then the OF
        // flag is affected, otherwise (masked count is greater than 1) the OF flag is undefined."
        // For RCL and RCR the masked count is the one before the remainder by 9 or 17 is taken.
        I::Rol | I::Ror | I::Rcl | I::Rcr => match masked_count(insn, 1, cl) {
            0 | 1 => flags(NONE),
            _ => flags(Rflags::OF),
        },
        // "The CF flag […] is undefined for SHL and SHR instructions where the count is greater than or
        // equal to the size (in bits) of the destination operand. The OF flag is affected only for
        // 1-bit shifts; otherwise, it is undefined. […] If the count is 0, the flags are not affected.
        // For a non-zero count, the AF flag is undefined."
        I::Shl | I::Sal | I::Shr | I::Sar => {
            let count = masked_count(insn, 1, cl);
            let carry_too = insn.mnemonic() != I::Sar && count >= operand_bytes(insn) * 8;
            match count {
                0 => flags(NONE),
                1 => flags(Rflags::AF),
                _ if carry_too => flags(Rflags::AF | Rflags::OF | Rflags::CF),
                _ => flags(Rflags::AF | Rflags::OF),
            }
        }
        // "For a 1-bit shift, the OF flag is set if a sign change occurred; otherwise, it is cleared. For
        // shifts greater than 1 bit, the OF flag is undefined. If a shift occurs, the AF flag is
        // undefined. If the count operand is 0, the flags are not affected. If the count is greater
        // than the operand size, the flags are undefined", and so is the result.
        I::Shld | I::Shrd => match masked_count(insn, 2, cl) {
            0 => flags(NONE),
            1 => flags(Rflags::AF),
            count if count > operand_bytes(insn) * 8 => {
                Undefined { flags: Rflags::STATUS, destination: true, all: true }
            }
            _ => flags(Rflags::AF | Rflags::OF),
        },
        // "The CF flag contains the value of the selected bit […]. The ZF flag is unaffected. The OF, SF,
        // AF, and PF flags are undefined."
        I::Bt | I::Bts | I::Btr | I::Btc => {
            flags(Rflags::OF | Rflags::SF | Rflags::AF | Rflags::PF)
        }
        // "The CF, OF, SF, AF, and PF flags are undefined. […] If the content of the source operand is 0,
        // the content of the destination operand is undefined."
        I::Bsf | I::Bsr => Undefined {
            flags: Rflags::CF | Rflags::OF | Rflags::SF | Rflags::AF | Rflags::PF,
            destination: source_is_zero,
            all: false,
        },
        // "OF, SF, PF, and AF flags are undefined."
        I::Tzcnt | I::Lzcnt => flags(Rflags::OF | Rflags::SF | Rflags::PF | Rflags::AF),
        // "OF, SF, ZF, AF, CF, PF are all cleared. ZF is set if SRC = 0."
        I::Popcnt => flags(NONE),
        // "The SF, ZF, AF, and PF flags are undefined."
        I::Mul | I::Imul => flags(Rflags::SF | Rflags::ZF | Rflags::AF | Rflags::PF),
        // "The CF, OF, SF, ZF, AF, and PF flags are undefined."
        I::Div | I::Idiv => flags(Rflags::STATUS),
        // "The ZF flag is set if the destination operand and EDX:EAX are equal […]. The CF, PF, AF, SF,
        // and OF flags are unaffected."
        I::Cmpxchg8b | I::Cmpxchg16b => flags(NONE),
        // Flags affected: none.
        I::Not | I::Mov | I::Movzx | I::Movsx | I::Movsxd | I::Movbe | I::Movnti => flags(NONE),
        I::Lea | I::Xlatb | I::Xchg | I::Nop => flags(NONE),
        I::Push | I::Pop | I::Call | I::Jmp | I::Ret | I::Leave | I::Enter => flags(NONE),
        I::Movsb | I::Movsw | I::Movsd | I::Movsq => flags(NONE),
        I::Stosb | I::Stosw | I::Stosd | I::Stosq => flags(NONE),
        I::Lodsb | I::Lodsw | I::Lodsd | I::Lodsq => flags(NONE),
        I::Movups | I::Movupd | I::Movaps | I::Movapd | I::Movdqu | I::Movdqa => flags(NONE),
        I::Movntps | I::Movntpd | I::Movntdq | I::Movntq | I::Movd | I::Movq => flags(NONE),
        I::Seto | I::Setno | I::Setb | I::Setae | I::Sete | I::Setne | I::Setbe | I::Seta => {
            flags(NONE)
        }
        I::Sets | I::Setns | I::Setp | I::Setnp | I::Setl | I::Setge | I::Setle | I::Setg => {
            flags(NONE)
        }
        I::Cmovo | I::Cmovno | I::Cmovb | I::Cmovae | I::Cmove | I::Cmovne => flags(NONE),
        I::Cmovbe | I::Cmova | I::Cmovs | I::Cmovns | I::Cmovp | I::Cmovnp => flags(NONE),
        I::Cmovl | I::Cmovge | I::Cmovle | I::Cmovg => flags(NONE),
        other => panic!("{other:?} has no entry: what does the manual leave undefined of it?"),
    }
}
