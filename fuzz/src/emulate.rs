//! The emulator against this machine's CPU in user mode: the instructions of `crates/emulate/tests/compared`.

use std::cell::RefCell;

#[path = "../../crates/emulate/tests/compared/mod.rs"]
mod compared;
#[path = "../../crates/emulate/tests/machine/mod.rs"]
pub mod machine;
#[path = "../../crates/emulate/tests/native_cpu/mod.rs"]
mod native_cpu;
#[path = "../../crates/emulate/tests/undefined/mod.rs"]
mod undefined;

use compared::{Form, Random, Template, make, templates};
use native_cpu::NativeCpu;

struct Bench {
    cpu: NativeCpu,
    templates: Vec<Template>,
}

thread_local! {
    static BENCH: RefCell<Bench> =
        RefCell::new(Bench { cpu: NativeCpu::new(), templates: templates::all() });
}

pub fn run(bytes: &[u8]) {
    BENCH.with_borrow_mut(|bench| {
        let mut random = Random::of(bytes);
        let number = random.below(bench.templates.len() as u64) as usize;
        let template = &bench.templates[number];
        let memory = matches!(template.form, Form::Bits | Form::Memory(_) | Form::RegMemory)
            || random.one_in(2);
        let Some(made) = make(&mut random, template, &bench.cpu, memory) else { return };
        let mut word = random.next();
        let mut ram = vec![0u8; bench.cpu.data_len()];
        for into in ram.chunks_exact_mut(8) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            into.copy_from_slice(&(word ^ word >> 29).to_le_bytes());
        }
        compared::compare_on(&mut bench.cpu, &made.bytes, &made.state, ram);
    });
}
