//! Any bytes as an instruction, on any registers: the emulator ends, keeps what it promises of its accesses, and does not
//! panic; its length is the decoder's own.

use gannet_emulate::{CodeSize, Outcome, Stop, decode, emulate, length};
use iced_x86::{Decoder, DecoderOptions};

use crate::bytes::Bytes;
use crate::emulate::machine::TestMachine;

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let [which, bits] = bytes.take();
    let code = bytes.take::<15>();
    let (size, width) = [(CodeSize::Bits16, 16), (CodeSize::Bits32, 32), (CodeSize::Bits64, 64)]
        [usize::from(which % 3)];
    let Ok(decoded) = decode(&code, size) else { return };
    assert_eq!(length(&code, size), Some(decoded.len()), "{code:02x?}");
    let alone = Decoder::new(width, &code, DecoderOptions::NONE).decode();
    if !alone.is_invalid() {
        assert_eq!(usize::from(decoded.len()), alone.len(), "{code:02x?}");
    }
    let mut m = TestMachine::new(size, 0, 0x4000);
    m.mmio = 0x4000..u64::MAX;
    m.absent = 0x3000..0x3800;
    m.cr0 = u64::from(bits & 1);
    m.cpl = if bits & 2 != 0 { 3 } else { 0 };
    m.runs_allowed = bits & 8 == 0;
    m.rflags = bytes.value() | 2;
    for gpr in &mut m.gpr {
        *gpr = if bits & 16 == 0 { bytes.value() } else { u64::from(bytes.u16() & 0x3fff) };
    }
    for _ in 0..300 {
        m.start();
        match emulate(&mut m, &decoded) {
            Err(Stop::NeedUser) => m.user_space(),
            Ok(done) if done.outcome == Outcome::Continue => m.end(done),
            Ok(done) => return m.end(done),
            Err(_) => return,
        }
    }
    // Only a repeated string instruction may still be at it.
    assert!(code.contains(&0xf2) || code.contains(&0xf3), "{code:02x?} does not end");
}
