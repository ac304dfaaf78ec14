//! The emulator against the real CPU: random instructions on random state run once natively, in a
//! trampoline that loads and stores every register, and once emulated; registers, memory, flags
//! (but for those the manuals leave undefined) and RIP must agree.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod compared;
mod machine;
mod native_cpu;
mod undefined;

use compared::Form::{self, Ext};
use compared::{
    DF, Random, STATUS, Template, compare, compare_on, decoded_alone, make, t, templates,
};
use machine::{RCX, RDI, RSI, RSP};
use native_cpu::{NativeCpu, State};
use x86::Rflags;

fn hold(templates: &[Template], seed: u64) {
    let mut cpu = NativeCpu::new();
    let mut random = Random::new(seed);
    for template in templates {
        let (mut ran, mut stopped) = (0, 0);
        let needs_memory = matches!(template.form, Form::Bits | Form::Memory(_) | Form::RegMemory);
        while ran < 400 && stopped < 4000 {
            let memory = needs_memory || random.one_in(2);
            if let Some(made) = make(&mut random, template, &cpu, memory) {
                if compare(&mut cpu, &mut random, &made) {
                    ran += 1;
                } else {
                    stopped += 1;
                }
            }
        }
        assert!(ran >= 400, "{:02x?} hardly ever completes", template.opcode);
    }
}

#[test]
fn arithmetic_is_what_the_cpu_does() {
    hold(&templates::arithmetic(), 1);
}

#[test]
fn shifts_and_rotates_are_what_the_cpu_does() {
    hold(&templates::shifts(), 2);
}

#[test]
fn moves_are_what_the_cpu_does() {
    hold(&templates::moves(), 3);
}

#[test]
fn exchanges_are_what_the_cpu_does() {
    hold(&templates::exchanges(), 4);
}

#[test]
fn bit_instructions_are_what_the_cpu_does() {
    hold(&templates::bits(), 5);
}

#[test]
fn multiplication_and_division_are_what_the_cpu_does() {
    hold(&templates::multiplications(), 6);
}

#[test]
fn quotients_that_fit_are_what_the_cpu_gives() {
    let mut cpu = NativeCpu::new();
    let mut random = Random::new(7);
    let mut ran = 0;
    while ran < 4000 {
        let template = t(
            if random.one_in(4) { &[0xf6] } else { &[0xf7] },
            Ext(6 + random.below(2) as u8),
            0,
            false,
        );
        let Some(mut made) = make(&mut random, &template, &cpu, false) else { continue };
        // A small upper half makes quotients that fit likely.
        made.state.gpr[2] = (random.below(5) as i64 - 2) as u64;
        made.state.gpr[0] = random.value();
        ran += u32::from(compare(&mut cpu, &mut random, &made));
    }
}

#[test]
fn double_shifts_are_what_the_cpu_does() {
    hold(&templates::double_shifts(), 8);
}

#[test]
fn conditions_are_what_the_cpu_takes() {
    for (n, pair) in templates::conditions().chunks(2).enumerate() {
        hold(pair, 9 + n as u64);
    }
}

#[test]
fn vector_moves_are_what_the_cpu_does() {
    hold(&templates::vector_moves(), 40);
}

#[test]
fn strings_are_what_the_cpu_does() {
    let mut cpu = NativeCpu::new();
    let mut random = Random::new(50);
    for opcode in [0xa4u8, 0xa5, 0xaa, 0xab, 0xac, 0xad, 0xa6, 0xa7, 0xae, 0xaf] {
        for _ in 0..1500 {
            let mut bytes = Vec::new();
            let address32 = random.one_in(4);
            if address32 {
                bytes.push(0x67);
            }
            if random.one_in(3) {
                bytes.push(0x66);
            }
            match random.below(4) {
                0 => {}
                1 => bytes.push(0xf2),
                _ => bytes.push(0xf3),
            }
            if random.one_in(3) {
                bytes.push(0x48);
            }
            bytes.push(opcode);
            let mut state = State::default();
            for gpr in &mut state.gpr {
                *gpr = random.value();
            }
            let middle = cpu.data() + cpu.data_len() as u64 / 2;
            let garbage = if address32 { random.next() << 32 } else { 0 };
            state.gpr[RSI] = middle.wrapping_add(random.below(64)) | garbage;
            state.gpr[RDI] = middle.wrapping_add(random.below(64)) | garbage;
            // A count of zero with 32-bit addresses differs between CPUs in the upper halves.
            state.gpr[RCX] = (random.below(200) + u64::from(address32)) | garbage;
            state.rflags = 2 | (random.next() & (STATUS | DF));
            // Few different bytes, so that compares run for a while.
            let ram = (0..cpu.data_len()).map(|_| u8::from(random.one_in(40))).collect();
            state.gpr[0] = u64::from(random.one_in(10));
            assert!(compare_on(&mut cpu, &bytes, &state, ram));
        }
    }
}

