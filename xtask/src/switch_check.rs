//! Checks of SVM's world switch as it was built: behind VMRUN it runs with the guest's GS base until the loop loads the host's, and it
//! is to do whatever stock KVM's does against leaks.

use crate::alternatives::{self, Jump};
use crate::disassembly::{Image, Line};
use gannet_lab::{Kernel, Layout};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use std::collections::BTreeSet;

/// What it may call of the kernel's: neither uses per-CPU data. Not `entry_ibpb` and `write_ibpb`, which count calls by GS.
const CALLED: [&str; 3] = ["__x86_return_thunk", "entry_untrain_ret", "srso_alias_untrain_ret"];

/// No access by GS, and no call of what may have one, neither as it is nor in what the kernel may patch in.
pub fn uses_no_per_cpu_data(layout: &Layout, kernel: Kernel) -> Result<(), String> {
    let file = layout.module_build(kernel).join("svm_enter.o");
    let image = Image::read(&file).map_err(|error| format!("{error:#}"))?;
    let replaced = image.sections.values().any(|name| name == ".altinstr_replacement");
    if !replaced || !image.functions.iter().any(|name| name == "gnt_svm_vmrun") {
        return Err(format!("{} is not the world switch", file.display()));
    }
    let findings: Vec<String> = image
        .lines
        .iter()
        .filter_map(|line| Some(format!("{}: {}", finding(line)?, image.locate(line))))
        .collect();
    if findings.is_empty() { Ok(()) } else { Err(findings.join("\n")) }
}

fn finding(line: &Line) -> Option<String> {
    let instruction = &line.instruction;
    if instruction.is_invalid() {
        return Some("no instruction".to_owned());
    }
    let memory = (0..instruction.op_count()).any(|n| instruction.op_kind(n) == OpKind::Memory);
    if instruction.segment_prefix() == Register::GS
        || memory && instruction.memory_segment() == Register::GS
    {
        return Some(instruction.to_string());
    }
    // Where it goes nobody here can tell: what the paravirt table names counts calls, too.
    if line.is_indirect_branch() {
        return Some(instruction.to_string());
    }
    let leaves = matches!(
        instruction.flow_control(),
        FlowControl::Call | FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
    );
    let to = line.symbol.as_deref().filter(|_| leaves)?;
    // Within the file, the assembler has resolved the distance, or it goes to a section.
    let within = to.starts_with('.');
    (!within && !CALLED.contains(&to)).then(|| format!("goes to {to}"))
}

/// What stock KVM's world switch has alternatives for and this one has not, by number: word of CPUID times 32, and bit.
const NOT_OURS: [(u16, &str); 5] = [
    (
        7 * 32 + 16,
        "MSR_SPEC_CTRL: the switch is given equal values where there is no such register",
    ),
    (15 * 32 + 20, "V_SPEC_CTRL: the same"),
    (7 * 32 + 12, "KERNEL_IBRS: a short way of writing SPEC_CTRL that stock KVM has since 7.0"),
    (3 * 32 + 21, "ALWAYS, inverted: never"),
    (11 * 32 + 19, "CALL_DEPTH: SVM is refused"),
];

/// Whatever feature stock KVM's world switch does something for, this one does something for, in the same order.
pub fn does_what_stock_does(layout: &Layout, kernel: Kernel) -> Result<(), String> {
    let read = |path: std::path::PathBuf, function: &str| {
        alternatives::within(&path, function).map_err(|error| format!("{error:#}"))
    };
    let stock = read(layout.stock_module(kernel, "kvm-amd"), "__svm_vcpu_run")?;
    let own = read(layout.module_build(kernel).join("svm_enter.o"), "gnt_svm_vmrun")?;
    compare(&stock, &own)
}

