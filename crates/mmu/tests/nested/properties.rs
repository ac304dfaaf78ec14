//! Random hypervisors, see `run`.

use proptest::prelude::*;

use super::agree::kind;
use super::reference::Kind;
use super::run::{Op, Run};

fn op() -> impl Strategy<Value = Op> {
    use Op::*;
    prop_oneof![
        16 => any::<(u8, u8, u16, u16)>().prop_map(|(a, b, c, d)| Edit(a, b, c, d)),
        8 => any::<(u8, u8, u8)>().prop_map(|(a, b, c)| Tweak(a, b, c)),
        24 => any::<(u8, u8, u8)>().prop_map(|(a, b, c)| Access(a, b, c)),
        2 => any::<(u8, u8, u8)>().prop_map(|(a, b, c)| Walk(a, b, c)),
        8 => any::<(u8, u8, u8, u16, u16)>().prop_map(|(a, b, c, d, e)| Serve(a, b, c, d, e)),
        4 => any::<(u8, u8)>().prop_map(|(a, b)| Enter(a, b)),
        3 => any::<u8>().prop_map(Flush),
        2 => any::<(u8, u8)>().prop_map(|(a, b)| FlushOf(a, b)),
        2 => any::<u8>().prop_map(Withdraw),
        1 => any::<u8>().prop_map(WithdrawLarge),
        2 => any::<(u8, u8)>().prop_map(|(a, b)| Migrate(a, b)),
        2 => any::<u8>().prop_map(WriteProtect),
        1 => any::<bool>().prop_map(ToggleSlot),
        1 => any::<u8>().prop_map(ToggleRom),
        1 => any::<u8>().prop_map(Age),
        1 => any::<u8>().prop_map(Limit),
        1 => any::<u8>().prop_map(Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4000, ..ProptestConfig::with_cases(100) })]
    #[test]
    fn shadows_are_as_stale_as_a_tlb_and_no_staler(
        kind in kind(),
        more in any::<bool>(),
        logs in any::<bool>(),
        ops in prop::collection::vec(op(), 1..250),
    ) {
        Run::new(kind, more, logs).go(&ops);
    }

    /// The shadows of an L1 in PAE paging, whose four tables lie anywhere in their page.
    #[test]
    fn shadows_of_pae_tables_are_no_staler(
        [nx, more, logs] in any::<[bool; 3]>(),
        place in 0u64..128,
        ops in prop::collection::vec(op(), 1..250),
    ) {
        let pae = Some(place << 5);
        let kind = Kind::Npt { five: false, nx, gbpages: true, amd: true, width: 40, pae };
        Run::new(kind, more, logs).go(&ops);
    }
}
