//! Layouts of real CPUs, and properties that hold for all sets of components.

use gannet_xstate::{Component, Form, LEGACY_AND_HEADER, Layout, supported_xcr0, xcr0_valid};
use proptest::prelude::*;
use x86::Xcr0;

/// Leaf 0xD of a CPU: XCR0 mask, XSS mask, and (index, size, offset, flags) per component.
struct Cpu {
    xcr0: u64,
    xss: u64,
    subleaf1: u32,
    components: &'static [(u32, u32, u32, u32)],
}

impl Cpu {
    fn cpuid(&self) -> impl FnMut(u32, u32) -> [u32; 4] + '_ {
        |leaf, subleaf| {
            assert_eq!(leaf, 0xd);
            match subleaf {
                0 => [self.xcr0 as u32, 0, 0, (self.xcr0 >> 32) as u32],
                1 => [self.subleaf1, 0, self.xss as u32, (self.xss >> 32) as u32],
                n => self
                    .components
                    .iter()
                    .find(|c| c.0 == n)
                    .map_or([0; 4], |&(_, size, offset, flags)| [size, offset, flags, 0]),
            }
        }
    }

    fn layout(&self) -> Layout {
        Layout::read(self.cpuid())
    }
}

const SKYLAKE_SP: Cpu = Cpu {
    xcr0: 0x2ff,
    xss: 0x100,
    subleaf1: 0xf,
    components: &[
        (2, 256, 576, 0),
        (3, 64, 960, 0),
        (4, 64, 1024, 0),
        (5, 64, 1088, 0),
        (6, 512, 1152, 0),
        (7, 1024, 1664, 0),
        (8, 128, 0, 1),
        (9, 8, 2688, 0),
    ],
};

const SAPPHIRE_RAPIDS: Cpu = Cpu {
    xcr0: 0x602e7,
    xss: 0x1900,
    subleaf1: 0x1f,
    components: &[
        (2, 256, 576, 0),
        (5, 64, 1088, 0),
        (6, 512, 1152, 0),
        (7, 1024, 1664, 0),
        (8, 128, 0, 1),
        (9, 8, 2688, 0),
        (11, 16, 0, 1),
        (12, 24, 0, 1),
        (17, 64, 2752, 2),
        (18, 8192, 2816, 6),
    ],
};

const MILAN: Cpu = Cpu {
    xcr0: 0x207,
    xss: 0x1800,
    subleaf1: 0xf,
    components: &[(2, 256, 576, 0), (9, 8, 2432, 0), (11, 16, 0, 1), (12, 24, 0, 1)],
};

const ROME: Cpu = Cpu { xcr0: 0x7, xss: 0, subleaf1: 0xf, components: &[(2, 256, 576, 0)] };

const CPUS: [&Cpu; 4] = [&SKYLAKE_SP, &SAPPHIRE_RAPIDS, &MILAN, &ROME];

#[test]
fn sizes_are_those_that_the_cpus_report() {
    let skylake = SKYLAKE_SP.layout();
    assert_eq!(skylake.required_size(0x3, Form::Standard), 576);
    assert_eq!(skylake.required_size(0x7, Form::Standard), 832);
    assert_eq!(skylake.required_size(0xe7, Form::Standard), 2688);
    assert_eq!(skylake.required_size(0x2ff, Form::Standard), 2696);
    assert_eq!(skylake.required_size(0x2e7, Form::Compacted), 576 + 256 + 64 + 512 + 1024 + 8);
    let sapphire = SAPPHIRE_RAPIDS.layout();
    assert_eq!(sapphire.required_size(0x602e7, Form::Standard), 11008);
    assert_eq!(MILAN.layout().required_size(0x207, Form::Standard), 2440);
    assert_eq!(ROME.layout().required_size(0x7, Form::Standard), 832);
}

