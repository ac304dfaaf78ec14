//! Lengths, the decode cache and the simplest MMIO forms: they never panic, whatever the bytes,
//! and agree with a decoder that has no fast path.

use gannet_emulate::{
    CodeSize, DecodeCache, DecodeError, Decoded, Extend, Fetched, RegRef, SimpleMmio,
    common_system_move, decode, length, system_move, warm_up,
};
use iced_x86::{Decoder, DecoderOptions};
use proptest::prelude::*;

const SIZES: [CodeSize; 3] = [CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64];

fn reference(bytes: &[u8], size: CodeSize) -> Option<u8> {
    let bitness = match size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    };
    let insn = Decoder::new(bitness, &bytes[..bytes.len().min(15)], DecoderOptions::NONE).decode();
    (!insn.is_invalid()).then_some(insn.len() as u8)
}

fn check_length(bytes: &[u8]) {
    for size in SIZES {
        assert_eq!(length(bytes, size), reference(bytes, size), "{bytes:02x?} {size:?}");
    }
}

#[test]
fn every_short_opcode_has_the_decoders_length() {
    for first in 0..=255u8 {
        for second in 0..=255u8 {
            for third in [0x00, 0x20, 0x90, 0xa2, 0xc0, 0xc1, 0xc8, 0xd1, 0xd9, 0xe0, 0xf9] {
                check_length(&[first, second, third, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
            }
        }
    }
}

#[test]
fn every_two_byte_opcode_after_prefixes_has_the_decoders_length() {
    let prefixes: [&[u8]; 10] = [
        &[],
        &[0x66],
        &[0x48],
        &[0x44],
        &[0x66, 0x48],
        &[0x66, 0x4c],
        &[0x48, 0x66],
        &[0x66, 0x66],
        &[0xf3],
        &[0xf0],
    ];
    for prefix in prefixes {
        for opcode in 0..=255u8 {
            for modrm in 0..=255u8 {
                let mut bytes = prefix.to_vec();
                bytes.extend_from_slice(&[0x0f, opcode, modrm, 1, 2, 3, 4, 5, 6]);
                check_length(&bytes);
            }
        }
    }
}

#[test]
fn the_commonest_exits_have_their_lengths() {
    let cases: [(&[u8], u8); 14] = [
        (&[0x0f, 0xa2], 2),
        (&[0x0f, 0x30], 2),
        (&[0x0f, 0x32], 2),
        (&[0x0f, 0x01, 0xd9], 3),
        (&[0x0f, 0x01, 0xc1], 3),
        (&[0x0f, 0x09], 2),
        (&[0x0f, 0x08], 2),
        (&[0xf4], 1),
        (&[0x0f, 0x01, 0xd1], 3),
        (&[0xf3, 0x90], 2),
        (&[0x0f, 0x20, 0xc0], 3),
        (&[0x44, 0x0f, 0x22, 0xc0], 4),
        (&[0x0f, 0x06], 2),
        (&[0x66, 0xef], 2),
    ];
    for (bytes, expected) in cases {
        assert_eq!(length(bytes, CodeSize::Bits64), Some(expected), "{bytes:02x?}");
    }
}

#[test]
fn bytes_that_end_early_ask_for_more() {
    let mov = [0x48, 0xc7, 0x83, 1, 2, 3, 4, 5, 6, 7, 8];
    for end in 0..mov.len() {
        assert_eq!(decode(&mov[..end], CodeSize::Bits64).err(), Some(DecodeError::Truncated));
        assert_eq!(length(&mov[..end], CodeSize::Bits64), None);
    }
    assert_eq!(length(&mov, CodeSize::Bits64), Some(11));
}

#[test]
fn more_than_fifteen_bytes_are_too_long() {
    let mut bytes = [0x66u8; 20];
    bytes[14] = 0x8b;
    assert_eq!(decode(&bytes, CodeSize::Bits32).err(), Some(DecodeError::TooLong));
}

#[test]
fn lock_where_it_may_not_stand_is_invalid() {
    let illegal: [&[u8]; 5] = [
        &[0xf0, 0x89, 0x03],       // lock mov [rbx], eax
        &[0xf0, 0x01, 0xc3],       // lock add ebx, eax
        &[0xf0, 0x03, 0x03],       // lock add eax, [rbx]
        &[0xf0, 0x39, 0x03],       // lock cmp [rbx], eax
        &[0xf0, 0x0f, 0xa3, 0x03], // lock bt [rbx], eax
    ];
    for bytes in illegal {
        assert_eq!(decode(bytes, CodeSize::Bits64).err(), Some(DecodeError::Invalid));
    }
    assert!(decode(&[0xf0, 0x01, 0x03], CodeSize::Bits64).is_ok());
}

fn simple(bytes: &[u8]) -> Option<SimpleMmio> {
    decode(bytes, CodeSize::Bits64).expect("decodes").simple_mmio()
}

const fn reg(index: u8, size: u8) -> RegRef {
    RegRef { index, size, high8: false }
}

#[test]
fn the_simplest_accesses_are_recognised() {
    use SimpleMmio::{Load, StoreImm, StoreReg};
    let load = |size, dest, extend| Some(Load { size, dest, extend });
    assert_eq!(simple(&[0x8b, 0x03]), load(4, reg(0, 4), Extend::None));
    assert_eq!(simple(&[0x4c, 0x8b, 0x23]), load(8, reg(12, 8), Extend::None));
    let ah = RegRef { index: 0, size: 1, high8: true };
    assert_eq!(simple(&[0x8a, 0x23]), load(1, ah, Extend::None));
    assert_eq!(simple(&[0x0f, 0xb6, 0x0b]), load(1, reg(1, 4), Extend::Zero));
    assert_eq!(simple(&[0x48, 0x0f, 0xbf, 0x0b]), load(2, reg(1, 8), Extend::Sign));
    assert_eq!(simple(&[0x48, 0x63, 0x0b]), load(4, reg(1, 8), Extend::Sign));
    assert_eq!(simple(&[0x89, 0x0b]), Some(StoreReg { size: 4, src: reg(1, 4) }));
    assert_eq!(simple(&[0x40, 0x88, 0x33]), Some(StoreReg { size: 1, src: reg(6, 1) }));
    assert_eq!(simple(&[0xc6, 0x03, 0x81]), Some(StoreImm { size: 1, value: 0x81 }));
    assert_eq!(
        simple(&[0x48, 0xc7, 0x03, 0xfe, 0xff, 0xff, 0xff]),
        Some(StoreImm { size: 8, value: -2i64 as u64 })
    );
    // moffs
    assert_eq!(simple(&[0xa1, 0, 0, 0, 0, 0, 0, 0, 0]), load(4, reg(0, 4), Extend::None));
}

#[test]
fn other_accesses_are_not_simple() {
    let others: [&[u8]; 9] = [
        &[0x01, 0x03],             // add [rbx], eax
        &[0x87, 0x03],             // xchg [rbx], eax
        &[0xa4],                   // movsb
        &[0x8e, 0x03],             // mov es, [rbx]
        &[0x8c, 0x03],             // mov [rbx], es
        &[0x89, 0xc3],             // mov ebx, eax
        &[0x0f, 0x20, 0xc0],       // mov rax, cr0
        &[0x0f, 0xb6, 0xc3],       // movzx eax, bl
        &[0x0f, 0x38, 0xf0, 0x03], // movbe eax, [rbx]
    ];
    for bytes in others {
        assert_eq!(simple(bytes), None, "{bytes:02x?}");
    }
}

#[test]
fn a_loaded_value_fills_its_register_as_the_size_demands() {
    let load = |size, dest, extend| SimpleMmio::Load { size, dest, extend };
    let old = 0x1111_2222_3333_4444;
    let loaded = |simple: SimpleMmio, value| simple.loaded(old, value).unwrap();
    assert_eq!(loaded(load(1, reg(0, 1), Extend::None), 0xff), 0x1111_2222_3333_44ff);
    let ah = RegRef { index: 0, size: 1, high8: true };
    assert_eq!(loaded(load(1, ah, Extend::None), 0xff), 0x1111_2222_3333_ff44);
    assert_eq!(loaded(load(2, reg(0, 2), Extend::None), 0xffff), 0x1111_2222_3333_ffff);
    assert_eq!(loaded(load(4, reg(0, 4), Extend::None), 0x8000_0000), 0x8000_0000);
    assert_eq!(loaded(load(1, reg(0, 4), Extend::Sign), 0x80), 0xffff_ff80);
    assert_eq!(loaded(load(1, reg(0, 2), Extend::Sign), 0x80), 0x1111_2222_3333_ff80);
    assert_eq!(loaded(load(4, reg(0, 8), Extend::Sign), 0x8000_0000), 0xffff_ffff_8000_0000);
    assert_eq!(SimpleMmio::StoreImm { size: 4, value: 0 }.loaded(0, 0), None);
}

#[test]
fn a_decode_cache_is_small() {
    assert!(size_of::<Decoded>() <= 72);
    assert!(size_of::<DecodeCache>() <= 1024);
}

#[test]
fn moves_of_control_and_debug_registers_name_their_registers() {
    let decoded = |bytes: &[u8], size| {
        system_move(bytes, size).map(|m| (m.length, m.debug, m.register, m.gpr, m.write))
    };
    let long = CodeSize::Bits64;
    assert_eq!(decoded(&[0x0f, 0x22, 0xc0], long), Some((3, false, 0, 0, true)));
    assert_eq!(decoded(&[0x0f, 0x20, 0xe1], long), Some((3, false, 4, 1, false)));
    assert_eq!(decoded(&[0x45, 0x0f, 0x22, 0xc3], long), Some((4, false, 8, 11, true)));
    assert_eq!(decoded(&[0x0f, 0x23, 0xfa], long), Some((3, true, 7, 2, true)));
    assert_eq!(
        decoded(&[0x66, 0xf0, 0x0f, 0x20, 0xc0], CodeSize::Bits32),
        Some((5, false, 8, 0, false))
    );
    assert_eq!(decoded(&[0x44, 0x0f, 0x20, 0xc0], CodeSize::Bits32), None);
    assert_eq!(decoded(&[0x0f, 0x24, 0xc0], long), None);
    assert_eq!(decoded(&[0x0f, 0x20], long), None);
    assert_eq!(decoded(&[0x66; 20], long), None);
}

#[test]
fn the_cache_tells_code_sizes_and_byte_counts_apart() {
    warm_up();
    let mut cache = DecodeCache::new();
    // 48 8b 03: mov rax, [rbx] in 64-bit mode, dec eax elsewhere.
    let bytes = [0x48, 0x8b, 0x03];
    assert_eq!(cache.get(Fetched::new(&bytes, CodeSize::Bits64)).unwrap().len(), 3);
    assert_eq!(cache.get(Fetched::new(&bytes, CodeSize::Bits32)).unwrap().len(), 1);
    let short = Fetched::new(&bytes[..2], CodeSize::Bits64);
    assert_eq!(cache.get(short).err(), Some(DecodeError::Truncated));
    // The same prefix with other bytes behind is another key, with zeros too.
    let padded = Fetched::new(&[0x48, 0x8b, 0x03, 0], CodeSize::Bits64);
    assert_ne!(padded, Fetched::new(&bytes, CodeSize::Bits64));
    assert_eq!(cache.get(padded).unwrap().len(), 3);
}

#[test]
fn the_cache_remembers_what_it_decoded() {
    let mut cache = DecodeCache::new();
    let key = Fetched::new(&[0x89, 0x0b], CodeSize::Bits64);
    assert!(cache.lookup(key).is_none());
    cache.get(key).unwrap();
    assert_eq!(cache.lookup(key).map(Decoded::len), Some(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_bytes_have_the_decoders_length(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
        check_length(&bytes);
    }

    #[test]
    fn system_moves_agree_with_the_decoder(
        prefix in prop::collection::vec(
            prop::sample::select(vec![0x66u8, 0x67, 0xf2, 0xf3, 0x3e, 0x48, 0x44, 0x41, 0x45]),
            0..4,
        ),
        opcode in 0x1eu8..0x26,
        modrm: u8,
        which in 0usize..3,
    ) {
        let mut bytes = prefix;
        bytes.extend_from_slice(&[0x0f, opcode, modrm, 0, 0, 0, 0, 0]);
        let size = SIZES[which];
        let bitness = [16, 32, 64][which];
        let insn = Decoder::new(bitness, &bytes, DecoderOptions::NONE).decode();
        let numbered = |register: iced_x86::Register| {
            let system = register.is_cr() || register.is_dr();
            system.then(|| (register.is_dr(), register.number() as u8))
        };
        let expected = numbered(insn.op0_register()).map(|r| (r, insn.op1_register(), true))
            .or(numbered(insn.op1_register()).map(|r| (r, insn.op0_register(), false)));
        if let (Some((system, gpr, write)), false) = (expected, insn.is_invalid()) {
            let found = system_move(&bytes, size).expect("a move of a system register");
            let first = bytes.first_chunk().map(|first| u64::from_le_bytes(*first));
            let common = first.and_then(|code| common_system_move(code, size));
            prop_assert!(common.is_none_or(|common| common == found));
            let rex = size == CodeSize::Bits64 && bytes[0] & 0xf0 == 0x40;
            prop_assert_eq!(common.is_some(), bytes[usize::from(rex)] == 0x0f);
            prop_assert_eq!((found.debug, found.register), system);
            prop_assert_eq!(usize::from(found.gpr), gpr.number());
            prop_assert_eq!(found.write, write);
            prop_assert_eq!(usize::from(found.length), insn.len());
        } else if !insn.is_invalid() {
            prop_assert_eq!(system_move(&bytes, size), None);
        }
    }

    #[test]
    fn the_cache_answers_as_the_decoder_does(
        streams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..18), 1..40),
        order in prop::collection::vec((any::<prop::sample::Index>(), 0usize..3), 1..80),
    ) {
        let mut cache = DecodeCache::new();
        for (index, size) in order {
            let (bytes, size) = (index.get(&streams), SIZES[size]);
            let cached = cache.get(Fetched::new(bytes, size)).map(|d| (d.len(), d.simple_mmio()));
            let plain = decode(bytes, size).map(|d| (d.len(), d.simple_mmio()));
            prop_assert_eq!(cached, plain);
        }
    }

    #[test]
    fn words_and_slices_make_the_same_key(bytes in any::<[u8; 16]>(), count in 0u8..20) {
        let from_words = Fetched::from_words(u128::from_le_bytes(bytes), count, CodeSize::Bits64);
        let slice = &bytes[..usize::from(count).min(15)];
        prop_assert_eq!(from_words, Fetched::new(slice, CodeSize::Bits64));
    }
}

#[test]
fn data_accesses_are_those_that_nobody_can_intercept() {
    let is_data = |bytes: &[u8]| {
        let mut whole = [0; 15];
        whole[..bytes.len()].copy_from_slice(bytes);
        decode(&whole, CodeSize::Bits64).unwrap().is_data_access()
    };
    for data in [
        // MOV, STOSB, ADD, CMOVE, SETE, LOCK CMPXCHG, PUSH, MOVZX, MOVUPS, JMP, MOVSQ.
        &[0x88, 0x07][..],
        &[0xaa],
        &[0x01, 0x07],
        &[0x0f, 0x44, 0x07],
        &[0x0f, 0x94, 0x07],
        &[0xf0, 0x0f, 0xb1, 0x07],
        &[0xff, 0x37],
        &[0x0f, 0xb6, 0x07],
        &[0x0f, 0x11, 0x07],
        &[0xff, 0x27],
        &[0x48, 0xa5],
    ] {
        assert!(is_data(data), "{data:02x?}");
    }
    for other in [
        // OUT, IN, INSB, OUTSB, HLT, CLTS, CPUID, RDMSR, WRMSR, POPF, IRETQ, INT3.
        &[0xee][..],
        &[0xec],
        &[0x6c],
        &[0x6e],
        &[0xf4],
        &[0x0f, 0x06],
        &[0x0f, 0xa2],
        &[0x0f, 0x32],
        &[0x0f, 0x30],
        &[0x9d],
        &[0x48, 0xcf],
        &[0xcc],
        // LGDT, SIDT, LMSW, SMSW, INVLPG, LLDT, STR, INVPCID, MOV to CR3, from DR7, JE.
        &[0x0f, 0x01, 0x17],
        &[0x0f, 0x01, 0x0f],
        &[0x0f, 0x01, 0x37],
        &[0x0f, 0x01, 0x27],
        &[0x0f, 0x01, 0x3f],
        &[0x0f, 0x00, 0x17],
        &[0x0f, 0x00, 0x0f],
        &[0x66, 0x0f, 0x38, 0x82, 0x07],
        &[0x0f, 0x22, 0xd8],
        &[0x0f, 0x21, 0xf8],
        &[0x74, 0x00],
    ] {
        assert!(!is_data(other), "{other:02x?}");
    }
}

#[test]
fn the_control_register_that_an_instruction_accesses() {
    let accesses = |bytes: &[u8]| -> Vec<u8> {
        let mut whole = bytes.to_vec();
        whole.resize(15, 0x90);
        let decoded = decode(&whole, CodeSize::Bits64).unwrap();
        (0..16).filter(|cr| decoded.accesses_control(*cr)).collect()
    };
    assert_eq!(accesses(&[0x0f, 0x06]), [0], "CLTS");
    assert_eq!(accesses(&[0x0f, 0x01, 0xf0]), [0], "LMSW AX");
    assert_eq!(accesses(&[0x0f, 0x01, 0xe0]), [0], "SMSW EAX");
    assert_eq!(accesses(&[0x0f, 0x22, 0xd8]), [3], "MOV CR3, RAX");
    assert_eq!(accesses(&[0x0f, 0x20, 0xe0]), [4], "MOV RAX, CR4");
    assert_eq!(accesses(&[0x44, 0x0f, 0x22, 0xc0]), [8], "MOV CR8, RAX");
    assert_eq!(accesses(&[0x0f, 0x22, 0xc0]), [0], "MOV CR0, RAX");
    assert_eq!(accesses(&[0x48, 0x89, 0xd8]), [0; 0], "MOV RAX, RBX");
    assert_eq!(accesses(&[0x0f, 0x23, 0xf8]), [0; 0], "MOV DR7, RAX");
}
