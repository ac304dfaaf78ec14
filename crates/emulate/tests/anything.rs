//! Whatever the bytes and the registers: the emulator does not panic, keeps its promises about
//! accesses, and ends.

mod machine;

use gannet_emulate::{CodeSize, Outcome, Stop, decode, emulate};
use machine::TestMachine;
use proptest::prelude::*;

/// A machine whose whole address space answers: RAM where there is some, a device elsewhere.
fn everywhere(size: CodeSize, gpr: [u64; 16], rflags: u64, cr0: u64) -> TestMachine {
    let mut m = TestMachine::new(size, 0, 0x4000);
    m.mmio = 0x4000..u64::MAX;
    m.gpr = gpr;
    m.rflags = rflags;
    m.cr0 = cr0;
    m.absent = 0x3000..0x3800;
    m
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60_000))]

    #[test]
    fn any_instruction_ends(
        bytes in prop::collection::vec(any::<u8>(), 15),
        prefix in prop::sample::select(vec![
            vec![], vec![0xf0], vec![0xf3], vec![0x66], vec![0x48], vec![0x0f], vec![0x66, 0x0f],
            vec![0x67], vec![0xf3, 0x48], vec![0xf0, 0x0f],
        ]),
        size in prop::sample::select(vec![CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64]),
        gpr in prop::array::uniform16(prop_oneof![any::<u64>(), 0u64..0x4100]),
        rflags in any::<u64>(),
        protected in any::<bool>(),
    ) {
        let mut code = prefix;
        code.extend_from_slice(&bytes);
        let Ok(decoded) = decode(&code, size) else { return Ok(()) };
        let mut m = everywhere(size, gpr, rflags, u64::from(protected));
        for _ in 0..300 {
            m.start();
            match emulate(&mut m, &decoded) {
                Err(Stop::NeedUser) => m.user_space(),
                Ok(done) if done.outcome == Outcome::Continue => m.end(done),
                Ok(done) => {
                    m.end(done);
                    return Ok(());
                }
                Err(_) => return Ok(()),
            }
        }
        // Only a repeated string instruction may still be at it.
        prop_assert!(code.contains(&0xf2) || code.contains(&0xf3));
    }
}
