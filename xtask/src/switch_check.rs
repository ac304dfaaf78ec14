//! Checks of SVM's world switch as it was built: behind VMRUN it runs with the guest's GS base until the loop loads the host's, and it
//! is to do whatever stock KVM's does against leaks.

use crate::alternatives;
use crate::disassembly::{Image, Line};
use gannet_lab::{Kernel, Layout};
use iced_x86::{FlowControl, OpKind, Register};
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

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

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
    }

    #[test]
    fn what_stock_does_is_to_be_done_in_its_order() {
        let stock = [7 * 32 + 16, 100, 3 * 32 + 21 | 1 << 15, 200, 300];
        assert_eq!(compare(&stock, &[99, 100, 200, 250, 300]), Ok(()));
        assert!(compare(&stock, &[100, 300]).is_err());
        assert!(compare(&stock, &[200, 100, 300]).is_err());
        assert!(compare(&[7 * 32 + 16], &[100]).is_err(), "nothing was found");
    }
}