#[test]
fn the_stack_is_what_the_cpu_makes_of_it() {
    let mut cpu = NativeCpu::new();
    let mut random = Random::new(60);
    let end = cpu.end_of_instruction();
    let data = cpu.data();
    let mut case = |bytes: &[u8], rbx: u64, targets: bool| {
        for _ in 0..200 {
            let mut state = State::default();
            for gpr in &mut state.gpr {
                *gpr = random.value();
            }
            state.rflags = 2 | (random.next() & STATUS);
            state.gpr[RSP] = data + 0x800 + random.below(0x1000) / 8 * 8;
            if random.one_in(4) {
                // Also across the pages.
                state.gpr[RSP] = data + 0x1000 + random.below(8);
            }
            state.gpr[3] = data + rbx;
            let mut ram = vec![0u8; cpu.data_len()];
            for word in ram.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
            if targets {
                // Both places that a target may be read from lead to the instruction's end.
                let top = (state.gpr[RSP] - data) as usize;
                ram[top..top + 8].copy_from_slice(&end.to_le_bytes());
                let at = rbx as usize;
                ram[at..at + 8].copy_from_slice(&end.to_le_bytes());
            }
            assert!(compare_on(&mut cpu, bytes, &state, ram));
        }
    };
    case(&[0xff, 0x33], 0x100, false); // push qword [rbx]
    case(&[0x66, 0xff, 0x33], 0x100, false); // push word [rbx]
    case(&[0xff, 0x74, 0x24, 0x10], 0x100, false); // push qword [rsp+16]
    case(&[0x8f, 0x03], 0x100, false); // pop qword [rbx]
    case(&[0x66, 0x8f, 0x03], 0x100, false); // pop word [rbx]
    case(&[0x8f, 0x44, 0x24, 0x10], 0x100, false); // pop qword [rsp+16]
    case(&[0x54], 0x100, false); // push rsp
    case(&[0x5c], 0x100, false); // pop rsp
    case(&[0x5f], 0x100, false); // pop rdi
    case(&[0x66, 0x5f], 0x100, false); // pop di
    case(&[0x6a, 0x85], 0x100, false); // push -123
    case(&[0x68, 1, 2, 3, 0x84], 0x100, false); // push imm32
    case(&[0x66, 0x68, 1, 0x82], 0x100, false); // push imm16
    case(&[0xff, 0x13], 0x100, true); // call [rbx]
    case(&[0xff, 0x23], 0x100, true); // jmp [rbx]
    case(&[0xc3], 0x100, true); // ret
    case(&[0xc2, 0x20, 0x01], 0x100, true); // ret 0x120
}

#[test]
fn xlat_and_moffs_are_what_the_cpu_does() {
    let mut cpu = NativeCpu::new();
    let mut random = Random::new(70);
    for _ in 0..500 {
        let mut state = State::default();
        for gpr in &mut state.gpr {
            *gpr = random.value();
        }
        state.rflags = 2;
        state.gpr[3] = cpu.data() + 100;
        let ram: Vec<u8> = (0..cpu.data_len()).map(|_| random.next() as u8).collect();
        assert!(compare_on(&mut cpu, &[0xd7], &state, ram.clone()));
        for opcode in 0xa0..=0xa3 {
            let mut bytes = if opcode & 1 == 1 && random.one_in(2) { vec![0x48] } else { vec![] };
            bytes.push(opcode);
            bytes.extend_from_slice(&(cpu.data() + random.below(0x1ff0)).to_le_bytes());
            assert!(compare_on(&mut cpu, &bytes, &state, ram.clone()));
        }
    }
}

/// The counts at which the decoder's own table and the manual part: RCL of 8 bits by 9 turns the ring
/// once and changes nothing, but its masked count is not 1, and OF is undefined.
#[test]
fn a_rotation_by_any_count_but_one_leaves_overflow_undefined() {
    for (opcode, size) in [(0xc0u8, 8u8), (0xc1, 16), (0xc1, 32), (0xc1, 64)] {
        for ext in 0..4u8 {
            for count in 0..=255u8 {
                let mut bytes = match size {
                    16 => vec![0x66],
                    64 => vec![0x48],
                    _ => vec![],
                };
                bytes.extend_from_slice(&[opcode, 0xc0 | ext << 3 | 2, count]);
                let masked = count & if size == 64 { 0x3f } else { 0x1f };
                let expected = if masked > 1 { Rflags::OF } else { Rflags::empty() };
                let insn = decoded_alone(&bytes);
                let undefined = undefined::after(&insn, 0, false);
                assert_eq!(undefined.flags, expected, "{bytes:02x?} {:?}", insn.code());
            }
        }
    }
}
