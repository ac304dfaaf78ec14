//! Tables for a guest's guest, against the model and the reference walker of `crates/mmu/tests/nested`.

use crate::bytes::Bytes;
use crate::section;

#[path = "../../crates/mmu/tests/nested/entries.rs"]
mod entries;
#[path = "../../crates/mmu/tests/nested/hardware.rs"]
mod hardware;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/mmu/tests/nested/machine.rs"]
mod machine;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/mmu/tests/nested/reference.rs"]
mod reference;
#[path = "../../crates/mmu/tests/nested/run.rs"]
mod run;

use machine::LARGE;
use reference::{Apic, Kind};
use run::{Op, Run};

fn op(bytes: &mut Bytes<'_>) -> Op {
    use Op::*;
    let n = bytes.u8();
    match n % 72 {
        0..16 => Edit(bytes.u8(), bytes.u8(), bytes.u16(), bytes.u16()),
        16..24 => Tweak(bytes.u8(), bytes.u8(), bytes.u8()),
        24..48 => Access(bytes.u8(), bytes.u8(), bytes.u8()),
        48..50 => Walk(bytes.u8(), bytes.u8(), bytes.u8()),
        50..54 => Enter(bytes.u8(), bytes.u8()),
        54..57 => Flush(bytes.u8()),
        57..59 => FlushOf(bytes.u8(), bytes.u8()),
        59..61 => Withdraw(bytes.u8()),
        61 => WithdrawLarge(bytes.u8()),
        62..64 => Migrate(bytes.u8(), bytes.u8()),
        64..66 => WriteProtect(bytes.u8()),
        66 => ToggleSlot(bytes.bool()),
        67 => ToggleRom(bytes.u8()),
        68 => Age(bytes.u8()),
        69 => Limit(bytes.u8()),
        71 => Serve(bytes.u8(), bytes.u8(), bytes.u8(), bytes.u16(), bytes.u16()),
        _ => Release(bytes.u8()),
    }
}

fn kind(bytes: &mut Bytes<'_>) -> Kind {
    let [which, bits, width, place] = bytes.take();
    let flag = |n: u8| bits >> n & 1 != 0;
    let width = [36, 40, 48, 52][usize::from(width & 3)];
    let (five, nx, gbpages, amd) = (flag(0), flag(1), flag(2), flag(3));
    match which % 4 {
        0 => Kind::Npt { five, nx, gbpages, amd, width, pae: None },
        1 => {
            let pae = Some(u64::from(place & 127) << 5);
            Kind::Npt { five: false, nx, gbpages: true, amd: true, width: 40, pae }
        }
        _ => {
            let frames = [16, 30, 31, LARGE, LARGE + 7, LARGE + 16, LARGE + 513, 100, 0xffff_fffe];
            let frame = frames.get(usize::from(place & 15)).copied();
            let flat = flag(4) && flag(5) && frame.is_some();
            let apic = Apic { frame, flat };
            let flags = five && !flat;
            Kind::Ept { flags, execute_only: nx, pages_2m: gbpages, pages_1g: amd, width, apic }
        }
    }
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let kind = kind(bytes);
    let bits = bytes.u8();
    let mut ops = Vec::new();
    while !bytes.is_empty() && ops.len() < 250 {
        ops.push(op(bytes));
    }
    Run::new(kind, bits & 1 != 0, bits & 2 != 0).go(&ops);
}