#[test]
fn aligned_components_start_at_a_cache_line_when_compacted() {
    let layout = SAPPHIRE_RAPIDS.layout();
    // PKRU ends at 2440; the tile configuration is aligned, to 2496.
    let components = 0x602e7;
    assert_eq!(layout.offset_of(9, components, Form::Compacted), Some(2432));
    assert_eq!(layout.offset_of(17, components, Form::Compacted), Some(2496));
    assert_eq!(layout.offset_of(18, components, Form::Compacted), Some(2560));
    assert_eq!(layout.required_size(components, Form::Compacted), 2560 + 8192);
}

#[test]
fn supervisor_components_have_a_place_only_when_compacted() {
    let layout = SKYLAKE_SP.layout();
    assert_eq!(layout.offset_of(8, 0x3ff, Form::Standard), None);
    assert_eq!(layout.offset_of(8, 0x103, Form::Compacted), Some(576));
    assert_eq!(layout.required_size(0x103, Form::Compacted), 704);
    assert!(layout.component(8).is_some_and(Component::is_supervisor));
}

#[test]
fn supervisor_mask_is_ignored_without_xsaves() {
    let cpu = Cpu { xcr0: 7, xss: 0x100, subleaf1: 1, components: &[(2, 256, 576, 0)] };
    assert_eq!(cpu.layout().supervisor_components(), 0);
}

#[test]
fn the_leaf_is_read_once_per_component() {
    let mut calls = 0;
    let mut cpuid = SKYLAKE_SP.cpuid();
    let layout = Layout::read(|leaf, subleaf| {
        calls += 1;
        cpuid(leaf, subleaf)
    });
    assert_eq!(calls, 2 + 8);
    assert_eq!(layout.user_components(), 0x2ff);
}

#[test]
fn the_user_buffer_is_never_smaller_than_a_page() {
    assert_eq!(ROME.layout().uabi_size(Xcr0::from_bits_retain(7)), 4096);
    assert_eq!(SAPPHIRE_RAPIDS.layout().uabi_size(Xcr0::from_bits_retain(0x602e7)), 11008);
}

#[test]
fn a_cpu_without_xsave_needs_the_legacy_region() {
    assert_eq!(Layout::EMPTY.required_size(u64::MAX, Form::Standard), LEGACY_AND_HEADER);
    assert_eq!(Layout::EMPTY.required_size(u64::MAX, Form::Compacted), LEGACY_AND_HEADER);
}

fn form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Standard), Just(Form::Compacted)]
}

proptest! {
    #[test]
    fn the_table_answers_what_cpuid_would(mask: u64, form in form(), cpu in 0..4usize) {
        let cpu = CPUS[cpu];
        let uncached = Layout::required_size_uncached(mask, form, cpu.cpuid());
        prop_assert_eq!(cpu.layout().required_size(mask, form), uncached);
    }

    #[test]
    fn more_components_never_need_less(a: u64, b: u64, form in form(), cpu in 0..4usize) {
        let layout = CPUS[cpu].layout();
        prop_assert!(layout.required_size(a, form) <= layout.required_size(a | b, form));
    }

    #[test]
    fn components_never_overlap_when_compacted(mask: u64, cpu in 0..4usize) {
        let layout = CPUS[cpu].layout();
        let mut end = LEGACY_AND_HEADER;
        for index in 2..63 {
            if let Some(offset) = layout.offset_of(index, mask, Form::Compacted) {
                prop_assert!(offset >= end);
                end = offset + layout.component(index).map_or(0, |c| c.size);
            }
        }
        prop_assert_eq!(end, layout.required_size(mask, Form::Compacted));
    }

    #[test]
    fn hostile_answers_of_cpuid_do_not_panic(
        answers in proptest::collection::vec(any::<[u32; 4]>(), 64),
        mask: u64,
        form in form(),
        index: u32,
    ) {
        let layout = Layout::read(|_, subleaf| answers[subleaf as usize]);
        let _ = layout.required_size(mask, form);
        let _ = layout.offset_of(index, mask, form);
        let _ = layout.component(index);
    }

    #[test]
    fn what_is_offered_is_itself_a_valid_value(host: u64) {
        let offered = supported_xcr0(host);
        prop_assert!(offered.is_empty() || xcr0_valid(offered.bits(), offered));
        prop_assert_eq!(offered.bits() & !host, 0);
    }
}