fn compare(stock: &[u16], own: &[u16]) -> Result<(), String> {
    /// Where flags have no place of their own, this one inverts the feature.
    const INVERTED: u16 = 1 << 15;
    let known: BTreeSet<u16> = NOT_OURS.iter().map(|(feature, _)| *feature).collect();
    let wanted = stock.iter().copied().filter(|f| !known.contains(&(f & !INVERTED)));
    let wanted: Vec<u16> = wanted.collect();
    let mut rest = own.iter();
    let kept = !wanted.is_empty() && wanted.iter().all(|wanted| rest.any(|own| own == wanted));
    if kept { Ok(()) } else { Err(format!("features {own:?}, stock KVM {wanted:?}")) }
}

/// IBPB_ON_VMEXIT and ENTRY_IBPB: the numbers are the same in all kernels.
const IBPB: [u16; 2] = [11 * 32 + 26, 11 * 32 + 10];

/// Where the kernel chose an IBPB behind exits, there is one: stock KVM's is a function of the kernel's, this one is written out.
pub fn has_the_ibpb(layout: &Layout, kernel: Kernel) -> Result<(), String> {
    let file = layout.module_build(kernel).join("svm_enter.o");
    let jumps = alternatives::jumps(&file, "gnt_svm_vmrun", &IBPB);
    let jumps = jumps.map_err(|error| format!("{error:#}"))?;
    if jumps.is_empty() {
        return Err("nothing waits for the kernel's choice".to_owned());
    }
    let lacks = |jump: &Jump| {
        let lack = lacks_ibpb(&jump.code, jump.to, jump.back)?;
        Some(format!("for feature {}: {lack}", jump.feature))
    };
    let findings: Vec<String> = jumps.iter().filter_map(lacks).collect();
    if findings.is_empty() { Ok(()) } else { Err(findings.join("\n")) }
}

/// What the code at `to` lacks of an IBPB before it goes on at `back`. What it jumps over is what other alternatives put in.
fn lacks_ibpb(code: &[u8], to: u64, back: u64) -> Option<String> {
    /// More than it takes.
    const LONGEST: usize = 16;
    const REGISTERS: [Register; 3] = [Register::RCX, Register::RAX, Register::RDX];
    let mut known = [None; 3];
    let mut done = false;
    let mut at = to;
    for _ in 0..LONGEST {
        if at == back {
            return (!done).then(|| "no IBPB before the way back".to_owned());
        }
        let rest = usize::try_from(at).ok().and_then(|at| code.get(at..)).unwrap_or(&[]);
        let instruction = Decoder::with_ip(64, rest, at, DecoderOptions::NONE).decode();
        at = match instruction.flow_control() {
            FlowControl::Next if instruction.mnemonic() == Mnemonic::Wrmsr => {
                // PRED_CMD, with the stronger of its two commands and nothing besides.
                done |= known == [Some(0x49), Some(1), Some(0)];
                instruction.next_ip()
            }
            FlowControl::Next
                if !matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Xor) =>
            {
                // It may write any register, named or not.
                known = [None; 3];
                instruction.next_ip()
            }
            FlowControl::Next => {
                let to = instruction.op0_register().full_register();
                let register = REGISTERS.iter().position(|r| *r == to);
                if let Some(register) = register {
                    known[register] = constant(&instruction);
                }
                instruction.next_ip()
            }
            FlowControl::UnconditionalBranch => instruction.near_branch_target(),
            _ => return Some(format!("{instruction} before the way back")),
        };
    }
    Some("no way back".to_owned())
}

