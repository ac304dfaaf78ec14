//! Random guests, see `run`.

use proptest::prelude::*;

use super::run::{Mode, Op, run};

fn op() -> impl Strategy<Value = Op> {
    use Op::*;
    prop_oneof![
        16 => any::<(u8, u8, u16, u16)>().prop_map(|(a, b, c, d)| Edit(a, b, c, d)),
        8 => any::<(u8, u8, u8)>().prop_map(|(a, b, c)| Tweak(a, b, c)),
        24 => any::<(u8, u8, u8)>().prop_map(|(a, b, c)| Access(a, b, c)),
        4 => any::<(u8, u8, u16, u16)>().prop_map(|(a, b, c, d)| Store(a, b, c, d)),
        4 => any::<(u8, u8, u8, bool)>()
            .prop_map(|(vcpu, cr3, bits, flush)| Switch { vcpu, cr3, bits, flush }),
        4 => any::<(u8, u8)>().prop_map(|(a, b)| Invlpg(a, b)),
        3 => any::<u8>().prop_map(Flush),
        2 => any::<u8>().prop_map(Withdraw),
        1 => any::<u8>().prop_map(WithdrawLarge),
        2 => any::<(u8, u8)>().prop_map(|(a, b)| Migrate(a, b)),
        2 => any::<u8>().prop_map(WriteProtect),
        1 => any::<bool>().prop_map(ToggleSlot),
        1 => any::<u8>().prop_map(ToggleRom),
        3 => Just(Settle),
        1 => any::<u8>().prop_map(Limit),
        1 => any::<u8>().prop_map(Release),
    ]
}

/// A few dozen guests each; PROPTEST_CASES for more.
fn config() -> ProptestConfig {
    let config = ProptestConfig { max_shrink_iters: 4000, ..ProptestConfig::default() };
    let many = std::env::var_os("PROPTEST_CASES").is_some();
    ProptestConfig { cases: if many { config.cases } else { 48 }, ..config }
}

macro_rules! random_guests {
    ($($name:ident: $mode:expr;)*) => {
        proptest! {
            #![proptest_config(config())]
            $(#[test]
            fn $name(ops in proptest::collection::vec(op(), 1..160)) {
                run($mode, &ops);
            })*
        }
    };
}
random_guests! {
    a_four_level_guest_gets_what_its_tables_and_the_host_allow: Mode::Level4;
    a_five_level_guest_gets_what_its_tables_and_the_host_allow: Mode::Level5;
    a_pae_guest_gets_what_its_tables_and_the_host_allow: Mode::Pae;
    a_guest_with_32_bit_paging_gets_what_its_tables_and_the_host_allow: Mode::Legacy;
    a_guest_without_paging_gets_what_the_host_allows: Mode::Off;
}
