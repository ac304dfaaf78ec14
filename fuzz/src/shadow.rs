//! Shadow pages under random guests and a host that takes frames back, against the model of `crates/mmu/tests/shadow`.

use crate::bytes::Bytes;
use crate::section;

#[path = "../../crates/mmu/tests/shadow/hardware.rs"]
mod hardware;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/mmu/tests/shadow/machine.rs"]
mod machine;
#[path = "../../crates/mmu/tests/shadow/run.rs"]
mod run;

use run::{Mode, Op};

fn op(bytes: &mut Bytes<'_>) -> Op {
    use Op::*;
    let n = bytes.u8();
    match n % 78 {
        0..16 => Edit(bytes.u8(), bytes.u8(), bytes.u16(), bytes.u16()),
        16..24 => Tweak(bytes.u8(), bytes.u8(), bytes.u8()),
        24..48 => Access(bytes.u8(), bytes.u8(), bytes.u8()),
        48..52 => Store(bytes.u8(), bytes.u8(), bytes.u16(), bytes.u16()),
        52..56 => {
            Switch { vcpu: bytes.u8(), cr3: bytes.u8(), bits: bytes.u8(), flush: bytes.bool() }
        }
        56..60 => Invlpg(bytes.u8(), bytes.u8()),
        60..63 => Flush(bytes.u8()),
        63..65 => Withdraw(bytes.u8()),
        65 => WithdrawLarge(bytes.u8()),
        66..68 => Migrate(bytes.u8(), bytes.u8()),
        68..70 => WriteProtect(bytes.u8()),
        70 => ToggleSlot(bytes.bool()),
        71 => ToggleRom(bytes.u8()),
        72..75 => Settle,
        75 => Limit(bytes.u8()),
        _ => Release(bytes.u8()),
    }
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let modes = [Mode::Level4, Mode::Level5, Mode::Pae, Mode::Legacy, Mode::Off];
    let mode = bytes.of(&modes);
    let mut ops = Vec::new();
    while !bytes.is_empty() && ops.len() < 200 {
        ops.push(op(bytes));
    }
    run::run(mode, &ops);
}
