//! The instructions that are run both ways.

use super::Form::{Bits, Ext, Memory, Reg, RegMemory};
use super::{Template, t};

/// Templates of `arithmetic_is_what_the_cpu_does`.
pub fn arithmetic() -> Vec<Template> {
    let mut templates = Vec::new();
    const ROWS: [[[u8; 1]; 4]; 8] = {
        let mut rows = [[[0u8; 1]; 4]; 8];
        let mut n = 0;
        while n < 8 {
            let mut k = 0;
            while k < 4 {
                rows[n][k] = [(n * 8 + k) as u8];
                k += 1;
            }
            n += 1;
        }
        rows
    };
    for (n, row) in ROWS.iter().enumerate() {
        let lock = n != 7;
        templates.push(t(&row[0], Reg, 0, lock));
        templates.push(t(&row[1], Reg, 0, lock));
        templates.push(t(&row[2], Reg, 0, false));
        templates.push(t(&row[3], Reg, 0, false));
        templates.push(t(&[0x80], Ext(n as u8), 1, lock));
        templates.push(t(&[0x81], Ext(n as u8), 9, lock));
        templates.push(t(&[0x83], Ext(n as u8), 1, lock));
    }
    for ext in [2, 3] {
        templates.push(t(&[0xf6], Ext(ext), 0, true));
        templates.push(t(&[0xf7], Ext(ext), 0, true));
    }
    for ext in [0, 1] {
        templates.push(t(&[0xfe], Ext(ext), 0, true));
        templates.push(t(&[0xff], Ext(ext), 0, true));
    }
    templates.push(t(&[0xf6], Ext(0), 1, false));
    templates.push(t(&[0xf7], Ext(0), 9, false));
    templates.push(t(&[0x84], Reg, 0, false));
    templates.push(t(&[0x85], Reg, 0, false));
    templates
}

/// Templates of `shifts_and_rotates_are_what_the_cpu_does`.
pub fn shifts() -> Vec<Template> {
    let mut templates = Vec::new();
    for ext in 0..8 {
        templates.push(t(&[0xc0], Ext(ext), 1, false));
        templates.push(t(&[0xc1], Ext(ext), 1, false));
        templates.push(t(&[0xd0], Ext(ext), 0, false));
        templates.push(t(&[0xd1], Ext(ext), 0, false));
        templates.push(t(&[0xd2], Ext(ext), 0, false));
        templates.push(t(&[0xd3], Ext(ext), 0, false));
    }
    templates
}

/// Templates of `moves_are_what_the_cpu_does`.
pub fn moves() -> Vec<Template> {
    let mut templates = vec![
        t(&[0x88], Reg, 0, false),
        t(&[0x89], Reg, 0, false),
        t(&[0x8a], Reg, 0, false),
        t(&[0x8b], Reg, 0, false),
        t(&[0xc6], Ext(0), 1, false),
        t(&[0xc7], Ext(0), 9, false),
        t(&[0x0f, 0xb6], Reg, 0, false),
        t(&[0x0f, 0xb7], Reg, 0, false),
        t(&[0x0f, 0xbe], Reg, 0, false),
        t(&[0x0f, 0xbf], Reg, 0, false),
        t(&[0x63], Reg, 0, false),
        t(&[0x8d], RegMemory, 0, false),
        t(&[0x0f, 0x1f], Ext(0), 0, false),
        Template { sized: false, ..t(&[0x0f, 0xc3], RegMemory, 0, false) },
    ];
    if std::arch::is_x86_feature_detected!("movbe") {
        templates.push(t(&[0x0f, 0x38, 0xf0], RegMemory, 0, false));
        templates.push(t(&[0x0f, 0x38, 0xf1], RegMemory, 0, false));
    }
    templates
}

/// Templates of `exchanges_are_what_the_cpu_does`.
pub fn exchanges() -> Vec<Template> {
    vec![
        t(&[0x86], Reg, 0, true),
        t(&[0x87], Reg, 0, true),
        t(&[0x0f, 0xc0], Reg, 0, true),
        t(&[0x0f, 0xc1], Reg, 0, true),
        t(&[0x0f, 0xb0], Reg, 0, true),
        t(&[0x0f, 0xb1], Reg, 0, true),
        // CMPXCHG8B, and CMPXCHG16B by REX.W.
        t(&[0x0f, 0xc7], Memory(1), 0, true),
    ]
}

