//! What a program may not do it does not get, whatever the bytes at RIP are: the emulator against a plain
//! reference of the architecture's permission rules, over random bytes, privilege levels, modes, IOPL
//! and bitmaps.

mod machine;

use gannet_emulate::{CodeSize, Outcome, SegReg, Segment, Stop, decode, emulate};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, Register};
use machine::{Event, RAX, RDX, SYSTEM_BYTES, TSS, TestMachine};
use proptest::prelude::*;
use x86::{Exception, Rflags};

const GP: Stop = Stop::Fault(Exception::gp(0));
const PE: u64 = 1;
const UMIP: u64 = 1 << 11;

/// Who runs.
#[derive(Clone, Copy, Debug)]
struct Program {
    size: CodeSize,
    /// Protected mode.
    protected: bool,
    v86: bool,
    cpl: u8,
    iopl: u8,
    umip: bool,
    bitmap: u16,
    tss_limit: u16,
    tss_kind: u16,
}

impl Program {
    /// Real mode is level 0, virtual-8086 mode level 3, and long mode has neither.
    fn settled(mut self) -> Self {
        if self.size == CodeSize::Bits64 {
            (self.protected, self.v86) = (true, false);
        }
        if !self.protected {
            (self.v86, self.cpl, self.size) = (false, 0, CodeSize::Bits16);
        }
        if self.v86 {
            (self.cpl, self.size) = (3, CodeSize::Bits16);
        }
        self
    }

    fn machine(&self, bits: &[u8], gpr: [u64; 16]) -> TestMachine {
        let mut m = TestMachine::new(self.size, 0, 0x4000);
        m.mmio = 0x4000..u64::MAX;
        m.gpr = gpr;
        m.cr0 = if self.protected { PE } else { 0 };
        m.cr4 |= if self.umip { UMIP } else { 0 };
        m.cpl = self.cpl;
        m.rflags = 2 | u64::from(self.iopl) << 12 | if self.v86 { Rflags::VM.bits() } else { 0 };
        m.segments[SegReg::Tr as usize] = Segment {
            selector: 0x40,
            attributes: 0x80 | self.tss_kind,
            limit: self.tss_limit.into(),
            base: TSS,
        };
        m.segments[SegReg::Ss as usize].attributes |= u16::from(self.cpl) << 5;
        let tss = (TSS - machine::SYSTEM) as usize;
        m.system[tss + 102..tss + 104].copy_from_slice(&self.bitmap.to_le_bytes());
        let at = tss + usize::from(self.bitmap);
        for (to, from) in m.system.iter_mut().skip(at.max(tss + 104)).zip(bits.iter().cycle()) {
            *to = *from;
        }
        m
    }

    /// The rule of the SDM, vol. 1 §19.5, bit by bit.
    fn may_access(&self, m: &TestMachine, port: u16, size: u8) -> bool {
        if !self.protected || !self.v86 && self.cpl <= self.iopl {
            return true;
        }
        // Only TSSs of 32 and 64 bits have a bitmap, where there is room for its offset.
        if !matches!(self.tss_kind, 0x9 | 0xb) || self.tss_limit < 103 {
            return false;
        }
        let byte = |n: u32| m.system[(TSS - machine::SYSTEM) as usize + n as usize];
        let map = u32::from(byte(102)) | u32::from(byte(103)) << 8;
        let first = map + u32::from(port / 8);
        // "The processor always reads two bytes."
        if first + 1 > u32::from(self.tss_limit) {
            return false;
        }
        (u32::from(port)..u32::from(port) + u32::from(size))
            .all(|port| byte(map + port / 8) >> (port % 8) & 1 == 0)
    }
}

