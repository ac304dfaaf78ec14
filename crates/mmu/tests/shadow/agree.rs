//! The walk in software and the shadow pages read every entry alike.

use gannet_mmu::PagingContext;
use proptest::prelude::*;
use x86::{Cr0, Cr4, Efer};

use super::hardware::Access;
use super::machine::{Machine, Refused, long_mode};

const LONG: Efer = Efer::LME.union(Efer::LMA);
const FULL: u64 = 0x67;
/// The page that is accessed, through entry 0 of each upper table.
const PAGE: u64 = 16;

fn context() -> impl Strategy<Value = PagingContext> {
    let registers = (0usize..5, any::<bool>(), any::<bool>(), any::<bool>());
    let cpu = (any::<bool>(), any::<bool>(), prop::sample::select(vec![0u8, 36, 39, 40, 48, 52]));
    (registers, cpu).prop_map(|((mode, nx, wp, smep), (gbpages, amd, maxphyaddr))| {
        let (mut cr4, mut efer) = [
            (Cr4::empty(), Efer::empty()),
            (Cr4::PSE, Efer::empty()),
            (Cr4::PAE, Efer::empty()),
            (Cr4::PAE, LONG),
            (Cr4::PAE | Cr4::LA57, LONG),
        ][mode];
        cr4.set(Cr4::SMEP, smep);
        efer.set(Efer::NXE, nx);
        let wp = if wp { Cr0::WP } else { Cr0::empty() };
        PagingContext {
            cr0: Cr0::PG | Cr0::PE | wp,
            cr4,
            efer,
            gbpages,
            amd,
            maxphyaddr,
            ..long_mode()
        }
    })
}

/// Frames 1 to 5 hold a table each, as many as the mode has; the last one maps [`PAGE`] at itself. The
/// number of tables.
fn tables(machine: &Machine, context: &PagingContext) -> u64 {
    let count = match (
        context.is_long_mode(),
        context.cr4.contains(Cr4::LA57),
        context.cr4.contains(Cr4::PAE),
    ) {
        (true, five, _) => 4 + u64::from(five),
        (false, _, wide) => 2 + u64::from(wide),
    };
    let narrow = !context.is_long_mode() && !context.cr4.contains(Cr4::PAE);
    for gfn in 1..count {
        // A PDPTE has no rights.
        let flags = if !context.is_long_mode() && count == 3 && gfn == 1 { 1 } else { FULL };
        let entry = (gfn + 1) << 12 | flags;
        if narrow { machine.poke32(gfn, 0, entry as u32) } else { machine.poke(gfn, 0, entry) }
    }
    let leaf = PAGE << 12 | FULL;
    if narrow {
        machine.poke32(count, PAGE as usize, leaf as u32);
    } else {
        machine.poke(count, PAGE as usize, leaf);
    }
    count
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn an_entry_means_the_same_to_the_walk_and_to_shadow_pages(
        context in context(),
        depth in 0u64..5,
        bits in prop::collection::vec(0u32..64, 0..4),
        access in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let machine = Machine::new(1);
        machine.vcpus[0].borrow_mut().context = context;
        let count = tables(&machine, &context);
        let narrow = !context.is_long_mode() && !context.cr4.contains(Cr4::PAE);
        // The PDPTEs are read when CR3 is loaded, and not by a fault.
        let first = if count == 3 { 2 } else { 1 };
        let gfn = first + depth % (count + 1 - first);
        let index = if gfn == count { PAGE } else { 0 } as usize;
        let flips = bits.iter().fold(0, |all, bit| all ^ 1u64 << bit);
        if narrow {
            let at = machine.peek(gfn, index / 2) >> (32 * (index & 1)) ^ flips;
            machine.poke32(gfn, index, at as u32);
        } else {
            machine.poke(gfn, index, machine.peek(gfn, index) ^ flips);
        }
        machine.switch(0, true);
        let (user, write, fetch) = (access.0, access.1, access.2 && !access.1);
        let access = Access { write, fetch, user, ac: false };
        let said = machine.guest(0, PAGE << 12, &access, false);
        match (machine.access(0, PAGE << 12, access), said) {
            (Err(Refused::Guest(fault)), Err(Some(other))) => prop_assert_eq!(fault, other),
            (Err(Refused::NoTable(_)), Err(None)) => {}
            (Err(Refused::Mmio(gpa) | Refused::Emulate(gpa)), Ok(other)) => {
                prop_assert_eq!(gpa, other);
            }
            (Ok(_), Ok(_)) => {}
            (shadow, walk) => prop_assert!(false, "{shadow:?} but {walk:?} in {context:x?}"),
        }
    }
}