/// Templates of `bit_instructions_are_what_the_cpu_does`.
pub fn bits() -> Vec<Template> {
    let mut templates = vec![
        t(&[0x0f, 0xa3], Bits, 0, false),
        t(&[0x0f, 0xab], Bits, 0, true),
        t(&[0x0f, 0xb3], Bits, 0, true),
        t(&[0x0f, 0xbb], Bits, 0, true),
        t(&[0x0f, 0xba], Ext(4), 1, false),
        t(&[0x0f, 0xba], Ext(5), 1, true),
        t(&[0x0f, 0xba], Ext(6), 1, true),
        t(&[0x0f, 0xba], Ext(7), 1, true),
        t(&[0x0f, 0xbc], Reg, 0, false),
        t(&[0x0f, 0xbd], Reg, 0, false),
    ];
    let counts: [(bool, &'static [u8]); 3] = [
        (std::arch::is_x86_feature_detected!("popcnt"), &[0x0f, 0xb8]),
        (std::arch::is_x86_feature_detected!("bmi1"), &[0x0f, 0xbc]),
        (std::arch::is_x86_feature_detected!("lzcnt"), &[0x0f, 0xbd]),
    ];
    for (present, opcode) in counts {
        if present {
            templates.push(Template { mandatory: 0xf3, ..t(opcode, Reg, 0, false) });
        }
    }
    templates
}

/// Templates of `multiplication_and_division_are_what_the_cpu_does`.
pub fn multiplications() -> Vec<Template> {
    let mut templates =
        vec![t(&[0x0f, 0xaf], Reg, 0, false), t(&[0x69], Reg, 9, false), t(&[0x6b], Reg, 1, false)];
    for ext in 4..6 {
        templates.push(t(&[0xf6], Ext(ext), 0, false));
        templates.push(t(&[0xf7], Ext(ext), 0, false));
    }
    templates
}

/// Templates of `double_shifts_are_what_the_cpu_does`.
pub fn double_shifts() -> Vec<Template> {
    vec![
        t(&[0x0f, 0xa4], Reg, 1, false),
        t(&[0x0f, 0xa5], Reg, 0, false),
        t(&[0x0f, 0xac], Reg, 1, false),
        t(&[0x0f, 0xad], Reg, 0, false),
    ]
}

/// Templates of `vector_moves_are_what_the_cpu_does`.
pub fn vector_moves() -> Vec<Template> {
    let plain = |opcode| Template { sized: false, ..t(opcode, RegMemory, 0, false) };
    let prefixed =
        |mandatory, opcode| Template { sized: false, mandatory, ..t(opcode, RegMemory, 0, false) };
    // XMM registers 8 to 15 come through REX.R.
    vec![
        plain(&[0x0f, 0x10]),
        plain(&[0x0f, 0x11]),
        plain(&[0x0f, 0x28]),
        plain(&[0x0f, 0x29]),
        plain(&[0x0f, 0x2b]),
        prefixed(0x66, &[0x0f, 0x6f]),
        prefixed(0x66, &[0x0f, 0x7f]),
        prefixed(0xf3, &[0x0f, 0x6f]),
        prefixed(0xf3, &[0x0f, 0x7f]),
        prefixed(0x66, &[0x0f, 0xe7]),
        prefixed(0x66, &[0x0f, 0x6e]),
        prefixed(0x66, &[0x0f, 0x7e]),
        prefixed(0xf3, &[0x0f, 0x7e]),
        prefixed(0x66, &[0x0f, 0xd6]),
    ]
}

/// Templates of `conditions_are_what_the_cpu_takes`.
pub fn conditions() -> Vec<Template> {
    const SET: [[u8; 2]; 16] = {
        let mut all = [[0x0f, 0x90]; 16];
        let mut n = 0;
        while n < 16 {
            all[n][1] += n as u8;
            n += 1;
        }
        all
    };
    const MOVE: [[u8; 2]; 16] = {
        let mut all = [[0x0f, 0x40]; 16];
        let mut n = 0;
        while n < 16 {
            all[n][1] += n as u8;
            n += 1;
        }
        all
    };
    (0..16).flat_map(|n| [t(&SET[n], Ext(0), 0, false), t(&MOVE[n], Reg, 0, false)]).collect()
}

/// All of them.
pub fn all() -> Vec<Template> {
    let groups = [
        arithmetic(),
        shifts(),
        moves(),
        exchanges(),
        bits(),
        multiplications(),
        double_shifts(),
        conditions(),
        vector_moves(),
    ];
    groups.into_iter().flatten().collect()
}