/// The instructions for level 0 alone: SDM vol. 3A §5.9, and those that came later.
fn is_privileged(insn: &Instruction, umip: bool) -> bool {
    use Mnemonic as I;
    let system = |register| {
        let n = register as u32;
        (Register::CR0 as u32..Register::CR0 as u32 + 16).contains(&n)
            || (Register::DR0 as u32..Register::DR0 as u32 + 16).contains(&n)
    };
    match insn.mnemonic() {
        I::Mov => system(insn.op0_register()) || system(insn.op1_register()),
        I::Lgdt | I::Lldt | I::Ltr | I::Lidt | I::Lmsw | I::Clts | I::Invd | I::Wbinvd => true,
        I::Invlpg | I::Invpcid | I::Hlt | I::Rdmsr | I::Wrmsr | I::Swapgs | I::Xsetbv => true,
        I::Sysexit | I::Sysexitq | I::Sysret | I::Sysretq | I::Wbnoinvd | I::Invlpga => true,
        I::Vmrun | I::Vmload | I::Vmsave | I::Stgi | I::Clgi | I::Xsaves | I::Xrstors => true,
        I::Sgdt | I::Sidt | I::Sldt | I::Str | I::Smsw => umip,
        _ => false,
    }
}

fn port_of(insn: &Instruction, dx: u16) -> Option<(u16, u8)> {
    use iced_x86::{Code, OpKind};
    let operand = |n: u32| match insn.op_kind(n) {
        OpKind::Immediate8 => insn.immediate8().into(),
        _ => dx,
    };
    Some(match insn.mnemonic() {
        Mnemonic::In => (operand(1), insn.op0_register().size() as u8),
        Mnemonic::Out => (operand(0), insn.op1_register().size() as u8),
        _ => match insn.code() {
            Code::Insb_m8_DX | Code::Outsb_DX_m8 => (dx, 1),
            Code::Insw_m16_DX | Code::Outsw_DX_m16 => (dx, 2),
            Code::Insd_m32_DX | Code::Outsd_DX_m32 => (dx, 4),
            _ => return None,
        },
    })
}

/// All of a machine that only a privileged program may change.
fn system_state(m: &TestMachine) -> impl PartialEq + std::fmt::Debug + use<> {
    let [.., ldtr, tr] = m.segments;
    (m.cr0, m.cr3, m.cr4, m.gdtr, m.idtr, ldtr, tr, m.flushed.clone())
}

fn programs() -> impl Strategy<Value = Program> {
    let size = prop::sample::select(vec![CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64]);
    let who = (size, prop::bool::weighted(0.9), prop::bool::weighted(0.25), 0u8..4, 0u8..4);
    let kind = prop::sample::select(vec![0xbu16, 0xb, 0xb, 0x9, 0x3]);
    let bitmap = prop_oneof![4 => 104u16..160, 1 => any::<u16>()];
    let limit = prop_oneof![3 => 0x67u16..0x300, 1 => any::<u16>()];
    let tss = (bitmap, limit, kind);
    (who, any::<bool>(), tss).prop_map(|(who, umip, (bitmap, tss_limit, tss_kind))| {
        let (size, protected, v86, cpl, iopl) = who;
        let limit = tss_limit.min((SYSTEM_BYTES - 0x1002) as u16);
        Program { size, protected, v86, cpl, iopl, umip, bitmap, tss_limit: limit, tss_kind }
            .settled()
    })
}