/// What an instruction sets its register to, where that does not depend on anything.
fn constant(i: &Instruction) -> Option<u64> {
    let of_itself = i.op1_kind() == OpKind::Register && i.op0_register() == i.op1_register();
    match i.mnemonic() {
        // Of 32 bits or more: a shorter one leaves the rest of the register.
        _ if i.op0_register().size() < 4 => None,
        Mnemonic::Mov if i.op1_kind() != OpKind::Register && i.op1_kind() != OpKind::Memory => {
            Some(i.immediate(1))
        }
        Mnemonic::Xor if of_itself => Some(0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(code: &[u8], symbol: Option<&str>) -> Line {
        let instruction = Decoder::with_ip(64, code, 0, DecoderOptions::NONE).decode();
        Line { place: (1, 0), instruction, symbol: symbol.map(str::to_owned), function: None }
    }

    #[test]
    fn an_access_by_gs_and_a_call_of_what_may_have_one_are_found() {
        let counts = [0x65, 0x48, 0xc7, 0x05, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        assert!(finding(&line(&counts, Some("pcpu_hot"))).is_some());
        assert!(finding(&line(&counts[1..], Some("pcpu_hot"))).is_none(), "by DS");
        let call = [0xe8, 0, 0, 0, 0];
        assert!(finding(&line(&call, Some("entry_ibpb"))).is_some());
        assert!(finding(&line(&call, Some("entry_untrain_ret"))).is_none());
        assert!(finding(&line(&call, None)).is_none(), "within the file");
        assert!(finding(&line(&[0x06], None)).is_some(), "PUSH ES is none in 64-bit mode");
        // By a table, as paravirt calls are, or by a register; and what may be called is called by its name.
        assert!(finding(&line(&[0xff, 0x15, 0, 0, 0, 0], Some("pv_ops"))).is_some());
        assert!(finding(&line(&[0xff, 0x15, 0, 0, 0, 0], None)).is_some());
        assert!(finding(&line(&[0xff, 0xe0], None)).is_some());
        assert!(finding(&line(&[0xe9, 0, 0, 0, 0], Some("__x86_return_thunk"))).is_none());
    }

    #[test]
    fn what_stock_does_is_to_be_done_in_its_order() {
        let stock = [7 * 32 + 16, 100, (3 * 32 + 21) | (1 << 15), 200, 300];
        assert_eq!(compare(&stock, &[99, 100, 200, 250, 300]), Ok(()));
        assert!(compare(&stock, &[100, 300]).is_err());
        assert!(compare(&stock, &[200, 100, 300]).is_err());
        assert!(compare(&[7 * 32 + 16], &[100]).is_err(), "nothing was found");
    }

    #[test]
    fn an_ibpb_is_whole_and_before_the_way_back() {
        const MSR: &[u8] = &[0xb9, 0x49, 0, 0, 0];
        const COMMAND: &[u8] = &[0xb8, 1, 0, 0, 0];
        const UPPER: &[u8] = &[0x31, 0xd2];
        const WRMSR: &[u8] = &[0x0f, 0x30];
        // Over two bytes, and to the beginning.
        const OVER: &[u8] = &[0xeb, 2, 0xcc, 0xcc];
        let lacks = |parts: &[&[u8]]| {
            let mut code = vec![0x90];
            code.extend(parts.iter().flat_map(|part| part.iter()));
            code.extend([0xeb, 0u8.wrapping_sub(code.len() as u8 + 2)]);
            lacks_ibpb(&code, 1, 0).is_some()
        };
        assert!(!lacks(&[MSR, COMMAND, UPPER, WRMSR]));
        assert!(!lacks(&[UPPER, COMMAND, MSR, WRMSR, OVER]));
        assert!(lacks(&[]) && lacks(&[OVER]));
        assert!(lacks(&[MSR, COMMAND, UPPER]) && lacks(&[COMMAND, UPPER, WRMSR]));
        assert!(lacks(&[MSR, UPPER, WRMSR]) && lacks(&[MSR, COMMAND, WRMSR]));
        assert!(lacks(&[MSR, COMMAND, UPPER, &[0x88, 0xc8], WRMSR]), "MOV AL, CL");
        assert!(lacks(&[MSR, COMMAND, &[0x89, 0xca], WRMSR]), "MOV EDX, ECX");
        assert!(lacks(&[MSR, COMMAND, UPPER, &[0x74, 2], WRMSR]), "or not");
        let sbpb = [0xb8, 0x80, 0, 0, 0];
        assert!(lacks(&[MSR, &sbpb, UPPER, WRMSR]));
        assert!(lacks_ibpb(&[0xeb, 0xfe], 0, 9).is_some(), "for ever");
    }
}