/// Bytes that often begin with an opcode that is not for everybody.
fn code() -> impl Strategy<Value = Vec<u8>> {
    let heads: Vec<Vec<u8>> = vec![
        vec![],
        vec![0xe4],
        vec![0xe5],
        vec![0xe6],
        vec![0xe7],
        vec![0xec],
        vec![0xed],
        vec![0xee],
        vec![0xef],
        vec![0x66, 0xef],
        vec![0x6c],
        vec![0x6d],
        vec![0x6e],
        vec![0x6f],
        vec![0xf3, 0x6e],
        vec![0xf3, 0x6d],
        vec![0xf4],
        vec![0xfa],
        vec![0xfb],
        vec![0x9d],
        vec![0x0f, 0x00],
        vec![0x0f, 0x01],
        vec![0x0f, 0x06],
        vec![0x0f, 0x20],
        vec![0x0f, 0x21],
        vec![0x0f, 0x22],
        vec![0x0f, 0x23],
        vec![0x0f, 0x30],
        vec![0x0f, 0x32],
        vec![0x66, 0x0f, 0x38, 0x82],
        vec![0x8e],
        vec![0xff],
        vec![0xcb],
        vec![0x0f],
    ];
    (prop::sample::select(heads), prop::collection::vec(any::<u8>(), 15)).prop_map(
        |(mut head, tail)| {
            head.extend_from_slice(&tail);
            head.truncate(15);
            head
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60_000))]

    #[test]
    fn no_program_gets_what_it_may_not_have(
        program in programs(),
        code in code(),
        bits in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 16),
        gpr in prop::array::uniform16(prop_oneof![any::<u64>(), 0u64..0x4100]),
        near in any::<bool>(),
    ) {
        let Ok(decoded) = decode(&code, program.size) else { return Ok(()) };
        let mut m = program.machine(&bits, gpr);
        if near {
            // A port that the bitmap is about.
            m.gpr[RDX] &= 0x3ff;
        }
        let dx = m.gpr[RDX] as u16;
        let bitness = match program.size {
            CodeSize::Bits16 => 16,
            CodeSize::Bits32 => 32,
            CodeSize::Bits64 => 64,
        };
        let insn = Decoder::new(bitness, &code, DecoderOptions::NONE).decode();
        let (before, cpl) = (system_state(&m), program.cpl);
        let mut result = Err(Stop::Retry);
        for _ in 0..200 {
            m.start();
            result = emulate(&mut m, &decoded);
            match result {
                Err(Stop::NeedUser) => m.user_space(),
                Ok(done) if done.outcome == Outcome::Continue => m.end(done),
                _ => break,
            }
        }
        let done = result.is_ok();
        if let Some((port, size)) = port_of(&insn, dx) {
            let allowed = program.may_access(&m, port, size);
            let reached = m.events.iter().any(|e| matches!(e, Event::In(..) | Event::Out(..)));
            prop_assert!(allowed || !reached, "{:?} reached port {port:#x}", insn.code());
            prop_assert!(allowed || done <= (insn.has_rep_prefix() || insn.has_repne_prefix()));
            if matches!(insn.mnemonic(), Mnemonic::In | Mnemonic::Out) {
                prop_assert_eq!(done, allowed, "{:?} at port {:#x}", insn.code(), port);
                prop_assert!(done || result == Err(GP));
            }
        } else {
            let ports = m.events.iter().any(|e| matches!(e, Event::In(..) | Event::Out(..)));
            prop_assert!(!ports, "{:?} reached a port", insn.code());
        }
        if program.cpl != 0 {
            prop_assert!(
                !(done && is_privileged(&insn, program.umip)),
                "{:?} completes at level {}", insn.code(), program.cpl
            );
            prop_assert_eq!(system_state(&m), before, "{:?} at level {}", insn.code(), program.cpl);
        }
        prop_assert!(m.cpl >= cpl || !done, "{:?} lowers the level", insn.code());
    }
}

#[test]
fn a_port_is_allowed_by_its_bits_alone() {
    let program = Program {
        size: CodeSize::Bits64,
        protected: true,
        v86: false,
        cpl: 3,
        iopl: 0,
        umip: false,
        bitmap: 104,
        tss_limit: 104 + 0x20,
        tss_kind: 0xb,
    };
    for port in 0..0x100u16 {
        for (code, size) in [(&[0xec][..], 1), (&[0x66, 0xed][..], 2), (&[0xed][..], 4)] {
            let mut m = program.machine(&[0xff, 0b1010_0000, 0x0f, 0], [0; 16]);
            m.gpr[RDX] = port.into();
            m.gpr[RAX] = 0;
            let allowed = program.may_access(&m, port, size);
            let result = m.run(code);
            assert_eq!(result.is_ok(), allowed, "port {port:#x}, {size} bytes: {result:?}");
            assert!(allowed || result == Err(GP));
        }
    }
}

#[test]
fn a_bitmap_that_cannot_be_read_is_a_page_fault_of_the_supervisor() {
    let mut m = TestMachine::long();
    m.cpl = 3;
    m.segments[SegReg::Tr as usize].limit = 0x2100;
    m.system_absent = TSS..TSS + 0x1000;
    let fault = Stop::Fault(Exception::pf(TSS + 102, 0));
    assert_eq!(m.run(&[0xec]), Err(fault)); // in al, dx
}
